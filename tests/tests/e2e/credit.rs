//! What the router credits is what the engines find cached.

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use serde_json::Value;
use warmroute_proto::{LocalHash, PrefixHash};

use crate::fleet::{BLOCK, Engines, Fleet};
use crate::traffic::{Served, request, serve};

const ENGINES: Engines = Engines {
    count: 3,
    ranks: 2,
    blocks: 400,
    flags: &["--profile", "instant"],
};

/// One after the other, each when the index knows the last one's blocks: no credit is ever wrong.
#[tokio::test(flavor = "multi_thread")]
async fn sequential_credit_is_what_the_engine_reports() {
    let fleet = Fleet::start(ENGINES, &[]).await;
    fleet.until_indexed().await;
    let mut rng = Rng::with_seed(1);
    let mut hits = 0;
    for number in 0..150 {
        let (path, body) = request(&mut rng);
        let served = serve(&fleet, path, &body).await;
        check(&served);
        assert_eq!(served.state, "exact", "request {number}");
        assert_eq!(
            served.overlap_blocks * BLOCK,
            served.cached_tokens,
            "request {number} of {} tokens",
            served.prompt_tokens
        );
        hits += served.cached_tokens;
        fleet.until_indexed().await;
    }
    assert!(hits > 0, "the requests share prefixes");
    assert_eq!(indexed(&fleet).await, fleet.truth().await);
    fleet.until_idle().await;
}

/// Many at once: the sets still agree once it is quiet, and every slot is given back.
#[tokio::test(flavor = "multi_thread")]
async fn concurrent_requests_leave_equal_sets_and_no_slots() {
    let fleet = Fleet::start(ENGINES, &[]).await;
    let mut by_source: BTreeMap<(String, u64), (u64, u64)> = BTreeMap::new();
    let waves = (0..8).map(|seed| {
        let fleet = &fleet;
        async move {
            let mut rng = Rng::with_seed(seed);
            let mut served = Vec::new();
            for _ in 0..40 {
                let (path, body) = request(&mut rng);
                served.push(serve(fleet, path, &body).await);
            }
            served
        }
    });
    let mut wrong = 0;
    for served in futures_util::future::join_all(waves).await.iter().flatten() {
        check(served);
        let row = by_source
            .entry((served.worker.clone(), served.dp_rank))
            .or_default();
        row.0 += 1;
        row.1 += served.cached_tokens;
        wrong += u64::from(served.overlap_blocks * BLOCK != served.cached_tokens);
    }
    println!("source: requests, cached tokens; {wrong} of 320 changed between credit and prefill");
    for ((worker, rank), (requests, cached)) in by_source {
        println!("{worker}/{rank}: {requests}, {cached}");
    }
    fleet.until_indexed().await;
    assert_eq!(indexed(&fleet).await, fleet.truth().await);
    fleet.until_idle().await;
}

/// The rank in the header is the rank that served it.
fn check(served: &Served) {
    assert_eq!(served.dp_rank, served.served_by_rank, "{}", served.worker);
}

/// What the index holds, from its dump, in the form of [`Fleet::truth`].
async fn indexed(fleet: &Fleet) -> BTreeMap<(String, u64), BTreeSet<(String, String)>> {
    let answer = fleet.http.get(fleet.admin("/dump")).send().await.unwrap();
    let mut held: BTreeMap<_, BTreeSet<(String, String)>> = BTreeMap::new();
    let mut source = (String::new(), 0);
    for line in answer.text().await.unwrap().lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        if let Some(digest) = line.get("source") {
            let worker = digest["worker"].as_str().unwrap().to_owned();
            source = (worker, digest["dp_rank"].as_u64().unwrap());
            held.entry(source.clone()).or_default();
            continue;
        }
        let held = held.get_mut(&source).expect("its source came first");
        let (stored, removed) = (&line["stored"], &line["removed"]);
        let tier = |change: &Value| change["tier"].as_str().unwrap().to_owned();
        if let Some(blocks) = stored["blocks"].as_array() {
            let mut parent = stored["parent"].as_u64().map(PrefixHash);
            for block in blocks {
                let block = LocalHash(block.as_u64().unwrap());
                let prefix = PrefixHash::after(parent, block);
                parent = Some(prefix);
                held.insert((prefix.0.to_string(), tier(stored)));
            }
        } else if let Some(blocks) = removed["blocks"].as_array() {
            for block in blocks {
                held.remove(&(block.as_u64().unwrap().to_string(), tier(removed)));
            }
        } else {
            panic!("{line}");
        }
    }
    held
}
