//! How blocks are named: local hashes over tokens, prefix hashes over local hashes.
//!
//! A local hash is XXH3-64 over the block's tokens (little-endian `u32`), then the sorted 64-bit
//! hashes of the multimodal items that lie in it; the seed carries LoRA and salt. This is the scheme
//! of dynamo-kv-router, so that hashes can be exchanged with it.
//!
//! A prefix hash is a chain over local hashes. Each step is one 64 × 64 → 128 bit multiplication
//! whose halves are folded together, as wyhash does (Wang Yi, <https://github.com/wangyi-fudan/wyhash>):
//! five or six cycles of latency, which hide behind the hashing of the next block's tokens, where a
//! chain of XXH3 steps would cost as much again. Local hashes are well mixed already, so one folded
//! multiplication a step mixes fully.
//!
//! Both are wire values: they never change, and the vectors below say so.

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::BlockSize;

/// The name of one block by its content alone.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Encode, Decode,
)]
#[serde(transparent)]
pub struct LocalHash(pub u64);

/// The name of a block together with everything before it. Equal prefix hash, equal whole prefix.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Encode, Decode,
)]
#[serde(transparent)]
pub struct PrefixHash(pub u64);

/// What separates equal tokens: the LoRA adapter, the tenant's salt, an unreproducible key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Encode, Decode)]
#[serde(transparent)]
pub struct Seed(pub u64);

/// Stable: the widest-used peer's seed.
const PLAIN_SEED: u64 = 1337;
const LORA_SEED: u64 = 0;
const SALT_SEED: u64 = 1;
const OPAQUE_SEED: u64 = 2;

impl Seed {
    pub const PLAIN: Self = Self(PLAIN_SEED);

    /// The seed of a request or event with these optional attributes. An empty name counts as none.
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

    /// A seed that no request can have: for blocks whose engine key a router cannot reproduce.
    /// `key` is the raw key as the engine sent it.
    #[must_use]
    pub fn with_opaque(self, key: &[u8]) -> Self {
        self.plus(xxh3_64_with_seed(key, OPAQUE_SEED) | 1)
    }

    const fn plus(self, summand: u64) -> Self {
        Self(self.0.wrapping_add(summand))
    }
}

impl LocalHash {
    /// The hash of one whole block. `items` are the hashes of multimodal items in it, in any order.
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

/// The local hashes of a token sequence's whole blocks; a partial last block has none.
#[must_use]
pub fn local_hashes(tokens: &[u32], block_size: BlockSize, seed: Seed) -> Vec<LocalHash> {
    let mut hashes = Vec::with_capacity(tokens.len() / block_size.tokens());
    each_block(tokens, block_size, seed, |hash| hashes.push(hash));
    hashes
}

/// The prefix hashes of a token sequence's whole blocks. The chain hides behind the hashing of the
/// tokens, so this costs little more than [`local_hashes`].
#[must_use]
pub fn prompt_hashes(tokens: &[u32], block_size: BlockSize, seed: Seed) -> Vec<PrefixHash> {
    let mut hashes = Vec::with_capacity(tokens.len() / block_size.tokens());
    let mut parent = None;
    each_block(tokens, block_size, seed, |hash| {
        let prefix = PrefixHash::after(parent, hash);
        parent = Some(prefix);
        hashes.push(prefix);
    });
    hashes
}

/// Engines' usual block size: with the length known to the compiler hashing is a third faster.
const USUAL_TOKENS: usize = 16;

#[inline]
fn each_block(tokens: &[u32], size: BlockSize, seed: Seed, mut see: impl FnMut(LocalHash)) {
    if size.tokens() == USUAL_TOKENS && cfg!(target_endian = "little") {
        let (blocks, _) = tokens.as_chunks::<USUAL_TOKENS>();
        for block in blocks {
            let bytes: &[u8; USUAL_TOKENS * size_of::<u32>()] = bytemuck::cast_ref(block);
            see(LocalHash(xxh3_64_with_seed(bytes, seed.0)));
        }
    } else {
        for block in tokens.chunks_exact(size.tokens()) {
            see(LocalHash::of_block(block, &[], seed));
        }
    }
}

impl PrefixHash {
    /// The prefix of length zero. Never a name of a block.
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

/// Both halves of the product, folded. A zero factor would forget the other one; callers pass
/// well-mixed values, for which that has the probability of any 64-bit collision.
#[expect(
    clippy::cast_possible_truncation,
    reason = "taking the low half is the point"
)]
const fn fold(a: u64, b: u64) -> u64 {
    let product = (a as u128) * (b as u128);
    (product as u64) ^ ((product >> 64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(lora: Option<&str>, salt: Option<&str>) -> Vec<u64> {
        let tokens: Vec<u32> = (0..64).collect();
        let size = BlockSize::new(16).unwrap();
        let hashes = local_hashes(&tokens, size, Seed::new(lora, salt));
        hashes.into_iter().map(|hash| hash.0).collect()
    }

    #[test]
    fn whole_prompts_are_hashed_as_their_blocks_are() {
        let tokens: Vec<u32> = (0..1000).map(|token| token * 7919).collect();
        for size in [1, 8, 16, 32, 128] {
            let seed = Seed::PLAIN.with_salt("tenant-a");
            let blocks: Vec<_> = tokens
                .chunks_exact(size)
                .map(|block| LocalHash::of_block(block, &[], seed))
                .collect();
            let size = BlockSize::new(u32::try_from(size).unwrap()).unwrap();
            assert_eq!(local_hashes(&tokens, size, seed), blocks);
            let prefixes: Vec<_> = prefix_hashes(None, &blocks).collect();
            assert_eq!(prompt_hashes(&tokens, size, seed), prefixes);
        }
    }

    #[test]
    fn items_are_appended_in_order() {
        let tokens: Vec<u32> = (0..16).collect();
        let bytes: Vec<u8> = tokens
            .iter()
            .flat_map(|token| token.to_le_bytes())
            .chain([3u64, 9].iter().flat_map(|item| item.to_le_bytes()))
            .collect();
        let expected = LocalHash(xxh3_64_with_seed(&bytes, 1337));
        for items in [[3, 9], [9, 3]] {
            assert_eq!(LocalHash::of_block(&tokens, &items, Seed::PLAIN), expected);
        }
    }

    #[test]
    fn seeds_keep_what_is_different_apart() {
        let seeds = [
            Seed::PLAIN,
            Seed::new(Some("a"), None),
            Seed::new(None, Some("a")),
            Seed::new(Some("a"), Some("a")),
            Seed::PLAIN.with_opaque(b"a"),
        ];
        for (index, seed) in seeds.iter().enumerate() {
            assert!(!seeds[..index].contains(seed));
        }
        assert_eq!(
            Seed::new(Some(""), Some("")),
            Seed::PLAIN,
            "no name is no name"
        );
    }

    #[test]
    fn local_hashes_are_those_of_the_peer() {
        assert_eq!(
            hashes(None, None),
            [
                15310707395893867146,
                15292316782987903195,
                5532946206955930018,
                14928757266181269122
            ]
        );
        assert_eq!(
            hashes(Some("my-lora"), None),
            [
                7774427462321301335,
                11306793257002815283,
                5227710324928887427,
                16227747212725006563
            ]
        );
        assert_eq!(
            hashes(None, Some("tenant-a")),
            [
                2130915519417463704,
                14342547135021016991,
                11634673069974245442,
                3876172088424304685
            ]
        );
        assert_eq!(
            hashes(Some("my-lora"), Some("tenant-a")),
            [
                9308087154931608541,
                7049012067311110175,
                16592140720145377758,
                3993800751465012722
            ]
        );
    }
}
