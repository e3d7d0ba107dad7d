//! The CPU tier of vLLM's offloading connector.
//!
//! Every block is copied when it is cached on the GPU, so it may be in both tiers. The copy that
//! was least recently stored or hit is evicted. Each key has at most one copy.

use rustc_hash::FxHashMap;
use warmroute_proto::PrefixHash;

use super::journal::EventJournal;
use super::request::EngineSequence;
use super::slot_list::SlotList;

pub(super) struct CpuTier {
    keys: Vec<Option<PrefixHash>>,
    slots: FxHashMap<PrefixHash, u32>,
    empty: Vec<u32>,
    /// Least recently used first.
    recency: SlotList,
}

impl CpuTier {
    pub(super) fn new(blocks: u32) -> Self {
        Self {
            keys: vec![None; blocks as usize],
            slots: FxHashMap::default(),
            empty: (0..blocks).rev().collect(),
            recency: SlotList::new(blocks as usize),
        }
    }

    pub(super) fn holds(&self, key: PrefixHash) -> bool {
        self.slots.contains_key(&key)
    }

    /// Copies one block of a sequence, or makes its copy the most recent one.
    pub(super) fn store(
        &mut self,
        sequence: &EngineSequence,
        block: usize,
        journal: &mut EventJournal,
    ) {
        let key = sequence.keys[block];
        if let Some(&slot) = self.slots.get(&key) {
            self.recency.remove(slot);
            self.recency.push_back(slot);
            return;
        }
        let Some(slot) = self.empty.pop().or_else(|| self.give_up_oldest(journal)) else {
            return;
        };
        self.keys[slot as usize] = Some(key);
        self.slots.insert(key, slot);
        self.recency.push_back(slot);
        journal.offloaded(sequence, block);
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = PrefixHash> {
        self.keys.iter().copied().flatten()
    }

    fn give_up_oldest(&mut self, journal: &mut EventJournal) -> Option<u32> {
        let slot = self.recency.pop_front()?;
        if let Some(key) = self.keys[slot as usize].take() {
            self.slots.remove(&key);
            journal.offload_removed(key);
        }
        Some(slot)
    }
}
