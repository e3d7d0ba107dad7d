//! What the tree takes of the process's memory: everything that it keeps, whether in use or free.
//!
//! Counted as it changes, so that asking costs nothing. Lists count with their capacity, and every
//! allocation with what the allocator adds to it; what that leaves out (gaps that fit nothing) is measured
//! by `indexer/index/tests/memory.rs`, and added by the fold.

use super::blocks::CHUNK;
use super::{SourceHoldings, Tree};

/// The allocator's header and rounding.
pub(super) const fn heap(bytes: usize) -> usize {
    match bytes {
        0 => 0,
        1..24 => 32,
        _ => (bytes + 8).next_multiple_of(16),
    }
}

impl Tree {
    /// All memory that the tree keeps: what is in use, and what was freed and is kept to be used again.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.blocks.bytes()
            + self.table.bytes()
            + self.runs.bytes()
            + self.heap
            + self.sources.capacity() * size_of::<SourceHoldings>()
    }

    /// Of these, what the next blocks will take before more is asked of the allocator.
    #[must_use]
    pub fn spare_bytes(&self) -> usize {
        self.blocks.spare_bytes()
    }

    /// What an image takes, at most about.
    #[must_use]
    pub fn image_bytes(&self) -> usize {
        let of_runs = self.runs.len() * 16 + self.holders * 8;
        self.nodes * size_of::<u64>() + of_runs
    }

    /// What a source takes, for comparison with others: a pair counts one.
    #[must_use]
    pub fn weight(&self, number: super::SourceNumber) -> u64 {
        // A holder takes about as much as two blocks, and a run that it holds alone as much as four.
        let runs = self
            .sources
            .get(number.index())
            .map(|source| source.runs.len() as u64);
        self.digest(number).count + 4 * runs.unwrap_or(0)
    }

    /// Is something of closed sources left to be given back?
    #[must_use]
    pub fn is_reclaiming(&self) -> bool {
        !self.closed.is_empty()
    }

    /// Moves blocks out of sparse memory and gives that back, at most about `blocks_max` of them, until no
    /// more than `spare_max` bytes are spare. Is there more to do?
    pub fn compact(&mut self, blocks_max: usize, spare_max: usize) -> bool {
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
        false
    }
}
