use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};

use tokio::time::timeout;

use super::*;

struct Listener {
    feed: ZmqFeed,
    events: VecDeque<EngineEvent>,
}

impl Listener {
    async fn next(&mut self) -> EngineEvent {
        let mut events = Vec::new();
        while self.events.is_empty() {
            let receive = self.feed.receive(&mut events);
            timeout(Duration::from_secs(20), receive).await.unwrap();
            assert!(events.len() <= 2 * BURST_MAX + 2, "bounded bursts");
            self.events.extend(events.drain(..));
        }
        self.events.pop_front().unwrap()
    }

    async fn live(&mut self) -> u64 {
        let events = self.next().await;
        let EngineEvent::Live(frames) = events else {
            panic!("{events:?}");
        };
        u64::from_be_bytes(frames[1][..].try_into().unwrap())
    }

    async fn connected(&mut self) {
        let events = self.next().await;
        assert!(matches!(events, EngineEvent::Connected), "{events:?}");
    }
}

/// In most runs of so many one hangs if a monitor is closed with its socket.
const ROUNDS: u64 = 300;

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

fn listener(live: &str, replay: Option<String>) -> Listener {
    let endpoints = Endpoints {
        live: Some(live.to_owned()),
        replay,
    };
    Listener {
        feed: ZmqFeed::new(zmq::Context::new(), "0".to_owned(), endpoints),
        events: VecDeque::new(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_message_waits_for_the_next_one() {
    let engine = zmq::Context::new();
    let (socket, bound) = publisher(&engine, "tcp://127.0.0.1:*");
    let mut listener = listener(&bound, None);
    listener.connected().await;
    // The subscription is there.
    assert_eq!(socket.recv_bytes(0).unwrap(), [1]);
    let mut rng = fastrand::Rng::with_seed(1);
    let (mut sent, mut seen) = (0, 0);
    for _ in 0..3_000 {
        for _ in 0..rng.usize(1..3 * BURST_MAX) {
            publish(&socket, sent, rng.usize(..2_000));
            sent += 1;
        }
        // Some messages stay for the next round.
        let leave = if rng.bool() { 0 } else { rng.u64(..3) };
        while seen + leave < sent {
            assert_eq!(listener.live().await, seen);
            seen += 1;
        }
    }
    while seen < sent {
        assert_eq!(listener.live().await, seen);
        seen += 1;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_connection_is_reported_before_messages_of_the_next_one() {
    let engine = zmq::Context::new();
    let (mut socket, bound) = publisher(&engine, "tcp://127.0.0.1:*");
    let mut listener = listener(&bound, None);
    listener.connected().await;
    assert_eq!(socket.recv_bytes(0).unwrap(), [1]);
    publish(&socket, 0, 10);
    assert_eq!(listener.live().await, 0);
    for life in 1..5 {
        drop(socket);
        let (engine, bound) = (engine.clone(), bound.clone());
        // It publishes as soon as the socket subscribes.
        let next = std::thread::spawn(move || {
            let (socket, _) = publisher(&engine, &bound);
            assert_eq!(socket.recv_bytes(0).unwrap(), [1]);
            publish(&socket, life, 10);
            socket
        });
        // Everything is queued before the monitor is read.
        let live = &listener.feed.sockets.as_ref().unwrap().live;
        let there = async {
            while !live.socket().get_events().unwrap().contains(zmq::POLLIN) {
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_secs(20), there).await.unwrap();
        assert!(matches!(listener.next().await, EngineEvent::Disconnected));
        listener.connected().await;
        assert_eq!(listener.live().await, life);
        socket = next.join().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_to_an_abandoned_replay_do_not_count_for_the_next_one() {
    let engine = zmq::Context::new();
    let (socket, bound) = publisher(&engine, "tcp://127.0.0.1:*");
    let router = engine.socket(zmq::ROUTER).unwrap();
    router.set_linger(0).unwrap();
    router.bind("tcp://127.0.0.1:*").unwrap();
    let replay = router.get_last_endpoint().unwrap().unwrap();
    let mut listener = listener(&bound, Some(replay));
    listener.connected().await;
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
    listener
        .feed
        .request_replay(ReplayId(1), EngineSeq(5))
        .unwrap();
    let first = asked();
    listener
        .feed
        .request_replay(ReplayId(2), EngineSeq(6))
        .unwrap();
    let second = asked();
    answer(&first, 5);
    for seq in 6..50 {
        answer(&second, seq);
    }
    answer(&second, u64::MAX);
    for seq in (6..50).chain([u64::MAX]) {
        let events = listener.next().await;
        let EngineEvent::Replay(ReplayId(2), frames) = events else {
            panic!("{events:?}");
        };
        assert_eq!(frames[frames.len() - 2][..], seq.to_be_bytes());
    }
}

/// libzmq reports the end of a connection to a socket's monitor on the thread that all sockets of a
/// context share, and waits there for one that was closed.
#[tokio::test(flavor = "multi_thread")]
async fn a_socket_that_closes_while_its_engine_ends_stops_no_other_rank() {
    let context = zmq::Context::new();
    let engine = zmq::Context::new();
    let (other, bound) = publisher(&engine, "tcp://127.0.0.1:*");
    let endpoints = |live: &str| Endpoints {
        live: Some(live.to_owned()),
        replay: None,
    };
    let feed = |name: &str, live: &str| Listener {
        feed: ZmqFeed::new(context.clone(), name.to_owned(), endpoints(live)),
        events: VecDeque::new(),
    };
    let mut kept = feed("kept", &bound);
    kept.connected().await;
    assert_eq!(other.recv_bytes(0).unwrap(), [1], "its subscription");
    for round in 0..ROUNDS {
        let (ending, bound) = publisher(&engine, "tcp://127.0.0.1:*");
        let mut closing = feed(&format!("closing-{round}"), &bound);
        closing.connected().await;
        let ends = std::thread::spawn(move || drop(ending));
        closing.feed.reconnect(endpoints(&bound));
        ends.join().unwrap();
        publish(&other, round, 1);
        assert_eq!(kept.live().await, round);
    }
}

/// Whatever reaches the port of a feed that binds is no engine before its handshake.
#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_never_shakes_hands_takes_no_connection_down() {
    let mut listener = listener("tcp://127.0.0.1:*", None);
    listener.feed.open();
    let live = listener.feed.sockets.as_ref().unwrap().live.socket();
    let bound = live.get_last_endpoint().unwrap().unwrap();
    let engine = zmq::Context::new();
    let socket = engine.socket(zmq::XPUB).unwrap();
    socket.set_linger(0).unwrap();
    socket.connect(&bound).unwrap();
    listener.connected().await;
    assert_eq!(socket.recv_bytes(0).unwrap(), [1], "its subscription");
    let address = bound.strip_prefix("tcp://").unwrap();
    // A signature, version 3.1, and a mechanism.
    let greeting = |mechanism: &[u8; 4]| {
        let signature: &[u8] = &[0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f];
        [signature, &[3, 1], mechanism, &[0; 48]].concat()
    };
    // A subscriber has no use for this type.
    let ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ";
    let wrong_type = [&greeting(b"NULL")[..], ready].concat();
    let peers: [&[u8]; 5] = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        &[0; 64],
        &greeting(b"NONE"),
        &wrong_type,
    ];
    for (seq, sent) in (0..).zip(peers) {
        let mut peer = TcpStream::connect(address).unwrap();
        peer.write_all(sent).unwrap();
        // The socket may have reset the connection by now.
        drop(peer.shutdown(Shutdown::Write));
        // It reads to the end: the socket has reported the connection's end by then.
        drop(peer.read_to_end(&mut Vec::new()));
        publish(&socket, seq, 10);
        assert_eq!(listener.live().await, seq);
    }
    drop(socket);
    assert!(matches!(listener.next().await, EngineEvent::Disconnected));
}
