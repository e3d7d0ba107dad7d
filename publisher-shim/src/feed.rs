//! The engine's sockets of one rank: a SUB with a connection monitor, and a DEALER for replays.
//!
//! They are read by whoever waits for them, and only as fast as it goes: what waits, waits in their queues,
//! then with the engine, and is lost there, where a gap in the numbers shows it. libzmq's sockets tell by a
//! file descriptor that something *changed*, and not that something is there. So nobody waits for one before
//! every socket was asked and had nothing.
//!
//! The monitor is read after the live messages, and told before them: a lost connection is told before
//! anything that came over the next one.

use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep_until};
use tracing::{debug, warn};
use warmroute_proto::EngineSeq;

use crate::config::Endpoints;
use crate::source::ReplayId;
use crate::wire::{ReplayFrames, replay_frames, replay_request};

/// Messages that libzmq keeps; vLLM's own bound is the same.
const HWM: i32 = 100_000;
const MESSAGE_BYTES_MAX: i64 = 64 << 20;
/// Messages of one socket before the others get their turn.
pub(crate) const BURST_MAX: usize = 8;
/// Before sockets that cannot be opened are tried again.
const RETRY: Duration = Duration::from_secs(1);

pub(crate) type Frames = Vec<Vec<u8>>;

#[derive(Debug)]
pub(crate) enum Heard {
    Connected,
    Disconnected,
    Live(Frames),
    Replay(ReplayId, Frames),
}

pub(crate) struct Feed {
    context: zmq::Context,
    /// Unique within the context.
    name: String,
    endpoints: Endpoints,
    rounds: u64,
    /// When closed sockets are to be opened.
    due: Instant,
    sockets: Option<Sockets>,
    was_closed: bool,
}

impl Feed {
    pub(crate) fn new(context: zmq::Context, name: String, endpoints: Endpoints) -> Self {
        Self {
            context,
            name,
            endpoints,
            rounds: 0,
            due: Instant::now(),
            sockets: None,
            was_closed: false,
        }
    }

    /// Other sockets from now on.
    pub(crate) fn turn_to(&mut self, endpoints: Endpoints) {
        self.endpoints = endpoints;
        self.was_closed |= self.sockets.take().is_some();
        self.due = Instant::now();
    }

    /// Asks for every batch from `from` on, and forgets what was asked before. `false` if nobody can be
    /// asked.
    pub(crate) fn ask_replay(&mut self, id: ReplayId, from: EngineSeq) -> bool {
        let endpoint = self.endpoints.replay.as_deref();
        let Some((sockets, endpoint)) = self.sockets.as_mut().zip(endpoint) else {
            return false;
        };
        let asked = sockets.ask_replay(&self.context, endpoint, id, from);
        if let Err(error) = &asked {
            debug!(%error, "cannot ask for a replay");
        }
        asked.is_ok()
    }

    /// Waits until something is heard; after [`BURST_MAX`] messages there may be more. Cancel-safe.
    pub(crate) async fn hear(&mut self, heard: &mut Vec<Heard>) {
        loop {
            if std::mem::take(&mut self.was_closed) {
                heard.push(Heard::Disconnected);
                return;
            }
            let Some(sockets) = &mut self.sockets else {
                sleep_until(self.due).await;
                self.open();
                continue;
            };
            sockets.read(heard);
            if !heard.is_empty() {
                return;
            }
            sockets.changed().await;
        }
    }

    fn open(&mut self) {
        self.rounds += 1;
        let monitor = format!("inproc://{}-{}", self.name, self.rounds);
        match Sockets::open(&self.context, &self.endpoints, &monitor) {
            Ok(sockets) => self.sockets = Some(sockets),
            Err(error) => {
                warn!(endpoints = ?self.endpoints, %error, "cannot open the engine's event socket");
                self.due = Instant::now() + RETRY;
            }
        }
    }
}

/// A socket and the descriptor that tells of changes, which is the socket's own.
struct Watched(AsyncFd<zmq::Socket>);

impl Watched {
    #[expect(
        deprecated,
        reason = "the others are unsafe, as a descriptor's owner may close it; a socket keeps its own"
    )]
    fn new(socket: zmq::Socket) -> std::io::Result<Self> {
        AsyncFd::with_interest(socket, Interest::READABLE).map(Self)
    }

    fn socket(&self) -> &zmq::Socket {
        self.0.get_ref()
    }

    fn take(&self) -> Option<Frames> {
        loop {
            match self.socket().recv_multipart(zmq::DONTWAIT) {
                Ok(frames) => return Some(frames),
                Err(zmq::Error::EINTR) => {}
                Err(_) => return None,
            }
        }
    }

    /// Waits for a change after [`Self::take`] had nothing.
    async fn changed(&mut self) {
        match self.0.readable_mut().await {
            Ok(mut change) => change.clear_ready(),
            // The runtime ends.
            Err(_) => std::future::pending().await,
        }
    }
}

struct Sockets {
    live: Watched,
    monitor: Watched,
    replay: Option<Watched>,
    /// The replay whose end has not come.
    under_way: Option<ReplayId>,
    connections: u32,
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
        let events = zmq::SocketEvent::HANDSHAKE_SUCCEEDED.to_raw()
            | zmq::SocketEvent::DISCONNECTED.to_raw();
        live.monitor(name, i32::from(events))?;
        let monitor = context.socket(zmq::PAIR)?;
        monitor.set_linger(0)?;
        monitor.connect(name)?;
        if let Some(endpoint) = &endpoints.live {
            // An engine whose endpoint has no wildcard connects to whoever binds.
            if endpoint.contains('*') {
                live.bind(endpoint)?;
            } else {
                live.connect(endpoint)?;
            }
        }
        Ok(Self {
            live: Watched::new(live)?,
            monitor: Watched::new(monitor)?,
            replay: None,
            under_way: None,
            connections: 0,
        })
    }

    /// Asks every socket. One that had more than its turn is asked again before anybody waits.
    fn read(&mut self, heard: &mut Vec<Heard>) {
        let live: Vec<Frames> = std::iter::from_fn(|| self.live.take())
            .take(BURST_MAX)
            .collect();
        self.read_monitor(heard);
        heard.extend(live.into_iter().map(Heard::Live));
        self.read_replay(heard);
    }

    fn read_monitor(&mut self, heard: &mut Vec<Heard>) {
        while let Some(frames) = self.monitor.take() {
            let event = frames.first().and_then(|frame| frame.first_chunk::<2>());
            let event = event.map(|raw| u16::from_ne_bytes(*raw));
            if event == Some(zmq::SocketEvent::DISCONNECTED.to_raw()) {
                self.connections = self.connections.saturating_sub(1);
                // The replay socket's peer is the same process: what it was asked may never be answered.
                self.replay = None;
                self.under_way = None;
                heard.push(Heard::Disconnected);
                if self.connections > 0 {
                    heard.push(Heard::Connected);
                }
            } else if event == Some(zmq::SocketEvent::HANDSHAKE_SUCCEEDED.to_raw()) {
                self.connections += 1;
                heard.push(Heard::Connected);
            }
        }
    }

    fn read_replay(&mut self, heard: &mut Vec<Heard>) {
        let room = heard.len() + BURST_MAX;
        while heard.len() < room
            && let Some(id) = self.under_way
            && let Some(frames) = self.replay.as_ref().and_then(Watched::take)
        {
            if replay_frames(&frames) == Some(ReplayFrames::End) {
                self.under_way = None;
            }
            heard.push(Heard::Replay(id, frames));
        }
    }

    /// All sockets were asked and had nothing; one of them may have something now.
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
    }

    fn ask_replay(
        &mut self,
        context: &zmq::Context,
        endpoint: &str,
        id: ReplayId,
        from: EngineSeq,
    ) -> std::io::Result<()> {
        if self.under_way.take().is_some() {
            // Its late answers must not be taken for this one's.
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
                Watched::new(replay)?
            }
        };
        // One that cannot take the question is given up.
        replay
            .socket()
            .send_multipart(replay_request(from), zmq::DONTWAIT)?;
        self.replay = Some(replay);
        self.under_way = Some(id);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use tokio::time::timeout;

    use super::*;

    struct Heads {
        feed: Feed,
        heard: VecDeque<Heard>,
    }

    impl Heads {
        async fn next(&mut self) -> Heard {
            let mut heard = Vec::new();
            while self.heard.is_empty() {
                let hear = self.feed.hear(&mut heard);
                timeout(Duration::from_secs(20), hear).await.unwrap();
                assert!(heard.len() <= 2 * BURST_MAX + 2, "in turns");
                self.heard.extend(heard.drain(..));
            }
            self.heard.pop_front().unwrap()
        }

        async fn live(&mut self) -> u64 {
            let heard = self.next().await;
            let Heard::Live(frames) = heard else {
                panic!("{heard:?}");
            };
            u64::from_be_bytes(frames[1][..].try_into().unwrap())
        }

        async fn connected(&mut self) {
            let heard = self.next().await;
            assert!(matches!(heard, Heard::Connected), "{heard:?}");
        }
    }

    fn publisher(engine: &zmq::Context, endpoint: &str) -> (zmq::Socket, String) {
        let socket = engine.socket(zmq::XPUB).unwrap();
        socket.set_linger(0).unwrap();
        while let Err(error) = socket.bind(endpoint) {
            // The port of a closed socket is free again a moment later.
            assert_eq!(error, zmq::Error::EADDRINUSE);
            std::thread::yield_now();
        }
        let bound = socket.get_last_endpoint().unwrap().unwrap();
        (socket, bound)
    }

    fn publish(socket: &zmq::Socket, seq: u64, bytes: usize) {
        let frames = [Vec::new(), seq.to_be_bytes().to_vec(), vec![7; bytes]];
        socket.send_multipart(frames, 0).unwrap();
    }

    fn heads(live: &str, replay: Option<String>) -> Heads {
        let endpoints = Endpoints {
            live: Some(live.to_owned()),
            replay,
        };
        Heads {
            feed: Feed::new(zmq::Context::new(), "0".to_owned(), endpoints),
            heard: VecDeque::new(),
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn no_message_waits_for_the_next_one() {
        let engine = zmq::Context::new();
        let (socket, bound) = publisher(&engine, "tcp://127.0.0.1:*");
        let mut heads = heads(&bound, None);
        heads.connected().await;
        // The subscription is there.
        assert_eq!(socket.recv_bytes(0).unwrap(), [1]);
        let mut rng = fastrand::Rng::with_seed(1);
        let (mut sent, mut seen) = (0, 0);
        for _ in 0..3_000 {
            for _ in 0..rng.usize(1..3 * BURST_MAX) {
                publish(&socket, sent, rng.usize(..2_000));
                sent += 1;
            }
            // Some of it stays for the next round, which begins in the midst of it.
            let leave = if rng.bool() { 0 } else { rng.u64(..3) };
            while seen + leave < sent {
                assert_eq!(heads.live().await, seen);
                seen += 1;
            }
        }
        while seen < sent {
            assert_eq!(heads.live().await, seen);
            seen += 1;
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_lost_connection_is_told_before_what_comes_over_the_next_one() {
        let engine = zmq::Context::new();
        let (mut socket, bound) = publisher(&engine, "tcp://127.0.0.1:*");
        let mut heads = heads(&bound, None);
        heads.connected().await;
        assert_eq!(socket.recv_bytes(0).unwrap(), [1]);
        publish(&socket, 0, 10);
        assert_eq!(heads.live().await, 0);
        for life in 1..5 {
            drop(socket);
            let (engine, bound) = (engine.clone(), bound.clone());
            // It publishes as soon as it is subscribed to, which the socket does when it is asked.
            let next = std::thread::spawn(move || {
                let (socket, _) = publisher(&engine, &bound);
                assert_eq!(socket.recv_bytes(0).unwrap(), [1]);
                publish(&socket, life, 10);
                socket
            });
            // All of it is there before the monitor is read.
            let live = &heads.feed.sockets.as_ref().unwrap().live;
            let there = async {
                while !live.socket().get_events().unwrap().contains(zmq::POLLIN) {
                    tokio::task::yield_now().await;
                }
            };
            timeout(Duration::from_secs(20), there).await.unwrap();
            assert!(matches!(heads.next().await, Heard::Disconnected));
            heads.connected().await;
            assert_eq!(heads.live().await, life);
            socket = next.join().unwrap();
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn answers_to_an_abandoned_question_are_not_taken_for_the_next_one_s() {
        let engine = zmq::Context::new();
        let (socket, bound) = publisher(&engine, "tcp://127.0.0.1:*");
        let router = engine.socket(zmq::ROUTER).unwrap();
        router.set_linger(0).unwrap();
        router.bind("tcp://127.0.0.1:*").unwrap();
        let replay = router.get_last_endpoint().unwrap().unwrap();
        let mut heads = heads(&bound, Some(replay));
        heads.connected().await;
        assert_eq!(socket.recv_bytes(0).unwrap(), [1]);
        let asked = || {
            let mut frames = router.recv_multipart(0).unwrap();
            assert_eq!(frames.len(), 3);
            frames.swap_remove(0)
        };
        let answer = |peer: &[u8], seq: u64| {
            let frames = [peer, b"", &seq.to_be_bytes(), b""];
            router.send_multipart(frames, 0).unwrap();
        };
        assert!(heads.feed.ask_replay(ReplayId(1), EngineSeq(5)));
        let first = asked();
        assert!(heads.feed.ask_replay(ReplayId(2), EngineSeq(6)));
        let second = asked();
        answer(&first, 5);
        for seq in 6..50 {
            answer(&second, seq);
        }
        answer(&second, u64::MAX);
        for seq in (6..50).chain([u64::MAX]) {
            let heard = heads.next().await;
            let Heard::Replay(ReplayId(2), frames) = heard else {
                panic!("{heard:?}");
            };
            assert_eq!(frames[frames.len() - 2][..], seq.to_be_bytes());
        }
    }
}
