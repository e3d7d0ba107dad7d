//! Requests that wait: for a worker, for a first token, for the body of an error.

use std::time::Duration;

use tokio::time::advance;

use super::world::Frozen;
use super::*;

async fn until_waiting(world: &World, count: i64) {
    let waiting = async {
        while world.app.metrics.waiting().get() != count {
            tokio::task::yield_now().await;
        }
    };
    in_time("requests wait", waiting).await;
}

const WAIT: &str = "engine_wait_timeout_secs = 40";

/// Before the engine is known, before it has reported its models, and while it is down.
#[tokio::test]
async fn requests_wait_for_a_worker_of_their_model() {
    let engine = Engine::start().await;
    let world = World::with(&[]).await;
    world.set(WAIT);
    let tasks = TaskTracker::new();
    let sent = [
        ("/v1/completions", body(4)),
        ("/v1/embeddings", json!({"model": "m", "input": "x"})),
    ];
    let clients = sent.map(|(path, json)| tasks.spawn(world.post(path, &json).send()));
    until_waiting(&world, 2).await;
    world.add_serving(0, &engine, "");
    until_waiting(&world, 2).await;
    assert_eq!(engine.asked(), 0);
    world.add(0, &engine);
    for client in clients {
        let response = in_time("an answer", client).await.unwrap().unwrap();
        assert_eq!(response.status(), 200);
    }
    until_waiting(&world, 0).await;
    world.set_down(0, &engine);
    let client = tasks.spawn(world.post("/v1/completions", &body(4)).send());
    until_waiting(&world, 1).await;
    world.add(1, &engine);
    let response = in_time("an answer", client).await.unwrap().unwrap();
    assert_eq!(response.status(), 200);
    world.until_quiet().await;
}

/// Its place is another one's as soon as a worker has it.
#[tokio::test]
async fn a_request_that_a_worker_has_does_not_wait_for_one() {
    let hung = Engine::hung().await;
    let world = World::with(&[]).await;
    world.set(WAIT);
    let client = TaskTracker::new().spawn(world.post("/v1/completions", &body(4)).send());
    until_waiting(&world, 1).await;
    world.add(0, &hung);
    hung.until_asked().await;
    until_waiting(&world, 0).await;
    client.abort();
    world.until_quiet().await;
}

/// Its engine is loaded again after the connection was refused.
#[tokio::test]
async fn a_request_waits_while_its_only_worker_restarts() {
    let (dead, engine) = (Engine::dead().await, Engine::start().await);
    let world = World::with(&[&dead]).await;
    world.set(WAIT);
    let client = TaskTracker::new().spawn(world.post("/v1/completions", &body(4)).send());
    until_waiting(&world, 1).await;
    world.add(0, &engine);
    let response = in_time("an answer", client).await.unwrap().unwrap();
    assert_eq!(response.status(), 200);
    world.until_quiet().await;
}

#[tokio::test(start_paused = true)]
async fn a_wait_ends_with_its_time_or_its_client() {
    let engine = Engine::start().await;
    let world = World::with(&[]).await;
    world.set(WAIT);
    let client = TaskTracker::new().spawn(world.post("/v1/completions", &body(4)).send());
    until_waiting(&world, 1).await;
    client.abort();
    until_waiting(&world, 0).await;
    world.until_quiet().await;
    let response = world.send("/v1/completions", &body(4)).await;
    assert_eq!(response.status(), 503);
    world::assert_error(response, "no_worker").await;
    for (name, value, secs) in [
        ("x-warmroute-do-not-queue", "1", 0),
        ("x-stainless-read-timeout", "5", 5),
        ("x-envoy-expected-rq-timeout-ms", "90000", 40),
    ] {
        for (path, json) in [
            ("/v1/completions", body(4)),
            ("/v1/embeddings", json!({"model": "m", "input": "x"})),
        ] {
            let began = tokio::time::Instant::now();
            let request = world.post(path, &json).header(name, value);
            let response = request.send().await.unwrap();
            assert_eq!(response.status(), 503, "{name}");
            assert_eq!(began.elapsed().as_secs(), secs, "{name}");
        }
    }
    // An unknown model is not waited for where all engines have reported theirs.
    world.add(0, &engine);
    let began = tokio::time::Instant::now();
    let other = json!({"model": "none", "prompt": [1]});
    assert_eq!(world.send("/v1/completions", &other).await.status(), 404);
    assert!(began.elapsed() < Duration::from_secs(40));
    world.until_quiet().await;
}

/// A request without a place gets the answer that it would get without a wait.
#[tokio::test]
async fn waiting_requests_are_bounded_and_a_free_place_is_used_again() {
    const PLACES: usize = 2;
    let engine = Engine::start().await;
    let world = World::with(&[]).await;
    // Longer than the test waits for an answer.
    world.set("engine_wait_timeout_secs = 600");
    let occupied = world.app.held.occupied_but(PLACES);
    let tasks = TaskTracker::new();
    let ask = |path: &str| tasks.spawn(world.post(path, &body(4)).send());
    let routes = ["/v1/completions", "/v1/embeddings"];
    let mut clients: Vec<_> = routes.map(ask).into();
    until_waiting(&world, 2).await;
    for path in routes {
        let refused = world.send(path, &body(4)).await;
        assert_eq!(refused.status(), 503, "{path}");
        assert!(refused.headers().contains_key("retry-after"), "{path}");
        world::assert_error(refused, "no_worker").await;
    }
    until_waiting(&world, 2).await;
    // The client that goes leaves its place to the next one.
    clients.remove(0).abort();
    until_waiting(&world, 1).await;
    clients.push(ask("/v1/completions"));
    until_waiting(&world, 2).await;
    let refused = world.send("/v1/completions", &body(4)).await;
    assert_eq!(refused.status(), 503);
    world.add(0, &engine);
    for client in clients {
        let response = in_time("an answer", client).await.unwrap().unwrap();
        assert_eq!(response.status(), 200);
    }
    until_waiting(&world, 0).await;
    world.until_quiet().await;
    // All places are free again.
    drop(occupied);
    drop(world.app.held.occupied_but(0));
}

/// The engine accepts requests, sends their heads and hangs.
#[tokio::test(start_paused = true)]
async fn a_stream_without_a_first_token_goes_to_another_worker() {
    let (hung, alive) = (Engine::start().await, Engine::start().await);
    let world = World::with(&[&hung, &alive]).await;
    world.set("first_token_timeout_secs = 5");
    let ready = json!({"model": "m", "prompt": [1], "stream": true, "ready": 2});
    let first = world.post("/v1/completions", &streaming()).send();
    let first = TaskTracker::new().spawn(first);
    hung.until_asked().await;
    in_time("the second worker is asked", alive.until_asked()).await;
    hung.until_abandoned().await;
    assert_eq!(world.metric("retries_total{reason=\"silent\"}"), 1);
    assert_eq!(counting(&world), 1);
    first.abort();
    let second = world.send("/v1/completions", &ready).await;
    let whole = second.bytes().await.unwrap();
    assert_eq!(whole, format!("{}{}", event(0), event(1)));
    world.until_quiet().await;
}

/// An engine that hangs after accepting. What no model generates has a bound of its own.
#[tokio::test(start_paused = true)]
async fn an_answer_without_a_head_is_asked_of_another_worker() {
    for (setting, path, secs) in [
        ("", "/tokenize", 60),
        ("", "/v1/messages/count_tokens", 60),
        ("engines.answer_timeout_secs = 7", "/v1/embeddings", 7),
        ("engines.answer_timeout_secs = 7", "/v1/completions", 7),
        ("engines.answer_timeout_secs = 7", "/tokenize", 7),
    ] {
        let (hung, alive) = (Engine::hung().await, Engine::start().await);
        let world = World::with(&[&hung, &alive]).await;
        world.set(setting);
        let began = tokio::time::Instant::now();
        let sent = world.post(path, &json!({"model": "m", "prompt": [1]}));
        let response = sent.timeout(Duration::from_secs(100)).send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        assert_eq!(began.elapsed().as_secs(), secs, "{path}");
        assert_eq!((hung.asked(), alive.asked()), (1, 1), "{path}");
        assert_eq!(world.metric("retries_total{reason=\"silent\"}"), 1);
        // A client can make a request without the model as large as it likes.
        let counted = usize::from(!setting.is_empty());
        assert_eq!(counting(&world), counted, "{path}");
        world.until_quiet().await;
    }
}

/// A generation takes as long as it takes.
#[tokio::test(start_paused = true)]
async fn an_answer_that_a_model_generates_has_no_time_limit_by_default() {
    let engine = Engine::hung().await;
    let world = World::with(&[&engine]).await;
    let day = Duration::from_secs(86_400);
    for path in ["/v1/completions", "/v1/embeddings"] {
        let sent = world.post(path, &body(4)).timeout(day).send();
        let mut waiting = Box::pin(sent);
        let waited = tokio::time::timeout(day / 2, &mut waiting).await;
        assert!(waited.is_err(), "{path}");
        drop(waiting);
    }
    assert_eq!(engine.asked(), 2);
    world.until_quiet().await;
}

#[tokio::test(start_paused = true)]
async fn the_body_of_an_error_ends_in_bounded_time() {
    let engine = Engine::hanging_in_an_error().await;
    let world = World::with(&[&engine]).await;
    let response = world.send("/v1/completions", &body(4)).await;
    assert_eq!(response.status(), 400);
    assert!(response.bytes().await.is_err());
    assert_eq!(counting(&world), 1);
    world.until_quiet().await;
}

/// Seconds after which each event comes, and whether the client has the answer by then.
async fn late_stream(events: &[(f64, bool)]) {
    let _frozen = Frozen::new();
    let (slow, other) = (Engine::start().await, Engine::start().await);
    let world = World::with(&[&slow, &other]).await;
    let client = TaskTracker::new().spawn(world.post("/v1/completions", &streaming()).send());
    slow.until_asked().await;
    for (number, (secs, is_passed)) in events.iter().enumerate() {
        advance(Duration::from_secs_f64(*secs)).await;
        slow.send(&event(number)).await;
        if *is_passed {
            let passed = async {
                while !client.is_finished() {
                    tokio::task::yield_now().await;
                }
            };
            in_time("the stream begins", passed).await;
        } else {
            settle().await;
            assert!(!client.is_finished(), "{events:?} {number}");
        }
    }
    if client.is_finished() {
        let mut response = client.await.unwrap().unwrap();
        assert_eq!(response.headers()["x-warmroute-worker"], "w0");
        let expected: String = (0..events.len()).map(event).collect();
        let mut received = String::new();
        while received.len() < expected.len() {
            let chunk = in_time("the events", response.chunk()).await;
            received += std::str::from_utf8(&chunk.unwrap().unwrap()).unwrap();
        }
        assert_eq!(received, expected);
        let was_held = u64::from(events.len() > 1);
        assert_eq!(world.metric("late_streams_total"), was_held);
    } else {
        let source = warmroute_proto::Source {
            worker: "w0".into(),
            dp_rank: warmroute_proto::DpRank(0),
        };
        world.app.core.losses().set_stalls(&[(source, 1)].into());
        in_time("the other one is asked", other.until_asked()).await;
        slow.until_abandoned().await;
        client.abort();
    }
    world.until_quiet().await;
}

/// Lets what is on its way between client, router and engine arrive.
async fn settle() {
    for _ in 0..2_000 {
        tokio::task::yield_now().await;
    }
}

/// An engine that crawls sends first tokens, and answers that never end.
#[tokio::test(start_paused = true)]
async fn a_late_stream_begins_once_its_tokens_follow_each_other() {
    late_stream(&[(0.2, true)]).await;
    late_stream(&[(2.0, false), (0.2, true)]).await;
    late_stream(&[(4.0, false), (0.0, false), (0.5, false), (0.4, true)]).await;
    // It leaves a source that is found stalled.
    late_stream(&[(2.0, false), (2.0, false)]).await;
    // Some streams are silent for minutes.
    late_stream(&[(2.0, false), (8.0, true)]).await;
}
