//! Place of each known prefix: open addressing, linear probing, deletion without tombstones.
//!
//! A slot is 8 bytes, a place and 32 bits of the hash, so that growing and deleting do not read the
//! blocks. The caller confirms a hit against the whole hash. The table is divided into shards by
//! the first bits of the hash, so that growing a shard is fast.

use std::hint::black_box;

use warmroute_proto::PrefixHash;

use super::blocks::CHUNK;
use super::heap::heap;
use super::ids::BlockPlace;

/// Growing a shard blocks readers: with this many it takes microseconds even at tens of millions of
/// blocks.
const SHARDS: usize = 1 << SHARD_BITS;
const SHARD_BITS: u32 = 12;
const SLOTS_MIN: usize = 8;
const EMPTY: TableSlot = TableSlot(0);

/// Tag in the high half, place plus one in the low half; zero if empty.
#[derive(Clone, Copy, PartialEq, Eq)]
struct TableSlot(u64);

impl TableSlot {
    const fn new(tag: u32, place: BlockPlace) -> Self {
        Self(((tag as u64) << 32) | (place.0 as u64 + 1))
    }

    const fn tag(self) -> u32 {
        (self.0 >> 32) as u32
    }

    const fn place(self) -> BlockPlace {
        BlockPlace((self.0 as u32).wrapping_sub(1))
    }
}

#[derive(Default)]
struct TableShard {
    slots: Vec<u64>,
    used: usize,
}

pub(super) struct PrefixTable {
    shards: Vec<TableShard>,
    bytes: usize,
}

impl Default for PrefixTable {
    fn default() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| TableShard::default()).collect(),
            bytes: 0,
        }
    }
}

const fn shard_of(hash: PrefixHash) -> usize {
    (hash.0 >> (u64::BITS - SHARD_BITS)) as usize
}

const fn tag_of(hash: PrefixHash) -> u32 {
    (hash.0 >> (u32::BITS - SHARD_BITS)) as u32
}

/// First slot of a tag's probing. Ascends with the tag.
const fn home(tag: u32, slots: usize) -> usize {
    ((tag as u64 * slots as u64) >> 32) as usize
}

impl PrefixTable {
    /// Reserves room for this many hashes. The table must be empty.
    pub(super) fn expect(&mut self, hashes: usize) {
        // Hashes spread evenly: three standard deviations above the mean suffice.
        let mean = hashes / SHARDS;
        let most = mean + 3 * mean.isqrt();
        let slots = most * 4 / 3 + 1;
        if slots > SLOTS_MIN {
            self.bytes = 0;
            for shard in &mut self.shards {
                shard.resize(slots);
                self.bytes += shard.bytes();
            }
        }
    }

    /// The place of `hash` that `is_it` confirms.
    pub(super) fn find(
        &self,
        hash: PrefixHash,
        is_it: impl Fn(BlockPlace) -> bool,
    ) -> Option<BlockPlace> {
        let slots = &self.shards[shard_of(hash)].slots[..];
        let tag = tag_of(hash);
        let mut at = home(tag, slots.len());
        while let Some(&slot) = slots.get(at) {
            let slot = TableSlot(slot);
            if slot == EMPTY {
                return None;
            }
            if slot.tag() == tag && is_it(slot.place()) {
                return Some(slot.place());
            }
            at += 1;
            if at == slots.len() {
                at = 0;
            }
        }
        None
    }

    /// Reads the slots of these hashes together: one memory latency instead of many.
    pub(super) fn touch(&self, hashes: &[PrefixHash]) {
        let mut sum = 0_u64;
        for &hash in hashes {
            let slots = &self.shards[shard_of(hash)].slots[..];
            sum ^= slots
                .get(home(tag_of(hash), slots.len()))
                .copied()
                .unwrap_or(0);
        }
        black_box(sum);
    }

    /// Adds an absent hash.
    pub(super) fn insert(&mut self, hash: PrefixHash, place: BlockPlace) {
        let shard = &mut self.shards[shard_of(hash)];
        if (shard.used + 1) * 4 > shard.slots.len() * 3 {
            self.bytes -= shard.bytes();
            shard.resize((shard.slots.len() * 3 / 2).max(SLOTS_MIN));
            self.bytes += shard.bytes();
        }
        shard.put(TableSlot::new(tag_of(hash), place));
        shard.used += 1;
    }

    pub(super) fn erase(&mut self, hash: PrefixHash, place: BlockPlace) {
        let shard = &mut self.shards[shard_of(hash)];
        let tag = tag_of(hash);
        let wanted = TableSlot::new(tag, place);
        let length = shard.slots.len();
        let mut at = home(tag, length);
        loop {
            match shard.slots.get(at) {
                Some(&slot) if TableSlot(slot) == wanted => break,
                Some(&slot) if TableSlot(slot) != EMPTY => at = next(at, length),
                Some(_) | None => {
                    debug_assert!(false, "an erased hash is present");
                    return;
                }
            }
        }
        shard.close_gap(at);
        shard.used -= 1;
        let smaller = match shard.used {
            0 => 0,
            used if used * 5 <= 2 * length => (used * 2).max(SLOTS_MIN),
            _ => length,
        };
        if smaller < length {
            self.bytes -= shard.bytes();
            shard.resize(smaller);
            self.bytes += shard.bytes();
        }
    }

    /// Moves a chunk's blocks to another chunk.
    pub(super) fn replace(&mut self, prefixes: &[u64], from: u32, to: u32) {
        for (&prefix, offset) in prefixes.iter().zip(0..) {
            let hash = PrefixHash(prefix);
            let [from, to] = [from, to].map(|chunk| {
                let place = BlockPlace(chunk * CHUNK as u32 + offset);
                TableSlot::new(tag_of(hash), place)
            });
            let slots = &mut self.shards[shard_of(hash)].slots[..];
            let length = slots.len();
            let mut at = home(tag_of(hash), length);
            loop {
                match slots.get_mut(at) {
                    Some(slot) if TableSlot(*slot) == from => {
                        *slot = to.0;
                        break;
                    }
                    Some(slot) if TableSlot(*slot) != EMPTY => at = next(at, length),
                    Some(_) | None => {
                        debug_assert!(false, "a moved hash is present");
                        break;
                    }
                }
            }
        }
    }

    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }
}

const fn next(at: usize, length: usize) -> usize {
    if at + 1 == length { 0 } else { at + 1 }
}

impl TableShard {
    const fn bytes(&self) -> usize {
        heap(self.slots.len() * size_of::<u64>())
    }

    fn resize(&mut self, slots: usize) {
        let old = std::mem::replace(&mut self.slots, vec![0; slots]);
        for slot in old.into_iter().map(TableSlot).filter(|&slot| slot != EMPTY) {
            self.put(slot);
        }
    }

    fn put(&mut self, slot: TableSlot) {
        let length = self.slots.len();
        let mut at = home(slot.tag(), length);
        while self.slots[at] != EMPTY.0 {
            at = next(at, length);
        }
        self.slots[at] = slot.0;
    }

    /// Empties a slot and moves later entries forward towards their home.
    fn close_gap(&mut self, mut gap: usize) {
        let length = self.slots.len();
        let distance = |from: usize, to: usize| {
            if to >= from {
                to - from
            } else {
                to + length - from
            }
        };
        let mut at = next(gap, length);
        while self.slots[at] != EMPTY.0 {
            let home = home(TableSlot(self.slots[at]).tag(), length);
            if distance(home, at) >= distance(gap, at) {
                self.slots[gap] = self.slots[at];
                gap = at;
            }
            at = next(at, length);
        }
        self.slots[gap] = EMPTY.0;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rustc_hash::FxHashMap;

    use super::*;

    proptest! {
        /// Hashes that differ in few bits crowd together; all stay findable through any deletions.
        #[test]
        fn table_is_a_map(steps in prop::collection::vec((0..64_u64, any::<bool>()), 0..400)) {
            let mut table = PrefixTable::default();
            let mut model = FxHashMap::default();
            for (name, insert) in steps {
                let hash = PrefixHash((name % 8) << 49 | (name / 8) << 10);
                let place = BlockPlace(name as u32);
                if insert && model.insert(hash, place).is_none() {
                    table.insert(hash, place);
                } else if !insert && model.remove(&hash).is_some() {
                    table.erase(hash, place);
                }
                for name in 0..64_u64 {
                    let hash = PrefixHash((name % 8) << 49 | (name / 8) << 10);
                    let found = table.find(hash, |place| place == BlockPlace(name as u32));
                    prop_assert_eq!(found, model.get(&hash).copied());
                }
            }
        }
    }
}
