//! Configuration of an engine.

use std::sync::Arc;

use warmroute_proto::{BlockCut, BlockSize};

use super::event::GroupKind;
use super::timing::TimingProfile;

#[derive(Clone, Debug)]
pub struct EngineConfig {
    pub block_size: BlockSize,
    /// Tokens behind a block that its hash covers, as with EAGLE or MTP: a block is cached once they
    /// are known. vLLM has none with a connector, so that the CPU tier must be off.
    pub lookahead: u32,
    /// Physical blocks as vLLM counts them: one is the null block and never used.
    pub num_blocks: u32,
    /// Tokens that one step may compute.
    pub max_num_batched_tokens: usize,
    /// Requests that may run at the same time.
    pub max_num_seqs: usize,
    /// Tokens of prompt and output of one request; also limited by the pool.
    pub max_model_len: usize,
    /// Blocks of the CPU tier; 0 for none.
    pub cpu_blocks: u32,
    /// Blocks in a chunk of the CPU tier. A hit there needs whole chunks from the first one on.
    pub cpu_chunk_blocks: usize,
    /// KV-cache groups in the engine's order. Exactly one is full attention, and only that one
    /// occupies blocks; the others exist in the events, and limit hits.
    pub groups: Vec<GroupKind>,
    /// Different at every start of an engine, so that its hashes differ.
    pub life: u64,
    /// `Off` makes a large simulation faster.
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
    /// vLLM's defaults with a pool of this shape; steps take no time.
    #[must_use]
    pub fn new(block_size: BlockSize, num_blocks: u32) -> Self {
        Self {
            block_size,
            lookahead: 0,
            num_blocks,
            max_num_batched_tokens: 8192,
            max_num_seqs: 256,
            max_model_len: usize::MAX,
            cpu_blocks: 0,
            cpu_chunk_blocks: 1,
            groups: vec![GroupKind::FullAttention],
            life: 0,
            events: EventMode::Published,
            profile: TimingProfile::INSTANT,
            vocabulary: (32..127).collect(),
        }
    }

    #[must_use]
    pub const fn block_cut(&self) -> BlockCut {
        BlockCut {
            size: self.block_size,
            lookahead: self.lookahead,
        }
    }

    /// Tokens of the longest request that this engine accepts.
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
