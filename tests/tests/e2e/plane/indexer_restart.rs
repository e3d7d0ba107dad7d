//! An indexer is killed, and the log does not wait for it.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use warmroute_plane::{LogStatus, NatsConfig, NatsPlane, Plane as _};
use warmroute_proto::snapshot::SnapshotPointer;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{LogPosition, Namespace, codec};

use super::equality::{generations, until_equal};
use super::load::{sequential, under_load};
use crate::fleet::{Engines, Flags, Fleet, Mode};

/// A snapshot is due every second.
const CAP: Duration = Duration::from_secs(60);

/// The log is so small that it drops the dead indexer's last record. The restarted indexer loads a
/// snapshot and the records behind it, as a new one does. No source begins a new generation.
#[tokio::test(flavor = "multi_thread")]
async fn an_indexer_comes_back_from_a_snapshot_when_the_log_is_trimmed() {
    let engines = Engines {
        count: 2,
        ranks: 2,
        blocks: 300,
        flags: &["--profile", "instant"],
    };
    let mode = Mode::Nats {
        indexers: 2,
        routers: 2,
    };
    let flags = Flags {
        init: &["--max-bytes", "512KiB"],
        indexer: &["--snapshot-every-secs", "1"],
        ..Flags::default()
    };
    let mut fleet = Fleet::start(mode, engines, flags).await;
    sequential(&fleet, 20, 20).await;
    let log = connect(&fleet).await;
    let dead = fleet.indexes().remove(0);
    let before = generations(&fleet, &dead).await;

    let last = log_status(&log).await.last;
    fleet.parts().indexers[0].kill();
    let (trimmed, served) = under_load(&fleet, 4, until_trimmed(&log, last)).await;
    println!(
        "after {served} requests the log begins at {}, behind {last}",
        trimmed.first
    );

    // On a busy machine the last snapshot may be older than such a small log's first record.
    timeout(CAP, until_snapshot(&log, trimmed.first))
        .await
        .unwrap();
    fleet.parts().indexers[0].restart().await;
    fleet.add_indexer().await;
    let started = Instant::now();
    until_equal(&fleet).await;
    println!("equal {:?} after their start", started.elapsed());
    for index in [&dead, &fleet.indexes()[2]] {
        assert_eq!(
            generations(&fleet, index).await,
            before,
            "somebody began anew"
        );
        let metrics = format!("{index}/metrics");
        let restores = fleet
            .metric_at(metrics, "warmroute_indexer_restores_total")
            .await;
        assert!(restores >= 1.0, "{index} took no snapshot");
    }
    sequential(&fleet, 21, 20).await;
    fleet.until_idle().await;
}

async fn connect(fleet: &Fleet) -> NatsPlane {
    let url = fleet.parts().server.lock().await.url();
    let config = NatsConfig::new(url, Namespace::from("prod"), "test");
    NatsPlane::connect(config).await.unwrap()
}

async fn log_status(log: &NatsPlane) -> LogStatus {
    log.log_status().await.unwrap()
}

/// Whether the newest snapshot reaches the log's first record.
async fn until_snapshot(log: &NatsPlane, first: LogPosition) {
    let key = Subjects::new(&Namespace::from("prod")).snapshot_pointer_key();
    loop {
        let entry = log.get(key.clone()).await.unwrap();
        let pointer: Option<SnapshotPointer> =
            entry.map(|entry| codec::decode(&entry.value).unwrap());
        if pointer.is_some_and(|pointer| pointer.newest.at.position >= first) {
            return;
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// Whether the record at this position is gone.
async fn until_trimmed(log: &NatsPlane, position: LogPosition) -> LogStatus {
    loop {
        let status = log_status(log).await;
        if status.first > position {
            return status;
        }
        sleep(Duration::from_millis(50)).await;
    }
}
