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
        router: Router::new().route("/", get(|| async { "served" })),
        connections_max,
        connections: connections.clone(),
    };
    let tasks = TaskTracker::new();
    tasks.spawn(server.run(shutdown.clone(), tasks.clone()));
    (address, connections, shutdown)
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

#[tokio::test]
async fn a_connection_beyond_the_bound_waits_for_a_permit() {
    let (address, connections, shutdown) = serve(1).await;
    let mut first = TcpStream::connect(address).await.unwrap();
    assert_eq!(status(&ask(&mut first, &[]).await), Some(200));
    let mut second = TcpStream::connect(address).await.unwrap();
    second.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    // The first is served repeatedly, the second is not.
    for _ in 0..50 {
        assert_eq!(status(&ask(&mut first, &[]).await), Some(200));
        assert_eq!(connections.get(), 1);
        let mut none = [0; 1];
        let looked = timeout(Duration::from_millis(1), second.read(&mut none)).await;
        assert!(looked.is_err(), "the second is served: {looked:?}");
    }
    drop(first);
    let mut answer = [0; 1024];
    let read = timeout(PATIENCE, second.read(&mut answer)).await;
    let read = read.expect("the permit").unwrap();
    let answer = String::from_utf8_lossy(&answer[..read]);
    assert_eq!(status(&answer), Some(200), "{answer}");
    shutdown.force.cancel();
    shutdown.stop.cancel();
}
