//! The shim over real ZMQ sockets and HTTP on the loopback interface, with the in-process plane.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking, its helpers too"
)]

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use bytes::Bytes;
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warmroute_proto::bus::{LogTail, MemoryPlane, MemoryPlaneConfig, Plane, PlaneStream};
use warmroute_proto::registry::{ResyncReason, ResyncRequest, WorkerEntry};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{
    BlockSize, DpRank, EngineHealth, EngineSeq, Generation, Heartbeat, LogPosition, Namespace,
    Record, Source, StreamIdentity, TierState, WorkerId, codec,
};
use warmroute_shim::{Handle, Service, ShimConfig};

const DEADLINE: Duration = Duration::from_secs(20);

// --- a fake engine: PUB, ROUTER and a few HTTP routes

enum Order {
    Publish(Value),
    /// Into the replay buffer only.
    PublishLost(Value),
    Restart,
}

struct FakeEngine {
    orders: Sender<Order>,
    thread: Option<JoinHandle<()>>,
    live: String,
    replay: String,
}

impl FakeEngine {
    fn start() -> Self {
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

    fn publish(&self, event: Value) {
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
    let mut batches: Vec<Vec<u8>> = Vec::new();
    let mut life = 0;
    loop {
        match orders.recv_timeout(Duration::from_millis(5)) {
            Ok(Order::Restart) => {
                life += 1;
                batches.clear();
                drop((live, replay));
                live = bind(&context, zmq::PUB, &ends.0);
                replay = bind(&context, zmq::ROUTER, &ends.1);
            }
            Ok(order) => {
                let (event, is_lost) = match order {
                    Order::Publish(event) => (event, false),
                    Order::PublishLost(event) => (event, true),
                    Order::Restart => continue,
                };
                let payload = rmp_serde::to_vec(&json!([life, [event], 0])).unwrap();
                let seq = batches.len() as u64;
                if !is_lost {
                    let frames = [Vec::new(), seq.to_be_bytes().to_vec(), payload.clone()];
                    live.send_multipart(frames, 0).unwrap();
                }
                batches.push(payload);
            }
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return,
        }
        while let Ok(frames) = replay.recv_multipart(zmq::DONTWAIT) {
            let [peer, _, from] = &frames[..] else {
                panic!("{frames:?}")
            };
            let from = u64::from_be_bytes(from[..].try_into().unwrap());
            for (seq, payload) in (0_u64..).zip(&batches).filter(|(seq, _)| *seq >= from) {
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

fn store(token: u32) -> Value {
    json!({
        "type": "BlockStored", "block_hashes": [token], "parent_block_hash": null,
        "token_ids": [token], "block_size": 1, "lora_id": null, "medium": "GPU", "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    })
}

async fn http(tasks: &TaskTracker, stop: &CancellationToken) -> String {
    let models = json!({"data": [{"id": "m", "max_model_len": 128}, {"id": "l", "parent": "m"}]});
    let models = models.to_string();
    let metrics = "vllm:cache_config_info{block_size=\"1\",num_gpu_blocks=\"64\"} 1.0\n";
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

// --- the shim beside it

struct World {
    engine: FakeEngine,
    plane: Arc<dyn Plane>,
    subjects: Subjects,
    handle: Handle,
    log: LogTail,
    heartbeats: PlaneStream<Bytes>,
    last: Option<Record>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

fn source() -> Source {
    Source {
        worker: WorkerId::from("w.1"),
        dp_rank: DpRank(0),
    }
}

async fn start(with_replay: bool) -> World {
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let engine = FakeEngine::start();
    let url = http(&tasks, &stop).await;
    let plane: Arc<dyn Plane> = Arc::new(MemoryPlane::new(MemoryPlaneConfig {
        identity: StreamIdentity {
            created_unix_ns: 1,
            nonce: 2,
        },
        log_bytes_max: 16 << 20,
        queue_max: 1024,
    }));
    let namespace = Namespace::from("test");
    let subjects = Subjects::new(&namespace);
    let mut config = ShimConfig::new(namespace, source().worker, url);
    config.kv_endpoint = Some(engine.live.clone());
    config.kv_replay_endpoint = with_replay.then(|| engine.replay.clone());
    let log = plane.tail(LogPosition(0), 64).await.unwrap();
    let heartbeats = plane
        .subscribe(subjects.heartbeat(&source()))
        .await
        .unwrap();
    let service = Service::new(config, Arc::clone(&plane)).unwrap();
    let handle = service.handle();
    tasks.spawn(service.run(stop.clone()));
    World {
        engine,
        plane,
        subjects,
        handle,
        log,
        heartbeats,
        last: None,
        tasks,
        stop,
    }
}

impl World {
    /// Reads the log until a record is as wanted.
    async fn record(&mut self, wanted: impl Fn(&Record) -> bool) -> Record {
        let wait = async {
            loop {
                if let Some(last) = self.last.take_if(|last| wanted(last)) {
                    return last;
                }
                for message in self.log.next().await.unwrap() {
                    self.last = Some(codec::decode(&message.payload).unwrap());
                }
            }
        };
        let record = timeout(DEADLINE, wait).await.expect("no such record");
        self.last = Some(record.clone());
        record
    }

    async fn heartbeat(&mut self, wanted: impl Fn(&Heartbeat) -> bool) -> Heartbeat {
        let wait = async {
            loop {
                let payload = self.heartbeats.next().await.unwrap();
                let heartbeat: Heartbeat = codec::decode(&payload).unwrap();
                if wanted(&heartbeat) {
                    return heartbeat;
                }
            }
        };
        timeout(DEADLINE, wait).await.expect("no such heartbeat")
    }

    async fn end(self) {
        self.stop.cancel();
        self.tasks.close();
        timeout(DEADLINE, self.tasks.wait()).await.unwrap();
        let key = self.subjects.worker_key(&source().worker);
        assert_eq!(self.plane.get(key).await.unwrap(), None, "deregistered");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_become_records_and_losses_are_repaired() {
    let mut world = start(true).await;
    world
        .heartbeat(|h| h.states.gpu == TierState::Complete)
        .await;
    world.engine.publish(store(1));
    let record = world.record(|record| record.after.count == 1).await;
    assert_eq!(record.source, source());
    assert_eq!(record.states.gpu, TierState::Complete);
    // Lost with nothing behind it: only the poll can find it.
    world
        .engine
        .orders
        .send(Order::PublishLost(store(2)))
        .unwrap();
    let record = world.record(|record| record.after.count == 2).await;
    assert_eq!(record.engine_seq, Some(EngineSeq(1)));
    assert_eq!(record.generation, Generation(1));
    let heartbeat = world
        .heartbeat(|h| h.number == Some(record.number) && h.health == EngineHealth::Healthy)
        .await;
    assert_eq!(heartbeat.after, record.after);
    let digest = world.handle.digest();
    assert_eq!(digest.sources[0].digest, Some(record.after.hex()));
    assert_eq!(digest.sources[0].state, "exact");
    assert!(world.handle.is_ready());
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_engine_gets_a_new_generation() {
    let mut world = start(true).await;
    world.engine.publish(store(1));
    world.record(|record| record.after.count == 1).await;
    world.engine.orders.send(Order::Restart).unwrap();
    world.engine.publish(store(7));
    let wanted = |record: &Record| record.generation == Generation(2) && record.after.count == 1;
    world.record(wanted).await;
    world
        .heartbeat(|h| h.states.gpu == TierState::Complete)
        .await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_worker_is_registered_and_resyncs_are_heard() {
    let mut world = start(false).await;
    let key = world.subjects.worker_key(&source().worker);
    let mut registry = world.plane.watch(key).await.unwrap();
    let wait = async {
        loop {
            if let Some(warmroute_proto::bus::RegistryEvent::Put { entry, .. }) =
                registry.next().await
            {
                let entry: WorkerEntry = codec::decode(&entry.value).unwrap();
                if !entry.models.is_empty() {
                    return entry;
                }
            }
        }
    };
    let entry = timeout(DEADLINE, wait).await.unwrap();
    assert_eq!(entry.models, ["m"]);
    assert_eq!(entry.loras[0].name, "l");
    assert_eq!(entry.block_size, BlockSize::new(1));
    assert_eq!(entry.blocks_per_rank, Some(64));
    assert_eq!(entry.max_model_len, Some(128));
    let request = ResyncRequest {
        source: source(),
        above: Generation(9),
        reason: ResyncReason::Gap,
    };
    let subject = world.subjects.resync(&source().worker);
    let payload = Bytes::from(codec::encode(&request).unwrap());
    world.plane.publish(subject, payload).await.unwrap();
    world
        .record(|record| record.generation == Generation(10))
        .await;
    world
        .heartbeat(|h| h.states.gpu == TierState::Unverified)
        .await;
    world.end().await;
}
