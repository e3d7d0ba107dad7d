//! The shipped permissions cover everything that the processes do with NATS.

use super::equality::until_equal;
use super::load::sequential;
use crate::fleet::{Access, Engines, Flags, Fleet, Mode};

/// The users of `deploy/nats/nats.conf` index, snapshot, restore, lead, route and replicate, and
/// the server refuses nothing.
#[tokio::test(flavor = "multi_thread")]
async fn the_shipped_permissions_are_enough_for_all_work() {
    let engines = Engines {
        count: 2,
        ranks: 2,
        blocks: 400,
        flags: &["--profile", "instant"],
    };
    let mode = Mode::Nats {
        indexers: 2,
        routers: 2,
    };
    let flags = Flags {
        indexer: &["--snapshot-every-secs", "1"],
        access: Access::LeastPrivilege,
        ..Flags::default()
    };
    let fleet = Fleet::start(mode, engines, flags).await;
    sequential(&fleet, 30, 20).await;
    let written = async |fleet: &Fleet| {
        let mut snapshots = 0.0;
        for index in fleet.indexes() {
            let page = format!("{index}/metrics");
            let outcome = "warmroute_indexer_snapshots_total{outcome=\"written\"}";
            snapshots += fleet.metric_at(page, outcome).await;
        }
        snapshots > 0.0
    };
    fleet.until("a snapshot is written", written).await;
    fleet.parts().indexers[0].restart().await;
    fleet.parts().shims[1].restart().await;
    until_equal(&fleet).await;
    let restored = format!("{}/metrics", fleet.indexes()[0]);
    let restores = fleet
        .metric_at(restored, "warmroute_indexer_restores_total")
        .await;
    assert!(restores >= 1.0, "the snapshot was not read");
    sequential(&fleet, 31, 20).await;
    fleet.until_idle().await;

    let (code, page) = fleet
        .command("doctor", &["doctor", "--expect-indexers", "2"])
        .await;
    println!("{page}");
    assert_eq!(
        code,
        Some(0),
        "the user of nats.conf looks, and finds nothing"
    );

    let mut pages: Vec<String> = fleet.indexes();
    pages.extend(fleet.parts().shims.iter().map(|shim| shim.base()));
    pages.extend((0..fleet.routers.len()).map(|router| fleet.admin(router, "")));
    for base in pages {
        let answer = fleet.http.get(format!("{base}/metrics")).send().await;
        let page = answer.unwrap().text().await.unwrap();
        let mut lines = page.lines().filter(|line| !line.starts_with('#'));
        let refused = lines.find(|line| line.contains("nats_server_errors_total"));
        let refused = refused.and_then(|line| line.rsplit(' ').next());
        assert_eq!(refused, Some("0"), "what the server refused to {base}");
    }
}
