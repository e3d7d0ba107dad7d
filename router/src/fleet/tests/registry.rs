use std::sync::atomic::AtomicBool;

use bytes::Bytes;
use prometheus::IntCounter;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warmroute_plane::{PutIf, Revision};
use warmroute_proto::codec;
use warmroute_proto::registry::{DrainContext, DrainUntil, ShimEntry};

use super::super::registry::REPAIR_PERIOD;
use super::*;
use crate::clock::unix_time;

fn worker() -> WorkerId {
    WorkerId::from("w.0")
}

fn registry(plane: &Arc<dyn Plane>) -> Arc<FleetRegistry> {
    Arc::new(FleetRegistry {
        fleet: fleet(),
        plane: Arc::clone(plane),
        subjects: subjects(),
        ready: Arc::default(),
        unreadable: IntCounter::new("unreadable", "u").unwrap(),
        drains_read: AtomicBool::default(),
    })
}

/// One router, which follows the registry until it is dropped.
struct Router {
    registry: Arc<FleetRegistry>,
    stop: CancellationToken,
}

impl Router {
    fn start(plane: &Arc<dyn Plane>) -> Self {
        let registry = registry(plane);
        let stop = CancellationToken::new();
        drop(TaskTracker::new().spawn(Arc::clone(&registry).follow(stop.clone())));
        Self { registry, stop }
    }

    fn drain(&self) -> DrainState {
        self.registry.fleet.state().drains.drain(&worker())
    }

    async fn set_drain(&self, drain: DrainState) {
        let registry = &self.registry;
        match drain {
            DrainState::Draining => registry.drain(&worker(), DrainUntil::Undone).await,
            DrainState::Serving => registry.undrain(&worker()).await,
        }
        .unwrap();
    }

    fn unreadable(&self) -> u64 {
        self.registry.unreadable.get()
    }

    /// Waits, for a bounded time.
    async fn until(&self, condition: impl Fn(&Self) -> bool) {
        let holds = async {
            while !condition(self) {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(Duration::from_secs(60), holds).await.unwrap();
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn stored(plane: &Arc<dyn Plane>) -> Option<(DrainEntry, Revision)> {
    let found = plane.get(subjects().drain_key(&worker())).await.unwrap()?;
    Some((codec::decode(&found.value).unwrap(), found.revision))
}

#[tokio::test(start_paused = true)]
async fn a_drain_at_one_router_reaches_all_and_those_that_start_later() {
    let plane = plane();
    let routers = [Router::start(&plane), Router::start(&plane)];
    routers[0].set_drain(DrainState::Draining).await;
    assert_eq!(
        routers[0].drain(),
        DrainState::Draining,
        "valid when the command returns"
    );
    routers[1]
        .until(|router| router.drain() == DrainState::Draining)
        .await;
    let before = stored(&plane).await;
    routers[1].set_drain(DrainState::Draining).await;
    assert_eq!(stored(&plane).await, before, "idempotent");
    drop(routers);
    let next = Router::start(&plane);
    next.until(|router| router.registry.drains_read()).await;
    assert_eq!(next.drain(), DrainState::Draining);
    next.set_drain(DrainState::Serving).await;
    let last = Router::start(&plane);
    last.until(|router| router.registry.drains_read()).await;
    assert_eq!(last.drain(), DrainState::Serving);
}

#[tokio::test(start_paused = true)]
async fn a_router_that_has_not_read_the_drains_writes_after_the_last_entry() {
    let plane = plane();
    let first = Router::start(&plane);
    first.set_drain(DrainState::Draining).await;
    let drained = registry(&plane).drain(&worker(), DrainUntil::Undone).await;
    drained.unwrap();
    assert_eq!(stored(&plane).await.unwrap().0.turn, 0);
    registry(&plane).undrain(&worker()).await.unwrap();
    let (last, _) = stored(&plane).await.unwrap();
    assert_eq!((last.drain, last.turn), (DrainState::Serving, 1));
}

#[tokio::test(start_paused = true)]
async fn a_drain_that_the_registry_lost_or_rolled_back_is_restored() {
    let plane = plane();
    let router = Router::start(&plane);
    router.set_drain(DrainState::Draining).await;
    let (first, _) = stored(&plane).await.unwrap();
    router.set_drain(DrainState::Serving).await;
    router.set_drain(DrainState::Draining).await;
    let (last, revision) = stored(&plane).await.unwrap();
    assert_eq!((first.turn, last.turn), (0, 2));

    let key = subjects().drain_key(&worker());
    plane.delete(key.clone(), revision).await.unwrap();
    let back = async || stored(&plane).await.is_some_and(|(entry, _)| entry == last);
    while !back().await {
        sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(router.drain(), DrainState::Draining);

    let older = DrainEntry {
        drain: DrainState::Serving,
        ..first
    };
    let value = Bytes::from(codec::encode(&older).unwrap());
    plane.put(key, value, PutIf::Always, None).await.unwrap();
    while !back().await {
        sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(router.drain(), DrainState::Draining);
}

/// Another life of the worker's shim takes the lease and registers.
async fn register(plane: &Arc<dyn Plane>, life: u8) {
    let shim = ShimEntry {
        instance: [life; 16],
        version: "0".to_owned(),
    };
    let mut registration = entry("w.0", 16);
    registration.version = life.to_string();
    for (key, value) in [
        (subjects().shim_key(&worker()), codec::encode(&shim)),
        (
            subjects().worker_key(&worker()),
            codec::encode(&registration),
        ),
    ] {
        let value = Bytes::from(value.unwrap());
        plane.put(key, value, PutIf::Always, None).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_until_restart_ends_with_the_shims_life_and_one_until_undone_does_not() {
    let plane = plane();
    register(&plane, 1).await;
    let routers = [Router::start(&plane), Router::start(&plane)];
    let until = async |state| {
        for router in &routers {
            router.until(|router| router.drain() == state).await;
        }
    };
    let drain = async |until| routers[0].registry.drain(&worker(), until).await.unwrap();
    let shown = || routers[0].registry.fleet.drain_until(&worker());

    drain(DrainUntil::Restart).await;
    until(DrainState::Draining).await;
    assert_eq!(shown(), Some(DrainUntil::Restart));
    // Its present life registers again.
    register(&plane, 1).await;
    sleep(Duration::from_secs(5)).await;
    until(DrainState::Draining).await;
    register(&plane, 2).await;
    until(DrainState::Serving).await;
    assert_eq!(shown(), None);

    // An operator's drain stands, whatever came before it, and is not weakened after it.
    drain(DrainUntil::Restart).await;
    drain(DrainUntil::Undone).await;
    drain(DrainUntil::Restart).await;
    assert_eq!(shown(), Some(DrainUntil::Undone));
    register(&plane, 3).await;
    sleep(Duration::from_secs(5)).await;
    until(DrainState::Draining).await;
}

async fn stored_context(plane: &Arc<dyn Plane>) -> Option<DrainContext> {
    let found = plane.get(subjects().drain_context_key(&worker())).await;
    found
        .unwrap()
        .map(|found| codec::decode(&found.value).unwrap())
}

/// What another router wrote before the entry of its drain.
async fn put_context(plane: &Arc<dyn Plane>, until: DrainUntil, turn: u64) {
    let context = DrainContext {
        worker: worker(),
        turn,
        shim: None,
        until,
    };
    let (key, value) = (
        subjects().drain_context_key(&worker()),
        codec::encode(&context).unwrap(),
    );
    plane
        .put(key, value.into(), PutIf::Always, None)
        .await
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_drain_until_undone_is_not_weakened_in_the_same_turn() {
    // One router has written its context, the other one all.
    let plane = plane();
    put_context(&plane, DrainUntil::Undone, 0).await;
    let second = registry(&plane);
    let worker = worker();
    let entry = async {
        sleep(Duration::from_millis(200)).await;
        let entry = DrainEntry {
            worker: worker.clone(),
            drain: DrainState::Draining,
            turn: 0,
            set_unix_s: unix_time().as_secs(),
        };
        let (key, value) = (
            subjects().drain_key(&worker),
            codec::encode(&entry).unwrap(),
        );
        let put = plane.put(key, value.into(), PutIf::Absent, None);
        put.await.unwrap();
    };
    let drained = second.drain(&worker, DrainUntil::Restart);
    let ((), drained) = tokio::join!(entry, drained);
    drained.unwrap();
    let until = stored_context(&plane).await.map(|context| context.until);
    assert_eq!(until, Some(DrainUntil::Undone));
    // The reverse order.
    let plane = self::plane();
    put_context(&plane, DrainUntil::Restart, 0).await;
    let router = registry(&plane);
    router.drain(&worker, DrainUntil::Undone).await.unwrap();
    let until = stored_context(&plane).await.map(|context| context.until);
    assert_eq!(until, Some(DrainUntil::Undone));
}

/// Its router failed between the two writes, or its turn is over.
#[tokio::test(start_paused = true)]
async fn a_context_without_a_drain_says_nothing() {
    let plane = plane();
    put_context(&plane, DrainUntil::Undone, 0).await;
    let router = registry(&plane);
    let until = async |until| {
        router.drain(&worker(), until).await.unwrap();
        assert_eq!(router.fleet.drain_until(&worker()), Some(until));
        router.undrain(&worker()).await.unwrap();
    };
    until(DrainUntil::Restart).await;
    until(DrainUntil::Undone).await;
    until(DrainUntil::Restart).await;
}

/// The registry is deleted, or restored from a copy that has an earlier drain.
#[tokio::test(start_paused = true)]
async fn a_drain_until_restart_ends_also_if_the_registry_lost_it_in_between() {
    for has_older_copy in [false, true] {
        let plane = plane();
        register(&plane, 1).await;
        let router = Router::start(&plane);
        router.set_drain(DrainState::Draining).await;
        router.set_drain(DrainState::Serving).await;
        let (registry, restart) = (&router.registry, DrainUntil::Restart);
        registry.drain(&worker(), restart).await.unwrap();
        // The router's watch sees it.
        sleep(REPAIR_PERIOD).await;
        let context = stored_context(&plane).await;
        let (entry, revision) = stored(&plane).await.unwrap();
        let keys = [
            subjects().drain_key(&worker()),
            subjects().drain_context_key(&worker()),
        ];
        match has_older_copy {
            true => put_context(&plane, DrainUntil::Undone, 0).await,
            false => {
                let found = plane.get(keys[1].clone()).await.unwrap().unwrap();
                plane.delete(keys[1].clone(), found.revision).await.unwrap();
            }
        }
        plane.delete(keys[0].clone(), revision).await.unwrap();
        sleep(2 * REPAIR_PERIOD).await;
        assert_eq!(stored(&plane).await.map(|(entry, _)| entry), Some(entry));
        assert_eq!(stored_context(&plane).await, context);
        register(&plane, 2).await;
        router
            .until(|router| router.drain() == DrainState::Serving)
            .await;
    }
}

/// A router that restarts in between finds the context in the registry.
#[tokio::test(start_paused = true)]
async fn a_drain_until_restart_ends_after_a_restart_of_all_routers() {
    let plane = plane();
    register(&plane, 1).await;
    let first = Router::start(&plane);
    first
        .registry
        .drain(&worker(), DrainUntil::Restart)
        .await
        .unwrap();
    drop(first);
    register(&plane, 2).await;
    let next = Router::start(&plane);
    next.until(|router| router.registry.drains_read()).await;
    register(&plane, 2).await;
    next.until(|router| router.drain() == DrainState::Serving)
        .await;
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_drain_is_counted_and_changes_nothing() {
    let plane = plane();
    let router = Router::start(&plane);
    router.set_drain(DrainState::Draining).await;
    let another = DrainEntry {
        worker: WorkerId::from("another"),
        ..stored(&plane).await.unwrap().0
    };
    let key = subjects().drain_key(&worker());
    for value in [codec::encode(&another).unwrap(), b"nonsense".to_vec()] {
        let before = router.unreadable();
        plane
            .put(key.clone(), value.into(), PutIf::Always, None)
            .await
            .unwrap();
        router.until(|router| router.unreadable() > before).await;
    }
    assert_eq!(router.drain(), DrainState::Draining);
    assert_eq!(router.registry.fleet.drain_entry(&another.worker), None);
}

#[tokio::test]
async fn impossible_and_foreign_worker_entries_are_counted_and_change_nothing() {
    let plane = plane();
    let of_ranks = |worker: &str, ranks| WorkerEntry {
        ranks,
        ..entry(worker, 16)
    };
    for (key, entry) in [
        ("good", of_ranks("good", 2)),
        ("huge", of_ranks("huge", u32::MAX)),
        ("thief", of_ranks("good", 1)),
    ] {
        let key = subjects().worker_key(&WorkerId::from(key));
        let value = Bytes::from(codec::encode(&entry).unwrap());
        plane.put(key, value, PutIf::Always, None).await.unwrap();
    }
    let router = Router::start(&plane);
    let fleet = &router.registry.fleet;
    router
        .until(|router| router.unreadable() == 2 && !fleet.snapshot().is_empty())
        .await;
    let known = fleet.snapshot().into_iter();
    let known: Vec<_> = known.map(|member| member.entry).collect();
    assert_eq!(known, [of_ranks("good", 2)]);
}

/// Both routers forget an entry that says nothing any more, and neither writes it again.
#[tokio::test(start_paused = true)]
async fn an_entry_that_says_nothing_is_deleted_for_all_routers() {
    let plane = plane();
    let routers = [Router::start(&plane), Router::start(&plane)];
    let week = 7 * 86_400;
    let collect = async |after: u64| {
        let now = unix_time().as_secs() + after;
        routers[0].registry.collect_drains(now).await.unwrap();
    };
    routers[0].set_drain(DrainState::Draining).await;
    routers[1]
        .until(|router| router.drain() == DrainState::Draining)
        .await;
    collect(10 * week).await;
    assert!(stored(&plane).await.is_some(), "a drain until undone");

    routers[1].set_drain(DrainState::Serving).await;
    routers[0]
        .until(|router| router.drain() == DrainState::Serving)
        .await;
    collect(week - 60).await;
    assert!(stored(&plane).await.is_some(), "too young");
    collect(week + 60).await;
    assert_eq!(stored(&plane).await, None);
    let context = plane.get(subjects().drain_context_key(&worker())).await;
    assert_eq!(context.unwrap(), None);
    for router in &routers {
        let forgotten = |router: &Router| {
            router
                .registry
                .fleet
                .state()
                .drains
                .entry(&worker())
                .is_none()
        };
        router.until(forgotten).await;
    }
    sleep(4 * REPAIR_PERIOD).await;
    assert_eq!(stored(&plane).await, None, "no router restores it");

    routers[1].set_drain(DrainState::Draining).await;
    routers[0]
        .until(|router| router.drain() == DrainState::Draining)
        .await;
    assert_eq!(stored(&plane).await.unwrap().0.turn, 0);
}

/// Its context is written before its entry, and a collector may run in between.
#[tokio::test(start_paused = true)]
async fn the_context_of_a_drain_that_begins_is_not_collected() {
    let plane = plane();
    let router = Router::start(&plane);
    for drain in [DrainState::Draining, DrainState::Serving] {
        router.set_drain(drain).await;
    }
    let (entry, revision) = stored(&plane).await.unwrap();
    let context = DrainContext {
        worker: worker(),
        turn: entry.turn + 1,
        shim: None,
        until: DrainUntil::Restart,
    };
    let key = subjects().drain_context_key(&worker());
    let value = codec::encode(&context).unwrap();
    let put = plane.put(key.clone(), value.into(), PutIf::Always, None);
    put.await.unwrap();
    let later = unix_time().as_secs() + 8 * 86_400;
    router.registry.collect_drains(later).await.unwrap();
    let found = plane.get(key).await.unwrap().unwrap();
    let kept = codec::decode::<DrainContext>(&found.value).unwrap();
    assert_eq!(kept, context);
    assert_eq!(stored(&plane).await, Some((entry, revision)));
}

/// A worker that was drained until its restart and never came back.
#[tokio::test(start_paused = true)]
async fn a_drain_until_restart_of_a_worker_that_is_gone_for_good_ends() {
    let plane = plane();
    let router = Router::start(&plane);
    router.until(|router| router.registry.drains_read()).await;
    register(&plane, 1).await;
    let name = worker();
    let drained = router.registry.drain(&name, DrainUntil::Restart);
    drained.await.unwrap();
    let later = unix_time().as_secs() + 8 * 86_400;
    router.registry.collect_drains(later).await.unwrap();
    assert_eq!(router.drain(), DrainState::Draining, "its shim runs");
    for key in [
        subjects().shim_key(&worker()),
        subjects().worker_key(&worker()),
    ] {
        let found = plane.get(key.clone()).await.unwrap();
        if let Some(found) = found {
            plane.delete(key, found.revision).await.unwrap();
        }
    }
    router
        .registry
        .fleet
        .update(|state| state.forget(&worker()));
    router.registry.collect_drains(later).await.unwrap();
    assert_eq!(router.drain(), DrainState::Serving);
}
