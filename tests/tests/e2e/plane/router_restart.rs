//! Routers that leave and join.

use reqwest::Response;
use serde_json::json;
use tokio::time::Instant;
use warmroute_router::sync::JOIN_MAX;

use super::load::sequential;
use crate::fleet::{Engines, Flags, Fleet, Mode};

const ENGINES: Engines = Engines {
    count: 2,
    ranks: 1,
    blocks: 4000,
    flags: &["--itl-ms", "50", "--prefill-tokens-per-sec", "20000"],
};
const MODE: Mode = Mode::Nats {
    indexers: 1,
    routers: 2,
};

/// Requests of all routers in one router's view.
async fn active(fleet: &Fleet, router: usize) -> u64 {
    fleet.load(router).await.0
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_routers_load_leaves_the_others() {
    let fleet = Fleet::start(MODE, ENGINES, Flags::default()).await;
    let own = streams(&fleet, 1, 3).await;
    let lost = streams(&fleet, 0, 5).await;
    let all = async |fleet: &Fleet| active(fleet, 1).await == 8;
    fleet.until("the other router sees all streams", all).await;

    fleet.routers[0].kill();
    let killed = Instant::now();
    let gone = async |fleet: &Fleet| active(fleet, 1).await == 3;
    fleet.until("only its own are left", gone).await;
    println!(
        "a router's death: its load is gone {:?} later",
        killed.elapsed()
    );
    drop((own, lost));

    fleet.routers[0].restart().await;
    let base = fleet.routers[0].base();
    let ready = async |fleet: &Fleet| fleet.is_ready(&base).await;
    fleet.until("the new one is ready", ready).await;
    fleet.until_idle().await;
    sequential(&fleet, 5, 20).await;
    fleet.until_idle().await;
}

/// A joining router knows the others' open requests when it reports ready.
#[tokio::test(flavor = "multi_thread")]
async fn a_joining_router_knows_the_load_before_it_is_ready() {
    let mut fleet = Fleet::start(MODE, ENGINES, Flags::default()).await;
    let open = [streams(&fleet, 0, 4).await, streams(&fleet, 1, 3).await];
    let started = Instant::now();
    fleet.add_router().await;
    let base = fleet.routers[2].base();
    let ready = async |fleet: &Fleet| fleet.is_ready(&base).await;
    fleet.until("the new one is ready", ready).await;
    let took = started.elapsed();
    let slots = fleet.get(fleet.admin(2, "/v1/slots")).await;
    let known = active(&fleet, 2).await;
    println!("ready {took:?} after its start, with {known} requests");
    // The waiting one may have timed out correctly.
    let knew = known == 7 || took >= JOIN_MAX;
    assert!(knew, "what it knew as it became ready: {slots}");
    let all = async |fleet: &Fleet| active(fleet, 2).await == 7;
    fleet.until("it knows all", all).await;
    drop(open);
    fleet.until_idle().await;
}

/// Streams through one router that are opened and not read: its load until they are dropped.
async fn streams(fleet: &Fleet, router: usize, count: usize) -> Vec<Response> {
    let url = format!("{}/v1/completions", fleet.routers[router].base());
    let mut open = Vec::new();
    for number in 0..count {
        let prompt = format!("Stream {number} of router {router}: ").repeat(20);
        let body = json!({"model": "mock", "prompt": prompt, "max_tokens": 4000, "stream": true});
        let answer = fleet.http.post(&url).json(&body).send().await.unwrap();
        assert!(answer.status().is_success(), "{}", answer.status());
        open.push(answer);
    }
    open
}
