//! The shell: tails the log, reads heartbeats, watches the registry, serves queries, keeps
//! snapshots.
//!
//! One task owns the fold and writes to it, in bounded synchronous steps under a lock that is never
//! held across an await; all others read. Whatever the plane does, the service goes on: it
//! takes up the log again where it was. It decides nothing about sources, [`Fold`] does.
//!
//! `follow` is that task, `restore` what it does with snapshots; `snapshots` writes them, `queries`
//! answers, `register` keeps this replica's entry; `stall` measures how old what is read may be.

mod follow;
mod log_reach;
mod queries;
mod recent;
mod register;
mod restore;
mod snapshots;

use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, RwLockReadGuard};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, error, info, warn};
use warmroute_index::view::{self, SourceCut, WorkerView};
use warmroute_index::writer;
use warmroute_plane::{
    Connection, LogMessage, LogStatus, Plane, PlaneError, RegistryEvent, ServiceRequest,
};
use warmroute_process::{blocking, build};
use warmroute_proto::query::{HoldAnswer, HoldQuery, IndexAnswer, IndexQuery};
use warmroute_proto::registry::ResyncRequest;
use warmroute_proto::roster::{
    self, DeepHolderQuery, HolderAnswer, HolderQuery, RosterId, RosterNumber, RosterPage,
    RosterPageRequest,
};
use warmroute_proto::snapshot::{RecordMark, SnapshotHolding};
use warmroute_proto::subject::Subjects;
use warmroute_proto::view::{DigestView, ReplicaFaults, ViewPage, ViewPageRequest};
use warmroute_proto::{LogPosition, Namespace, PrefixHash, Source, Tier, codec};

use crate::fair_lock::{FairReader, FairWriter};
use crate::fold::{ClockAnswer, Fold, HeartbeatVerdict, RecordVerdict};
use crate::metrics::{self, Metrics, QueryOutcome, unix_ns};
use crate::query;
use crate::snapshot::Schedule;
use crate::snapshot::policy::ReadProgress;
use follow::CutRequest;
use log_reach::LogReach;
use recent::RecentEvents;

/// Messages of one pull from the log.
const BATCH_MAX: usize = 256;

/// Payload bytes after which others have their turn: about 500 blocks, some 20 µs. A record larger
/// than that is folded whole, so that no reader sees half of one.
const LOCKED_BYTES_MAX: usize = 4 << 10;

/// How often patience is checked, and the log's end looked up. Short against the 5 s of a proof,
/// whose age is rounded up by as much.
const TICK: Duration = Duration::from_millis(500);

/// Until the plane is tried again.
const RETRY: Duration = Duration::from_millis(500);

const STATUS_DEADLINE: Duration = Duration::from_secs(1);

/// A source's cut that the writer does not make in time is given up. A snapshot's may come before it,
/// and the rest after that.
const SOURCE_CUT_DEADLINE: Duration = Duration::from_secs(10);

/// Cuts that wait for the writer: a snapshot's and a few dumps'.
const CUTS_WAITING_MAX: usize = 4;

/// A replica that is further behind than this is not ready.
pub const READY_LAG_MAX: u64 = 1000;

#[derive(Clone, Debug)]
pub struct IndexerConfig {
    pub namespace: Namespace,
    /// Bound on the memory of all that is folded; none: as much as it takes.
    pub max_memory_bytes: Option<usize>,
}

/// Whether and when this replica writes snapshots. Any that writes also reads them.
#[derive(Clone, Debug)]
pub struct SnapshotConfig {
    /// Part of the names that it gives: unique among all replicas that ever were.
    pub writer: String,
    pub schedule: Schedule,
}

/// This replica, as the registry shows it.
#[derive(Clone, Debug)]
pub struct Replica {
    /// Unique among all replicas that ever were.
    pub id: String,
    /// Where its HTTP is reached.
    pub url: Option<String>,
}

type Refusals = Box<dyn Fn() -> Vec<String> + Send + Sync>;

type MetricsText = Box<dyn Fn() -> String + Send + Sync>;

/// Why an indexer is not ready.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotReady {
    #[error("NATS is out of reach")]
    PlaneAway,
    #[error("the log cannot be read: {0}")]
    LogUnreadable(String),
    #[error("catching up: log and registry are not read yet")]
    Starting,
    #[error("catching up: {0} records behind")]
    Behind(u64),
}

/// A task of the service ended before the service was stopped.
#[derive(Debug, thiserror::Error)]
#[error("a task of the indexer failed")]
pub struct TaskFailed;

/// The indexer, ready to run.
pub struct Service {
    writer: FoldWriter,
    replica: Option<Replica>,
    cut_requests: mpsc::Receiver<CutRequest>,
}

/// A view of the indexer. Clones share it.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

struct Shared {
    fold: FairReader<Fold>,
    position: watch::Sender<LogPosition>,
    /// The registry was read once from start to end.
    registry_read: AtomicBool,
    /// The oldest record that the log was seen to keep.
    log_first: AtomicU64,
    /// It is decided what the fold starts from.
    started: AtomicBool,
    connection: watch::Receiver<Connection>,
    log_reach: LogReach,
    metrics: Metrics,
    more_metrics: OnceLock<MetricsText>,
    refusals: OnceLock<Refusals>,
    answers_too_large: RecentEvents,
    turned_away: RecentEvents,
    /// None if this replica writes no snapshots.
    snapshot_every_secs: OnceLock<u64>,
    /// The writer makes cuts: no writer waits for the lock then, and so no reader.
    cuts: mpsc::Sender<CutRequest>,
    /// What another task than the writer read of the log's clock, until the writer takes it.
    clock: watch::Sender<Option<ClockAnswer>>,
}

/// What every task of the service has. It only reads the fold.
#[derive(Clone)]
struct ServiceContext {
    shared: Arc<Shared>,
    plane: Arc<dyn Plane>,
    subjects: Subjects,
    snapshots: Option<SnapshotConfig>,
}

/// The one task that changes the fold. Another one that waited for the lock while this one reads for
/// long would hold up all readers.
struct FoldWriter {
    context: ServiceContext,
    fold: FairWriter<Fold>,
}

impl Deref for FoldWriter {
    type Target = ServiceContext;

    fn deref(&self) -> &ServiceContext {
        &self.context
    }
}

impl Service {
    /// Without snapshots, registration, and metrics of NATS: what an indexer inside another process
    /// needs.
    pub fn new(config: IndexerConfig, plane: Arc<dyn Plane>) -> Result<Self, prometheus::Error> {
        let IndexerConfig {
            namespace,
            max_memory_bytes,
        } = config;
        let fold = FairWriter::new(Fold::new(&namespace, max_memory_bytes));
        let (cuts, cut_requests) = mpsc::channel(CUTS_WAITING_MAX);
        let shared = Shared {
            fold: fold.reader(),
            position: watch::Sender::new(LogPosition(0)),
            registry_read: AtomicBool::new(false),
            log_first: AtomicU64::new(0),
            started: AtomicBool::new(false),
            connection: plane.connection(),
            log_reach: LogReach::default(),
            metrics: Metrics::new()?,
            more_metrics: OnceLock::new(),
            refusals: OnceLock::new(),
            answers_too_large: RecentEvents::default(),
            turned_away: RecentEvents::default(),
            snapshot_every_secs: OnceLock::new(),
            cuts,
            clock: watch::Sender::new(None),
        };
        let context = ServiceContext {
            shared: Arc::new(shared),
            plane,
            subjects: Subjects::new(&namespace),
            snapshots: None,
        };
        Ok(Self {
            writer: FoldWriter { context, fold },
            replica: None,
            cut_requests,
        })
    }

    /// Reads a snapshot at its start, and writes them when they are due.
    #[must_use]
    pub fn with_snapshots(mut self, config: SnapshotConfig) -> Self {
        let every = config.schedule.every.as_secs();
        // Set once, here.
        self.writer.shared.snapshot_every_secs.set(every).ok();
        self.writer.context.snapshots = Some(config);
        self
    }

    /// Shows more metrics behind its own: those of its connection.
    #[must_use]
    pub fn with_metrics(self, more: impl Fn() -> String + Send + Sync + 'static) -> Self {
        // Set once, here.
        drop(self.writer.shared.more_metrics.set(Box::new(more)));
        self
    }

    /// Shows `doctor` what the server refuses to its user.
    #[must_use]
    pub fn with_refusals(self, refusals: impl Fn() -> Vec<String> + Send + Sync + 'static) -> Self {
        // Set once, here.
        drop(self.writer.shared.refusals.set(Box::new(refusals)));
        self
    }

    /// Shows itself in the registry.
    #[must_use]
    pub fn registered_as(mut self, replica: Replica) -> Self {
        let roster = RosterId(xxhash_rust::xxh3::xxh3_64(replica.id.as_bytes()));
        self.writer.fold.write().set_roster_id(roster);
        self.replica = Some(replica);
        self
    }

    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle {
            shared: Arc::clone(&self.writer.shared),
        }
    }

    /// Runs until `stop` is cancelled.
    pub async fn run(self, stop: CancellationToken) -> Result<(), TaskFailed> {
        let Self {
            writer,
            replica,
            cut_requests,
        } = self;
        let stop = stop.child_token();
        let tasks = TaskTracker::new();
        let mut all = FuturesUnordered::new();
        let context = writer.context.clone();
        all.push(tasks.spawn(writer.follow(cut_requests, stop.clone())));
        let places = queries::places();
        let own = replica.as_ref().map(|replica| &replica.id);
        let own = own.map(|id| context.subjects.query_at(id));
        for subject in [Some(context.subjects.query()), own].into_iter().flatten() {
            let (tasks_of_queries, stop) = (tasks.clone(), stop.clone());
            let serve = context.clone();
            let serve = serve.serve(subject, Arc::clone(&places), tasks_of_queries, stop);
            all.push(tasks.spawn(serve));
        }
        if let Some(config) = context.snapshots.clone() {
            let snapshots = snapshots::Snapshots::new(context.clone(), config);
            all.push(tasks.spawn(snapshots.run(stop.clone())));
        }
        if let Some(replica) = replica {
            all.push(tasks.spawn(context.register(replica, stop.clone())));
        }
        tasks.close();
        // They end only when stopped; a task that ends early ends the others.
        all.next().await;
        let told = stop.is_cancelled();
        stop.cancel();
        tasks.wait().await;
        if told { Ok(()) } else { Err(TaskFailed) }
    }
}

impl Handle {
    /// Answers a query, of one moment.
    #[must_use]
    pub fn query(&self, query: &IndexQuery) -> IndexAnswer {
        // The chain is made before the lock: a long prompt's takes longer than looking it up.
        self.answer(&query::PreparedQuery::of(query))
    }

    /// Answers a prepared query, of one moment.
    #[must_use]
    pub fn answer(&self, query: &query::PreparedQuery) -> IndexAnswer {
        let answer = query.answer(&self.shared.read(), now());
        self.shared.metrics.queries.inc(match answer {
            IndexAnswer::Runs { .. } => QueryOutcome::Answered,
            IndexAnswer::Behind { .. } => QueryOutcome::Behind,
        });
        answer
    }

    /// Answers a query about one block of one source, of one moment.
    #[must_use]
    pub fn hold(&self, query: &HoldQuery) -> HoldAnswer {
        let answer = query::hold_answer(&self.shared.read(), query, now());
        self.shared.metrics.queries.inc(QueryOutcome::Answered);
        answer
    }

    /// Answers a compact query, of one moment.
    #[must_use]
    pub fn holders(&self, query: &HolderQuery) -> HolderAnswer {
        let prepared = query::PreparedQuery::of_blocks(&query.blocks);
        self.holders_of(&prepared, query.known, query.from)
    }

    fn holders_of(
        &self,
        prepared: &query::PreparedQuery,
        known: RosterPageRequest,
        from: RosterNumber,
    ) -> HolderAnswer {
        let fold = self.shared.read();
        let holders = prepared.holders(&fold, known, from, now());
        drop(fold);
        let (answer, outcome) = match holders {
            Some(holders) => (holders.into_answer(), QueryOutcome::Answered),
            None => (HolderAnswer::Behind, QueryOutcome::Behind),
        };
        self.shared.metrics.queries.inc(outcome);
        answer
    }

    /// A page of changes of this replica's roster, of about so many bytes.
    #[must_use]
    pub fn roster(&self, ask: &RosterPageRequest, bytes_max: usize) -> RosterPage {
        self.shared.read().roster_page(ask, bytes_max)
    }

    #[must_use]
    pub fn digest(&self) -> DigestView {
        view::digest(&self.shared.fold, now())
    }

    /// A page of all that this replica can say of itself.
    #[must_use]
    pub fn view(&self, ask: &ViewPageRequest) -> ViewPage {
        let page = view::page(&self.shared.read(), ask, now());
        ViewPage {
            version: build::version().to_owned(),
            ready: self.is_ready(),
            unix_ns: unix_ns(),
            snapshot_every_secs: self.shared.snapshot_every_secs.get().copied(),
            ..page
        }
    }

    /// What went wrong within the last ten minutes.
    #[must_use]
    pub fn faults(&self) -> ReplicaFaults {
        let refusals = self.shared.refusals.get();
        ReplicaFaults {
            answers_too_large: self.shared.answers_too_large.count(now()),
            turned_away: self.shared.turned_away.count(now()),
            refused: refusals.map_or_else(Vec::new, |refusals| refusals()),
        }
    }

    /// Counts an HTTP request that found no free slot.
    pub(crate) fn turned_away(&self) {
        self.shared.turned_away.add(now());
    }

    #[must_use]
    pub fn workers(&self) -> Vec<WorkerView> {
        view::workers(&self.shared.fold, now())
    }

    /// One source as of one moment, cut by the writer; `None` for an unknown source.
    pub async fn cut_source(&self, source: Source) -> Result<Option<SourceCut>, PlaneError> {
        let (made, cut) = oneshot::channel();
        let request = CutRequest::Source(source, made);
        let cut = async {
            self.shared.cuts.send(request).await.ok()?;
            cut.await.ok()
        };
        let cut = timeout(SOURCE_CUT_DEADLINE, cut).await.ok().flatten();
        cut.ok_or_else(|| unavailable("the log is not followed now"))
    }

    /// All pairs that the source holds as far as the log is in, whatever its state.
    #[must_use]
    pub fn held(&self, source: &Source) -> BTreeSet<(PrefixHash, Tier)> {
        self.shared.read().held(source).collect()
    }

    /// Everything up to here is in.
    #[must_use]
    pub fn position(&self) -> LogPosition {
        *self.shared.position.borrow()
    }

    /// Follows the position, to wait for one.
    #[must_use]
    pub fn positions(&self) -> watch::Receiver<LogPosition> {
        self.shared.position.subscribe()
    }

    /// It is decided what to start from.
    #[must_use]
    pub fn has_started(&self) -> bool {
        self.shared.started.load(Ordering::Acquire)
    }

    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.readiness().is_ok()
    }

    /// Ready: the plane is within reach, it is decided what to start from, and registry and log are
    /// read, up to a small lag.
    pub fn readiness(&self) -> Result<(), NotReady> {
        if *self.shared.connection.borrow() == Connection::Down {
            return Err(NotReady::PlaneAway);
        }
        if let Some(why) = self.shared.log_reach.fault(now()) {
            return Err(NotReady::LogUnreadable(why));
        }
        let registry_read = self.shared.registry_read.load(Ordering::Acquire);
        let fold = self.shared.read();
        if !self.has_started() || !registry_read || fold.log().is_none() {
            return Err(NotReady::Starting);
        }
        match fold.lag() {
            0..=READY_LAG_MAX => Ok(()),
            lag => Err(NotReady::Behind(lag)),
        }
    }

    /// All metrics in Prometheus' text format.
    pub fn metrics_text(&self) -> Result<Vec<u8>, prometheus::Error> {
        let levels = metrics::levels(&self.shared.fold, now());
        let mut text = self.shared.metrics.text(&levels)?;
        if let Some(more) = self.shared.more_metrics.get() {
            text.extend_from_slice(more().as_bytes());
        }
        Ok(text)
    }
}

impl Shared {
    /// Leaves an answer for the writer, unless the one that waits shows as much.
    fn offer_clock(&self, answer: ClockAnswer) {
        self.clock.send_if_modified(|waiting| {
            let is_news = !waiting.is_some_and(|waiting| waiting.overtook(&answer));
            if is_news {
                *waiting = Some(answer);
            }
            is_news
        });
    }

    fn take_clock_answer(&self) -> Option<ClockAnswer> {
        let mut taken = None;
        self.clock.send_if_modified(|waiting| {
            taken = waiting.take();
            false
        });
        taken
    }

    fn reading(&self, fold: &Fold) -> ReadProgress {
        ReadProgress {
            at: now(),
            position: fold.position(),
            bytes: fold.bytes_read(),
            first: LogPosition(self.log_first.load(Ordering::Relaxed)),
        }
    }

    /// The fold does not panic; if it did, its next comparison would fail.
    fn read(&self) -> RwLockReadGuard<'_, Fold> {
        self.fold.read()
    }
}

async fn in_time<T>(answer: impl Future<Output = Result<T, PlaneError>>) -> Result<T, PlaneError> {
    let answer = timeout(STATUS_DEADLINE, answer).await;
    answer.unwrap_or_else(|_| Err(unavailable("the log's state is late")))
}

fn unavailable(why: &str) -> PlaneError {
    PlaneError::Unavailable(why.to_owned())
}

/// Tests pause this clock.
fn now() -> std::time::Instant {
    Instant::now().into_std()
}

#[cfg(test)]
mod tests;
