//! What a change will need of memory, read before anybody is kept out for it.
//!
//! Most of what applying a change takes is waiting for memory. Whoever applies reads the same places
//! first, beside other readers: then they are in the processor's cache, and the write lock is held for a
//! fraction of the time. Nothing depends on it: a change that was not read for, or for which the tree has
//! changed since, is applied as any other.

use std::hint::black_box;

use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::{Change, LocalHash, PrefixHash};

use super::run::{Run, RunId};
use super::{Position, SourceNumber, Tree};

impl Tree {
    /// See the module's documentation. `scratch` is for whoever does it again and again.
    pub fn warm(&self, number: SourceNumber, change: &Change, scratch: &mut Vec<PrefixHash>) {
        match change {
            Change::Stored { parent, blocks, .. } => {
                self.warm_store(number, *parent, blocks, scratch);
            }
            Change::Removed { blocks, .. } => self.warm_remove(number, blocks),
            Change::Cleared { .. } => {}
        }
    }

    fn warm_store(
        &self,
        number: SourceNumber,
        mut parent: Option<PrefixHash>,
        blocks: &[LocalHash],
        scratch: &mut Vec<PrefixHash>,
    ) {
        let mut rest = blocks;
        let mut next = match parent {
            Some(parent) => self.seen_last(number, parent).map(Position::next),
            None => Some(Position::ROOT),
        };
        while let Some(at) = next.take() {
            let known = self.known(at, rest);
            let offset = at.offset + known as u32;
            if let Some(run) = self.runs.get(at.run.index()) {
                let prefixes = self.prefixes(run, at.offset, offset);
                black_box(prefixes.fold(0, |sum, slice| sum ^ ends(slice)));
                warm_holder(run, number);
                if known > 0 {
                    parent = Some(self.blocks.prefix(run.place(offset - 1)));
                }
            }
            rest = &rest[known..];
            let run = self.runs.get(at.run.index());
            let may_branch = run.is_none_or(|run| run.first_child != RunId::NONE);
            if let Some(&first) = rest.first().filter(|_| may_branch) {
                let child = self.locate(PrefixHash::after(parent, first));
                // Not again where nothing of it was found.
                next = child.filter(|child| child.offset == 0 && child.run != at.run);
            }
        }
        scratch.clear();
        scratch.extend(prefix_hashes(parent, rest));
        self.table.touch(scratch);
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

/// A slice of a chunk lies in two cache lines at most.
fn ends(slice: &[u64]) -> u64 {
    slice.first().unwrap_or(&0) ^ slice.last().unwrap_or(&0)
}

fn warm_holder(run: &Run, number: SourceNumber) {
    if let Ok(at) = run.find(number) {
        black_box(run.holds[at].end);
    }
}
