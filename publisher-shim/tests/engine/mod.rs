//! A fake engine: PUB, ROUTER and a few HTTP routes.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub(crate) enum Order {
    Publish(Value),
    /// Into the replay buffer only.
    PublishLost(Value),
    Restart,
    /// A restart after which its sockets, live and replay, are elsewhere.
    Move(Sender<(String, String)>),
    /// The replay buffer keeps so many batches.
    Trim(usize),
    /// Marks the end of everything before it.
    Tell(Sender<()>),
}

pub(crate) struct FakeEngine {
    pub(crate) orders: Sender<Order>,
    thread: Option<JoinHandle<()>>,
    pub(crate) live: String,
    pub(crate) replay: String,
}

impl FakeEngine {
    pub(crate) fn start() -> Self {
        let (orders, received) = channel();
        let (told, endpoints) = channel();
        let thread = std::thread::spawn(move || serve(&received, &told));
        let (live, replay) = endpoints.recv().unwrap();
        Self {
            orders,
            thread: Some(thread),
            live,
            replay,
        }
    }

    pub(crate) fn publish(&self, event: Value) {
        self.orders.send(Order::Publish(event)).unwrap();
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        let (closed, _) = channel();
        self.orders = closed;
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn bind(context: &zmq::Context, kind: zmq::SocketType, endpoint: &str) -> zmq::Socket {
    // The port of a closed socket is free again a moment later.
    for _ in 0..200 {
        let socket = context.socket(kind).unwrap();
        socket.set_linger(0).unwrap();
        if socket.bind(endpoint).is_ok() {
            return socket;
        }
        std::thread::yield_now();
        zmq::poll(&mut [], 10).unwrap();
    }
    panic!("cannot bind {endpoint}");
}

fn serve(orders: &Receiver<Order>, told: &Sender<(String, String)>) {
    let context = zmq::Context::new();
    let mut live = bind(&context, zmq::PUB, "tcp://127.0.0.1:*");
    let mut replay = bind(&context, zmq::ROUTER, "tcp://127.0.0.1:*");
    let endpoint = |socket: &zmq::Socket| socket.get_last_endpoint().unwrap().unwrap();
    let mut ends = (endpoint(&live), endpoint(&replay));
    told.send(ends.clone()).unwrap();
    let mut batches: VecDeque<(u64, Vec<u8>)> = VecDeque::new();
    let (mut life, mut next) = (0, 0_u64);
    loop {
        match orders.recv_timeout(Duration::from_millis(1)) {
            Ok(order @ (Order::Restart | Order::Move(_))) => {
                life += 1;
                next = 0;
                batches.clear();
                if let Order::Move(whom) = order {
                    let before = (live, replay);
                    live = bind(&context, zmq::PUB, "tcp://127.0.0.1:*");
                    replay = bind(&context, zmq::ROUTER, "tcp://127.0.0.1:*");
                    drop(before);
                    ends = (endpoint(&live), endpoint(&replay));
                    whom.send(ends.clone()).unwrap();
                } else {
                    drop((live, replay));
                    live = bind(&context, zmq::PUB, &ends.0);
                    replay = bind(&context, zmq::ROUTER, &ends.1);
                }
            }
            Ok(Order::Tell(whom)) => whom.send(()).unwrap(),
            Ok(Order::Trim(keep)) => drop(batches.drain(..batches.len().saturating_sub(keep))),
            Ok(order) => {
                let (event, is_lost) = match order {
                    Order::Publish(event) => (event, false),
                    Order::PublishLost(event) => (event, true),
                    Order::Restart | Order::Move(_) | Order::Trim(_) | Order::Tell(_) => continue,
                };
                let payload = rmp_serde::to_vec(&json!([life, [event], 0])).unwrap();
                let seq = next;
                next += 1;
                if !is_lost {
                    let frames = [Vec::new(), seq.to_be_bytes().to_vec(), payload.clone()];
                    live.send_multipart(frames, 0).unwrap();
                }
                batches.push_back((seq, payload));
            }
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return,
        }
        while let Ok(frames) = replay.recv_multipart(zmq::DONTWAIT) {
            let [peer, _, from] = &frames[..] else {
                panic!("{frames:?}")
            };
            let from = u64::from_be_bytes(from[..].try_into().unwrap());
            for (seq, payload) in batches.iter().filter(|(seq, _)| *seq >= from) {
                let seq = seq.to_be_bytes();
                let frames = [&peer[..], b"", b"", &seq, payload];
                replay.send_multipart(frames, 0).unwrap();
            }
            let end = u64::MAX.to_be_bytes();
            let frames = [&peer[..], b"", b"", &end, b""];
            replay.send_multipart(frames, 0).unwrap();
        }
    }
}

pub(crate) fn store(token: u32) -> Value {
    json!({
        "type": "BlockStored", "block_hashes": [token], "parent_block_hash": null,
        "token_ids": [token], "block_size": 1, "lora_id": null, "medium": "GPU", "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    })
}

/// The pages of the engine's HTTP, to be changed while it serves.
pub(crate) struct Pages {
    pub(crate) health: StatusCode,
    /// Value of `--api-key`: required below `/v1`, as by vLLM.
    pub(crate) key: Option<&'static str>,
    /// `/kv_event_sources`; 404 without.
    pub(crate) sources: Option<Value>,
    /// Calls of `/reset_prefix_cache`; `None` without development routes.
    pub(crate) resets: Option<u64>,
    pub(crate) is_sleeping: bool,
    /// What the next read of `/kv_cache_events` takes.
    pub(crate) events: Vec<Value>,
    /// Requests for one token.
    pub(crate) completions: u32,
    blocks: u32,
}

pub(crate) type Http = Arc<Mutex<Pages>>;

/// Where events are, as the engine binds and reports it.
pub(crate) fn sources((live, replay): &(String, String)) -> Option<Value> {
    let any = |endpoint: &str| endpoint.replace("127.0.0.1", "*");
    Some(json!({"0": {
        "enable_kv_cache_events": true, "endpoint": any(live), "replay_endpoint": any(replay),
    }}))
}

fn page(pages: &mut Pages, path: &str, key: Option<&HeaderValue>) -> (StatusCode, String) {
    let is_let_in = pages
        .key
        .is_none_or(|wanted| key.is_some_and(|key| key == wanted));
    if path.starts_with("/v1") && !is_let_in {
        return (StatusCode::UNAUTHORIZED, "{}".to_owned());
    }
    let found = match path {
        "/health" => return (pages.health, String::new()),
        "/v1/models" => {
            let (base, adapter) = (
                json!({"id": "m", "max_model_len": 128}),
                json!({"id": "l", "parent": "m"}),
            );
            Some(json!({"data": [base, adapter]}).to_string())
        }
        "/metrics" => {
            let labels = format!("block_size=\"1\",num_gpu_blocks=\"{}\"", pages.blocks);
            let mut page = format!("vllm:cache_config_info{{{labels}}} 1.0\n");
            if let Some(resets) = pages.resets {
                page += "http_requests_total{handler=\"/reset_prefix_cache\",method=\"POST\"} ";
                page += &format!("{resets}.0\n");
            }
            Some(page)
        }
        "/reset_prefix_cache" if pages.resets.is_some() => {
            return (StatusCode::METHOD_NOT_ALLOWED, String::new());
        }
        "/is_sleeping" if pages.resets.is_some() => {
            Some(json!({"is_sleeping": pages.is_sleeping}).to_string())
        }
        "/v1/completions" => {
            pages.completions += 1;
            Some("{}".to_owned())
        }
        "/kv_cache_events" => {
            let events = std::mem::take(&mut pages.events);
            Some(Value::from(events).to_string())
        }
        "/kv_event_sources" => pages.sources.as_ref().map(Value::to_string),
        _ => None,
    };
    found.map_or((StatusCode::NOT_FOUND, String::new()), |page| {
        (StatusCode::OK, page)
    })
}

/// Starts the engine's HTTP. Returns its URL and its pages.
pub(crate) async fn http(
    tasks: &TaskTracker,
    stop: &CancellationToken,
    blocks: u32,
) -> (String, Http) {
    let pages = Arc::new(Mutex::new(Pages {
        health: StatusCode::OK,
        key: None,
        sources: None,
        resets: None,
        is_sleeping: false,
        events: Vec::new(),
        completions: 0,
        blocks,
    }));
    let shown = Arc::clone(&pages);
    let app = Router::new().fallback(move |uri: Uri, headers: HeaderMap| async move {
        page(
            &mut shown.lock().unwrap(),
            uri.path(),
            headers.get(AUTHORIZATION),
        )
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let stop = stop.clone();
    tasks.spawn(async move {
        let serve = axum::serve(listener, app);
        let ended = serve.with_graceful_shutdown(stop.cancelled_owned());
        ended.await.unwrap();
    });
    (url, pages)
}

pub(crate) fn remove(token: u32) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": [token], "medium": "GPU", "group_idx": 0})
}

pub(crate) fn clear() -> Value {
    json!({"type": "AllBlocksCleared"})
}
