//! Adapters that engines load and unload at run time, which shims find by polling `/v1/models`.

use std::collections::BTreeSet;

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::fleet::traffic::{Served, send, serve};
use crate::fleet::{BLOCK, Engines, Flags, Fleet, Mode, text, worker_name};

const ENGINES: Engines = Engines {
    count: 3,
    ranks: 1,
    blocks: 600,
    flags: &["--profile", "instant"],
};

on_both_planes!(an_adapter_is_served_where_it_is_loaded_and_credited_by_its_name);
on_both_planes!(an_adapter_loaded_again_from_another_path_has_credit_of_its_own);

async fn an_adapter_is_served_where_it_is_loaded_and_credited_by_its_name(mode: Mode) {
    let fleet = Fleet::start(mode, ENGINES, Flags::default()).await;
    fleet.until_indexed().await;
    let prompt: Vec<u32> = (0..400).map(|at| 100 + at * 7 % 150).collect();
    assert_eq!(
        refused(&fleet, "tuned", &prompt).await,
        StatusCode::NOT_FOUND
    );

    for index in [0, 1] {
        change(&fleet, index, "load", "tuned").await;
    }
    until_served_by(&fleet, "tuned", &[0, 1]).await;
    // The base model's blocks are no credit for the adapter, and the other way round.
    for model in ["mock", "tuned"] {
        let body = json!({"model": model, "prompt": prompt, "max_tokens": 1});
        let first = serve(&fleet, "/v1/completions", &body).await;
        fleet.until_idle().await;
        fleet.until_indexed().await;
        assert_eq!(
            (first.overlap_blocks, first.cached_tokens),
            (0, 0),
            "{model}"
        );
    }
    let mut used = BTreeSet::new();
    for length in [400, 390, 300, 200] {
        let served = answered(&fleet, "tuned", &prompt[..length]).await;
        let blocks = (length as u64 - 1) / BLOCK;
        assert_eq!(served.overlap_blocks, blocks);
        assert_eq!(served.cached_tokens, blocks * BLOCK);
        used.insert(served.worker);
    }
    for topic in 0..12 {
        let other: Vec<u32> = prompt.iter().map(|token| token + topic).collect();
        used.insert(answered(&fleet, "tuned", &other).await.worker);
    }
    assert!(used.is_subset(&names(&[0, 1])), "{used:?}");

    change(&fleet, 0, "unload", "tuned").await;
    change(&fleet, 2, "load", "other").await;
    until_served_by(&fleet, "tuned", &[1]).await;
    until_served_by(&fleet, "other", &[2]).await;
    for topic in 0..6 {
        let other: Vec<u32> = prompt.iter().map(|token| token + topic).collect();
        for (model, worker) in [("tuned", 1), ("other", 2)] {
            let served = answered(&fleet, model, &other).await;
            assert_eq!(served.worker, worker_name(worker), "{model}");
            assert_eq!(
                served.overlap_blocks * BLOCK,
                served.cached_tokens,
                "{model}"
            );
        }
    }

    change(&fleet, 1, "unload", "tuned").await;
    until_served_by(&fleet, "tuned", &[]).await;
    assert_eq!(
        refused(&fleet, "tuned", &prompt).await,
        StatusCode::NOT_FOUND
    );
}

/// The engine hashes the path, and events have the name only.
async fn an_adapter_loaded_again_from_another_path_has_credit_of_its_own(mode: Mode) {
    let one = Engines {
        count: 1,
        ..ENGINES
    };
    let fleet = Fleet::start(mode, one, Flags::default()).await;
    let prompt = |topic: u32| -> Vec<u32> { (0..200).map(|at| topic + at * 7 % 150).collect() };
    let load = async |path: &str| {
        change_from(&fleet, 0, "load", "tuned", path).await;
        until_served_by(&fleet, "tuned", &[0]).await;
    };
    let unload = async || {
        change(&fleet, 0, "unload", "tuned").await;
        until_served_by(&fleet, "tuned", &[]).await;
    };
    let assert_right = async |prompt: &[u32], cached: bool| {
        let served = answered(&fleet, "tuned", prompt).await;
        assert_eq!(served.overlap_blocks * BLOCK, served.cached_tokens);
        assert_eq!(served.cached_tokens > 0, cached);
    };
    load("/a").await;
    for topic in [100, 300] {
        assert_right(&prompt(topic), false).await;
        assert_right(&prompt(topic), true).await;
    }
    unload().await;
    load("/b").await;
    // The first answer shows the reload.
    assert_eq!(
        answered(&fleet, "tuned", &prompt(100)).await.cached_tokens,
        0
    );
    assert_right(&prompt(100), true).await;
    assert_right(&prompt(300), false).await;
    unload().await;
    load("/a").await;
    // The engine finds its old blocks again; what it adds to them shows the path.
    let longer = [prompt(100), prompt(500)].concat();
    assert!(answered(&fleet, "tuned", &longer).await.cached_tokens > 0);
    for topic in [100, 300] {
        assert_right(&prompt(topic), true).await;
    }
}

async fn change(fleet: &Fleet, engine: usize, what: &str, adapter: &str) {
    change_from(fleet, engine, what, adapter, "/nowhere").await;
}

async fn change_from(fleet: &Fleet, engine: usize, what: &str, adapter: &str, path: &str) {
    let url = fleet.engine(engine, &format!("/v1/{what}_lora_adapter"));
    let body = json!({"lora_name": adapter, "lora_path": path});
    let answer = fleet.http.post(url).json(&body).send().await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
}

fn names(workers: &[usize]) -> BTreeSet<String> {
    workers.iter().map(|&index| worker_name(index)).collect()
}

/// Waits until each router lists the adapter at these workers only, and as a model if at any.
async fn until_served_by(fleet: &Fleet, adapter: &str, workers: &[usize]) {
    let expected = names(workers);
    let is_known = async |fleet: &Fleet| {
        for (number, router) in fleet.routers.iter().enumerate() {
            let shown = fleet.get(fleet.admin(number, "/workers")).await;
            let shown = shown["workers"].as_array().unwrap().iter();
            let has = |worker: &&Value| {
                let loras = worker["loras"].as_array().unwrap();
                loras.iter().any(|lora| lora["name"] == adapter)
            };
            let having: BTreeSet<String> =
                shown.filter(has).map(|one| text(&one["worker"])).collect();
            let models = fleet.get(format!("{}/v1/models", router.base())).await;
            let models = models["data"].as_array().unwrap();
            let listed = models.iter().find(|model| model["id"] == adapter);
            let is_listed = listed.is_some_and(|model| model["parent"] == "mock");
            if having != expected || is_listed == workers.is_empty() {
                return false;
            }
        }
        true
    };
    let what = format!("{adapter} is served by {workers:?}");
    fleet.until(&what, is_known).await;
}

async fn refused(fleet: &Fleet, model: &str, prompt: &[u32]) -> StatusCode {
    let body = json!({"model": model, "prompt": prompt, "max_tokens": 1});
    send(fleet, "/v1/completions", &body).await.status()
}

/// A request of which the index knew something. Then nothing is under way.
async fn answered(fleet: &Fleet, model: &str, prompt: &[u32]) -> Served {
    let body = json!({"model": model, "prompt": prompt, "max_tokens": 1});
    for _ in 0..50 {
        let served = serve(fleet, "/v1/completions", &body).await;
        fleet.until_idle().await;
        fleet.until_indexed().await;
        if served.state == "exact" {
            return served;
        }
        assert!(served.is_without_answer(), "{}", served.state);
    }
    panic!("no index answers");
}
