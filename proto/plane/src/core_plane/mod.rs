//! A plane without a log server, over any [`Bus`].
//!
//! A record is published, and each process that reads the log keeps what it receives in a log of its
//! own. Nothing stores a record for a process that does not receive it: readers find what they lack
//! by numbers and digests, and ask the source's shim for a new generation. An append is acknowledged
//! when its record has come back to its sender.
//!
//! The registry is replicated (`registry`): every process has all of it. The clock is common to all
//! processes (`clock`). `gossip` is the task that keeps both. There are no snapshots.

mod appends;
mod bus;
mod clock;
mod gossip;
mod registry;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use warmroute_proto::codec::{self, Message};
use warmroute_proto::peers::{PeerId, RegistryPage, RegistryPageRequest, RegistryWrite};
use warmroute_proto::subject::{Subjects, matches};
use warmroute_proto::{LogPosition, Namespace, StreamIdentity};
use xxhash_rust::xxh3::xxh3_64;

use self::appends::{BACK_MAX, PendingAppends};
use self::clock::CommonClock;
use self::registry::SharedRegistry;
use super::{
    Appended, Broadcast, Connection, LogMessage, LogStatus, LogTail, Plane, PlaneError,
    PlaneFuture, PlaneStream, PutIf, RegistryEntry, RegistryEvent, Revision, ServiceRequest,
};
use crate::memory::log::TailedLog;
use crate::registry_watch::KeyWatch;

pub use bus::Bus;

/// Bound on appends whose record is not back; further ones wait.
const APPENDS_MAX: usize = 4096;

/// Least time between two comparisons of a watch: a registry with many leases changes all the time.
const WATCH_PAUSE: Duration = Duration::from_millis(20);

/// Identity and bounds of one process's [`CorePlane`].
#[derive(Clone, Debug)]
pub struct CorePlaneConfig {
    pub namespace: Namespace,
    /// Random bits: this process, its log, and its revisions.
    pub id: u64,
    /// The time of day, in nanoseconds since the Unix epoch. Counts until another process is found.
    pub unix_ns: u64,
    /// Bytes that the log in memory keeps; beyond, the oldest records are dropped.
    pub log_bytes_max: usize,
}

impl CorePlaneConfig {
    /// Twice the image of a large fleet's largest source.
    pub const LOG_BYTES_MAX: usize = 32 << 20;
}

/// Where the log of a plane on NATS is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlaneLog {
    /// The server, as streams.
    #[default]
    JetStream,
    /// Each reader for itself, see [`CorePlane`].
    None,
}

/// A plane without a log server. Clones share it.
pub struct CorePlane<B> {
    shared: Arc<CoreShared<B>>,
    tasks: CoreTasks,
}

impl<B> Clone for CorePlane<B> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            tasks: self.tasks.clone(),
        }
    }
}

/// The tasks of a plane. They end with its last user.
#[derive(Clone)]
struct CoreTasks {
    tracker: TaskTracker,
    runtime: Handle,
    stop: CancellationToken,
    _stop_at_end: Arc<DropGuard>,
}

struct CoreShared<B> {
    bus: B,
    subjects: Subjects,
    peer: PeerId,
    log: TailedLog,
    appends: Arc<Semaphore>,
    state: Mutex<CoreState>,
    registry_changed: Notify,
    connection: watch::Receiver<Connection>,
}

struct CoreState {
    clock: CommonClock,
    registry: SharedRegistry,
    appends: PendingAppends,
    /// What is read of the log: all of it, or the subjects that this process writes.
    filters: Vec<String>,
    standing: Standing,
    /// When a beacon was received last, the own one too.
    heard: Option<Instant>,
    /// The last beacon of another process.
    other: Option<(PeerId, Instant)>,
    clock_source: ClockSource,
    /// Other processes' writes that were taken in.
    applied: u64,
}

/// Where the common clock of this process is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClockSource {
    /// This machine's time of day.
    Own,
    Others,
}

/// Whether this process has the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// It may lack entries.
    Joining,
    Joined,
    /// It answers others, and itself.
    Serving,
}

/// Silence of all beacons, the own one too, after which the network is not in order.
const SILENCE_MAX: Duration = Duration::from_millis(1500);

/// A process without a beacon for so long is not asked by name for the common clock.
const OTHER_RUNS: Duration = Duration::from_secs(3);

/// Time for an answer about the common clock.
const CLOCK_DEADLINE: Duration = Duration::from_millis(500);

impl<B: Bus> CorePlane<B> {
    /// In the runtime in which its tasks run. The plane is unavailable until it has joined the
    /// other processes.
    #[must_use]
    pub fn start(bus: B, config: CorePlaneConfig) -> Self {
        let CorePlaneConfig {
            namespace,
            id,
            unix_ns,
            log_bytes_max,
        } = config;
        let now = Instant::now();
        let state = CoreState {
            clock: CommonClock::new(now, unix_ns),
            registry: SharedRegistry::new(now, id, unix_ns / 1_000_000),
            appends: PendingAppends::default(),
            filters: Vec::new(),
            standing: Standing::Joining,
            heard: None,
            other: None,
            clock_source: ClockSource::Own,
            applied: 0,
        };
        let stop = CancellationToken::new();
        let shared = Arc::new(CoreShared {
            connection: bus.connection(),
            bus,
            subjects: Subjects::new(&namespace),
            peer: PeerId(id),
            log: TailedLog::new(StreamIdentity::of_one_reader(id), log_bytes_max),
            appends: Arc::new(Semaphore::new(APPENDS_MAX)),
            state: Mutex::new(state),
            registry_changed: Notify::new(),
        });
        let tasks = CoreTasks {
            tracker: TaskTracker::new(),
            runtime: Handle::current(),
            _stop_at_end: Arc::new(stop.clone().drop_guard()),
            stop,
        };
        tasks.spawn(gossip::run(Arc::clone(&shared)));
        Self { shared, tasks }
    }

    /// Waits until this process has the registry, for up to `deadline`. Returns whether it has.
    pub async fn joined(&self, deadline: Duration) -> bool {
        let joined = async {
            while self.shared.check_joined().is_err() {
                sleep(JOINED_POLL).await;
            }
        };
        timeout(deadline, joined).await.is_ok()
    }

    /// The network.
    #[must_use]
    pub fn bus(&self) -> &B {
        &self.shared.bus
    }

    /// Reads these subjects of the log from now on.
    async fn read_log(&self, filter: String) -> Result<(), PlaneError> {
        if self.shared.state().reads(&filter) {
            return Ok(());
        }
        let records = self.shared.bus.subscribe(filter.clone()).await?;
        {
            let state = &mut *self.shared.state();
            if state.reads(&filter) {
                return Ok(());
            }
            state.filters.push(filter.clone());
        }
        let shared = Arc::clone(&self.shared);
        self.tasks.spawn(async move {
            shared.read_records(&filter, records).await;
        });
        Ok(())
    }

    async fn append(&self, subject: String, payload: Bytes) -> Result<Appended, PlaneError> {
        let shared = &self.shared;
        shared.check_size(&payload)?;
        shared.check_joined()?;
        self.read_log(subject.clone()).await?;
        let deadline = Instant::now() + BACK_MAX;
        let permit = timeout_at(deadline, Arc::clone(&shared.appends).acquire_owned()).await;
        let permit = permit.map_err(|_| unavailable("too many records are not back"))?;
        let permit = permit.map_err(|_| unavailable("the plane has ended"))?;
        let checksum = xxh3_64(&payload);
        let position =
            shared
                .state()
                .appends
                .send(Instant::now(), subject.clone(), checksum, permit);
        shared.bus.publish(subject, payload).await?;
        Ok(Box::pin(async move {
            let position = position.await;
            position.map_err(|_| unavailable("the record did not come back"))
        }))
    }

    async fn write(
        &self,
        write: impl FnOnce(&mut SharedRegistry, Instant) -> Result<RegistryWrite, PlaneError> + Send,
    ) -> Result<Revision, PlaneError> {
        let shared = &self.shared;
        shared.check_joined()?;
        let written = write(&mut shared.state().registry, Instant::now())?;
        shared.registry_changed.notify_waiters();
        let revision = Revision(written.revision);
        let subject = shared.subjects.registry_write(&written.key);
        let subject = subject.ok_or_else(|| unavailable("a key of another namespace"))?;
        shared.publish(subject, &written).await?;
        Ok(revision)
    }
}

/// How often [`CorePlane::joined`] looks.
const JOINED_POLL: Duration = Duration::from_millis(10);

impl CoreTasks {
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        let task = async move {
            stop.run_until_cancelled_owned(task).await;
        };
        self.tracker.spawn_on(task, &self.runtime);
    }
}

impl<B: Bus> CoreShared<B> {
    /// A panic under the lock cannot leave a step half done: every step is one call.
    fn state(&self) -> MutexGuard<'_, CoreState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_up(&self) -> Result<(), PlaneError> {
        match *self.connection.borrow() {
            Connection::Up => Ok(()),
            Connection::Down => Err(unavailable("not connected")),
        }
    }

    fn check_joined(&self) -> Result<(), PlaneError> {
        self.check_up()?;
        match self.state().standing {
            Standing::Joined | Standing::Serving => Ok(()),
            Standing::Joining => Err(unavailable("the registry is not read yet")),
        }
    }

    fn check_size(&self, payload: &Bytes) -> Result<(), PlaneError> {
        let (bytes, max) = (payload.len(), self.bus.payload_max());
        if bytes > max {
            return Err(PlaneError::TooLarge { bytes, max });
        }
        Ok(())
    }

    async fn publish<M: Message>(&self, subject: String, message: &M) -> Result<(), PlaneError> {
        let payload = codec::encode(message).map_err(|error| unavailable(&error.to_string()))?;
        self.bus.publish(subject, Bytes::from(payload)).await
    }

    /// Takes in records until their subscription ends or is a part of another one.
    async fn read_records(&self, filter: &str, mut records: PlaneStream<Broadcast>) {
        while let Some(Broadcast { subject, payload }) = records.next().await {
            if !self.state().filters.iter().any(|read| read == filter) {
                return;
            }
            self.received(subject, payload);
        }
        self.state().filters.retain(|read| read != filter);
    }

    fn received(&self, subject: String, payload: Bytes) {
        let state = &mut *self.state();
        let stored = state.clock.unix_ns(Instant::now());
        let checksum = xxh3_64(&payload);
        let position = self.log.append(subject.clone(), payload, |_| stored);
        state.appends.received(&subject, checksum, position);
    }

    /// The bounds of this process's log, and the common clock as a process shows it now. So it
    /// fails where the network does, and a clock that stood still is set right. Until a process
    /// answers, beacons show both.
    async fn status(&self) -> Result<LogStatus, PlaneError> {
        self.check_joined()?;
        let read = self.read_clock().await;
        let now = Instant::now();
        let state = &mut *self.state();
        match read {
            Ok(unix_ns) => state.observe_clock(now, unix_ns),
            Err(error) if state.standing == Standing::Serving => return Err(error),
            Err(error) => {
                let is_silent = |heard| now.saturating_duration_since(heard) > SILENCE_MAX;
                if state.heard.is_none_or(is_silent) {
                    return Err(error);
                }
            }
        }
        Ok(LogStatus {
            now_unix_ns: state.clock.unix_ns(now),
            ..self.log.read().status()
        })
    }

    /// The common clock of another process that runs, by its beacons; else of any process.
    async fn read_clock(&self) -> Result<u64, PlaneError> {
        let by_name = self.other(OTHER_RUNS);
        let by_name = by_name.map(|peer| self.subjects.registry_pages_of(peer));
        let of_any = self.subjects.registry_pages();
        let mut error = unavailable("no process answers");
        for subject in by_name.into_iter().chain([of_any]) {
            // Behind every key: a page without entries.
            let after = self.subjects.all_keys() + "~";
            match self.page(subject, after, CLOCK_DEADLINE).await {
                Ok(Some(page)) => return Ok(page.unix_ns),
                Ok(None) => {}
                Err(failed) => error = failed,
            }
        }
        Err(error)
    }

    async fn page(
        &self,
        subject: String,
        after: String,
        deadline: Duration,
    ) -> Result<Option<RegistryPage>, PlaneError> {
        let request = codec::encode(&RegistryPageRequest { after });
        let request = request.map_err(|error| unavailable(&error.to_string()))?;
        let request = Bytes::from(request);
        let answer = self.bus.request(subject, request, deadline).await?;
        let page = answer.map(|answer| codec::decode(&answer)).transpose();
        page.map_err(|error| unavailable(&error.to_string()))
    }

    /// The watcher's next event. Wakes after changes, and when a key expires.
    async fn next_event(&self, watch: &mut KeyWatch) -> RegistryEvent {
        loop {
            let changed = self.registry_changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let due = {
                let registry = &mut self.state().registry;
                registry.expire(Instant::now());
                if let Some(event) = watch.next(registry) {
                    return event;
                }
                registry.next_due()
            };
            match due {
                // Either way the loop looks again.
                Some(due) => drop(timeout_at(due, changed).await),
                None => changed.await,
            }
            sleep(WATCH_PAUSE).await;
        }
    }
}

impl CoreState {
    /// Takes a reading of another process's clock. Before this process serves others, it follows
    /// any that is ahead: its own time of day may be that of a machine without a clock.
    fn observe_clock(&mut self, now: Instant, unix_ns: u64) {
        match self.standing {
            Standing::Joining | Standing::Joined => self.clock.follow(now, unix_ns),
            Standing::Serving => self.clock.observe(now, unix_ns),
        }
    }

    fn reads(&self, filter: &str) -> bool {
        self.filters
            .iter()
            .any(|read| read == filter || matches(read, filter))
    }
}

impl<B: Bus> Plane for CorePlane<B> {
    fn connection(&self) -> watch::Receiver<Connection> {
        self.shared.bus.connection()
    }

    fn log_status(&self) -> PlaneFuture<'_, LogStatus> {
        Box::pin(self.shared.status())
    }

    fn append(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, Appended> {
        Box::pin(self.append(subject, payload))
    }

    fn last_on(&self, subject: String) -> PlaneFuture<'_, Option<LogMessage>> {
        let checked = self.shared.check_joined();
        ready(checked.map(|()| self.shared.log.read().last_on(&subject)))
    }

    fn at(&self, position: LogPosition) -> PlaneFuture<'_, Option<LogMessage>> {
        let checked = self.shared.check_joined();
        ready(checked.map(|()| self.shared.log.read().at(position)))
    }

    fn tail(&self, after: LogPosition, batch_max: usize) -> PlaneFuture<'_, LogTail> {
        Box::pin(async move {
            let all = self.shared.subjects.all_records();
            self.read_log(all.clone()).await?;
            // The others' records are among all.
            self.shared.state().filters.retain(|read| *read == all);
            let tail = self.shared.log.tail(after, batch_max);
            // The stream keeps the plane alive.
            let tail = (self.clone(), tail);
            let tail: LogTail = Box::pin(stream::unfold(tail, |(plane, mut tail)| async move {
                Some((tail.next().await?, (plane, tail)))
            }));
            Ok(tail)
        })
    }

    fn get(&self, key: String) -> PlaneFuture<'_, Option<RegistryEntry>> {
        let checked = self.shared.check_joined();
        ready(checked.map(|()| self.shared.state().registry.get(Instant::now(), &key)))
    }

    fn put(
        &self,
        key: String,
        value: Bytes,
        condition: PutIf,
        lease: Option<Duration>,
    ) -> PlaneFuture<'_, Revision> {
        if let Err(error) = self.shared.check_size(&value) {
            return ready(Err(error));
        }
        Box::pin(self.write(move |registry, now| registry.put(now, key, value, condition, lease)))
    }

    fn delete(&self, key: String, revision: Revision) -> PlaneFuture<'_, ()> {
        let delete = self.write(move |registry, now| registry.delete(now, &key, revision));
        Box::pin(async move { delete.await.map(drop) })
    }

    fn watch(&self, prefix: String) -> PlaneFuture<'_, PlaneStream<RegistryEvent>> {
        if let Err(error) = self.shared.check_joined() {
            return ready(Err(error));
        }
        let start = (self.clone(), KeyWatch::new(prefix));
        let watch = stream::unfold(start, |(plane, mut watch)| async move {
            let event = plane.shared.next_event(&mut watch).await;
            Some((event, (plane, watch)))
        });
        let watch: PlaneStream<RegistryEvent> = Box::pin(watch);
        ready(Ok(watch))
    }

    fn put_snapshot(&self, _name: String, _blob: Bytes) -> PlaneFuture<'_, ()> {
        ready(Err(unavailable("this plane has no snapshots")))
    }

    fn get_snapshot(&self, _name: String) -> PlaneFuture<'_, Option<Bytes>> {
        ready(Ok(None))
    }

    fn delete_snapshot(&self, _name: String) -> PlaneFuture<'_, ()> {
        ready(Ok(()))
    }

    fn snapshots(&self) -> PlaneFuture<'_, Vec<String>> {
        ready(Ok(Vec::new()))
    }

    fn request(
        &self,
        subject: String,
        payload: Bytes,
        deadline: Duration,
    ) -> PlaneFuture<'_, Bytes> {
        Box::pin(async move {
            let answer = self.shared.bus.request(subject, payload, deadline).await?;
            answer.ok_or_else(|| unavailable("no server for this subject"))
        })
    }

    fn payload_max(&self) -> usize {
        self.shared.bus.payload_max()
    }

    fn serve(&self, subject: String) -> PlaneFuture<'_, PlaneStream<ServiceRequest>> {
        self.shared.bus.serve(subject)
    }

    fn publish(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, ()> {
        self.shared.bus.publish(subject, payload)
    }

    fn subscribe(&self, subject: String) -> PlaneFuture<'_, PlaneStream<Broadcast>> {
        self.shared.bus.subscribe(subject)
    }
}

fn ready<'a, T: Send + 'a>(result: Result<T, PlaneError>) -> PlaneFuture<'a, T> {
    Box::pin(std::future::ready(result))
}

fn unavailable(why: &str) -> PlaneError {
    PlaneError::Unavailable(why.to_owned())
}
