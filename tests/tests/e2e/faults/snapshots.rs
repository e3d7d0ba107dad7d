//! Indexers that are killed while they write a snapshot.

use std::time::Duration;

use fastrand::Rng;
use tokio::time::{Instant, sleep};
use warmroute_plane::{NatsPlane, Plane as _, RegistryEntry};
use warmroute_proto::registry::{IndexerEntry, SnapshotLease};
use warmroute_proto::snapshot::SnapshotPointer;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{Namespace, codec};
use xxhash_rust::xxh3::xxh3_128;

use super::{Scene, connect, metric};
use crate::fleet::{Flags, Fleet, NAMESPACE};

/// Large enough to make a write slow.
const BLOCKS: u32 = 40_000;

const KILLS: usize = 20;

/// The writer is killed at a random moment. The pointer never names a snapshot that cannot be
/// loaded, and the killed indexer becomes exact again. In the end every block is compared.
#[tokio::test(flavor = "multi_thread")]
async fn writer_killed_at_random_points() {
    let flags = Flags {
        indexer: &["--snapshot-every-secs", "1"],
        ..Flags::default()
    };
    let scene = Scene::start(BLOCKS, 10_000, flags).await;
    let plane = connect(&scene.fleet).await;
    let subjects = Subjects::new(&Namespace::from(NAMESPACE));
    let took = duration(&scene).await;
    let mut rng = Rng::new();
    let (mut longest, mut moved) = (Duration::ZERO, 0);
    for number in 0..KILLS {
        let before = pointer(&plane, &subjects).await;
        let (victim, lease) = writer(&scene.fleet, &plane, &subjects).await;
        let delay = took.mul_f64(rng.f64());
        sleep(delay).await;
        scene.fleet.parts().indexers[victim].kill();
        let since = Instant::now();
        // The test does not rely on the lease, which would only delay the other indexer.
        drop(
            plane
                .delete(subjects.snapshot_lease_key(), lease.revision)
                .await,
        );
        let after = pointer(&plane, &subjects).await;
        let is_moved = before != after;
        moved += usize::from(is_moved);
        all_loadable(&plane, &subjects).await;
        scene.fleet.parts().indexers[victim].restart().await;
        scene.until_all_exact().await;
        longest = longest.max(since.elapsed());
        println!(
            "{number}: indexer {victim} killed {delay:?} into a write of about {took:?}; pointer moved: \
             {is_moved}; exact after {:?}",
            since.elapsed()
        );
    }
    println!("the pointer had moved {moved} times of {KILLS}; exact after at most {longest:?}");
    scene.is_right_after("indexers killed").await;
    scene.end().await;
}

/// Waits until an indexer begins to write.
async fn writer(fleet: &Fleet, plane: &NatsPlane, subjects: &Subjects) -> (usize, RegistryEntry) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        assert!(Instant::now() < deadline, "no snapshot is written");
        let lease = plane.get(subjects.snapshot_lease_key()).await.unwrap();
        if let Some(lease) = lease {
            let said: SnapshotLease = codec::decode(&lease.value).unwrap();
            let entry = plane.get(subjects.indexer_key(&said.writer)).await.unwrap();
            let entry = entry.map(|entry| codec::decode::<IndexerEntry>(&entry.value).unwrap());
            if let Some(url) = entry.and_then(|entry| entry.url) {
                let victim = fleet.indexes().iter().position(|base| *base == url);
                return (victim.expect("one of ours"), lease);
            }
        }
        sleep(Duration::from_millis(1)).await;
    }
}

/// Size of a snapshot of full caches.
async fn duration(scene: &Scene) -> Duration {
    let full = async |fleet: &Fleet| {
        let digest = fleet.get(format!("{}/v1/digest", fleet.indexes()[0])).await;
        let mut sources = digest["sources"].as_array().unwrap().iter();
        sources.all(|source| source["blocks"].as_u64() > Some(u64::from(BLOCKS) * 9 / 10))
    };
    scene.fleet.until("the caches are full", full).await;
    let before = written(&scene.fleet).await;
    let more = async |fleet: &Fleet| written(fleet).await.1 > before.1;
    scene.fleet.until("a snapshot is written", more).await;
    let after = written(&scene.fleet).await;
    Duration::from_secs_f64((after.0 - before.0) / (after.1 - before.1))
}

/// Total seconds and number of snapshots.
async fn written(fleet: &Fleet) -> (f64, f64) {
    let (mut seconds, mut count) = (0.0, 0.0);
    for index in fleet.indexes() {
        let name = "warmroute_indexer_snapshot_duration_seconds";
        seconds += metric(fleet, &index, &format!("{name}_sum")).await;
        count += metric(fleet, &index, &format!("{name}_count")).await;
    }
    (seconds, count)
}

async fn pointer(plane: &NatsPlane, subjects: &Subjects) -> Option<SnapshotPointer> {
    let entry = plane.get(subjects.snapshot_pointer_key()).await.unwrap();
    entry.map(|entry| codec::decode(&entry.value).unwrap())
}

/// Each snapshot that the pointer names is present and whole.
async fn all_loadable(plane: &NatsPlane, subjects: &Subjects) {
    let mut named = pointer(plane, subjects).await;
    while let Some(bad) = not_loadable(plane, named.as_ref()).await {
        // The other indexer may have moved the pointer and deleted the snapshot.
        let now = pointer(plane, subjects).await;
        assert_ne!(now, named, "{bad} cannot be loaded");
        named = now;
    }
}

async fn not_loadable(plane: &NatsPlane, pointer: Option<&SnapshotPointer>) -> Option<String> {
    let named = pointer.map(|pointer| [Some(&pointer.newest), pointer.older.as_ref()]);
    for named in named.into_iter().flatten().flatten() {
        let blob = plane.get_snapshot(named.name.clone()).await.unwrap();
        let is_whole = blob.is_some_and(|blob| {
            let parts = blob.split_last_chunk::<16>();
            parts.is_some_and(|(all, checksum)| xxh3_128(all).to_le_bytes() == *checksum)
        });
        if !is_whole {
            return Some(named.name.clone());
        }
    }
    None
}
