//! An operator drains a worker at any router. It stays drained until an operator undrains it.

use std::collections::BTreeSet;

use reqwest::{Response, StatusCode};
use serde_json::{Value, json};

use super::streams::body;
use crate::fleet::{Access, Engines, Flags, Fleet, Mode};

const ENGINES: Engines = Engines {
    count: 2,
    ranks: 1,
    blocks: 4000,
    flags: &["--itl-ms", "20", "--prefill-tokens-per-sec", "200000"],
};
const MODE: Mode = Mode::Nats {
    indexers: 1,
    routers: 2,
};
const WORKERS: [&str; 2] = ["worker-0", "worker-1"];

/// Sends a drain command for a worker to one router.
async fn say(fleet: &Fleet, router: usize, worker: &str, word: &str) -> (StatusCode, Value) {
    let url = fleet.admin(router, &format!("/admin/workers/{worker}/{word}"));
    let change = fleet.http.post(url).header("x-warmroute-admin", "1");
    let answer = change.send().await.unwrap();
    (answer.status(), answer.json().await.unwrap())
}

async fn heard(fleet: &Fleet, router: usize, worker: &str, state: &str) {
    let heard = async |fleet: &Fleet| {
        let url = fleet.admin(router, &format!("/admin/workers/{worker}/drain"));
        fleet.get(url).await["state"] == state
    };
    fleet.until("the router has heard of it", heard).await;
}

async fn ask(fleet: &Fleet, router: usize, number: usize) -> Response {
    let url = format!("{}/v1/completions", fleet.routers[router].base());
    let prompt = format!("Request {number}: who are you?");
    let body = json!({"model": "mock", "prompt": prompt, "max_tokens": 1});
    fleet.http.post(url).json(&body).send().await.unwrap()
}

fn worker_of(answer: &Response) -> String {
    assert!(answer.status().is_success(), "{}", answer.status());
    let worker = answer.headers()["x-warmroute-worker"].to_str();
    worker.unwrap().to_owned()
}

/// The worker that serves a request through this router.
async fn served_by(fleet: &Fleet, router: usize) -> BTreeSet<String> {
    let mut workers = BTreeSet::new();
    for number in 0..12 {
        workers.insert(worker_of(&ask(fleet, router, number).await));
    }
    workers
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_worker_gets_nothing_new_from_any_router_until_it_is_undrained() {
    let flags = Flags {
        access: Access::LeastPrivilege,
        ..Flags::default()
    };
    let fleet = Fleet::start(MODE, ENGINES, flags).await;
    let url = format!("{}/v1/completions", fleet.routers[0].base());
    let stream = fleet.http.post(url).json(&body("Count.", 150)).send().await;
    let stream = stream.unwrap();
    let drained = worker_of(&stream);
    let other = WORKERS.into_iter().find(|name| *name != drained).unwrap();
    let only = BTreeSet::from([other.to_owned()]);

    let (status, _) = say(&fleet, 1, "nobody", "drain").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    let (status, said) = say(&fleet, 1, &drained, "drain").await;
    assert_eq!(
        (status, &said["state"]),
        (StatusCode::OK, &json!("draining")),
        "{said}"
    );
    assert!(said["since"].is_u64(), "{said}");
    assert_eq!(
        served_by(&fleet, 1).await,
        only,
        "where it was said, at once"
    );
    heard(&fleet, 0, &drained, "draining").await;
    assert_eq!(served_by(&fleet, 0).await, only);

    let text = stream.text().await.unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"), "what runs may finish");
    fleet.until_idle().await;
    let shown = fleet
        .get(fleet.admin(0, &format!("/admin/workers/{drained}/drain")))
        .await;
    assert_eq!(shown["requests"], 0, "{shown}");

    outlives_restarts(&fleet, &drained, &only).await;
    is_named_under_another_engine(&fleet, &drained).await;
    everybody_drained(&fleet, other).await;

    let (status, _) = say(&fleet, 0, &drained, "undrain").await;
    assert_eq!(status, StatusCode::OK);
    heard(&fleet, 1, &drained, "serving").await;
    let back = BTreeSet::from([drained]);
    for router in 0..2 {
        assert_eq!(served_by(&fleet, router).await, back);
    }
}

/// A router without the command, and a restarted shim of the worker, keep the drain.
async fn outlives_restarts(fleet: &Fleet, drained: &str, only: &BTreeSet<String>) {
    let shim = WORKERS.iter().position(|name| *name == drained).unwrap();
    fleet.parts().shims[shim].signal("TERM");
    fleet.parts().shims[shim].ended().await;
    fleet.parts().shims[shim].restart().await;
    fleet.routers[0].restart().await;
    let base = fleet.routers[0].base();
    let ready = async |fleet: &Fleet| fleet.is_ready(&base).await;
    fleet.until("the router is ready again", ready).await;
    fleet.until_indexed().await;
    for router in 0..2 {
        assert_eq!(served_by(fleet, router).await, *only);
        let workers = fleet.get(fleet.admin(router, "/workers")).await;
        let workers = workers["workers"].as_array().unwrap();
        let shown = workers.iter().find(|worker| worker["worker"] == drained);
        assert_eq!(shown.unwrap()["drain"], "draining");
    }
    let (_, page) = fleet.command("doctor", &["doctor"]).await;
    let row = page.lines().find(|line| line.starts_with("drained "));
    assert!(row.is_some_and(|row| row.contains(drained)), "{page}");
    assert!(
        !page.contains("drained_returned"),
        "its engine is the drained one: {page}"
    );
    assert!(!page.contains("registry_unreadable"), "{page}");
}

/// Engine and shim are replaced, and the drain stands: `doctor` names the worker.
async fn is_named_under_another_engine(fleet: &Fleet, drained: &str) {
    let index = WORKERS.iter().position(|name| *name == drained).unwrap();
    for process in [&fleet.engines[index].process, &fleet.parts().shims[index]] {
        process.signal("TERM");
        process.ended().await;
        process.restart().await;
    }
    let named = async |fleet: &Fleet| {
        let (_, page) = fleet.command("doctor", &["doctor"]).await;
        page.contains("drained_returned")
    };
    fleet.until("doctor names the worker", named).await;
}

async fn everybody_drained(fleet: &Fleet, other: &str) {
    let (status, _) = say(fleet, 0, other, "drain").await;
    assert_eq!(status, StatusCode::OK);
    heard(fleet, 1, other, "draining").await;
    for router in 0..2 {
        let answer = ask(fleet, router, 0).await;
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(answer.headers().contains_key("retry-after"));
        let error: Value = answer.json().await.unwrap();
        assert_eq!(error["error"]["code"], "no_worker", "{error}");
    }
    let draining = fleet.metric("warmroute_router_worker_draining").await;
    assert_eq!(draining, 4.0, "two workers, at two routers");
}
