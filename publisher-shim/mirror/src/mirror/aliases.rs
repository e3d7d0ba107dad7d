//! Further engine hashes of a block.

use super::Mirror;
use super::nodes::{ALIASES_MAX, NodeId};
use crate::wire::EngineHash;

impl Mirror {
    /// Forgets one of many engine hashes of a block that nothing holds by it: an engine may name
    /// equal blocks by ever new ones.
    pub(super) fn drop_alias(&mut self, id: NodeId, hash: EngineHash) {
        if self.nodes.aliases(id).len() <= ALIASES_MAX {
            return;
        }
        let slots = |tier| self.groups.slots(tier);
        let is_held = !self.engine_hashes.references(hash, slots).is_empty();
        if !is_held && self.nodes.drop_alias(id, hash) {
            self.engine_hashes.forget(hash);
            self.block_chain.forget(hash);
        }
    }
}
