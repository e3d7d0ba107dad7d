//! The shell of [`crate::sync`]: one task that exchanges load messages with the other routers.
//!
//! It decides nothing, and holds the lock of the decision core for one call of `LoadState` at a time,
//! never across an await. Beside messages it waits for requests of peers, answers to its own, the
//! lease whose revisions are incarnations, the registry that lists the other routers, and timers.

mod load_state;

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep, sleep_until, timeout};
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};
use warmroute_plane::{
    Broadcast, Connection, LeaseEvent, LeaseHolder, Plane, PlaneError, PlaneStream, RETRY_DELAY,
    RegistryEvent, RegistryWatch, Revision, ServiceRequest,
};
use warmroute_process::build;
use warmroute_proto::load::RouterEntry;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{Generation, RouterId, codec};

use crate::shared_core::SharedCore;
use crate::sync::{
    ASK_TIMEOUT, AskId, LoadReplica, PlaneLink, ReplicaEffect, ReplicaStatus, StatusDetail, TICK,
};
use load_state::SharedLoadState;

/// Most time to publish a broadcast. One that takes longer is lost, like any other that is dropped.
const PUBLISH_MAX: Duration = Duration::from_secs(1);

/// Most time to publish the goodbye.
const LEAVE_MAX: Duration = Duration::from_secs(1);

/// Broadcasts applied before other events are looked at.
const BROADCASTS_MAX: usize = 16;

/// Bound on the status requests that wait.
const STATUS_REQUESTS_MAX: usize = 16;

/// Deadline for a status. Without a connection none is given.
const STATUS_DEADLINE: Duration = Duration::from_secs(1);

/// A replica that is ready to run.
pub struct Replication {
    router: RouterId,
    core: Arc<SharedCore>,
    plane: Arc<dyn Plane>,
    subjects: Subjects,
    status_requests: mpsc::Receiver<StatusRequest>,
}

/// Reads the state of a running replica.
#[derive(Clone, Debug)]
pub struct ReplicationHandle(mpsc::Sender<StatusRequest>);

#[derive(Debug)]
struct StatusRequest {
    detail: StatusDetail,
    reply: oneshot::Sender<ReplicaStatus>,
}

impl ReplicationHandle {
    /// The replica's state, or `None` if it does not run, or is not connected to the others.
    pub async fn status(&self, detail: StatusDetail) -> Option<ReplicaStatus> {
        let (reply, answer) = oneshot::channel();
        let status = async {
            self.0.send(StatusRequest { detail, reply }).await.ok()?;
            answer.await.ok()
        };
        timeout(STATUS_DEADLINE, status).await.ok().flatten()
    }
}

impl Replication {
    /// `router` is the id that `core` was created with.
    #[must_use]
    pub fn new(
        router: RouterId,
        core: Arc<SharedCore>,
        plane: Arc<dyn Plane>,
        subjects: Subjects,
    ) -> (Self, ReplicationHandle) {
        let (handle, status_requests) = mpsc::channel(STATUS_REQUESTS_MAX);
        let replication = Self {
            router,
            core,
            plane,
            subjects,
            status_requests,
        };
        (replication, ReplicationHandle(handle))
    }

    /// Runs until stopped, then sends a goodbye. Calls `ready` once this replica has the load of the
    /// other routers, or has waited long enough.
    pub async fn run(self, ready: impl FnOnce() + Send + 'static, stop: CancellationToken) {
        let now = Instant::now().into_std();
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut task = ReplicationTask {
            replica: LoadReplica::new(self.router, now),
            state: SharedLoadState(self.core),
            connection: self.plane.connection(),
            incarnations: Incarnations::new(&self.plane, &self.subjects, self.router),
            plane: self.plane,
            subjects: self.subjects,
            asks: FuturesUnordered::new(),
            status_requests: self.status_requests,
            ready: Some(Box::new(ready)),
            ticks,
        };
        // From here on changes of the connection are events.
        if link(&mut task.connection) == PlaneLink::Down {
            task.replica.link(PlaneLink::Down, now);
        }
        while !stop.is_cancelled() {
            let opened = stop.run_until_cancelled(task.open(self.router)).await;
            match opened {
                Some(Ok(streams)) => task.handle_events(streams, &stop).await,
                Some(Err(error)) => {
                    tracing::debug!(%error, "load messages cannot be received");
                    stop.run_until_cancelled(sleep(RETRY_DELAY)).await;
                }
                None => {}
            }
        }
        task.leave().await;
    }
}

/// The lease of this router's key, whose revisions are its incarnations.
struct Incarnations {
    lease: LeaseHolder,
    entry: Bytes,
    /// The next confirmed write gives an incarnation.
    is_wanted: bool,
}

impl Incarnations {
    fn new(plane: &Arc<dyn Plane>, subjects: &Subjects, router: RouterId) -> Self {
        let entry = RouterEntry {
            router,
            version: build::version().to_owned(),
        };
        Self {
            lease: LeaseHolder::new(Arc::clone(plane), subjects.router_key(router)),
            entry: codec::encode(&entry).unwrap_or_default().into(),
            is_wanted: false,
        }
    }

    /// Requests a new incarnation as soon as possible.
    fn request(&mut self) {
        self.is_wanted = true;
        self.lease.renew_now();
    }

    /// Cancel-safe.
    async fn next(&mut self) -> LeaseEvent {
        self.lease.next(|| self.entry.clone()).await
    }

    /// The incarnation that a write of this revision gives, if one was requested.
    fn take(&mut self, revision: Revision) -> Option<Generation> {
        std::mem::take(&mut self.is_wanted).then_some(Generation(revision.0))
    }
}

type PeerAnswer = (RouterId, AskId, Option<Bytes>);

/// A replica with what it needs to communicate.
struct ReplicationTask {
    replica: LoadReplica,
    state: SharedLoadState,
    plane: Arc<dyn Plane>,
    subjects: Subjects,
    connection: watch::Receiver<Connection>,
    /// At most one for each peer, and one echo.
    asks: FuturesUnordered<BoxFuture<'static, PeerAnswer>>,
    status_requests: mpsc::Receiver<StatusRequest>,
    incarnations: Incarnations,
    ready: Option<Box<dyn FnOnce() + Send>>,
    ticks: Interval,
}

struct PeerStreams {
    broadcasts: PlaneStream<Broadcast>,
    requests: PlaneStream<ServiceRequest>,
    registry: RegistryWatch,
}

/// One input of the replica.
enum ReplicationEvent {
    Broadcast(Bytes),
    Request(ServiceRequest),
    Answer(PeerAnswer),
    Registry(RegistryEvent),
    Lease(LeaseEvent),
    Connection,
    /// The core has new changes to send.
    Written,
    Due,
    Tick,
    Status(StatusRequest),
}

impl ReplicationTask {
    async fn open(&mut self, router: RouterId) -> Result<PeerStreams, PlaneError> {
        let plane = &self.plane;
        // The broadcasts first, so that none is missed between the listing and its first change.
        Ok(PeerStreams {
            broadcasts: plane.subscribe(self.subjects.load()).await?,
            requests: plane.serve(self.subjects.load_requests(router)).await?,
            registry: RegistryWatch::new(Arc::clone(plane), self.subjects.router_keys()),
        })
    }

    /// Returns when stopped or when a stream ended.
    async fn handle_events(&mut self, mut streams: PeerStreams, stop: &CancellationToken) {
        self.execute_effects().await;
        // One for all turns: creating and dropping one takes the token's lock.
        let mut stopped = pin!(stop.cancelled());
        loop {
            let Some(event) = self.next_event(&mut streams, stopped.as_mut()).await else {
                return;
            };
            let is_broadcast = matches!(event, ReplicationEvent::Broadcast(_));
            self.handle(event);
            let has_ended = is_broadcast && !self.handle_waiting(&mut streams.broadcasts);
            self.execute_effects().await;
            if has_ended {
                return;
            }
        }
    }

    /// Handles the broadcasts that wait, which a read delivers several at a time. Returns false if
    /// the stream ended.
    fn handle_waiting(&mut self, broadcasts: &mut PlaneStream<Broadcast>) -> bool {
        for _ in 1..BROADCASTS_MAX {
            match broadcasts.next().now_or_never() {
                Some(Some(broadcast)) => {
                    self.handle(ReplicationEvent::Broadcast(broadcast.payload));
                }
                Some(None) => return false,
                None => return true,
            }
        }
        true
    }

    /// `None` when stopped or when a stream ended. Every arm is cancel-safe.
    async fn next_event(
        &mut self,
        streams: &mut PeerStreams,
        stopped: Pin<&mut WaitForCancellationFuture<'_>>,
    ) -> Option<ReplicationEvent> {
        let due = self.replica.due().map(Instant::from_std);
        let is_due = due.is_some();
        // Rare inputs first: each has its turn under a flood of broadcasts.
        let event = tokio::select! {
            biased;
            () = stopped => return None,
            Ok(()) = self.connection.changed() => ReplicationEvent::Connection,
            event = self.incarnations.next() => ReplicationEvent::Lease(event),
            event = streams.registry.next() => ReplicationEvent::Registry(event),
            _ = self.ticks.tick() => ReplicationEvent::Tick,
            () = sleep_until(due.unwrap_or_else(Instant::now)), if is_due => ReplicationEvent::Due,
            Some(answer) = self.asks.next() => ReplicationEvent::Answer(answer),
            Some(request) = self.status_requests.recv() => ReplicationEvent::Status(request),
            request = streams.requests.next() => ReplicationEvent::Request(request?),
            () = self.state.0.written() => ReplicationEvent::Written,
            message = streams.broadcasts.next() => ReplicationEvent::Broadcast(message?.payload),
        };
        Some(event)
    }

    fn handle(&mut self, event: ReplicationEvent) {
        let now = Instant::now().into_std();
        let (replica, state) = (&mut self.replica, &mut self.state);
        match event {
            ReplicationEvent::Broadcast(payload) => replica.receive(&payload, state, now),
            ReplicationEvent::Request(request) => {
                if let Some(answer) = replica.serve(&request.payload, state, now) {
                    request.reply.send(answer);
                }
            }
            ReplicationEvent::Answer((from, id, answer)) => {
                replica.answered(from, id, answer.as_ref(), state, now);
            }
            ReplicationEvent::Registry(RegistryEvent::Put { key, .. }) => {
                if let Some(router) = self.subjects.key_router(&key) {
                    replica.learn(router, state, now);
                }
            }
            // A peer is removed for its silence, not for its lease.
            ReplicationEvent::Registry(RegistryEvent::Gone { .. }) => {}
            ReplicationEvent::Registry(RegistryEvent::Current) => replica.listed(),
            ReplicationEvent::Lease(event) => self.handle_lease(event),
            ReplicationEvent::Connection => replica.link(link(&mut self.connection), now),
            ReplicationEvent::Written => replica.wrote(state, now),
            ReplicationEvent::Due => replica.send_due(state, now),
            ReplicationEvent::Tick => replica.tick(state, now),
            ReplicationEvent::Status(StatusRequest { detail, reply }) => {
                // The requester may have given up.
                drop(reply.send(replica.snapshot(state, detail, now)));
            }
        }
    }

    fn handle_lease(&mut self, event: LeaseEvent) {
        let now = Instant::now().into_std();
        match event {
            LeaseEvent::Acquired(revision) | LeaseEvent::Renewed(revision) => {
                if let Some(incarnation) = self.incarnations.take(revision) {
                    tracing::info!(revision = revision.0, "this router has a new incarnation");
                    self.replica.taken(incarnation, &mut self.state, now);
                }
            }
            LeaseEvent::Lost => {
                tracing::warn!("this router's lease is lost, taking another incarnation");
                self.replica.lease_lost();
            }
            // Ids are random: an earlier write of our own, which expires.
            LeaseEvent::HeldElsewhere => {}
        }
    }

    async fn execute_effects(&mut self) {
        while let Some(effect) = self.replica.effect() {
            match effect {
                ReplicaEffect::Publish(bytes) => self.publish(bytes).await,
                ReplicaEffect::Ask { peer, id, question } => {
                    let subject = self.subjects.load_requests(peer);
                    let plane = Arc::clone(&self.plane);
                    let ask = async move {
                        let answer = plane.request(subject, question, ASK_TIMEOUT).await;
                        (peer, id, answer.ok())
                    };
                    self.asks.push(ask.boxed());
                }
                ReplicaEffect::TakeIncarnation => self.incarnations.request(),
                ReplicaEffect::Ready => {
                    if let Some(ready) = self.ready.take() {
                        ready();
                    }
                }
            }
        }
    }

    /// What is not sent is found missing by message numbers and heartbeats.
    async fn publish(&mut self, bytes: Bytes) {
        let published = self.plane.publish(self.subjects.load(), bytes);
        match timeout(PUBLISH_MAX, published).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "load message not sent"),
            Err(_) => tracing::debug!("load message not sent in time"),
        }
    }

    async fn leave(&mut self) {
        let now = Instant::now().into_std();
        self.replica.leave(&mut self.state, now);
        if timeout(LEAVE_MAX, self.execute_effects()).await.is_err() {
            tracing::warn!("goodbye not sent, the other routers time this one out");
        }
        self.incarnations.lease.release().await;
    }
}

fn link(connection: &mut watch::Receiver<Connection>) -> PlaneLink {
    match *connection.borrow_and_update() {
        Connection::Up => PlaneLink::Up,
        Connection::Down => PlaneLink::Down,
    }
}
