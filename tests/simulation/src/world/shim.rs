//! Shims: the product's service around a simulated plane, engine and disk.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use warmroute_plane::LogMessage;
use warmroute_proto::registry::GenerationEntry;
use warmroute_proto::{DpRank, EngineSeq, Generation, Record, Source, WorkerId, codec};
use warmroute_shim::engine::{BlockCount, EngineEvent, EngineInfo, Frames, InfoError};
use warmroute_shim::source::{GenerationCounts, GenerationReason, ReplayId};
use warmroute_shim::{CheckpointStore, Handle, Service, ShimConfig};

use super::host::{Event, Input, Kind};
use super::plane::At;
use super::sim_plane::{InfoAnswer, SimDisk, SimEngine};
use super::{Breakage, World};

/// The sequence of a replay's end: −1 as the engine writes it.
const END_OF_REPLAY: u64 = u64::MAX;

/// Most generations that a shim begins for a source within [`BEGUN_WITHIN`], whatever happens.
const BEGUN_MAX: usize = 8;
const BEGUN_WITHIN: Duration = Duration::from_secs(5);
/// Most generations of one reason within [`REASON_WITHIN`]: a burst of three and the next one,
/// which is counted when it is planned. One each 5 s follows; the rest of the 5 s is for clocks that
/// drift.
const REASON_MAX: usize = 4;
const REASON_WITHIN: Duration = Duration::from_secs(4);

pub(super) struct Shim {
    pub(super) host: usize,
    pub(super) worker: usize,
    pub(super) keeps_state: bool,
    pub(super) disk: Option<Bytes>,
    pub(super) handle: Option<Handle>,
    /// The process's end of its engine's socket.
    pub(super) feed: Option<mpsc::Sender<EngineEvent>>,
    pub(super) is_joined: bool,
    /// The generation of the last record that the process read.
    pub(super) last_read: Option<Generation>,
    /// When the process began its source's latest generations.
    pub(super) begun: Vec<At>,
    /// The process's generations by reason as of the last look, and the latest ones' times.
    pub(super) counts: GenerationCounts,
    pub(super) begun_for: Vec<(At, GenerationReason)>,
    /// A replay of which nothing came yet.
    pub(super) replay_begins: Option<ReplayId>,
    /// The live batches that came, for a shim that believes any replay.
    pub(super) heard: Vec<(EngineSeq, Bytes)>,
}

impl World {
    pub(super) fn start_shim(&mut self, at: usize) {
        let Shim { host, worker, .. } = self.shims[at];
        // The limiter begins with the process.
        self.shims[at].begun.clear();
        let worker = self.engines[worker].source.worker.clone();
        let url = url(&worker);
        let mut config = ShimConfig::new(super::namespace(), worker, url);
        config.kv_endpoint = Some("tcp://engine:5557".to_owned());
        config.kv_replay_endpoint = Some("tcp://engine:5558".to_owned());
        config.outbox_bytes_max = self.rates.outbox_bytes_max;
        config.buffer_bytes_max = self.rates.held_bytes_max;
        let checkpoint = self.shims[at].disk.clone();
        let keeps_state = self.shims[at].keeps_state;
        let mut handle = None;
        self.run_process(host, |plane, outbox, stop| {
            config.checkpoints = keeps_state.then(|| {
                let outbox = outbox.clone();
                Arc::new(SimDisk { outbox, checkpoint }) as Arc<dyn CheckpointStore>
            });
            let service = Service::with_engine(config, plane, SimEngine(outbox));
            let service = service.unwrap();
            handle = Some(service.handle());
            async { service.run(stop).await.unwrap() }
        });
        self.shims[at].handle = handle;
    }

    pub(super) fn shim_is_gone(&mut self, at: usize) {
        let shim = &mut self.shims[at];
        shim.handle = None;
        shim.feed = None;
        shim.is_joined = false;
        shim.last_read = None;
        shim.replay_begins = None;
        shim.heard.clear();
        shim.counts = GenerationCounts::default();
        shim.begun_for.clear();
    }

    /// The answer of the engine's HTTP.
    pub(super) fn engine_info(&self, worker: usize) -> InfoAnswer {
        let engine = &self.engines[worker];
        if !engine.answers() {
            return Err(InfoError::Silence);
        }
        let config = &engine.life.config;
        Ok(EngineInfo {
            models: vec!["m".to_owned()],
            block_size: Some(config.block_size),
            blocks: Some(BlockCount {
                sum: config.num_blocks.into(),
                ranks: NonZeroU64::MIN,
            }),
            speculates: Some(false),
            ..EngineInfo::default()
        })
    }

    // --- the engine's socket

    /// The engine's socket is tried until it is there.
    pub(super) fn plan_connect(&mut self, at: usize) {
        let after = self.millis(20..400);
        let (host, worker) = (self.shims[at].host, self.shims[at].worker);
        let event = Event::Connect {
            shim: at,
            life: self.hosts[host].life,
            engine_life: self.engines[worker].number,
        };
        self.plan(after, event);
    }

    pub(super) fn connect_zmq(&mut self, at: usize, life: u64, engine_life: u64) {
        let host = self.shims[at].host;
        let engine = &self.engines[self.shims[at].worker];
        let is_current = self.hosts[host].life == life && engine.number == engine_life;
        let shim = &self.shims[at];
        if is_current && engine.is_up && shim.feed.is_some() && !shim.is_joined {
            // What is published between here and there is missed by a slow joiner.
            self.send_engine_event(at, EngineEvent::Connected);
            self.shims[at].is_joined = true;
        }
    }

    /// Was it connected?
    pub(super) fn disconnect_zmq(&mut self, at: usize) -> bool {
        let was_joined = std::mem::replace(&mut self.shims[at].is_joined, false);
        if was_joined {
            self.send_engine_event(at, EngineEvent::Disconnected);
        }
        was_joined
    }

    /// The engine's socket keeps its order.
    pub(super) fn send_engine_event(&mut self, at: usize, event: EngineEvent) {
        let host = self.shims[at].host;
        let arrives = (self.now + self.delay()).max(self.hosts[host].zmq_until);
        self.hosts[host].zmq_until = arrives;
        let after = arrives - self.now;
        self.send_host(host, after, Input::Engine(event));
    }

    pub(super) fn accept_engine_event(&mut self, host: usize, event: EngineEvent) {
        let Kind::Shim(at) = self.hosts[host].kind else {
            return;
        };
        self.claim_without_limit(at, &event);
        let event = self.engine_event_as_read(at, event);
        if let Some(feed) = &self.shims[at].feed {
            drop(feed.try_send(event));
        }
    }

    /// A shim that accepts any replay finds in it what it received before.
    fn engine_event_as_read(&mut self, at: usize, event: EngineEvent) -> EngineEvent {
        if self.broken != Some(Breakage::PlausibleRestart) {
            return event;
        }
        let shim = &mut self.shims[at];
        match event {
            EngineEvent::Live(frames) => {
                if let [_, seq, payload] = &frames[..] {
                    let payload = Bytes::copy_from_slice(payload);
                    shim.heard.push((sequence(seq), payload));
                }
                EngineEvent::Live(frames)
            }
            EngineEvent::Replay(id, frames) => {
                let [_, seq, _] = &frames[..] else {
                    return EngineEvent::Replay(id, frames);
                };
                let seq = sequence(seq);
                let is_first = shim.replay_begins.take_if(|begins| *begins == id).is_some();
                let known = shim.heard.iter().rev().find(|(heard, _)| *heard == seq);
                match known.filter(|_| is_first) {
                    Some((_, payload)) => EngineEvent::Replay(id, message(seq, payload)),
                    None => EngineEvent::Replay(id, frames),
                }
            }
            other => other,
        }
    }

    // --- what it claims

    /// A shim takes no generation that the log has already, and not too many in one life.
    pub(super) fn check_claim(&mut self, at: usize, key: &str, value: &[u8]) {
        let shim = &mut self.shims[at];
        let source = &self.engines[shim.worker].source;
        if key != self.subjects.generation_key(source) {
            return;
        }
        let claimed = codec::decode::<GenerationEntry>(value).unwrap().generation;
        let last = shim.last_read;
        let honest = last.filter(|last| *last < Generation(u64::MAX));
        if honest.is_some_and(|last| claimed <= last) {
            let why = format!("{source} takes {claimed:?}, and the log has {last:?}");
            return self.fail(why);
        }
        shim.begun.retain(|at| *at + BEGUN_WITHIN > self.now);
        shim.begun.push(self.now);
        let count = shim.begun.len();
        if count > BEGUN_MAX {
            let why =
                format!("a shim of {source} takes {count} generations within {BEGUN_WITHIN:?}");
            self.fail(why);
        }
    }

    /// No reason begins generations without a limit, whatever the others do.
    pub(super) fn check_reasons(&mut self, at: usize) {
        let shim = &mut self.shims[at];
        let Some(status) = shim
            .handle
            .as_ref()
            .and_then(|handle| handle.sources().pop())
        else {
            return;
        };
        let counts = status.counters.reasons;
        let former = std::mem::replace(&mut shim.counts, counts);
        let now = self.now;
        shim.begun_for.retain(|(at, _)| *at + REASON_WITHIN > now);
        for reason in GenerationReason::ALL {
            let begun = counts.of(reason) - former.of(reason);
            shim.begun_for.extend((0..begun).map(|_| (now, reason)));
            let of_reason = shim.begun_for.iter().filter(|(_, of)| *of == reason);
            let count = of_reason.count();
            if count > REASON_MAX {
                let source = status.source;
                let why = format!(
                    "a shim of {source} begins {count} generations for {} within {REASON_WITHIN:?}",
                    reason.label()
                );
                return self.fail(why);
            }
        }
    }

    /// The last record that a shim reads; `None` if it takes the generation from the key alone.
    pub(super) fn last_record_as_read(
        &mut self,
        at: usize,
        found: Option<LogMessage>,
    ) -> Option<LogMessage> {
        let record = found
            .as_ref()
            .map(|found| codec::decode::<Record>(&found.payload));
        self.shims[at].last_read = record.and_then(Result::ok).map(|record| record.generation);
        found.filter(|_| self.broken != Some(Breakage::GenerationRolledBack))
    }
}

pub(super) fn message(seq: EngineSeq, payload: &[u8]) -> Frames {
    vec![Vec::new(), seq.0.to_be_bytes().to_vec(), payload.to_vec()]
}

pub(super) fn end_of_replay(id: ReplayId) -> EngineEvent {
    EngineEvent::Replay(id, message(EngineSeq(END_OF_REPLAY), &[]))
}

/// A live message whose loss is seen immediately.
pub(super) fn unreadable_message() -> EngineEvent {
    EngineEvent::Live(Vec::new())
}

/// An answer that ends a replay before its end.
pub(super) fn broken_replay(id: ReplayId) -> EngineEvent {
    EngineEvent::Replay(id, Vec::new())
}

fn sequence(frame: &[u8]) -> EngineSeq {
    EngineSeq(u64::from_be_bytes(frame.try_into().unwrap()))
}

/// A worker's URL.
pub(super) fn url(worker: &WorkerId) -> String {
    format!("http://{worker}:8000")
}

/// Which source a subject's worker is.
pub(super) fn source(worker: usize) -> Source {
    Source {
        worker: format!("w{worker}").into(),
        dp_rank: DpRank(0),
    }
}
