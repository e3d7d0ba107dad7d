//! The runs of one prompt. One pass over the depths, for all sources at once.
//!
//! A source's walk reaches depth `i` only if every block before it was held, so a source whose walk
//! is shorter than `i` is skipped there: that is how holes end a run.

use warmroute_proto::{LocalHash, Tier, Tiers, hash::prefix_hashes};

use super::{SourceNumber, TierMask, Tree};

/// How far one source's walk has come.
#[derive(Clone, Copy, Default)]
struct Walk {
    allowed: TierMask,
    run: Tiers<u32>,
}

impl Walk {
    const fn reached(&self) -> u32 {
        self.run.gpu + self.run.cpu + self.run.disk
    }

    /// The tier for which the next block counts, if it lies in `tiers`. Once a lower tier was needed
    /// the GPU's blocks further on are no run any more.
    const fn step(&self, tiers: TierMask) -> Option<Tier> {
        let tiers = tiers.both(self.allowed);
        if tiers.has(Tier::Gpu) && self.run.gpu == self.reached() {
            Some(Tier::Gpu)
        } else if tiers.has(Tier::Cpu) {
            Some(Tier::Cpu)
        } else if tiers.has(Tier::Disk) {
            Some(Tier::Disk)
        } else {
            None
        }
    }
}

pub(super) fn runs(
    tree: &Tree,
    blocks: &[LocalHash],
    allowed: &[(SourceNumber, TierMask)],
) -> Vec<Tiers<u32>> {
    // Indexed by number. Whoever is not named is allowed no tier, closed sources included.
    let mut walks = vec![Walk::default(); tree.sources.len()];
    for (number, tiers) in allowed {
        if let Some(walk) = walks.get_mut(number.index()) {
            walk.allowed = *tiers;
        }
    }
    for (depth, prefix) in (0..).zip(prefix_hashes(None, blocks)) {
        let Some(node) = tree.nodes.get(&prefix) else {
            break;
        };
        let mut any = false;
        for holder in &node.holders {
            let Some(walk) = walks.get_mut(holder.number.index()) else {
                continue;
            };
            if walk.reached() != depth {
                continue;
            }
            if let Some(tier) = walk.step(holder.tiers) {
                *walk.run.get_mut(tier) += 1;
                any = true;
            }
        }
        if !any {
            break;
        }
    }
    let run = |number: &SourceNumber| walks.get(number.index()).map(|walk| walk.run);
    allowed
        .iter()
        .map(|(number, _)| run(number).unwrap_or_default())
        .collect()
}
