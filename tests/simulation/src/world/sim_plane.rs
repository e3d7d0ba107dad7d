//! A process's side of the simulation: the plane, the engine and the disk as the product's shells
//! see them. Every call goes into the process's [`Outbox`]; the world takes it from there.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join;
use futures_util::stream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, interval, sleep, timeout};
use warmroute_plane::supervision::{
    INBOX_PROBE, InboxProbe, POLL, PermissionViolation, RefusedPermissions, next_supervised,
};
use warmroute_plane::{
    Appended, Broadcast, Connection, LogMessage, LogStatus, LogTail, Plane, PlaneError,
    PlaneFuture, PlaneStream, PutIf, RegistryEntry, RegistryEvent, Reply as ReplyTo, Revision,
    ServiceRequest,
};
use warmroute_proto::{DpRank, EngineHealth, EngineSeq, LogPosition, Source, WorkerId};
use warmroute_router::fleet::health::Observation;
use warmroute_router::fleet::{EngineProbe, ProbeResult, ProbeTarget};
use warmroute_shim::engine::{
    BURST_MAX, EngineEvent, EngineFeed, EngineInfo, EngineLink, FlushRequest, InfoError,
    ReplayNotSent,
};
use warmroute_shim::source::{FlushResult, ReplayId};
use warmroute_shim::wire::{ReplayFrames, replay_frames};
use warmroute_shim::{CheckpointStore, Endpoints};

use super::client::ClientNews;
use super::plane::{Op, Reply};

/// Messages that may wait for a process in one stream; later ones are lost.
pub(super) const QUEUE_MAX: usize = 1 << 16;

/// A probe of the inbox fails after this time.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) type InfoAnswer = Result<EngineInfo, InfoError>;

/// A router's probe fails after this time.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(5);

/// What an engine answers to a router's probe; `None` if it refuses the connection.
pub(super) type Listing = Option<ProbeAnswer>;

#[derive(Debug)]
pub(super) struct ProbeAnswer {
    pub(super) models: BTreeSet<String>,
    pub(super) is_asleep: bool,
}

/// What a process sends.
#[derive(Debug)]
pub(super) enum Sent {
    Call(Op, oneshot::Sender<Reply>),
    Publish(Broadcast),
    Subscribe(String, mpsc::Sender<Broadcast>),
    Serve(String, mpsc::Sender<ServiceRequest>),
    Request(String, ServiceRequest),
    /// The client closes its connection and opens another one.
    Reconnect,
    OpenFeed(mpsc::Sender<EngineEvent>),
    RequestReplay(ReplayId, EngineSeq),
    CheckHealth(oneshot::Sender<EngineHealth>),
    ReadInfo(oneshot::Sender<InfoAnswer>),
    SaveCheckpoint(Bytes),
    /// A router probes a worker.
    Probe(WorkerId, oneshot::Sender<Listing>),
    Client(ClientNews),
}

/// What a process sent and the world did not take yet. Clones are the same outbox.
#[derive(Clone, Debug, Default)]
pub(super) struct Outbox(Arc<Mutex<Vec<Sent>>>);

impl Outbox {
    pub(super) fn push(&self, sent: Sent) {
        self.0.lock().unwrap().push(sent);
    }

    pub(super) fn take(&self) -> Vec<Sent> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// The connection as a process's client sees it. Clones are the same connection.
///
/// Every receiver has a channel of its own: tokio wakes several receivers of one channel in random
/// order.
#[derive(Clone)]
pub(super) struct ConnectionState(Arc<Mutex<Link>>);

struct Link {
    /// Whether the server is connected.
    socket: Connection,
    /// The product's record of refused permissions and of answers that do not come.
    permissions: RefusedPermissions,
    /// Not if that rule is broken on purpose.
    shows_missing: bool,
    /// Number of connections so far.
    epoch: u64,
    /// Answers so far.
    answers: u64,
    receivers: Vec<watch::Sender<Connection>>,
}

impl Link {
    /// Up while the server is connected and no subscription is missing.
    fn usable(&self) -> Connection {
        let is_deaf = self.shows_missing && self.permissions.is_deaf();
        match self.socket {
            Connection::Up if !is_deaf => Connection::Up,
            Connection::Up | Connection::Down => Connection::Down,
        }
    }

    fn publish(&self) {
        let usable = self.usable();
        for receiver in &self.receivers {
            receiver.send_if_modified(|is| std::mem::replace(is, usable) != usable);
        }
    }
}

impl ConnectionState {
    /// In the runtime of the process, whose clock it reads.
    pub(super) fn new(socket: Connection, shows_missing: bool) -> Self {
        Self(Arc::new(Mutex::new(Link {
            socket,
            permissions: RefusedPermissions::new(Instant::now()),
            shows_missing,
            epoch: 0,
            answers: 0,
            receivers: Vec::new(),
        })))
    }

    /// Every receiver sees this, also if nothing changed.
    pub(super) fn set(&self, socket: Connection) {
        let link = &mut *self.0.lock().unwrap();
        link.socket = socket;
        let usable = link.usable();
        for receiver in &link.receivers {
            receiver.send_replace(usable);
        }
    }

    pub(super) fn count_connection(&self) {
        self.0.lock().unwrap().epoch += 1;
    }

    pub(super) fn count_answer(&self) {
        self.0.lock().unwrap().answers += 1;
    }

    /// The server's error text about a permission.
    pub(super) fn refused(&self, text: &str) {
        let violation = PermissionViolation::parse(text).unwrap();
        let link = &mut *self.0.lock().unwrap();
        let epoch = link.epoch;
        link.permissions.refused(&violation, Instant::now(), epoch);
        link.publish();
    }

    fn set_unanswered(&self, is_unanswered: bool) {
        let link = &mut *self.0.lock().unwrap();
        link.permissions
            .set_unanswered(is_unanswered, Instant::now());
        link.publish();
    }

    /// Whether to reconnect now.
    fn poll(&self) -> bool {
        let link = &mut *self.0.lock().unwrap();
        let epoch = link.epoch;
        let is_due = link.permissions.poll(Instant::now(), epoch);
        link.publish();
        is_due && link.socket == Connection::Up
    }

    fn is_up(&self) -> bool {
        self.0.lock().unwrap().socket == Connection::Up
    }

    fn answers(&self) -> u64 {
        self.0.lock().unwrap().answers
    }

    fn subscribe(&self) -> watch::Receiver<Connection> {
        let link = &mut *self.0.lock().unwrap();
        link.receivers.retain(|receiver| !receiver.is_closed());
        let (sender, receiver) = watch::channel(link.usable());
        link.receivers.push(sender);
        receiver
    }
}

/// What the client does beside its user's calls, as the product's client: polls its state, and
/// probes its inbox. Does not end.
pub(super) async fn supervise(connection: ConnectionState, outbox: Outbox) {
    let poll = async {
        let mut ticks = interval(POLL);
        loop {
            ticks.tick().await;
            if connection.poll() {
                outbox.push(Sent::Reconnect);
            }
        }
    };
    join(poll, probe_inbox(&connection, &outbox)).await;
}

async fn probe_inbox(connection: &ConnectionState, outbox: &Outbox) {
    let mut probe = InboxProbe::default();
    loop {
        sleep(INBOX_PROBE).await;
        if connection.is_up() && probe.is_due(connection.answers()) {
            let (reply, answer) = oneshot::channel();
            // An answer without the log's clock: the real probe's is not read.
            outbox.push(Sent::Call(Op::At(LogPosition(0)), reply));
            drop(timeout(PROBE_TIMEOUT, answer).await);
        }
        let is_unanswered = probe.end(connection.answers(), connection.is_up());
        if let Some(is_unanswered) = is_unanswered {
            connection.set_unanswered(is_unanswered);
        }
    }
}

/// A process's client of the plane.
pub(super) struct SimPlane {
    pub(super) outbox: Outbox,
    connection: ConnectionState,
    /// The plane's limit of a message, in bytes.
    bytes_max: usize,
}

impl SimPlane {
    pub(super) const fn new(outbox: Outbox, connection: ConnectionState, bytes_max: usize) -> Self {
        Self {
            outbox,
            connection,
            bytes_max,
        }
    }

    /// Sends at the first poll, as a real client does.
    fn call<T: Send + 'static>(
        &self,
        op: Op,
        expected: impl FnOnce(Reply) -> Result<T, Reply> + Send + 'static,
    ) -> PlaneFuture<'static, T> {
        let outbox = self.outbox.clone();
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            outbox.push(Sent::Call(op, reply));
            let answer = answer.await.unwrap_or(Reply::Unavailable);
            expected(answer).map_err(|other| match other {
                Reply::Conflict => PlaneError::Conflict,
                _ => unavailable("no answer"),
            })
        })
    }

    /// The answer to a request; `None` if nothing serves the subject.
    pub(super) fn ask(
        &self,
        subject: String,
        payload: Bytes,
        deadline: Duration,
    ) -> PlaneFuture<'static, Option<Bytes>> {
        let outbox = self.outbox.clone();
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            let reply = ReplyTo::new(reply);
            outbox.push(Sent::Request(subject, ServiceRequest { payload, reply }));
            match timeout(deadline, answer).await {
                Ok(Ok(answer)) => Ok(Some(answer)),
                Ok(Err(_)) => Ok(None),
                Err(_) => Err(unavailable("no answer in time")),
            }
        })
    }

    /// Opens a stream whose other end the server holds.
    fn open<T: Send + 'static>(
        &self,
        op: impl FnOnce(mpsc::Sender<T>) -> Op,
    ) -> PlaneFuture<'static, PlaneStream<T>> {
        let (sender, receiver) = mpsc::channel(QUEUE_MAX);
        let call = self.call(op(sender), done);
        Box::pin(async move {
            call.await?;
            Ok(into_stream(receiver))
        })
    }
}

/// What to expect of a reply: one of its kinds.
macro_rules! reply {
    ($kind:ident) => {
        |reply| match reply {
            Reply::$kind(value) => Ok(value),
            other => Err(other),
        }
    };
}

fn done(reply: Reply) -> Result<(), Reply> {
    match reply {
        Reply::Done => Ok(()),
        other => Err(other),
    }
}

fn unavailable(why: &str) -> PlaneError {
    PlaneError::Unavailable(why.to_owned())
}

fn into_stream<T: Send + 'static>(receiver: mpsc::Receiver<T>) -> PlaneStream<T> {
    Box::pin(stream::unfold(receiver, |mut receiver| async move {
        let next = receiver.recv().await?;
        Some((next, receiver))
    }))
}

impl Plane for SimPlane {
    fn payload_max(&self) -> usize {
        self.bytes_max
    }

    fn connection(&self) -> watch::Receiver<Connection> {
        self.connection.subscribe()
    }

    fn log_status(&self) -> PlaneFuture<'_, LogStatus> {
        self.call(Op::Status, reply!(Status))
    }

    fn append(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, Appended> {
        let (bytes, max) = (payload.len(), self.bytes_max);
        if bytes > max {
            return Box::pin(async move { Err(PlaneError::TooLarge { bytes, max }) });
        }
        let outbox = self.outbox.clone();
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            outbox.push(Sent::Call(Op::Append { subject, payload }, reply));
            let acknowledged: Appended = Box::pin(async move {
                match answer.await {
                    Ok(Reply::Position(position)) => Ok(position),
                    Ok(_) | Err(_) => Err(unavailable("no acknowledgement")),
                }
            });
            Ok(acknowledged)
        })
    }

    fn last_on(&self, subject: String) -> PlaneFuture<'_, Option<LogMessage>> {
        self.call(Op::LastOn(subject), reply!(Message))
    }

    fn at(&self, position: LogPosition) -> PlaneFuture<'_, Option<LogMessage>> {
        self.call(Op::At(position), reply!(Message))
    }

    fn tail(&self, after: LogPosition, batch_max: usize) -> PlaneFuture<'_, LogTail> {
        self.open(|to| Op::Tail(after, batch_max, to))
    }

    fn get(&self, key: String) -> PlaneFuture<'_, Option<RegistryEntry>> {
        self.call(Op::Get(key), reply!(Entry))
    }

    fn put(
        &self,
        key: String,
        value: Bytes,
        condition: PutIf,
        lease: Option<Duration>,
    ) -> PlaneFuture<'_, Revision> {
        let op = Op::Put {
            key,
            value,
            condition,
            lease,
        };
        self.call(op, reply!(Revision))
    }

    fn delete(&self, key: String, revision: Revision) -> PlaneFuture<'_, ()> {
        self.call(Op::Delete(key, revision), done)
    }

    fn watch(&self, prefix: String) -> PlaneFuture<'_, PlaneStream<RegistryEvent>> {
        self.open(|to| Op::Watch(prefix, to))
    }

    fn put_snapshot(&self, name: String, blob: Bytes) -> PlaneFuture<'_, ()> {
        self.call(Op::PutBlob(name, blob), done)
    }

    fn get_snapshot(&self, name: String) -> PlaneFuture<'_, Option<Bytes>> {
        self.call(Op::Blob(name), reply!(Blob))
    }

    fn delete_snapshot(&self, name: String) -> PlaneFuture<'_, ()> {
        self.call(Op::DeleteBlob(name), done)
    }

    fn snapshots(&self) -> PlaneFuture<'_, Vec<String>> {
        self.call(Op::Blobs, reply!(Names))
    }

    fn request(
        &self,
        subject: String,
        payload: Bytes,
        deadline: Duration,
    ) -> PlaneFuture<'_, Bytes> {
        let answer = self.ask(subject, payload, deadline);
        Box::pin(async move { answer.await?.ok_or_else(|| unavailable("not served")) })
    }

    fn serve(&self, subject: String) -> PlaneFuture<'_, PlaneStream<ServiceRequest>> {
        let (sender, receiver) = mpsc::channel(QUEUE_MAX);
        self.outbox.push(Sent::Serve(subject, sender));
        Box::pin(async move { Ok(into_stream(receiver)) })
    }

    fn publish(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, ()> {
        let outbox = self.outbox.clone();
        Box::pin(async move {
            outbox.push(Sent::Publish(Broadcast { subject, payload }));
            Ok(())
        })
    }

    fn subscribe(&self, subject: String) -> PlaneFuture<'_, PlaneStream<Broadcast>> {
        let start = (self.outbox.clone(), self.connection.clone());
        let first = subscription(&self.outbox, &subject);
        let messages = stream::unfold(
            (start, first),
            move |((outbox, connection), mut messages)| {
                let subject = subject.clone();
                async move {
                    let again = || {
                        let made = connection.is_up().then(|| subscription(&outbox, &subject));
                        std::future::ready(Ok(made))
                    };
                    let next = next_supervised(&mut messages, again).await?;
                    Some((next, ((outbox, connection), messages)))
                }
            },
        );
        let messages: PlaneStream<Broadcast> = Box::pin(messages);
        Box::pin(async move { Ok(messages) })
    }
}

fn subscription(outbox: &Outbox, subject: &str) -> PlaneStream<Broadcast> {
    let (sender, receiver) = mpsc::channel(QUEUE_MAX);
    outbox.push(Sent::Subscribe(subject.to_owned(), sender));
    into_stream(receiver)
}

/// A shim's way to its engine.
pub(super) struct SimEngine(pub(super) Outbox);

impl EngineLink for SimEngine {
    type Feed = SimFeed;

    fn feed(&self, _rank: DpRank, _endpoints: Endpoints) -> SimFeed {
        let (sender, events) = mpsc::channel(QUEUE_MAX);
        self.0.push(Sent::OpenFeed(sender));
        SimFeed {
            outbox: self.0.clone(),
            events,
            pending_replay: None,
        }
    }

    async fn health(&self) -> EngineHealth {
        let (answer, answered) = oneshot::channel();
        self.0.push(Sent::CheckHealth(answer));
        answered.await.unwrap_or(EngineHealth::Unhealthy)
    }

    async fn info(&self) -> InfoAnswer {
        let (answer, answered) = oneshot::channel();
        self.0.push(Sent::ReadInfo(answer));
        answered.await.unwrap_or(Err(InfoError::Silence))
    }

    async fn reset_calls(&self) -> Option<u64> {
        None
    }

    async fn flush(&self, _request: FlushRequest) -> FlushResult {
        FlushResult::Failed
    }
}

pub(super) struct SimFeed {
    outbox: Outbox,
    events: mpsc::Receiver<EngineEvent>,
    pending_replay: Option<ReplayId>,
}

impl SimFeed {
    /// Drops answers to abandoned replays, as the sockets do.
    fn accept(&mut self, event: EngineEvent, events: &mut Vec<EngineEvent>) {
        match &event {
            EngineEvent::Disconnected => self.pending_replay = None,
            EngineEvent::Replay(id, _) if self.pending_replay != Some(*id) => return,
            EngineEvent::Replay(_, frames) if replay_frames(frames) == Some(ReplayFrames::End) => {
                self.pending_replay = None;
            }
            EngineEvent::Connected | EngineEvent::Live(_) | EngineEvent::Replay(..) => {}
        }
        events.push(event);
    }
}

impl EngineFeed for SimFeed {
    fn reconnect(&mut self, _endpoints: Endpoints) {}

    fn request_replay(&mut self, id: ReplayId, from: EngineSeq) -> Result<(), ReplayNotSent> {
        self.pending_replay = Some(id);
        self.outbox.push(Sent::RequestReplay(id, from));
        Ok(())
    }

    async fn receive(&mut self, events: &mut Vec<EngineEvent>) {
        while events.is_empty() {
            let Some(event) = self.events.recv().await else {
                return std::future::pending().await;
            };
            self.accept(event, events);
        }
        while events.len() < BURST_MAX
            && let Ok(event) = self.events.try_recv()
        {
            self.accept(event, events);
        }
    }
}

/// A router's client of the engines' health checks. Health and models come in one answer.
pub(super) struct SimProbe(pub(super) Outbox);

impl EngineProbe for SimProbe {
    async fn probe(&self, target: &ProbeTarget) -> ProbeResult {
        let (answer, answered) = oneshot::channel();
        self.0.push(Sent::Probe(target.worker.clone(), answer));
        ProbeResult::Seen(match timeout(HEALTH_TIMEOUT, answered).await {
            Ok(Ok(Some(answer))) if answer.is_asleep => Observation::Asleep,
            Ok(Ok(Some(answer))) => target.seen(&answer.models),
            Ok(Ok(None) | Err(_)) => Observation::ConnectRefused,
            Err(_) => Observation::ProbeFailed,
        })
    }
}

/// A shim's disk: what it had when the process began, and what goes there.
#[derive(Debug)]
pub(super) struct SimDisk {
    pub(super) outbox: Outbox,
    pub(super) checkpoint: Option<Bytes>,
}

impl CheckpointStore for SimDisk {
    fn load(&self, _source: &Source) -> io::Result<Option<Vec<u8>>> {
        Ok(self.checkpoint.as_ref().map(|bytes| bytes.to_vec()))
    }

    fn save(&self, _source: &Source, bytes: &[u8]) -> io::Result<()> {
        let bytes = Bytes::copy_from_slice(bytes);
        self.outbox.push(Sent::SaveCheckpoint(bytes));
        Ok(())
    }
}
