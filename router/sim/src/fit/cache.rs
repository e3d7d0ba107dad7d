//! Size of an engine's cache: the size of a least-recently-used cache that would have had the hits
//! that engines reported.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use crate::recording::BlockNode;

/// A prompt at one source, in the order of arrival.
#[derive(Clone, Debug)]
pub(super) struct CachedPrompt {
    pub(super) source: usize,
    pub(super) path: Vec<BlockNode>,
    /// Blocks of the answer and of the prompt's end, which no other prompt has.
    pub(super) own_blocks: usize,
    pub(super) cached_blocks: usize,
}

/// Blocks of the cache of one source. `None` if no prompt was evicted: the cache is at least as
/// large as what was sent.
pub(super) fn blocks(prompts: &[CachedPrompt], sources: usize) -> Option<usize> {
    let reported: usize = prompts.iter().map(|prompt| prompt.cached_blocks).sum();
    let most = prompts
        .iter()
        .map(|prompt| prompt.path.len() + prompt.own_blocks)
        .sum();
    // Concurrent prompts miss blocks that one after the other would hit.
    if hits(prompts, sources, most) as f64 <= reported as f64 * 1.02 {
        return None;
    }
    let (mut low, mut high) = (1, most);
    while high - low > low / 50 + 1 {
        let middle = low + (high - low) / 2;
        if hits(prompts, sources, middle) < reported {
            low = middle;
        } else {
            high = middle;
        }
    }
    Some(high)
}

/// Hits of all prompts in caches of this size.
fn hits(prompts: &[CachedPrompt], sources: usize, size: usize) -> usize {
    let mut caches: Vec<LruCache> = (0..sources).map(|_| LruCache::default()).collect();
    let each = prompts.iter();
    each.map(|prompt| caches[prompt.source].take(prompt, size))
        .sum()
}

#[derive(Default)]
struct LruCache {
    /// Turn of the last use by block.
    used: FxHashMap<BlockNode, u64>,
    /// Blocks by the turn of their last use; `None`: a block that is never hit.
    order: BTreeMap<u64, Option<BlockNode>>,
    turn: u64,
}

impl LruCache {
    /// Returns the prompt's cached leading blocks; then all of its blocks are cached. Later blocks
    /// of a prompt are evicted before earlier ones, as engines do.
    fn take(&mut self, prompt: &CachedPrompt, size: usize) -> usize {
        let is_held = |node: &&BlockNode| self.used.contains_key(node);
        let hits = prompt.path.iter().take_while(is_held).count();
        for _ in 0..prompt.own_blocks {
            self.put(None);
        }
        for &node in prompt.path.iter().rev() {
            if let Some(before) = self.used.insert(node, self.turn) {
                self.order.remove(&before);
            }
            self.put(Some(node));
        }
        while self.order.len() > size {
            if let Some((_, Some(oldest))) = self.order.pop_first() {
                self.used.remove(&oldest);
            }
        }
        hits
    }

    fn put(&mut self, block: Option<BlockNode>) {
        self.order.insert(self.turn, block);
        self.turn += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prompts of ten blocks, of which the first eight return in turn.
    fn prompts(different: u32, size: usize) -> Vec<CachedPrompt> {
        let mut rng = fastrand::Rng::with_seed(1);
        let prompt = |_| {
            let first = rng.u32(..different) * 8;
            CachedPrompt {
                source: 0,
                path: (first..first + 8).map(BlockNode).collect(),
                own_blocks: 2,
                cached_blocks: 0,
            }
        };
        let mut all: Vec<CachedPrompt> = (0..2000).map(prompt).collect();
        let mut cache = LruCache::default();
        for prompt in &mut all {
            prompt.cached_blocks = cache.take(prompt, size);
        }
        all
    }

    #[test]
    fn a_size_is_found_from_the_hits_that_it_leaves() {
        for size in [100, 400] {
            let found = blocks(&prompts(100, size), 1).unwrap();
            assert!(found.abs_diff(size) <= size / 10, "{found} for {size}");
        }
    }

    #[test]
    fn a_cache_that_evicts_nothing_has_no_known_size() {
        assert_eq!(blocks(&prompts(100, 1 << 20), 1), None);
        assert_eq!(blocks(&[], 1), None);
    }
}
