//! Physical blocks of the GPU: users, content, and order of eviction.
//!
//! As in vLLM, equal blocks are not merged: one key may have several physical copies. A block
//! without users keeps its content in the free queue and is evicted when it is allocated again,
//! oldest first. Block 0 is vLLM's null block and never allocated, so a pool of n blocks holds n −
//! 1.

use rustc_hash::FxHashMap;
use warmroute_proto::PrefixHash;

use super::journal::EventJournal;
use super::slot_list::SlotList;

#[derive(Clone, Copy, Default)]
struct PhysicalBlock {
    references: u32,
    key: Option<PrefixHash>,
}

/// The physical blocks that hold one key, oldest first.
enum Copies {
    One(u32),
    Many(Vec<u32>),
}

pub(super) struct BlockPool {
    blocks: Vec<PhysicalBlock>,
    free: SlotList,
    cached: FxHashMap<PrefixHash, Copies>,
}

impl BlockPool {
    pub(super) fn new(num_blocks: u32) -> Self {
        let mut free = SlotList::new(num_blocks as usize);
        for block in 1..num_blocks {
            free.push_back(block);
        }
        Self {
            blocks: vec![PhysicalBlock::default(); num_blocks as usize],
            free,
            cached: FxHashMap::default(),
        }
    }

    pub(super) const fn free_blocks(&self) -> usize {
        self.free.len()
    }

    /// Blocks that can be allocated.
    pub(super) const fn usable_blocks(&self) -> usize {
        self.blocks.len().saturating_sub(1)
    }

    /// The oldest copy of a key.
    pub(super) fn find(&self, key: PrefixHash) -> Option<u32> {
        match self.cached.get(&key)? {
            Copies::One(block) => Some(*block),
            Copies::Many(blocks) => blocks.first().copied(),
        }
    }

    /// Whether no sequence uses this block. Idle blocks count as free.
    pub(super) fn is_idle(&self, block: u32) -> bool {
        self.blocks[block as usize].references == 0
    }

    /// Adds a user to these cached blocks.
    pub(super) fn touch(&mut self, blocks: &[u32]) {
        for &block in blocks {
            if self.is_idle(block) {
                self.free.remove(block);
            }
            self.blocks[block as usize].references += 1;
        }
    }

    /// Allocates `count` blocks to `table` and evicts their content. The caller has checked that
    /// enough are free.
    pub(super) fn take(&mut self, count: usize, table: &mut Vec<u32>, journal: &mut EventJournal) {
        assert!(count <= self.free.len(), "more blocks taken than free");
        for _ in 0..count {
            let Some(block) = self.free.pop_front() else {
                return;
            };
            if let Some(key) = self.blocks[block as usize].key.take() {
                self.forget_copy(key, block);
                journal.removed(key);
            }
            self.blocks[block as usize].references = 1;
            table.push(block);
        }
    }

    /// Registers the key of a filled block.
    pub(super) fn cache(&mut self, block: u32, key: PrefixHash) {
        let slot = &mut self.blocks[block as usize];
        debug_assert!(slot.key.is_none(), "a block is cached once a life");
        slot.key = Some(key);
        self.cached
            .entry(key)
            .and_modify(|copies| copies.add(block))
            .or_insert(Copies::One(block));
    }

    /// Frees the blocks of a sequence. Its tail is evicted before its head; blocks without a key
    /// are reused first.
    pub(super) fn release(&mut self, table: &mut Vec<u32>) {
        for block in table.drain(..).rev() {
            let slot = &mut self.blocks[block as usize];
            slot.references -= 1;
            if slot.references > 0 {
                continue;
            }
            if slot.key.is_some() {
                self.free.push_back(block);
            } else {
                self.free.push_front(block);
            }
        }
    }

    /// Evicts one copy of a key, in use or not.
    pub(super) fn evict(&mut self, key: PrefixHash, journal: &mut EventJournal) -> bool {
        let Some(block) = self.find(key) else {
            return false;
        };
        self.blocks[block as usize].key = None;
        self.forget_copy(key, block);
        journal.removed(key);
        true
    }

    /// Evicts all keys, unless a block is in use.
    pub(super) fn reset(&mut self) -> bool {
        if self.free.len() != self.usable_blocks() {
            return false;
        }
        self.cached.clear();
        for block in &mut self.blocks {
            block.key = None;
        }
        true
    }

    /// Keys of all physical blocks, with duplicates.
    pub(super) fn keys(&self) -> impl Iterator<Item = PrefixHash> {
        self.blocks.iter().filter_map(|block| block.key)
    }

    fn forget_copy(&mut self, key: PrefixHash, block: u32) {
        let last = self
            .cached
            .get_mut(&key)
            .is_none_or(|copies| copies.remove(block) == CopiesLeft::None);
        if last {
            self.cached.remove(&key);
        }
    }
}

#[derive(PartialEq, Eq)]
enum CopiesLeft {
    Some,
    None,
}

impl Copies {
    fn add(&mut self, block: u32) {
        match self {
            Self::One(first) => *self = Self::Many(vec![*first, block]),
            Self::Many(blocks) => blocks.push(block),
        }
    }

    fn remove(&mut self, block: u32) -> CopiesLeft {
        match self {
            Self::One(_) => CopiesLeft::None,
            Self::Many(blocks) => {
                blocks.retain(|&held| held != block);
                match blocks.as_slice() {
                    [] => CopiesLeft::None,
                    [last] => {
                        *self = Self::One(*last);
                        CopiesLeft::Some
                    }
                    [_, _, ..] => CopiesLeft::Some,
                }
            }
        }
    }
}

#[cfg(test)]
impl BlockPool {
    /// Panics unless references, free queue and key map agree. `tables` are all sequences' blocks.
    pub(super) fn check(&self, tables: &[&[u32]]) {
        use std::collections::{BTreeMap, BTreeSet};

        let mut users = vec![0_u32; self.blocks.len()];
        for &block in tables.iter().copied().flatten() {
            users[block as usize] += 1;
        }
        assert_eq!(users[0], 0, "the null block is never handed out");
        let free: BTreeSet<u32> = self.free.iter().collect();
        assert_eq!(free.len(), self.free.len());
        let mut copies: BTreeMap<PrefixHash, BTreeSet<u32>> = BTreeMap::new();
        for (index, block) in (0..).zip(&self.blocks) {
            assert_eq!(block.references, users[index as usize], "block {index}");
            assert_eq!(
                free.contains(&index),
                index != 0 && block.references == 0,
                "block {index} is free exactly if nobody uses it"
            );
            if let Some(key) = block.key {
                copies.entry(key).or_default().insert(index);
            }
        }
        assert_eq!(copies.len(), self.cached.len());
        for (key, blocks) in copies {
            let listed: BTreeSet<u32> = match &self.cached[&key] {
                Copies::One(block) => [*block].into(),
                Copies::Many(listed) => listed.iter().copied().collect(),
            };
            assert_eq!(listed, blocks);
        }
    }
}
