//! The world around a core: an engine on one side, a log with its reader on the other.

mod captures;
mod checkpoints;
mod engine;
mod random;
mod records;
mod resets;
mod tails;

use std::collections::BTreeMap;

use serde_json::{Value, json};
use warmroute_proto::codec;
use warmroute_proto::{BlockSize, DpRank, LogTime, PrefixHash, Record, StreamIdentity, WorkerId};

use super::*;
use crate::mirror::tests::known_plain;
use crate::testing::{LogReader, start};

const GPU: TierState = TierState::Complete;

/// An engine's publisher: one life's batches, the last `buffer` of which it still has.
#[derive(Clone, Default)]
struct FakeEngine {
    batches: Vec<Bytes>,
    oldest: usize,
    life: u32,
    unanswered: Option<(ReplayId, EngineSeq)>,
    /// Requested and not answered.
    flushes: Vec<FlushId>,
}

fn store(parent: Option<u64>, tokens: &[u32]) -> Value {
    json!({
        "type": "BlockStored", "block_hashes": tokens, "parent_block_hash": parent,
        "token_ids": tokens, "block_size": 1, "lora_id": null, "medium": "GPU", "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    })
}

fn remove(hash: u64) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": [hash], "medium": "GPU", "group_idx": 0})
}

fn clear() -> Value {
    json!({"type": "AllBlocksCleared"})
}

fn unknown_event() -> Value {
    json!({"type": "BlocksMoved", "block_hashes": [1]})
}

impl FakeEngine {
    fn publish(&mut self, events: &[Value]) -> (EngineSeq, Bytes) {
        // The time stamp differs from life to life.
        let at = self.batches.len() + 1000 * self.life as usize;
        let payload = rmp_serde::to_vec(&json!([at, events, 0])).unwrap();
        self.batches.push(Bytes::from(payload));
        let seq = EngineSeq(self.batches.len() as u64 - 1);
        (seq, self.batches[self.batches.len() - 1].clone())
    }

    fn restart(&mut self) {
        *self = Self {
            life: self.life + 1,
            ..Self::default()
        };
    }

    fn from(&self, seq: EngineSeq) -> Vec<(EngineSeq, Bytes)> {
        let first = usize::try_from(seq.0)
            .unwrap_or(usize::MAX)
            .max(self.oldest);
        let batches = self.batches.iter().enumerate().skip(first);
        batches
            .map(|(seq, b)| (EngineSeq(seq as u64), b.clone()))
            .collect()
    }
}

/// A core with an engine on one side and a log and its reader on the other.
struct World {
    core: SourceCore,
    engine: FakeEngine,
    now: Instant,
    generation: Generation,
    /// Sequences that replays lose, with the number of times.
    holes: BTreeMap<u64, u32>,
    replays_asked: Vec<u64>,
    engine_answers: bool,
    log_is_up: bool,
    log: StreamIdentity,
    /// Its readers have not seen the generation that repairs a loss.
    has_lost: bool,
    /// The registry has the generation.
    has_registry: bool,
    claims: u32,
    /// Larger records are refused.
    record_bytes_max: usize,
    /// What a state directory would have.
    saved: Option<Vec<u8>>,
    acks_wait: bool,
    waiting: Vec<AppendId>,
    records: Vec<Record>,
    reader: LogReader,
    heartbeats: Vec<Heartbeat>,
    notices: Vec<Notice>,
}

/// The source of an engine whose metrics show no drafts.
fn config_of(source: Source, has_replay: bool) -> SourceConfig {
    SourceConfig {
        mirror: known_plain(),
        ..SourceConfig::new(source, has_replay)
    }
}

impl World {
    fn new(has_replay: bool) -> Self {
        let source = Source {
            worker: WorkerId::from("w"),
            dp_rank: DpRank(0),
        };
        Self::with(SourceConfig {
            waits_for_clock: false,
            ..config_of(source, has_replay)
        })
    }

    fn with(config: SourceConfig) -> Self {
        Self {
            core: SourceCore::new(config),
            engine: FakeEngine::default(),
            now: start(),
            generation: Generation(4),
            holes: BTreeMap::new(),
            replays_asked: Vec::new(),
            engine_answers: true,
            log_is_up: true,
            log: StreamIdentity {
                created_unix_ns: 1,
                nonce: 1,
            },
            has_lost: false,
            has_registry: true,
            claims: 0,
            record_bytes_max: codec::RECORD_BYTES_MAX,
            saved: None,
            acks_wait: false,
            waiting: Vec::new(),
            records: Vec::new(),
            reader: LogReader::default(),
            heartbeats: Vec::new(),
            notices: Vec::new(),
        }
    }

    /// Connected, with the lease, and settled.
    fn started(has_replay: bool) -> Self {
        let mut world = Self::new(has_replay);
        world.start();
        world
    }

    fn start(&mut self) {
        self.core.health(self.now, EngineHealth::Healthy);
        self.core.lease_taken(self.now);
        self.core.connected(self.now);
        self.drive();
        self.tick_ms(100);
    }

    fn publish(&mut self, events: &[Value]) {
        let (seq, payload) = self.engine.publish(events);
        self.deliver(seq, payload);
    }

    /// Publishes a payload that is no batch.
    fn publish_unreadable(&mut self) {
        let payload = Bytes::from_static(b"\xc1");
        self.engine.batches.push(payload.clone());
        self.deliver(EngineSeq(self.engine.batches.len() as u64 - 1), payload);
    }

    fn deliver(&mut self, seq: EngineSeq, payload: Bytes) {
        self.core.live(self.now, b"", Some(seq), payload);
        self.drive();
    }

    /// Published, but the message is lost.
    fn publish_lost(&mut self, events: &[Value]) {
        self.engine.publish(events);
    }

    fn reconnect(&mut self) {
        self.core.disconnected(self.now);
        self.drive();
        self.core.connected(self.now);
        self.drive();
    }

    fn tick_ms(&mut self, ms: u64) {
        for _ in 0..ms.div_ceil(100) {
            self.now += Duration::from_millis(100);
            self.core.tick(self.now);
            self.drive();
        }
    }

    fn drive(&mut self) {
        let mut steps = 0;
        while let Some(effect) = self.core.poll_effect() {
            steps += 1;
            assert!(steps < 10_000, "the core does not come to rest");
            match effect {
                Effect::Replay { id, from } => self.replay(id, from),
                Effect::ClaimGeneration { above } => {
                    self.claims += 1;
                    if self.log_is_up {
                        self.has_registry = true;
                        self.generation = self.generation.max(above).next().unwrap();
                        self.core.generation_claimed(self.now, self.generation);
                    } else {
                        self.core.claim_failed(self.now);
                    }
                }
                Effect::Append { id, payload } => self.append(id, &payload),
                Effect::ReadTail { id, is_thorough } => {
                    let tail = self.tail(is_thorough);
                    self.core.log_tail(self.now, id, tail);
                }
                Effect::Flush(id) => self.engine.flushes.push(id),
                Effect::Heartbeat(heartbeat) => self.heartbeats.push(heartbeat),
                Effect::Notice(notice) => self.notices.push(notice),
            }
        }
        if self.is_settled() {
            self.verify();
        }
    }

    fn replay(&mut self, id: ReplayId, from: EngineSeq) {
        self.replays_asked.push(from.0);
        if self.engine_answers {
            self.answer(id, from);
        } else {
            self.engine.unanswered = Some((id, from));
        }
    }

    fn answer(&mut self, id: ReplayId, from: EngineSeq) {
        for (seq, payload) in self.engine.from(from) {
            match self.holes.get_mut(&seq.0) {
                Some(times) if *times > 0 => *times -= 1,
                Some(_) | None => self.core.replay_batch(self.now, id, seq, &payload),
            }
        }
        self.core.replay_end(self.now, id);
    }

    /// The last request is answered after all.
    fn answer_late(&mut self) {
        self.engine_answers = true;
        let (id, from) = self.engine.unanswered.take().unwrap();
        self.answer(id, from);
        self.drive();
    }

    fn append(&mut self, id: AppendId, payload: &[u8]) {
        if !self.log_is_up {
            self.core.append_failed(self.now, id);
            return;
        }
        if payload.len() > self.record_bytes_max {
            let max = self.record_bytes_max;
            self.core.append_too_large(self.now, id, max);
            return;
        }
        let record: Record = codec::decode(payload).unwrap();
        assert!(payload.len() <= codec::RECORD_BYTES_MAX);
        let last = self.records.last().map(|r| (r.generation, r.number));
        if record.number == RecordNumber(0) && last.is_none_or(|(g, _)| g < record.generation) {
            self.reader = LogReader::default();
            self.has_lost = false;
        } else if last.is_none_or(|(g, n)| (g, n.next()) != (record.generation, record.number)) {
            // Sent again, or behind something that comes again: what a sequencing reader drops.
            self.core.acknowledged(self.now, id);
            return;
        }
        self.reader.apply(&record.changes);
        assert_eq!(self.reader.digest(), record.after);
        self.records.push(record);
        if self.acks_wait {
            self.waiting.push(id);
        } else {
            self.core.acknowledged(self.now, id);
        }
    }

    fn acknowledge_all(&mut self) {
        for id in std::mem::take(&mut self.waiting) {
            self.core.acknowledged(self.now, id);
        }
        self.drive();
    }

    fn tail(&self, is_thorough: bool) -> Tail {
        if !self.log_is_up {
            return Tail::Unanswered;
        }
        let last = self.records.last();
        Tail::Seen(LogTail {
            last: last.map(|record| (record.generation, record.number)),
            is_trimmed: false,
            log: is_thorough.then_some(self.log),
            registered: if is_thorough {
                RegistryReading::Read(self.has_registry.then_some(self.generation))
            } else {
                RegistryReading::NotRequested
            },
        })
    }

    /// The log loses its last records, and its readers notice it.
    fn lose_records(&mut self, count: usize) {
        self.records.truncate(self.records.len() - count);
        self.has_lost |= count > 0;
        self.reader = LogReader::default();
        let last = self.records.last().map(|record| record.generation);
        let present = |record: &&Record| Some(record.generation) == last;
        for record in self.records.iter().filter(present) {
            self.reader.apply(&record.changes);
        }
    }

    /// Writes a checkpoint, if the core has one to give.
    fn save(&mut self) {
        if let Some(checkpoint) = self.core.checkpoint() {
            self.saved = Some(checkpoint::encode(&checkpoint));
        }
    }

    /// SIGKILL, and another process.
    fn restart_shim(&mut self) {
        let config = self.core.config.clone();
        let saved = self
            .saved
            .as_ref()
            .map(|bytes| checkpoint::decode(bytes, &config.source, config.mirror).unwrap());
        self.waiting.clear();
        self.core = match saved {
            Some(restored) => SourceCore::resume(config, restored),
            None => SourceCore::new(config),
        };
    }

    fn is_settled(&self) -> bool {
        self.core.publisher.is_idle() && !self.core.publisher.is_paused() && !self.has_lost
    }

    /// The log's state equals what the mirror holds.
    fn verify(&self) {
        assert_eq!(self.reader.held(), self.core.mirror().held());
        assert_eq!(self.reader.digest(), self.core.mirror().digest());
    }

    fn holds(&self, tokens: &[u32]) -> bool {
        self.reader.held().contains(&(prefix(tokens), Tier::Gpu))
    }

    fn held(&self) -> usize {
        self.reader.held().len()
    }

    fn gpu(&self) -> TierState {
        self.core.status(self.now).states.gpu
    }

    fn last_generation(&self) -> u64 {
        self.records.last().unwrap().generation.0
    }
}

fn prefix(tokens: &[u32]) -> PrefixHash {
    let size = BlockSize::new(1).unwrap();
    let seed = warmroute_proto::Seed::PLAIN;
    let hashes = warmroute_proto::hash::local_hashes(tokens, size, seed);
    warmroute_proto::hash::prefix_hashes(None, &hashes)
        .last()
        .unwrap()
}
