//! The shell of [`crate::sync`]: one task that carries what replicas say through the plane.
//!
//! It holds the desk's lock for one call of `LoadState` at a time, never across an await, and decides
//! nothing. What it waits for beside messages: questions of peers, answers to its own, the lease that
//! gives incarnations, the registry that names the other routers, and the clock.

mod books;
mod lease;

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
    Broadcast, Connection, Plane, PlaneError, PlaneStream, RegistryEvent, ServiceRequest,
};
use warmroute_proto::RouterId;
use warmroute_proto::subject::Subjects;

use crate::shared_core::SharedCore;
use crate::sync::{ASK_TIMEOUT, AskId, LoadReplica, PlaneLink, ReplicaEffect, ReplicaStatus, TICK};
use books::DeskBooks;
use lease::{Keeper, Outcome};

/// Before the plane is tried again.
const RETRY: Duration = Duration::from_millis(500);

/// A broadcast that the plane does not take within this time is lost like any other.
const PUBLISH_MAX: Duration = Duration::from_secs(1);

/// What the last words may take, each.
const LEAVE_MAX: Duration = Duration::from_secs(1);

/// Broadcasts taken in one turn, if they are there. Then whatever else waits has its chance.
const AT_ONCE_MAX: usize = 16;

/// Views asked for at once.
const VIEWS_MAX: usize = 16;

/// A replica that can be run.
pub struct Replication {
    router: RouterId,
    desk: Arc<SharedCore>,
    plane: Arc<dyn Plane>,
    subjects: Subjects,
    views: mpsc::Receiver<oneshot::Sender<ReplicaStatus>>,
}

/// Asks a running replica what it knows.
#[derive(Clone, Debug)]
pub struct Handle(mpsc::Sender<oneshot::Sender<ReplicaStatus>>);

impl Handle {
    /// None if the replica does not run.
    pub async fn snapshot(&self) -> Option<ReplicaStatus> {
        let (reply, answer) = oneshot::channel();
        self.0.send(reply).await.ok()?;
        answer.await.ok()
    }
}

impl Replication {
    /// `router`: as the desk's core knows it.
    #[must_use]
    pub fn new(
        router: RouterId,
        desk: Arc<SharedCore>,
        plane: Arc<dyn Plane>,
        subjects: Subjects,
    ) -> (Self, Handle) {
        let (handle, views) = mpsc::channel(VIEWS_MAX);
        let replication = Self {
            router,
            desk,
            plane,
            subjects,
            views,
        };
        (replication, Handle(handle))
    }

    /// Runs until it is told to stop; then says goodbye. `ready`: once this replica has the others'
    /// load, or has waited long enough.
    pub async fn run(self, ready: impl FnOnce() + Send + 'static, stop: CancellationToken) {
        let now = Instant::now().into_std();
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let lease = Keeper::new(Arc::clone(&self.plane), &self.subjects, self.router);
        let mut talk = Talk {
            replica: LoadReplica::new(self.router, now),
            books: DeskBooks(self.desk),
            connection: self.plane.connection(),
            plane: self.plane,
            subjects: self.subjects,
            questions: FuturesUnordered::new(),
            views: self.views,
            lease,
            ready: Some(Box::new(ready)),
            ticks,
        };
        // From here on its changes are told.
        if link(&mut talk.connection) == PlaneLink::Down {
            talk.replica.link(PlaneLink::Down, now);
        }
        while !stop.is_cancelled() {
            let opened = stop.run_until_cancelled(talk.open(self.router)).await;
            match opened {
                Some(Ok(streams)) => talk.converse(streams, &stop).await,
                Some(Err(error)) => {
                    tracing::debug!(%error, "the other routers are out of reach");
                    stop.run_until_cancelled(sleep(RETRY)).await;
                }
                None => {}
            }
        }
        talk.leave().await;
    }
}

type Answered = (RouterId, AskId, Option<Bytes>);

/// A replica with what it needs to be heard.
struct Talk {
    replica: LoadReplica,
    books: DeskBooks,
    plane: Arc<dyn Plane>,
    subjects: Subjects,
    connection: watch::Receiver<Connection>,
    /// One for a peer at most, and one echo.
    questions: FuturesUnordered<BoxFuture<'static, Answered>>,
    views: mpsc::Receiver<oneshot::Sender<ReplicaStatus>>,
    lease: Keeper,
    ready: Option<Box<dyn FnOnce() + Send>>,
    ticks: Interval,
}

/// What comes in.
struct Streams {
    broadcasts: PlaneStream<Broadcast>,
    asks: PlaneStream<ServiceRequest>,
    registry: PlaneStream<RegistryEvent>,
}

/// One thing that happened.
enum Event {
    Broadcast(Bytes),
    Asked(ServiceRequest),
    Answered(Answered),
    Registry(RegistryEvent),
    Lease(Outcome),
    Link,
    Written,
    Due,
    Tick,
    View(oneshot::Sender<ReplicaStatus>),
}

impl Talk {
    async fn open(&mut self, router: RouterId) -> Result<Streams, PlaneError> {
        let plane = &self.plane;
        // The broadcasts first: what is said from here on is not missed.
        Ok(Streams {
            broadcasts: plane.subscribe(self.subjects.load()).await?,
            asks: plane.serve(self.subjects.load_requests(router)).await?,
            registry: plane.watch(self.subjects.router_keys()).await?,
        })
    }

    async fn converse(&mut self, mut streams: Streams, stop: &CancellationToken) {
        self.act().await;
        // Once for all turns: making one takes the token's lock, and so does dropping it.
        let mut stopped = pin!(stop.cancelled());
        loop {
            let Some(event) = self.next(&mut streams, stopped.as_mut()).await else {
                return;
            };
            let is_broadcast = matches!(event, Event::Broadcast(_));
            self.take(event);
            let is_over = is_broadcast && !self.take_more(&mut streams.broadcasts);
            self.act().await;
            if is_over {
                return;
            }
        }
    }

    /// A read brings several broadcasts at once. A turn for each would look at everything else as often.
    /// False: the stream ended.
    fn take_more(&mut self, broadcasts: &mut PlaneStream<Broadcast>) -> bool {
        for _ in 1..AT_ONCE_MAX {
            match broadcasts.next().now_or_never() {
                Some(Some(broadcast)) => self.take(Event::Broadcast(broadcast.payload)),
                Some(None) => return false,
                None => return true,
            }
        }
        true
    }

    /// None: told to stop, or a stream ended, and all are to be opened anew. Every arm is cancel-safe.
    async fn next(
        &mut self,
        streams: &mut Streams,
        stopped: Pin<&mut WaitForCancellationFuture<'_>>,
    ) -> Option<Event> {
        let due = self.replica.due().map(Instant::from_std);
        let is_due = due.is_some();
        let event = tokio::select! {
            () = stopped => return None,
            broadcast = streams.broadcasts.next() => Event::Broadcast(broadcast?.payload),
            request = streams.asks.next() => Event::Asked(request?),
            event = streams.registry.next() => Event::Registry(event?),
            Some(answered) = self.questions.next() => Event::Answered(answered),
            outcome = self.lease.next() => Event::Lease(outcome),
            Ok(()) = self.connection.changed() => Event::Link,
            () = self.books.0.written() => Event::Written,
            () = sleep_until(due.unwrap_or_else(Instant::now)), if is_due => Event::Due,
            _ = self.ticks.tick() => Event::Tick,
            Some(view) = self.views.recv() => Event::View(view),
        };
        Some(event)
    }

    fn take(&mut self, event: Event) {
        let now = Instant::now().into_std();
        let (replica, books) = (&mut self.replica, &mut self.books);
        match event {
            Event::Broadcast(payload) => replica.receive(&payload, books, now),
            Event::Asked(request) => {
                if let Some(answer) = replica.serve(&request.payload, books, now) {
                    request.reply.send(answer);
                }
            }
            Event::Answered((from, id, answer)) => {
                replica.answered(from, id, answer.as_ref(), books, now);
            }
            Event::Registry(RegistryEvent::Put { key, .. }) => {
                if let Some(router) = self.subjects.key_router(&key) {
                    replica.learn(router, books, now);
                }
            }
            // Its silence tells, not its lease.
            Event::Registry(RegistryEvent::Gone { .. }) => {}
            Event::Registry(RegistryEvent::Current) => replica.listed(),
            Event::Lease(Outcome::Taken(revision)) => {
                tracing::info!(revision = revision.0, "this router's incarnation");
                replica.taken(revision, books, now);
            }
            Event::Lease(Outcome::Lost) => {
                tracing::warn!("this router's lease is lost: taking another incarnation");
                replica.lease_lost();
            }
            Event::Lease(Outcome::Kept) => {}
            Event::Link => replica.link(link(&mut self.connection), now),
            Event::Written => replica.wrote(books, now),
            Event::Due => replica.send_due(books, now),
            Event::Tick => replica.tick(books, now),
            Event::View(reply) => {
                // Whoever asked may have gone.
                drop(reply.send(replica.snapshot(books, now)));
            }
        }
    }

    async fn act(&mut self) {
        while let Some(effect) = self.replica.effect() {
            match effect {
                ReplicaEffect::Publish(bytes) => self.publish(bytes).await,
                ReplicaEffect::Ask { peer, id, question } => {
                    let subject = self.subjects.load_requests(peer);
                    let plane = Arc::clone(&self.plane);
                    let asked = async move {
                        let answer = plane.request(subject, question, ASK_TIMEOUT).await;
                        (peer, id, answer.ok())
                    };
                    self.questions.push(asked.boxed());
                }
                ReplicaEffect::TakeIncarnation => self.lease.want(),
                ReplicaEffect::Ready => {
                    if let Some(ready) = self.ready.take() {
                        ready();
                    }
                }
            }
        }
    }

    async fn publish(&mut self, bytes: Bytes) {
        let published = self.plane.publish(self.subjects.load(), bytes);
        match timeout(PUBLISH_MAX, published).await {
            Ok(Ok(())) => {}
            // Numbers and heartbeats show what is lost.
            Ok(Err(error)) => tracing::debug!(%error, "a load message was not sent"),
            Err(_) => tracing::debug!("a load message was not sent in time"),
        }
    }

    async fn leave(&mut self) {
        let now = Instant::now().into_std();
        self.replica.leave(&mut self.books, now);
        if timeout(LEAVE_MAX, self.act()).await.is_err() {
            tracing::warn!("no goodbye: the other routers find out by silence");
        }
        if timeout(LEAVE_MAX, self.lease.release()).await.is_err() {
            tracing::warn!("the lease is not given back, it runs out");
        }
    }
}

fn link(connection: &mut watch::Receiver<Connection>) -> PlaneLink {
    match *connection.borrow_and_update() {
        Connection::Up => PlaneLink::Up,
        Connection::Down => PlaneLink::Down,
    }
}
