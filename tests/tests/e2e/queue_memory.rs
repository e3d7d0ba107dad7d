//! Memory of a router while as many requests wait as its queue takes.

use std::fs;

use hyper::Request;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use tokio::net::TcpStream;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::fleet::{Engines, Flags, Fleet, Mode, Place};

/// The default of `engines.max_queued_requests`.
const WAITING: usize = 10_000;

/// Requests of a connection, below the router's bound of 128.
const STREAMS: usize = 125;

/// Half of `--max-buffered-bytes`.
const QUEUED_BYTES_MAX: u64 = 32 << 20;

/// What a request takes beside its body while it waits: its stream, its futures, its prompt's hashes.
/// About 19 KiB in a debug build.
const REQUEST_BYTES_MAX: u64 = 48 << 10;

const QUEUED: &str = "warmroute_router_queue_requests{model=\"mock\"}";

/// A completion of about 3 KiB.
fn body(number: usize) -> String {
    let tokens: Vec<usize> = (0..750).map(|at| 300 + (at + number) % 600).collect();
    json!({"model": "mock", "prompt": tokens, "max_tokens": 3000, "stream": true}).to_string()
}

/// Requests on one connection, until dropped.
struct Waiting {
    _connection: AbortOnDropHandle<()>,
    _answers: Vec<Box<dyn Send>>,
}

impl Waiting {
    async fn send(router: &str, numbers: std::ops::Range<usize>) -> Self {
        let stream = TcpStream::connect(router.trim_start_matches("http://")).await;
        let stream = TokioIo::new(stream.unwrap());
        let opened = http2::handshake(TokioExecutor::new(), stream).await;
        let (mut client, connection) = opened.unwrap();
        let connection = async move {
            // It ends when it is dropped.
            drop(connection.await);
        };
        let connection = AbortOnDropHandle::new(TaskTracker::new().spawn(connection));
        let answers = numbers.map(|number| -> Box<dyn Send> {
            let request = Request::post(format!("{router}/v1/completions"));
            let request = request.header("content-type", "application/json");
            // Sent by the connection's task, whether the answer is awaited or not.
            Box::new(client.send_request(request.body(body(number)).unwrap()))
        });
        Self {
            _answers: answers.collect(),
            _connection: connection,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_waiting_requests_take_bounded_memory() {
    let engines = Engines {
        count: 1,
        ranks: 1,
        blocks: 1000,
        flags: &["--itl-ms", "1000"],
    };
    let place = Place::new();
    let config = place.path("router.toml");
    fs::write(&config, "[engines]\nqueue_timeout_secs = 3600\n").unwrap();
    let config = String::leak(config.to_str().unwrap().to_owned());
    let flags = [
        "--config",
        config,
        "--max-active-requests",
        "1",
        "--max-buffered-bytes",
        "67108864",
    ];
    let flags = Flags {
        router: Vec::leak(flags.to_vec()),
        ..Flags::default()
    };
    let fleet = Fleet::start(Mode::Embedded, engines, flags).await;
    let router = fleet.routers[0].base();
    let first = Waiting::send(&router, 0..1).await;
    let is_full = async |fleet: &Fleet| fleet.load(0).await.0 == 1;
    fleet.until("the worker is full", is_full).await;
    let before = fleet.routers[0].resident_bytes();

    let mut waiting = vec![first];
    for sent in (STREAMS..=WAITING).step_by(STREAMS) {
        waiting.push(Waiting::send(&router, sent - STREAMS..sent).await);
        if sent % 1000 == 0 {
            let wait = async |fleet: &Fleet| fleet.metric(QUEUED).await == sent as f64;
            fleet.until("the requests wait", wait).await;
        }
    }
    let growth = fleet.routers[0].resident_bytes().saturating_sub(before);
    println!(
        "{WAITING} waiting requests: {} MiB more, {} KiB a request",
        growth >> 20,
        (growth / WAITING as u64) >> 10
    );
    let bound = QUEUED_BYTES_MAX + WAITING as u64 * REQUEST_BYTES_MAX;
    assert!(growth < bound, "{growth} of {bound} bytes");

    let url = format!("{router}/v1/completions");
    let refused = fleet
        .http
        .post(url)
        .body(body(WAITING))
        .send()
        .await
        .unwrap();
    assert_eq!(refused.status(), 429);
    assert!(refused.headers().contains_key("retry-after"));
    assert!(refused.text().await.unwrap().contains("queue_full"));

    drop(waiting);
    let is_empty = async |fleet: &Fleet| fleet.metric(QUEUED).await == 0.0;
    fleet.until("all have left the queue", is_empty).await;
    fleet.until_idle().await;
}
