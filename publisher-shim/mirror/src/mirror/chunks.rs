//! Chunks of lower tiers: blocks several times as large as the engine's.
//!
//! A connector may store chunks of its own size; LMCache's have 256 tokens. A chunk counts as the
//! blocks that it consists of. Its hash stands for the last of them, so that the next chunk finds
//! its parent; the hashes of those before it are derived from it. The tier holds all blocks of a
//! chunk or none.
//!
//! Chunks are not the engine's own: their events carry neither salts, multimodal items nor adapters,
//! and whether removals follow depends on a server behind the connector.

use warmroute_proto::BlockSize;

use crate::wire::{EngineHash, StoredBlocks};

/// The hash of a chunk's block at `index`, which is not its last.
pub(super) const fn inner_hash(chunk: EngineHash, index: u64) -> EngineHash {
    // The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
    let mut hash = chunk.0 ^ (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    EngineHash(hash ^ (hash >> 31))
}

/// A store of chunks as one of blocks of `size`. `None` if its blocks are not a multiple of that
/// size, or if extra keys do not show to which of a chunk's blocks they belong.
pub(super) fn split(stored: &StoredBlocks, size: BlockSize) -> Option<StoredBlocks> {
    let size = u32::try_from(size.tokens()).ok()?;
    let blocks = u64::from(stored.block_size / size);
    if blocks < 2
        || !stored.block_size.is_multiple_of(size)
        || !stored.keys.is_empty()
        || stored.lookahead > 0
    {
        return None;
    }
    let blocks_of = |&chunk: &EngineHash| {
        let inner = (0..blocks - 1).map(move |index| inner_hash(chunk, index));
        inner.chain([chunk])
    };
    let named = u128::from(stored.block_size)
        * u128::from(stored.tokens_per_position)
        * stored.hashes.len() as u128;
    (named == stored.tokens.len() as u128).then(|| StoredBlocks {
        hashes: stored.hashes.iter().flat_map(blocks_of).collect(),
        block_size: size,
        reports_removals: false,
        ..stored.clone()
    })
}
