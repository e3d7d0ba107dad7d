//! The ZMQ sockets of one rank: a SUB with a connection monitor, and a DEALER for replays.
//!
//! The rank's task reads them at its own pace. Unread messages wait in the sockets' queues, then in the
//! engine, and are lost there; a gap in the sequence shows the loss. The file descriptor of a libzmq
//! socket signals a *change*, not that a message is present: wait for it only after every socket was
//! read until it had nothing.
//!
//! The monitor is read after the live messages and reported before them: a lost connection is reported
//! before the first message of the next connection.

mod connections;

use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep_until};
use tracing::{debug, warn};
use warmroute_proto::EngineSeq;

use super::{BURST_MAX, EngineEvent, EngineFeed, Frames, ReplayNotSent};
use crate::config::Endpoints;
use crate::source::ReplayId;
use crate::wire::{ReplayFrames, replay_frames, replay_request};
use connections::{Change, Connections, MonitorEvent};

/// Messages that libzmq queues; vLLM has the same bound.
const HWM: i32 = 100_000;
const MESSAGE_BYTES_MAX: i64 = 64 << 20;
/// Pause before the next try to open sockets.
const RETRY: Duration = Duration::from_secs(1);

/// The feed of a vLLM engine.
pub struct ZmqFeed {
    context: zmq::Context,
    /// Unique within the context.
    name: String,
    endpoints: Endpoints,
    opens: u64,
    /// When to open closed sockets.
    due: Instant,
    sockets: Option<Sockets>,
    was_closed: bool,
}

impl ZmqFeed {
    pub(super) fn new(context: zmq::Context, name: String, endpoints: Endpoints) -> Self {
        Self {
            context,
            name,
            endpoints,
            opens: 0,
            due: Instant::now(),
            sockets: None,
            was_closed: false,
        }
    }

    fn open(&mut self) {
        self.opens += 1;
        let monitor = format!("inproc://{}-{}", self.name, self.opens);
        match Sockets::open(&self.context, &self.endpoints, &monitor) {
            Ok(sockets) => self.sockets = Some(sockets),
            Err(error) => {
                let Endpoints { live, replay } = &self.endpoints;
                warn!(live, replay, %error, "cannot open the engine's event socket");
                self.due = Instant::now() + RETRY;
            }
        }
    }
}

impl EngineFeed for ZmqFeed {
    fn reconnect(&mut self, endpoints: Endpoints) {
        self.endpoints = endpoints;
        self.was_closed |= self.sockets.take().is_some();
        self.due = Instant::now();
    }

    fn request_replay(&mut self, id: ReplayId, from: EngineSeq) -> Result<(), ReplayNotSent> {
        let endpoint = self.endpoints.replay.as_deref();
        let Some((sockets, endpoint)) = self.sockets.as_mut().zip(endpoint) else {
            return Err(ReplayNotSent);
        };
        let sent = sockets.request_replay(&self.context, endpoint, id, from);
        sent.map_err(|error| {
            debug!(%error, "cannot request a replay");
            ReplayNotSent
        })
    }

    async fn receive(&mut self, events: &mut Vec<EngineEvent>) {
        loop {
            if std::mem::take(&mut self.was_closed) {
                events.push(EngineEvent::Disconnected);
                return;
            }
            let Some(sockets) = &mut self.sockets else {
                sleep_until(self.due).await;
                self.open();
                continue;
            };
            if !sockets.are_drained {
                sockets.read(events);
            }
            if !events.is_empty() {
                return;
            }
            sockets.changed().await;
        }
    }
}

/// A socket with its own change descriptor.
struct WatchedSocket(AsyncFd<zmq::Socket>);

impl WatchedSocket {
    #[expect(
        deprecated,
        reason = "the alternatives are unsafe: a descriptor's owner may close it; a socket owns its own"
    )]
    fn new(socket: zmq::Socket) -> std::io::Result<Self> {
        AsyncFd::with_interest(socket, Interest::READABLE).map(Self)
    }

    fn socket(&self) -> &zmq::Socket {
        self.0.get_ref()
    }

    fn try_receive(&self) -> Option<Frames> {
        loop {
            match self.socket().recv_multipart(zmq::DONTWAIT) {
                Ok(frames) => return Some(frames),
                Err(zmq::Error::EINTR) => {}
                Err(_) => return None,
            }
        }
    }

    /// Waits for a change after [`Self::try_receive`] returned `None`.
    async fn changed(&mut self) {
        match self.0.readable_mut().await {
            Ok(mut change) => change.clear_ready(),
            // The runtime ends.
            Err(_) => std::future::pending().await,
        }
    }
}

/// The monitor of a socket. It outlives the socket, which is closed in the background: libzmq
/// reports on the thread of the context, and waits there without end for a monitor that was closed.
struct SocketMonitor(Option<WatchedSocket>);

impl SocketMonitor {
    /// Monitors a socket that is not connected yet.
    fn new(context: &zmq::Context, of: &zmq::Socket, name: &str) -> std::io::Result<Self> {
        of.monitor(name, connections::monitored())?;
        let monitor = context.socket(zmq::PAIR)?;
        monitor.set_linger(0)?;
        // The thread would wait for room as well.
        monitor.set_rcvhwm(0)?;
        monitor.connect(name)?;
        WatchedSocket::new(monitor).map(|socket| Self(Some(socket)))
    }

    fn next(&self) -> Option<MonitorEvent> {
        self.0.as_ref().and_then(monitor_event)
    }

    async fn changed(&mut self) {
        match &mut self.0 {
            Some(socket) => socket.changed().await,
            None => std::future::pending().await,
        }
    }
}

impl Drop for SocketMonitor {
    fn drop(&mut self) {
        // Without a runtime the process ends.
        if let (Some(socket), Ok(runtime)) = (self.0.take(), Handle::try_current()) {
            runtime.spawn(read_until_stopped(socket));
        }
    }
}

/// The next event of a monitor, if there is one.
fn monitor_event(socket: &WatchedSocket) -> Option<MonitorEvent> {
    let frames = socket.try_receive()?;
    Some(
        frames
            .first()
            .map_or(MonitorEvent::Other, |frame| MonitorEvent::read(frame)),
    )
}

async fn read_until_stopped(mut socket: WatchedSocket) {
    loop {
        match monitor_event(&socket) {
            Some(MonitorEvent::Stopped) => return,
            Some(_) => {}
            None => socket.changed().await,
        }
    }
}

struct Sockets {
    live: WatchedSocket,
    /// Dropped after the socket that it monitors.
    monitor: SocketMonitor,
    replay: Option<WatchedSocket>,
    /// The replay whose end has not come.
    pending_replay: Option<ReplayId>,
    connections: Connections,
    /// Every socket was read until it had nothing, and none has changed since. Reading costs system
    /// calls, and the rank's task asks for events again after each of its other inputs.
    are_drained: bool,
}

impl Sockets {
    fn open(context: &zmq::Context, endpoints: &Endpoints, name: &str) -> std::io::Result<Self> {
        let live = context.socket(zmq::SUB)?;
        live.set_linger(0)?;
        live.set_rcvhwm(HWM)?;
        live.set_maxmsgsize(MESSAGE_BYTES_MAX)?;
        live.set_reconnect_ivl(100)?;
        live.set_reconnect_ivl_max(1000)?;
        live.set_heartbeat_ivl(2000)?;
        live.set_heartbeat_timeout(6000)?;
        live.set_subscribe(b"")?;
        let monitor = SocketMonitor::new(context, &live, name)?;
        if let Some(endpoint) = &endpoints.live {
            // An engine whose endpoint has no wildcard connects; the shim binds.
            if endpoint.contains('*') {
                live.bind(endpoint)?;
            } else {
                live.connect(endpoint)?;
            }
        }
        Ok(Self {
            live: WatchedSocket::new(live)?,
            monitor,
            replay: None,
            pending_replay: None,
            connections: Connections::default(),
            are_drained: false,
        })
    }

    /// Reads every socket, at most [`BURST_MAX`] messages each.
    fn read(&mut self, events: &mut Vec<EngineEvent>) {
        let live: Vec<Frames> = std::iter::from_fn(|| self.live.try_receive())
            .take(BURST_MAX)
            .collect();
        let has_more = live.len() == BURST_MAX;
        self.read_monitor(events);
        events.extend(live.into_iter().map(EngineEvent::Live));
        let had_all = self.read_replay(events);
        self.are_drained = had_all && !has_more;
    }

    fn read_monitor(&mut self, events: &mut Vec<EngineEvent>) {
        while let Some(event) = self.monitor.next() {
            match self.connections.apply(event) {
                Some(Change::Lost) => {
                    // The replay socket's peer is the same process: a pending replay may never be
                    // answered.
                    self.replay = None;
                    self.pending_replay = None;
                    events.push(EngineEvent::Disconnected);
                    if self.connections.are_some() {
                        events.push(EngineEvent::Connected);
                    }
                }
                Some(Change::Made) => events.push(EngineEvent::Connected),
                None => {}
            }
        }
    }

    /// Whether it read all messages of the pending replay that are there.
    fn read_replay(&mut self, events: &mut Vec<EngineEvent>) -> bool {
        for _ in 0..BURST_MAX {
            let Some(id) = self.pending_replay else {
                return true;
            };
            let received = self.replay.as_ref().and_then(WatchedSocket::try_receive);
            let Some(frames) = received else {
                return true;
            };
            if replay_frames(&frames) == Some(ReplayFrames::End) {
                self.pending_replay = None;
            }
            events.push(EngineEvent::Replay(id, frames));
        }
        false
    }

    /// Waits for a change of any socket. Every socket was read until it had nothing.
    async fn changed(&mut self) {
        let replay = async {
            match &mut self.replay {
                Some(replay) => replay.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.live.changed() => {}
            () = self.monitor.changed() => {}
            () = replay => {}
        }
        self.are_drained = false;
    }

    fn request_replay(
        &mut self,
        context: &zmq::Context,
        endpoint: &str,
        id: ReplayId,
        from: EngineSeq,
    ) -> std::io::Result<()> {
        // Sending takes in what a socket's descriptor signalled.
        self.are_drained = false;
        if self.pending_replay.take().is_some() {
            // Its late answers must not count as this one's.
            self.replay = None;
        }
        let replay = match self.replay.take() {
            Some(replay) => replay,
            None => {
                let replay = context.socket(zmq::DEALER)?;
                replay.set_linger(0)?;
                replay.set_rcvhwm(HWM)?;
                replay.set_maxmsgsize(MESSAGE_BYTES_MAX)?;
                replay.connect(endpoint)?;
                WatchedSocket::new(replay)?
            }
        };
        // A socket that cannot take the request is dropped.
        replay
            .socket()
            .send_multipart(replay_request(from), zmq::DONTWAIT)?;
        self.replay = Some(replay);
        self.pending_replay = Some(id);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
