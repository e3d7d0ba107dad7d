//! Token ids of segments: most of a conversation, document or prefix was encoded with an earlier
//! request. Bounded, in shards with a lock each.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustc_hash::FxBuildHasher;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Cached bytes of a tokenizer, unless it is bounded lower: about 80 MB of prompts.
const CACHE_BYTES_MAX: usize = 64 << 20;
const SHARDS: usize = 16;
/// A larger segment would evict hundreds of others.
const SEGMENT_BYTES_MAX: usize = 512 << 10;
/// Approximate overhead of a cached segment in a map that is half full.
const ENTRY_BYTES: usize = 96;

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentCacheStats {
    pub hit_bytes: u64,
    pub miss_bytes: u64,
    pub kept_bytes: usize,
}

#[derive(Debug)]
pub(super) struct SegmentCache {
    /// Unknown to clients, so that they cannot choose texts that share a key.
    seed: u64,
    shards: [Mutex<CacheShard>; SHARDS],
    /// Bytes of one generation of a shard.
    generation_max: AtomicUsize,
    hit_bytes: AtomicU64,
    miss_bytes: AtomicU64,
}

/// Texts that share cached ids. The time of an encoding shows which segments are cached, so that
/// prompts with separate caches of blocks are separate here too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheScope(u64);

/// The key of a segment's text. Texts that share one replace each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct SegmentKey(u64);

/// A segment whose ids were found.
#[derive(Clone, Copy, Debug)]
pub(super) struct FoundSegment {
    pub bytes: usize,
    /// The segment that followed it the last time.
    pub next: SegmentKey,
}

/// Two generations: a used segment moves to the young one. When the young one has filled its half,
/// it becomes the old one, and the old one is emptied.
#[derive(Debug, Default)]
struct CacheShard {
    young: Generation,
    old: Generation,
}

/// Segments one behind the other in two buffers, which are used again: thousands of allocations that
/// end together leave holes that every later allocation of the process has to search.
#[derive(Debug, Default)]
struct Generation {
    segments: HashMap<SegmentKey, PlacedSegment, FxBuildHasher>,
    texts: String,
    ids: Vec<u32>,
    segments_added: usize,
}

/// Where a segment is in its generation.
#[derive(Clone, Copy, Debug)]
struct PlacedSegment {
    text: (u32, u32),
    ids: (u32, u32),
    next: SegmentKey,
}

/// A segment in its generation.
#[derive(Clone, Copy, Debug)]
struct CachedSegment<'g> {
    text: &'g str,
    ids: &'g [u32],
    next: SegmentKey,
}

impl CacheScope {
    /// The scope of prompts with this cache salt.
    pub fn of_salt(salt: Option<&str>) -> Self {
        // Any seed: low bits are those of variants.
        Self(salt.map_or(0, |salt| xxh3_64_with_seed(salt.as_bytes(), 1) << 8))
    }
}

impl SegmentCache {
    pub(super) fn new() -> Self {
        Self {
            seed: RandomState::new().hash_one(0),
            shards: Default::default(),
            generation_max: AtomicUsize::new(CACHE_BYTES_MAX / SHARDS / 2),
            hit_bytes: AtomicU64::new(0),
            miss_bytes: AtomicU64::new(0),
        }
    }

    /// Changes the bound. A cache above it shrinks as segments are added.
    pub(super) fn set_bytes_max(&self, bytes: usize) {
        let bytes = bytes.min(CACHE_BYTES_MAX);
        self.generation_max
            .store(bytes / SHARDS / 2, Ordering::Relaxed);
    }

    fn generation_max(&self) -> usize {
        self.generation_max.load(Ordering::Relaxed)
    }

    /// `variant` separates the ids that one text has in several places.
    pub(super) fn key(&self, text: &str, scope: CacheScope, variant: u64) -> SegmentKey {
        let seed = self.seed ^ scope.0 ^ variant;
        SegmentKey(xxh3_64_with_seed(text.as_bytes(), seed))
    }

    /// Appends the ids of the segment with this key to `ids`, if its text is accepted.
    pub(super) fn append(
        &self,
        key: SegmentKey,
        ids: &mut Vec<u32>,
        accepts: impl FnOnce(&str) -> bool,
    ) -> Option<FoundSegment> {
        let mut shard = self.shard(key);
        let segment = shard.get(key, accepts, self.generation_max())?;
        ids.extend_from_slice(segment.ids);
        let found = FoundSegment {
            bytes: segment.text.len(),
            next: segment.next,
        };
        drop(shard);
        self.hit_bytes
            .fetch_add(found.bytes as u64, Ordering::Relaxed);
        Some(found)
    }

    /// Keeps the ids of a segment that was not found.
    pub(super) fn put(&self, key: SegmentKey, text: &str, ids: &[u32]) {
        self.miss_bytes
            .fetch_add(text.len() as u64, Ordering::Relaxed);
        if text.len() <= SEGMENT_BYTES_MAX {
            let segment = CachedSegment {
                text,
                ids,
                next: SegmentKey::default(),
            };
            self.shard(key).insert(key, segment, self.generation_max());
        }
    }

    /// Remembers which segment followed another one, if that was used since generations changed.
    pub(super) fn set_next(&self, key: SegmentKey, next: SegmentKey) {
        if let Some(segment) = self.shard(key).young.segments.get_mut(&key) {
            segment.next = next;
        }
    }

    pub(super) fn stats(&self) -> SegmentCacheStats {
        let kept = self.shards.iter().map(|shard| {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.young.bytes() + shard.old.bytes()
        });
        SegmentCacheStats {
            kept_bytes: kept.sum(),
            hit_bytes: self.hit_bytes.load(Ordering::Relaxed),
            miss_bytes: self.miss_bytes.load(Ordering::Relaxed),
        }
    }

    fn shard(&self, key: SegmentKey) -> MutexGuard<'_, CacheShard> {
        let shard = &self.shards[(key.0 >> 60) as usize % SHARDS];
        // A shard is consistent between any two statements that can panic.
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CacheShard {
    /// The segment with this key, if its text is accepted.
    fn get(
        &mut self,
        key: SegmentKey,
        accepts: impl FnOnce(&str) -> bool,
        max: usize,
    ) -> Option<CachedSegment<'_>> {
        if let Some(young) = self.young.get(key) {
            if !accepts(young.text) {
                return None;
            }
        } else {
            let used = self.old.get(key).filter(|old| accepts(old.text))?;
            if self.young.bytes() + used.bytes() <= max {
                self.young.push(key, used);
            } else {
                let (text, ids) = (used.text.to_owned(), used.ids.to_vec());
                let used = CachedSegment {
                    text: &text,
                    ids: &ids,
                    ..used
                };
                self.insert(key, used, max);
            }
        }
        self.young.get(key)
    }

    fn insert(&mut self, key: SegmentKey, segment: CachedSegment<'_>, max: usize) {
        if self.young.bytes() + segment.bytes() > max {
            std::mem::swap(&mut self.young, &mut self.old);
            self.young.empty(max);
        }
        self.young.push(key, segment);
    }
}

impl Generation {
    fn get(&self, key: SegmentKey) -> Option<CachedSegment<'_>> {
        let place = self.segments.get(&key)?;
        let range = |(start, end): (u32, u32)| start as usize..end as usize;
        Some(CachedSegment {
            text: &self.texts[range(place.text)],
            ids: &self.ids[range(place.ids)],
            next: place.next,
        })
    }

    /// The bytes of a segment that is replaced stay until the generation ends.
    fn push(&mut self, key: SegmentKey, segment: CachedSegment<'_>) {
        let (text_start, ids_start) = (self.texts.len() as u32, self.ids.len() as u32);
        self.texts.push_str(segment.text);
        self.ids.extend_from_slice(segment.ids);
        self.segments_added += 1;
        let place = PlacedSegment {
            text: (text_start, self.texts.len() as u32),
            ids: (ids_start, self.ids.len() as u32),
            next: segment.next,
        };
        self.segments.insert(key, place);
    }

    fn bytes(&self) -> usize {
        self.texts.len() + size_of_val(&*self.ids) + self.segments_added * ENTRY_BYTES
    }

    /// Keeps the buffers, unless the bound was lowered below them.
    fn empty(&mut self, max: usize) {
        self.segments.clear();
        self.texts.clear();
        self.ids.clear();
        self.segments_added = 0;
        self.texts.shrink_to(max);
        self.ids.shrink_to(max / size_of::<u32>());
        self.segments.shrink_to(max / ENTRY_BYTES);
    }
}

impl CachedSegment<'_> {
    fn bytes(&self) -> usize {
        self.text.len() + size_of_val(self.ids) + ENTRY_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(cache: &SegmentCache, key: SegmentKey, text: &str) -> Option<Vec<u32>> {
        let mut ids = Vec::new();
        cache.append(key, &mut ids, |kept| kept == text)?;
        Some(ids)
    }

    #[test]
    fn memory_is_bounded_and_used_segments_stay() {
        let cache = SegmentCache::new();
        let ids = vec![1; 1000];
        let key = |text: &str| cache.key(text, CacheScope::default(), 0);
        cache.put(key("kept"), "kept", &ids);
        for i in 0..40_000 {
            let text = format!("{i:-<1000}");
            cache.put(key(&text), &text, &ids);
            assert!(cache.stats().kept_bytes <= CACHE_BYTES_MAX);
            if i % 500 == 0 {
                assert!(get(&cache, key("kept"), "kept").is_some(), "after {i}");
            }
        }
        let first = "0".repeat(1000);
        assert!(get(&cache, key(&first), &first).is_none());
        let large = "x".repeat(SEGMENT_BYTES_MAX + 1);
        cache.put(key(&large), &large, &ids);
        assert!(get(&cache, key(&large), &large).is_none());
    }

    #[test]
    fn a_lower_bound_shrinks_the_cache() {
        let cache = SegmentCache::new();
        let fill = |from: usize| {
            for i in from..from + 4_000 {
                let text = format!("{i:-<1000}");
                cache.put(
                    cache.key(&text, CacheScope::default(), 0),
                    &text,
                    &[1; 1000],
                );
            }
            cache.stats().kept_bytes
        };
        assert!(fill(0) > 8 << 20);
        cache.set_bytes_max(4 << 20);
        assert!(fill(10_000) <= 4 << 20);
        let buffers = cache.shards.iter().map(|shard| {
            let shard = shard.lock().unwrap();
            let bytes = |one: &Generation| one.texts.capacity() + 4 * one.ids.capacity();
            bytes(&shard.young) + bytes(&shard.old)
        });
        assert!(buffers.sum::<usize>() <= 8 << 20);
    }

    #[test]
    fn texts_that_share_a_key_do_not_share_ids() {
        let cache = SegmentCache::new();
        cache.put(SegmentKey(7), "a", &[1]);
        assert!(get(&cache, SegmentKey(7), "b").is_none());
        cache.put(SegmentKey(7), "b", &[2]);
        assert_eq!(get(&cache, SegmentKey(7), "b").as_deref(), Some(&[2][..]));
        assert!(get(&cache, SegmentKey(7), "a").is_none());
    }
}
