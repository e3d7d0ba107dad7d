//! A new prefix from many concurrent clients, through routers that share only the plane.

use serde_json::json;
use tokio_util::task::TaskTracker;

use crate::fleet::{Access, Engines, Flags, Fleet, Mode};

/// One for each worker.
const REQUESTS: usize = 4;
const BURSTS: usize = 6;

/// Requests of one burst by worker, in ascending order.
type Spread = Vec<usize>;

/// While the prefix is not cached anywhere, each further request is best started elsewhere. One
/// router sees that in its own slots. Two routers see it in each other's; otherwise they put two
/// requests on one worker while another one idles.
#[tokio::test(flavor = "multi_thread")]
async fn two_routers_spread_a_burst_as_one_would() {
    let alone = bursts(1, Access::Open).await;
    let synced = bursts(2, Access::Open).await;
    let mute = bursts(2, Access::MuteRouters).await;
    println!("requests by worker, burst by burst");
    println!("one router: {alone:?}");
    println!("two, in step: {synced:?}");
    println!("two that do not hear each other: {mute:?}");
    assert!(alone.iter().all(|spread| spread == &[1; REQUESTS]));
    assert_eq!(synced, alone);
    // One in six bursts of two such routers has four workers by chance.
    assert_ne!(mute, alone, "the test can tell the difference");
}

async fn bursts(routers: usize, access: Access) -> Vec<Spread> {
    let engines = Engines {
        count: REQUESTS,
        ranks: 1,
        blocks: 4000,
        flags: &["--profile", "instant"],
    };
    let mode = Mode::Nats {
        indexers: 1,
        routers,
    };
    let flags = Flags {
        // Under `time` a worker that computes fast enough would get several.
        router: &["--policy", "kv"],
        access,
        ..Flags::default()
    };
    let fleet = Fleet::start(mode, engines, flags).await;
    fleet.until_indexed().await;
    let mut spreads = Vec::new();
    for number in 0..BURSTS {
        spreads.push(burst(&fleet, number, matches!(access, Access::Open)).await);
        fleet.until_idle().await;
        fleet.until_indexed().await;
    }
    spreads
}

/// Each request waits until every connected router has received the previous one: no clock decides.
async fn burst(fleet: &Fleet, number: usize, are_heard: bool) -> Spread {
    hang(fleet, true).await;
    let prompt = format!("Burst {number} is about something that nobody asked before. ").repeat(40);
    let tasks = TaskTracker::new();
    let mut sent = vec![0; fleet.routers.len()];
    let mut answers = Vec::new();
    for request in 0..REQUESTS {
        let prompt = format!("{prompt} Question {request}, with a tail of its own: what is it?");
        let body = json!({"model": "mock", "prompt": prompt, "max_tokens": 2});
        let router = request % sent.len();
        let url = format!("{}/v1/completions", fleet.routers[router].base());
        answers.push(tasks.spawn(fleet.http.post(url).json(&body).send()));
        sent[router] += 1;
        let all = sent.iter().sum();
        let known = async |fleet: &Fleet| {
            for (router, own) in sent.iter().enumerate() {
                let wanted = if are_heard { all } else { *own };
                if fleet.load(router).await.0 != wanted {
                    return false;
                }
            }
            true
        };
        fleet.until("the request is known", known).await;
    }
    hang(fleet, false).await;
    let mut spread = vec![0; fleet.engines.len()];
    for answer in answers {
        let answer = answer.await.unwrap().unwrap();
        assert!(answer.status().is_success(), "{}", answer.status());
        let worker = answer.headers()["x-warmroute-worker"].to_str().unwrap();
        let worker: usize = worker.trim_start_matches("worker-").parse().unwrap();
        spread[worker] += 1;
    }
    spread.sort_unstable();
    spread
}

/// Makes the engines accept requests and compute nothing.
async fn hang(fleet: &Fleet, hang: bool) {
    for engine in 0..fleet.engines.len() {
        let fault = fleet.http.post(fleet.engine(engine, "/debug/fault"));
        let answer = fault.json(&json!({"hang": hang})).send().await.unwrap();
        assert!(answer.status().is_success());
    }
}
