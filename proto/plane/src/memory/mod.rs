//! The plane within one process: equal bytes and bounds, no network.
//!
//! One mutex guards the state and is held for single synchronous steps; waits use notifications.
//! Leases need no task: every read of the registry first removes the expired keys.

pub(crate) mod log;
mod registry;
mod subjects;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::Instant;

use super::{
    Appended, Broadcast, Connection, LogMessage, LogStatus, LogTail, Plane, PlaneError,
    PlaneFuture, PlaneStream, PutIf, RegistryEntry, RegistryEvent, Reply, Revision, ServiceRequest,
};
use crate::registry_watch::KeyWatch;
use log::TailedLog;
use registry::MemoryRegistry;
use subjects::SubjectQueues;
use warmroute_proto::codec::MESSAGE_BYTES_MAX;
use warmroute_proto::{LogPosition, StreamIdentity};

/// Bounds and identity of a [`MemoryPlane`].
#[derive(Clone, Copy, Debug)]
pub struct MemoryPlaneConfig {
    /// The log's identity. The caller has the clock and the random numbers.
    pub identity: StreamIdentity,
    /// Bytes that the log keeps; beyond, the oldest messages are dropped.
    pub log_bytes_max: usize,
    /// Messages that wait for one subscriber or server; beyond, the newest are dropped.
    pub queue_max: usize,
}

/// A plane within one process. Clones share it.
#[derive(Clone)]
pub struct MemoryPlane {
    shared: Arc<MemoryShared>,
}

struct MemoryShared {
    log: TailedLog,
    state: Mutex<MemoryState>,
    registry_changed: Notify,
    connection: watch::Sender<Connection>,
    snapshots_stall: watch::Sender<bool>,
}

struct MemoryState {
    registry: MemoryRegistry,
    snapshots: BTreeMap<String, Bytes>,
    listeners: SubjectQueues<Broadcast>,
    servers: SubjectQueues<ServiceRequest>,
}

impl MemoryPlane {
    #[must_use]
    pub fn new(config: MemoryPlaneConfig) -> Self {
        let state = MemoryState {
            registry: MemoryRegistry::default(),
            snapshots: BTreeMap::new(),
            listeners: SubjectQueues::new(config.queue_max),
            servers: SubjectQueues::new(config.queue_max),
        };
        Self {
            shared: Arc::new(MemoryShared {
                log: TailedLog::new(config.identity, config.log_bytes_max),
                state: Mutex::new(state),
                registry_changed: Notify::new(),
                connection: watch::Sender::new(Connection::Up),
                snapshots_stall: watch::Sender::new(false),
            }),
        }
    }

    /// Replaces the log by an empty one, as an operator's mistake may do.
    pub fn recreate_log(&self, identity: StreamIdentity) {
        self.shared.log.recreate(identity);
    }

    /// Whether reads of snapshots wait, as for a slow disk. The log goes on.
    pub fn stall_snapshots(&self, stall: bool) {
        self.shared.snapshots_stall.send_replace(stall);
    }

    /// Broadcast messages that a full queue dropped so far.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.shared.state().listeners.dropped()
    }
}

impl MemoryShared {
    /// A panic under the lock cannot leave a step half done: every step is one call.
    fn state(&self) -> MutexGuard<'_, MemoryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn ready<'a, T: Send + 'a>(result: Result<T, PlaneError>) -> PlaneFuture<'a, T> {
    Box::pin(std::future::ready(result))
}

fn fits(payload: &Bytes) -> Result<(), PlaneError> {
    if payload.len() > MESSAGE_BYTES_MAX {
        return Err(PlaneError::TooLarge {
            bytes: payload.len(),
            max: MESSAGE_BYTES_MAX,
        });
    }
    Ok(())
}

impl Plane for MemoryPlane {
    fn payload_max(&self) -> usize {
        MESSAGE_BYTES_MAX
    }

    fn connection(&self) -> watch::Receiver<Connection> {
        self.shared.connection.subscribe()
    }

    fn log_status(&self) -> PlaneFuture<'_, LogStatus> {
        let status = self.shared.log.read().status();
        let now_unix_ns = time_of(status.identity, status.last);
        ready(Ok(LogStatus {
            now_unix_ns,
            ..status
        }))
    }

    fn append(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, Appended> {
        if let Err(error) = fits(&payload) {
            return ready(Err(error));
        }
        let identity = self.shared.log.read().status().identity;
        let stored = |position| time_of(identity, position);
        let position = self.shared.log.append(subject, payload, stored);
        let acknowledged: Appended = ready(Ok(position));
        ready(Ok(acknowledged))
    }

    fn last_on(&self, subject: String) -> PlaneFuture<'_, Option<LogMessage>> {
        ready(Ok(self.shared.log.read().last_on(&subject)))
    }

    fn at(&self, position: LogPosition) -> PlaneFuture<'_, Option<LogMessage>> {
        ready(Ok(self.shared.log.read().at(position)))
    }

    fn tail(&self, after: LogPosition, batch_max: usize) -> PlaneFuture<'_, LogTail> {
        ready(Ok(self.shared.log.tail(after, batch_max)))
    }

    fn get(&self, key: String) -> PlaneFuture<'_, Option<RegistryEntry>> {
        let entry = self.shared.state().registry.get(Instant::now(), &key);
        ready(Ok(entry))
    }

    fn put(
        &self,
        key: String,
        value: Bytes,
        condition: PutIf,
        lease: Option<Duration>,
    ) -> PlaneFuture<'_, Revision> {
        if let Err(error) = fits(&value) {
            return ready(Err(error));
        }
        let now = Instant::now();
        let lease = lease.map(|lease| now + lease);
        let put = self
            .shared
            .state()
            .registry
            .put(now, key, value, condition, lease);
        self.shared.registry_changed.notify_waiters();
        ready(put)
    }

    fn delete(&self, key: String, revision: Revision) -> PlaneFuture<'_, ()> {
        let deleted = self
            .shared
            .state()
            .registry
            .delete(Instant::now(), &key, revision);
        self.shared.registry_changed.notify_waiters();
        ready(deleted)
    }

    fn watch(&self, prefix: String) -> PlaneFuture<'_, PlaneStream<RegistryEvent>> {
        let start = (Arc::clone(&self.shared), KeyWatch::new(prefix));
        let watch = stream::unfold(start, |(shared, mut watch)| async move {
            let event = next_event(&shared, &mut watch).await;
            Some((event, (shared, watch)))
        });
        let watch: PlaneStream<RegistryEvent> = Box::pin(watch);
        ready(Ok(watch))
    }

    fn put_snapshot(&self, name: String, blob: Bytes) -> PlaneFuture<'_, ()> {
        let mut state = self.shared.state();
        if state.snapshots.contains_key(&name) {
            return ready(Err(PlaneError::Conflict));
        }
        state.snapshots.insert(name, blob);
        ready(Ok(()))
    }

    fn get_snapshot(&self, name: String) -> PlaneFuture<'_, Option<Bytes>> {
        Box::pin(async move {
            let mut stalls = self.shared.snapshots_stall.subscribe();
            // The sender lives as long as this plane.
            drop(stalls.wait_for(|stalls| !stalls).await);
            Ok(self.shared.state().snapshots.get(&name).cloned())
        })
    }

    fn delete_snapshot(&self, name: String) -> PlaneFuture<'_, ()> {
        self.shared.state().snapshots.remove(&name);
        ready(Ok(()))
    }

    fn snapshots(&self) -> PlaneFuture<'_, Vec<String>> {
        let names = self.shared.state().snapshots.keys().cloned().collect();
        ready(Ok(names))
    }

    fn request(
        &self,
        subject: String,
        payload: Bytes,
        deadline: Duration,
    ) -> PlaneFuture<'_, Bytes> {
        if let Err(error) = fits(&payload) {
            return ready(Err(error));
        }
        let (reply, answer) = oneshot::channel();
        let request = ServiceRequest {
            payload,
            reply: Reply::new(reply),
        };
        if self
            .shared
            .state()
            .servers
            .send_one(&subject, request)
            .is_err()
        {
            return ready(Err(unavailable("no server for this subject")));
        }
        Box::pin(async move {
            match tokio::time::timeout(deadline, answer).await {
                Ok(Ok(answer)) => fits(&answer).map(|()| answer),
                Ok(Err(_)) => Err(unavailable("the request was dropped")),
                Err(_) => Err(unavailable("no answer in time")),
            }
        })
    }

    fn serve(&self, subject: String) -> PlaneFuture<'_, PlaneStream<ServiceRequest>> {
        let requests = self.shared.state().servers.open(subject);
        ready(Ok(subjects::into_stream(requests)))
    }

    fn publish(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, ()> {
        if let Err(error) = fits(&payload) {
            return ready(Err(error));
        }
        let broadcast = Broadcast { subject, payload };
        let listeners = &mut self.shared.state().listeners;
        listeners.send_all(&broadcast.subject, &broadcast);
        ready(Ok(()))
    }

    fn subscribe(&self, subject: String) -> PlaneFuture<'_, PlaneStream<Broadcast>> {
        let messages = self.shared.state().listeners.open(subject);
        ready(Ok(subjects::into_stream(messages)))
    }
}

fn unavailable(why: &str) -> PlaneError {
    PlaneError::Unavailable(why.to_owned())
}

/// Positions are never reused here, so that they can stand for the time.
const fn time_of(log: StreamIdentity, position: LogPosition) -> u64 {
    log.created_unix_ns.wrapping_add(position.0)
}

/// The watcher's next event. Wakes at every change, and when a lease expires.
async fn next_event(shared: &MemoryShared, watch: &mut KeyWatch) -> RegistryEvent {
    loop {
        let changed = shared.registry_changed.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        let next_expiry = {
            let registry = &mut shared.state().registry;
            registry.expire(Instant::now());
            if let Some(event) = watch.next(registry) {
                return event;
            }
            registry.next_expiry()
        };
        match next_expiry {
            Some(expiry) => {
                // Either way the loop looks again.
                drop(tokio::time::timeout_at(expiry, changed).await);
            }
            None => changed.await,
        }
    }
}
