//! The ZMQ side of one rank: a PUB socket for live events, a ROUTER socket for replays.
//!
//! Both sockets live on one thread, as in vLLM. The engine sends to it through an in-process socket
//! whose bound blocks the engine, as vLLM's queue does. The ROUTER keeps its default high-water
//! mark, so a slow reader of a long replay loses batches silently, as in vLLM up to 0.32.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use anyhow::Context as _;
use tracing::warn;

/// Addresses and bounds of one rank's publisher.
pub struct PublisherOptions {
    pub bind: IpAddr,
    pub kv_port: u16,
    pub replay_port: Option<u16>,
    pub topic: String,
    pub buffer_steps: usize,
}

/// Whether a batch is sent live. It is kept for replays in both cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    Live,
    /// Simulates a loss in the network.
    ReplayOnly,
}

/// Publishes one rank's batches and answers replays.
pub struct Publisher {
    queue: Mutex<zmq::Socket>,
    thread: Mutex<Option<JoinHandle<()>>>,
    pub kv_port: u16,
    pub replay_port: Option<u16>,
}

/// Bound of the engine's queue and of each subscriber's.
const QUEUE_MAX: i32 = 100_000;
const QUEUE_NAME: &str = "inproc://batches";
const LIVE: &[u8] = b"live";
const REPLAY_ONLY: &[u8] = b"replay only";
/// A live message without a sequence number, which no replay returns.
const UNNUMBERED: &[u8] = b"unnumbered";
const STOP: &[u8] = b"stop";
/// Replaces the sequence number after the last batch of a replay.
const END_OF_REPLAY: [u8; 8] = [0xFF; 8];

impl Publisher {
    pub fn start(options: PublisherOptions) -> anyhow::Result<Self> {
        let context = zmq::Context::new();
        let incoming = context.socket(zmq::PULL)?;
        incoming.set_rcvhwm(QUEUE_MAX)?;
        incoming.bind(QUEUE_NAME)?;
        let queue = context.socket(zmq::PUSH)?;
        queue.set_sndhwm(QUEUE_MAX)?;
        queue.set_linger(0)?;
        queue.connect(QUEUE_NAME)?;
        let live = context.socket(zmq::PUB)?;
        live.set_sndhwm(QUEUE_MAX)?;
        let kv_port = bind(&live, options.bind, options.kv_port)?;
        let replay = context.socket(zmq::ROUTER)?;
        let replay_port = match options.replay_port {
            Some(port) => Some(bind(&replay, options.bind, port)?),
            None => None,
        };
        let sockets = Sockets {
            incoming,
            live,
            replay,
            topic: options.topic,
            kept: VecDeque::new(),
            kept_max: options.buffer_steps,
        };
        let thread = std::thread::Builder::new()
            .name(format!("publisher-{kv_port}"))
            .spawn(move || sockets.serve())
            .context("starting a publisher")?;
        Ok(Self {
            queue: Mutex::new(queue),
            thread: Mutex::new(Some(thread)),
            kv_port,
            replay_port,
        })
    }

    pub fn publish(&self, sequence: u64, payload: &[u8], delivery: Delivery) {
        let kind = match delivery {
            Delivery::Live => LIVE,
            Delivery::ReplayOnly => REPLAY_ONLY,
        };
        self.send(&[kind, &sequence.to_be_bytes(), payload]);
    }

    /// Sends a live message of two frames: topic and payload.
    pub fn publish_unnumbered(&self, payload: &[u8]) {
        self.send(&[UNNUMBERED, b"", payload]);
    }

    /// Closes the sockets. Later batches are dropped.
    pub fn stop(&self) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            self.send(&[STOP]);
            if thread.join().is_err() {
                warn!("the publisher had panicked");
            }
        }
    }

    fn send(&self, frames: &[&[u8]]) {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        // Blocks when the queue is full, as in vLLM.
        if let Err(error) = queue.send_multipart(frames, 0) {
            warn!(%error, "a batch did not reach the publisher");
        }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Binds and returns the port, which the system chose if it was 0.
fn bind(socket: &zmq::Socket, host: IpAddr, port: u16) -> anyhow::Result<u16> {
    socket.set_linger(0)?;
    let host_is_v6 = host.is_ipv6();
    socket.set_ipv6(host_is_v6)?;
    let endpoint = match port {
        0 if host_is_v6 => format!("tcp://[{host}]:*"),
        0 => format!("tcp://{host}:*"),
        port => format!("tcp://{}", SocketAddr::new(host, port)),
    };
    socket
        .bind(&endpoint)
        .with_context(|| format!("binding {endpoint}"))?;
    let bound = socket.get_last_endpoint()?;
    let bound = bound.ok().context("the endpoint is not text")?;
    let (_, port) = bound.rsplit_once(':').context("the endpoint has no port")?;
    port.parse().context("the endpoint's port is no number")
}

struct Sockets {
    incoming: zmq::Socket,
    live: zmq::Socket,
    replay: zmq::Socket,
    topic: String,
    kept: VecDeque<(u64, Vec<u8>)>,
    kept_max: usize,
}

#[derive(PartialEq, Eq)]
enum Next {
    GoOn,
    Stop,
}

impl Sockets {
    fn serve(mut self) {
        loop {
            match self.serve_once() {
                Ok(Next::GoOn) => {}
                Ok(Next::Stop) => return,
                Err(error) => warn!(%error, "publisher"),
            }
        }
    }

    fn serve_once(&mut self) -> zmq::Result<Next> {
        let mut ready = [
            self.incoming.as_poll_item(zmq::POLLIN),
            self.replay.as_poll_item(zmq::POLLIN),
        ];
        zmq::poll(&mut ready, -1)?;
        let [batch_ready, replay_ready] = ready.map(|item| item.is_readable());
        if batch_ready {
            let frames = self.incoming.recv_multipart(0)?;
            if self.accept(frames)? == Next::Stop {
                return Ok(Next::Stop);
            }
        }
        if replay_ready {
            let request = self.replay.recv_multipart(0)?;
            self.answer(&request)?;
        }
        Ok(Next::GoOn)
    }

    fn accept(&mut self, frames: Vec<Vec<u8>>) -> zmq::Result<Next> {
        let Ok([kind, sequence, payload]) = <[Vec<u8>; 3]>::try_from(frames) else {
            return Ok(Next::Stop);
        };
        if kind == LIVE {
            let frames = [self.topic.as_bytes(), &sequence, &payload];
            self.live.send_multipart(frames, 0)?;
        } else if kind == UNNUMBERED {
            let frames = [self.topic.as_bytes(), &payload];
            self.live.send_multipart(frames, 0)?;
        }
        if let Ok(sequence) = <[u8; 8]>::try_from(sequence.as_slice()) {
            self.kept.push_back((u64::from_be_bytes(sequence), payload));
        }
        while self.kept.len() > self.kept_max {
            self.kept.pop_front();
        }
        Ok(Next::GoOn)
    }

    /// Sends all kept batches from a sequence number on. Ignores malformed requests.
    fn answer(&self, request: &[Vec<u8>]) -> zmq::Result<()> {
        let [identity, empty, start] = request else {
            return Ok(());
        };
        let Ok(start) = <[u8; 8]>::try_from(start.as_slice()) else {
            return Ok(());
        };
        let start = u64::from_be_bytes(start);
        for (sequence, payload) in &self.kept {
            if *sequence >= start {
                let sequence = sequence.to_be_bytes();
                let topic = self.topic.as_bytes();
                let frames = [identity, empty.as_slice(), topic, &sequence, payload];
                self.replay.send_multipart(frames, 0)?;
            }
        }
        let end = [identity.as_slice(), empty, b"", &END_OF_REPLAY, b""];
        self.replay.send_multipart(end, 0)
    }
}
