//! The payload of one event, as vLLM encodes it since 0.24. Pure.

use serde::Serialize;

/// Readers refuse longer payloads.
pub const PAYLOAD_BYTES_MAX: usize = 16 << 20;

/// What changed in the engine's cache.
#[derive(Clone, Copy, Debug)]
pub enum CacheChange<'a> {
    Stored(StoredRun<'a>),
    /// Hashes of blocks of which one copy each is gone.
    Removed(&'a [u64]),
    Cleared,
}

/// Consecutive blocks of one prompt, each held once more.
#[derive(Clone, Copy, Debug, Default)]
pub struct StoredRun<'a> {
    pub hashes: &'a [u64],
    /// The block before the first one; `None` at the start of a prompt.
    pub parent: Option<u64>,
    /// Token ids of all blocks, in order.
    pub tokens: &'a [u32],
    /// The adapter that computed them.
    pub lora: Option<&'a str>,
    /// The salt of the request: only requests with the same one share its blocks.
    pub salt: Option<&'a str>,
}

/// Fields in vLLM's order.
#[derive(Serialize)]
#[serde(tag = "type")]
enum WireEvent<'a> {
    BlockStored {
        block_hashes: &'a [u64],
        parent_block_hash: Option<u64>,
        token_ids: &'a [u32],
        block_size: u32,
        lora_id: Option<u32>,
        medium: &'static str,
        lora_name: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        cache_salt: Option<&'a str>,
    },
    BlockRemoved {
        block_hashes: &'a [u64],
        medium: &'static str,
    },
    AllBlocksCleared,
}

const MEDIUM: &str = "GPU";

impl CacheChange<'_> {
    /// A batch of this change.
    pub(crate) fn payload(
        &self,
        block_size: u32,
        dp_rank: u32,
        unix_seconds: f64,
    ) -> Result<Vec<u8>, rmp_serde::encode::Error> {
        let event = match *self {
            CacheChange::Stored(run) => WireEvent::BlockStored {
                block_hashes: run.hashes,
                parent_block_hash: run.parent,
                token_ids: run.tokens,
                block_size,
                lora_id: None,
                medium: MEDIUM,
                lora_name: run.lora,
                cache_salt: run.salt,
            },
            CacheChange::Removed(hashes) => WireEvent::BlockRemoved {
                block_hashes: hashes,
                medium: MEDIUM,
            },
            CacheChange::Cleared => WireEvent::AllBlocksCleared,
        };
        rmp_serde::to_vec_named(&(unix_seconds, [event], dp_rank))
    }
}

#[cfg(test)]
mod tests {
    use warmroute_mirror::wire::{self, Batch, CacheEvent, EngineHash, LoraRef};

    use super::*;

    fn decoded(change: CacheChange<'_>) -> CacheEvent {
        let payload = change.payload(2, 3, 1.5).unwrap();
        let mut batch = Batch::decode(&payload).unwrap();
        assert_eq!((batch.ts, batch.dp_rank), (1.5, Some(3)));
        assert_eq!((batch.events.len(), batch.not_understood.len()), (1, 0));
        batch.events.remove(0)
    }

    #[test]
    fn the_shims_decoder_reads_what_was_stored() {
        let run = StoredRun {
            hashes: &[u64::MAX, 7],
            parent: Some(1 << 63),
            tokens: &[1, 2, 3, u32::MAX],
            lora: Some("adapter"),
            salt: Some("tenant"),
        };
        let CacheEvent::Stored(stored) = decoded(CacheChange::Stored(run)) else {
            panic!("no store");
        };
        assert_eq!(stored.hashes, [u64::MAX, 7].map(EngineHash));
        assert_eq!(stored.parent, Some(EngineHash(1 << 63)));
        assert_eq!((stored.tokens, stored.block_size), (run.tokens.to_vec(), 2));
        assert_eq!(stored.lora, LoraRef::Named("adapter".to_owned()));
        assert_eq!(stored.salt.as_deref(), Some("tenant"));
        assert!(stored.reports_extra_keys && stored.reports_removals);
    }

    #[test]
    fn removals_and_a_clear_are_read() {
        let removed = decoded(CacheChange::Removed(&[3, 4]));
        assert!(
            matches!(removed, CacheEvent::Removed(all) if all.hashes == [3, 4].map(EngineHash))
        );
        assert_eq!(decoded(CacheChange::Cleared), CacheEvent::Cleared);
    }

    #[test]
    fn the_bound_is_the_readers() {
        assert_eq!(PAYLOAD_BYTES_MAX, wire::PAYLOAD_BYTES_MAX);
    }
}
