//! Work done before the write lock is taken for a change, so that it is held briefly.
//!
//! Applying a change mostly waits for memory. [`Tree::warm`] reads the same places first, beside
//! other readers, so that they are cached. Blocks without a holder change no answer, so
//! [`Tree::grow`] adds the new blocks of a long store in short turns; the last turn, which gives
//! them to their source, is short too.
//!
//! Both are optional: a change applies to an unprepared tree just as well. [`Tree::drop_grown`]
//! removes blocks that were added for a change that did not come; everything that removes blocks
//! or moves runs calls it first.

use std::hint::black_box;

use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::{Change, LocalHash, PrefixHash};

use super::ids::RunId;
use super::run::Run;
use super::{Position, SourceNumber, Tree};

/// The unknown blocks of a store, and where they belong.
#[derive(Clone, Copy, Debug)]
pub struct Growth {
    at: Position,
    parent: Option<PrefixHash>,
    /// Number of the change's last blocks that are missing.
    left: usize,
}

/// Blocks added to a run, and its length before. Removed in reverse order, so that runs attached to
/// them go first. Everything else that shortens runs removes them first, so runs only grow in
/// between.
#[derive(Clone, Copy)]
pub(super) struct Grown {
    pub(super) run: RunId,
    pub(super) len_before: u32,
}

impl Growth {
    const NONE: Self = Self {
        at: Position::ROOT,
        parent: None,
        left: 0,
    };

    /// Blocks added in one turn. Fewer are added when the change is applied.
    pub const TURN: usize = if cfg!(test) { 2 } else { 16 };

    /// Blocks still missing, as far as known.
    #[must_use]
    pub const fn left(&self) -> usize {
        self.left
    }
}

/// Number of blocks in the changes of a record.
#[must_use]
pub fn blocks_in(changes: &[Change]) -> usize {
    let blocks = changes.iter().map(|change| match change {
        Change::Stored { blocks, .. } => blocks.len(),
        Change::Removed { blocks, .. } => blocks.len(),
        Change::Cleared { .. } => 0,
    });
    blocks.sum()
}

/// Returns true if preparing these changes pays off.
#[must_use]
pub fn is_long(changes: &[Change]) -> bool {
    blocks_in(changes) > Growth::TURN / 2
}

impl Tree {
    /// Reads the memory that applying the change needs. `scratch` avoids allocations.
    pub fn warm(
        &self,
        number: SourceNumber,
        change: &Change,
        scratch: &mut Vec<PrefixHash>,
    ) -> Growth {
        match change {
            Change::Stored { parent, blocks, .. } => {
                self.warm_store(number, *parent, blocks, scratch)
            }
            Change::Removed { blocks, .. } => {
                self.warm_remove(number, blocks);
                Growth::NONE
            }
            Change::Cleared { .. } => Growth::NONE,
        }
    }

    /// Adds some of the blocks that [`Self::warm`] found missing. The tree may have changed since:
    /// they are added where they belong or not at all.
    pub fn grow(&mut self, change: &Change, growth: &mut Growth) {
        let Growth { at, parent, left } = std::mem::replace(growth, Growth::NONE);
        let Change::Stored { blocks, .. } = change else {
            return;
        };
        let Some(from) = blocks.len().checked_sub(left) else {
            return;
        };
        let turn = &blocks[from..][..left.min(Growth::TURN)];
        let Some(&first) = turn.first().filter(|_| self.is_behind(at, parent)) else {
            return;
        };
        let (mut at, mut known) = (at, self.known(at, turn));
        if known == 0 {
            let nodes = self.nodes;
            // Applying the change reports the contradiction.
            let Ok(begin) = self.branch(at, parent, first, turn) else {
                return;
            };
            if self.nodes > nodes {
                self.grown.push(Grown {
                    run: begin.run,
                    len_before: begin.offset,
                });
            }
            (at, known) = (begin, self.known(begin, turn));
        }
        let offset = at.offset + known as u32;
        if known > 0 {
            *growth = Growth {
                at: Position { offset, ..at },
                parent: Some(self.prefix_at(at.run, offset - 1)),
                left: left - known,
            };
        }
    }

    /// Returns true if this position still follows that block.
    fn is_behind(&self, at: Position, parent: Option<PrefixHash>) -> bool {
        match (parent, at.offset.checked_sub(1)) {
            (None, _) => at == Position::ROOT,
            (Some(parent), Some(offset)) => self.is_at(Position { offset, ..at }, parent),
            (Some(_), None) => false,
        }
    }

    /// Removes blocks that were added ahead and have no holder.
    pub fn drop_grown(&mut self) {
        while let Some(Grown { run, len_before }) = self.grown.pop() {
            self.cut_to(run, len_before);
        }
    }

    fn warm_store(
        &self,
        number: SourceNumber,
        mut parent: Option<PrefixHash>,
        blocks: &[LocalHash],
        scratch: &mut Vec<PrefixHash>,
    ) -> Growth {
        let mut rest = blocks;
        let mut next = match parent {
            Some(parent) => self.seen_last(number, parent).map(Position::next),
            None => Some(Position::ROOT),
        };
        let mut end = None;
        while let Some(at) = next.take() {
            let known = self.known(at, rest);
            if known == 0 && end.is_some() {
                // Hash collision: applying the change reports it.
                return Growth::NONE;
            }
            let offset = at.offset + known as u32;
            let run = self.runs.get(at.run.index());
            if let Some(run) = run {
                let prefixes = self.prefixes(run, at.offset, offset);
                black_box(prefixes.fold(0, |sum, slice| sum ^ ends(slice)));
                warm_holder(run, number);
                if known > 0 {
                    parent = Some(self.blocks.prefix(run.place(offset - 1)));
                }
            }
            rest = &rest[known..];
            end = Some(Position { offset, ..at });
            let may_branch = run.is_none_or(|run| run.first_child != RunId::NONE);
            if let Some(&first) = rest.first().filter(|_| may_branch) {
                let child = self.locate(PrefixHash::after(parent, first));
                // Avoids repeating a run where nothing was found.
                next = child.filter(|child| child.offset == 0 && child.run != at.run);
            }
        }
        scratch.clear();
        scratch.extend(prefix_hashes(parent, rest));
        self.table.touch(scratch);
        end.map_or(Growth::NONE, |at| Growth {
            at,
            parent,
            left: rest.len(),
        })
    }

    fn warm_remove(&self, number: SourceNumber, prefixes: &[PrefixHash]) {
        self.table.touch(prefixes);
        let mut rest = prefixes;
        let mut hint = None;
        while let Some(&first) = rest.first() {
            let position = hint
                .filter(|&hint| self.is_at(hint, first))
                .or_else(|| self.locate(first));
            let Some(position) = position else { return };
            let (range, taken) = self.adjacent(position, rest);
            warm_holder(self.run(range.run), number);
            hint = self.before(range);
            rest = &rest[taken..];
        }
    }
}

/// Touches both ends: a slice of a chunk spans two or three cache lines.
fn ends(slice: &[u64]) -> u64 {
    slice.first().unwrap_or(&0) ^ slice.last().unwrap_or(&0)
}

fn warm_holder(run: &Run, number: SourceNumber) {
    if let Ok(at) = run.find(number) {
        black_box(run.holds[at].end);
    }
}
