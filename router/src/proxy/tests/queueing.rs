//! Requests that wait while all workers are full.

use std::time::Duration;

use warmroute_process::access::keys::KeyHash;

use super::world::assert_error;
use super::*;

async fn until_queued(world: &World, count: usize) {
    let queued = async {
        while world.app.admission.size().requests != count {
            tokio::task::yield_now().await;
        }
    };
    in_time("requests wait", queued).await;
}

#[tokio::test]
async fn a_request_waits_for_a_place_and_a_client_may_leave() {
    let engine = Engine::start().await;
    let world = World::with_active_max(&[&engine], 1).await;
    let mut first = world.send("/v1/completions", &streaming()).await;
    engine.release_event(&mut first).await;
    let tasks = TaskTracker::new();
    let gone = tasks.spawn(world.post("/v1/completions", &body(4)).send());
    until_queued(&world, 1).await;
    let second = tasks.spawn(world.post("/v1/completions", &body(4)).send());
    until_queued(&world, 2).await;
    let embedding = json!({"model": "m", "input": "x"});
    let third = tasks.spawn(world.post("/v1/embeddings", &embedding).send());
    until_queued(&world, 3).await;
    gone.abort();
    until_queued(&world, 2).await;
    assert_eq!(engine.asked(), 1);
    drop(first);
    for waiting in [second, third] {
        let response = in_time("an answer", waiting).await.unwrap().unwrap();
        assert_eq!(response.status(), 200);
        response.bytes().await.unwrap();
    }
    assert_eq!(engine.asked(), 3);
    world.until_quiet().await;
    let waits = world.metric("model_queue_seconds_count{model=\"m\"}");
    assert_eq!(
        waits, 4,
        "of the other route and of the client that left, too"
    );
}

#[tokio::test(start_paused = true)]
async fn a_wait_counts_when_its_client_leaves() {
    let engine = Engine::start().await;
    let world = World::with_active_max(&[&engine], 1).await;
    let mut first = world.send("/v1/completions", &streaming()).await;
    engine.release_event(&mut first).await;
    let tasks = TaskTracker::new();
    let gone = tasks.spawn(world.post("/v1/completions", &body(4)).send());
    until_queued(&world, 1).await;
    tokio::time::sleep(Duration::from_secs(25)).await;
    gone.abort();
    until_queued(&world, 0).await;
    drop(first);
    world.until_quiet().await;
    let bucket = |le| {
        world.metric(&format!(
            "model_queue_seconds_bucket{{model=\"m\",le=\"{le}\"}}"
        ))
    };
    assert_eq!((bucket("10"), bucket("+Inf")), (1, 2));
}

#[tokio::test]
async fn clients_bound_their_wait() {
    let engine = Engine::start().await;
    let world = World::with_active_max(&[&engine], 1).await;
    let mut first = world.send("/v1/completions", &streaming()).await;
    engine.release_event(&mut first).await;
    for (name, value, status, code) in [
        ("x-warmroute-do-not-queue", "1", 429, "workers_full"),
        ("x-stainless-read-timeout", "0.05", 503, "queue_timeout"),
        ("x-envoy-expected-rq-timeout-ms", "50", 503, "queue_timeout"),
    ] {
        let request = world.post("/v1/completions", &body(4)).header(name, value);
        let response = in_time("a refusal", request.send()).await.unwrap();
        assert_eq!(response.status(), status, "{name}");
        assert!(response.headers().contains_key("retry-after"));
        assert_error(response, code).await;
    }
    assert_eq!(world.metric("queue_shed_total{reason=\"not_queued\"}"), 1);
    assert_eq!(world.metric("queue_shed_total{reason=\"timeout\"}"), 2);
    world.set("engines.max_queued_requests = 0");
    let response = world.send("/v1/completions", &body(4)).await;
    assert_eq!(response.status(), 429);
    assert_error(response, "queue_full").await;
    assert_eq!(engine.asked(), 1);
    drop(first);
    world.until_quiet().await;
}

/// A client's level counts only where its tenant permits it.
#[tokio::test]
async fn levels_are_served_in_order() {
    let engine = Engine::start().await;
    let world = World::with_active_max(&[&engine], 1).await;
    let tenant = |name: &str, rules: &str| {
        let hash = KeyHash::of(name.as_bytes()).unwrap().to_hex();
        format!(
            "[[tenants]]\nname = \"{name}\"\n{rules}\n\
             keys = [{{ id = \"{name}\", sha256 = \"{hash}\" }}]\n"
        )
    };
    let rules = [
        ("batch", "priority = 5"),
        ("chat", "client_priority = true"),
        ("other", ""),
    ];
    let toml: String = rules.map(|(name, rules)| tenant(name, rules)).concat();
    world.set(&toml);
    let send = |key: &str, json: &Value| world.post("/v1/completions", json).bearer_auth(key);
    let mut first = send("other", &streaming()).send().await.unwrap();
    engine.release_event(&mut first).await;
    let tasks = TaskTracker::new();
    let mut clients = Vec::new();
    // In the order of their arrival, each with the number of the one that is served then.
    let order = [
        ("batch", "-9", 3),
        ("other", "-9", 2),
        ("chat", "-3", 1),
        ("chat", "-999", 0),
    ];
    for (number, (key, level, _)) in order.iter().enumerate() {
        let request = send(key, &json!({"model": "m", "prompt": [number]}));
        let request = request.header("x-warmroute-priority", *level);
        clients.push(tasks.spawn(request.send()));
        until_queued(&world, number + 1).await;
    }
    drop(first);
    for client in clients {
        let response = in_time("an answer", client).await.unwrap().unwrap();
        assert_eq!(response.status(), 200);
    }
    let served = engine.bodies();
    for (number, (_, _, place)) in order.iter().enumerate() {
        let prompt = format!("[{number}]");
        let at = served.iter().position(|body| body.contains(&prompt));
        assert_eq!(at, Some(place + 1), "{served:?}");
    }
    world.until_quiet().await;
}
