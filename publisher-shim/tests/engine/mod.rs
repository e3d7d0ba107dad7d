//! A fake engine: PUB, ROUTER and a few HTTP routes.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub(crate) enum Order {
    Publish(Value),
    /// Into the replay buffer only.
    PublishLost(Value),
    Restart,
    /// The replay buffer keeps so many batches.
    Trim(usize),
    /// Tells when everything before it is done.
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
    let ends = (endpoint(&live), endpoint(&replay));
    told.send(ends.clone()).unwrap();
    let mut batches: VecDeque<(u64, Vec<u8>)> = VecDeque::new();
    let (mut life, mut next) = (0, 0_u64);
    loop {
        match orders.recv_timeout(Duration::from_millis(1)) {
            Ok(Order::Restart) => {
                life += 1;
                next = 0;
                batches.clear();
                drop((live, replay));
                live = bind(&context, zmq::PUB, &ends.0);
                replay = bind(&context, zmq::ROUTER, &ends.1);
            }
            Ok(Order::Tell(whom)) => whom.send(()).unwrap(),
            Ok(Order::Trim(keep)) => drop(batches.drain(..batches.len().saturating_sub(keep))),
            Ok(order) => {
                let (event, is_lost) = match order {
                    Order::Publish(event) => (event, false),
                    Order::PublishLost(event) => (event, true),
                    Order::Restart | Order::Trim(_) | Order::Tell(_) => continue,
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

pub(crate) async fn http(tasks: &TaskTracker, stop: &CancellationToken, blocks: u32) -> String {
    let models = json!({"data": [{"id": "m", "max_model_len": 128}, {"id": "l", "parent": "m"}]});
    let models = models.to_string();
    let labels = format!("block_size=\"1\",num_gpu_blocks=\"{blocks}\"");
    let metrics = format!("vllm:cache_config_info{{{labels}}} 1.0\n");
    let app = Router::new()
        .route("/health", get(|| async { "" }))
        .route("/v1/models", get(|| async move { models }))
        .route("/metrics", get(move || async move { metrics }));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let stop = stop.clone();
    tasks.spawn(async move {
        let serve = axum::serve(listener, app);
        let ended = serve.with_graceful_shutdown(stop.cancelled_owned());
        ended.await.unwrap();
    });
    url
}

pub(crate) fn remove(token: u32) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": [token], "medium": "GPU", "group_idx": 0})
}
