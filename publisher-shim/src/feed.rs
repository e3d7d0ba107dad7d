//! The engine's sockets of one rank, on a thread of their own, as ZMQ sockets belong to one.
//!
//! A SUB with a connection monitor, and a DEALER for replays. What they hear goes into a bounded
//! channel. A live message that finds it full is lost, and the loss itself is told as soon as there
//! is room: it forces a replay. A replay's answers wait for room instead.
//!
//! The monitor is read again after every live message was received and before it is passed on: a
//! lost connection is told before anything that came over the next one.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

use tokio::sync::mpsc;
use tracing::{debug, warn};
use warmroute_proto::EngineSeq;

use crate::config::Endpoints;
use crate::source::ReplayId;
use crate::wire::{ReplayFrames, replay_frames, replay_request};

/// Messages between the sockets and the source: a burst of a second on a large engine.
const HEARD_MAX: usize = 8192;
const ASKED_MAX: usize = 64;
/// Messages that libzmq keeps while the thread is busy; vLLM's own bound is the same.
const HWM: i32 = 100_000;
const MESSAGE_BYTES_MAX: i64 = 64 << 20;
/// How long a question may wait for the thread to look.
const POLL_MS: i64 = 10;
/// Messages of one socket before the others get their turn.
const BURST_MAX: usize = 256;

#[derive(Debug)]
pub(crate) enum Heard {
    Connected,
    Disconnected,
    Live(Vec<Vec<u8>>),
    /// Live messages were lost between the socket and here.
    Lost,
    Replay(ReplayId, Vec<Vec<u8>>),
    ReplayFailed(ReplayId),
}

#[derive(Debug)]
pub(crate) enum Ask {
    Replay { id: ReplayId, from: EngineSeq },
    Endpoints(Endpoints),
}

/// The source's end. The thread ends when it is dropped.
pub(crate) struct Feed {
    pub(crate) heard: mpsc::Receiver<Heard>,
    asks: SyncSender<Ask>,
}

impl Feed {
    pub(crate) fn start(name: &str, endpoints: Endpoints) -> std::io::Result<Self> {
        let (heard_sender, heard) = mpsc::channel(HEARD_MAX);
        let (asks, asked) = sync_channel(ASKED_MAX);
        std::thread::Builder::new()
            .name(format!("kv {name}"))
            .spawn(move || run(endpoints, &asked, &heard_sender))?;
        Ok(Self { heard, asks })
    }

    /// `false` if the thread does not take questions any more.
    pub(crate) fn ask(&self, ask: Ask) -> bool {
        self.asks.try_send(ask).is_ok()
    }
}

/// Nobody listens any more.
struct Closed;

fn run(mut endpoints: Endpoints, asked: &Receiver<Ask>, heard: &mpsc::Sender<Heard>) {
    let context = zmq::Context::new();
    let mut round = 0;
    loop {
        round += 1;
        match Sockets::open(&context, &endpoints, heard, round) {
            Ok(mut sockets) => match sockets.serve(asked) {
                Ok(next) => endpoints = next,
                Err(Closed) => return,
            },
            Err(error) => {
                warn!(?endpoints, %error, "cannot open the engine's event socket");
                match asked.recv_timeout(Duration::from_secs(1)) {
                    Ok(Ask::Endpoints(next)) => endpoints = next,
                    Ok(Ask::Replay { .. }) | Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        }
    }
}

struct Sockets<'a> {
    context: &'a zmq::Context,
    heard: &'a mpsc::Sender<Heard>,
    live: zmq::Socket,
    monitor: zmq::Socket,
    replay_endpoint: Option<String>,
    replay: Option<zmq::Socket>,
    /// The replay whose end has not come.
    under_way: Option<ReplayId>,
    connections: u32,
    has_loss: bool,
}

impl<'a> Sockets<'a> {
    fn open(
        context: &'a zmq::Context,
        endpoints: &Endpoints,
        heard: &'a mpsc::Sender<Heard>,
        round: u64,
    ) -> zmq::Result<Self> {
        let live = context.socket(zmq::SUB)?;
        live.set_linger(0)?;
        live.set_rcvhwm(HWM)?;
        live.set_maxmsgsize(MESSAGE_BYTES_MAX)?;
        live.set_reconnect_ivl(100)?;
        live.set_reconnect_ivl_max(1000)?;
        live.set_heartbeat_ivl(2000)?;
        live.set_heartbeat_timeout(6000)?;
        live.set_subscribe(b"")?;
        let name = format!("inproc://monitor-{round}");
        let events = zmq::SocketEvent::HANDSHAKE_SUCCEEDED.to_raw()
            | zmq::SocketEvent::DISCONNECTED.to_raw();
        live.monitor(&name, i32::from(events))?;
        let monitor = context.socket(zmq::PAIR)?;
        monitor.set_linger(0)?;
        monitor.connect(&name)?;
        if let Some(endpoint) = &endpoints.live {
            // An engine whose endpoint has no wildcard connects to whoever binds.
            if endpoint.contains('*') {
                live.bind(endpoint)?;
            } else {
                live.connect(endpoint)?;
            }
        }
        Ok(Self {
            context,
            heard,
            live,
            monitor,
            replay_endpoint: endpoints.replay.clone(),
            replay: None,
            under_way: None,
            connections: 0,
            has_loss: false,
        })
    }

    /// Until other endpoints are asked for.
    fn serve(&mut self, asked: &Receiver<Ask>) -> Result<Endpoints, Closed> {
        loop {
            loop {
                match asked.try_recv() {
                    Ok(Ask::Replay { id, from }) => self.ask_replay(id, from)?,
                    Ok(Ask::Endpoints(next)) => {
                        self.disconnected()?;
                        return Ok(next);
                    }
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return Err(Closed),
                }
            }
            let mut items = vec![
                self.monitor.as_poll_item(zmq::POLLIN),
                self.live.as_poll_item(zmq::POLLIN),
            ];
            items.extend(self.replay.iter().map(|s| s.as_poll_item(zmq::POLLIN)));
            if let Err(error) = zmq::poll(&mut items, POLL_MS) {
                debug!(%error, "polling was interrupted");
            }
            drop(items);
            self.read_monitor()?;
            self.read_live()?;
            self.read_replay()?;
            if self.has_loss && self.heard.try_send(Heard::Lost).is_ok() {
                self.has_loss = false;
            }
            if self.heard.is_closed() {
                return Err(Closed);
            }
        }
    }

    fn read_monitor(&mut self) -> Result<(), Closed> {
        while let Ok(frames) = self.monitor.recv_multipart(zmq::DONTWAIT) {
            let event = frames.first().and_then(|frame| frame.first_chunk::<2>());
            let event = event.map(|raw| u16::from_ne_bytes(*raw));
            if event == Some(zmq::SocketEvent::DISCONNECTED.to_raw()) {
                self.connections = self.connections.saturating_sub(1);
                self.disconnected()?;
                if self.connections > 0 {
                    self.tell(Heard::Connected)?;
                }
            } else if event == Some(zmq::SocketEvent::HANDSHAKE_SUCCEEDED.to_raw()) {
                self.connections += 1;
                self.tell(Heard::Connected)?;
            }
        }
        Ok(())
    }

    fn read_live(&mut self) -> Result<(), Closed> {
        for _ in 0..BURST_MAX {
            let Ok(frames) = self.live.recv_multipart(zmq::DONTWAIT) else {
                return Ok(());
            };
            self.read_monitor()?;
            // Once something is lost, what follows is a gap anyway until the loss is told.
            if self.has_loss || self.heard.try_send(Heard::Live(frames)).is_err() {
                self.has_loss = true;
            }
        }
        Ok(())
    }

    fn read_replay(&mut self) -> Result<(), Closed> {
        for _ in 0..BURST_MAX {
            let Some(id) = self.under_way else {
                return Ok(());
            };
            let Some(replay) = &self.replay else {
                return Ok(());
            };
            let Ok(frames) = replay.recv_multipart(zmq::DONTWAIT) else {
                return Ok(());
            };
            if replay_frames(&frames) == Some(ReplayFrames::End) {
                self.under_way = None;
            }
            self.tell(Heard::Replay(id, frames))?;
        }
        Ok(())
    }

    fn ask_replay(&mut self, id: ReplayId, from: EngineSeq) -> Result<(), Closed> {
        if self.under_way.take().is_some() {
            // Its late answers must not be taken for this one's.
            self.replay = None;
        }
        match self.send_request(from) {
            Ok(()) => self.under_way = Some(id),
            Err(error) => {
                debug!(%error, "cannot ask for a replay");
                self.replay = None;
                self.tell(Heard::ReplayFailed(id))?;
            }
        }
        Ok(())
    }

    fn send_request(&mut self, from: EngineSeq) -> zmq::Result<()> {
        let Some(endpoint) = &self.replay_endpoint else {
            return Err(zmq::Error::ENOTCONN);
        };
        let replay = match self.replay.take() {
            Some(replay) => replay,
            None => {
                let replay = self.context.socket(zmq::DEALER)?;
                replay.set_linger(0)?;
                replay.set_rcvhwm(HWM)?;
                replay.set_maxmsgsize(MESSAGE_BYTES_MAX)?;
                replay.connect(endpoint)?;
                replay
            }
        };
        replay.send_multipart(replay_request(from), zmq::DONTWAIT)?;
        self.replay = Some(replay);
        Ok(())
    }

    fn disconnected(&mut self) -> Result<(), Closed> {
        // The replay socket's peer is the same process: what it was asked may never be answered.
        self.replay = None;
        self.under_way = None;
        self.tell(Heard::Disconnected)
    }

    fn tell(&self, heard: Heard) -> Result<(), Closed> {
        self.heard.blocking_send(heard).map_err(|_| Closed)
    }
}
