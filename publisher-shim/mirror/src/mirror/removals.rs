//! Removals, and events that may be some.

use warmroute_proto::Tier;

use super::groups::GroupRole;
use super::nodes::NodeId;
use super::references::GroupTier;
use super::{Mirror, READ_AHEAD_MAX, chunks};
use crate::wire::{EngineHash, Medium, RemovedBlocks, UnknownEvent};

impl Mirror {
    /// Lowers what an event that does not decode can have changed, and nothing else.
    pub(super) fn meet_unknown(&mut self, unknown: UnknownEvent) {
        let named = unknown.medium.map(Medium::tier);
        for tier in Tier::ALL {
            let is_named = named.is_none_or(|named| named == tier);
            let role = self.groups.role(tier, unknown.group);
            if !is_named || unknown.group.is_some() && role == Some(GroupRole::Ignored) {
                continue;
            }
            if unknown.is_store {
                self.knowledge.miss(tier);
            } else {
                self.knowledge.distrust(tier);
            }
        }
    }

    /// Reads the memory that removals of these blocks need. Folding mostly waits for it, one block
    /// after the other; these reads depend on nothing and wait together.
    fn read_ahead_removals(&self, hashes: &[EngineHash]) {
        if hashes.len() < 2 {
            return;
        }
        let mut known = [NodeId::NONE; READ_AHEAD_MAX];
        for (id, &hash) in known.iter_mut().zip(hashes) {
            *id = self.engine_hashes.node(hash).unwrap_or(NodeId::NONE);
        }
        let known = known.iter().take(hashes.len());
        let nodes = known.filter_map(|&id| self.nodes.get(id));
        self.nodes.read_ahead(nodes.map(|node| node.prefix));
    }

    /// Subtracts a reference of each block. A block without one is not credited: its removal costs
    /// nothing and shows only that a store was missed.
    pub(super) fn remove(&mut self, removed: &RemovedBlocks) {
        let tier = removed.medium.tier();
        let slot = match self.groups.role(tier, removed.group) {
            Some(GroupRole::Ignored) => return,
            // Nothing is counted there.
            Some(_) | None if self.resume.is_some() && tier != Tier::Gpu => return,
            Some(GroupRole::Counted(slot)) => Some(slot),
            Some(GroupRole::Untracked) | None => None,
        };
        self.knowledge.saw_removal(tier, removed.group.is_some());
        for (index, &hash) in removed.hashes.iter().enumerate() {
            if index % READ_AHEAD_MAX == 0 {
                self.read_ahead_removals(&removed.hashes[index..]);
            }
            let had_reference = slot.is_some_and(|slot| {
                let at = GroupTier { slot, tier };
                self.subtract_chunk(hash, at);
                self.subtract_reference(hash, at)
            });
            if !had_reference {
                self.counters.removals_unknown += 1;
                self.knowledge.miss_pair(tier);
                if self.groups.are_named_otherwise(tier, removed.group) {
                    // It may mean a block that is credited.
                    self.knowledge.distrust(tier);
                }
            }
        }
    }

    /// Subtracts a reference of all blocks of a chunk but the last. A plain block has none.
    fn subtract_chunk(&mut self, chunk: EngineHash, at: GroupTier) {
        if at.tier != Tier::Gpu {
            let inner = (0..).map(|index| chunks::inner_hash(chunk, index));
            for hash in inner {
                if !self.subtract_reference(hash, at) {
                    break;
                }
            }
        }
    }

    /// Subtracts a reference of a block or orphan. `false` if there is none.
    fn subtract_reference(&mut self, hash: EngineHash, at: GroupTier) -> bool {
        match self.engine_hashes.subtract(hash, at) {
            Some(id) => {
                self.nodes.subtract_reference(id, at);
                self.touch(id);
                if self.nodes.is_emitted(id, at.tier) && !self.is_held(id, at.tier) {
                    self.dipped.push((id, at.tier));
                }
                self.drop_alias(id, hash);
                true
            }
            None => self.orphans.remove(hash, at),
        }
    }
}
