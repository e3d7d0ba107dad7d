//! A shim is killed while its engine works.

use std::time::{Duration, SystemTime};

use fastrand::Rng;
use tokio::time::Instant;

use super::equality::{generations, states, until_equal};
use super::load::sequential;
use crate::fleet::traffic::{request, serve};
use crate::fleet::{BLOCK, Engines, Flags, Fleet, Mode};

/// Only a defect takes longer.
const LONG: Duration = Duration::from_secs(120);

const MODE: Mode = Mode::Nats {
    indexers: 2,
    routers: 2,
};

/// With its state, a restarted shim knows everything, even if the engine's replay buffer no longer
/// reaches the start. Without its state it reports `partial`, claims no wrong credit, and is exact
/// again after a reset of the engine's cache.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_shim_comes_back_as_its_state_allows() {
    let engines = Engines {
        count: 2,
        ranks: 1,
        blocks: 2000,
        flags: &["--profile", "instant", "--buffer-steps", "400"],
    };
    let flags = Flags {
        shim: &["--state-dir", "PLACE/state"],
        ..Flags::default()
    };
    let fleet = Fleet::start(MODE, engines, flags).await;
    sequential(&fleet, 6, 40).await;
    let checkpoint = |worker| {
        let file = format!("PLACE/state/worker-{worker}/0.checkpoint");
        fleet.placed(&[&file]).remove(0)
    };
    let index = fleet.indexes().remove(0);
    let before = generations(&fleet, &index).await;
    fill_replay_buffers(&fleet).await;
    let written = || [0, 1].map(|worker| modified(&checkpoint(worker)));
    let old = written();
    let renewed = async |_: &Fleet| {
        let pairs = written().into_iter().zip(old);
        pairs.into_iter().all(|(new, old)| new > old)
    };
    fleet
        .until("checkpoints that the buffers reach back to", renewed)
        .await;

    fleet.parts().shims.iter().for_each(|shim| shim.kill());
    std::fs::remove_file(checkpoint(1)).unwrap();
    let mut rng = Rng::with_seed(7);
    for _ in 0..30 {
        let (path, body) = request(&mut rng);
        serve(&fleet, path, &body).await;
    }
    for shim in &fleet.parts().shims {
        shim.restart().await;
    }
    let back = Instant::now();
    fleet
        .until("both sources are credited", async |fleet| {
            let states = states(fleet, &index).await;
            states["worker-0/0"] == "exact" && states["worker-1/0"] == "partial"
        })
        .await;
    println!("credited {:?} after the shims were back", back.elapsed());
    let after = generations(&fleet, &index).await;
    assert!(after.iter().all(|(source, new)| *new > before[source]));
    no_wrong_credit(&fleet, &mut rng).await;

    let reset = fleet.engine(1, "/reset_prefix_cache");
    fleet.http.post(reset).send().await.unwrap();
    let reset = Instant::now();
    while states(&fleet, &index).await["worker-1/0"] != "exact" {
        assert!(reset.elapsed() < LONG, "never exact after its reset");
        let (path, body) = request(&mut rng);
        serve(&fleet, path, &body).await;
    }
    // The shim reads the engine's count of resets each second, perhaps after the reset's batch: the
    // source is then unverified for a moment.
    let metrics = format!("{}/metrics", fleet.parts().shims[1].base());
    let counted = async |fleet: &Fleet| {
        let name = "warmroute_shim_resets_pending_total";
        fleet.metric_at(metrics.clone(), name).await >= 1.0
    };
    fleet.until("the shim has counted the reset", counted).await;
    until_equal(&fleet).await;
    sequential(&fleet, 8, 30).await;
    fleet.until_idle().await;
}

/// Requests with one source `partial`: the cached tokens are never below the credit.
async fn no_wrong_credit(fleet: &Fleet, rng: &mut Rng) {
    for _ in 0..60 {
        fleet.until_indexed_as(&["exact", "partial"]).await;
        let (path, body) = request(rng);
        let served = serve(fleet, path, &body).await;
        let (credited, cached) = (served.overlap_blocks * BLOCK, served.cached_tokens);
        if served.state == "exact" {
            assert_eq!(credited, cached);
        }
        // `unverified`: by an earlier report of the engine, which may have evicted since.
        assert!(
            credited <= cached || served.state == "unverified",
            "{} has {cached}, not {credited}",
            served.worker
        );
    }
}

/// An engine that still has all its batches replays them.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_shim_without_state_replays_from_the_start() {
    let engines = Engines {
        count: 2,
        ranks: 2,
        blocks: 400,
        flags: &["--profile", "instant"],
    };
    let fleet = Fleet::start(MODE, engines, Flags::default()).await;
    sequential(&fleet, 9, 40).await;
    let shim = &fleet.parts().shims[0];
    shim.kill();
    let mut rng = Rng::with_seed(10);
    for _ in 0..30 {
        let (path, body) = request(&mut rng);
        serve(&fleet, path, &body).await;
    }
    shim.restart().await;
    let back = Instant::now();
    until_equal(&fleet).await;
    println!("equal {:?} after the shim was back", back.elapsed());
    sequential(&fleet, 11, 30).await;
    fleet.until_idle().await;
}

fn modified(file: &str) -> Option<SystemTime> {
    std::fs::metadata(file)
        .and_then(|file| file.modified())
        .ok()
}

/// Sends requests until no replay buffer has its engine's first batches.
async fn fill_replay_buffers(fleet: &Fleet) {
    let mut rng = Rng::with_seed(12);
    let begin = Instant::now();
    let mut last = 0;
    while last < 450 {
        assert!(
            begin.elapsed() < LONG,
            "some engine has {last} batches only"
        );
        for _ in 0..20 {
            let (path, body) = request(&mut rng);
            serve(fleet, path, &body).await;
        }
        last = u64::MAX;
        for engine in 0..fleet.engines.len() {
            let truth = fleet.get(fleet.engine(engine, "/debug/blocks")).await;
            last = last.min(truth["ranks"][0]["last_seq"].as_u64().unwrap_or(0));
        }
    }
}
