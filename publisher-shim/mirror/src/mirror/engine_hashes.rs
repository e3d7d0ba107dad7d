//! The engine's block hashes: the prefix of each, and the references that the engine holds.

use std::collections::hash_map::Entry;

use rustc_hash::FxHashMap;
use warmroute_proto::Tier;

use super::nodes::NodeId;
use super::references::{FirstGroup, FurtherGroups, GroupSlot, GroupTier, References};
use crate::wire::EngineHash;

#[derive(Clone, Debug, Default)]
pub(super) struct EngineHashes {
    entries: FxHashMap<EngineHash, HashEntry>,
    further: FurtherGroups<EngineHash>,
    /// References in GPU memory: each is one physical block.
    gpu: u64,
}

#[derive(Clone, Copy, Debug)]
struct HashEntry {
    node: NodeId,
    first_group: FirstGroup,
}

impl EngineHashes {
    pub(super) fn node(&self, hash: EngineHash) -> Option<NodeId> {
        self.entries.get(&hash).map(|entry| entry.node)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) const fn gpu_references(&self) -> u64 {
        self.gpu
    }

    /// The node of a hash, and whether the hash is new; `make` makes the node of a new one.
    /// Counts a reference, if one is given. `None` if `make` returns `None`.
    pub(super) fn find_or_insert(
        &mut self,
        hash: EngineHash,
        reference: Option<GroupTier>,
        make: impl FnOnce() -> Option<NodeId>,
    ) -> Option<(NodeId, bool)> {
        let (entry, is_new) = match self.entries.entry(hash) {
            Entry::Occupied(entry) => (entry.into_mut(), false),
            Entry::Vacant(vacant) => {
                let entry = HashEntry {
                    node: make()?,
                    first_group: FirstGroup::default(),
                };
                (vacant.insert(entry), true)
            }
        };
        let node = entry.node;
        if let Some(at) = reference {
            self.further.add(hash, &mut entry.first_group, at, 1);
            self.gpu += u64::from(at.tier == Tier::Gpu);
        }
        Some((node, is_new))
    }

    /// Adds references to a known hash.
    pub(super) fn add(&mut self, hash: EngineHash, at: GroupTier, count: u32) {
        let Some(entry) = self.entries.get_mut(&hash) else {
            debug_assert!(false, "a reference of an unknown hash");
            return;
        };
        self.further.add(hash, &mut entry.first_group, at, count);
        if at.tier == Tier::Gpu {
            self.gpu += u64::from(count);
        }
    }

    /// Subtracts one reference. Returns the hash's node, or `None` if there is no reference.
    pub(super) fn subtract(&mut self, hash: EngineHash, at: GroupTier) -> Option<NodeId> {
        let entry = self.entries.get_mut(&hash)?;
        self.further.subtract(hash, &mut entry.first_group, at)?;
        self.gpu -= u64::from(at.tier == Tier::Gpu);
        Some(entry.node)
    }

    /// All references of a hash, given the number of counted groups by tier.
    pub(super) fn references(
        &self,
        hash: EngineHash,
        slots: impl Fn(Tier) -> GroupSlot,
    ) -> References {
        let mut references = Vec::with_capacity(1);
        let Some(entry) = self.entries.get(&hash) else {
            return references;
        };
        for tier in Tier::ALL {
            for slot in 0..slots(tier) {
                let at = GroupTier { slot, tier };
                let count = self.further.get(hash, &entry.first_group, at);
                if count > 0 {
                    references.push((at, count));
                }
            }
        }
        references
    }

    /// Restores a saved hash. `false` if it is there already.
    pub(super) fn restore(
        &mut self,
        hash: EngineHash,
        node: NodeId,
        references: &References,
    ) -> bool {
        let Entry::Vacant(vacant) = self.entries.entry(hash) else {
            return false;
        };
        vacant.insert(HashEntry {
            node,
            first_group: FirstGroup::default(),
        });
        for &(at, count) in references {
            self.add(hash, at, count);
        }
        true
    }

    /// Drops a hash whose prefix, and so all references, are gone.
    pub(super) fn forget(&mut self, hash: EngineHash) {
        self.entries.remove(&hash);
    }
}
