use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::routing::{get, post};
use futures_util::stream;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{sleep, timeout};

use super::*;

/// Bound of every wait: above the server's longest time limit. Only a defect takes so long.
const PATIENCE: Duration = HEAD_TIMEOUT.saturating_mul(2);

async fn serve(connections_max: usize) -> (SocketAddr, IntGauge, Shutdown) {
    let (address, metrics, shutdown) = serve_clients(connections_max, HalfClosed::Abort).await;
    (address, metrics.open, shutdown)
}

async fn serve_clients(
    connections_max: usize,
    half_closed: HalfClosed,
) -> (SocketAddr, ConnectionMetrics, Shutdown) {
    let write_timeout = Some(Duration::from_millis(500));
    serve_ruled(
        connections_max,
        ClientRules {
            http2: Http2::Offered,
            half_closed: Arc::new(move || half_closed),
            write_timeout,
            ..ClientRules::default()
        },
    )
    .await
}

async fn serve_ruled(
    connections_max: usize,
    clients: ClientRules,
) -> (SocketAddr, ConnectionMetrics, Shutdown) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (connections, shutdown) = (ConnectionMetrics::hidden().unwrap(), Shutdown::default());
    let server = Server {
        listener,
        router: probes(get(|| async {}), get(|| async {}))
            .route("/", get(|| async { "served" }))
            .route("/slow", get(endless))
            .route("/long", get(|| async { vec![0_u8; 64 << 20] }))
            .route("/late", get(late))
            .route("/body", post(|_: Bytes| async { "read" })),
        connections_max,
        files: ConnectionFiles::default(),
        connections: connections.clone(),
        clients,
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
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Bytes>, Infallible>>> {
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

/// Connections to engines take files too.
#[tokio::test]
async fn a_client_beyond_all_files_gets_probes_only_unless_another_is_idle() {
    let evicted = IntCounter::new("evicted", "evicted").unwrap();
    let files = ConnectionFiles::new(3, evicted.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = Server {
        listener,
        router: probes(get(|| async {}), get(|| async {}))
            .route("/", get(|| async { "served" }))
            .route("/slow", get(endless)),
        connections_max: 16,
        files: files.clone(),
        connections: ConnectionMetrics::hidden().unwrap(),
        clients: ClientRules::default(),
    };
    let (shutdown, tasks) = (Shutdown::default(), TaskTracker::new());
    tasks.spawn(server.run(shutdown.clone(), tasks.clone()));
    // One file is a busy client's, the others are those of engines.
    let mut busy = TcpStream::connect(address).await.unwrap();
    let request = b"GET /slow HTTP/1.1\r\nhost: h\r\n\r\n";
    busy.write_all(request).await.unwrap();
    let read = timeout(PATIENCE, busy.read(&mut [0; 64])).await;
    assert!(read.unwrap().unwrap() > 0);
    let engines = [files.take(), files.take()];
    assert!(engines.iter().all(Option::is_some));
    assert!(files.take().is_none(), "no client is idle");
    let get = async |path: &str| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: h\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = vec![0; 1024];
        let read = timeout(PATIENCE, stream.read(&mut answer)).await;
        let read = read.expect("an answer").unwrap();
        status(&String::from_utf8_lossy(&answer[..read]))
    };
    assert_eq!(get("/").await, Some(503));
    assert_eq!(get("/health").await, Some(200));
    assert_eq!(evicted.get(), 0);
    drop(engines);
    let mut idle = connected(address).await;
    let engines = [files.take(), files.take()];
    assert!(
        engines.iter().all(Option::is_some),
        "the idle client yields"
    );
    assert!(is_closed(&mut idle).await);
    assert_eq!(evicted.get(), 1);
    shutdown.force.cancel();
    shutdown.stop.cancel();
}

/// A proxy and the server could read two different ones.
#[tokio::test]
async fn a_request_with_two_hosts_or_transfer_encodings_is_refused() {
    let (address, _, shutdown) = serve(2).await;
    let host = |name: &str| ("host".to_owned(), name.to_owned());
    let chunked = || ("transfer-encoding".to_owned(), "chunked".to_owned());
    for (headers, expected) in [
        (vec![host("a")], 200),
        (vec![host("a"), host("b")], 400),
        (vec![host("a"), host("a")], 400),
        (vec![host("a"), chunked()], 200),
        (vec![host("a"), chunked(), chunked()], 400),
    ] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let answer = ask(&mut stream, &headers).await;
        assert_eq!(status(&answer), Some(expected), "{headers:?}: {answer}");
    }
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

/// Covers answers that need no other process: the next test has one that waits.
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

/// The answer comes after the client's end of sending.
async fn late() -> &'static str {
    sleep(Duration::from_secs(1)).await;
    "late"
}

#[tokio::test(start_paused = true)]
async fn a_half_closed_client_gets_a_late_answer_where_the_operator_wants_it() {
    for (half_closed, expected) in [(HalfClosed::Abort, None), (HalfClosed::Serve, Some(200))] {
        let (address, _, shutdown) = serve_clients(2, half_closed).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = b"GET /late HTTP/1.1\r\nhost: s\r\n\r\n";
        stream.write_all(request).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = String::new();
        let read = timeout(PATIENCE, stream.read_to_string(&mut answer)).await;
        read.expect("an answer or an end").unwrap();
        assert_eq!(status(&answer), expected, "{answer}");
        shutdown.force.cancel();
        shutdown.stop.cancel();
    }
}

type Http2Client = hyper::client::conn::http2::SendRequest<String>;

async fn http2_client(address: SocketAddr) -> Http2Client {
    let stream = TcpStream::connect(address).await.unwrap();
    let executor = hyper_util::rt::TokioExecutor::new();
    let stream = hyper_util::rt::TokioIo::new(stream);
    let (client, connection) = hyper::client::conn::http2::handshake(executor, stream)
        .await
        .unwrap();
    drop(TaskTracker::new().spawn(connection));
    client
}

async fn http2_status(client: &mut Http2Client, path: &str) -> Option<u16> {
    let uri = format!("http://s{path}");
    let request = Request::builder().uri(uri).body(String::new()).unwrap();
    let answered = timeout(PATIENCE, client.send_request(request)).await;
    Some(answered.expect("an answer").ok()?.status().as_u16())
}

/// Answers in flight on one connection do not wait for each other; the shutdown ends it in order.
#[tokio::test]
async fn clients_may_speak_http2_without_tls() {
    let (address, metrics, shutdown) = serve_clients(2, HalfClosed::Abort).await;
    let mut client = http2_client(address).await;
    let request = Request::builder()
        .uri("http://s/slow")
        .body(String::new())
        .unwrap();
    let slow = client.send_request(request).await.unwrap();
    assert_eq!(slow.status(), 200);
    assert_eq!(http2_status(&mut client, "/").await, Some(200));
    // Not idle while one answer is in flight.
    let mut other = TcpStream::connect(address).await.unwrap();
    assert_eq!(status(&ask(&mut other, &[]).await), Some(200));
    let mut third = TcpStream::connect(address).await.unwrap();
    assert_eq!(status(&ask(&mut third, &[]).await), Some(200));
    assert!(is_closed(&mut other).await);
    assert_eq!(http2_status(&mut client, "/").await, Some(200));
    drop(slow);
    shutdown.stop.cancel();
    while metrics.open.get() > 0 {
        sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(metrics.evicted.get(), 1);
}

/// A client of HTTP/2 keeps one connection: it must open another when there is room again.
#[tokio::test]
async fn a_refused_request_ends_a_connection_for_probes_only() {
    let (address, metrics, shutdown) = serve_clients(1, HalfClosed::Abort).await;
    let mut busy = TcpStream::connect(address).await.unwrap();
    let request = b"GET /slow HTTP/1.1\r\nhost: h\r\n\r\n";
    busy.write_all(request).await.unwrap();
    let read = timeout(PATIENCE, busy.read(&mut [0; 64])).await;
    assert!(read.unwrap().unwrap() > 0);
    let mut client = http2_client(address).await;
    for _ in 0..3 {
        assert_eq!(http2_status(&mut client, "/health").await, Some(200));
    }
    assert_eq!(http2_status(&mut client, "/").await, Some(503));
    drop(busy);
    let ended = async {
        while metrics.open.get() > 0 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, ended).await.expect("the client is told");
    assert_eq!(http2_status(&mut client, "/").await, None);
    let mut again = http2_client(address).await;
    assert_eq!(http2_status(&mut again, "/").await, Some(200));
    shutdown.force.cancel();
    shutdown.stop.cancel();
}

/// The first bytes may come one by one, and be of another protocol.
#[tokio::test]
async fn slow_and_wrong_prefaces_are_http1() {
    let (address, _, shutdown) = serve_clients(4, HalfClosed::Abort).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    for byte in b"PUT / HTTP/1.1\r\nhost: s\r\n\r\n" {
        stream.write_all(&[*byte]).await.unwrap();
        tokio::task::yield_now().await;
    }
    let mut answer = vec![0; 1024];
    let read = timeout(PATIENCE, stream.read(&mut answer)).await;
    let read = read.expect("an answer").unwrap();
    assert_eq!(status(&String::from_utf8_lossy(&answer[..read])), Some(405));
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream
        .write_all(b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n")
        .await
        .unwrap();
    let read = timeout(PATIENCE, stream.read(&mut answer)).await;
    let read = read.expect("an answer").unwrap();
    assert_eq!(status(&String::from_utf8_lossy(&answer[..read])), Some(400));
    shutdown.force.cancel();
    shutdown.stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_preface_that_never_ends_times_out() {
    let (address, _, shutdown) = serve_clients(4, HalfClosed::Abort).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"PRI * HT").await.unwrap();
    let since = Instant::now();
    assert!(is_closed(&mut stream).await);
    let waited = since.elapsed();
    assert!(
        waited.abs_diff(HEAD_TIMEOUT) < Duration::from_secs(1),
        "{waited:?}"
    );
    shutdown.force.cancel();
    shutdown.stop.cancel();
}

/// An answer that is longer than what sockets buffer, for a client that reads nothing of it.
#[tokio::test]
async fn a_client_that_does_not_read_is_cut_off() {
    let (address, connections, _) = serve(4).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = b"GET /long HTTP/1.1\r\nhost: h\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let closed = async {
        while connections.get() == 0 {
            sleep(Duration::from_millis(1)).await;
        }
        while connections.get() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(PATIENCE, closed).await.unwrap();
}

/// What a client does not read stays with the engine, not in the kernel's buffers.
#[tokio::test]
async fn little_of_an_unread_answer_is_taken_from_its_source() {
    let taken = Arc::new(AtomicUsize::new(0));
    let source = Arc::clone(&taken);
    let endless = move || async move {
        Body::from_stream(stream::repeat_with(move || {
            source.fetch_add(PART.len(), Ordering::Relaxed);
            Ok::<_, Infallible>(PART)
        }))
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let tasks = TaskTracker::new();
    let server = Server {
        listener,
        router: Router::new().route("/", get(endless)),
        connections_max: 4,
        files: ConnectionFiles::default(),
        connections: ConnectionMetrics::hidden().unwrap(),
        clients: ClientRules::default(),
    };
    tasks.spawn(server.run(Shutdown::default(), tasks.clone()));
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n";
    stream.write_all(request).await.unwrap();
    // The client's own receive buffer is filled once bytes can be read.
    stream.readable().await.unwrap();
    let mut before = 0;
    loop {
        sleep(Duration::from_millis(100)).await;
        let now = taken.load(Ordering::Relaxed);
        if now == before {
            break;
        }
        before = now;
    }
    assert!(before <= 512 << 10, "{before} bytes");
}

const PART: Bytes = Bytes::from_static(&[b'x'; 16 << 10]);

/// A client that reads its connection, and gives its stream no room for the answer.
#[tokio::test]
async fn a_stream_without_room_for_its_answer_is_reset() {
    const RESET: u8 = 3;
    let (address, connections, shutdown) = serve_clients(3, HalfClosed::Abort).await;
    let mut patient = http2_client(address).await;
    let request = Request::builder().uri("http://s/slow");
    let request = request.body(String::new()).unwrap();
    let mut slow = patient.send_request(request).await.unwrap();
    let mut held = Vec::new();
    // With room for the first byte its part is handed over, which need not be the end.
    for (window, path) in [(0, "/"), (1, "/long")] {
        let mut stream = with_room(address, window, path).await;
        let reset = async {
            loop {
                let mut head = [0; 9];
                stream.read_exact(&mut head).await.unwrap();
                let [_, high, low, kind, _, rest @ ..] = head;
                let mut payload = vec![0; usize::from(u16::from_be_bytes([high, low]))];
                stream.read_exact(&mut payload).await.unwrap();
                if kind == RESET {
                    return u32::from_be_bytes(rest);
                }
            }
        };
        assert_eq!(timeout(PATIENCE, reset).await.expect("a reset"), 1);
        // An idle connection is closed for the next one.
        held.push(stream);
    }
    // An answer that comes late has its stream.
    let next = hyper::body::Body::poll_frame(Pin::new(slow.body_mut()), &mut no_waker());
    assert!(next.is_pending());
    // The connection is idle, and yields its place.
    let mut other = TcpStream::connect(address).await.unwrap();
    assert_eq!(status(&ask(&mut other, &[]).await), Some(200));
    assert_eq!(connections.evicted.get(), 1);
    shutdown.force.cancel();
    shutdown.stop.cancel();
}

const fn no_waker() -> std::task::Context<'static> {
    std::task::Context::from_waker(std::task::Waker::noop())
}

/// Asks for an answer, and gives its stream room for so many bytes.
async fn with_room(address: SocketAddr, bytes: u8, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    // SETTINGS: the initial window; HEADERS: `GET http://s` and the path.
    sent.extend_from_slice(b"\0\0\x06\x04\0\0\0\0\0\0\x04\0\0\0");
    sent.push(bytes);
    let path_len = path.len() as u8;
    sent.extend_from_slice(&[
        0,
        0,
        7 + path_len,
        1,
        5,
        0,
        0,
        0,
        1,
        0x82,
        0x86,
        4,
        path_len,
    ]);
    sent.extend_from_slice(path.as_bytes());
    sent.extend_from_slice(b"\x01\x01s");
    stream.write_all(&sent).await.unwrap();
    stream
}

/// Clients that take nothing keep no others out, long before their time is over.
#[tokio::test]
async fn connections_whose_answers_are_not_taken_yield_their_places() {
    let rules = ClientRules {
        http2: Http2::Offered,
        write_timeout: Some(2 * PATIENCE),
        ..ClientRules::default()
    };
    let (address, connections, shutdown) = serve_ruled(2, rules).await;
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(with_room(address, 0, "/").await);
    }
    let served = async {
        loop {
            let mut other = TcpStream::connect(address).await.unwrap();
            if status(&ask(&mut other, &[]).await) == Some(200) {
                return;
            }
        }
    };
    timeout(PATIENCE, served).await.expect("a place");
    assert!(connections.evicted.get() > 0);
    shutdown.force.cancel();
    shutdown.stop.cancel();
}

/// Its stream has ended here, and its answer waits in the connection.
#[tokio::test]
async fn a_connection_whose_client_does_not_take_the_rest_is_cut() {
    let rules = ClientRules {
        http2: Http2::Offered,
        unused_max: Duration::from_millis(100),
        ..ClientRules::default()
    };
    let (address, connections, shutdown) = serve_ruled(8, rules).await;
    let mut stream = with_room(address, 1, "/").await;
    assert!(
        timeout(PATIENCE, stream.read_to_end(&mut Vec::new()))
            .await
            .is_ok()
    );
    // Without such a rest it ends in order; with a request in flight it stays.
    let mut unused = http2_client(address).await;
    assert_eq!(http2_status(&mut unused, "/").await, Some(200));
    let mut used = http2_client(address).await;
    let slow = Request::builder().uri("http://s/slow").body(String::new());
    let slow = used.send_request(slow.unwrap()).await.unwrap();
    while http2_status(&mut unused, "/").await.is_some() {
        sleep(Duration::from_millis(250)).await;
    }
    assert_eq!(http2_status(&mut used, "/").await, Some(200));
    drop(slow);
    drop(used);
    while connections.open.get() > 0 {
        sleep(Duration::from_millis(10)).await;
    }
    shutdown.force.cancel();
    shutdown.stop.cancel();
}

/// Begins a body, and does not go on. Returns when the server waits for it.
async fn begin_body(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = b"POST /body HTTP/1.1\r\nhost: s\r\nexpect: 100-continue\r\n\
        content-length: 2\r\n\r\n";
    stream.write_all(head).await.unwrap();
    assert_eq!(next_status(&mut stream).await, Some(100));
    stream
}

async fn next_status(stream: &mut TcpStream) -> Option<u16> {
    let mut answer = vec![0; 1024];
    let read = timeout(PATIENCE, stream.read(&mut answer)).await;
    let read = read.expect("an answer").unwrap_or(0);
    status(&String::from_utf8_lossy(&answer[..read]))
}

#[tokio::test]
async fn of_connections_whose_bodies_do_not_come_the_oldest_yields_its_place() {
    let (address, connections, shutdown) = serve_clients(2, HalfClosed::Abort).await;
    let mut older = begin_body(address).await;
    let mut newer = begin_body(address).await;
    connected(address).await;
    assert!(is_closed(&mut older).await);
    assert_eq!(connections.evicted.get(), 1);
    newer.write_all(b"ab").await.unwrap();
    assert_eq!(next_status(&mut newer).await, Some(200));
    shutdown.force.cancel();
    shutdown.stop.cancel();
}

/// A client that does not read the end of its connection, or its certificate is no longer valid.
#[test]
fn a_connection_of_former_certificates_serves_nothing_after_a_while() {
    let role = ConnectionRole::Regular;
    assert_eq!(role.outdated_for(Duration::ZERO), ConnectionRole::Regular);
    let late = LATE_STREAMS + Duration::from_millis(1);
    assert_eq!(role.outdated_for(late), ConnectionRole::Outdated);
}

/// Each request's steps stay on the thread of its connection, and blocking work does not.
#[tokio::test]
async fn connections_are_spread_over_their_threads_and_stay_there() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let number = async || {
        let blocking = crate::blocking::run(crate::connection_threads::current_number);
        assert_eq!(blocking.await.unwrap(), None, "other connections go on");
        format!("{:?}", crate::connection_threads::current_number())
    };
    let server = Server {
        listener,
        router: Router::new().route("/", get(number)),
        connections_max: 16,
        files: ConnectionFiles::default(),
        connections: ConnectionMetrics::hidden().unwrap(),
        clients: ClientRules::default(),
    };
    let (shutdown, tasks) = (Shutdown::default(), TaskTracker::new());
    let threads = ConnectionThreads::start(3).unwrap();
    tasks.spawn(server.run_on(threads, shutdown.clone(), tasks.clone()));
    let mut numbers: Vec<String> = Vec::new();
    let mut open = Vec::new();
    for _ in 0..6 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let mut answers = Vec::new();
        for _ in 0..2 {
            let request = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n";
            stream.write_all(request).await.unwrap();
            let mut answer = vec![0; 1024];
            let length = stream.read(&mut answer).await.unwrap();
            let answer = String::from_utf8(answer[..length].to_vec()).unwrap();
            answers.push(answer.split("\r\n\r\n").nth(1).unwrap().to_owned());
        }
        assert_eq!(answers[0], answers[1]);
        numbers.push(answers[0].clone());
        open.push(stream);
    }
    numbers.sort();
    assert_eq!(
        numbers,
        [
            "Some(0)", "Some(0)", "Some(1)", "Some(1)", "Some(2)", "Some(2)"
        ]
    );
    shutdown.stop.cancel();
    shutdown.force.cancel();
    tasks.close();
    tasks.wait().await;
}
