//! An engine is killed and restarted on its ports, with an empty cache.

use std::collections::BTreeMap;

use fastrand::Rng;
use tokio::time::Instant;

use super::equality::{generations, states, until_equal};
use super::load::sequential;
use crate::fleet::traffic::{request, serve};
use crate::fleet::{BLOCK, Engines, Flags, Fleet, Mode};

/// Half of the requests go to the new life, and more at the beginning.
const REQUESTS_MAX: u32 = 2_000;

/// The old life's blocks are not credited to the new one, its generations are higher, and its
/// blocks are indexed.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_restarted_in_place_leaves_no_ghost() {
    let engines = Engines {
        count: 2,
        ranks: 2,
        blocks: 2000,
        flags: &["--profile", "instant"],
    };
    let mode = Mode::Nats {
        indexers: 2,
        routers: 2,
    };
    let fleet = Fleet::start(mode, engines, Flags::default()).await;
    sequential(&fleet, 3, 60).await;
    let index = fleet.indexes().remove(0);
    let before = generations(&fleet, &index).await;

    fleet.engines[0].process.kill();
    let killed = Instant::now();
    fleet
        .until("nothing is credited to the dead engine", async |fleet| {
            let mut credited = false;
            for index in fleet.indexes() {
                let states = states(fleet, &index).await;
                for source in ["worker-0/0", "worker-0/1"] {
                    credited |= ["exact", "partial", "unverified"].contains(&&*states[source]);
                }
            }
            !credited
        })
        .await;
    println!("no credit {:?} after the kill", killed.elapsed());
    fleet.engines[0].process.restart().await;
    let back = Instant::now();

    // Equal requests as before: the new life must hold what it is credited with.
    let mut rng = Rng::with_seed(3);
    let mut by_worker: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for number in 0.. {
        if by_worker.get("worker-0").is_some_and(|row| row.0 >= 20) {
            break;
        }
        assert!(
            number < REQUESTS_MAX,
            "the new life is not chosen: {by_worker:?}"
        );
        let (path, body) = request(&mut rng);
        let served = serve(&fleet, path, &body).await;
        let credited = served.overlap_blocks * BLOCK;
        assert!(
            credited <= served.cached_tokens,
            "a ghost at {}",
            served.worker
        );
        let row = by_worker.entry(served.worker).or_default();
        row.0 += 1;
        row.1 += credited;
    }
    println!("by worker: requests, credited tokens: {by_worker:?}");
    until_equal(&fleet).await;
    println!("equal {:?} after it was back", back.elapsed());
    let after = generations(&fleet, &index).await;
    for (source, old) in before {
        let is_new = source.starts_with("worker-0");
        assert!(!is_new || after[&source] > old, "{source} is still {old}");
        assert!(
            is_new || after[&source] == old,
            "{source} has no reason to begin anew"
        );
    }
    sequential(&fleet, 4, 30).await;
    fleet.until_idle().await;
}
