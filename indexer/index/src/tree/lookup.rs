//! The runs of a prompt, for all sources.

use std::hint::black_box;

use warmroute_proto::{PrefixHash, Tier, Tiers};

use super::ids::RunId;
use super::run::Run;
use super::spans::RunWalk;
use super::{Position, SourceNumber, TierMask, Tree};

/// Distances in blocks that are walked instead of searched: reading a few cache lines is faster
/// than two table lookups.
const WALK_MAX: usize = 64;

/// Prefix hashes of consecutive blocks of a prompt.
#[derive(Clone, Copy)]
pub(super) struct ChainPart<'a> {
    prefixes: &'a [PrefixHash],
    /// Depth of the first.
    depth: usize,
}

impl<'a> ChainPart<'a> {
    pub(super) const fn at(depth: usize, prefixes: &'a [PrefixHash]) -> Self {
        Self { prefixes, depth }
    }

    /// From depth 0.
    pub(super) const fn whole(prefixes: &'a [PrefixHash]) -> Self {
        Self::at(0, prefixes)
    }
}

/// A run on the prompt's path, and the number of its blocks in the prompt.
struct PathRun {
    run: RunId,
    matched: u32,
}

/// State of the search for the last known block.
struct DepthSearch {
    last: Position,
    /// Index of that block in the chain.
    known: usize,
    /// The index of an unknown block, or the chain's length.
    unknown: usize,
}

pub(super) fn of_some(
    tree: &Tree,
    chain: &[PrefixHash],
    allowed: &[(SourceNumber, TierMask)],
) -> Vec<Tiers<u32>> {
    let mut masks = tree.no_tiers();
    for (number, tiers) in allowed {
        if let Some(mask) = masks.get_mut(number.index()) {
            *mask = *tiers;
        }
    }
    let mut runs = Vec::new();
    all(tree, ChainPart::whole(chain), &masks, &mut runs);
    allowed
        .iter()
        .map(|(number, _)| runs.get(number.index()).copied().unwrap_or_default())
        .collect()
}

/// Runs of all sources from the prompt's first block, by source number. Nothing if the chain's
/// first block is unknown. `runs` is empty or holds defaults.
pub(super) fn all(
    tree: &Tree,
    chain: ChainPart<'_>,
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

/// Depth of the deepest block of the chain that each source holds on the GPU, with or without those
/// above it, by source number; 0 if it holds none below the first.
pub(super) fn deepest(tree: &Tree, chain: ChainPart<'_>, allowed: &[TierMask]) -> Vec<u32> {
    let mut depths = vec![0; tree.sources.len()];
    for stage in tree.way(chain) {
        let run = tree.run(stage.run);
        for (at, lead) in run.leads.iter().enumerate() {
            let number = lead.source.index();
            let is_allowed = allowed
                .get(number)
                .is_some_and(|tiers| tiers.has(Tier::Gpu));
            if is_allowed
                && depths[number] == 0
                && let Some(offset) = run.last_with(at, stage.matched, Tier::Gpu)
            {
                depths[number] = run.start + offset;
            }
        }
    }
    depths
}

/// Continues every walk that reached the run. Returns true if one passes through it.
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

/// Continues one walk piece by piece. Returns its end.
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
    /// Runs from the prompt's last known block to the root.
    fn way(&self, chain: ChainPart<'_>) -> Vec<PathRun> {
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
            // Prefetches the list.
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

    /// Position of the prompt's last known block.
    ///
    /// A prefix is known only if all before it are, so the depths can be searched, starting in the
    /// middle. If that is unknown, often only a common beginning is known: the first blocks are
    /// walked.
    fn last_known(&self, chain: ChainPart<'_>) -> Option<Position> {
        let middle = chain.prefixes.len() / 2;
        let [first, half] = [chain.prefixes.first()?, chain.prefixes.get(middle)?];
        self.table.touch(&[*first, *half]);
        let mut found = DepthSearch {
            last: Position::ROOT,
            known: 0,
            unknown: chain.prefixes.len(),
        };
        let mut is_left = false;
        if !self.probe(chain, middle, &mut found) {
            found.last = self.locate_at(chain, 0)?;
            is_left = self.walk(chain.prefixes, &mut found);
        }
        Some(self.search(chain, found, is_left))
    }

    /// Guesses first that the prompt contains all of a run; walks short distances. `is_left`: the
    /// prompt is known to leave the run.
    fn search(&self, chain: ChainPart<'_>, mut found: DepthSearch, mut is_left: bool) -> Position {
        let mut tried = RunId::NONE;
        while found.known + 1 < found.unknown {
            let run = self.run(found.last.run);
            // The run reaches below the chain's first block: the last known one is in it.
            let end = ((run.start + run.len) as usize).saturating_sub(chain.depth);
            let fits = found.known < end && end <= found.unknown;
            if is_left {
                // Only a child run can continue.
            } else if tried != found.last.run && fits && chain.prefixes[end - 1] == run.tail {
                found.last.offset = run.len - 1;
                found.known = end - 1;
                is_left = true;
            } else if found.unknown - found.known <= WALK_MAX {
                is_left = self.walk(chain.prefixes, &mut found);
            }
            if found.known + 1 >= found.unknown || (is_left && run.first_child == RunId::NONE) {
                break;
            }
            tried = found.last.run;
            let index = match is_left {
                true => found.known + 1,
                false => found.known + (found.unknown - found.known) / 2,
            };
            self.probe(chain, index, &mut found);
            is_left = false;
        }
        found.last
    }

    /// Probes a block. Returns true if it is known.
    fn probe(&self, chain: ChainPart<'_>, index: usize, found: &mut DepthSearch) -> bool {
        let position = self.locate_at(chain, index);
        match position {
            Some(position) => (found.last, found.known) = (position, index),
            None => found.unknown = index,
        }
        position.is_some()
    }

    /// Walks at most [`WALK_MAX`] blocks along the run. Returns true if the run ended or the prompt
    /// left it.
    fn walk(&self, chain: &[PrefixHash], found: &mut DepthSearch) -> bool {
        let from = found.known + 1;
        let to = found.unknown.min(from + WALK_MAX);
        let same = self.same(found.last, &chain[from..to]);
        found.last.offset += same as u32;
        found.known += same;
        from + same < to
    }

    /// Number of these that follow in the run. If one is equal, all before it are.
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

    fn locate_at(&self, chain: ChainPart<'_>, index: usize) -> Option<Position> {
        let position = self.locate(*chain.prefixes.get(index)?)?;
        let start = self.run(position.run).start as usize;
        (start + position.offset as usize == chain.depth + index).then_some(position)
    }
}
