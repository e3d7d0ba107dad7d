//! Cache events in the order of vLLM's publisher.
//!
//! An engine hash is opaque: it differs between two lives of an engine, links an event to its
//! parent and identifies removed blocks. [`super::EngineModel::held`] resolves prefixes.

use std::sync::Arc;

use warmroute_proto::{BlockSize, PrefixHash};

/// The engine's hash of a block and everything before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineHash(pub u64);

/// Tier of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Medium {
    Gpu,
    Cpu,
}

impl Medium {
    /// Name on the wire.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gpu => "GPU",
            Self::Cpu => "CPU",
        }
    }
}

/// Kind of layers of a KV-cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    FullAttention,
    /// A window of so many tokens.
    SlidingWindow(u32),
}

impl GroupKind {
    /// The word on the wire.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FullAttention => "full_attention",
            Self::SlidingWindow(_) => "sliding_window",
        }
    }
}

/// Inputs of a block's hash besides its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey {
    /// In every block of a request with an adapter.
    Lora(Arc<str>),
    /// A multimodal item that overlaps the block; it may begin before the block.
    Item { identifier: Arc<str>, offset: i64 },
    /// In block 0 only.
    Salt(Arc<str>),
}

/// Consecutive whole blocks of one request became cached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBlocks {
    /// Fewer than `tokens` covers if the group skips blocks outside its window.
    pub hashes: Vec<EngineHash>,
    /// Hash before the first covered block; `None` at depth 0.
    pub parent: Option<EngineHash>,
    pub tokens: Vec<u32>,
    pub block_size: BlockSize,
    /// One entry per hash, empty for a block without any; `None` where the engine leaves them out.
    pub extra_keys: Option<Vec<Vec<ExtraKey>>>,
    /// Tokens behind each named block that its hash covers; `None` if it covers none.
    pub lookahead: Option<Vec<Vec<u32>>>,
    pub lora_name: Option<Arc<str>>,
    pub medium: Medium,
    pub group: u32,
    pub kind: GroupKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    Stored(StoredBlocks),
    /// One physical copy was evicted; another one may remain.
    Removed {
        hash: EngineHash,
        medium: Medium,
        group: u32,
    },
    /// The GPU pools of all groups were cleared.
    Cleared,
}

/// The engine's hash of a prefix in one life of the engine.
#[must_use]
pub(super) const fn engine_hash(life: u64, prefix: PrefixHash) -> EngineHash {
    EngineHash(mix(prefix.0 ^ mix(life)))
}

/// `SplitMix64`'s finaliser: a bijection, so that equal engine hashes mean equal prefixes.
#[must_use]
pub(super) const fn mix(z: u64) -> u64 {
    let z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
