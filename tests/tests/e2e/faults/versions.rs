//! Bytes of an unknown version on every subject, under every key and in the store of a working
//! fleet.

use std::time::Duration;

use bytes::Bytes;
use warmroute_plane::{NatsPlane, Plane as _, PlaneError, PutIf};
use warmroute_proto::codec::VERSION;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{DpRank, Namespace, RouterId, Source, WorkerId};

use super::{Scene, connect, metric};
use crate::fleet::{Flags, Fleet, NAMESPACE, worker_name};

const UNREADABLE: &str = "warmroute_indexer_bad_registry_entries_total";

/// A message of this kind and the next version, with a meaningless body.
fn newer(kind: u8) -> Bytes {
    let mut bytes = vec![VERSION + 1, kind];
    bytes.extend_from_slice(b"what the next version says");
    bytes.into()
}

fn subjects() -> Subjects {
    Subjects::new(&Namespace::from(NAMESPACE))
}

fn source() -> Source {
    Source {
        worker: WorkerId::from(worker_name(0).as_str()),
        dp_rank: DpRank(0),
    }
}

/// Each one is a counted verdict at its reader. No process ends, and everything becomes exact
/// again.
#[tokio::test(flavor = "multi_thread")]
async fn a_newer_version_is_a_counted_verdict() {
    let flags = Flags {
        indexer: &["--snapshot-every-secs", "1"],
        ..Flags::default()
    };
    let scene = Scene::start_with(1, 3000, 2000, flags).await;
    let plane = connect(&scene.fleet).await;
    log_and_broadcasts(&scene.fleet, &plane).await;
    scene.is_right_after("newer records and broadcasts").await;
    registry(&scene.fleet, &plane).await;
    scene.is_right_after("newer entries").await;
    snapshot(&scene.fleet, &plane).await;
    scene.is_right_after("newer snapshot").await;
    scene.end().await;
}

/// The counters of every indexer, the first shim and the router.
async fn counts(fleet: &Fleet, at: At, name: &str) -> Vec<f64> {
    let pages = match at {
        At::Indexers => fleet.indexes(),
        At::Shim => vec![fleet.parts().shims[0].base()],
        At::Router => vec![fleet.admin(0, "")],
    };
    let mut counts = Vec::new();
    for page in pages {
        counts.push(metric(fleet, &page, name).await);
    }
    counts
}

#[derive(Clone, Copy, Debug)]
enum At {
    Indexers,
    Shim,
    Router,
}

/// Runs `act` and waits until each counter has grown.
async fn is_counted(fleet: &Fleet, at: At, name: &str, act: impl Future<Output = ()>) {
    let before = counts(fleet, at, name).await;
    act.await;
    let grown = async |fleet: &Fleet| {
        let now = counts(fleet, at, name).await;
        now.iter().zip(&before).all(|(now, before)| now > before)
    };
    fleet.until(&format!("{at:?} count {name}"), grown).await;
}

async fn log_and_broadcasts(fleet: &Fleet, plane: &NatsPlane) {
    let (to, source) = (subjects(), source());
    let say = async |subject: String, kind| plane.publish(subject, newer(kind)).await.unwrap();
    let append = async {
        let appended = plane.append(to.records(&source), newer(1)).await.unwrap();
        appended.await.unwrap();
    };
    let records = "warmroute_indexer_records_total{verdict=\"undecodable\"}";
    is_counted(fleet, At::Indexers, records, append).await;
    let heartbeats = "warmroute_indexer_heartbeats_total{verdict=\"undecodable\"}";
    is_counted(
        fleet,
        At::Indexers,
        heartbeats,
        say(to.heartbeat(&source), 2),
    )
    .await;
    let unread = "warmroute_shim_messages_unreadable_total";
    is_counted(fleet, At::Shim, unread, say(to.resync(&source.worker), 8)).await;
    let malformed = "warmroute_router_sync_verdicts_total{verdict=\"malformed\"}";
    for kind in [5, 9, 10] {
        is_counted(fleet, At::Router, malformed, say(to.load(), kind)).await;
    }
    let slots = fleet.get(fleet.admin(0, "/v1/slots")).await;
    let router = u128::from_str_radix(slots["router"].as_str().unwrap(), 16).unwrap();
    let router = RouterId(router.to_be_bytes());
    let ask = async {
        let asked = plane.request(to.load_requests(router), newer(11), Duration::from_secs(2));
        assert!(matches!(asked.await, Err(PlaneError::Unavailable(_))));
    };
    is_counted(fleet, At::Router, malformed, ask).await;
    let queries = "warmroute_indexer_queries_total{outcome=\"malformed\"}";
    let query = async {
        // Each of the two is drawn at random.
        for _ in 0..32 {
            let asked = plane.request(to.query(), newer(3), Duration::from_secs(2));
            assert!(matches!(asked.await, Err(PlaneError::Unavailable(_))));
        }
    };
    is_counted(fleet, At::Indexers, queries, query).await;
}

async fn registry(fleet: &Fleet, plane: &NatsPlane) {
    let (to, source) = (subjects(), source());
    // A leased key that is not renewed expires like any other.
    let lease = Some(Duration::from_secs(2));
    let put = async |key: String, kind, lease| {
        let put = plane.put(key, newer(kind), PutIf::Always, lease);
        put.await.unwrap();
    };
    let strange = WorkerId::from("newer");
    let at_router = "warmroute_router_bad_registry_entries_total";
    is_counted(
        fleet,
        At::Indexers,
        UNREADABLE,
        put(to.worker_key(&strange), 6, lease),
    )
    .await;
    is_counted(
        fleet,
        At::Router,
        at_router,
        put(to.worker_key(&strange), 6, lease),
    )
    .await;
    is_counted(
        fleet,
        At::Router,
        at_router,
        put(to.indexer_key("newer"), 16, lease),
    )
    .await;
    // Only the presence of these two keys has a meaning; their values are not read.
    put(to.snapshot_lease_key(), 17, lease).await;
    put(to.router_key(RouterId([7; 16])), 13, lease).await;
    // A shim takes its lock again when it is free, and checks its generation.
    let unread = "warmroute_shim_messages_unreadable_total";
    let taken = async {
        put(to.generation_key(&source), 7, None).await;
        put(to.shim_key(&source.worker), 18, lease).await;
    };
    is_counted(fleet, At::Shim, unread, taken).await;
}

/// Stores an unreadable pointer, and a blob with an unreadable head under the newest name.
async fn snapshot(fleet: &Fleet, plane: &NatsPlane) {
    let to = subjects();
    let written = async |_: &Fleet| !plane.snapshots().await.unwrap().is_empty();
    fleet.until("a snapshot is written", written).await;
    let indexers = &fleet.parts().indexers;
    indexers.iter().for_each(|indexer| indexer.kill());
    let newest = plane.snapshots().await.unwrap().pop().unwrap();
    let mut blob = plane
        .get_snapshot(newest.clone())
        .await
        .unwrap()
        .unwrap()
        .to_vec();
    // The format's version follows its magic bytes.
    blob[7] += 1;
    plane.delete_snapshot(newest.clone()).await.unwrap();
    plane.put_snapshot(newest, blob.into()).await.unwrap();
    let key = to.snapshot_pointer_key();
    plane
        .put(key, newer(15), PutIf::Always, None)
        .await
        .unwrap();
    for indexer in indexers {
        indexer.restart().await;
    }
    let skipped = "warmroute_indexer_snapshots_skipped_total{reason=\"corrupt\"}";
    for name in [UNREADABLE, skipped] {
        let counted = async |fleet: &Fleet| {
            let counts = counts(fleet, At::Indexers, name).await;
            counts.iter().all(|&count| count >= 1.0)
        };
        fleet
            .until(&format!("indexers count {name}"), counted)
            .await;
    }
}
