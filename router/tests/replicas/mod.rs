//! Routers without a proxy: a core with its replica, on any plane.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use futures_util::StreamExt as _;
use futures_util::future::ready;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warmroute_plane::{
    Appended, Broadcast, Connection, InitConfig, LogMessage, LogStatus, LogTail, MemoryPlane,
    MemoryPlaneConfig, NatsConfig, NatsPlane, Plane, PlaneFuture, PlaneStream, PutIf,
    RegistryEntry, RegistryEvent, Revision, ServiceRequest,
};
use warmroute_proto::load::SlotEnd;
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{
    BlockSize, Generation, LogPosition, Namespace, RouterId, Seed, StreamIdentity,
};
use warmroute_router::replication::{Replication, ReplicationHandle};
use warmroute_router::route::{
    Core, CoreConfig, Knobs, Prompt, RouteRequest, SlotEvent, SlotSink as _,
};
use warmroute_router::shared_core::SharedCore;
use warmroute_router::sync::{StatusDetail, ViewStatus};

/// Timeout of a broken test.
const SOON: Duration = Duration::from_secs(60);

pub(crate) struct Router {
    pub(crate) router: RouterId,
    pub(crate) plane: Arc<dyn Plane>,
    pub(crate) handle: ReplicationHandle,
    pub(crate) ready: Arc<AtomicBool>,
    desk: Arc<SharedCore>,
    slots: Vec<u64>,
    rng: Rng,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Router {
    pub(crate) fn start(number: u8, plane: Arc<dyn Plane>) -> Self {
        let router = RouterId([number; 16]);
        let mut core = Core::new(CoreConfig {
            knobs: Knobs::default(),
            router,
            incarnation: Generation(0),
            seed: number.into(),
        });
        core.set_workers(&[entry("a"), entry("b"), entry("c")]);
        let desk = SharedCore::new(core);
        let subjects = Subjects::new(&Namespace::from("t"));
        let (replication, handle) =
            Replication::new(router, Arc::clone(&desk), Arc::clone(&plane), subjects);
        let ready = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&ready);
        let stop = CancellationToken::new();
        let run = replication.run(move || told.store(true, Ordering::Relaxed), stop.clone());
        Self {
            router,
            plane,
            handle,
            ready,
            desk,
            slots: Vec::new(),
            rng: Rng::with_seed(number.into()),
            stop,
            task: TaskTracker::new().spawn(run),
        }
    }

    fn admit(&mut self) {
        let family = self.rng.u32(..5);
        let blocks = self.rng.u32(1..60);
        let tokens: Vec<u32> = (0..blocks * 16 + 3).map(|at| family << 20 | at).collect();
        let prompt = Prompt::new(&tokens, BlockSize::new(16).unwrap(), Seed::PLAIN);
        let ask = RouteRequest {
            model: "m",
            prompt: &prompt,
            exclude: &[],
            leg: warmroute_router::route::Leg::Whole,
        };
        self.slots.push(self.desk.admit(&ask, None).unwrap().0.slot);
    }

    /// Opens slots.
    pub(crate) fn open(&mut self, count: usize) {
        for _ in 0..count {
            self.admit();
        }
    }

    /// Opens, grows and ends slots at random; as many stay open.
    pub(crate) fn work(&mut self, steps: usize) {
        for _ in 0..steps {
            self.admit();
            let index = self.rng.usize(..self.slots.len());
            let counter = self.slots[index];
            self.desk.note(SlotEvent::Grow { counter, blocks: 1 });
            self.slots.swap_remove(index);
            let end = SlotEnd::Completed;
            self.desk.note(SlotEvent::End { counter, end });
        }
    }

    pub(crate) fn end_all(&mut self) {
        for counter in std::mem::take(&mut self.slots) {
            let end = SlotEnd::Aborted;
            self.desk.note(SlotEvent::End { counter, end });
        }
    }

    pub(crate) async fn incarnation(&self) -> Option<Generation> {
        self.handle
            .status(StatusDetail::Summary)
            .await
            .unwrap()
            .incarnation
    }

    /// Number of a router's requests in this router's view.
    pub(crate) fn held(&self, of: RouterId) -> u64 {
        self.desk.core().digest(of).count
    }

    /// Number of all requests in this router's view.
    pub(crate) fn left(&self) -> usize {
        self.desk.core().counts().open_slots
    }

    /// Stops like SIGTERM after the drain.
    pub(crate) async fn stop(mut self) {
        self.stop.cancel();
        (&mut self.task).await.unwrap();
    }

    /// Stops like SIGKILL.
    pub(crate) fn kill(self) {
        drop(self);
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn entry(name: &str) -> WorkerEntry {
    WorkerEntry {
        models: vec!["m".into()],
        block_size: BlockSize::new(16),
        main_attention_only: true,
        ..WorkerEntry::new(name, format!("http://{name}:8000"))
    }
}

/// Every router is followed by every other at its last number, with its digest and its sources.
pub(crate) async fn all_agree(routers: &[Router]) -> bool {
    let mut snapshots = Vec::new();
    for router in routers {
        snapshots.push(router.handle.status(StatusDetail::Sources).await.unwrap());
    }
    snapshots.iter().all(|of| {
        let truth = &of.replicas[0];
        truth.standing == ViewStatus::Own
            && snapshots.iter().all(|by| {
                let mut views = by.replicas.iter();
                views.any(|view| {
                    let follows = matches!(view.standing, ViewStatus::Own | ViewStatus::Following);
                    let place = (view.router, view.incarnation, view.number, view.digest);
                    follows
                        && place == (truth.router, truth.incarnation, truth.number, truth.digest)
                        && view.sources == truth.sources
                })
            })
    })
}

pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let end = Instant::now() + SOON;
    while !holds().await {
        assert!(Instant::now() < end, "not in time: {what}");
        sleep(Duration::from_millis(10)).await;
    }
}

pub(crate) fn memory() -> Arc<dyn Plane> {
    Arc::new(MemoryPlane::new(MemoryPlaneConfig {
        identity: StreamIdentity {
            created_unix_ns: 1,
            nonce: 1,
        },
        log_bytes_max: 1 << 20,
        queue_max: 4096,
    }))
}

pub(crate) async fn nats(server: &crate::NatsServer, name: &str) -> Arc<dyn Plane> {
    let config = NatsConfig::new(server.url(), Namespace::from("t"), name);
    let init = InitConfig {
        max_bytes: 64 << 20,
        max_age: Duration::from_secs(3600),
        snapshots_max_bytes: 64 << 20,
        ..InitConfig::default()
    };
    Arc::new(NatsPlane::init(config, init).await.unwrap())
}

/// A plane that loses broadcasts on their way in.
pub(crate) struct Lossy {
    plane: Arc<dyn Plane>,
    lost_percent: Arc<AtomicU32>,
    rng: Arc<Mutex<Rng>>,
}

impl Lossy {
    pub(crate) fn new(plane: Arc<dyn Plane>, seed: u64) -> Arc<Self> {
        Arc::new(Self {
            plane,
            lost_percent: Arc::default(),
            rng: Arc::new(Mutex::new(Rng::with_seed(seed))),
        })
    }

    pub(crate) fn lose(&self, percent: u32) {
        self.lost_percent.store(percent, Ordering::Relaxed);
    }
}

impl Plane for Lossy {
    fn payload_max(&self) -> usize {
        self.plane.payload_max()
    }

    fn subscribe(&self, subject: String) -> PlaneFuture<'_, PlaneStream<Broadcast>> {
        let (lost, rng) = (Arc::clone(&self.lost_percent), Arc::clone(&self.rng));
        Box::pin(async move {
            let messages = self.plane.subscribe(subject).await?;
            let kept = messages.filter(move |_| {
                ready(rng.lock().unwrap().u32(..100) >= lost.load(Ordering::Relaxed))
            });
            let kept: PlaneStream<Broadcast> = Box::pin(kept);
            Ok(kept)
        })
    }

    fn connection(&self) -> tokio::sync::watch::Receiver<Connection> {
        self.plane.connection()
    }

    fn log_status(&self) -> PlaneFuture<'_, LogStatus> {
        self.plane.log_status()
    }

    fn append(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, Appended> {
        self.plane.append(subject, payload)
    }

    fn last_on(&self, subject: String) -> PlaneFuture<'_, Option<LogMessage>> {
        self.plane.last_on(subject)
    }

    fn at(&self, position: LogPosition) -> PlaneFuture<'_, Option<LogMessage>> {
        self.plane.at(position)
    }

    fn tail(&self, after: LogPosition, batch_max: usize) -> PlaneFuture<'_, LogTail> {
        self.plane.tail(after, batch_max)
    }

    fn get(&self, key: String) -> PlaneFuture<'_, Option<RegistryEntry>> {
        self.plane.get(key)
    }

    fn put(
        &self,
        key: String,
        value: Bytes,
        condition: PutIf,
        lease: Option<Duration>,
    ) -> PlaneFuture<'_, Revision> {
        self.plane.put(key, value, condition, lease)
    }

    fn delete(&self, key: String, revision: Revision) -> PlaneFuture<'_, ()> {
        self.plane.delete(key, revision)
    }

    fn watch(&self, prefix: String) -> PlaneFuture<'_, PlaneStream<RegistryEvent>> {
        self.plane.watch(prefix)
    }

    fn put_snapshot(&self, name: String, blob: Bytes) -> PlaneFuture<'_, ()> {
        self.plane.put_snapshot(name, blob)
    }

    fn get_snapshot(&self, name: String) -> PlaneFuture<'_, Option<Bytes>> {
        self.plane.get_snapshot(name)
    }

    fn delete_snapshot(&self, name: String) -> PlaneFuture<'_, ()> {
        self.plane.delete_snapshot(name)
    }

    fn snapshots(&self) -> PlaneFuture<'_, Vec<String>> {
        self.plane.snapshots()
    }

    fn request(
        &self,
        subject: String,
        payload: Bytes,
        deadline: Duration,
    ) -> PlaneFuture<'_, Bytes> {
        self.plane.request(subject, payload, deadline)
    }

    fn serve(&self, subject: String) -> PlaneFuture<'_, PlaneStream<ServiceRequest>> {
        self.plane.serve(subject)
    }

    fn publish(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, ()> {
        self.plane.publish(subject, payload)
    }
}
