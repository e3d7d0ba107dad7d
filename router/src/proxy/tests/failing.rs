//! Engines that fail requests in any way: whose failure it is, who gets the request then, and how it
//! counts.

use std::time::Duration;

use tokio::time::advance;

use super::world::Frozen;
use super::*;
use crate::fleet::health::Observation::{Asleep, ProbePassed};

/// The head of a stream that ends with its connection, and one event.
const ERROR_STREAM: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n\
    data: {\"error\":{\"message\":\"the engine is dead\"}}\n\n";

const ERROR_JSON: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\
    content-length: 26\r\n\r\n{\"error\":{\"message\":\"no\"}}";

fn ready() -> Value {
    json!({"model": "m", "prompt": [1], "stream": true, "ready": 2})
}

fn outcomes(world: &World, outcome: &str) -> u64 {
    let series = format!("requests_total{{outcome=\"{outcome}\",route=\"completions\"}}");
    world.metric(&series)
}

#[tokio::test]
async fn an_error_in_place_of_an_answer_goes_to_another_worker_and_counts_as_a_failure() {
    for (answer, request) in [(ERROR_STREAM, ready()), (ERROR_JSON, body(4))] {
        let (failing, alive) = (Engine::closing_after(answer).await, Engine::start().await);
        let world = World::with(&[&failing, &alive]).await;
        let response = world.send("/v1/completions", &request).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["x-warmroute-worker"], "w1");
        assert!(!response.text().await.unwrap().contains("error"));
        world.until_quiet().await;
        assert_eq!((outcomes(&world, "ok"), outcomes(&world, "failed")), (1, 0));
        assert_eq!(world.metric("retries_total{reason=\"error_answer\"}"), 1);
        let failures = "engine_failures_total{kind=\"error_answer\"}";
        assert_eq!(world.metric(failures), 1);
        let freed = world.app.core.core().counts().freed;
        assert_eq!((freed.completed, freed.failed), (1, 1));

        let alone = World::with(&[&failing]).await;
        let response = alone.send("/v1/completions", &request).await;
        assert!(response.text().await.unwrap().contains("error"));
        alone.until_quiet().await;
        assert_eq!((outcomes(&alone, "ok"), outcomes(&alone, "failed")), (0, 1));
        assert_eq!(alone.metric(failures), 1);
        let freed = alone.app.core.core().counts().freed;
        assert_eq!((freed.completed, freed.failed), (0, 1));
    }
}

#[tokio::test]
async fn an_error_in_mid_stream_is_a_failure() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let mut response = world.send("/v1/completions", &streaming()).await;
    engine.release_event(&mut response).await;
    let error = "event: error\ndata: {\"type\":\"error\"}\n\n";
    assert_eq!(engine.release(error, &mut response).await, error);
    engine.end_stream();
    assert!(response.chunk().await.unwrap().is_none());
    world.until_quiet().await;
    assert_eq!((outcomes(&world, "ok"), outcomes(&world, "failed")), (0, 1));
    assert_eq!(failures(&world), 2);
}

/// Failures that the first worker's circuit breaker counts.
fn failures(world: &World) -> u32 {
    world.app.fleet.snapshot()[0].breaker.counts().0
}

#[tokio::test]
async fn a_stream_that_breaks_counts_twice_and_one_without_output_once() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let mut response = world.send("/v1/completions", &streaming()).await;
    engine.release_event(&mut response).await;
    engine.break_stream();
    assert!(response.chunk().await.is_err());
    world.until_quiet().await;
    assert_eq!(failures(&world), 2);
    engine.answer_with(StatusCode::INTERNAL_SERVER_ERROR);
    let response = world.send("/v1/completions", &body(4)).await;
    response.bytes().await.unwrap();
    world.until_quiet().await;
    assert_eq!(failures(&world), 3);
}

#[tokio::test]
async fn a_worker_that_fails_by_status_fails_no_request_and_leaves() {
    for status in [401, 403, 404, 429, 500, 504] {
        let (failing, alive) = (Engine::start().await, Engine::start().await);
        failing.answer_with(StatusCode::from_u16(status).unwrap());
        let world = World::with(&[&failing, &alive]).await;
        for _ in 0..20 {
            let response = world.send("/v1/completions", &body(4)).await;
            assert_eq!(response.status(), 200, "{status}");
            response.bytes().await.unwrap();
        }
        let workers = world.app.fleet.snapshot();
        assert!(workers[0].breaker.is_open(), "{status}");
        assert!(!workers[1].breaker.is_tripped(), "{status}");
        assert!(failing.asked() <= 10, "{status}");
        world.until_quiet().await;
        assert_eq!(outcomes(&world, "ok"), 20);
        let freed = world.app.core.core().counts().freed;
        assert_eq!(freed.failed, failing.asked() as u64, "{status}");
    }
}

#[tokio::test]
async fn a_request_on_which_all_engines_fail_opens_nothing_and_reaches_two() {
    let engines = [
        Engine::start().await,
        Engine::start().await,
        Engine::start().await,
    ];
    for engine in &engines {
        engine.answer_with(StatusCode::INTERNAL_SERVER_ERROR);
    }
    let world = World::with(&[&engines[0], &engines[1], &engines[2]]).await;
    for number in 1..=20 {
        let response = world.send("/v1/completions", &body(4)).await;
        assert_eq!(response.status(), 500);
        assert_eq!(response.text().await.unwrap(), "the engine's body");
        let asked: usize = engines.iter().map(Engine::asked).sum();
        assert_eq!(asked, 2 * number);
    }
    let workers = world.app.fleet.snapshot();
    assert!(workers.iter().all(|worker| !worker.breaker.is_tripped()));
    world.until_quiet().await;
    assert_eq!(outcomes(&world, "engine_5xx"), 20);
}

/// Otherwise a worker that gets few requests but repeated ones would fail most of what it gets.
#[tokio::test]
async fn a_failure_that_another_worker_repeats_counts_once() {
    let engines = [Engine::start().await, Engine::start().await];
    for engine in &engines {
        engine.answer_with(StatusCode::INTERNAL_SERVER_ERROR);
    }
    let world = World::with(&[&engines[0], &engines[1]]).await;
    let response = world.send("/v1/completions", &body(4)).await;
    assert_eq!(response.status(), 500);
    response.bytes().await.unwrap();
    let asked: usize = engines.iter().map(Engine::asked).sum();
    assert_eq!(asked, 2);
    let workers = world.app.fleet.snapshot();
    let failed: u32 = workers.iter().map(|worker| worker.breaker.counts().0).sum();
    assert_eq!(failed, 1);
    world.until_quiet().await;
}

/// A stream that fails costs its client the answer, so that it is no first trial, and a trial until
/// it is whole or given up.
#[tokio::test(start_paused = true)]
async fn trials_of_a_failing_worker_begin_with_what_another_one_can_answer() {
    let _frozen = Frozen::new();
    let (failing, alive) = (Engine::start().await, Engine::start().await);
    failing.answer_with(StatusCode::INTERNAL_SERVER_ERROR);
    let world = World::with(&[&failing, &alive]).await;
    while !world.app.fleet.snapshot()[0].breaker.is_open() {
        let response = world.send("/v1/completions", &body(4)).await;
        response.bytes().await.unwrap();
    }
    failing.answer_with(StatusCode::OK);
    advance(Duration::from_secs(2)).await;
    world.app.fleet.tick();
    for _ in 0..6 {
        let whole = world.send("/v1/completions", &ready()).await;
        assert_eq!(whole.headers()["x-warmroute-worker"], "w1");
        whole.bytes().await.unwrap();
    }
    let failed = failing.asked();
    while failing.asked() == failed {
        let repeatable = world.send("/v1/completions", &body(4)).await;
        repeatable.bytes().await.unwrap();
    }
    // Clients have the first bytes of these, and leave.
    for _ in 0..2 {
        let (before, mut open) = (failing.asked(), Vec::new());
        for _ in 0..6 {
            open.push(begun(&world, [&failing, &alive]).await);
        }
        assert_eq!(failing.asked() - before, 2);
        drop(open);
        world.until_quiet().await;
    }
}

/// A stream of which its client has an event.
async fn begun(world: &World, engines: [&Engine; 2]) -> reqwest::Response {
    let asked = || engines.map(Engine::asked);
    let before = asked();
    let sent = TaskTracker::new().spawn(world.post("/v1/completions", &streaming()).send());
    let took = async {
        while asked() == before {
            tokio::task::yield_now().await;
        }
    };
    in_time("an engine has the request", took).await;
    let first = usize::from(asked()[0] == before[0]);
    engines[first].send(&event(0)).await;
    in_time("an answer", sent).await.unwrap().unwrap()
}

/// A client with a wrong key, or one that asks for what is not there.
#[tokio::test]
async fn clients_mistakes_are_hardly_repeated() {
    let engines = [Engine::start().await, Engine::start().await];
    for engine in &engines {
        engine.answer_with(StatusCode::UNAUTHORIZED);
    }
    let world = World::with(&[&engines[0], &engines[1]]).await;
    for _ in 0..100 {
        let response = world.send("/v1/completions", &body(4)).await;
        assert_eq!(response.status(), 401);
        response.bytes().await.unwrap();
    }
    let asked: usize = engines.iter().map(Engine::asked).sum();
    assert!((101..120).contains(&asked), "{asked}");
    assert!(world.metric("retries_denied_total{reason=\"status\"}") > 80);
    world.until_quiet().await;
}

#[tokio::test]
async fn retries_end_with_their_budget() {
    let (failing, alive) = (Engine::start().await, Engine::start().await);
    failing.answer_with(StatusCode::INTERNAL_SERVER_ERROR);
    let world = World::with(&[&failing, &alive]).await;
    let now = tokio::time::Instant::now().into_std();
    while world.app.retries.left(now) > 0 {
        let kind = crate::retry_budget::RetryKind::Usual;
        assert!(world.app.retries.take(kind, now));
    }
    let response = world.send("/v1/completions", &body(4)).await;
    assert_eq!(response.status(), 500);
    assert_eq!(alive.asked(), 0);
    assert_eq!(world.metric("retries_denied_total{reason=\"status\"}"), 1);
    world.until_quiet().await;
}

#[tokio::test]
async fn a_request_leaves_a_worker_that_is_lost_before_it_answers() {
    for is_stalled in [false, true] {
        let (hung, alive) = (Engine::hung().await, Engine::start().await);
        let world = World::with(&[&hung, &alive]).await;
        let sent = TaskTracker::new().spawn(world.post("/v1/completions", &body(4)).send());
        hung.until_asked().await;
        if is_stalled {
            let source = warmroute_proto::Source {
                worker: "w0".into(),
                dp_rank: warmroute_proto::DpRank(0),
            };
            world.app.core.losses().set_stalls(&[(source, 1)].into());
        } else {
            world.set_down(0, &hung);
        }
        let response = in_time("an answer", sent).await.unwrap().unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["x-warmroute-worker"], "w1");
        response.bytes().await.unwrap();
        assert_eq!(world.metric("retries_total{reason=\"lost\"}"), 1);
        world.until_quiet().await;
        assert_eq!(outcomes(&world, "ok"), 1);
    }
}

/// No other worker could answer, and this one may come back.
#[tokio::test]
async fn a_request_stays_at_a_lost_worker_without_another_one() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let waiting = json!({"model": "m", "prompt": [1, 2, 3], "hold": true});
    let sent = TaskTracker::new().spawn(world.post("/v1/completions", &waiting).send());
    engine.until_asked().await;
    world.set_down(0, &engine);
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(world.loads()[0].active_requests, 1);
    sent.abort();
    world.until_quiet().await;
}

#[tokio::test(start_paused = true)]
async fn a_silent_stream_ends_with_an_error_event() {
    let _frozen = Frozen::new();
    for is_lost in [false, true] {
        let engine = Engine::start().await;
        let world = World::with(&[&engine]).await;
        if !is_lost {
            world.set("engines.token_timeout_secs = 6");
        }
        let mut response = world.send("/v1/completions", &streaming()).await;
        engine.release_event(&mut response).await;
        if is_lost {
            world.set_down(0, &engine);
        }
        tokio::task::yield_now().await;
        advance(Duration::from_secs(6)).await;
        let rest = in_time("the stream ends", response.text()).await.unwrap();
        assert!(rest.contains("\"code\":\"upstream_silent\""), "{rest}");
        engine.until_abandoned().await;
        world.until_quiet().await;
        assert_eq!((outcomes(&world, "ok"), outcomes(&world, "failed")), (0, 1));
    }
}

/// Requests for a model whose workers sleep show the demand, and wake one if the settings say so.
#[tokio::test]
async fn a_request_for_a_sleeping_model_waits_until_it_is_awake() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let observe = |observation| {
        let worker = world.app.fleet.snapshot().remove(0).entry;
        world
            .app
            .fleet
            .observe(&worker.worker, &worker.url, observation);
    };
    observe(Asleep);
    let refused = world.send("/v1/completions", &body(4)).await;
    assert_eq!(refused.status(), 503);
    world::assert_error(refused, "no_worker").await;
    world.set("engine_wait_timeout_secs = 60\nengines.wake = true");
    let sent = TaskTracker::new().spawn(world.post("/v1/completions", &body(4)).send());
    let waits = async {
        while world.app.metrics.waiting().get() == 0 {
            tokio::task::yield_now().await;
        }
    };
    in_time("the request waits", waits).await;
    assert_eq!(world.metric("model_asleep_requests_total{model=\"m\"}"), 2);
    assert!(world.app.fleet.snapshot()[0].sleep.is_wanted);
    observe(ProbePassed);
    let served = in_time("an answer", sent).await.unwrap().unwrap();
    assert_eq!(served.status(), 200);
    world.until_quiet().await;
}
