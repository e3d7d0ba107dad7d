//! Names of blocks: local hashes over tokens, prefix hashes over local hashes.
//!
//! A local hash is XXH3-64 over the block's tokens (little-endian `u32`), then the sorted 64-bit
//! hashes of the multimodal items that lie in it; the seed carries LoRA and salt. This is the
//! scheme of dynamo-kv-router, so that hashes of text can be exchanged with it. Where an engine names
//! a block by the tokens behind it too ([`BlockCut::lookahead`]), these follow the block's own. The
//! hash of an item has its place besides its content, as the engine's key of the block has: two
//! images that change places in one block make another block.
//!
//! A prefix hash is a chain over local hashes. Each step is one 64 × 64 → 128 bit multiplication
//! whose halves are folded together, as wyhash does (Wang Yi,
//! <https://github.com/wangyi-fudan/wyhash>): five or six cycles of latency, which overlap with the
//! hashing of the next block's tokens, where a chain of XXH3 steps would double the cost. Local
//! hashes are well mixed, so that one folded multiplication a step mixes fully.
//!
//! Both are wire values, which never change; the tests hold their vectors.

use std::ops::Range;
use std::sync::Arc;

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::BlockCut;

/// Names one block by its content alone.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Encode, Decode,
)]
#[serde(transparent)]
pub struct LocalHash(pub u64);

/// Names a block together with all blocks before it: equal prefix hashes mean equal prefixes.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Encode, Decode,
)]
#[serde(transparent)]
pub struct PrefixHash(pub u64);

/// Separates equal tokens by LoRA adapter, tenant's salt and unreproducible key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Encode, Decode)]
#[serde(transparent)]
pub struct Seed(pub u64);

/// Stable: the seed of dynamo-kv-router.
const PLAIN_SEED: u64 = 1337;
const LORA_SEED: u64 = 0;
const SALT_SEED: u64 = 1;
const OPAQUE_SEED: u64 = 2;
const ITEM_SEED: u64 = 3;

impl Seed {
    pub const PLAIN: Self = Self(PLAIN_SEED);

    /// The seed of a request or event with these attributes. An empty name counts as absent.
    #[must_use]
    pub fn new(lora_name: Option<&str>, cache_salt: Option<&str>) -> Self {
        let seed = Self::PLAIN;
        let seed = match lora_name {
            Some(name) if !name.is_empty() => seed.with_lora(name),
            Some(_) | None => seed,
        };
        match cache_salt {
            Some(salt) if !salt.is_empty() => seed.with_salt(salt),
            Some(_) | None => seed,
        }
    }

    #[must_use]
    pub fn with_lora(self, name: &str) -> Self {
        self.plus(xxh3_64_with_seed(name.as_bytes(), LORA_SEED))
    }

    #[must_use]
    pub fn with_salt(self, salt: &str) -> Self {
        self.plus(xxh3_64_with_seed(salt.as_bytes(), SALT_SEED))
    }

    /// The seed of blocks whose engine key a router cannot reproduce: no request has it. `key` is
    /// the raw key as the engine sent it.
    #[must_use]
    pub fn with_opaque(self, key: &[u8]) -> Self {
        self.plus(xxh3_64_with_seed(key, OPAQUE_SEED) | 1)
    }

    const fn plus(self, summand: u64) -> Self {
        Self(self.0.wrapping_add(summand))
    }
}

impl LocalHash {
    /// The root of the resume points of an engine whose hits need more than an unbroken run of
    /// blocks: no block has this hash. Stable.
    pub const RESUME_ROOT: Self = Self(0x7265_7375_6d65_3a31);

    /// The hash of one whole block, given the tokens that its name covers. `items` are the hashes of
    /// multimodal items in them, in any order.
    #[must_use]
    pub fn of_block(tokens: &[u32], items: &[u64], seed: Seed) -> Self {
        if cfg!(target_endian = "little") && items.is_empty() {
            return Self(xxh3_64_with_seed(bytemuck::cast_slice(tokens), seed.0));
        }
        let mut items = items.to_vec();
        items.sort_unstable();
        let tokens = tokens.iter().flat_map(|token| token.to_le_bytes());
        let items = items.iter().flat_map(|item| item.to_le_bytes());
        let bytes: Vec<u8> = tokens.chain(items).collect();
        Self(xxh3_64_with_seed(&bytes, seed.0))
    }
}

/// A multimodal item in a prompt, as an engine places it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedItem {
    /// The engine's name of the item's content.
    pub identifier: Arc<str>,
    /// First prompt token of the item, and their number.
    pub offset: usize,
    pub length: usize,
}

impl PlacedItem {
    /// Its first token's distance from `start`; negative if it begins before.
    #[must_use]
    pub fn offset_from(&self, start: usize) -> i64 {
        let signed = |position| i64::try_from(position).unwrap_or(i64::MAX);
        signed(self.offset) - signed(start)
    }

    const fn end(&self) -> usize {
        self.offset.saturating_add(self.length)
    }
}

/// The items that lie in these tokens, at least in part. `items` follow each other.
pub fn items_within(
    items: &[PlacedItem],
    tokens: Range<usize>,
) -> impl Iterator<Item = &PlacedItem> {
    let first = items.partition_point(|item| item.end() <= tokens.start);
    items[first..]
        .iter()
        .take_while(move |item| item.offset < tokens.end)
}

/// The number of an item's content. An identifier of 64 hexadecimal digits is the number in its
/// first 16 digits, as in dynamo-kv-router. Any other one (operators may choose their own) is
/// hashed.
#[must_use]
pub fn item_number(identifier: &str) -> u64 {
    const DIGITS: usize = 16;
    let is_digest = identifier.len() == 64 && identifier.bytes().all(|b| b.is_ascii_hexdigit());
    let digits = identifier.get(..DIGITS).filter(|_| is_digest);
    let number = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    number.unwrap_or_else(|| xxh3_64(identifier.as_bytes()))
}

/// The hash of an item in a block, by its whole identifier: clients may choose it. `offset` is that
/// of [`PlacedItem::offset_from`] the block's start.
#[must_use]
pub fn item_hash(identifier: &str, offset: i64) -> u64 {
    let mut bytes = [0; 2 * size_of::<u64>()];
    let content = xxh3_64_with_seed(identifier.as_bytes(), ITEM_SEED);
    bytes[..size_of::<u64>()].copy_from_slice(&content.to_le_bytes());
    bytes[size_of::<u64>()..].copy_from_slice(&offset.to_le_bytes());
    xxh3_64_with_seed(&bytes, ITEM_SEED)
}

/// Like [`local_hashes`], for a prompt with multimodal items that follow each other.
#[must_use]
pub fn local_hashes_with_items(
    tokens: &[u32],
    cut: impl Into<BlockCut>,
    seed: Seed,
    items: &[PlacedItem],
) -> Vec<LocalHash> {
    let cut = cut.into();
    if items.is_empty() {
        return local_hashes(tokens, cut, seed);
    }
    let hash_of = |(start, tokens): (usize, &[u32])| {
        let inside = items_within(items, start..start + tokens.len());
        let hashes = inside.map(|item| item_hash(&item.identifier, item.offset_from(start)));
        LocalHash::of_block(tokens, &hashes.collect::<Vec<_>>(), seed)
    };
    covered(tokens, cut).map(hash_of).collect()
}

/// The local hashes of a token sequence's named blocks. A partial last block has none.
#[must_use]
pub fn local_hashes(tokens: &[u32], cut: impl Into<BlockCut>, seed: Seed) -> Vec<LocalHash> {
    let cut = cut.into();
    let mut hashes = Vec::with_capacity(cut.blocks(tokens.len()));
    each_block(tokens, cut, seed, |hash| hashes.push(hash));
    hashes
}

/// The prefix hashes of a token sequence's named blocks. Costs little more than [`local_hashes`]:
/// the chain overlaps with the hashing of the tokens.
#[must_use]
pub fn prompt_hashes(tokens: &[u32], cut: impl Into<BlockCut>, seed: Seed) -> Vec<PrefixHash> {
    let cut = cut.into();
    let mut hashes = Vec::with_capacity(cut.blocks(tokens.len()));
    let mut parent = None;
    each_block(tokens, cut, seed, |hash| {
        let prefix = PrefixHash::after(parent, hash);
        parent = Some(prefix);
        hashes.push(prefix);
    });
    hashes
}

/// The first token of each named block, and the tokens that its name covers.
fn covered(tokens: &[u32], cut: BlockCut) -> impl Iterator<Item = (usize, &[u32])> {
    let covered = tokens.windows(cut.covered_tokens());
    covered.enumerate().step_by(cut.size.tokens())
}

/// The usual block size. Hashing is a third faster with a length that the compiler knows.
const USUAL_TOKENS: usize = 16;

#[inline]
fn each_block(tokens: &[u32], cut: BlockCut, seed: Seed, mut visit: impl FnMut(LocalHash)) {
    let is_usual = cut.size.tokens() == USUAL_TOKENS && cut.lookahead == 0;
    if is_usual && cfg!(target_endian = "little") {
        let (blocks, _) = tokens.as_chunks::<USUAL_TOKENS>();
        for block in blocks {
            let bytes: &[u8; USUAL_TOKENS * size_of::<u32>()] = bytemuck::cast_ref(block);
            visit(LocalHash(xxh3_64_with_seed(bytes, seed.0)));
        }
    } else {
        for (_, tokens) in covered(tokens, cut) {
            visit(LocalHash::of_block(tokens, &[], seed));
        }
    }
}

impl PrefixHash {
    /// The empty prefix. Never names a block.
    const EMPTY: Self = Self(0x9E37_79B9_7F4A_7C15);

    /// The prefix hash of a block whose predecessor is `parent` (`None` at depth 0).
    #[must_use]
    pub fn after(parent: Option<Self>, block: LocalHash) -> Self {
        // Stable: digits of wyhash's default secret.
        const PARENT_SECRET: u64 = 0xA076_1D64_78BD_642F;
        const BLOCK_SECRET: u64 = 0xE703_7ED1_A0B4_28DB;
        let parent = parent.unwrap_or(Self::EMPTY);
        Self(fold(parent.0 ^ PARENT_SECRET, block.0 ^ BLOCK_SECRET))
    }
}

/// The prefix hash at every depth of a list of local hashes that follows `parent`.
pub fn prefix_hashes(
    parent: Option<PrefixHash>,
    blocks: &[LocalHash],
) -> impl Iterator<Item = PrefixHash> {
    blocks.iter().scan(parent, |last, &block| {
        let next = PrefixHash::after(*last, block);
        *last = Some(next);
        Some(next)
    })
}

/// Xor of the product's halves. A zero factor would lose the other one; for well-mixed values this
/// is as improbable as any 64-bit collision.
#[expect(
    clippy::cast_possible_truncation,
    reason = "taking the low half is the point"
)]
const fn fold(a: u64, b: u64) -> u64 {
    let product = (a as u128) * (b as u128);
    (product as u64) ^ ((product >> 64) as u64)
}

#[cfg(test)]
mod tests;
