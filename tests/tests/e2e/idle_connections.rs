//! Idle connections: what one costs, and that they keep no client out.

use reqwest::StatusCode;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use warmroute_process::open_files;

use crate::fleet::{Engines, Flags, Fleet, Mode};

/// Without `IDLE_CONNECTIONS`, of which `max` stands for those that the limit of open files allows.
const CONNECTIONS: usize = 500;

/// Memory of one, in a debug build.
const CONNECTION_BYTES_MAX: u64 = 32 << 10;

/// Connections of the admin port.
const ADMIN_CONNECTIONS: usize = 256;

/// Connections beyond a bound: more than those that the fleet has open already.
const FURTHER: usize = 8;

const EVICTED: &str = "warmroute_router_connections_evicted_total";

const ENGINES: Engines = Engines {
    count: 1,
    ranks: 1,
    blocks: 400,
    flags: &[],
};

/// A connection that got one answer, and sends nothing more.
async fn idle(base: &str) -> TcpStream {
    let address = base.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET /health HTTP/1.1\r\nhost: {address}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = [0; 512];
    let read = stream.read(&mut answer).await.unwrap();
    assert!(answer[..read].starts_with(b"HTTP/1.1 200 "));
    stream
}

/// Whether the server has closed it.
async fn is_closed(stream: &mut TcpStream) -> bool {
    stream.read(&mut [0]).await.map_or(true, |read| read == 0)
}

#[expect(clippy::disallowed_methods, reason = "a test has no flags")]
fn wanted() -> usize {
    open_files::raise_limit();
    match std::env::var("IDLE_CONNECTIONS").as_deref() {
        // Less those of the fleet, which this process has too.
        Ok("max") => open_files::connections_max(RANK_FILES),
        Ok(text) => text.parse().unwrap(),
        Err(_) => CONNECTIONS,
    }
}

/// Files that the router keeps for the events of a rank.
const RANK_FILES: u64 = 18;

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_cost_little_and_the_oldest_yields_its_place() {
    let count = wanted();
    let bound = String::leak(count.to_string());
    let flags = ["--max-connections", bound];
    let flags = Flags {
        router: Vec::leak(flags.to_vec()),
        ..Flags::default()
    };
    let fleet = Fleet::start(Mode::Embedded, ENGINES, flags).await;
    let (public, admin) = (fleet.routers[0].base(), fleet.admin(0, ""));
    drop(idle(&public).await);
    let before = fleet.routers[0].resident_bytes();
    let mut connections = Vec::with_capacity(count);
    for _ in 0..count {
        connections.push(idle(&public).await);
    }
    let growth = fleet.routers[0].resident_bytes().saturating_sub(before);
    let each = growth / count as u64;
    println!("{count} idle connections: {each} bytes each");
    assert!(each < CONNECTION_BYTES_MAX, "{each} bytes");

    for _ in 0..FURTHER {
        connections.push(idle(&public).await);
    }
    assert!(is_closed(&mut connections[0]).await);
    let evicted = fleet.metric(EVICTED).await;
    assert!((1.0..=2.0 * FURTHER as f64).contains(&evicted), "{evicted}");
    let url = format!("{public}/v1/models");
    let answer = fleet.http.get(url).send().await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    // The newest one is still served.
    let newest = connections.last_mut().unwrap();
    newest
        .write_all(b"GET /health HTTP/1.1\r\nhost: r\r\n\r\n")
        .await
        .unwrap();
    assert!(!is_closed(newest).await);

    let mut operators = Vec::new();
    for _ in 0..ADMIN_CONNECTIONS + FURTHER {
        operators.push(idle(&admin).await);
    }
    assert!(is_closed(&mut operators[0]).await);
    assert!(fleet.metric(EVICTED).await > evicted);
}
