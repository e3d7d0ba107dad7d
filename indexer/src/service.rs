//! The shell: tails the log, hears heartbeats, watches the registry, serves queries.
//!
//! One task owns the fold and writes to it, in bounded synchronous steps under a lock that is never
//! held across an await; everybody else reads. Whatever the plane does, the service goes on: it
//! takes up the log again where it was. It decides nothing about sources, [`Fold`] does.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, info, warn};
use warmroute_proto::bus::{LogMessage, Plane, PlaneError, RegistryEvent, Request};
use warmroute_proto::query::{Answer, Query};
use warmroute_proto::registry::ResyncRequest;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{LogPosition, Namespace, PrefixHash, Source, Tier, codec};

use crate::fold::{Fold, HeartbeatVerdict, Verdict};
use crate::metrics::{Metrics, QueryOutcome};
use crate::query;
use crate::turns::Turns;
use crate::view::{self, DigestView, SourceDump, WorkerView};

/// Messages of one pull from the log.
const BATCH_MAX: usize = 256;

/// Payload bytes after which the lock is let go: about 500 blocks, some 20 µs. A record larger than
/// that is folded whole, so that nobody sees half of one.
const LOCKED_BYTES_MAX: usize = 4 << 10;

/// Nodes of dead generations that are given back between two steps.
const RECLAIM_MAX: usize = 1024;

/// How often patience is checked and the log's end looked up. Short against the 5 s of a proof,
/// whose age is rounded up by as much.
const TICK: Duration = Duration::from_millis(500);

/// Until the plane is tried again.
const RETRY: Duration = Duration::from_millis(500);

const STATUS_DEADLINE: Duration = Duration::from_secs(1);

/// A replica that is further behind than this is not ready.
const READY_LAG_MAX: u64 = 1000;

#[derive(Clone, Debug)]
pub struct IndexerConfig {
    pub namespace: Namespace,
    /// Bound on the tree's estimated memory; none: as much as it takes.
    pub max_memory_bytes: Option<usize>,
}

/// A task of the service ended before it was told to.
#[derive(Debug, thiserror::Error)]
#[error("a task of the indexer failed")]
pub struct TaskFailed;

/// The indexer, ready to run.
pub struct Service {
    worker: Worker,
}

/// Everybody's view of the indexer. Clones are the same view.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

struct Shared {
    fold: Turns<Fold>,
    position: watch::Sender<LogPosition>,
    /// The registry was read once from start to end.
    registry_read: AtomicBool,
    metrics: Metrics,
}

#[derive(Clone)]
struct Worker {
    shared: Arc<Shared>,
    plane: Arc<dyn Plane>,
    subjects: Subjects,
}

impl Service {
    pub fn new(config: IndexerConfig, plane: Arc<dyn Plane>) -> Result<Self, prometheus::Error> {
        let IndexerConfig {
            namespace,
            max_memory_bytes,
        } = config;
        let fold = Fold::new(&namespace, max_memory_bytes);
        let shared = Shared {
            fold: Turns::new(fold),
            position: watch::Sender::new(LogPosition(0)),
            registry_read: AtomicBool::new(false),
            metrics: Metrics::new()?,
        };
        let worker = Worker {
            shared: Arc::new(shared),
            plane,
            subjects: Subjects::new(&namespace),
        };
        Ok(Self { worker })
    }

    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle {
            shared: Arc::clone(&self.worker.shared),
        }
    }

    /// Runs until it is told to stop.
    pub async fn run(self, stop: CancellationToken) -> Result<(), TaskFailed> {
        let stop = stop.child_token();
        let tasks = TaskTracker::new();
        let follower = tasks.spawn(self.worker.clone().follow(stop.clone()));
        let server = tasks.spawn(self.worker.serve(stop.clone()));
        tasks.close();
        tokio::select! {
            _ = follower => {}
            _ = server => {}
        }
        // Both end only when told to; whatever ended early takes the other one along.
        let told = stop.is_cancelled();
        stop.cancel();
        tasks.wait().await;
        if told { Ok(()) } else { Err(TaskFailed) }
    }
}

impl Handle {
    /// Answers a query, of one moment.
    #[must_use]
    pub fn query(&self, query: &Query) -> Answer {
        let answer = query::answer(&self.shared.read(), query, now());
        self.shared.metrics.query(match answer {
            Answer::Runs { .. } => QueryOutcome::Answered,
            Answer::Behind { .. } => QueryOutcome::Behind,
        });
        answer
    }

    #[must_use]
    pub fn digest(&self) -> DigestView {
        view::digest(&self.shared.read(), now())
    }

    #[must_use]
    pub fn workers(&self) -> Vec<WorkerView> {
        view::workers(&self.shared.read(), now())
    }

    /// One source's image; none if it was never heard of.
    #[must_use]
    pub fn dump(&self, source: &Source) -> Option<SourceDump> {
        view::dump(&self.shared.read(), source, now())
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

    /// The registry and the log are read, up to a small lag.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let fold = self.shared.read();
        let registry_read = self.shared.registry_read.load(Ordering::Acquire);
        registry_read && fold.log().is_some() && fold.lag() <= READY_LAG_MAX
    }

    /// All metrics in Prometheus' text format.
    pub fn metrics_text(&self) -> Result<Vec<u8>, prometheus::Error> {
        let levels = view::levels(&self.shared.read(), now());
        self.shared.metrics.text(&levels)
    }
}

impl Shared {
    /// The fold does not panic; if it did, its next comparison would tell.
    fn read(&self) -> RwLockReadGuard<'_, Fold> {
        self.fold.read()
    }

    fn write(&self) -> RwLockWriteGuard<'_, Fold> {
        self.fold.write()
    }
}

impl Worker {
    async fn follow(self, stop: CancellationToken) {
        let follow = async {
            loop {
                let Err(error) = self.follow_once().await;
                warn!(%error, "the log is taken up again");
                self.shared.metrics.reconnect();
                self.shared.write().tick(now());
                sleep(RETRY).await;
            }
        };
        // Every step on the fold is one synchronous call: being dropped at an await harms nothing.
        tokio::select! {
            () = stop.cancelled() => {}
            () = follow => {}
        }
    }

    /// Follows the log from where it was left, until the plane fails.
    async fn follow_once(&self) -> Result<std::convert::Infallible, PlaneError> {
        self.look_up_end().await?;
        let mut heartbeats = self.plane.subscribe(self.subjects.all_heartbeats()).await?;
        let mut registry = self.plane.watch(self.subjects.worker_keys()).await?;
        self.shared.write().watch_begins();
        let position = self.shared.read().position();
        info!(%position, "following the log");
        let mut log = self.plane.tail(position, BATCH_MAX).await?;
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                batch = log.next() => self.fold_batch(&batch.ok_or_else(ended)?).await,
                heartbeat = heartbeats.next() => self.heartbeat(&heartbeat.ok_or_else(ended)?),
                event = registry.next() => self.registry(event.ok_or_else(ended)?),
                _ = ticks.tick() => self.tick().await?,
            }
        }
    }

    async fn fold_batch(&self, batch: &[LogMessage]) {
        let mut rest = batch;
        while !rest.is_empty() {
            rest = self.fold_some(rest);
            // Between two locks readers and other tasks have their turn.
            tokio::task::yield_now().await;
        }
    }

    /// Folds the first messages, as many as one lock may take; returns the others.
    fn fold_some<'a>(&self, batch: &'a [LogMessage]) -> &'a [LogMessage] {
        let now = now();
        let mut fold = self.shared.write();
        let mut bytes = 0;
        let mut rest = batch;
        while let Some((message, behind)) = rest.split_first() {
            if bytes > LOCKED_BYTES_MAX {
                break;
            }
            bytes += message.payload.len();
            let verdict = fold.apply(now, message);
            self.shared.metrics.record(verdict);
            report(message, verdict);
            rest = behind;
        }
        fold.reclaim(RECLAIM_MAX);
        let position = fold.position();
        drop(fold);
        self.shared.position.send_replace(position);
        rest
    }

    fn heartbeat(&self, payload: &Bytes) {
        let verdict = self.shared.write().heartbeat(now(), payload);
        self.shared.metrics.heartbeat(verdict);
        match verdict {
            HeartbeatVerdict::Mismatch => warn!("a source differs from its shim's heartbeat"),
            HeartbeatVerdict::Proof
            | HeartbeatVerdict::NotFolded
            | HeartbeatVerdict::Behind
            | HeartbeatVerdict::Late
            | HeartbeatVerdict::Old
            | HeartbeatVerdict::Undecodable => debug!(verdict = verdict.word(), "heartbeat"),
        }
    }

    fn registry(&self, event: RegistryEvent) {
        let mut fold = self.shared.write();
        match event {
            RegistryEvent::Put { key, entry } => {
                if let Err(error) = fold.worker_put(&key, &entry.value) {
                    warn!(key, %error, "registry entry ignored");
                    self.shared.metrics.bad_entry();
                }
            }
            RegistryEvent::Gone { key } => {
                info!(key, "worker gone from the registry");
                fold.worker_gone(now(), &key);
            }
            RegistryEvent::Current => {
                fold.watch_is_current(now());
                self.shared.registry_read.store(true, Ordering::Release);
            }
        }
    }

    async fn tick(&self) -> Result<(), PlaneError> {
        let requests = {
            let mut fold = self.shared.write();
            let now = now();
            fold.tick(now);
            fold.reclaim(RECLAIM_MAX);
            fold.poll_resyncs(now)
        };
        for request in requests {
            self.ask_for_resync(&request).await?;
        }
        self.look_up_end().await
    }

    async fn ask_for_resync(&self, request: &ResyncRequest) -> Result<(), PlaneError> {
        let (source, reason) = (&request.source, request.reason);
        warn!(%source, above = %request.above, reason = reason.word(), "asking for a new generation");
        self.shared.metrics.resync(reason);
        match codec::encode(request) {
            Ok(payload) => {
                let subject = self.subjects.resync(&source.worker);
                self.plane.publish(subject, payload.into()).await
            }
            Err(error) => {
                warn!(%error, "a resync request cannot be encoded");
                Ok(())
            }
        }
    }

    /// Where does the log end, and is it still the same? If not, following begins anew.
    async fn look_up_end(&self) -> Result<(), PlaneError> {
        let before = now();
        let status = timeout(STATUS_DEADLINE, self.plane.log_status()).await;
        let status = status.unwrap_or_else(|_| Err(unavailable("the log's status is late")))?;
        let mut fold = self.shared.write();
        let known = fold.log();
        fold.follow(status.identity);
        fold.observe_end(before, status.last);
        let position = fold.position();
        drop(fold);
        self.shared.position.send_replace(position);
        match known {
            Some(known) if known != status.identity => Err(unavailable("it is another log")),
            Some(_) | None => Ok(()),
        }
    }

    async fn serve(self, stop: CancellationToken) {
        let serve = async {
            loop {
                match self.plane.serve(self.subjects.query()).await {
                    Ok(mut requests) => {
                        while let Some(request) = requests.next().await {
                            self.answer(request);
                        }
                    }
                    Err(error) => warn!(%error, "queries cannot be served"),
                }
                sleep(RETRY).await;
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = serve => {}
        }
    }

    /// A query that cannot be read is counted and not answered: there is no honest answer to it,
    /// and its sender goes on without one when its deadline passes.
    fn answer(&self, request: Request) {
        let handle = Handle {
            shared: Arc::clone(&self.shared),
        };
        match codec::decode::<Query>(&request.payload) {
            Ok(query) => match codec::encode(&handle.query(&query)) {
                Ok(answer) => request.reply.send(answer.into()),
                Err(error) => {
                    warn!(%error, "an answer cannot be encoded");
                    self.shared.metrics.query(QueryOutcome::Failed);
                }
            },
            Err(error) => {
                debug!(%error, "query ignored");
                self.shared.metrics.query(QueryOutcome::Malformed);
            }
        }
    }
}

fn report(message: &LogMessage, verdict: Verdict) {
    let (subject, position) = (&message.subject, message.position);
    match verdict {
        Verdict::Applied | Verdict::Started | Verdict::Duplicate | Verdict::NotFolded => {}
        Verdict::Old | Verdict::Replayed => {
            debug!(subject, %position, verdict = verdict.word(), "record dropped");
        }
        Verdict::StartedBehind
        | Verdict::Ahead
        | Verdict::Violation
        | Verdict::Contradiction
        | Verdict::Mismatch
        | Verdict::Undecodable
        | Verdict::WrongSource
        | Verdict::WrongSubject => {
            warn!(subject, %position, verdict = verdict.word(), "record does not fit");
        }
    }
}

fn ended() -> PlaneError {
    unavailable("a stream of the plane ended")
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
