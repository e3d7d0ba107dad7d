//! Faults of the nats-server and its files; and a shim's death.

use serde_json::json;
use warmroute_plane::Plane as _;
use warmroute_proto::codec;
use warmroute_proto::snapshot::SnapshotPointer;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{LogPosition, Namespace};

use super::{Scene, api, connect, copy_dir, metric};
use crate::fleet::{Flags, NAMESPACE};

const BLOCKS: u32 = 3000;
const BLOCKS_PER_SEC: u32 = 2000;

fn flags() -> Flags {
    Flags {
        shim: &["--state-dir", "PLACE/state"],
        indexer: &["--snapshot-every-secs", "1"],
        ..Flags::default()
    }
}

/// SIGKILL of a shim; SIGKILL of the server; its directory rolled back to an older copy, which
/// rolls back log, registry and snapshots; the log deleted and recreated.
#[tokio::test(flavor = "multi_thread")]
async fn killed_rolled_back_and_deleted() {
    let scene = Scene::start(BLOCKS, BLOCKS_PER_SEC, flags()).await;
    shim_killed(&scene).await;
    server_killed(&scene).await;
    rolled_back(&scene).await;
    deleted(&scene).await;
    scene.end().await;
}

async fn shim_killed(scene: &Scene) {
    let shim = &scene.fleet.parts().shims[0];
    shim.kill();
    shim.restart().await;
    scene.is_right_after("shim killed").await;
}

async fn server_killed(scene: &Scene) {
    let mut server = scene.fleet.parts().server.lock().await;
    server.kill();
    server.restart().await;
    drop(server);
    scene.is_right_after("server killed").await;
}

/// The copy is taken from a killed server, so that it is consistent. All indexers have applied the
/// lost records, and the shims have their acknowledgements.
async fn rolled_back(scene: &Scene) {
    let mut server = scene.fleet.parts().server.lock().await;
    let (store, copy) = (server.store(), server.store().with_extension("older"));
    server.kill();
    copy_dir(&store, &copy);
    server.restart().await;
    drop(server);
    scene.is_right_after("server killed again").await;
    let mut server = scene.fleet.parts().server.lock().await;
    server.kill();
    std::fs::remove_dir_all(&store).unwrap();
    std::fs::rename(&copy, &store).unwrap();
    server.restart().await;
    drop(server);
    scene.is_right_after("log rolled back").await;
    let broken = "warmroute_indexer_logs_broken_total";
    for index in scene.fleet.indexes() {
        assert!(
            metric(&scene.fleet, &index, broken).await >= 1.0,
            "{index} saw nothing"
        );
    }
}

async fn deleted(scene: &Scene) {
    let plane = connect(&scene.fleet).await;
    let log = format!("STREAM.DELETE.wr_{NAMESPACE}");
    let told = api(&plane, &log, &json!({})).await.unwrap();
    assert_eq!(told["success"], true, "{told}");
    scene.fleet.init();
    scene.is_right_after("log deleted").await;
}

/// The newest snapshot has a wrong byte: a starting indexer logs it and loads the one before.
#[tokio::test(flavor = "multi_thread")]
async fn newest_snapshot_corrupt() {
    let scene = Scene::start(BLOCKS, BLOCKS_PER_SEC, flags()).await;
    let fleet = &scene.fleet;
    let plane = connect(fleet).await;
    let key = Subjects::new(&Namespace::from(NAMESPACE)).snapshot_pointer_key();
    let pointer = async || {
        let entry = plane.get(key.clone()).await.unwrap()?;
        Some(codec::decode::<SnapshotPointer>(&entry.value).unwrap())
    };
    let two = async |_: &_| {
        pointer()
            .await
            .is_some_and(|pointer| pointer.older.is_some())
    };
    fleet.until("there are two snapshots", two).await;
    for indexer in &fleet.parts().indexers {
        indexer.kill();
    }
    let pointer = pointer().await.unwrap();
    let name = pointer.newest.name;
    let mut blob = plane
        .get_snapshot(name.clone())
        .await
        .unwrap()
        .unwrap()
        .to_vec();
    let middle = blob.len() / 2;
    blob[middle] ^= 1;
    plane.delete_snapshot(name.clone()).await.unwrap();
    plane.put_snapshot(name, blob.into()).await.unwrap();
    for indexer in &fleet.parts().indexers {
        indexer.restart().await;
    }
    scene.is_right_after("newest snapshot corrupt").await;
    for index in fleet.indexes() {
        let corrupt = "warmroute_indexer_snapshots_skipped_total{reason=\"corrupt\"}";
        let skipped = metric(fleet, &index, corrupt).await;
        let restored = metric(fleet, &index, "warmroute_indexer_restores_total").await;
        assert!(
            skipped >= 1.0 && restored >= 1.0,
            "{index}: {skipped} {restored}"
        );
    }
    assert!(pointer.newest.at.position > LogPosition(0));
    scene.end().await;
}
