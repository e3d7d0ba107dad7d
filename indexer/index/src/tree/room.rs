//! The tree's memory: everything that it keeps, in use or free.
//!
//! Counted incrementally. Lists count with their capacity, allocations with the allocator's
//! overhead. Fragmentation is not included; `indexer/index/tests/memory.rs` measures it, and the
//! fold adds it.

use super::blocks::CHUNK;
use super::ids::RunId;
use super::{SourceHoldings, Tree};

/// Return of free memory without a reserve.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Trim {
    Off,
    /// Begins when the closed sources are freed.
    Requested,
    /// What may still be freed: at first, all that was free at the beginning.
    Left {
        spare_bytes: usize,
        free_runs: usize,
    },
}

impl Tree {
    /// Bytes of all memory that the tree keeps, in use or free.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.blocks.bytes()
            + self.table.bytes()
            + self.runs.bytes()
            + self.heap
            + self.sources.capacity() * size_of::<SourceHoldings>()
    }

    /// Free bytes that the next blocks use before the tree allocates.
    #[must_use]
    pub fn spare_bytes(&self) -> usize {
        self.blocks.spare_bytes()
    }

    /// Approximate upper bound of an image's size.
    #[must_use]
    pub fn image_bytes(&self) -> usize {
        let of_runs = self.runs.len() * 16 + self.holders * 8;
        self.nodes * size_of::<u64>() + of_runs
    }

    /// Relative memory of a source, for comparisons: a pair counts one.
    #[must_use]
    pub fn weight(&self, number: super::SourceNumber) -> u64 {
        // A holder takes about as much as two blocks, an unshared run as much as four.
        let runs = self
            .sources
            .get(number.index())
            .map(|source| source.runs.len() as u64);
        self.digest(number).count + 4 * runs.unwrap_or(0)
    }

    /// Returns true if closed sources are not completely freed.
    #[must_use]
    pub fn is_reclaiming(&self) -> bool {
        !self.closed.is_empty()
    }

    /// [`Self::reclaim`] frees the memory that closed sources leave without a reserve for new blocks,
    /// once: memory that other sources free later is treated as without this call.
    pub const fn trim(&mut self) {
        self.trim = Trim::Requested;
    }

    /// One step of [`Self::trim`]. Returns true while work remains.
    ///
    /// A step with a budget frees a chunk or a run, or is the last one. What it frees is subtracted
    /// from what was free at the beginning. So the number of steps is bounded, also where other
    /// sources free more between two steps than one step can move.
    pub(super) fn trim_step(&mut self, blocks_max: usize) -> bool {
        let (bytes, runs) = (self.blocks.spare_bytes(), self.runs.free_count());
        let (spare_bytes, free_runs) = match self.trim {
            Trim::Left {
                spare_bytes,
                free_runs,
            } => (spare_bytes, free_runs),
            Trim::Off | Trim::Requested => (bytes, runs),
        };
        let less = usize::saturating_sub;
        let is_more = self.compact_to(blocks_max, less(bytes, spare_bytes), less(runs, free_runs));
        self.trim = match is_more {
            true => Trim::Left {
                spare_bytes: less(spare_bytes, less(bytes, self.blocks.spare_bytes())),
                free_runs: less(free_runs, less(runs, self.runs.free_count())),
            },
            false => Trim::Off,
        };
        is_more
    }

    /// Moves about `blocks_max` blocks or links. Frees chunks until at most `spare_max` bytes are
    /// spare, and runs until few are free. Returns true while work remains. Moves one chunk or run
    /// for each freed one at most.
    pub fn compact(&mut self, blocks_max: usize, spare_max: usize) -> bool {
        self.compact_to(blocks_max, spare_max, self.runs.reserve())
    }

    /// [`Self::compact`], with the number of runs that may be free.
    pub(super) fn compact_to(
        &mut self,
        blocks_max: usize,
        spare_max: usize,
        free_runs_max: usize,
    ) -> bool {
        let mut left = blocks_max;
        while self.blocks.spare_bytes() > spare_max {
            if left == 0 {
                return true;
            }
            if let Some(moved) = self.blocks.move_last() {
                let run = &mut self.runs[moved.run.index()];
                run.chunks[moved.index] = moved.to;
                let first = moved.index * CHUNK;
                let used = (run.len as usize - first).min(CHUNK);
                let (_, prefixes) = self.blocks.hashes(moved.to);
                self.table.replace(&prefixes[..used], moved.from, moved.to);
            }
            left = left.saturating_sub(CHUNK);
        }
        if self.runs.free_count() > free_runs_max {
            self.drop_grown();
        }
        while self.runs.free_count() > free_runs_max {
            if left == 0 {
                return true;
            }
            let Some((from, to)) = self.runs.move_last() else {
                break;
            };
            let links = self.relink(from, to);
            self.runs.cut();
            left = left.saturating_sub(links);
        }
        false
    }

    /// Corrects everything that refers to a run which was moved. Returns the number of references.
    fn relink(&mut self, from: RunId, to: RunId) -> usize {
        debug_assert!(
            self.grown.is_empty(),
            "blocks added ahead are removed first"
        );
        let run = &self.runs[to.index()];
        let (parent, first_child) = (run.parent.some(), run.first_child);
        let (next, previous) = (run.next_sibling.some(), run.previous_sibling.some());
        let mut links = run.chunks.len() + run.leads.len() + 1;
        for &chunk in &run.chunks {
            self.blocks.set_owner(chunk, to);
        }
        for (lead, hold) in run.leads.iter().zip(&run.holds) {
            let source = &mut self.sources[lead.source.index()];
            source.runs[hold.slot as usize] = to;
            if let Some(last) = source.last.as_mut().filter(|last| last.run == from) {
                last.run = to;
            }
        }
        if let Some(next) = next {
            self.run_mut(next).previous_sibling = to;
        }
        match (previous, parent) {
            (Some(previous), _) => self.run_mut(previous).next_sibling = to,
            (None, Some(parent)) => self.run_mut(parent).first_child = to,
            (None, None) => self.first_root = to,
        }
        let mut child = first_child.some();
        while let Some(id) = child {
            let run = self.run_mut(id);
            run.parent = to;
            child = run.next_sibling.some();
            links += 1;
        }
        links
    }
}
