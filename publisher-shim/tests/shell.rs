//! The shim over real ZMQ sockets and HTTP on the loopback interface, with the in-process plane.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking, its helpers too"
)]

mod engine;

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use bytes::Bytes;
use engine::{FakeEngine, Http, Order, Pages, clear, http, remove, sources, store};
use futures_util::StreamExt as _;
use serde_json::json;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warmroute_plane::{
    Broadcast, LogTail, MemoryPlane, MemoryPlaneConfig, Plane, PlaneStream, PutIf,
};
use warmroute_proto::query::SourceState;
use warmroute_proto::registry::{ResyncReason, ResyncRequest, WorkerEntry};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{
    BlockSize, DpRank, EngineHealth, EngineSeq, Generation, Heartbeat, LogPosition, Namespace,
    Record, RecordNumber, Source, StreamIdentity, TierState, WorkerId, codec,
};
use warmroute_shim::{Handle, Service, ShimConfig};

const DEADLINE: Duration = Duration::from_secs(20);

// --- the shim beside it

struct World {
    engine: FakeEngine,
    http: Http,
    plane: Arc<dyn Plane>,
    subjects: Subjects,
    handle: Handle,
    log: LogTail,
    heartbeats: PlaneStream<Broadcast>,
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
    start_with(|config, engine| {
        config.kv_endpoint = Some(engine.live.clone());
        config.kv_replay_endpoint = with_replay.then(|| engine.replay.clone());
    })
    .await
}

async fn start_with(set: impl FnOnce(&mut ShimConfig, &FakeEngine)) -> World {
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let engine = FakeEngine::start();
    let (url, http) = http(&tasks, &stop, 64).await;
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
    set(&mut config, &engine);
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
        http,
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
                let message = self.heartbeats.next().await.unwrap();
                let heartbeat: Heartbeat = codec::decode(&message.payload).unwrap();
                if wanted(&heartbeat) {
                    return heartbeat;
                }
            }
        };
        timeout(DEADLINE, wait).await.expect("no such heartbeat")
    }

    async fn until_leads_is(&self, wanted: bool) {
        let wait = async {
            while self.handle.leads() != wanted {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(DEADLINE, wait).await.expect("the lease");
    }

    fn say(&self, change: impl FnOnce(&mut Pages)) {
        change(&mut self.http.lock().unwrap());
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
    assert_eq!(digest.sources[0].state, SourceState::Exact);
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

/// Only its HTTP shows where its events are, and that they are elsewhere after a restart.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_tells_its_sockets_is_heard_and_heard_again_at_other_ones() {
    let mut world = start_with(|_, _| {}).await;
    let ends = (world.engine.live.clone(), world.engine.replay.clone());
    world.say(|pages| pages.sources = sources(&ends));
    world
        .heartbeat(|h| h.states.gpu == TierState::Complete)
        .await;
    world.engine.publish(store(1));
    world.record(|record| record.after.count == 1).await;
    world.say(|pages| pages.health = StatusCode::SERVICE_UNAVAILABLE);
    let (moved, ends) = std::sync::mpsc::channel();
    world.engine.orders.send(Order::Move(moved)).unwrap();
    let ends = ends.recv_timeout(DEADLINE).unwrap();
    assert_ne!(
        (&ends.0, &ends.1),
        (&world.engine.live, &world.engine.replay)
    );
    world.say(|pages| {
        pages.sources = sources(&ends);
        pages.health = StatusCode::OK;
    });
    world.engine.publish(store(7));
    world.engine.publish(store(8));
    let wanted = |record: &Record| record.generation > Generation(1) && record.after.count == 2;
    world.record(wanted).await;
    world
        .heartbeat(|h| h.states.gpu == TierState::Complete)
        .await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_answers_503_is_not_healthy() {
    let mut world = start(true).await;
    world.heartbeat(|h| h.health == EngineHealth::Healthy).await;
    world.say(|pages| pages.health = StatusCode::SERVICE_UNAVAILABLE);
    world
        .heartbeat(|h| h.health == EngineHealth::Unhealthy)
        .await;
    world.say(|pages| pages.health = StatusCode::OK);
    world.heartbeat(|h| h.health == EngineHealth::Healthy).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_worker_is_registered_and_resyncs_are_heard() {
    let mut world = start(false).await;
    let key = world.subjects.worker_key(&source().worker);
    let mut registry = world.plane.watch(key).await.unwrap();
    let wait = async {
        loop {
            if let Some(warmroute_plane::RegistryEvent::Put { entry, .. }) = registry.next().await {
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

#[tokio::test(flavor = "multi_thread")]
async fn row_30_a_reset_of_an_idle_engine_is_seen_and_flushed() {
    let mut world = start(true).await;
    world.say(|pages| pages.resets = Some(0));
    world.engine.publish(store(1));
    world
        .heartbeat(|h| h.states.gpu == TierState::Complete && h.after.count == 1)
        .await;
    // An engine that sleeps is not asked to compute.
    world.say(|pages| (pages.resets, pages.is_sleeping) = (Some(1), true));
    world
        .heartbeat(|h| h.states.gpu == TierState::Unverified)
        .await;
    world.say(|pages| {
        assert_eq!(pages.completions, 0);
        pages.is_sleeping = false;
    });
    let flushed = async {
        while world.http.lock().unwrap().completions == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(DEADLINE, flushed).await.expect("no flush");
    world.engine.publish(clear());
    world
        .heartbeat(|h| h.states.gpu == TierState::Complete && h.after.count == 0)
        .await;
    assert_eq!(world.http.lock().unwrap().completions, 1);
    world.end().await;
}

/// The other holder may have taken events of the idle engine.
#[tokio::test(flavor = "multi_thread")]
async fn a_shim_that_lost_its_lease_continues_no_numbers_of_a_route() {
    let mut world = start_with(|config, _| {
        config.kv_endpoint = Some(format!("{}/kv_cache_events", config.worker_url));
    })
    .await;
    let event = |number: u64| json!({"event_id": number, "data": {"type": "created"}});
    world.say(|pages| pages.events = vec![event(0), event(1)]);
    let is_credited = |h: &Heartbeat| h.states.gpu == TierState::Unverified;
    world.heartbeat(is_credited).await;
    let key = world.subjects.shim_key(&source().worker);
    let other = Bytes::from_static(b"other");
    let put = world.plane.put(key.clone(), other, PutIf::Always, None);
    let revision = put.await.unwrap();
    world.until_leads_is(false).await;
    world.plane.delete(key, revision).await.unwrap();
    let subject = world.subjects.heartbeat(&source());
    world.until_leads_is(true).await;
    world.heartbeats = world.plane.subscribe(subject).await.unwrap();
    for _ in 0..4 {
        let heartbeat = world.heartbeat(|_| true).await;
        assert!(!is_credited(&heartbeat), "{heartbeat:?}");
    }
    world.say(|pages| pages.events = vec![event(2)]);
    world.heartbeat(is_credited).await;
    world.end().await;
}

/// On one thread all other tasks wait for the rank's turn to end.
#[tokio::test]
async fn a_rank_with_much_to_do_lets_others_have_their_turn() {
    const BATCHES: u32 = 3_000;
    let mut world = start(true).await;
    world
        .heartbeat(|h| h.states.gpu == TierState::Complete)
        .await;
    for seq in 0..BATCHES {
        let event = if seq % 2 == 0 {
            store(seq)
        } else {
            remove(seq - 1)
        };
        world.engine.publish(event);
    }
    // This thread stands still until all of it waits in the socket.
    let (asked, done) = std::sync::mpsc::channel();
    world.engine.orders.send(Order::Tell(asked)).unwrap();
    done.recv().unwrap();
    let last = EngineSeq(u64::from(BATCHES) - 1);
    let record = world.record(|record| record.engine_seq == Some(last)).await;
    assert!(record.number > RecordNumber(20), "{}", record.number.0);
    world.end().await;
}
