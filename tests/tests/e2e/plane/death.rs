//! Routers that are killed or stopped with open streams.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::streams::open;
use super::views::{agree, held, id};
use crate::fleet::{Engines, Flags, Fleet, Mode, PATIENCE};

/// One token a second: a thousand streams cost little. Each engine runs twice its share of them, so
/// that no stream waits for the end of another one.
const SLOW: &[&str] = &[
    "--itl-ms",
    "1000",
    "--prefill-tokens-per-sec",
    "1000000",
    "--max-num-seqs",
    "512",
];

/// A silent router is dead after 2.5 s. The next mechanism that forgets it is the lease, after 6 s.
/// Only a defect takes this long.
const GONE_MAX: Duration = Duration::from_secs(15);

async fn fleet() -> Fleet {
    let engines = Engines {
        count: 4,
        ranks: 1,
        blocks: 8192,
        flags: SLOW,
    };
    let mode = Mode::Nats {
        indexers: 1,
        routers: 3,
    };
    Fleet::start(mode, engines, Flags::default()).await
}

/// All routers but the first hold this many requests of the first.
async fn others_hold(fleet: &Fleet, of: &str, requests: u64) -> bool {
    for by in 1..fleet.routers.len() {
        if held(fleet, by, of).await != requests {
            return false;
        }
    }
    true
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_routers_thousand_streams_leave_no_load() {
    const OPEN: u64 = 1000;
    let fleet = fleet().await;
    let dead = id(&fleet, 0).await;
    let streams = open(&fleet.http, &fleet.routers[0].base(), OPEN).await;
    let others = open(&fleet.http, &fleet.routers[1].base(), 20).await;
    let seen = async |fleet: &Fleet| others_hold(fleet, &dead, OPEN).await;
    fleet.until("the others see a thousand", seen).await;
    fleet.routers[0].kill();
    let since = Instant::now();
    let freed = async |fleet: &Fleet| others_hold(fleet, &dead, 0).await;
    fleet
        .until_within(GONE_MAX, "its load is gone", freed)
        .await;
    println!(
        "SIGKILL with {OPEN} streams: load gone after {:?}",
        since.elapsed()
    );
    let idle = async |fleet: &Fleet| fleet.counted("active").await == 20;
    fleet.until("the engines ended its requests", idle).await;
    assert_eq!(fleet.load(1).await.0, 20, "the living keep theirs");
    assert_eq!(fleet.load(2).await.0, 20);
    drop((streams, others));
    fleet.routers[0].restart().await;
    let ready = async |fleet: &Fleet| fleet.is_ready(&fleet.routers[0].base()).await;
    fleet.until("it is back", ready).await;
    fleet.until_idle().await;
    fleet
        .until("all routers agree", async |fleet| agree(fleet).await)
        .await;
}

/// The pause exceeds silence, lease and proof: the router is declared dead, its streams continue,
/// and it returns with all of them. Another router's equally long streams keep their load.
#[tokio::test(flavor = "multi_thread")]
async fn a_paused_routers_load_goes_and_comes_back_once() {
    const PAUSE: Duration = Duration::from_secs(20);
    const OPEN: u64 = 200;
    const KEPT: u64 = 100;
    let fleet = fleet().await;
    let (paused, steady) = (id(&fleet, 0).await, id(&fleet, 1).await);
    let streams = open(&fleet.http, &fleet.routers[0].base(), OPEN).await;
    let others = open(&fleet.http, &fleet.routers[1].base(), KEPT).await;
    let seen = async |fleet: &Fleet| others_hold(fleet, &paused, OPEN).await;
    fleet.until("the others see its streams", seen).await;
    let kept = async |fleet: &Fleet| held(fleet, 2, &steady).await == KEPT;
    fleet.until("and those of the other one", kept).await;

    fleet.routers[0].signal("STOP");
    let since = Instant::now();
    let freed = async |fleet: &Fleet| others_hold(fleet, &paused, 0).await;
    fleet
        .until_within(GONE_MAX, "its load is gone", freed)
        .await;
    println!("SIGSTOP: load gone after {:?}", since.elapsed());
    while since.elapsed() < PAUSE {
        for by in [1, 2] {
            assert_eq!(fleet.load(by).await.0, KEPT, "long streams keep their load");
        }
        sleep(Duration::from_millis(500)).await;
    }
    fleet.routers[0].signal("CONT");
    let since = Instant::now();
    let back = async |fleet: &Fleet| {
        for by in 0..3 {
            let (requests, ..) = fleet.load(by).await;
            assert!(
                requests <= OPEN + KEPT,
                "{by} counts {requests}: some twice"
            );
        }
        others_hold(fleet, &paused, OPEN).await && agree(fleet).await
    };
    fleet
        .until_caught(PATIENCE, "its load is back, with equal digests", back)
        .await;
    println!("back after {:?}, under equal digests", since.elapsed());
    assert_eq!(fleet.counted("active").await, OPEN + KEPT);
    drop((streams, others));
    fleet.until_idle().await;
    fleet
        .until("all routers agree", async |fleet| agree(fleet).await)
        .await;
}
