//! Removal of blocks, and freeing of memory.

use warmroute_proto::{PrefixHash, Tier};

use super::blocks::CHUNK;
use super::ids::RunId;
use super::room::Trim;
use super::store::Range;
use super::{ChangeError, Position, SourceHoldings, SourceNumber, Tree};

/// Free bytes that are kept while sources come and go: a segment of blocks.
const SPARE_MIN: usize = 1 << 16;

/// How exactly a holder's end is computed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pins {
    /// Exactly, which may visit all child runs.
    Exact,
    /// As an upper bound, for passes that end with an exact one.
    Bound,
}

impl Tree {
    /// Removes pairs. Adjacent blocks are removed together: engines evict from the end.
    pub(super) fn remove(
        &mut self,
        number: SourceNumber,
        prefixes: &[PrefixHash],
        tier: Tier,
    ) -> Result<(), ChangeError> {
        self.drop_grown();
        if prefixes.len() > 1 {
            self.table.touch(prefixes);
        }
        let mut rest = prefixes;
        let mut hint = None;
        while let Some(&first) = rest.first() {
            let position = hint
                .filter(|&hint| self.is_at(hint, first))
                .or_else(|| self.locate(first))
                .ok_or(ChangeError::NotHeld {
                    prefix: first,
                    tier,
                })?;
            let (range, taken) = self.adjacent(position, rest);
            let run = self.run(range.run);
            let holder = run.find(number);
            let all = holder.is_ok_and(|at| run.covers(at, range.from, range.to, tier));
            if all {
                hint = self.before(range);
                self.unhold(number, range, tier);
                rest = &rest[taken..];
            } else {
                self.remove_one(number, position, first, tier)?;
                hint = None;
                rest = &rest[1..];
            }
        }
        Ok(())
    }

    /// The range of adjacent blocks at the front of the list, and their number.
    pub(super) fn adjacent(&self, first: Position, prefixes: &[PrefixHash]) -> (Range, usize) {
        let run = self.run(first.run);
        let (mut from, mut to) = (first.offset, first.offset + 1);
        let mut taken = 1;
        for &prefix in &prefixes[1..] {
            if from > 0 && self.blocks.prefix(run.place(from - 1)) == prefix {
                from -= 1;
            } else if to < run.len && self.blocks.prefix(run.place(to)) == prefix {
                to += 1;
            } else {
                break;
            }
            taken += 1;
        }
        let range = Range {
            run: first.run,
            from,
            to,
        };
        (range, taken)
    }

    /// The block before a range, which an eviction from the end removes next.
    pub(super) fn before(&self, range: Range) -> Option<Position> {
        let run = self.run(range.run);
        if range.from > 0 {
            return Some(Position {
                run: range.run,
                offset: range.from - 1,
            });
        }
        run.parent.some().map(|above| Position {
            run: above,
            offset: run.attach - 1,
        })
    }

    fn remove_one(
        &mut self,
        number: SourceNumber,
        at: Position,
        prefix: PrefixHash,
        tier: Tier,
    ) -> Result<(), ChangeError> {
        let range = Range {
            run: at.run,
            from: at.offset,
            to: at.offset + 1,
        };
        let run = self.run(at.run);
        let holder = run.find(number);
        if holder.is_ok_and(|at| run.covers(at, range.from, range.to, tier)) {
            self.unhold(number, range, tier);
            Ok(())
        } else {
            Err(ChangeError::NotHeld { prefix, tier })
        }
    }

    /// Removes the pairs of a range, all of which are held.
    fn unhold(&mut self, number: SourceNumber, range: Range, tier: Tier) {
        let mut digest = self.sources[number.index()].digest;
        let run = self.run(range.run);
        for &prefix in self.prefixes(run, range.from, range.to).flatten() {
            digest.remove(PrefixHash(prefix), tier);
        }
        self.sources[number.index()].digest = digest;
        if let Ok(at) = self.run(range.run).find(number) {
            self.edit(range.run, at, |run| {
                run.unhold(at, range.from, range.to, tier);
            });
        }
        self.settle(number, range.run, Pins::Exact);
    }

    pub(super) fn clear(&mut self, number: SourceNumber, tier: Tier) {
        self.drop_grown();
        let runs = std::mem::take(&mut self.sources[number.index()].runs);
        let mut digest = self.sources[number.index()].digest;
        for &id in &runs {
            let run = self.run(id);
            let Ok(at) = run.find(number) else { continue };
            for (from, to, tiers) in run.pieces(at, 0) {
                if tiers.has(tier) {
                    for &prefix in self.prefixes(run, from, to).flatten() {
                        digest.remove(PrefixHash(prefix), tier);
                    }
                }
            }
            self.edit(id, at, |run| run.unhold(at, 0, run.len, tier));
        }
        let source = &mut self.sources[number.index()];
        source.digest = digest;
        source.runs = runs;
        let mut unvisited = source.runs.len();
        while unvisited > 0 {
            unvisited = unvisited.min(self.sources[number.index()].runs.len());
            let Some(index) = unvisited.checked_sub(1) else {
                break;
            };
            let id = self.sources[number.index()].runs[index];
            self.settle(number, id, Pins::Bound);
            unvisited = index;
        }
        // Bounds remain where child runs went. Runs that go in this pass have no child runs.
        let left = self.sources[number.index()].runs.clone();
        for id in left {
            self.settle(number, id, Pins::Exact);
        }
    }

    /// Frees about `nodes_max` blocks of closed sources, and memory that is mostly free. Returns
    /// true while work remains.
    pub fn reclaim(&mut self, nodes_max: usize) -> bool {
        self.drop_grown();
        let mut left = nodes_max;
        while let Some(&number) = self.closed.last() {
            let source = &mut self.sources[number.index()];
            if source.runs.is_empty() {
                self.heap -= source.list_bytes();
                *source = SourceHoldings::default();
                self.closed.pop();
                self.free.push(number);
                continue;
            }
            if left == 0 {
                return true;
            }
            // Runs with child runs that the source stands in go with the last of those: one pass
            // meets all.
            if source.unvisited == 0 || source.unvisited > source.runs.len() {
                source.unvisited = source.runs.len();
            }
            let id = source.runs[source.unvisited - 1];
            let step = u32::try_from(left).unwrap_or(u32::MAX);
            let (taken, done) = self.shed(number, id, step);
            if done {
                let source = &mut self.sources[number.index()];
                source.unvisited = source.unvisited.saturating_sub(1);
            }
            left = left.saturating_sub(taken as usize + 1);
        }
        if self.nodes == 0 {
            self.trim = Trim::Requested;
        }
        if self.trim != Trim::Off {
            return self.trim_step(left);
        }
        let in_use = self.blocks.bytes() - self.blocks.spare_bytes();
        self.compact(left, (in_use / 8).max(SPARE_MIN))
    }

    /// Removes a dead source from the last blocks of a run, at most `blocks_max`. Returns their
    /// number, and true if the run is done.
    fn shed(&mut self, number: SourceNumber, id: RunId, blocks_max: u32) -> (u32, bool) {
        let run = self.run(id);
        let Ok(at) = run.find(number) else {
            return (0, true);
        };
        let held = run.held_end(at);
        let taken = held.min(blocks_max);
        let left = held - taken;
        self.edit(id, at, |run| {
            // Only the end of its blocks matters from now on.
            run.unhold_all(at);
            run.hold(at, 0, left, Tier::Gpu);
        });
        self.settle(number, id, Pins::Bound);
        (taken, left == 0)
    }

    /// Updates a holder's end after a removal. Removes the source from the run if it neither holds
    /// a block of it nor has a descendant there, and so on towards the root.
    fn settle(&mut self, number: SourceNumber, id: RunId, pins: Pins) {
        let mut next = Some(id);
        while let Some(id) = next.take() {
            let run = self.run(id);
            let Ok(at) = run.find(number) else { return };
            let (held, children) = (run.held_end(at), run.holds[at].children);
            let end = match children {
                0 => held,
                _ => held.max(self.pin(number, id, at, held, pins)),
            };
            if end > 0 {
                self.run_mut(id).set_end(at, end);
                self.cut(id);
                return;
            }
            let slot = self.relist(id, |run| run.drop_holder(at).slot);
            self.holders -= 1;
            let run = self.run(id);
            let (above, attach) = (run.parent.some(), run.attach);
            self.unlist(number, slot);
            self.cut(id);
            if let Some(above) = above {
                let above = self.run_mut(above);
                if let Ok(at) = above.find(number) {
                    let hold = &mut above.holds[at];
                    hold.children = hold.children.saturating_sub(1);
                    hold.pin_is_old |= hold.pin == attach;
                    if hold.children == 0 {
                        hold.pin = 0;
                        hold.pin_is_old = false;
                    }
                }
            }
            next = above;
        }
    }

    /// The last attach point of the holder's child runs.
    fn pin(&mut self, number: SourceNumber, id: RunId, at: usize, held: u32, pins: Pins) -> u32 {
        let run = self.run(id);
        let hold = &run.holds[at];
        if !hold.pin_is_old || hold.pin <= held || pins == Pins::Bound {
            return hold.pin;
        }
        let mut pin = 0;
        let mut child = run.first_child;
        while let Some(id) = child.some() {
            let run = self.run(id);
            if run.attach > pin && run.find(number).is_ok() {
                pin = run.attach;
            }
            child = run.next_sibling;
        }
        let hold = &mut self.run_mut(id).holds[at];
        hold.pin = pin;
        hold.pin_is_old = false;
        pin
    }

    /// Removes a run from a source's list. The last one moves into its place.
    fn unlist(&mut self, number: SourceNumber, slot: u32) {
        let runs = &mut self.sources[number.index()].runs;
        runs.swap_remove(slot as usize);
        let moved = runs.get(slot as usize).copied();
        if runs.capacity() > 64 && runs.capacity() > 4 * runs.len() {
            let source = &mut self.sources[number.index()];
            self.heap -= source.list_bytes();
            source.runs.shrink_to(2 * source.runs.len());
            self.heap += source.list_bytes();
        }
        if let Some(moved) = moved {
            let moved = self.run_mut(moved);
            if let Ok(at) = moved.find(number) {
                moved.holds[at].slot = slot;
            }
        }
    }

    /// Frees the blocks at the end of a run without a holder, and the run itself if no block
    /// remains.
    pub(super) fn cut(&mut self, id: RunId) {
        debug_assert!(
            self.grown.is_empty(),
            "blocks added ahead are removed first"
        );
        self.cut_to(id, 0);
    }

    /// Like [`Self::cut`], but keeps the first `len_min` blocks.
    pub(super) fn cut_to(&mut self, id: RunId, len_min: u32) {
        let run = self.run_mut(id);
        if run.at_tail > 0 {
            return;
        }
        let held = run.holds.iter().map(|hold| hold.end).max().unwrap_or(0);
        let len = held.max(len_min);
        let old = std::mem::replace(&mut run.len, len);
        run.at_tail = run.holds.iter().filter(|hold| hold.end == len).count() as u32;
        self.forget(id, len, old);
        let run = &mut self.runs[id.index()];
        for chunk in run.chunks.drain((len as usize).div_ceil(CHUNK)..) {
            self.blocks.free(chunk);
        }
        if run.chunks.capacity() > 8 && run.chunks.capacity() > 4 * run.chunks.len() {
            self.relist(id, |run| run.chunks.shrink_to(2 * run.chunks.len()));
        }
        let run = &mut self.runs[id.index()];
        if len > 0 {
            let tail = run.place(len - 1);
            run.tail = self.blocks.prefix(tail);
        } else {
            self.drop_run(id);
        }
    }

    /// Removes the blocks of a range from the table.
    fn forget(&mut self, id: RunId, from: u32, to: u32) {
        let mut hashes = std::mem::take(&mut self.scratch);
        hashes.clear();
        let run = self.run(id);
        let prefixes = self.prefixes(run, from, to).flatten();
        hashes.extend(prefixes.map(|&prefix| PrefixHash(prefix)));
        self.table.touch(&hashes);
        for (offset, &hash) in (from..to).zip(&hashes) {
            self.table.erase(hash, self.runs[id.index()].place(offset));
        }
        self.nodes -= hashes.len();
        self.scratch = hashes;
    }

    /// Unlinks and frees an empty run. It has no child runs, because their holders would stand in
    /// it.
    fn drop_run(&mut self, id: RunId) {
        let run = self.run(id);
        debug_assert!(run.first_child == RunId::NONE, "child runs go first");
        let (parent, next, previous) = (run.parent, run.next_sibling, run.previous_sibling);
        self.heap -= run.heap_bytes();
        let run = self.run_mut(id);
        run.chunks = Vec::new();
        run.leads = Vec::new();
        run.holds = Vec::new();
        if let Some(next) = next.some() {
            self.run_mut(next).previous_sibling = previous;
        }
        match (previous.some(), parent.some()) {
            (Some(previous), _) => self.run_mut(previous).next_sibling = next,
            (None, Some(parent)) => self.run_mut(parent).first_child = next,
            (None, None) => self.first_root = next,
        }
        self.runs.free(id);
    }
}
