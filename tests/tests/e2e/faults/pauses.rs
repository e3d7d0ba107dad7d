//! Processes that are stopped for longer than every lease and proof, and continue.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::{Scene, is_long, positions};
use crate::fleet::{Flags, Fleet, signal};

fn pause() -> Duration {
    Duration::from_secs(if is_long() { 30 } else { 8 })
}

/// A shim and an indexer at the same time; then the nats-server.
#[tokio::test(flavor = "multi_thread")]
async fn stopped_and_continued() {
    let flags = Flags {
        shim: &["--state-dir", "PLACE/state"],
        ..Flags::default()
    };
    let scene = Scene::start(3000, 2000, flags).await;
    let parts = scene.fleet.parts();
    let (shim, indexer) = (&parts.shims[0], &parts.indexers[1]);
    let end = Instant::now() + pause();
    shim.signal("STOP");
    indexer.signal("STOP");
    let watching = scene.fleet.indexes().remove(0);
    let honest = async |fleet: &Fleet| {
        let positions = positions(fleet, &watching).await.unwrap();
        let states: Vec<&str> = positions.iter().map(|row| &*row.1).collect();
        states == ["unknown", "exact"]
    };
    scene
        .fleet
        .until("its source is not known, the other one is", honest)
        .await;
    sleep_until(end).await;
    shim.signal("CONT");
    indexer.signal("CONT");
    scene.is_right_after("shim and indexer stopped").await;

    let server = parts.server.lock().await.pid();
    let end = Instant::now() + pause();
    signal(server, "STOP");
    sleep_until(end).await;
    signal(server, "CONT");
    scene.is_right_after("server stopped").await;
    scene.end().await;
}
