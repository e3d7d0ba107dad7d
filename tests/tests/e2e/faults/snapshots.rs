//! Indexers that die while they write a snapshot.

use std::time::Duration;

use fastrand::Rng;
use tokio::time::{Instant, sleep};
use warmroute_proto::bus::{NatsPlane, Plane as _, RegistryEntry};
use warmroute_proto::registry::{IndexerEntry, SnapshotLease};
use warmroute_proto::snapshot::SnapshotPointer;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{Namespace, codec};
use xxhash_rust::xxh3::xxh3_128;

use super::{Scene, connect, is_long, metric};
use crate::fleet::{Flags, Fleet, NAMESPACE};

/// Large enough that writing one takes a while.
const BLOCKS: u32 = 40_000;

fn kills() -> usize {
    if is_long() { 100 } else { 20 }
}

/// Whoever writes is killed at a random moment of it. The pointer never names what cannot be loaded, and
/// the killed one is exact again; in the end every block is compared.
#[tokio::test(flavor = "multi_thread")]
async fn writer_killed_at_random_points() {
    let flags = Flags {
        indexer: &["--snapshot-every-secs", "1"],
        ..Flags::default()
    };
    let scene = Scene::start(BLOCKS, 8_000, flags).await;
    let plane = connect(&scene.fleet).await;
    let subjects = Subjects::new(&Namespace::from(NAMESPACE));
    let mut rng = Rng::new();
    let written = async |fleet: &Fleet| duration(fleet).await.is_some();
    scene.fleet.until("a snapshot is written", written).await;
    let mut took = Duration::ZERO;
    let mut longest = Duration::ZERO;
    for number in 0..kills() {
        let (victim, lease) = writer(&scene.fleet, &plane, &subjects).await;
        took = duration(&scene.fleet).await.unwrap_or(took);
        let delay = took.mul_f64(rng.f64() * 1.2);
        sleep(delay).await;
        scene.fleet.parts().indexers[victim].kill();
        let since = Instant::now();
        // Nothing relies on the lease: it would only keep the other one waiting.
        drop(
            plane
                .delete(subjects.snapshot_lease_key(), lease.revision)
                .await,
        );
        let named = all_loadable(&plane, &subjects).await;
        scene.fleet.parts().indexers[victim].restart().await;
        scene.until_all_exact().await;
        longest = longest.max(since.elapsed());
        println!(
            "{number}: indexer {victim} killed {delay:?} into a write of about {took:?}; {named} \
             snapshots; exact after {:?}",
            since.elapsed()
        );
    }
    println!("exact again after at most {longest:?}");
    scene.is_right_after("indexers killed").await;
    scene.end().await;
}

/// Waits for one that begins to write.
async fn writer(fleet: &Fleet, plane: &NatsPlane, subjects: &Subjects) -> (usize, RegistryEntry) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        assert!(Instant::now() < deadline, "nobody writes snapshots");
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

/// Of a snapshot, on average; none if those who live wrote none.
async fn duration(fleet: &Fleet) -> Option<Duration> {
    let (mut sum, mut count) = (0.0, 0.0);
    for index in fleet.indexes() {
        let name = "warmroute_indexer_snapshot_duration_seconds";
        sum += metric(fleet, &index, &format!("{name}_sum")).await;
        count += metric(fleet, &index, &format!("{name}_count")).await;
    }
    (count > 0.0).then(|| Duration::from_secs_f64(sum / count))
}

/// How many snapshots the pointer names. Each is there and whole.
async fn all_loadable(plane: &NatsPlane, subjects: &Subjects) -> usize {
    let entry = plane.get(subjects.snapshot_pointer_key()).await.unwrap();
    let Some(entry) = entry else {
        return 0;
    };
    let pointer: SnapshotPointer = codec::decode(&entry.value).unwrap();
    let named = std::iter::once(pointer.newest).chain(pointer.older);
    let mut count = 0;
    for named in named {
        let blob = plane.get_snapshot(named.name.clone()).await.unwrap();
        let blob = blob.unwrap_or_else(|| panic!("{} is gone", named.name));
        let (all, checksum) = blob.split_last_chunk::<16>().expect("a snapshot");
        assert_eq!(xxh3_128(all).to_le_bytes(), *checksum, "{}", named.name);
        count += 1;
    }
    count
}
