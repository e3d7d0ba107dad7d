//! The runs of one prompt, for all sources at once.

use warmroute_proto::{PrefixHash, Tier, Tiers};

use super::run::{Run, RunId};
use super::spans::Walk;
use super::{Position, SourceNumber, TierMask, Tree};

/// Distances in blocks that are walked instead of searched: two to eight cache lines in a row are
/// read faster than the table is asked twice.
const WALK_MAX: usize = 64;

/// A run on the way down, and how many of its blocks the prompt has.
struct Stage {
    run: RunId,
    matched: u32,
}

pub(super) fn of_some(
    tree: &Tree,
    chain: &[PrefixHash],
    allowed: &[(SourceNumber, TierMask)],
) -> Vec<Tiers<u32>> {
    let mut masks = vec![TierMask::NONE; tree.sources.len()];
    for (number, tiers) in allowed {
        if let Some(mask) = masks.get_mut(number.index()) {
            *mask = *tiers;
        }
    }
    let runs = runs(tree, chain, &masks);
    allowed
        .iter()
        .map(|(number, _)| runs.get(number.index()).copied().unwrap_or_default())
        .collect()
}

/// Per source, by its number.
pub(super) fn runs(tree: &Tree, chain: &[PrefixHash], allowed: &[TierMask]) -> Vec<Tiers<u32>> {
    let mut runs = vec![Tiers::default(); tree.sources.len()];
    for stage in tree.way(chain).iter().rev() {
        if !advance(tree.run(stage.run), stage.matched, allowed, &mut runs) {
            break;
        }
    }
    runs
}

/// Lets every walk that has reached the run go on in it. Has any come through?
fn advance(run: &Run, matched: u32, allowed: &[TierMask], runs: &mut [Tiers<u32>]) -> bool {
    let mut through = false;
    for (at, lead) in run.leads.iter().enumerate() {
        let number = lead.source.index();
        let (Some(walk), Some(&tiers)) = (runs.get_mut(number), allowed.get(number)) else {
            continue;
        };
        let lower = walk.cpu + walk.disk;
        if walk.gpu + lower != run.start || tiers.is_empty() {
            continue;
        }
        let mut reached = 0;
        if lower == 0 && tiers.has(Tier::Gpu) {
            reached = lead.blocks().min(matched);
            walk.gpu += reached;
        }
        if reached < matched && (lead.goes_on() || reached < lead.blocks()) {
            reached = advance_by_pieces(run, at, reached..matched, tiers, walk);
        }
        through |= reached == matched;
    }
    through
}

/// The same for one walk piece by piece; where it ends.
fn advance_by_pieces(
    run: &Run,
    at: usize,
    blocks: std::ops::Range<u32>,
    allowed: TierMask,
    run_so_far: &mut Tiers<u32>,
) -> u32 {
    let mut walk = Walk { run: *run_so_far };
    let mut reached = blocks.start;
    for (start, end, tiers) in run.pieces(at, blocks.start) {
        let end = end.min(blocks.end);
        if start >= end || !walk.step(end - start, tiers.both(allowed)) {
            break;
        }
        reached = end;
    }
    *run_so_far = walk.run;
    reached
}

impl Tree {
    /// The runs from the prompt's last known block up to the root.
    fn way(&self, chain: &[PrefixHash]) -> Vec<Stage> {
        let mut way = Vec::with_capacity(8);
        let Some(last) = self.last_known(chain) else {
            return way;
        };
        way.push(Stage {
            run: last.run,
            matched: last.offset + 1,
        });
        let mut run = self.run(last.run);
        while let Some(above) = run.parent.some() {
            way.push(Stage {
                run: above,
                matched: run.attach,
            });
            run = self.run(above);
        }
        way
    }

    /// Where the last block of the prompt stands that is known.
    ///
    /// A prefix is known only if all before it are, so the depths can be searched, from the middle
    /// on. In each run the first guess is that the prompt has all of it; short distances are walked.
    fn last_known(&self, chain: &[PrefixHash]) -> Option<Position> {
        let mut unknown = chain.len();
        let mut known = unknown / 2;
        let mut is_shallow = false;
        let mut last = match self.locate_at(chain, known) {
            Some(last) => last,
            None => {
                unknown = known;
                known = 0;
                is_shallow = true;
                self.locate_at(chain, 0)?
            }
        };
        let mut tried = RunId::NONE;
        loop {
            let run = self.run(last.run);
            let end = (run.start + run.len) as usize;
            let mut probe = known + (unknown - known) / 2;
            if std::mem::take(&mut is_shallow) {
                probe = probe.min(WALK_MAX);
            }
            if tried != last.run && known < end && end <= unknown && chain[end - 1] == run.tail {
                last.offset = run.len - 1;
                if run.first_child == RunId::NONE {
                    return Some(last);
                }
                known = end - 1;
                probe = end;
            } else if unknown - known <= WALK_MAX {
                let same = self.same(last, &chain[known + 1..unknown]);
                last.offset += same;
                known += same as usize;
                probe = known + 1;
                if run.first_child == RunId::NONE {
                    unknown = probe;
                }
            }
            tried = last.run;
            if known + 1 >= unknown {
                return Some(last);
            }
            match self.locate_at(chain, probe) {
                Some(position) => (last, known) = (position, probe),
                None => unknown = probe,
            }
        }
    }

    /// How many of these follow in the run.
    fn same(&self, last: Position, chain: &[PrefixHash]) -> u32 {
        let run = self.run(last.run);
        let prefixes = self.prefixes(run, last.offset + 1, run.len);
        let mut same = 0;
        let mut rest = chain;
        for prefixes in prefixes {
            let pairs = prefixes.iter().zip(rest);
            let here = pairs.take_while(|(held, asked)| **held == asked.0).count();
            same += here as u32;
            rest = &rest[here..];
            if here < prefixes.len() {
                break;
            }
        }
        same
    }

    fn locate_at(&self, chain: &[PrefixHash], depth: usize) -> Option<Position> {
        let position = self.locate(*chain.get(depth)?)?;
        let start = self.run(position.run).start;
        (start as usize + position.offset as usize == depth).then_some(position)
    }
}
