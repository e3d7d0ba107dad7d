//! Token ids of segments: most of a conversation, document or prefix was encoded with an earlier
//! request. Bounded, in shards with a lock each.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustc_hash::FxBuildHasher;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Memory of a tokenizer's cache, unless it is bounded lower: about 30 MB of prompts and their ids.
const CACHE_BYTES_MAX: usize = 64 << 20;
const SHARDS: usize = 16;
/// A larger segment would evict hundreds of others.
const SEGMENT_BYTES_MAX: usize = 512 << 10;
/// A slot of a generation's map, with its control byte.
const SLOT_BYTES: usize = size_of::<(SegmentKey, PlacedSegment)>() + 1;

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

/// Two generations: a used segment is copied to the young one. When the young one has filled its
/// half, it becomes the old one, and the old one is emptied.
#[derive(Debug)]
struct CacheShard {
    young: Generation,
    old: Generation,
    bound: GenerationBound,
}

/// Segments one behind the other in a buffer that is allocated once: thousands of allocations that
/// end together leave holes, which every later allocation of the process has to search.
#[derive(Debug, Default)]
struct Generation {
    segments: HashMap<SegmentKey, PlacedSegment, FxBuildHasher>,
    buffer: Vec<u8>,
}

/// What one generation of a shard may have.
#[derive(Clone, Copy, Debug)]
struct GenerationBound {
    buffer: usize,
    segments: usize,
}

/// Where a segment is in its generation's buffer.
#[derive(Clone, Copy, Debug)]
struct PlacedSegment {
    start: u32,
    end: u32,
    text_len: u32,
    next: SegmentKey,
}

#[derive(Clone, Copy, Debug)]
struct CachedSegment<'c> {
    /// The text, and behind it its ids.
    content: &'c [u8],
    text_len: u32,
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
            shards: std::array::from_fn(|_| Mutex::new(CacheShard::new(CACHE_BYTES_MAX))),
            hit_bytes: AtomicU64::new(0),
            miss_bytes: AtomicU64::new(0),
        }
    }

    /// Changes the bound. Generations above it are emptied.
    pub(super) fn set_bytes_max(&self, bytes: usize) {
        for shard in &self.shards {
            lock(shard).set_bound(GenerationBound::of_cache(bytes.min(CACHE_BYTES_MAX)));
        }
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
        accepts: impl FnOnce(&[u8]) -> bool,
    ) -> Option<FoundSegment> {
        let mut shard = self.shard(key);
        let segment = shard.get(key, accepts)?;
        ids.extend(segment.ids());
        let found = FoundSegment {
            bytes: segment.text().len(),
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
            let mut content = Vec::with_capacity(text.len() + size_of_val(ids));
            content.extend_from_slice(text.as_bytes());
            content.extend(ids.iter().flat_map(|id| id.to_ne_bytes()));
            let segment = CachedSegment {
                content: &content,
                text_len: text.len() as u32,
                next: SegmentKey::default(),
            };
            self.shard(key).insert(key, segment);
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
            let shard = lock(shard);
            shard.young.buffer.len() + shard.old.buffer.len()
        });
        SegmentCacheStats {
            kept_bytes: kept.sum(),
            hit_bytes: self.hit_bytes.load(Ordering::Relaxed),
            miss_bytes: self.miss_bytes.load(Ordering::Relaxed),
        }
    }

    fn shard(&self, key: SegmentKey) -> MutexGuard<'_, CacheShard> {
        lock(&self.shards[(key.0 >> 60) as usize % SHARDS])
    }
}

/// A shard is consistent between any two statements that can panic.
fn lock(shard: &Mutex<CacheShard>) -> MutexGuard<'_, CacheShard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

impl GenerationBound {
    /// The bound of each generation, for a cache of so many bytes.
    const fn of_cache(bytes: usize) -> Self {
        let bytes = bytes / SHARDS / 2;
        // A map has a power of two of slots and fills seven of eight.
        let slots = match (bytes / 7 / SLOT_BYTES).checked_ilog2() {
            Some(power) => 1 << power,
            None => 0,
        };
        Self {
            buffer: bytes - bytes / 7,
            segments: slots / 8 * 7,
        }
    }
}

impl CacheShard {
    fn new(cache_bytes: usize) -> Self {
        Self {
            young: Generation::default(),
            old: Generation::default(),
            bound: GenerationBound::of_cache(cache_bytes),
        }
    }

    fn set_bound(&mut self, bound: GenerationBound) {
        self.bound = bound;
        for generation in [&mut self.young, &mut self.old] {
            generation.shrink_to(bound);
        }
    }

    /// The segment with this key, if its text is accepted.
    fn get(
        &mut self,
        key: SegmentKey,
        accepts: impl FnOnce(&[u8]) -> bool,
    ) -> Option<CachedSegment<'_>> {
        if let Some(young) = self.young.get(key) {
            if !accepts(young.text()) {
                return None;
            }
        } else {
            let used = self.old.get(key).filter(|old| accepts(old.text()))?;
            let content = used.content.to_vec();
            let used = CachedSegment {
                content: &content,
                ..used
            };
            self.insert(key, used);
        }
        self.young.get(key)
    }

    /// Keeps a segment, unless it is longer than a generation.
    fn insert(&mut self, key: SegmentKey, segment: CachedSegment<'_>) {
        let bound = self.bound;
        if segment.content.len() > bound.buffer {
            return;
        }
        let bytes = self.young.buffer.len() + segment.content.len();
        if bytes > bound.buffer || self.young.segments.len() >= bound.segments {
            std::mem::swap(&mut self.young, &mut self.old);
            self.young.clear();
        }
        self.young.push(key, segment, bound);
    }
}

impl Generation {
    fn get(&self, key: SegmentKey) -> Option<CachedSegment<'_>> {
        let place = self.segments.get(&key)?;
        Some(CachedSegment {
            content: &self.buffer[place.start as usize..place.end as usize],
            text_len: place.text_len,
            next: place.next,
        })
    }

    /// The bytes of a segment that is replaced stay until the generation ends.
    fn push(&mut self, key: SegmentKey, segment: CachedSegment<'_>, bound: GenerationBound) {
        let start = self.buffer.len();
        self.buffer.reserve_exact(bound.buffer - start);
        self.buffer.extend_from_slice(segment.content);
        let place = PlacedSegment {
            start: start as u32,
            end: self.buffer.len() as u32,
            text_len: segment.text_len,
            next: segment.next,
        };
        self.segments.insert(key, place);
    }

    fn clear(&mut self) {
        self.segments.clear();
        self.buffer.clear();
    }

    fn shrink_to(&mut self, bound: GenerationBound) {
        if self.buffer.len() > bound.buffer || self.segments.len() > bound.segments {
            self.clear();
        }
        self.buffer.shrink_to(bound.buffer);
        self.segments.shrink_to(bound.segments);
    }
}

impl<'c> CachedSegment<'c> {
    fn text(&self) -> &'c [u8] {
        &self.content[..self.text_len as usize]
    }

    fn ids(&self) -> impl Iterator<Item = u32> + use<'c> {
        let (ids, _) = self.content[self.text_len as usize..].as_chunks();
        ids.iter().map(|id| u32::from_ne_bytes(*id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(cache: &SegmentCache, key: SegmentKey, text: &str) -> Option<Vec<u32>> {
        let mut ids = Vec::new();
        cache.append(key, &mut ids, |kept| kept == text.as_bytes())?;
        Some(ids)
    }

    /// Memory of buffers and maps.
    fn memory(cache: &SegmentCache) -> usize {
        let generation = |one: &Generation| {
            let slots = one.segments.capacity().div_ceil(7) * 8;
            one.buffer.capacity() + slots * SLOT_BYTES
        };
        let shards = cache.shards.iter().map(|shard| {
            let shard = shard.lock().unwrap();
            generation(&shard.young) + generation(&shard.old)
        });
        shards.sum()
    }

    /// Fills a cache twice.
    fn fill(cache: &SegmentCache, text_len: usize, ids_len: usize) {
        let ids = vec![1; ids_len];
        let bytes = text_len + size_of_val(&*ids);
        for i in 0..2 * CACHE_BYTES_MAX / bytes {
            let text = format!("{i:09}{}", "-".repeat(text_len - 9));
            let key = cache.key(&text, CacheScope::default(), 0);
            cache.put(key, &text, &ids);
        }
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
    fn memory_is_bounded_when_segments_change_in_kind() {
        let cache = SegmentCache::new();
        cache.put(SegmentKey(1), "a", &[1]);
        let once = cache.shard(SegmentKey(1)).bound.buffer;
        assert!(memory(&cache) > once, "a buffer grows");
        for (text_len, ids_len) in [(4000, 100), (64, 1), (500, 2000), (100, 50), (100_000, 1)] {
            fill(&cache, text_len, ids_len);
            let memory = memory(&cache);
            assert!(memory <= CACHE_BYTES_MAX, "{text_len}, {ids_len}: {memory}");
        }
    }

    #[test]
    fn a_lower_bound_shrinks_the_cache_at_once() {
        let cache = SegmentCache::new();
        fill(&cache, 1000, 1000);
        fill(&cache, 64, 1);
        assert!(memory(&cache) > 60 << 20);
        for bound in [36 << 20, 4 << 20, 0] {
            cache.set_bytes_max(bound);
            assert!(memory(&cache) <= bound, "{bound}: {}", memory(&cache));
            fill(&cache, 1000, 1000);
            let kept_bytes = cache.stats().kept_bytes;
            assert!(kept_bytes >= bound / 3);
            fill(&cache, SEGMENT_BYTES_MAX, 400_000);
            assert_eq!(cache.stats().kept_bytes, kept_bytes, "a long one evicts");
            assert!(memory(&cache) <= bound, "{bound}: {}", memory(&cache));
        }
        cache.set_bytes_max(CACHE_BYTES_MAX);
        fill(&cache, 1000, 1000);
        assert!(memory(&cache) > 32 << 20);
    }

    #[test]
    fn what_was_used_recently_survives_a_lower_bound() {
        let cache = SegmentCache::new();
        cache.put(SegmentKey(1), "old", &[1]);
        cache.put(SegmentKey(2), "b", &[2]);
        cache.set_bytes_max(CACHE_BYTES_MAX / 2);
        assert_eq!(get(&cache, SegmentKey(1), "old").as_deref(), Some(&[1][..]));
        assert_eq!(get(&cache, SegmentKey(2), "b").as_deref(), Some(&[2][..]));
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
