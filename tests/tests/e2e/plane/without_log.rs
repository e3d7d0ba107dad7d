//! The plane without a log server: core NATS, and shims as the authority.

use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::equality::{all_exact, generations, until_equal};
use super::load::{sequential, under_load};
use crate::fleet::{Access, Engines, Flags, Fleet, Mode};

const MODE: Mode = Mode::Nats {
    indexers: 2,
    routers: 2,
};

async fn start() -> Fleet {
    let engines = Engines {
        count: 2,
        ranks: 2,
        blocks: 400,
        flags: &["--itl-ms", "2", "--prefill-tokens-per-sec", "50000"],
    };
    let flags = Flags {
        access: Access::WithoutLog,
        ..Flags::default()
    };
    Fleet::start(MODE, engines, flags).await
}

/// Until every index has an image of every source, and shows it as the engines have it.
async fn until_back(fleet: &Fleet, what: &str) {
    let back = Instant::now();
    let exact = async |fleet: &Fleet| all_exact(fleet).await;
    fleet.until("all is exact again", exact).await;
    println!("{what}: exact again {:?} after it was back", back.elapsed());
}

/// The credit is what engines report, whichever indexer answers which router. `doctor` finds
/// nothing but what the fleet is.
#[tokio::test(flavor = "multi_thread")]
async fn credit_without_a_log_is_what_engines_report() {
    let fleet = start().await;
    sequential(&fleet, 3, 60).await;
    until_equal(&fleet).await;
    let (code, printed) = fleet.command("doctor", &["doctor", "--json"]).await;
    let report: Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!(
        (code, &report["findings"]),
        (Some(0), &Value::Array(Vec::new()))
    );
    fleet.until_idle().await;
}

/// SIGKILL of each part in turn, under load. No request fails, and afterwards everything is equal
/// again. A part that missed records asks the shims for their images; the other indexer stays
/// right.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_part_of_a_plane_without_a_log_comes_back() {
    let fleet = start().await;
    fleet.until_indexed().await;
    let ((), served) = under_load(&fleet, 4, async {
        let parts = fleet.parts();
        for (part, what) in [(&parts.shims[0], "shim"), (&parts.indexers[0], "indexer")] {
            part.kill();
            sleep(Duration::from_secs(1)).await;
            part.restart().await;
            until_back(&fleet, what).await;
        }
        for away in [Duration::from_millis(200), Duration::from_secs(7)] {
            let mut server = parts.server.lock().await;
            server.kill();
            sleep(away).await;
            server.restart().await;
            drop(server);
            until_back(&fleet, "server").await;
        }
    })
    .await;
    println!("{served} requests, none failed");
    fleet.until_idle().await;
    until_equal(&fleet).await;
    fleet.routers[0].kill();
    fleet.routers[0].restart().await;
    let ready = async |fleet: &Fleet| fleet.all_ready().await;
    fleet.until("the router is ready", ready).await;
    sequential(&fleet, 2, 30).await;
    fleet.until_idle().await;
}

/// What is not sent again is not missed by those that have it: an indexer that joins gets images,
/// and then nothing changes.
#[tokio::test(flavor = "multi_thread")]
async fn indexers_that_join_cost_one_image_of_each_source() {
    let mut fleet = start().await;
    sequential(&fleet, 5, 20).await;
    let index = fleet.indexes().remove(0);
    let before = generations(&fleet, &index).await;
    for _ in 0..3 {
        fleet.add_indexer().await;
    }
    until_back(&fleet, "three indexers").await;
    until_equal(&fleet).await;
    let after = generations(&fleet, &index).await;
    for (source, before) in &before {
        let begun = after[source] - before;
        println!("{source}: {begun} generations for three indexers");
        assert!((1..=3).contains(&begun), "{source}: {begun} images");
    }
    sequential(&fleet, 6, 20).await;
    assert_eq!(generations(&fleet, &index).await, after);
    fleet.until_idle().await;
}
