//! Engines of a later version or with position-free hashes.

use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use warmroute_plane::Broadcast;
use warmroute_proto::registry::GenerationEntry;
use warmroute_proto::{Heartbeat, TierState, Tiers, codec};
use warmroute_router::sim::{CacheEvent, EngineHash, GroupKind, Medium, StoredBlocks};
use warmroute_shim::engine::EngineEvent;

use super::faults::Fault;
use super::host::{Event, Kind};
use super::life::Life;
use super::{Breakage, World};

/// MessagePack of an event whose type no version publishes.
const UNKNOWN_EVENT: &[u8] = b"\x81\xa4type\xabBlockFuture";
/// Offset of the events in a batch: after the array's header and the time stamp.
const EVENTS_AT: usize = 10;
/// The hash that an engine with position-free hashes gives twice.
const REPEATED_HASH: EngineHash = EngineHash(u64::MAX);
/// The hash of a block that is removed and was never stored.
const UNKNOWN_HASH: EngineHash = EngineHash(u64::MAX - 1);

impl World {
    /// In a quarter of the stormy worlds, at moments of their own.
    pub(super) fn plan_strange_faults(&mut self, seed: u64) {
        let mut rng = Rng::with_seed(seed ^ 0x57A2_9E00);
        if self.rates.is_calm || rng.u8(0..4) > 0 {
            return;
        }
        let storm = u64::try_from(self.rates.storm.as_millis()).unwrap();
        for _ in 0..rng.usize(1..4) {
            let worker = rng.usize(0..self.rates.workers);
            let fault = match rng.u8(0..3) {
                0 => Fault::UnknownEvents(worker),
                1 => Fault::DeafShim(2 * worker),
                _ => Fault::DeafIndexer(rng.usize(0..self.rates.indexers)),
            };
            let after = Duration::from_millis(rng.u64(2_000..storm));
            self.plan(after, Event::Fault(fault));
        }
        // An addition, so that the faults above remain those of the seed.
        if rng.u8(0..4) == 0 {
            let worker = rng.usize(0..self.rates.workers);
            let after = Duration::from_millis(rng.u64(2_000..storm));
            self.plan(after, Event::Fault(Fault::PositionFreeHashes(worker)));
        }
        if rng.u8(0..2) == 0 {
            let after = Duration::from_millis(rng.u64(2_000..storm));
            self.plan(after, Event::Fault(Fault::SlowStore));
        }
        if rng.u8(0..2) == 0 {
            let worker = rng.usize(0..self.rates.workers);
            let after = Duration::from_millis(rng.u64(2_000..storm));
            self.plan(after, Event::Fault(Fault::UnknownRemovals(worker)));
        }
    }

    /// For seconds, every batch of the engine has an event of an unknown type.
    pub(super) fn publish_unknown_events(&mut self, worker: usize) -> bool {
        let lasts = self.millis(500..6_000);
        self.fault_lasts(lasts);
        self.engines[worker].unknown_until = self.now + lasts;
        self.engines[worker].is_up
    }

    /// For seconds, every batch of the engine removes a block that no event stored.
    pub(super) fn publish_unknown_removals(&mut self, worker: usize) -> bool {
        let lasts = self.millis(500..6_000);
        self.fault_lasts(lasts);
        self.engines[worker].unknown_removals_until = self.now + lasts;
        self.engines[worker].is_up
    }

    /// For seconds, every batch of the engine gives one block hash to two prefixes.
    pub(super) fn repeat_block_hashes(&mut self, worker: usize) -> bool {
        let lasts = self.millis(3_000..6_000);
        self.fault_lasts(lasts);
        self.engines[worker].position_free_until = self.now + lasts;
        self.engines[worker].is_up
    }

    /// Adds the strange events of this moment to a batch that is not published yet.
    pub(super) fn add_strange_events(&mut self, worker: usize, seq: usize) {
        let engine = &mut self.engines[worker];
        if self.now < engine.unknown_until {
            let batch = &mut engine.life.batches[seq];
            *batch = with_events(batch, 1, UNKNOWN_EVENT);
            engine.life.is_strange = true;
        }
        if self.now < engine.unknown_removals_until {
            let removal = removal_of(&engine.life, UNKNOWN_HASH);
            let batch = &mut engine.life.batches[seq];
            *batch = with_events(batch, 1, &removal);
        }
        if self.now < engine.position_free_until {
            let stores = one_hash_for_two_prefixes(&engine.life);
            let batch = &mut engine.life.batches[seq];
            *batch = with_events(batch, 2, &stores);
        }
    }

    /// A shim without a limit in rate claims a generation at each batch with such hashes.
    pub(super) fn claim_without_limit(&mut self, at: usize, event: &EngineEvent) {
        let shim = &self.shims[at];
        let engine = &self.engines[shim.worker];
        let leads = shim
            .handle
            .as_ref()
            .is_some_and(warmroute_shim::Handle::leads);
        let is_batch = matches!(event, EngineEvent::Live(_));
        let is_position_free = self.now < engine.position_free_until;
        if self.broken != Some(Breakage::GenerationsUnlimited)
            || !(leads && is_batch && is_position_free)
        {
            return;
        }
        let key = self.subjects.generation_key(&engine.source);
        let Some(present) = self.plane.keys.get(&key) else {
            return;
        };
        let present = codec::decode::<GenerationEntry>(&present.entry.value).unwrap();
        let Some(generation) = present.generation.next() else {
            return;
        };
        let value = codec::encode(&GenerationEntry { generation }).unwrap();
        self.check_claim(at, &key, &value);
        self.plane.overwrite(key, value.into());
        self.tell_watchers();
    }

    /// A heartbeat of a shim that takes its source for wrong until the engine clears its cache.
    pub(super) fn strange_heartbeat(&self, host: usize, message: &mut Broadcast) {
        if let Kind::Shim(at) = self.hosts[host].kind
            && self.broken == Some(Breakage::StrangeForGood)
            && self.engines[self.shims[at].worker].life.is_strange
            && let Ok(mut heartbeat) = codec::decode::<Heartbeat>(&message.payload)
        {
            heartbeat.states = Tiers::all(TierState::Stale);
            message.payload = codec::encode(&heartbeat).unwrap().into();
        }
    }
}

/// A batch with these encoded events before its own.
fn with_events(batch: &[u8], count: u32, added: &[u8]) -> Bytes {
    let (events, first) = match batch[EVENTS_AT] {
        header @ 0x90..=0x9f => (u32::from(header & 0x0f), EVENTS_AT + 1),
        0xdc => {
            let count = batch[EVENTS_AT + 1..][..2].try_into().unwrap();
            (u32::from(u16::from_be_bytes(count)), EVENTS_AT + 3)
        }
        0xdd => {
            let count = batch[EVENTS_AT + 1..][..4].try_into().unwrap();
            (u32::from_be_bytes(count), EVENTS_AT + 5)
        }
        other => panic!("{other:#x} begins no array"),
    };
    let mut bytes = batch[..EVENTS_AT].to_vec();
    bytes.push(0xdd);
    bytes.extend((events + count).to_be_bytes());
    bytes.extend(added);
    bytes.extend(&batch[first..]);
    bytes.into()
}

/// The removal of a block of the main group, encoded.
fn removal_of(life: &Life, hash: EngineHash) -> Vec<u8> {
    encoded(
        life,
        &[CacheEvent::Removed {
            hash,
            medium: Medium::Gpu,
            group: main_group(life),
        }],
    )
}

fn main_group(life: &Life) -> u32 {
    let mut groups = life.config.groups.iter();
    let group = groups.position(|kind| *kind == GroupKind::FullAttention);
    u32::try_from(group.unwrap()).unwrap()
}

/// Events as they stand in a batch: without the array's header, and the rank after it.
fn encoded(life: &Life, events: &[CacheEvent]) -> Vec<u8> {
    let batch = life.encoder.encode(0.0, events).unwrap();
    batch[EVENTS_AT + 1..batch.len() - 1].to_vec()
}

/// Two stores of one block hash, encoded: the block's tokens differ.
fn one_hash_for_two_prefixes(life: &Life) -> Vec<u8> {
    let block_size = life.config.block_size;
    let full = GroupKind::FullAttention;
    let behind = life.config.lookahead as usize;
    let store = |token: u32| {
        CacheEvent::Stored(StoredBlocks {
            hashes: vec![REPEATED_HASH],
            parent: None,
            tokens: vec![token; block_size.tokens()],
            block_size,
            extra_keys: None,
            lookahead: (behind > 0).then(|| vec![vec![0; behind]]),
            lora_name: None,
            medium: Medium::Gpu,
            group: main_group(life),
            kind: full,
        })
    };
    encoded(life, &[store(1), store(2)])
}
