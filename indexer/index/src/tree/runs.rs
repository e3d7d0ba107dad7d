//! All runs, in segments: growing moves no run, so it is fast and never doubles memory.

use std::ops::{Index, IndexMut};

use super::heap::heap;
use super::ids::RunId;
use super::run::Run;

/// Runs of a segment: 64 KiB.
const SEGMENT: usize = if cfg!(test) { 2 } else { 512 };

/// Storage of the runs. A run without blocks is free.
#[derive(Default)]
pub(super) struct RunArena {
    /// All but the last segment are full.
    segments: Vec<Vec<Run>>,
    /// Free runs, the last freed at the end. Those beyond the end are skipped; they are gone before
    /// the runs grow again.
    free: Vec<RunId>,
    free_count: usize,
}

impl RunArena {
    pub(super) fn len(&self) -> usize {
        let full = self.segments.len().saturating_sub(1) * SEGMENT;
        full + self.segments.last().map_or(0, Vec::len)
    }

    pub(super) fn get(&self, index: usize) -> Option<&Run> {
        self.segments.get(index / SEGMENT)?.get(index % SEGMENT)
    }

    /// Runs in use.
    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &Run> {
        let all = self.segments.iter().flatten();
        all.filter(|run| run.len > 0)
    }

    /// Adds a run. The caller appends a block before anything else happens.
    pub(super) fn add(&mut self, run: Run) -> RunId {
        if let Some(id) = self.take_free() {
            self[id.index()] = run;
            return id;
        }
        if self
            .segments
            .last()
            .is_none_or(|last| last.len() == SEGMENT)
        {
            self.segments.push(Vec::with_capacity(SEGMENT));
        }
        let id = RunId(self.len() as u32);
        if let Some(last) = self.segments.last_mut() {
            last.push(run);
        }
        id
    }

    fn take_free(&mut self) -> Option<RunId> {
        while let Some(id) = self.free.pop() {
            if id.index() < self.len() {
                self.free_count -= 1;
                return Some(id);
            }
        }
        None
    }

    /// Frees an empty run.
    pub(super) fn free(&mut self, id: RunId) {
        debug_assert!(self[id.index()].len == 0, "a freed run is empty");
        self.free.push(id);
        self.free_count += 1;
        self.cut();
    }

    /// Moves the last run, which is in use, to a free place. Returns its old and its new id. The
    /// caller corrects what refers to it, and then calls [`Self::cut`].
    pub(super) fn move_last(&mut self) -> Option<(RunId, RunId)> {
        let from = RunId(self.len().checked_sub(1)? as u32);
        let to = self.take_free()?;
        if self.free_count == 0 {
            self.free = Vec::new();
        }
        let last = self.segments.last_mut()?.last_mut()?;
        let run = std::mem::replace(last, Run::new(RunId::NONE, 0, 0));
        self[to.index()] = run;
        self.free_count += 1;
        Some((from, to))
    }

    /// Frees the memory of the free runs at the end.
    pub(super) fn cut(&mut self) {
        while let Some(last) = self.segments.last_mut() {
            while last.pop_if(|run| run.len == 0).is_some() {
                self.free_count -= 1;
            }
            if !last.is_empty() {
                break;
            }
            self.segments.pop();
        }
        if self.segments.is_empty() {
            *self = Self::default();
        }
    }

    pub(super) const fn free_count(&self) -> usize {
        self.free_count
    }

    /// Free runs that are kept while sources come and go: an eighth, and less than a segment.
    pub(super) fn reserve(&self) -> usize {
        (self.len() / 8).max(SEGMENT - 1)
    }

    /// Bytes of the segments and the free list.
    pub(super) fn bytes(&self) -> usize {
        self.segments.len() * heap(SEGMENT * size_of::<Run>())
            + heap(self.free.capacity() * size_of::<RunId>())
    }
}

impl Index<usize> for RunArena {
    type Output = Run;

    fn index(&self, index: usize) -> &Run {
        &self.segments[index / SEGMENT][index % SEGMENT]
    }
}

impl IndexMut<usize> for RunArena {
    fn index_mut(&mut self, index: usize) -> &mut Run {
        &mut self.segments[index / SEGMENT][index % SEGMENT]
    }
}
