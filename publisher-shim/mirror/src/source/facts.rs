//! What the engine reports of itself over HTTP.

use warmroute_proto::BlockSize;

use super::SourceCore;

/// The engine's own facts, as far as they are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineFacts {
    /// Provisional: that of the events takes precedence.
    pub block_size: Option<BlockSize>,
    /// Its number of KV blocks.
    pub blocks_max: Option<u64>,
    /// It decodes speculatively.
    pub speculates: Option<bool>,
    /// It has a KV connector.
    pub connects: Option<bool>,
}

impl SourceCore {
    /// Takes the engine's own facts.
    pub fn learn(&mut self, facts: EngineFacts) {
        self.mirror.set_blocks_max(facts.blocks_max);
        self.mirror.set_speculation(facts.speculates);
        self.mirror.set_connector(facts.connects);
        if let Some(block_size) = facts.block_size {
            self.mirror.suggest_block_size(block_size);
        }
    }
}
