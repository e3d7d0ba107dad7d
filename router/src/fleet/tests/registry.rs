use std::sync::atomic::AtomicBool;

use bytes::Bytes;
use prometheus::IntCounter;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warmroute_plane::{PutIf, Revision};
use warmroute_proto::codec;
use warmroute_proto::registry::{DrainUntil, ShimEntry};

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

/// Two routers drain a worker, and neither has read the other's entry.
#[tokio::test(start_paused = true)]
async fn a_drain_until_undone_is_not_weakened_in_the_same_turn() {
    let (undone, restart) = (DrainUntil::Undone, DrainUntil::Restart);
    for order in [[undone, restart], [restart, undone]] {
        let (plane, worker) = (plane(), worker());
        let [one, other] = [registry(&plane), registry(&plane)];
        let (first, second) =
            tokio::join!(one.drain(&worker, order[0]), other.drain(&worker, order[1]));
        first.and(second).unwrap();
        let (entry, _) = stored(&plane).await.unwrap();
        assert_eq!((entry.drain, entry.until), (DrainState::Draining, undone));
    }
}

/// The registry is deleted, or restored from a copy that has an earlier drain.
#[tokio::test(start_paused = true)]
async fn a_drain_until_restart_ends_also_if_the_registry_lost_it_in_between() {
    for has_older_copy in [false, true] {
        let plane = plane();
        register(&plane, 1).await;
        let router = Router::start(&plane);
        router.set_drain(DrainState::Draining).await;
        let (older, _) = stored(&plane).await.unwrap();
        router.set_drain(DrainState::Serving).await;
        let (registry, restart) = (&router.registry, DrainUntil::Restart);
        registry.drain(&worker(), restart).await.unwrap();
        let (entry, revision) = stored(&plane).await.unwrap();
        let key = subjects().drain_key(&worker());
        if has_older_copy {
            let older = Bytes::from(codec::encode(&older).unwrap());
            plane.put(key, older, PutIf::Always, None).await.unwrap();
        } else {
            plane.delete(key, revision).await.unwrap();
        }
        sleep(2 * REPAIR_PERIOD).await;
        assert_eq!(stored(&plane).await.map(|(entry, _)| entry), Some(entry));
        register(&plane, 2).await;
        router
            .until(|router| router.drain() == DrainState::Serving)
            .await;
    }
}

/// A router that restarts in between finds the drain in the registry.
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
