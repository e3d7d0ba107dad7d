//! The runs of one prompt, for all sources at once.

use std::hint::black_box;

use warmroute_proto::{PrefixHash, Tier, Tiers};

use super::run::{Run, RunId};
use super::spans::RunWalk;
use super::{Position, SourceNumber, TierMask, Tree};

/// Distances in blocks that are walked instead of searched: a few cache lines at once are read faster than
/// the table is asked twice.
const WALK_MAX: usize = 64;

/// A run on the way down, and how many of its blocks the prompt has.
struct PathRun {
    run: RunId,
    matched: u32,
}

/// How far the search for the last known block has come.
struct DepthSearch {
    last: Position,
    /// The depth of that block.
    known: usize,
    /// A depth that is not known; if none is, the prompt's length.
    unknown: usize,
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
    let mut runs = Vec::new();
    all(tree, chain, &masks, &mut runs);
    allowed
        .iter()
        .map(|(number, _)| runs.get(number.index()).copied().unwrap_or_default())
        .collect()
}

/// Per source, by its number. `runs` is empty, or as many defaults as there are sources.
pub(super) fn all(
    tree: &Tree,
    chain: &[PrefixHash],
    allowed: &[TierMask],
    runs: &mut Vec<Tiers<u32>>,
) {
    debug_assert!(runs.iter().all(|run| *run == Tiers::default()));
    runs.resize(tree.sources.len(), Tiers::default());
    for stage in tree.way(chain).iter().rev() {
        if !advance(tree.run(stage.run), stage.matched, allowed, runs) {
            break;
        }
    }
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
    let mut walk = RunWalk { run: *run_so_far };
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
    fn way(&self, chain: &[PrefixHash]) -> Vec<PathRun> {
        let mut way = Vec::with_capacity(8);
        let Some(last) = self.last_known(chain) else {
            return way;
        };
        way.push(PathRun {
            run: last.run,
            matched: last.offset + 1,
        });
        let mut run = self.run(last.run);
        let mut sum = 0;
        while let Some(above) = run.parent.some() {
            // Nothing waits for this here, and the list is at hand when its turn comes.
            sum ^= run.leads.first().map_or(0, |lead| lead.blocks());
            way.push(PathRun {
                run: above,
                matched: run.attach,
            });
            run = self.run(above);
        }
        black_box(sum);
        way
    }

    /// Where the last block of the prompt stands that is known.
    ///
    /// A prefix is known only if all before it are, so the depths can be searched, from the middle
    /// on. Where that is unknown, often only the beginning is known, which the prompt has in common with
    /// others: its first blocks are walked.
    fn last_known(&self, chain: &[PrefixHash]) -> Option<Position> {
        let middle = chain.len() / 2;
        let [first, half] = [chain.first()?, chain.get(middle)?];
        self.table.touch(&[*first, *half]);
        let mut found = DepthSearch {
            last: Position::ROOT,
            known: 0,
            unknown: chain.len(),
        };
        let mut is_left = false;
        if !self.probe(chain, middle, &mut found) {
            found.last = self.locate_at(chain, 0)?;
            is_left = self.walk(chain, &mut found);
        }
        Some(self.search(chain, found, is_left))
    }

    /// In each run the first guess is that the prompt has all of it; short distances are walked. `is_left`:
    /// the run that was found is known to have no more of the prompt.
    fn search(&self, chain: &[PrefixHash], mut found: DepthSearch, mut is_left: bool) -> Position {
        let mut tried = RunId::NONE;
        while found.known + 1 < found.unknown {
            let run = self.run(found.last.run);
            let end = (run.start + run.len) as usize;
            let fits = found.known < end && end <= found.unknown;
            if is_left {
                // Then only what hangs there can go on.
            } else if tried != found.last.run && fits && chain[end - 1] == run.tail {
                found.last.offset = run.len - 1;
                found.known = end - 1;
                is_left = true;
            } else if found.unknown - found.known <= WALK_MAX {
                is_left = self.walk(chain, &mut found);
            }
            if found.known + 1 >= found.unknown || (is_left && run.first_child == RunId::NONE) {
                break;
            }
            tried = found.last.run;
            let depth = match is_left {
                true => found.known + 1,
                false => found.known + (found.unknown - found.known) / 2,
            };
            self.probe(chain, depth, &mut found);
            is_left = false;
        }
        found.last
    }

    /// Is this depth known?
    fn probe(&self, chain: &[PrefixHash], depth: usize, found: &mut DepthSearch) -> bool {
        let position = self.locate_at(chain, depth);
        match position {
            Some(position) => (found.last, found.known) = (position, depth),
            None => found.unknown = depth,
        }
        position.is_some()
    }

    /// Goes on in the run, for some blocks at most. Did it end before that, or the prompt leave it?
    fn walk(&self, chain: &[PrefixHash], found: &mut DepthSearch) -> bool {
        let from = found.known + 1;
        let to = found.unknown.min(from + WALK_MAX);
        let same = self.same(found.last, &chain[from..to]);
        found.last.offset += same as u32;
        found.known += same;
        from + same < to
    }

    /// How many of these follow in the run. Where one is the same, all before it are.
    fn same(&self, last: Position, chain: &[PrefixHash]) -> usize {
        let run = self.run(last.run);
        let from = last.offset + 1;
        let to = run.len.min(from + chain.len() as u32);
        let mut same = 0;
        for prefixes in self.prefixes(run, from, to) {
            let asked = &chain[same..][..prefixes.len()];
            let mut pairs = prefixes
                .iter()
                .zip(asked)
                .map(|(held, asked)| *held == asked.0);
            if pairs.clone().next_back() == Some(false) {
                return same + pairs.position(|is_same| !is_same).unwrap_or(0);
            }
            same += prefixes.len();
        }
        same
    }

    fn locate_at(&self, chain: &[PrefixHash], depth: usize) -> Option<Position> {
        let position = self.locate(*chain.get(depth)?)?;
        let start = self.run(position.run).start;
        (start as usize + position.offset as usize == depth).then_some(position)
    }
}
