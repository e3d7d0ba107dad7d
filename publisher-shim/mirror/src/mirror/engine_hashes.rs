//! The engine's own entries: which prefix each means, and how often the engine holds it.

use std::collections::hash_map::Entry;

use rustc_hash::FxHashMap;
use warmroute_proto::Tier;

use super::nodes::{GroupSlot, NodeId};
use crate::wire::EngineHash;

#[derive(Clone, Debug, Default)]
pub(super) struct EngineHashes {
    entries: FxHashMap<EngineHash, HashEntry>,
    /// References of groups behind the first.
    more: FxHashMap<(EngineHash, GroupSlot, Tier), u32>,
    /// References in GPU memory: each is one physical block.
    gpu: u64,
}

#[derive(Clone, Copy, Debug)]
struct HashEntry {
    node: NodeId,
    first_group: [u32; 3],
}

impl EngineHashes {
    pub(super) fn node(&self, hash: EngineHash) -> Option<NodeId> {
        self.entries.get(&hash).map(|name| name.node)
    }

    pub(super) const fn gpu_references(&self) -> u64 {
        self.gpu
    }

    /// The node that a name means, and whether it is new; a new one is made by `make`. Counts one
    /// reference to it, if there is one to count. `None` if there is no room.
    pub(super) fn name(
        &mut self,
        hash: EngineHash,
        reference: Option<(GroupSlot, Tier)>,
        make: impl FnOnce() -> Option<NodeId>,
    ) -> Option<(NodeId, bool)> {
        let (name, is_new) = match self.entries.entry(hash) {
            Entry::Occupied(name) => (name.into_mut(), false),
            Entry::Vacant(vacant) => {
                let node = make()?;
                let name = HashEntry {
                    node,
                    first_group: [0; 3],
                };
                (vacant.insert(name), true)
            }
        };
        let node = name.node;
        if let Some((slot, tier)) = reference {
            if slot == 0 {
                let count = &mut name.first_group[tier.index()];
                *count = count.saturating_add(1);
            } else {
                *self.more.entry((hash, slot, tier)).or_default() += 1;
            }
            self.gpu += u64::from(tier == Tier::Gpu);
        }
        Some((node, is_new))
    }

    pub(super) fn add(&mut self, hash: EngineHash, slot: GroupSlot, tier: Tier) {
        if slot == 0 {
            let Some(name) = self.entries.get_mut(&hash) else {
                return;
            };
            let count = &mut name.first_group[tier.index()];
            *count = count.saturating_add(1);
        } else {
            *self.more.entry((hash, slot, tier)).or_default() += 1;
        }
        self.gpu += u64::from(tier == Tier::Gpu);
    }

    /// One reference less; the node that it held, or `None` if there was none.
    pub(super) fn drop(&mut self, hash: EngineHash, slot: GroupSlot, tier: Tier) -> Option<NodeId> {
        let name = self.entries.get_mut(&hash)?;
        let node = name.node;
        if slot == 0 {
            let count = &mut name.first_group[tier.index()];
            *count = count.checked_sub(1)?;
        } else {
            let count = self.more.get_mut(&(hash, slot, tier))?;
            *count -= 1;
            if *count == 0 {
                self.more.remove(&(hash, slot, tier));
            }
        }
        self.gpu -= u64::from(tier == Tier::Gpu);
        Some(node)
    }

    /// All references of a name, given the number of main groups by tier.
    pub(super) fn references(
        &self,
        hash: EngineHash,
        groups: impl Fn(Tier) -> GroupSlot,
    ) -> Vec<(GroupSlot, Tier, u32)> {
        let mut references = Vec::with_capacity(1);
        for tier in Tier::ALL {
            for slot in 0..groups(tier) {
                let count = if slot == 0 {
                    self.entries
                        .get(&hash)
                        .map(|name| name.first_group[tier.index()])
                } else {
                    self.more.get(&(hash, slot, tier)).copied()
                };
                if let Some(count @ 1..) = count {
                    references.push((slot, tier, count));
                }
            }
        }
        references
    }

    /// Takes a name back as it was saved. `false` if it is there already.
    pub(super) fn load(
        &mut self,
        hash: EngineHash,
        node: NodeId,
        references: &[(GroupSlot, Tier, u32)],
    ) -> bool {
        if self.entries.contains_key(&hash) {
            return false;
        }
        let mut first_group = [0; 3];
        for &(slot, tier, count) in references {
            if slot == 0 {
                first_group[tier.index()] = count;
            } else {
                self.more.insert((hash, slot, tier), count);
            }
            if tier == Tier::Gpu {
                self.gpu += u64::from(count);
            }
        }
        self.entries.insert(hash, HashEntry { node, first_group });
        true
    }

    /// Its prefix is gone; so are all references.
    pub(super) fn forget(&mut self, hash: EngineHash) {
        self.entries.remove(&hash);
    }
}
