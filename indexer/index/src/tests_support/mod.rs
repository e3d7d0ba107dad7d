//! What the tests share: shims that keep their own truth as sets, and a fold with a clock.

#![allow(
    clippy::disallowed_methods,
    clippy::missing_panics_doc,
    clippy::new_without_default,
    clippy::unwrap_used,
    reason = "a test reads the clock, and fails by panicking"
)]

#[cfg(test)]
mod golden;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use bytes::Bytes;
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::message::{Broadcast, LogMessage};
use warmroute_proto::query::{IndexAnswer, IndexQuery, SourceAnswer, SourceState};
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{
    Change, Digest, DpRank, EngineHealth, EngineSeq, Generation, Heartbeat, LocalHash, LogPosition,
    Namespace, PrefixHash, Record, RecordNumber, Source, StreamIdentity, Tier, TierState, Tiers,
    WorkerId, codec,
};

use crate::fold::{ClockAnswer, Fold, HeartbeatVerdict, NoSnapshot, RecordVerdict};
use crate::query;
use crate::snapshot::{Restored, format};

pub const IDENTITY: StreamIdentity = StreamIdentity {
    created_unix_ns: 1,
    nonce: 7,
};

pub const fn clock_answer(asked: Instant, answered: Instant, unix_ns: u64) -> ClockAnswer {
    ClockAnswer {
        asked,
        answered,
        unix_ns,
    }
}

pub fn namespace() -> Namespace {
    Namespace::from("test")
}

/// A source by `worker/rank`.
pub fn source(name: &str) -> Source {
    let (worker, rank) = name.split_once('/').unwrap();
    Source {
        worker: WorkerId::from(worker),
        dp_rank: DpRank(rank.parse().unwrap()),
    }
}

/// Blocks named by letters.
pub fn locals(names: &str) -> Vec<LocalHash> {
    names
        .split_whitespace()
        .map(|name| {
            LocalHash(
                name.bytes()
                    .fold(0, |sum, byte| sum * 256 + u64::from(byte)),
            )
        })
        .collect()
}

/// Prefix hash of a chain of named blocks; `None` for the empty chain.
pub fn prefix(names: &str) -> Option<PrefixHash> {
    prefix_hashes(None, &locals(names)).last()
}

pub fn stored(parent: &str, names: &str, tier: Tier) -> Change {
    Change::Stored {
        parent: prefix(parent),
        blocks: locals(names),
        tier,
    }
}

pub fn removed(chain: &str, tier: Tier) -> Change {
    Change::Removed {
        blocks: prefix(chain).into_iter().collect(),
        tier,
    }
}

/// A heartbeat on its own subject.
pub fn heartbeat_message(heartbeat: &Heartbeat) -> Broadcast {
    heartbeat_message_on(&heartbeat.source, heartbeat)
}

pub fn heartbeat_message_on(of: &Source, heartbeat: &Heartbeat) -> Broadcast {
    Broadcast {
        subject: Subjects::new(&namespace()).heartbeat(of),
        payload: codec::encode(heartbeat).unwrap().into(),
    }
}

/// One source's shim: what it holds, and the records that it would publish.
#[derive(Clone)]
pub struct TestShim {
    pub source: Source,
    pub generation: Generation,
    pub number: Option<RecordNumber>,
    pub pairs: BTreeSet<(PrefixHash, Tier)>,
    pub states: Tiers<TierState>,
}

impl TestShim {
    pub fn new(name: &str) -> Self {
        Self {
            source: source(name),
            generation: Generation(1),
            number: None,
            pairs: BTreeSet::new(),
            states: Tiers::all(TierState::Complete),
        }
    }

    pub fn next_generation(&mut self) {
        self.generation = self.generation.next().unwrap();
        self.number = None;
        self.pairs.clear();
    }

    pub fn digest(&self) -> Digest {
        let mut digest = Digest::default();
        for &(prefix, tier) in &self.pairs {
            digest.insert(prefix, tier);
        }
        digest
    }

    pub fn record(&mut self, changes: Vec<Change>) -> Record {
        for change in &changes {
            match change {
                Change::Stored { tier, .. } => {
                    let stored = change.stored_prefixes();
                    self.pairs.extend(stored.map(|prefix| (prefix, *tier)));
                }
                Change::Removed { blocks, tier } => {
                    for &prefix in blocks {
                        self.pairs.remove(&(prefix, *tier));
                    }
                }
                Change::Cleared { tier } => self.pairs.retain(|(_, held)| held != tier),
            }
        }
        self.number = Some(self.number.map_or(RecordNumber(0), RecordNumber::next));
        Record {
            source: self.source.clone(),
            generation: self.generation,
            number: self.number.unwrap(),
            engine_seq: self.engine_seq(),
            changes,
            states: self.states,
            after: self.digest(),
            sent_at: None,
        }
    }

    pub fn heartbeat(&self) -> Heartbeat {
        Heartbeat {
            source: self.source.clone(),
            generation: self.generation,
            number: self.number,
            engine_seq: self.engine_seq(),
            states: self.states,
            after: self.digest(),
            health: EngineHealth::Healthy,
            sent_at: None,
        }
    }

    fn engine_seq(&self) -> Option<EngineSeq> {
        self.number.map(|number| EngineSeq(number.0))
    }
}

pub fn worker_entry(worker: &str) -> WorkerEntry {
    WorkerEntry {
        models: vec!["m".to_owned()],
        block_size: warmroute_proto::BlockSize::new(16),
        main_attention_only: true,
        ..WorkerEntry::new(worker, "http://127.0.0.1:8000")
    }
}

/// A fold with a clock, a log that ends where the fold is, and shims by name.
pub struct World {
    pub fold: Fold,
    pub now: Instant,
    pub position: LogPosition,
    pub shims: BTreeMap<String, TestShim>,
    pub log: Vec<LogMessage>,
    subjects: Subjects,
}

impl World {
    pub fn new() -> Self {
        Self::with_memory(None)
    }

    pub fn with_memory(bytes_max: Option<usize>) -> Self {
        let mut fold = Fold::new(&namespace(), bytes_max);
        let now = some_instant();
        fold.follow(IDENTITY);
        fold.observe_end(now, LogPosition(0), 0);
        Self {
            fold,
            now,
            position: LogPosition(0),
            shims: BTreeMap::new(),
            log: Vec::new(),
            subjects: Subjects::new(&namespace()),
        }
    }

    pub fn shim(&mut self, name: &str) -> &mut TestShim {
        self.shims
            .entry(name.to_owned())
            .or_insert_with(|| TestShim::new(name))
    }

    /// The log takes and delivers a message.
    pub fn deliver(&mut self, source: &Source, payload: Vec<u8>) -> RecordVerdict {
        self.position = self.position.next();
        let message = LogMessage {
            position: self.position,
            subject: self.subjects.records(source),
            payload: Bytes::from(payload),
            stored_unix_ns: self.position.0,
        };
        self.log.push(message.clone());
        self.fold.apply(self.now, &message)
    }

    /// A replica that starts from a snapshot of this fold, or with nothing, and reads the log from
    /// there.
    pub fn replica(&self, snapshot: Option<&[u8]>) -> Fold {
        let mut fold = Fold::new(&namespace(), None);
        fold.follow(IDENTITY);
        if let Some(snapshot) = snapshot {
            drop(fold.adopt(self.now, Restored::read(snapshot).unwrap()));
        }
        self.catch_up(&mut fold);
        fold
    }

    pub fn catch_up(&self, fold: &mut Fold) {
        let position = fold.position();
        for message in self
            .log
            .iter()
            .filter(|message| message.position > position)
        {
            fold.apply(self.now, message);
        }
    }

    pub fn snapshot(&self) -> Result<Vec<u8>, NoSnapshot> {
        let cut = self.fold.cut(Vec::new())?;
        cut.verify()?;
        Ok(format::encode(&cut.head, &cut.image).unwrap())
    }

    pub fn deliver_record(&mut self, record: &Record) -> RecordVerdict {
        self.deliver(&record.source, codec::encode(record).unwrap())
    }

    /// A shim publishes, the log delivers.
    pub fn publish(&mut self, name: &str, changes: Vec<Change>) -> RecordVerdict {
        let record = self.shim(name).record(changes);
        self.deliver_record(&record)
    }

    pub fn heartbeat(&mut self, name: &str) -> HeartbeatVerdict {
        let heartbeat = heartbeat_message(&self.shim(name).heartbeat());
        self.fold.heartbeat(self.now, &heartbeat)
    }

    pub fn wait(&mut self, time: Duration) {
        self.now += time;
        self.fold.observe_end(self.now, self.position, 0);
        self.fold.tick(self.now);
    }

    pub fn register(&mut self, worker: &str) {
        let key = self.subjects.worker_key(&WorkerId::from(worker));
        let value = codec::encode(&worker_entry(worker)).unwrap();
        self.fold.worker_put(&key, &value).unwrap();
    }

    pub fn deregister(&mut self, worker: &str) {
        let key = self.subjects.worker_key(&WorkerId::from(worker));
        self.fold.worker_gone(self.now, &key);
    }

    pub fn ask(&self, names: &str) -> Vec<SourceAnswer> {
        let query = IndexQuery {
            blocks: locals(names),
            at_least: None,
        };
        match query::answer(&self.fold, &query, self.now) {
            IndexAnswer::Runs { sources, .. } => sources,
            IndexAnswer::Behind { .. } => panic!("behind"),
        }
    }

    /// The one-word state of a source.
    pub fn state(&self, name: &str) -> SourceState {
        let source = source(name);
        let answers = self.ask("");
        let answer = answers.iter().find(|answer| answer.source == source);
        answer.map_or(SourceState::Unknown, |answer| answer.states.gpu)
    }
}

/// Pure code only adds to instants, so any will do.
pub fn some_instant() -> Instant {
    Instant::now()
}
