//! vLLM's payload encoding (0.24 and later): a batch is an array, its events are maps.

use serde::{Serialize, Serializer};
use warmroute_sim::sim::{CacheEvent, EngineHash, ExtraKey, GroupKind, Medium, StoredBlocks};

use crate::args::HashMode;
use crate::loras::Loras;

/// Encodes the batches of one rank.
#[derive(Clone, Debug)]
pub struct Encoder {
    pub rank: u32,
    pub hash_mode: HashMode,
    pub loras: Loras,
    /// Events of the CPU tier are LMCache's, which name no KV group.
    pub lmcache: bool,
}

#[derive(Serialize)]
struct Batch<'a>(f64, Vec<WireEvent<'a>>, u32);

/// Fields in vLLM's order; what may be missing there is left out here if it has no value.
#[derive(Serialize)]
#[serde(tag = "type")]
enum WireEvent<'a> {
    BlockStored {
        block_hashes: Vec<WireHash>,
        parent_block_hash: Option<WireHash>,
        token_ids: &'a [u32],
        block_size: usize,
        lora_id: Option<usize>,
        medium: &'static str,
        lora_name: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        extra_keys: Option<Vec<Option<Vec<WireKey<'a>>>>>,
        #[serde(skip_serializing_if = "Option::is_none")]
        group_idx: Option<u32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        kv_cache_spec_kind: Option<&'static str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        kv_cache_spec_sliding_window: Option<u32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        lookahead_token_ids: Option<&'a [Vec<u32>]>,
    },
    BlockRemoved {
        block_hashes: [WireHash; 1],
        medium: &'static str,
        #[serde(skip_serializing_if = "Option::is_none")]
        group_idx: Option<u32>,
    },
    AllBlocksCleared,
    /// Known to no decoder.
    BlocksMoved,
}

#[derive(Serialize)]
#[serde(untagged)]
enum WireKey<'a> {
    Text(&'a str),
    Item(&'a str, i64),
}

enum WireHash {
    Int(u64),
    Bytes([u8; 32]),
}

impl Serialize for WireHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Int(hash) => serializer.serialize_u64(*hash),
            Self::Bytes(bytes) => serializer.serialize_bytes(bytes),
        }
    }
}

impl Encoder {
    pub fn encode(
        &self,
        unix_seconds: f64,
        events: &[CacheEvent],
    ) -> Result<Vec<u8>, rmp_serde::encode::Error> {
        let events = events.iter().map(|event| self.event(event)).collect();
        rmp_serde::to_vec_named(&Batch(unix_seconds, events, self.rank))
    }

    /// A batch of one event whose type no decoder knows.
    pub(crate) fn unknown_event(
        &self,
        unix_seconds: f64,
    ) -> Result<Vec<u8>, rmp_serde::encode::Error> {
        let events = vec![WireEvent::BlocksMoved];
        rmp_serde::to_vec_named(&Batch(unix_seconds, events, self.rank))
    }

    /// A batch of one store without blocks, of a KV group whose kind no decoder knows.
    pub(crate) fn unknown_kind(
        &self,
        unix_seconds: f64,
    ) -> Result<Vec<u8>, rmp_serde::encode::Error> {
        let stored = WireEvent::BlockStored {
            block_hashes: Vec::new(),
            parent_block_hash: None,
            token_ids: &[],
            block_size: 16,
            lora_id: None,
            medium: Medium::Gpu.name(),
            lora_name: None,
            extra_keys: None,
            group_idx: Some(u32::MAX),
            kv_cache_spec_kind: Some("folded_attention"),
            kv_cache_spec_sliding_window: None,
            lookahead_token_ids: None,
        };
        rmp_serde::to_vec_named(&Batch(unix_seconds, vec![stored], self.rank))
    }

    fn names_group(&self, medium: Medium) -> bool {
        medium == Medium::Gpu || !self.lmcache
    }

    fn event<'a>(&self, event: &'a CacheEvent) -> WireEvent<'a> {
        match event {
            CacheEvent::Stored(stored) => self.stored(stored),
            CacheEvent::Removed {
                hash,
                medium,
                group,
            } => WireEvent::BlockRemoved {
                block_hashes: [self.hash(*hash)],
                medium: medium.name(),
                group_idx: self.names_group(*medium).then_some(*group),
            },
            CacheEvent::Cleared => WireEvent::AllBlocksCleared,
        }
    }

    fn stored<'a>(&self, stored: &'a StoredBlocks) -> WireEvent<'a> {
        let lora_name = stored.lora_name.as_deref();
        WireEvent::BlockStored {
            block_hashes: stored.hashes.iter().map(|&hash| self.hash(hash)).collect(),
            parent_block_hash: stored.parent.map(|hash| self.hash(hash)),
            token_ids: &stored.tokens,
            block_size: stored.block_size.tokens(),
            lora_id: lora_name.and_then(|name| self.loras.id(name)),
            medium: stored.medium.name(),
            lora_name,
            extra_keys: stored
                .extra_keys
                .as_ref()
                .map(|blocks| blocks.iter().map(|keys| wire_keys(keys)).collect()),
            group_idx: self.names_group(stored.medium).then_some(stored.group),
            kv_cache_spec_kind: self.names_group(stored.medium).then(|| stored.kind.name()),
            kv_cache_spec_sliding_window: match stored.kind {
                GroupKind::FullAttention => None,
                GroupKind::SlidingWindow(window) => Some(window),
            },
            lookahead_token_ids: stored.lookahead.as_deref(),
        }
    }

    fn hash(&self, hash: EngineHash) -> WireHash {
        match self.hash_mode {
            HashMode::Int => WireHash::Int(hash.0),
            HashMode::Bytes => {
                let mut bytes = [0; 32];
                for (at, part) in (0..).zip(bytes.chunks_exact_mut(8)) {
                    part.copy_from_slice(&hash.0.rotate_left(16 * (3 - at)).to_be_bytes());
                }
                WireHash::Bytes(bytes)
            }
        }
    }
}

fn wire_keys(keys: &[ExtraKey]) -> Option<Vec<WireKey<'_>>> {
    (!keys.is_empty()).then(|| keys.iter().map(WireKey::from).collect())
}

impl<'a> From<&'a ExtraKey> for WireKey<'a> {
    fn from(key: &'a ExtraKey) -> Self {
        match key {
            ExtraKey::Lora(text) | ExtraKey::Salt(text) => Self::Text(text),
            ExtraKey::Item { identifier, offset } => Self::Item(identifier, *offset),
        }
    }
}

#[cfg(test)]
mod tests {
    use warmroute_proto::BlockSize;
    use warmroute_sim::sim::Medium;

    use super::*;

    fn encoder(hash_mode: HashMode) -> Encoder {
        Encoder {
            rank: 1,
            hash_mode,
            loras: vec!["adapter".into()].into(),
            lmcache: false,
        }
    }

    fn stored() -> CacheEvent {
        CacheEvent::Stored(StoredBlocks {
            hashes: vec![EngineHash(u64::MAX), EngineHash(2)],
            parent: None,
            tokens: vec![1, 2, 3, 4],
            block_size: BlockSize::new(2).unwrap(),
            extra_keys: Some(vec![vec![ExtraKey::Salt("s".into())], vec![]]),
            lookahead: None,
            lora_name: Some("adapter".into()),
            medium: Medium::Gpu,
            group: 0,
            kind: GroupKind::FullAttention,
        })
    }

    #[test]
    fn a_batch_has_the_shape_of_a_real_one() {
        let events = [CacheEvent::Cleared, stored()];
        let payload = encoder(HashMode::Int).encode(1.5, &events).unwrap();
        let decoded: serde_json::Value = rmp_serde::from_slice(&payload).unwrap();
        let expected = serde_json::json!([1.5, [
            {"type": "AllBlocksCleared"},
            {
                "type": "BlockStored", "block_hashes": [u64::MAX, 2], "parent_block_hash": null,
                "token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": 1, "medium": "GPU",
                "lora_name": "adapter", "extra_keys": [["s"], null], "group_idx": 0,
                "kv_cache_spec_kind": "full_attention"
            }
        ], 1]);
        assert_eq!(decoded, expected);
        assert_eq!(
            decoded.to_string(),
            expected.to_string(),
            "in the same order"
        );
    }

    #[test]
    fn a_hash_of_bytes_ends_in_the_integer() {
        let hash = EngineHash(0x0102_0304_0506_0708);
        let WireHash::Bytes(bytes) = encoder(HashMode::Bytes).hash(hash) else {
            panic!("not bytes");
        };
        assert_eq!(bytes[24..], [1, 2, 3, 4, 5, 6, 7, 8]);
    }
}
