//! Stores: blocks that become held.

use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::{LocalHash, PrefixHash, Tier};

use super::blocks::CHUNK;
use super::ids::RunId;
use super::run::{BLOCKS_MAX, Run};
use super::{ChangeError, Position, SourceNumber, Tree};

/// A range of a run's blocks.
#[derive(Clone, Copy)]
pub(super) struct Range {
    pub(super) run: RunId,
    pub(super) from: u32,
    pub(super) to: u32,
}

impl Tree {
    pub(super) fn store(
        &mut self,
        number: SourceNumber,
        parent: Option<PrefixHash>,
        blocks: &[LocalHash],
        tier: Tier,
    ) -> Result<(), ChangeError> {
        if blocks.is_empty() {
            return Ok(());
        }
        let mut at = match parent {
            Some(parent) => self.behind(number, parent)?,
            None => Position::ROOT,
        };
        let mut parent = parent;
        let mut rest = blocks;
        while let Some(&first) = rest.first() {
            let known = self.known(at, rest);
            let to = at.offset + known as u32;
            if known == 0 {
                at = self.branch(at, parent, first, rest)?;
                continue;
            }
            let range = Range {
                run: at.run,
                from: at.offset,
                to,
            };
            self.hold(number, range, tier)?;
            rest = &rest[known..];
            at.offset = to;
            parent = Some(self.prefix_before(at));
        }
        self.sources[number.index()].last = Some(Position {
            run: at.run,
            offset: at.offset - 1,
        });
        Ok(())
    }

    /// The position after a prefix at which the source stands.
    fn behind(&self, number: SourceNumber, parent: PrefixHash) -> Result<Position, ChangeError> {
        let position = self
            .seen_last(number, parent)
            .filter(|position| {
                let run = self.run(position.run);
                run.find(number)
                    .is_ok_and(|at| position.offset < run.holds[at].end)
            })
            .ok_or(ChangeError::NoParent { parent })?;
        Ok(position.next())
    }

    /// Position of a prefix: usually the block that the source stored last.
    pub(super) fn seen_last(&self, number: SourceNumber, prefix: PrefixHash) -> Option<Position> {
        let last = self.sources.get(number.index())?.last;
        last.filter(|&last| self.is_at(last, prefix))
            .or_else(|| self.locate(prefix))
    }

    fn prefix_before(&self, at: Position) -> PrefixHash {
        let run = self.run(at.run);
        if at.offset == run.len {
            run.tail
        } else {
            self.blocks.prefix(run.place(at.offset - 1))
        }
    }

    /// Number of leading blocks that the run has from this position on.
    pub(super) fn known(&self, at: Position, blocks: &[LocalHash]) -> usize {
        let Some(run) = self.runs.get(at.run.index()) else {
            return 0;
        };
        let mut known = 0;
        let mut offset = at.offset as usize;
        let len = run.len as usize;
        while offset < len && known < blocks.len() {
            let (locals, _) = self.blocks.hashes(run.chunks[offset / CHUNK]);
            let end = len.min(offset / CHUNK * CHUNK + CHUNK) - offset;
            let locals = &locals[offset % CHUNK..][..end];
            let pairs = locals.iter().zip(&blocks[known..]);
            let same = pairs.take_while(|(held, block)| **held == block.0).count();
            known += same;
            offset += same;
            if same < end {
                break;
            }
        }
        known
    }

    /// Position of the blocks that the run lacks at `at`: in a child run, in new blocks at its end,
    /// or in a new run.
    pub(super) fn branch(
        &mut self,
        at: Position,
        parent: Option<PrefixHash>,
        first: LocalHash,
        blocks: &[LocalHash],
    ) -> Result<Position, ChangeError> {
        let run = self.runs.get(at.run.index());
        let may_be_known = run.is_none_or(|run| run.first_child != RunId::NONE);
        if may_be_known {
            let prefix = PrefixHash::after(parent, first);
            if let Some(child) = self.locate(prefix) {
                let run = self.run(child.run);
                let hangs_here = child.offset == 0
                    && run.parent == at.run
                    && run.attach == at.offset
                    && self.blocks.local(run.place(0)) == first;
                return match hangs_here {
                    true => Ok(child),
                    false => Err(ChangeError::Collision { prefix }),
                };
            }
        }
        let at = match run {
            Some(run) if at.offset == run.len && run.len < BLOCKS_MAX => at,
            Some(_) | None => Position {
                run: self.new_run(at),
                offset: 0,
            },
        };
        let room = (BLOCKS_MAX - at.offset) as usize;
        self.append(at.run, parent, &blocks[..room.min(blocks.len())]);
        Ok(at)
    }

    /// A new run of unknown blocks.
    pub(super) fn add_run(
        &mut self,
        at: Position,
        parent: Option<PrefixHash>,
        blocks: &[LocalHash],
    ) -> RunId {
        let id = self.new_run(at);
        self.append(id, parent, blocks);
        id
    }

    fn new_run(&mut self, at: Position) -> RunId {
        let above = self.runs.get(at.run.index());
        let start = above.map_or(0, |above| above.start + at.offset);
        let next = above.map_or(self.first_root, |above| above.first_child);
        let mut run = Run::new(at.run, at.offset, start);
        run.next_sibling = next;
        let id = self.runs.add(run);
        if let Some(next) = next.some() {
            self.run_mut(next).previous_sibling = id;
        }
        match at.run.some() {
            Some(above) => self.run_mut(above).first_child = id,
            None => self.first_root = id,
        }
        id
    }

    /// Appends unknown blocks to a run.
    pub(super) fn append(&mut self, id: RunId, parent: Option<PrefixHash>, blocks: &[LocalHash]) {
        let mut hashes = std::mem::take(&mut self.scratch);
        hashes.clear();
        hashes.extend(prefix_hashes(parent, blocks));
        self.table.touch(&hashes);
        let run = &mut self.runs[id.index()];
        self.heap -= run.heap_bytes();
        let mut rest = blocks.iter().zip(&hashes);
        while rest.len() > 0 {
            let offset = run.len as usize;
            if offset.is_multiple_of(CHUNK) {
                let chunk = self.blocks.allocate(id, offset / CHUNK);
                if run.chunks.len() < 4 {
                    run.chunks.reserve_exact(1);
                }
                run.chunks.push(chunk);
            }
            let first = run.place(run.len);
            let chunk = run.chunks[offset / CHUNK];
            let (locals, prefixes) = self.blocks.hashes_mut(chunk);
            let slots = locals.iter_mut().zip(prefixes).skip(offset % CHUNK);
            for ((local, prefix), (block, hash)) in slots.zip(rest.by_ref()) {
                (*local, *prefix) = (block.0, hash.0);
                run.len += 1;
            }
            let added = &hashes[hashes.len() - rest.len() - (run.len as usize - offset)..];
            for (place, &hash) in (first.0..).zip(&added[..run.len as usize - offset]) {
                self.table.insert(hash, super::ids::BlockPlace(place));
            }
        }
        if let Some(&tail) = hashes.last() {
            run.tail = tail;
        }
        run.at_tail = 0;
        self.heap += run.heap_bytes();
        self.nodes += blocks.len();
        self.scratch = hashes;
    }

    /// Makes a range held, up to the first block that already is.
    fn hold(&mut self, number: SourceNumber, range: Range, tier: Tier) -> Result<(), ChangeError> {
        let Range { run: id, from, to } = range;
        let at = match self.run(id).find(number) {
            Ok(at) => at,
            Err(at) => self.add_holder(number, id, at),
        };
        let run = self.run(id);
        let conflict = run.first_with(at, from, to, tier);
        let to = conflict.unwrap_or(to);
        if from < to {
            self.edit(id, at, |run| run.hold(at, from, to, tier));
        }
        let mut digest = self.sources[number.index()].digest;
        for &prefix in self.prefixes(self.run(id), from, to).flatten() {
            digest.insert(PrefixHash(prefix), tier);
        }
        self.sources[number.index()].digest = digest;
        match conflict {
            Some(offset) => {
                let prefix = self.prefix_at(id, offset);
                Err(ChangeError::AlreadyHeld { prefix, tier })
            }
            None => Ok(()),
        }
    }

    /// Adds a source to a run. Keeps its blocks closed towards the root: it stands in the parent
    /// run up to the attach point.
    pub(super) fn add_holder(&mut self, number: SourceNumber, id: RunId, at: usize) -> usize {
        let source = &mut self.sources[number.index()];
        let slot = source.runs.len() as u32;
        self.heap -= source.list_bytes();
        source.runs.push(id);
        self.heap += source.list_bytes();
        self.holders += 1;
        self.relist(id, |run| run.add_holder(at, number, slot));
        let run = self.run(id);
        let attach = run.attach;
        if let Some(above) = run.parent.some() {
            let above = &mut self.runs[above.index()];
            if let Ok(at) = above.find(number) {
                let hold = &mut above.holds[at];
                hold.children += 1;
                if attach >= hold.pin {
                    hold.pin = attach;
                    hold.pin_is_old = false;
                }
                let end = hold.end.max(attach);
                above.set_end(at, end);
            } else {
                debug_assert!(false, "sources are closed towards the root");
            }
        }
        at
    }
}
