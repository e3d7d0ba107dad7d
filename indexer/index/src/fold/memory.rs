//! The memory bound: which sources are set aside, and when they return.
//!
//! The bound covers all memory of the fold, free or in use, and the image of a snapshot in the
//! making. From 15/16 of it on, the largest source is set aside: it is `unknown` immediately, and
//! its memory is freed in steps between records before the bound is reached; at the bound a record
//! waits for it.
//!
//! A source that is set aside is not folded until its next generation, which is requested when
//! there is ample room for it: the smallest source first, one per [`BETWEEN_RETURNS`], and not
//! earlier than its [`SetAsideHistory`](super::set_aside::SetAsideHistory) permits. So a fleet that
//! does not fit causes no loop of images.

use std::time::{Duration, Instant};

use warmroute_proto::Source;
use warmroute_proto::registry::{ResyncReason, WorkerEntry};

use super::source::{Holding, Registration, SourceFold};
use super::{Fold, WorkerRegistration, registration};

/// Blocks freed or moved in one step.
const STEP: usize = 4096;

const BETWEEN_RETURNS: Duration = Duration::from_secs(30);

/// Bytes of a source besides its blocks: an entry of a map that is at least half full, and a short
/// name.
const SOURCE_BYTES: usize = 2 * (size_of::<Source>() + size_of::<SourceFold>()) + 128;
const WORKER_BYTES: usize = 2 * (size_of::<WorkerRegistration>() + size_of::<WorkerEntry>()) + 512;

/// Counters of the memory bound.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MemoryCounters {
    /// Times a source was set aside.
    pub(super) set_aside: u64,
    /// Generations requested because there was room again.
    pub(super) returns: u64,
    /// Bytes of the lists of recent removals, as of the last tick.
    pub(super) removal_bytes: usize,
    last_return: Option<Instant>,
}

impl Fold {
    /// Estimated bytes of the whole fold, in use or free. `indexer/index/tests/memory.rs` compares
    /// it with the resident memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let sources = self.sources.len() * SOURCE_BYTES + self.workers.len() * WORKER_BYTES;
        let kept = self.tree.bytes() + sources + self.memory.removal_bytes;
        // Allocator fragmentation: 9 to 13 % under churn.
        kept + kept / 8
    }

    /// Times a source was set aside, and times one was requested again.
    #[must_use]
    pub const fn set_aside_and_returned(&self) -> (u64, u64) {
        (self.memory.set_aside, self.memory.returns)
    }

    /// Memory limit of a second tree, restored from a snapshot of this many bytes beside this fold;
    /// `None` if there is no room.
    #[must_use]
    pub fn room_for_another(&self, blob_bytes: usize) -> Option<usize> {
        let Some(bytes_max) = self.bytes_max else {
            return Some(usize::MAX);
        };
        let room = early(bytes_max).saturating_sub(self.bytes() + blob_bytes);
        (room >= bytes_max / 4).then_some(room - room / 8)
    }

    /// Memory of the fold and of a snapshot's image, if this replica writes snapshots.
    fn needed(&self) -> usize {
        let image = self.reloads.map_or(0, |_| self.tree.image_bytes());
        self.bytes() + image
    }

    /// Keeps the bound: sets whole sources aside, the largest first, and frees their memory.
    pub(super) fn bound_memory(&mut self, now: Instant) {
        let Some(bytes_max) = self.bytes_max else {
            return;
        };
        loop {
            let (needed, spare) = (self.needed(), self.tree.spare_bytes());
            let in_use = needed - spare - spare / 8;
            if in_use > early(bytes_max) {
                if !self.tree.is_reclaiming() {
                    if !self.set_largest_aside(now) {
                        return;
                    }
                } else if needed <= bytes_max {
                    return;
                } else {
                    self.tree.reclaim(STEP);
                }
            } else if needed > bytes_max {
                // Free chunks do not serve other allocations.
                self.tree
                    .compact(STEP, spare.saturating_sub(needed - bytes_max));
                if self.tree.spare_bytes() == spare {
                    return;
                }
            } else {
                return;
            }
        }
    }

    /// Sets the largest source aside. Returns false if no source is folded.
    fn set_largest_aside(&mut self, now: Instant) -> bool {
        let tree = &self.tree;
        let weight = |fold: &SourceFold| fold.number().map(|number| tree.weight(number));
        let largest = self
            .sources
            .values_mut()
            .filter(|fold| fold.number().is_some())
            .max_by_key(|fold| weight(fold));
        let Some(largest) = largest else { return false };
        let pairs = largest
            .number()
            .map_or(0, |number| tree.digest(number).count);
        largest.set_aside_history.went(now, pairs);
        largest.set_aside(&mut self.tree, Holding::SetAside);
        self.memory.set_aside += 1;
        true
    }

    /// Requests the smallest source that is set aside, if there is room for it.
    pub(super) fn ask_back(&mut self, now: Instant) {
        let is_recent = |last: Instant| now.saturating_duration_since(last) < BETWEEN_RETURNS;
        let Some(bytes_max) = self.bytes_max else {
            return;
        };
        let in_use = self.needed() - self.tree.spare_bytes();
        let room = early(bytes_max).saturating_sub(in_use) as u64;
        let (workers, outage) = (&self.workers, self.outage);
        let mut smallest: Option<&mut SourceFold> = None;
        for (source, fold) in self.sources.beside_standings().0 {
            if !fold.is_set_aside() {
                continue;
            }
            let is_there =
                registration(workers, outage, &source.worker, now) == Registration::Present;
            if !is_there || !fold.is_live(now) {
                if std::mem::take(&mut fold.set_aside_history.asked) {
                    fold.resync.settle();
                }
            } else if fold.set_aside_history.asked {
                return;
            } else if fold.set_aside_history.may_return(now)
                && fold.set_aside_history.bytes() <= room
                && smallest.as_ref().is_none_or(|other| {
                    fold.set_aside_history.pairs < other.set_aside_history.pairs
                })
            {
                smallest = Some(fold);
            }
        }
        if self.tree.is_reclaiming() || self.memory.last_return.is_some_and(is_recent) {
            return;
        }
        if let Some(fold) = smallest {
            fold.set_aside_history.asked = true;
            // For this replica, the source's records are lost.
            fold.resync.request(ResyncReason::LogLost);
            self.memory.last_return = Some(now);
            self.memory.returns += 1;
        }
    }
}

/// Memory from which on sources are set aside.
const fn early(bytes_max: usize) -> usize {
    bytes_max - bytes_max / 16
}

#[cfg(test)]
mod tests;
