//! An engine with a model of what it holds, a nats-server, and a reader of its log.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warmroute_plane::{InitConfig, NatsConfig, NatsPlane, Plane};
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{
    BlockSize, Change, Digest, DpRank, LogPosition, Namespace, PrefixHash, Record, RecordNumber,
    Seed, Source, Tier, WorkerId, codec, hash,
};
use warmroute_shim::{Handle, Service, ShimConfig};

use crate::engine::{FakeEngine, Http, Order, http, remove, store};
use crate::nats_server::NatsServer;

pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) struct World {
    pub(crate) server: NatsServer,
    pub(crate) engine: FakeEngine,
    pub(crate) url: String,
    pub(crate) http: Http,
    held: BTreeMap<u32, u32>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// A shim inside the test's process.
pub(crate) struct Shim {
    pub(crate) handle: Handle,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Shim {
    pub(crate) async fn end(self) {
        self.stop.cancel();
        self.tasks.close();
        timeout(DEADLINE, self.tasks.wait()).await.unwrap();
    }
}

pub(crate) fn source() -> Source {
    Source {
        worker: WorkerId::from("w.1"),
        dp_rank: DpRank(0),
    }
}

fn prefix(token: u32) -> PrefixHash {
    let size = BlockSize::new(1).unwrap();
    let local = hash::local_hashes(&[token], size, Seed::PLAIN);
    hash::prefix_hashes(None, &local).last().unwrap()
}

impl World {
    pub(crate) async fn start() -> Self {
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let (url, http) = http(&tasks, &stop, 1 << 20).await;
        let world = Self {
            server: NatsServer::start().await,
            engine: FakeEngine::start(),
            url,
            http,
            held: BTreeMap::new(),
            tasks,
            stop,
        };
        world.init().await;
        world
    }

    pub(crate) async fn init(&self) {
        let init = InitConfig {
            max_bytes: 64 << 20,
            snapshots_max_bytes: 64 << 20,
            ..InitConfig::default()
        };
        NatsPlane::init(self.nats("init"), init).await.unwrap();
    }

    fn nats(&self, name: &str) -> NatsConfig {
        NatsConfig::new(self.server.url(), Namespace::from("t"), name)
    }

    pub(crate) async fn plane(&self, name: &str) -> NatsPlane {
        NatsPlane::connect(self.nats(name)).await.unwrap()
    }

    pub(crate) fn config(&self) -> ShimConfig {
        let namespace = Namespace::from("t");
        ShimConfig {
            kv_endpoint: Some(self.engine.live.clone()),
            kv_replay_endpoint: Some(self.engine.replay.clone()),
            ..ShimConfig::new(namespace, source().worker, self.url.clone())
        }
    }

    pub(crate) async fn shim(&self, name: &str, config: ShimConfig) -> Shim {
        let plane: Arc<dyn Plane> = Arc::new(self.plane(name).await);
        let service = Service::new(config, plane).unwrap();
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let handle = service.handle();
        tasks.spawn(service.run(stop.clone()));
        Shim {
            handle,
            tasks,
            stop,
        }
    }

    pub(crate) fn store(&mut self, token: u32) {
        *self.held.entry(token).or_default() += 1;
        self.engine.publish(store(token));
    }

    pub(crate) fn remove(&mut self, token: u32) {
        let copies = self.held.get_mut(&token).expect("it is held");
        *copies -= 1;
        if *copies == 0 {
            self.held.remove(&token);
        }
        self.engine.publish(remove(token));
    }

    pub(crate) fn restart_engine(&mut self) {
        self.held.clear();
        self.engine.orders.send(Order::Restart).unwrap();
    }

    pub(crate) fn truth(&self) -> Digest {
        let mut digest = Digest::default();
        for &token in self.held.keys() {
            digest.insert(prefix(token), Tier::Gpu);
        }
        digest
    }

    /// Waits until the shim's last acknowledged record is the truth, and the log agrees.
    pub(crate) async fn until_equal(&self, shim: &Shim) -> Fold {
        let truth = self.truth();
        let is_equal = || {
            let sources = shim.handle.sources();
            let point = sources.first().and_then(|source| source.acknowledged);
            shim.handle.is_ready() && point.is_some_and(|point| point.after == truth)
        };
        let why = || format!("{truth:?} against {:?}", shim.handle.sources());
        until(is_equal, why).await;
        let fold = self.fold().await;
        assert_eq!(fold.digest, truth);
        fold
    }

    /// What an independent reader makes of the log from its beginning.
    pub(crate) async fn fold(&self) -> Fold {
        let plane = self.plane("reader").await;
        let last = plane.log_status().await.unwrap().last;
        let mut tail = plane.tail(LogPosition(0), 1000).await.unwrap();
        let mut fold = Fold::default();
        let mut at = LogPosition(0);
        while at < last {
            let messages = timeout(DEADLINE, tail.next()).await.unwrap().unwrap();
            for message in messages {
                at = message.position;
                fold.apply(&codec::decode(&message.payload).unwrap());
            }
        }
        fold
    }

    /// The models of the worker's registration.
    pub(crate) async fn models(&self) -> Vec<String> {
        let key = Subjects::new(&Namespace::from("t")).worker_key(&source().worker);
        let entry = self.plane("reader").await.get(key).await.unwrap();
        let entry = entry.map(|entry| codec::decode::<WorkerEntry>(&entry.value).unwrap());
        entry.map_or_else(Vec::new, |entry| entry.models)
    }

    pub(crate) async fn end(self) {
        self.stop.cancel();
        self.tasks.close();
        timeout(DEADLINE, self.tasks.wait()).await.unwrap();
    }
}

/// The sequencing rule and the fold, by definition.
#[derive(Debug, Default)]
pub(crate) struct Fold {
    pub(crate) generation: u64,
    pub(crate) generations: BTreeSet<u64>,
    pub(crate) digest: Digest,
    pub(crate) duplicates: u64,
    next: u64,
    held: BTreeSet<PrefixHash>,
}

impl Fold {
    fn apply(&mut self, record: &Record) {
        let RecordNumber(number) = record.number;
        if record.generation.0 < self.generation {
            return;
        }
        if record.generation.0 > self.generation {
            assert_eq!(number, 0, "a generation begins with its first record");
            self.generation = record.generation.0;
            self.generations.insert(self.generation);
            self.next = 0;
            self.held.clear();
            self.digest = Digest::default();
        }
        if number < self.next {
            self.duplicates += 1;
            return;
        }
        assert_eq!(number, self.next, "a gap in generation {}", self.generation);
        self.next += 1;
        for change in &record.changes {
            match change {
                Change::Stored { .. } => {
                    for prefix in change.stored_prefixes() {
                        assert!(self.held.insert(prefix), "stored twice");
                        self.digest.insert(prefix, Tier::Gpu);
                    }
                }
                Change::Removed { blocks, .. } => {
                    for prefix in blocks {
                        assert!(self.held.remove(prefix), "removed what is not held");
                        self.digest.remove(*prefix, Tier::Gpu);
                    }
                }
                Change::Cleared { .. } => {
                    self.held.clear();
                    self.digest = Digest::default();
                }
            }
        }
        assert_eq!(self.digest, record.after, "record {number}");
    }
}

pub(crate) async fn until(is_so: impl Fn() -> bool, why: impl Fn() -> String) {
    let deadline = Instant::now() + DEADLINE;
    while !is_so() {
        assert!(
            Instant::now() < deadline,
            "it does not come to that: {}",
            why()
        );
        sleep(Duration::from_millis(20)).await;
    }
}
