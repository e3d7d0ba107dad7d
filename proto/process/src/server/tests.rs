use std::net::SocketAddr;

use axum::routing::get;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

use super::*;

/// Bound of every wait; only a defect takes so long.
const PATIENCE: Duration = Duration::from_secs(30);

async fn serve(connections_max: usize) -> (SocketAddr, IntGauge, Shutdown) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (connections, shutdown) = (IntGauge::new("n", "n").unwrap(), Shutdown::default());
    let server = Server {
        listener,
        router: probes(get(|| async {}), get(|| async {}))
            .route("/", get(|| async { "served" }))
            .route("/slow", get(endless)),
        connections_max,
        connections: connections.clone(),
    };
    let tasks = TaskTracker::new();
    tasks.spawn(server.run(shutdown.clone(), tasks.clone()));
    (address, connections, shutdown)
}

/// An answer whose head is there and whose body never comes.
async fn endless() -> Body {
    Body::new(NeverBody)
}

struct NeverBody;

impl hyper::body::Body for NeverBody {
    type Data = bytes::Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        _context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<bytes::Bytes>, Infallible>>> {
        std::task::Poll::Pending
    }
}

/// Sends a request with exactly these headers.
async fn ask(stream: &mut TcpStream, headers: &[(String, String)]) -> String {
    let mut head = "GET / HTTP/1.1\r\n".to_owned();
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    // A server that refuses the head may close before it is sent.
    drop(stream.write_all(head.as_bytes()).await);
    let mut answer = vec![0; 1024];
    let read = timeout(PATIENCE, stream.read(&mut answer)).await;
    let read = read.expect("an answer").unwrap_or(0);
    String::from_utf8_lossy(&answer[..read]).into_owned()
}

fn status(answer: &str) -> Option<u16> {
    answer.split(' ').nth(1)?.parse().ok()
}

#[tokio::test]
async fn heads_of_too_many_headers_or_bytes_are_refused() {
    let (address, _, shutdown) = serve(8).await;
    let header = |number: usize, bytes: usize| (format!("h{number}"), "v".repeat(bytes));
    let many = |count: usize| (0..count).map(|number| header(number, 1)).collect();
    let long = |bytes: usize| vec![header(0, bytes)];
    let heads: [Vec<(String, String)>; 4] = [
        many(HEADERS_MAX),
        many(HEADERS_MAX + 1),
        long(HEAD_BYTES_MAX / 2),
        long(2 * HEAD_BYTES_MAX),
    ];
    let mut found = Vec::new();
    for headers in heads {
        let mut stream = TcpStream::connect(address).await.unwrap();
        found.push(status(&ask(&mut stream, &headers).await));
    }
    assert_eq!(found, [200, 431, 200, 431].map(Some));
    shutdown.force.cancel();
    shutdown.stop.cancel();
}

/// Opens a connection and has one request answered on it.
async fn connected(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    assert_eq!(status(&ask(&mut stream, &[]).await), Some(200));
    stream
}

async fn is_closed(stream: &mut TcpStream) -> bool {
    let read = timeout(PATIENCE, stream.read(&mut [0; 1])).await;
    read.expect("closed").is_ok_and(|bytes| bytes == 0)
}

#[tokio::test]
async fn at_the_bound_the_connection_idle_longest_is_closed() {
    let (address, connections, shutdown) = serve(3).await;
    // One never sends a request, one was used later than it was opened.
    let mut silent = TcpStream::connect(address).await.unwrap();
    while connections.get() < 1 {
        tokio::task::yield_now().await;
    }
    let mut used = connected(address).await;
    let mut idle = connected(address).await;
    assert_eq!(status(&ask(&mut used, &[]).await), Some(200));
    let mut kept = vec![connected(address).await];
    assert!(is_closed(&mut silent).await);
    kept.push(connected(address).await);
    assert!(is_closed(&mut idle).await);
    assert_eq!(status(&ask(&mut used, &[]).await), Some(200));
    assert!(connections.get() <= 3);
    shutdown.force.cancel();
    shutdown.stop.cancel();
}

/// A flood of idle connections keeps no client and no probe out.
#[tokio::test]
async fn idle_connections_do_not_keep_probes_out() {
    let (address, connections, shutdown) = serve(8).await;
    let mut flood = Vec::new();
    for _ in 0..100 {
        flood.push(TcpStream::connect(address).await.unwrap());
    }
    for _ in 0..20 {
        connected(address).await;
        assert!(connections.get() <= 9);
    }
    shutdown.force.cancel();
    shutdown.stop.cancel();
}

/// No request in flight is cut for a new connection.
#[tokio::test]
async fn while_all_requests_are_in_flight_only_probes_are_answered() {
    let (address, connections, shutdown) = serve(2).await;
    let mut slow = Vec::new();
    for _ in 0..2 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = b"GET /slow HTTP/1.1\r\nhost: s\r\n\r\n";
        stream.write_all(request).await.unwrap();
        let mut first = [0; 1024];
        let read = timeout(PATIENCE, stream.read(&mut first)).await;
        assert!(read.expect("the head").unwrap() > 0);
        slow.push(stream);
    }
    // More than the reserve: idle ones in it are closed too.
    let mut silent = Vec::new();
    for _ in 0..2 * PROBE_CONNECTIONS_MAX {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    for (path, expected) in [("/health", 200), ("/readyz", 200), ("/", 503)] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let read = timeout(PATIENCE, stream.read_to_string(&mut answer)).await;
        read.expect("an answer").unwrap();
        assert_eq!(status(&answer), Some(expected), "{path}: {answer}");
    }
    assert!(connections.get() <= 2 + i64::try_from(PROBE_CONNECTIONS_MAX).unwrap());
    // Still in flight.
    for stream in &mut slow {
        let looked = timeout(Duration::from_millis(1), stream.read(&mut [0; 1])).await;
        assert!(looked.is_err(), "closed: {looked:?}");
    }
    shutdown.force.cancel();
    shutdown.stop.cancel();
}

/// Covers answers that need no other process. docs/FRONT.md describes the others.
#[tokio::test]
async fn a_client_that_ends_its_sending_side_gets_an_immediate_answer() {
    let (address, _, shutdown) = serve(2).await;
    for _ in 0..20 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = b"GET /health HTTP/1.1\r\nhost: s\r\n\r\n";
        stream.write_all(request).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = String::new();
        let read = timeout(PATIENCE, stream.read_to_string(&mut answer)).await;
        read.expect("an answer").unwrap();
        assert_eq!(status(&answer), Some(200), "{answer}");
    }
    shutdown.force.cancel();
    shutdown.stop.cancel();
}
