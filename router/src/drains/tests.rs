use bytes::Bytes;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;
use warmroute_plane::{MemoryPlane, MemoryPlaneConfig};
use warmroute_proto::{Generation, Namespace, RouterId, StreamIdentity};

use super::*;
use crate::route::{Core, CoreConfig, Knobs};
use crate::shared_core::SharedCore;

fn plane() -> Arc<dyn Plane> {
    Arc::new(MemoryPlane::new(MemoryPlaneConfig {
        identity: StreamIdentity {
            created_unix_ns: 1,
            nonce: 1,
        },
        log_bytes_max: 1 << 20,
        queue_max: 16,
    }))
}

fn subjects() -> Subjects {
    Subjects::new(&Namespace::from("t"))
}

fn worker() -> WorkerId {
    WorkerId::from("w.0")
}

/// One router's, following until the test ends.
struct Router {
    drains: Arc<Drains>,
    unread: IntCounter,
    stop: CancellationToken,
}

impl Router {
    fn start(plane: &Arc<dyn Plane>) -> Self {
        let core = Core::new(CoreConfig {
            knobs: Knobs::default(),
            router: RouterId([0; 16]),
            incarnation: Generation(1),
            seed: 1,
        });
        let fleet = Fleet::new(SharedCore::new(core), None);
        let router = Self {
            drains: Drains::new(Arc::clone(plane), subjects(), fleet),
            unread: IntCounter::new("unread", "u").unwrap(),
            stop: CancellationToken::new(),
        };
        let drains = Arc::clone(&router.drains);
        let follow = drains.follow(Arc::default(), router.unread.clone(), router.stop.clone());
        drop(TaskTracker::new().spawn(follow));
        router
    }

    fn drain(&self) -> DrainState {
        let word = self.drains.of(&worker());
        word.map_or(DrainState::Serving, |word| word.drain)
    }

    /// Does not wait for ever for what does not come.
    async fn until(&self, holds: impl Fn(&Self) -> bool) {
        let held = async {
            while !holds(self) {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(Duration::from_secs(60), held).await.unwrap();
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn held(plane: &Arc<dyn Plane>) -> Option<(DrainEntry, Revision)> {
    let found = plane.get(subjects().drain_key(&worker())).await.unwrap()?;
    Some((codec::decode(&found.value).unwrap(), found.revision))
}

#[tokio::test(start_paused = true)]
async fn every_router_follows_whichever_was_told_and_so_does_the_next_one() {
    let plane = plane();
    let routers = [Router::start(&plane), Router::start(&plane)];
    routers[0]
        .drains
        .say(&worker(), DrainState::Draining)
        .await
        .unwrap();
    assert_eq!(
        routers[0].drain(),
        DrainState::Draining,
        "at once, where it was said"
    );
    routers[1]
        .until(|router| router.drain() == DrainState::Draining)
        .await;
    let before = held(&plane).await;
    routers[1]
        .drains
        .say(&worker(), DrainState::Draining)
        .await
        .unwrap();
    assert_eq!(held(&plane).await, before, "said twice, it is the same");
    drop(routers);
    let next = Router::start(&plane);
    next.until(|router| router.drains.is_read()).await;
    assert_eq!(next.drain(), DrainState::Draining);
    next.drains
        .say(&worker(), DrainState::Serving)
        .await
        .unwrap();
    let last = Router::start(&plane);
    last.until(|router| router.drains.is_read()).await;
    assert_eq!(last.drain(), DrainState::Serving);
}

#[tokio::test(start_paused = true)]
async fn a_router_that_has_not_read_yet_speaks_after_the_word_that_stands() {
    let plane = plane();
    let first = Router::start(&plane);
    first
        .drains
        .say(&worker(), DrainState::Draining)
        .await
        .unwrap();
    let fleet = Arc::clone(&first.drains.fleet);
    let unread = || Drains::new(Arc::clone(&plane), subjects(), Arc::clone(&fleet));
    unread().say(&worker(), DrainState::Draining).await.unwrap();
    assert_eq!(held(&plane).await.unwrap().0.turn, 0);
    unread().say(&worker(), DrainState::Serving).await.unwrap();
    let (last, _) = held(&plane).await.unwrap();
    assert_eq!((last.drain, last.turn), (DrainState::Serving, 1));
}

#[tokio::test(start_paused = true)]
async fn what_the_registry_lost_or_rolled_back_is_put_right() {
    let plane = plane();
    let router = Router::start(&plane);
    router
        .drains
        .say(&worker(), DrainState::Draining)
        .await
        .unwrap();
    let (first, _) = held(&plane).await.unwrap();
    router
        .drains
        .say(&worker(), DrainState::Serving)
        .await
        .unwrap();
    router
        .drains
        .say(&worker(), DrainState::Draining)
        .await
        .unwrap();
    let (last, revision) = held(&plane).await.unwrap();
    assert_eq!((first.turn, last.turn), (0, 2));

    let key = subjects().drain_key(&worker());
    plane.delete(key.clone(), revision).await.unwrap();
    let back = async || held(&plane).await.is_some_and(|(entry, _)| entry == last);
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

#[tokio::test(start_paused = true)]
async fn what_cannot_be_read_is_counted_and_changes_nothing() {
    let plane = plane();
    let router = Router::start(&plane);
    router
        .drains
        .say(&worker(), DrainState::Draining)
        .await
        .unwrap();
    let another = DrainEntry {
        worker: WorkerId::from("another"),
        ..held(&plane).await.unwrap().0
    };
    let key = subjects().drain_key(&worker());
    for value in [codec::encode(&another).unwrap(), b"nonsense".to_vec()] {
        let before = router.unread.get();
        plane
            .put(key.clone(), value.into(), PutIf::Always, None)
            .await
            .unwrap();
        router.until(|router| router.unread.get() > before).await;
    }
    assert_eq!(router.drain(), DrainState::Draining);
    assert_eq!(router.drains.of(&another.worker), None);
}

#[test]
fn a_late_event_is_not_taken_for_a_loss() {
    let mut words = Words::default();
    let said = |words: &mut Words, drain, revision| {
        let (entry, _) = words.next(&worker(), drain, 1).unwrap();
        words.told(entry.clone(), Revision(revision));
        entry
    };
    let first = said(&mut words, DrainState::Draining, 10);
    let second = said(&mut words, DrainState::Serving, 11);
    // The first one's event comes after the second one's acknowledgement.
    words.told(first, Revision(10));
    assert_eq!(words.drain(&worker()), DrainState::Serving);
    let [(entry, PutIf::Revision(Revision(10)))] = &words.lacking().collect::<Vec<_>>()[..] else {
        panic!("to be written over what was told, which fails if it was late");
    };
    assert_eq!(entry, &second);
    words.leave(&worker());
    words.told(second, Revision(11));
    assert_eq!(words.lacking().count(), 0);
}
