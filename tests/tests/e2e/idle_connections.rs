//! Idle connections: what one costs, and that they keep no client out.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::routing::{get, post};
use axum::{Json, Router};
use reqwest::StatusCode;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_util::task::TaskTracker;
use warmroute_process::open_files::{self, FileShares};

use crate::fleet::{
    Engines, Flags, Fleet, Mode, PATIENCE, Place, Process, ROUTER, free_port, strings,
};

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
        Ok("max") => FileShares::beside(RANK_FILES).clients,
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

/// An engine whose answers wait.
struct WaitingEngine {
    asked: AtomicUsize,
    answers: Semaphore,
}

impl WaitingEngine {
    async fn start() -> (Arc<Self>, String) {
        let engine = Arc::new(Self {
            asked: AtomicUsize::new(0),
            answers: Semaphore::new(0),
        });
        let models = Json(json!({"object": "list", "data": [{"id": "m", "object": "model"}]}));
        let waiting = Arc::clone(&engine);
        let complete = async move || {
            waiting.asked.fetch_add(1, Ordering::Relaxed);
            waiting.answers.acquire().await.unwrap().forget();
            Json(json!({"choices": []}))
        };
        let routes = Router::new()
            .route("/health", get(|| async {}))
            .route("/v1/models", get(|| async { models }))
            .route("/v1/chat/completions", post(complete));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        drop(TaskTracker::new().spawn(axum::serve(listener, routes).into_future()));
        (engine, url)
    }
}

/// Idle clients may have seven eighths of the files. Requests need two, and get them.
#[tokio::test(flavor = "multi_thread")]
async fn idle_clients_yield_their_files_to_connections_of_engines() {
    /// Seven eighths of what the router's limit of 300 leaves: 128, one of 16 and 18 are reserved.
    const CLIENTS: usize = 119;
    /// Their files on both sides are more than the clients leave.
    const REQUESTS: usize = 60;
    let (engine, url) = WaitingEngine::start().await;
    let place = Place::new();
    let [public, admin, kv] = [free_port(), free_port(), free_port()].map(|port| port.to_string());
    let router = strings(&["prlimit", "--nofile=300", ROUTER, "--host=127.0.0.1"]);
    let worker = format!("--worker={url},kv=tcp://127.0.0.1:{kv},id=w");
    let flags = [
        "--port",
        &public,
        "--admin-port",
        &admin,
        "--policy",
        "round-robin",
        &worker,
    ];
    let arguments = router.into_iter().chain(strings(&flags)).collect();
    let router = Process::start("/usr/bin/env", &place.path("router.log"), arguments).await;
    let address = format!("127.0.0.1:{public}");
    while !models(&address).await.contains("\"m\"") {
        sleep(std::time::Duration::from_millis(20)).await;
    }
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(idle(&format!("http://{address}")).await);
    }
    let mut requests = Vec::new();
    for _ in 0..REQUESTS {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        let body = r#"{"model":"m","messages":[{"role":"user","content":"x"}]}"#;
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream
            .write_all(format!("{head}{body}").as_bytes())
            .await
            .unwrap();
        requests.push(stream);
    }
    let all_asked = async {
        while engine.asked.load(Ordering::Relaxed) < REQUESTS {
            sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, all_asked)
        .await
        .expect("every request reaches the engine");
    engine.answers.add_permits(REQUESTS);
    for stream in &mut requests {
        let mut head = [0; 12];
        timeout(PATIENCE, stream.read_exact(&mut head))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
    }
    // The clients that are idle longest had to go, and no other.
    let kept = clients
        .iter_mut()
        .map(|stream| stream.try_read(&mut [0]).is_err());
    let kept: Vec<bool> = kept.collect();
    println!(
        "{} of {CLIENTS} idle clients are left",
        kept.iter().filter(|kept| **kept).count()
    );
    assert!(kept.is_sorted(), "{kept:?}");
    assert!(kept.contains(&true) && kept.contains(&false), "{kept:?}");
    drop(router);
}

async fn models(address: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = b"GET /v1/models HTTP/1.1\r\nhost: r\r\nconnection: close\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}
