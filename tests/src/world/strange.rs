//! Engines of a later version, and processes whose subscriptions the server removed.

use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use warmroute_plane::Broadcast;
use warmroute_proto::{Heartbeat, TierState, Tiers, codec};

use super::faults::Fault;
use super::host::{Event, Kind};
use super::{Breakage, World};

/// MessagePack of an event whose type no version publishes.
const UNKNOWN_EVENT: &[u8] = b"\x81\xa4type\xabBlockFuture";
/// Offset of the events in a batch: after the array's header and the time stamp.
const EVENTS_AT: usize = 10;

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
    }

    /// For seconds, every batch of the engine has an event of an unknown type.
    pub(super) fn publish_unknown_events(&mut self, worker: usize) -> bool {
        let lasts = self.millis(500..6_000);
        self.fault_lasts(lasts);
        self.engines[worker].unknown_until = self.now + lasts;
        self.engines[worker].is_up
    }

    /// Adds the unknown event to a batch, before anyone has it.
    pub(super) fn add_unknown_event(&mut self, worker: usize, seq: usize) {
        let engine = &mut self.engines[worker];
        if self.now < engine.unknown_until {
            let batch = &mut engine.life.batches[seq];
            *batch = with_unknown_event(batch);
            engine.life.is_strange = true;
        }
    }

    /// The server removes a process's subscriptions and keeps its connection, as after a change of
    /// permissions. The process's client finds that out, and subscribes again.
    pub(super) fn deafen(&mut self, host: usize) -> bool {
        let after = self.millis(1_000..12_000);
        self.fault_lasts(after);
        self.hosts[host].is_deaf = true;
        if self.broken != Some(Breakage::DeafForGood) {
            self.plan(after, Event::Hears(host));
        }
        self.hosts[host].is_up
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

fn with_unknown_event(batch: &[u8]) -> Bytes {
    let (events, first) = match batch[EVENTS_AT] {
        header @ 0x90..=0x9f => (u32::from(header & 0x0f), EVENTS_AT + 1),
        0xdc => {
            let count = batch[EVENTS_AT + 1..][..2].try_into().unwrap();
            (u32::from(u16::from_be_bytes(count)), EVENTS_AT + 3)
        }
        other => panic!("{other:#x} begins no array of fewer than 65,536 events"),
    };
    let mut bytes = batch[..EVENTS_AT].to_vec();
    bytes.push(0xdd);
    bytes.extend((events + 1).to_be_bytes());
    bytes.extend(UNKNOWN_EVENT);
    bytes.extend(&batch[first..]);
    bytes.into()
}
