//! What an engine is made of.

use std::sync::Arc;

use warmroute_proto::BlockSize;

use super::event::GroupKind;
use super::timing::TimingProfile;

#[derive(Clone, Debug)]
pub struct EngineConfig {
    pub block_size: BlockSize,
    /// Physical blocks, counted as vLLM does: one of them is its null block and never used.
    pub num_blocks: u32,
    /// Tokens that one step may compute.
    pub max_num_batched_tokens: usize,
    /// Requests that may run at the same time.
    pub max_num_seqs: usize,
    /// Prompt and output of one request; capped by what the pool can hold.
    pub max_model_len: usize,
    /// Blocks of the CPU tier; 0 for none.
    pub cpu_blocks: u32,
    /// The KV-cache groups in the engine's order. Exactly one is full attention, and only that one
    /// occupies blocks: the others exist in the events alone.
    pub groups: Vec<GroupKind>,
    /// Drawn anew at every start of an engine, so that its hashes differ from those before.
    pub life: u64,
    /// Without, nothing is published, which makes a large simulation faster.
    pub events: EventMode,
    pub profile: TimingProfile,
    /// The tokens that may be generated.
    pub vocabulary: Arc<[u32]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventMode {
    Published,
    Off,
}

impl EngineConfig {
    /// vLLM's defaults around a pool of this shape, taking no time.
    #[must_use]
    pub fn new(block_size: BlockSize, num_blocks: u32) -> Self {
        Self {
            block_size,
            num_blocks,
            max_num_batched_tokens: 8192,
            max_num_seqs: 256,
            max_model_len: usize::MAX,
            cpu_blocks: 0,
            groups: vec![GroupKind::FullAttention],
            life: 0,
            events: EventMode::Published,
            profile: TimingProfile::INSTANT,
            vocabulary: (32..127).collect(),
        }
    }

    /// The longest request that this engine takes.
    #[must_use]
    pub fn longest_request(&self) -> usize {
        let usable = self.num_blocks.saturating_sub(1) as usize;
        self.max_model_len
            .min(usable.saturating_mul(self.block_size.tokens()))
    }

    /// The group whose blocks a prefix hit needs.
    pub(super) fn main_group(&self) -> usize {
        self.groups
            .iter()
            .position(|&kind| kind == GroupKind::FullAttention)
            .unwrap_or(0)
    }
}
