//! Byte pair encoding of one word: of all adjacent pairs the one with the lowest rank, the leftmost
//! first, becomes one token, until no pair has a rank.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use rustc_hash::FxBuildHasher;
use serde_json::Value;

/// Symbols of a word that is merged by scans of all ranks. A heap is faster for longer words.
const SCANNED_MAX: usize = 96;
/// A symbol's end in a linked list, or a symbol that was merged away.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Merge {
    rank: u32,
    token: u32,
}

const NO_MERGE: Merge = Merge {
    rank: u32::MAX,
    token: 0,
};

/// The ranks of pairs of tokens.
#[derive(Debug)]
pub(super) struct MergeTable {
    pairs: HashMap<u64, Merge, FxBuildHasher>,
}

/// Memory that is used again for every word.
#[derive(Debug, Default)]
pub(super) struct MergeScratch {
    merges: Vec<Merge>,
    links: Vec<(u32, u32)>,
    queue: BinaryHeap<Reverse<(u32, u32, u32)>>,
}

/// The two texts of a merge, written as one text or as a list.
pub(super) fn pair_of(merge: &Value) -> Option<(&str, &str)> {
    if let Some(pair) = merge.as_str() {
        pair.split_once(' ')
    } else {
        Some((merge[0].as_str()?, merge[1].as_str()?))
    }
}

const fn key(left: u32, right: u32) -> u64 {
    (left as u64) << 32 | right as u64
}

impl MergeTable {
    /// The `merges` of a model. `None` if one has a token without an id of its own.
    pub(super) fn new(merges: &Value, id: impl Fn(&str) -> Option<u32>) -> Option<Self> {
        let mut pairs = HashMap::with_hasher(FxBuildHasher);
        for (rank, merge) in (0_u32..).zip(merges.as_array()?) {
            let (left, right) = pair_of(merge)?;
            let token = id(&format!("{left}{right}"))?;
            pairs.insert(key(id(left)?, id(right)?), Merge { rank, token });
        }
        Some(Self { pairs })
    }

    fn get(&self, left: u32, right: u32) -> Merge {
        let merge = self.pairs.get(&key(left, right));
        merge.copied().unwrap_or(NO_MERGE)
    }

    /// Merges the symbols from `start` on, in place.
    pub(super) fn apply(&self, ids: &mut Vec<u32>, start: usize, scratch: &mut MergeScratch) {
        if ids.len() - start <= SCANNED_MAX {
            self.apply_by_scans(ids, start, scratch);
        } else {
            self.apply_by_heap(ids, start, scratch);
        }
    }

    fn apply_by_scans(&self, ids: &mut Vec<u32>, start: usize, scratch: &mut MergeScratch) {
        let merges = &mut scratch.merges;
        merges.clear();
        merges.extend(
            ids[start..]
                .windows(2)
                .map(|pair| self.get(pair[0], pair[1])),
        );
        loop {
            // The first one of the lowest rank.
            let (mut at, mut best) = (0, NO_MERGE);
            for (i, merge) in merges.iter().enumerate() {
                if merge.rank < best.rank {
                    (at, best) = (i, *merge);
                }
            }
            if best.rank == NO_MERGE.rank {
                return;
            }
            ids[start + at] = best.token;
            ids.remove(start + at + 1);
            merges.remove(at);
            let id = |i: usize| ids[start + i];
            if at > 0 {
                merges[at - 1] = self.get(id(at - 1), id(at));
            }
            if let Some(merge) = merges.get_mut(at) {
                *merge = self.get(id(at), id(at + 1));
            }
        }
    }

    fn apply_by_heap(&self, ids: &mut Vec<u32>, start: usize, scratch: &mut MergeScratch) {
        let MergeScratch { links, queue, .. } = scratch;
        let symbols = &mut ids[start..];
        let count = symbols.len() as u32;
        links.clear();
        links.extend((0..count).map(|at| {
            let next = if at + 1 < count { at + 1 } else { NONE };
            (at.checked_sub(1).unwrap_or(NONE), next)
        }));
        queue.clear();
        for (at, pair) in (0..).zip(symbols.windows(2)) {
            let merge = self.get(pair[0], pair[1]);
            if merge.rank != NO_MERGE.rank {
                queue.push(Reverse((merge.rank, at, merge.token)));
            }
        }
        while let Some(Reverse((rank, at, token))) = queue.pop() {
            let (before, next) = links[at as usize];
            if symbols[at as usize] == NONE || next == NONE {
                continue;
            }
            // A pair that has changed since has another rank.
            if self.get(symbols[at as usize], symbols[next as usize]).rank != rank {
                continue;
            }
            symbols[at as usize] = token;
            symbols[next as usize] = NONE;
            let after = links[next as usize].1;
            links[at as usize].1 = after;
            if after != NONE {
                links[after as usize].0 = at;
                self.offer(symbols, at, after, queue);
            }
            if before != NONE {
                self.offer(symbols, before, at, queue);
            }
        }
        let mut kept = start;
        for at in start..ids.len() {
            if ids[at] != NONE {
                ids[kept] = ids[at];
                kept += 1;
            }
        }
        ids.truncate(kept);
    }

    fn offer(
        &self,
        symbols: &[u32],
        left: u32,
        right: u32,
        queue: &mut BinaryHeap<Reverse<(u32, u32, u32)>>,
    ) {
        let merge = self.get(symbols[left as usize], symbols[right as usize]);
        if merge.rank != NO_MERGE.rank {
            queue.push(Reverse((merge.rank, left, merge.token)));
        }
    }
}
