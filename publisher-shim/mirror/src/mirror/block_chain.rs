//! vLLM's own hashes of plain blocks: they show which blocks of its range a store names.
//!
//! A model without full attention publishes no event that places its blocks: a store has the tokens
//! of a range, and the hashes of those blocks of it that can serve a hit. The hashes are computed
//! here as vLLM computes them by default (0.29 and later, SHA-256 over a pickle, `PYTHONHASHSEED`
//! unset, no extra keys). One that is equal is proof of its place; other engines' match nothing.

use rustc_hash::FxHashMap;
use sha2::{Digest as _, Sha256};

use crate::fields::{Field as _, FieldReader, Malformed, write_length};
use crate::wire::{EngineHash, LoraRef, StoredBlocks};

/// `pickle.dumps("vllm-none-hash", protocol=5)`.
const NONE_PICKLE: &[u8] = b"\x80\x05\x95\x12\0\0\0\0\0\0\0\x8c\x0evllm-none-hash\x94.";

const DIGEST_BYTES: usize = 32;

pub(super) type BlockDigest = [u8; DIGEST_BYTES];

/// Digests of known blocks, by the hash that the engine publishes of each.
#[derive(Clone, Debug, Default)]
pub(super) struct BlockChain(FxHashMap<EngineHash, BlockDigest>);

impl BlockChain {
    /// The digests of a store's whole range. `None` if its blocks have keys, or if its parent's
    /// digest is not known.
    pub(super) fn of_range(
        &self,
        stored: &StoredBlocks,
        block_tokens: usize,
    ) -> Option<Vec<BlockDigest>> {
        let is_plain = stored.keys.is_empty()
            && stored.salt.is_none()
            && stored.lora == LoraRef::None
            && stored.tokens_per_position == 1;
        let mut last = match stored.parent {
            _ if !is_plain => return None,
            Some(parent) => *self.0.get(&parent)?,
            None => Sha256::digest(NONE_PICKLE).into(),
        };
        let blocks = stored.tokens.chunks_exact(block_tokens).enumerate();
        let digests = blocks.map(|(index, tokens)| {
            let lookahead = following(stored, block_tokens, index);
            last = Sha256::digest(pickle(&last, tokens, lookahead)?).into();
            Some(last)
        });
        digests.collect()
    }

    pub(super) fn insert(&mut self, digest: BlockDigest) {
        self.0.insert(EngineHash::of_bytes(&digest), digest);
    }

    pub(super) fn forget(&mut self, hash: EngineHash) {
        self.0.remove(&hash);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn write(&self, to: &mut Vec<u8>) {
        #[expect(clippy::disallowed_methods, reason = "sorted right below")]
        let mut digests: Vec<_> = self.0.values().collect();
        digests.sort_unstable();
        write_length(digests.len(), to);
        for digest in digests {
            digest.iter().for_each(|byte| byte.write(to));
        }
    }

    pub(super) fn read(from: &mut FieldReader<'_>) -> Result<Self, Malformed> {
        let mut chain = Self::default();
        for _ in 0..from.length(DIGEST_BYTES)? {
            let digest = from.bytes(DIGEST_BYTES)?.first_chunk();
            chain.insert(*digest.ok_or(Malformed("a digest of a block"))?);
        }
        Ok(chain)
    }
}

/// The tokens behind a block of a range, as many as its hash covers. Those of the range's last block
/// are in the event if it names that block; if not, its digest matches nothing.
pub(super) fn following(stored: &StoredBlocks, block_tokens: usize, index: usize) -> &[u32] {
    let end = (index + 1) * block_tokens;
    let inside = stored.tokens.get(end..end + stored.lookahead as usize);
    inside.unwrap_or_else(|| stored.lookahead_of(stored.hashes.len().saturating_sub(1)))
}

/// `pickle.dumps((parent, tuple(tokens), None), protocol=5)`, with `(None, *lookahead)` in place of
/// `None` where there is any. `None` for a token that no model has.
fn pickle(parent: &BlockDigest, tokens: &[u32], lookahead: &[u32]) -> Option<Vec<u8>> {
    /// Pickle collects bytes in frames of 64 KiB: a larger one is written otherwise.
    const TOKENS_MAX: usize = 8192;
    if !(1..=TOKENS_MAX).contains(&tokens.len()) {
        return None;
    }
    let mut body = vec![b'C', 32];
    body.extend_from_slice(parent);
    body.push(0x94);
    push_tuple(&mut body, &[], tokens)?;
    if lookahead.is_empty() {
        body.push(NONE);
    } else {
        push_tuple(&mut body, &[NONE], lookahead)?;
    }
    body.extend([0x87, 0x94, b'.']);
    let mut pickle = vec![0x80, 5, 0x95];
    pickle.extend((body.len() as u64).to_le_bytes());
    pickle.append(&mut body);
    Some(pickle)
}

/// `None` as an element.
const NONE: u8 = b'N';

/// A tuple of encoded elements of one byte each, and integers.
fn push_tuple(body: &mut Vec<u8>, first: &[u8], integers: &[u32]) -> Option<()> {
    // Tuples of up to three have opcodes of their own.
    let end = match first.len() + integers.len() {
        short @ 1..=3 => [0x85, 0x86, 0x87][short - 1],
        _ => {
            body.push(b'(');
            b't'
        }
    };
    body.extend_from_slice(first);
    for &integer in integers {
        let [a, b, ..] = integer.to_le_bytes();
        match integer {
            0..=0xff => body.extend([b'K', a]),
            0x100..=0xffff => body.extend([b'M', a, b]),
            _ => {
                body.push(b'J');
                body.extend(i32::try_from(integer).ok()?.to_le_bytes());
            }
        }
    }
    body.extend([end, 0x94]);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Measured on a vLLM 0.32.0 server, and by Python's pickle.
    #[test]
    fn hashes_are_those_of_vllm() {
        let none: BlockDigest = Sha256::digest(NONE_PICKLE).into();
        let tokens: Vec<u32> = (100..132).collect();
        let digest = Sha256::digest(pickle(&none, &tokens, &[]).unwrap());
        assert_eq!(
            EngineHash::of_bytes(&digest),
            EngineHash(702757842669265042)
        );
        let with = |tokens: &[u32], lookahead: &[u32]| -> String {
            let pickle = pickle(&none, tokens, lookahead).unwrap();
            pickle[46..]
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect()
        };
        let hex = |tokens: &[u32]| with(tokens, &[]);
        let long = "284b014b024d2c014a7011010074944e87942e";
        assert_eq!(hex(&[1, 2, 300, 70_000]), long);
        assert_eq!(hex(&[1, 2]), "4b014b0286944e87942e");
        assert!(pickle(&none, &[1 << 31], &[]).is_none());
        // With the tokens behind the block, as vLLM 0.33 hashes them.
        let four = "284b014b024b034b0474944e";
        let behind = |lookahead| with(&[1, 2, 3, 4], lookahead);
        assert_eq!(behind(&[9]), format!("{}4e4b09869487942e", &four[..22]));
        let two = "4e4d2c014b0a879487942e";
        assert_eq!(behind(&[300, 10]), format!("{}{two}", &four[..22]));
        let three = "284e4b014b024a70110100749487942e";
        assert_eq!(behind(&[1, 2, 70_000]), format!("{}{three}", &four[..22]));
    }
}
