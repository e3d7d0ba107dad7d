//! An idle engine's cache is reset, and no client sends a request afterwards.

use super::equality::until_equal;
use super::load::sequential;
use crate::fleet::{Engines, Flags, Fleet, Mode};

const MODE: Mode = Mode::Nats {
    indexers: 1,
    routers: 1,
};

/// The engine publishes a reset with its next batch only; its metrics show the call.
#[tokio::test(flavor = "multi_thread")]
async fn row_30_resets_and_sleep_of_an_idle_engine_end_its_credit() {
    let engines = Engines {
        count: 1,
        ranks: 2,
        blocks: 400,
        flags: &["--profile", "instant"],
    };
    let fleet = Fleet::start(MODE, engines, Flags::default()).await;
    sequential(&fleet, 8, 30).await;
    until_equal(&fleet).await;
    post(&fleet, "/reset_prefix_cache").await;
    until_all(&fleet, "exact and empty", |state, blocks| {
        state == "exact" && blocks == Some(0)
    })
    .await;

    sequential(&fleet, 9, 30).await;
    until_equal(&fleet).await;
    post(&fleet, "/sleep?level=1").await;
    until_all(&fleet, "unverified", |state, _| state == "unverified").await;
    post(&fleet, "/wake_up").await;
    until_all(&fleet, "exact and empty", |state, blocks| {
        state == "exact" && blocks == Some(0)
    })
    .await;
    until_equal(&fleet).await;
    fleet.until_idle().await;
}

async fn post(fleet: &Fleet, path: &str) {
    let answer = fleet.http.post(fleet.engine(0, path)).send().await;
    assert!(answer.unwrap().status().is_success(), "{path}");
}

async fn until_all(fleet: &Fleet, what: &str, is_so: fn(&str, Option<u64>) -> bool) {
    let index = fleet.indexes().remove(0);
    fleet
        .until(what, async |fleet| {
            let digest = fleet.get(format!("{index}/v1/digest")).await;
            let sources = digest["sources"].as_array().unwrap();
            sources.len() == 2
                && sources.iter().all(|source| {
                    let state = source["state"].as_str().unwrap();
                    is_so(state, source["blocks"].as_u64())
                })
        })
        .await;
}
