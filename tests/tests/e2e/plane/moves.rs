//! Two distant routers and simultaneous requests: neither router sees the other's choice in time,
//! and the later one moves its request.

use std::time::Duration;

use fastrand::Rng;
use futures_util::StreamExt as _;
use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::fleet::{Access, Engines, Flags, Fleet, Mode};

/// Half of the requests collide: each router draws one of two idle workers.
const ROUNDS_MAX: u32 = 600;
const MOVES_MIN: f64 = 5.0;

const MOVED: &str = "warmroute_router_moves_total{outcome=\"moved\"}";
const ECHOES: &str = "warmroute_router_sync_asks_total{kind=\"echo_served\"}";

fn slot_ends(end: &str) -> String {
    format!("warmroute_router_slots_freed_total{{end=\"{end}\"}}")
}

async fn fleet() -> Fleet {
    let engines = Engines {
        count: 2,
        ranks: 1,
        blocks: 20_000,
        // A prompt takes 200 ms, longer than any message in flight.
        flags: &["--prefill-tokens-per-sec", "10000", "--itl-ms", "1"],
    };
    let mode = Mode::Nats {
        indexers: 1,
        routers: 2,
    };
    let flags = Flags {
        router: &["--policy", "kv"],
        access: Access::FarRouters,
        ..Flags::default()
    };
    let fleet = Fleet::start(mode, engines, flags).await;
    // A router without messages yet has no position to wait for.
    for number in 0..4 {
        let _whole = ask(&fleet, number % 2, 1 << 20, None).await;
    }
    let is_measured = async |fleet: &Fleet| fleet.metric(ECHOES).await >= 10.0;
    fleet
        .until("the routers know how far they are", is_measured)
        .await;
    fleet
}

/// Sends a new prompt. Returns whether the whole answer arrived; the client leaves after
/// `patience`.
async fn ask(fleet: &Fleet, router: usize, number: u32, patience: Option<Duration>) -> bool {
    let start = number.wrapping_mul(2) + router as u32;
    let prompt: Vec<u32> = (0..2000_u32)
        .map(|at| (start * 7 + at * 13) % 1000)
        .collect();
    let prompt: Vec<u32> = [start % 1000, start / 1000 % 1000]
        .into_iter()
        .chain(prompt)
        .collect();
    let body = json!({"model": "mock", "prompt": prompt, "max_tokens": 3, "stream": true});
    let url = format!("{}/v1/completions", fleet.routers[router].base());
    let answer = async {
        let answer = fleet
            .http
            .post(url)
            .json(&body)
            .send()
            .await
            .expect("an answer");
        assert!(answer.status().is_success(), "{}", answer.status());
        let mut text = Vec::new();
        let mut body = answer.bytes_stream();
        while let Some(chunk) = body.next().await {
            text.extend_from_slice(&chunk.expect("a whole answer"));
        }
        String::from_utf8(text).expect("text")
    };
    let text = match patience {
        Some(patience) => match timeout(patience, answer).await {
            Ok(text) => text,
            Err(_) => return false,
        },
        None => answer.await,
    };
    assert_eq!(text.matches("data: [DONE]").count(), 1, "{text}");
    assert_eq!(text.matches("\"text\"").count(), 3, "{text}");
    true
}

#[tokio::test(flavor = "multi_thread")]
async fn the_later_of_two_blind_choices_moves_and_nothing_is_left() {
    let fleet = fleet().await;
    let mut asked = 4;
    for round in 0..ROUNDS_MAX {
        let both = [ask(&fleet, 0, round, None), ask(&fleet, 1, round, None)];
        assert!(join_all(both).await.into_iter().all(|whole| whole));
        asked += 2;
        if fleet.metric(MOVED).await >= MOVES_MIN {
            break;
        }
    }
    fleet.until_idle().await;
    let moved = fleet.metric(MOVED).await;
    assert!(moved >= MOVES_MIN, "{moved} of {asked} moved");
    let (completed, aborted) = ends(&fleet).await;
    println!("{moved} of {asked} requests moved");
    assert_eq!((completed, aborted), (f64::from(asked), moved));
    let seen = async |fleet: &Fleet| fleet.counted("aborted").await as f64 == moved;
    let what = "engines saw each move's first half as an aborted request";
    fleet.until(what, seen).await;
    let told = told(&fleet).await;
    assert!(!told.is_empty());
    for decision in told {
        assert_ne!(decision["moved_from"]["worker"], decision["worker"]);
        assert!(decision["moved_from"]["cheapest"].as_array().is_some());
    }

    // Clients leave before, while and after their requests move.
    let mut rng = Rng::with_seed(5);
    let mut whole = 0;
    for round in 0..40 {
        let patience = [(); 2].map(|()| Some(Duration::from_millis(rng.u64(5..60))));
        let number = 1000 + round;
        let both = [
            ask(&fleet, 0, number, patience[0]),
            ask(&fleet, 1, number, patience[1]),
        ];
        whole += join_all(both)
            .await
            .into_iter()
            .filter(|whole| *whole)
            .count();
    }
    fleet.until_idle().await;
    let (completed_now, aborted_now) = ends(&fleet).await;
    let opened = fleet.metric("warmroute_router_slots_opened_total").await;
    assert!((completed_now - completed) as usize >= whole);
    assert_eq!(opened, completed_now + aborted_now);
    let ignored = "warmroute_router_slot_changes_ignored_total";
    assert_eq!(fleet.metric(ignored).await, 0.0, "freed twice");
    let moved_now = fleet.metric(MOVED).await;
    println!("{} more moved while clients left", moved_now - moved);
}

/// Slots that the routers freed: after whole answers, and before.
async fn ends(fleet: &Fleet) -> (f64, f64) {
    let completed = fleet.metric(&slot_ends("completed")).await;
    (completed, fleet.metric(&slot_ends("aborted")).await)
}

/// The routers' metrics of moved requests.
async fn told(fleet: &Fleet) -> Vec<Value> {
    let mut moved = Vec::new();
    for router in 0..fleet.routers.len() {
        let page = fleet
            .get(fleet.admin(router, "/admin/decisions?limit=1000"))
            .await;
        let decisions = page["decisions"].as_array().expect("decisions");
        moved.extend(
            decisions
                .iter()
                .filter(|one| !one["moved_from"].is_null())
                .cloned(),
        );
    }
    moved
}
