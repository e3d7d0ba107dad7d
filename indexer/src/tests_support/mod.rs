//! What the tests share: shims that keep their own truth as sets, and a fold with a clock.

mod golden;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warmroute_plane::{Broadcast, LogMessage, MemoryPlane, MemoryPlaneConfig, Plane as _, PutIf};
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::query::{IndexAnswer, IndexQuery, SourceAnswer, SourceState};
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{
    Change, Digest, DpRank, EngineHealth, EngineSeq, Generation, Heartbeat, LocalHash, LogPosition,
    Namespace, PrefixHash, Record, RecordNumber, Source, StreamIdentity, Tier, TierState, Tiers,
    WorkerId, codec,
};

use crate::fold::{Fold, HeartbeatVerdict, NoCut, Verdict};
use crate::snapshot::{Restored, Schedule, format};
use crate::{Handle, IndexerConfig, Service, SnapshotConfig, TaskFailed, query};

pub(crate) const IDENTITY: StreamIdentity = StreamIdentity {
    created_unix_ns: 1,
    nonce: 7,
};

pub(crate) fn namespace() -> Namespace {
    Namespace::from("test")
}

/// A source by `worker/rank`.
pub(crate) fn source(name: &str) -> Source {
    let (worker, rank) = name.split_once('/').unwrap();
    Source {
        worker: WorkerId::from(worker),
        dp_rank: DpRank(rank.parse().unwrap()),
    }
}

/// Blocks named by letters.
pub(crate) fn locals(names: &str) -> Vec<LocalHash> {
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

/// The prefix hash of a chain of named blocks; none for the empty chain.
pub(crate) fn prefix(names: &str) -> Option<PrefixHash> {
    prefix_hashes(None, &locals(names)).last()
}

pub(crate) fn stored(parent: &str, names: &str, tier: Tier) -> Change {
    Change::Stored {
        parent: prefix(parent),
        blocks: locals(names),
        tier,
    }
}

pub(crate) fn removed(chain: &str, tier: Tier) -> Change {
    Change::Removed {
        blocks: prefix(chain).into_iter().collect(),
        tier,
    }
}

/// A heartbeat on its own subject.
pub(crate) fn said(heartbeat: &Heartbeat) -> Broadcast {
    said_on(&heartbeat.source, heartbeat)
}

pub(crate) fn said_on(of: &Source, heartbeat: &Heartbeat) -> Broadcast {
    Broadcast {
        subject: Subjects::new(&namespace()).heartbeat(of),
        payload: codec::encode(heartbeat).unwrap().into(),
    }
}

/// One source's shim: what it holds, and the records that it would publish.
#[derive(Clone)]
pub(crate) struct TestShim {
    pub(crate) source: Source,
    pub(crate) generation: Generation,
    pub(crate) number: Option<RecordNumber>,
    pub(crate) pairs: BTreeSet<(PrefixHash, Tier)>,
    pub(crate) states: Tiers<TierState>,
}

impl TestShim {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            source: source(name),
            generation: Generation(1),
            number: None,
            pairs: BTreeSet::new(),
            states: Tiers::all(TierState::Complete),
        }
    }

    pub(crate) fn next_generation(&mut self) {
        self.generation = self.generation.next().unwrap();
        self.number = None;
        self.pairs.clear();
    }

    pub(crate) fn digest(&self) -> Digest {
        let mut digest = Digest::default();
        for &(prefix, tier) in &self.pairs {
            digest.insert(prefix, tier);
        }
        digest
    }

    pub(crate) fn record(&mut self, changes: Vec<Change>) -> Record {
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

    pub(crate) fn heartbeat(&self) -> Heartbeat {
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

pub(crate) fn worker_entry(worker: &str) -> WorkerEntry {
    WorkerEntry {
        worker: WorkerId::from(worker),
        url: "http://127.0.0.1:8000".to_owned(),
        models: vec!["m".to_owned()],
        loras: Vec::new(),
        ranks: 1,
        block_size: warmroute_proto::BlockSize::new(16),
        blocks_per_rank: None,
        max_model_len: None,
        main_attention_only: true,
        version: "1".to_owned(),
    }
}

/// A fold with a clock, a log that ends where the fold is, and shims by name.
pub(crate) struct World {
    pub(crate) fold: Fold,
    pub(crate) now: Instant,
    pub(crate) position: LogPosition,
    pub(crate) shims: BTreeMap<String, TestShim>,
    pub(crate) log: Vec<LogMessage>,
    subjects: Subjects,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with_memory(None)
    }

    pub(crate) fn with_memory(bytes_max: Option<usize>) -> Self {
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

    pub(crate) fn shim(&mut self, name: &str) -> &mut TestShim {
        self.shims
            .entry(name.to_owned())
            .or_insert_with(|| TestShim::new(name))
    }

    /// The log takes and delivers a message.
    pub(crate) fn deliver(&mut self, source: &Source, payload: Vec<u8>) -> Verdict {
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
    pub(crate) fn replica(&self, snapshot: Option<&[u8]>) -> Fold {
        let mut fold = Fold::new(&namespace(), None);
        fold.follow(IDENTITY);
        if let Some(snapshot) = snapshot {
            drop(fold.adopt(self.now, Restored::read(snapshot).unwrap()));
        }
        self.catch_up(&mut fold);
        fold
    }

    pub(crate) fn catch_up(&self, fold: &mut Fold) {
        let position = fold.position();
        for message in self
            .log
            .iter()
            .filter(|message| message.position > position)
        {
            fold.apply(self.now, message);
        }
    }

    pub(crate) fn snapshot(&self) -> Result<Vec<u8>, NoCut> {
        let cut = self.fold.cut(Vec::new())?;
        cut.verify()?;
        Ok(format::encode(&cut.head, &cut.image).unwrap())
    }

    pub(crate) fn deliver_record(&mut self, record: &Record) -> Verdict {
        self.deliver(&record.source, codec::encode(record).unwrap())
    }

    /// A shim publishes, the log delivers.
    pub(crate) fn publish(&mut self, name: &str, changes: Vec<Change>) -> Verdict {
        let record = self.shim(name).record(changes);
        self.deliver_record(&record)
    }

    pub(crate) fn heartbeat(&mut self, name: &str) -> HeartbeatVerdict {
        let heartbeat = said(&self.shim(name).heartbeat());
        self.fold.heartbeat(self.now, &heartbeat)
    }

    pub(crate) fn wait(&mut self, time: Duration) {
        self.now += time;
        self.fold.observe_end(self.now, self.position, 0);
        self.fold.tick(self.now);
    }

    pub(crate) fn register(&mut self, worker: &str) {
        let key = self.subjects.worker_key(&WorkerId::from(worker));
        let value = codec::encode(&worker_entry(worker)).unwrap();
        self.fold.worker_put(&key, &value).unwrap();
    }

    pub(crate) fn deregister(&mut self, worker: &str) {
        let key = self.subjects.worker_key(&WorkerId::from(worker));
        self.fold.worker_gone(self.now, &key);
    }

    pub(crate) fn ask(&self, names: &str) -> Vec<SourceAnswer> {
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
    pub(crate) fn state(&self, name: &str) -> SourceState {
        let source = source(name);
        let answers = self.ask("");
        let answer = answers.iter().find(|answer| answer.source == source);
        answer.map_or(SourceState::Unknown, |answer| answer.states.gpu)
    }
}

/// Pure code only adds to instants, so any will do.
pub(crate) fn some_instant() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// A plane within the process.
pub(crate) fn plane() -> MemoryPlane {
    plane_of(1 << 20)
}

/// The same, with a log of so many bytes.
pub(crate) fn plane_of(log_bytes_max: usize) -> MemoryPlane {
    MemoryPlane::new(MemoryPlaneConfig {
        identity: IDENTITY,
        log_bytes_max,
        queue_max: 64,
    })
}

/// A service that runs on a plane, with what one needs to talk to it.
pub(crate) struct Running {
    pub(crate) plane: MemoryPlane,
    pub(crate) handle: Handle,
    pub(crate) subjects: Subjects,
    pub(crate) stop: CancellationToken,
    pub(crate) run: tokio::task::JoinHandle<Result<(), TaskFailed>>,
}

impl Running {
    pub(crate) fn start(plane: MemoryPlane) -> Self {
        Self::start_with(plane, |service| service)
    }

    /// One that keeps snapshots, written after every record but not more than one a second.
    pub(crate) fn start_keeping(plane: MemoryPlane, writer: &str) -> Self {
        let config = SnapshotConfig {
            writer: writer.to_owned(),
            schedule: Schedule {
                bytes: 1,
                every: Duration::from_secs(600),
            },
        };
        Self::start_with(plane, |service| service.with_snapshots(config))
    }

    pub(crate) fn start_with(plane: MemoryPlane, with: impl FnOnce(Service) -> Service) -> Self {
        let config = IndexerConfig {
            namespace: namespace(),
            max_memory_bytes: None,
        };
        let service = with(Service::new(config, Arc::new(plane.clone())).unwrap());
        let handle = service.handle();
        let stop = CancellationToken::new();
        let run = TaskTracker::new().spawn(service.run(stop.clone()));
        Self {
            plane,
            handle,
            subjects: Subjects::new(&namespace()),
            stop,
            run,
        }
    }

    /// Appends a record, and waits until it is folded.
    pub(crate) async fn publish(&self, record: &Record) {
        let position = append(&self.plane, record).await;
        let mut positions = self.handle.positions();
        positions.wait_for(|at| *at >= position).await.unwrap();
    }

    pub(crate) async fn heartbeat(&self, shim: &TestShim) {
        let Broadcast { subject, payload } = said(&shim.heartbeat());
        self.plane.publish(subject, payload).await.unwrap();
    }

    pub(crate) async fn register(&self, worker: &str, lease: Option<Duration>) {
        self.register_as(&worker_entry(worker), lease).await;
    }

    pub(crate) async fn register_as(&self, entry: &WorkerEntry, lease: Option<Duration>) {
        let key = self.subjects.worker_key(&entry.worker);
        let value = codec::encode(entry).unwrap();
        let put = self.plane.put(key, value.into(), PutIf::Always, lease);
        put.await.unwrap();
    }
}

pub(crate) async fn append(plane: &MemoryPlane, record: &Record) -> LogPosition {
    let subject = Subjects::new(&namespace()).records(&record.source);
    let payload = codec::encode(record).unwrap();
    let appended = plane.append(subject, payload.into()).await.unwrap();
    appended.await.unwrap()
}
