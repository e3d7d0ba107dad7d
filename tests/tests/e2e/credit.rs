//! The router's credit equals the engines' cached tokens.

use std::collections::BTreeMap;

use fastrand::Rng;
use serde_json::{Value, json};

use crate::fleet::traffic::{Served, request, serve};
use crate::fleet::{BLOCK, Engines, Flags, Fleet, Mode};

const ENGINES: Engines = Engines {
    count: 3,
    ranks: 2,
    blocks: 400,
    flags: &["--profile", "instant"],
};

on_both_planes!(sequential_credit_is_what_the_engine_reports);
on_both_planes!(blocks_with_a_lookahead_are_credited_as_the_engine_finds_them);
on_both_planes!(concurrent_requests_leave_equal_sets_and_no_slots);
on_both_planes!(without_an_index_prompts_return_to_the_worker_that_computed_them);

/// Sequential requests through every router in turn, each after every index has the previous one's
/// blocks: every credit is correct.
async fn sequential_credit_is_what_the_engine_reports(mode: Mode) {
    let fleet = Fleet::start(mode, ENGINES, Flags::default()).await;
    fleet.until_indexed().await;
    let (hits, late) = compare_credit(&fleet, 150).await;
    println!("{late} of 150 answers of the index were late");
    assert!(hits > 0, "the requests share prefixes");
    assert!(late < 75, "the index does not answer");
    let doubt = "hits may be shorter";
    assert!(
        !fleet.shim_log().contains(doubt),
        "the metrics are readable"
    );
    fleet.assert_indexed_is_true().await;
    fleet.until_idle().await;
}

/// Engines whose hashes cover the three tokens behind a block, as vLLM's with multi-module MTP.
async fn blocks_with_a_lookahead_are_credited_as_the_engine_finds_them(mode: Mode) {
    let engines = Engines {
        flags: &["--profile", "instant", "--lookahead", "3"],
        ..ENGINES
    };
    let fleet = Fleet::start(mode, engines, Flags::default()).await;
    // An engine's first events show it.
    for engine in 0..ENGINES.count {
        let body = json!({"prompt": vec![7; 40], "max_tokens": 1});
        let first = fleet.http.post(fleet.engine(engine, "/v1/completions"));
        assert!(
            first
                .json(&body)
                .send()
                .await
                .unwrap()
                .status()
                .is_success()
        );
    }
    fleet
        .until("every router knows the lookahead", async |fleet| {
            for router in 0..fleet.routers.len() {
                let shown = fleet.get(fleet.admin(router, "/workers")).await;
                let mut workers = shown["workers"].as_array().unwrap().iter();
                if !workers.all(|worker| worker["lookahead"] == 3) {
                    return false;
                }
            }
            true
        })
        .await;
    fleet.until_indexed().await;
    let (hits, _) = compare_credit(&fleet, 60).await;
    assert!(hits > 0, "the requests share prefixes");
    fleet.assert_indexed_is_true().await;
}

pub(crate) async fn compare_credit(fleet: &Fleet, requests: u32) -> (u64, u32) {
    let mut rng = Rng::with_seed(1);
    let requests = (0..requests).map(|_| request(&mut rng));
    compare_credit_of(fleet, requests).await
}

/// Sends requests one by one. Each credit must be what the engine reports. Returns the credited
/// tokens, and how many requests the index did not answer in time.
pub(crate) async fn compare_credit_of(
    fleet: &Fleet,
    requests: impl Iterator<Item = (&'static str, Value)>,
) -> (u64, u32) {
    let (mut hits, mut late) = (0, 0);
    // All engines are of one form.
    let state = fleet.form(0).best_state();
    for (number, (path, body)) in requests.enumerate() {
        let served = serve(fleet, path, &body).await;
        check(&served);
        if served.is_without_answer() {
            late += 1;
        } else {
            assert_eq!(served.state, state, "request {number}");
            let credited = served.overlap_blocks * BLOCK;
            let tokens = served.prompt_tokens;
            assert_eq!(
                credited, served.cached_tokens,
                "request {number} of {tokens} tokens"
            );
            hits += credited;
        }
        fleet.until_indexed().await;
    }
    (hits, late)
}

/// Concurrent requests: the sets agree when it is quiet, and every slot is freed.
async fn concurrent_requests_leave_equal_sets_and_no_slots(mode: Mode) {
    let fleet = Fleet::start(mode, ENGINES, Flags::default()).await;
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
    fleet.assert_indexed_is_true().await;
    fleet.until_idle().await;
}

/// What one router sent, the others know too. The policy `approx` stands for engines without events
/// and for an index that does not answer.
async fn without_an_index_prompts_return_to_the_worker_that_computed_them(mode: Mode) {
    let flags = Flags {
        router: &["--policy", "approx"],
        ..Flags::default()
    };
    let fleet = Fleet::start(mode, ENGINES, flags).await;
    let bodies = (0..8).map(|topic| {
        let text: String = (0..20)
            .map(|rule| format!("Rule {rule} of topic {topic}: be exact. "))
            .collect();
        json!({"model": "mock", "prompt": text, "max_tokens": 1})
    });
    let mut sent = Vec::new();
    for body in bodies {
        let served = serve(&fleet, "/v1/completions", &body).await;
        assert_eq!(
            (served.basis.as_str(), served.cached_tokens),
            ("load_only", 0)
        );
        sent.push((body, served.worker, served.dp_rank));
        fleet.until_idle().await;
    }
    // A request that has just ended is a prediction.
    let is_over =
        async |fleet: &Fleet| fleet.metric("warmroute_router_predicted_samples").await == 0.0;
    fleet.until("predictions end", is_over).await;
    // Each prompt goes to another router than before.
    fleet.url("");
    for (body, worker, rank) in &sent {
        let served = serve(&fleet, "/v1/completions", body).await;
        assert_eq!((&served.worker, served.dp_rank), (worker, *rank));
        assert_eq!(served.basis, "approximate");
        assert!(served.cached_tokens > 0);
        fleet.until_idle().await;
    }
}

/// The rank in the header served the request.
fn check(served: &Served) {
    assert_eq!(served.dp_rank, served.served_by_rank, "{}", served.worker);
}
