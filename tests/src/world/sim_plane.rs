//! A process's side of the simulation: the plane, the engine and the disk as the product's shells
//! see them. Every call goes into the process's [`Outbox`]; the world takes it from there.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use tokio::sync::{mpsc, oneshot, watch};
use warmroute_plane::{
    Appended, Broadcast, Connection, LogMessage, LogStatus, LogTail, Plane, PlaneError,
    PlaneFuture, PlaneStream, PutIf, RegistryEntry, RegistryEvent, Revision, ServiceRequest,
};
use warmroute_proto::{DpRank, EngineHealth, EngineSeq, LogPosition, Source};
use warmroute_shim::engine::{
    BURST_MAX, EngineEvent, EngineFeed, EngineInfo, EngineLink, FlushRequest, InfoError,
    ReplayNotSent,
};
use warmroute_shim::source::{FlushResult, ReplayId};
use warmroute_shim::wire::{ReplayFrames, replay_frames};
use warmroute_shim::{CheckpointStore, Endpoints};

use super::plane::{Op, Reply};

/// Messages that may wait for a process in one stream; later ones are lost.
pub(super) const QUEUE_MAX: usize = 1 << 16;

pub(super) type InfoAnswer = Result<EngineInfo, InfoError>;

/// What a process sends.
#[derive(Debug)]
pub(super) enum Sent {
    Call(Op, oneshot::Sender<Reply>),
    Publish(Broadcast),
    Subscribe(String, mpsc::Sender<Broadcast>),
    Serve(String, mpsc::Sender<ServiceRequest>),
    OpenFeed(mpsc::Sender<EngineEvent>),
    RequestReplay(ReplayId, EngineSeq),
    CheckHealth(oneshot::Sender<EngineHealth>),
    ReadInfo(oneshot::Sender<InfoAnswer>),
    SaveCheckpoint(Bytes),
}

/// What a process sent and the world did not take yet. Clones are the same outbox.
#[derive(Clone, Debug, Default)]
pub(super) struct Outbox(Arc<Mutex<Vec<Sent>>>);

impl Outbox {
    fn push(&self, sent: Sent) {
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
pub(super) struct ConnectionState(Arc<Mutex<(Connection, Vec<watch::Sender<Connection>>)>>);

impl ConnectionState {
    pub(super) fn new(connection: Connection) -> Self {
        Self(Arc::new(Mutex::new((connection, Vec::new()))))
    }

    pub(super) fn set(&self, connection: Connection) {
        let (now, receivers) = &mut *self.0.lock().unwrap();
        *now = connection;
        for receiver in receivers {
            receiver.send_replace(connection);
        }
    }

    fn subscribe(&self) -> watch::Receiver<Connection> {
        let (now, receivers) = &mut *self.0.lock().unwrap();
        receivers.retain(|receiver| !receiver.is_closed());
        let (sender, receiver) = watch::channel(*now);
        receivers.push(sender);
        receiver
    }
}

/// A process's client of the plane.
pub(super) struct SimPlane {
    outbox: Outbox,
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
        _subject: String,
        _payload: Bytes,
        _deadline: Duration,
    ) -> PlaneFuture<'_, Bytes> {
        Box::pin(async { Err(unavailable("no shell of this world sends requests")) })
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
        let (sender, receiver) = mpsc::channel(QUEUE_MAX);
        self.outbox.push(Sent::Subscribe(subject, sender));
        Box::pin(async move { Ok(into_stream(receiver)) })
    }
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
