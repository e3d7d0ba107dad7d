//! The proxy with small engines, over real sockets. Every wait is for an event; no test depends on
//! durations.

mod failing;
mod gateway;
mod hostile;
mod images;
mod legs;
mod moving;
mod peer_hints;
mod queueing;
mod resuming;
mod routes;
mod selections;
mod tenants;
mod tracing;
mod waiting;
mod world;

use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Value, json};
use tokio_util::task::TaskTracker;

use super::*;
use world::{Engine, World, body, event, in_time, streaming};

#[tokio::test]
async fn an_answer_explains_the_choice_and_leaves_no_slot() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let response = world
        .post("/v1/completions", &body(40))
        .header("x-request-id", "mine")
        .header("connection", "x-hop")
        .header("x-hop", "1")
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 200);
    let headers = response.headers().clone();
    assert_eq!(headers["x-request-id"], "mine");
    assert_eq!(headers["x-warmroute-worker"], "w0");
    assert_eq!(headers["x-warmroute-dp-rank"], "0");
    assert_eq!(headers["x-warmroute-overlap-blocks"], "0");
    assert_eq!(headers["x-warmroute-predicted-blocks"], "0");
    assert_eq!(headers["x-warmroute-basis"], "load_only");
    assert_eq!(headers["x-warmroute-index-state"], "unknown");
    assert_eq!(
        headers["x-warmroute-tier-states"],
        "gpu=unknown, cpu=unknown, disk=unknown"
    );
    let json: Value = response.json().await.unwrap();
    assert_eq!(json["usage"]["prompt_tokens"], 40);
    let seen = engine.last();
    assert_eq!(seen.headers["x-request-id"], "mine");
    assert_eq!(seen.headers["x-data-parallel-rank"], "0");
    assert!(!seen.headers.contains_key("x-hop"));
    world.until_quiet().await;
    assert_eq!(
        world.metric("requests_total{outcome=\"ok\",route=\"completions\"}"),
        1
    );
}

#[tokio::test]
async fn requests_count_for_their_model_and_worker_and_other_names_share_a_label() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    world
        .post("/v1/completions", &body(40))
        .send()
        .await
        .unwrap();
    let mut stream = world.send("/v1/completions", &streaming()).await;
    for _ in 0..3 {
        engine.release_event(&mut stream).await;
    }
    engine.end_stream();
    while stream.chunk().await.unwrap().is_some() {}
    world
        .raw("/v1/completions", r#"{"model":"mine","prompt":[1]}"#)
        .await;
    world
        .raw("/v1/embeddings", r#"{"model":"yours","input":"x"}"#)
        .await;
    world.raw("/v1/completions", "{").await;
    for status in [StatusCode::BAD_REQUEST, StatusCode::IM_A_TEAPOT] {
        engine.answer_with(status);
        world
            .post("/v1/completions", &body(40))
            .send()
            .await
            .unwrap();
    }
    world.until_quiet().await;
    for (labels, count) in [
        (r#"code="200",model="m",outcome="ok",worker="w0""#, 2),
        (
            r#"code="400",model="m",outcome="engine_4xx",worker="w0""#,
            1,
        ),
        (
            r#"code="4xx",model="m",outcome="engine_4xx",worker="w0""#,
            1,
        ),
        (r#"code="404",model="other",outcome="refused",worker="""#, 2),
        (r#"code="400",model="other",outcome="refused",worker="""#, 1),
    ] {
        let series = format!("model_requests_total{{{labels}}}");
        assert_eq!(world.metric(&series), count, "{series}");
    }
    let of_worker = |name: &str| world.metric(&format!("{name}{{model=\"m\",worker=\"w0\"}}"));
    assert_eq!(of_worker("model_request_seconds_count"), 4);
    assert_eq!(of_worker("model_ttft_seconds_count"), 1);
    assert_eq!(of_worker("model_inter_token_seconds_count"), 2);
    assert!(of_worker("model_prompt_tokens_total") >= 80);
    assert_eq!(world.metric("model_decision_seconds_count{model=\"m\"}"), 4);
}

#[tokio::test]
async fn the_engine_gets_the_body_unchanged_except_the_report_mode() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let odd = "{ \"prompt\":[1,2] ,\t\"model\":\"m\", \"x\": 1.50 }";
    world.raw("/v1/completions", odd).await;
    assert_eq!(engine.last().body, odd);
    let report = r#"{"model":"m","prompt":[1],"vllm_xargs":{"kv_cache_report_mode":"full"}}"#;
    world.raw("/v1/completions", report).await;
    assert_eq!(
        engine.last().body,
        r#"{"model":"m","prompt":[1],"vllm_xargs":{}}"#
    );
}

#[tokio::test]
async fn each_event_of_a_stream_passes_before_the_next_is_made() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let mut response = world.send("/v1/completions", &streaming()).await;
    for n in 0..3 {
        // The engine sends the next event only after the client has this one.
        assert_eq!(engine.release_event(&mut response).await, event(n));
    }
    let source = &world.loads()[0];
    assert_eq!((source.active_requests, source.prefill_tokens), (1, 0));
    engine.end_stream();
    assert!(response.chunk().await.unwrap().is_none());
    world.until_quiet().await;
}

#[tokio::test]
async fn a_client_that_closes_in_mid_stream_aborts_the_engines_work() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let mut response = world.send("/v1/completions", &streaming()).await;
    engine.release_event(&mut response).await;
    drop(response);
    engine.until_abandoned().await;
    world.until_quiet().await;
    assert_eq!(world.metric("upstream_cancels_total{phase=\"stream\"}"), 1);
    assert_eq!(
        world.metric("requests_total{outcome=\"client_gone\",route=\"completions\"}"),
        1
    );
}

#[tokio::test]
async fn a_stream_grows_by_a_block_every_sixteen_tokens() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let mut response = world.send("/v1/completions", &streaming()).await;
    engine.release_event(&mut response).await;
    let prompt = world.loads()[0].decode_blocks;
    for tokens in 2..=33 {
        engine.release_event(&mut response).await;
        let grown = world.loads()[0].decode_blocks - prompt;
        assert_eq!(grown, tokens / 16, "{tokens} tokens");
    }
    engine.end_stream();
    assert!(response.chunk().await.unwrap().is_none());
    world.until_quiet().await;
}

/// Many clients close at `[DONE]`, before the end of the transfer.
#[tokio::test]
async fn a_client_that_closes_at_the_last_event_has_the_whole_stream() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let mut response = world.send("/v1/completions", &streaming()).await;
    engine.release_event(&mut response).await;
    engine.release("data: [DONE]\n\n", &mut response).await;
    drop(response);
    engine.until_abandoned().await;
    world.until_quiet().await;
    for (series, count) in [
        ("requests_total{outcome=\"ok\",route=\"completions\"}", 1),
        (
            "requests_total{outcome=\"client_gone\",route=\"completions\"}",
            0,
        ),
        ("upstream_cancels_total{phase=\"stream\"}", 0),
    ] {
        assert_eq!(world.metric(series), count, "{series}");
    }
    let freed = world.app.core.core().counts().freed;
    assert_eq!((freed.completed, freed.aborted), (1, 0));
}

#[tokio::test]
async fn a_client_that_closes_before_the_first_token_aborts_the_engines_work() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let response = world.send("/v1/completions", &streaming()).await;
    drop(response);
    engine.until_abandoned().await;
    world.until_quiet().await;
    assert_eq!(
        world.metric("upstream_cancels_total{phase=\"before_first_token\"}"),
        1
    );
}

#[tokio::test]
async fn a_client_that_closes_in_the_queue_aborts_the_engines_work() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let waiting = json!({"model": "m", "prompt": [1, 2, 3], "hold": true});
    let request = world.post("/v1/completions", &waiting).send();
    let client = TaskTracker::new().spawn(request);
    engine.until_asked().await;
    assert_eq!(world.loads()[0].active_requests, 1);
    client.abort();
    engine.until_abandoned().await;
    world.until_quiet().await;
    assert_eq!(
        world.metric("upstream_cancels_total{phase=\"before_head\"}"),
        1
    );
}

#[tokio::test]
async fn an_engine_that_closes_in_mid_stream_breaks_the_answer_and_frees_the_slot() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let mut response = world.send("/v1/completions", &streaming()).await;
    engine.release_event(&mut response).await;
    engine.break_stream();
    assert!(response.chunk().await.is_err());
    world.until_quiet().await;
    assert_eq!(counting(&world), 1);
    assert_eq!(
        world.metric("requests_total{outcome=\"failed\",route=\"completions\"}"),
        1
    );
}

#[tokio::test]
async fn a_refused_connection_goes_to_the_next_worker() {
    let (dead, alive) = (Engine::dead().await, Engine::start().await);
    let world = World::with(&[&dead, &alive]).await;
    for _ in 0..2 {
        let response = world.send("/v1/completions", &body(40)).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["x-warmroute-worker"], "w1");
    }
    // The second request was not sent to the dead worker.
    assert_eq!(world.metric("retries_total{reason=\"connect\"}"), 1);
    world.until_quiet().await;
}

/// The workers are well: a request must not wait for a change of the fleet.
#[tokio::test]
async fn a_lack_of_files_is_reported_as_the_routers() {
    let (engine, closing) = (Engine::start().await, Engine::start().await);
    let world = World::with(&[&engine, &closing]).await;
    world.set("engine_wait_timeout_secs = 60");
    let held: Vec<_> = std::iter::from_fn(|| world.files.take()).collect();
    assert!(!held.is_empty());
    let refused = in_time("an answer", world.send("/v1/completions", &body(4))).await;
    assert_eq!((refused.status().as_u16(), engine.asked()), (503, 0));
    world::assert_error(refused, "router_full").await;
    drop(held);
    for _ in 0..4 {
        let served = world.send("/v1/completions", &body(4)).await;
        assert_eq!(served.status(), 200, "a worker counts as failed");
        served.bytes().await.unwrap();
    }
    assert_eq!([engine.asked(), closing.asked()], [2, 2]);
    world.until_quiet().await;
}

/// Clients of HTTP/2 send many requests on one connection.
#[tokio::test]
async fn requests_in_flight_are_bounded_by_the_files_that_may_be_open() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let held: Vec<_> = std::iter::from_fn(|| world.app.engines.permit()).collect();
    assert!(!held.is_empty());
    let refused = world.send("/v1/completions", &body(4)).await;
    assert_eq!((refused.status().as_u16(), engine.asked()), (503, 0));
    assert_eq!(refused.headers()["retry-after"], "1");
    world::assert_error(refused, "router_full").await;
    assert_eq!(world.get("/health").await.status(), 200);
    let count = held.len();
    drop(held);
    let served = world.send("/v1/completions", &body(4)).await;
    assert_eq!(served.status(), 200);
    served.bytes().await.unwrap();
    world.until_quiet().await;
    let free = std::iter::from_fn(|| world.app.engines.permit());
    assert_eq!(free.collect::<Vec<_>>().len(), count, "all are released");
}

/// The failure may be the router's own: no free port, no free file, no route.
#[tokio::test]
async fn a_connection_that_cannot_be_tried_does_not_make_the_worker_unhealthy() {
    let engine = Engine::unreachable().await;
    let world = World::with(&[&engine]).await;
    let response = world.send("/v1/completions", &body(40)).await;
    assert_eq!(response.status(), 503);
    assert!(world.app.fleet.snapshot()[0].health.usable());
    world.until_quiet().await;
}

#[tokio::test]
async fn a_503_goes_to_the_next_worker_and_passes_through_where_there_is_none() {
    let (busy, alive) = (Engine::start().await, Engine::start().await);
    busy.answer_with(StatusCode::SERVICE_UNAVAILABLE);
    let world = World::with(&[&busy, &alive]).await;
    let response = world.send("/v1/completions", &body(40)).await;
    assert_eq!(response.status(), 200);
    alive.answer_with(StatusCode::SERVICE_UNAVAILABLE);
    let response = world.send("/v1/completions", &body(40)).await;
    assert_eq!(response.status(), 503);
    assert_eq!(response.text().await.unwrap(), "the engine's body");
    world.until_quiet().await;
}

/// The other worker may take long, and has the request alone.
#[tokio::test]
async fn a_worker_that_answered_503_has_a_free_place_while_another_is_asked() {
    let (busy, hung) = (Engine::start().await, Engine::hung().await);
    busy.answer_with(StatusCode::SERVICE_UNAVAILABLE);
    let world = World::with(&[&busy, &hung]).await;
    let sent = TaskTracker::new().spawn(world.post("/v1/completions", &body(4)).send());
    hung.until_asked().await;
    let active = |load: &crate::route::SourceLoad| load.active_requests;
    world
        .until(|loads| loads.iter().map(active).eq([0, 1]))
        .await;
    sent.abort();
    world.until_quiet().await;
}

/// Two engines may have crashed on it.
#[tokio::test]
async fn a_request_that_was_broken_twice_is_not_repeated() {
    let engines = [
        Engine::mute().await,
        Engine::mute().await,
        Engine::mute().await,
    ];
    let world = World::with(&[&engines[0], &engines[1], &engines[2]]).await;
    let response = world.send("/v1/completions", &body(4)).await;
    assert_eq!(response.status(), 502);
    world::assert_error(response, "upstream_failed").await;
    let asked: Vec<usize> = engines.iter().map(Engine::asked).collect();
    assert_eq!(
        (asked.iter().sum::<usize>(), asked.iter().max()),
        (2, Some(&1))
    );
    assert_eq!(world.metric("retries_total{reason=\"broken\"}"), 1);
    world.until_quiet().await;
    assert_eq!(world.app.core.core().counts().freed.failed, 2);
}

#[tokio::test]
async fn a_request_that_was_broken_once_is_repeated_elsewhere() {
    let (mute, alive) = (Engine::mute().await, Engine::start().await);
    let world = World::with(&[&mute, &alive]).await;
    let response = world.send("/v1/completions", &body(4)).await;
    assert_eq!(response.status(), 200);
    assert_eq!((mute.asked(), alive.asked()), (1, 1));
    world.until_quiet().await;
}

/// An engine that closes idle connections when they are used again fails no request.
#[tokio::test]
async fn a_stale_connection_is_retried_on_a_new_one() {
    let engine = Engine::closing_at_reuse().await;
    let world = World::with(&[&engine]).await;
    for number in 1..=20 {
        let response = world.send("/v1/completions", &body(4)).await;
        assert_eq!(response.status(), 200, "request {number}");
        response.bytes().await.unwrap();
        assert_eq!(engine.asked(), number);
    }
    world.until_quiet().await;
    assert!(world.metric("retries_total{reason=\"stale_connection\"}") >= 1);
    assert_eq!(world.metric("retries_total{reason=\"broken\"}"), 0);
}

/// The crash on a pooled connection looks like a stale connection.
#[tokio::test]
async fn a_request_that_crashes_engines_on_pooled_connections_reaches_two() {
    let engines = [
        Engine::crashing_at_reuse().await,
        Engine::crashing_at_reuse().await,
        Engine::crashing_at_reuse().await,
    ];
    let world = World::with(&[&engines[0], &engines[1], &engines[2]]).await;
    for engine in &engines {
        engine.connect(&world.app.engines).await;
    }
    let response = world.send("/v1/completions", &body(4)).await;
    assert_eq!(response.status(), 502);
    world::assert_error(response, "upstream_failed").await;
    let asked: usize = engines.iter().map(Engine::asked).sum();
    assert_eq!(asked, 2);
    assert_eq!(
        world.metric("retries_total{reason=\"stale_connection\"}"),
        2
    );
    assert_eq!(world.metric("retries_total{reason=\"broken\"}"), 1);
    assert_eq!(counting(&world), 2);
    world.until_quiet().await;
}

/// The body is held, so that each route's request can be sent again.
#[tokio::test]
async fn a_stale_connection_is_retried_on_each_route() {
    let routes = [
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/audio/speech",
        "/rerank",
        "/tokenize",
    ];
    for path in routes {
        let engine = Engine::closing_at_reuse().await;
        let world = World::with(&[&engine]).await;
        engine.connect(&world.app.engines).await;
        let json = json!({"model": "m", "input": "x"});
        let response = world.send(path, &json).await;
        assert_eq!(response.status(), 200, "{path}");
        let retries = world.metric("retries_total{reason=\"stale_connection\"}");
        assert_eq!(retries, 1, "{path}");
        assert_eq!(engine.asked(), 2, "{path}: the first made the connection");
        world.until_quiet().await;
    }
}

/// Workers whose circuit breakers count requests.
fn counting(world: &World) -> usize {
    let workers = world.app.fleet.snapshot().into_iter();
    workers
        .filter(|worker| worker.breaker.is_counting())
        .count()
}

#[tokio::test]
async fn a_503_is_the_answer_where_all_later_attempts_break() {
    let (busy, mute) = (Engine::start().await, Engine::mute().await);
    busy.answer_with(StatusCode::SERVICE_UNAVAILABLE);
    let other = Engine::mute().await;
    let world = World::with(&[&busy, &mute, &other]).await;
    let response = world.send("/v1/completions", &body(4)).await;
    assert_eq!(response.status(), 503);
    assert_eq!(response.text().await.unwrap(), "the engine's body");
    assert_eq!((busy.asked(), mute.asked(), other.asked()), (1, 1, 1));
    world.until_quiet().await;
}

#[tokio::test]
async fn an_engine_at_a_unix_socket_is_asked_as_others_are() {
    let dir = tempfile::tempdir().unwrap();
    let gone = tempfile::tempdir().unwrap();
    let (engine, dead) = (
        Engine::at_socket(dir.path()).await,
        Engine::at_socket(gone.path()).await,
    );
    let world = World::with(&[&dead, &engine]).await;
    gone.close().unwrap();
    let response = world.send("/v1/completions", &body(4)).await;
    assert_eq!(response.status(), 200);
    assert_eq!(world.metric("retries_total{reason=\"connect\"}"), 1);
    let mut stream = world.send("/v1/completions", &streaming()).await;
    assert_eq!(engine.release_event(&mut stream).await, event(0));
    engine.end_stream();
    assert_eq!(stream.chunk().await.unwrap(), None);
    let json = json!({"model": "m", "input": "x"});
    assert_eq!(world.send("/v1/embeddings", &json).await.status(), 200);
    assert_eq!(engine.asked(), 3);
    assert_eq!(engine.last().headers["host"], "localhost");
    // A socket that is absent is proof: the worker is not tried again.
    assert_eq!(world.metric("retries_total{reason=\"connect\"}"), 1);
    world.until_quiet().await;
}

/// A client behind the router must not see two framings of one body.
#[tokio::test]
async fn an_answer_with_a_length_and_chunks_is_a_502() {
    let engine = Engine::with_two_lengths().await;
    let world = World::with(&[&engine]).await;
    let response = world.send("/v1/completions", &body(4)).await;
    assert_eq!(response.status(), 502);
    world::assert_error(response, "upstream_failed").await;
    assert_eq!(counting(&world), 1);
    world.until_quiet().await;
}

/// The worker's probes pass: two broken requests do not take it out of the choice.
#[tokio::test]
async fn two_broken_requests_leave_a_worker_in_service() {
    let (mute, alive) = (Engine::mute().await, Engine::start().await);
    let world = World::with(&[&mute, &alive]).await;
    for number in 1..=8 {
        let response = world.send("/v1/completions", &body(4)).await;
        assert_eq!(response.status(), 200);
        let workers = world.app.fleet.snapshot();
        assert!(workers[0].health.usable());
        let expected = mute.asked() >= 3;
        assert_eq!(workers[0].breaker.is_open(), expected, "request {number}");
    }
    assert!(mute.asked() >= 3);
    world.until_quiet().await;
}

/// The ranks of a worker share one HTTP server.
#[tokio::test]
async fn a_worker_of_several_ranks_that_answers_503_is_asked_once() {
    let (busy, alive) = (Engine::start().await.with_ranks(3), Engine::start().await);
    busy.answer_with(StatusCode::SERVICE_UNAVAILABLE);
    let alone = World::with(&[&busy]).await;
    let response = alone.send("/v1/completions", &body(4)).await;
    assert_eq!(response.status(), 503);
    assert_eq!(busy.asked(), 1);
    alone.until_quiet().await;
    let world = World::with(&[&busy, &alive]).await;
    let response = world.send("/v1/completions", &body(4)).await;
    assert_eq!(response.status(), 200);
    assert_eq!((busy.asked(), alive.asked()), (2, 1));
    world.until_quiet().await;
}

#[tokio::test]
async fn a_redirection_is_passed_on_and_not_followed() {
    let engine = Engine::start().await;
    engine.answer_with(StatusCode::TEMPORARY_REDIRECT);
    let world = World::with(&[&engine]).await;
    let response = world.send("/v1/completions", &body(4)).await;
    assert_eq!(response.status(), 307);
    assert_eq!(response.headers()["location"], "/elsewhere");
    assert_eq!(response.text().await.unwrap(), "the engine's body");
    assert_eq!(engine.asked(), 1);
    world.until_quiet().await;
}

#[tokio::test]
async fn the_engines_own_4xx_is_the_answer() {
    let (one, other) = (Engine::start().await, Engine::start().await);
    for engine in [&one, &other] {
        engine.answer_with(StatusCode::UNPROCESSABLE_ENTITY);
    }
    let world = World::with(&[&one, &other]).await;
    let response = world.send("/v1/completions", &body(4)).await;
    assert_eq!(response.status(), 422);
    assert_eq!(response.text().await.unwrap(), "the engine's body");
    assert_eq!(one.asked() + other.asked(), 1);
    world.until_quiet().await;
}

#[tokio::test]
async fn all_workers_down_is_a_clear_503() {
    let (one, other) = (Engine::dead().await, Engine::dead().await);
    let world = World::with(&[&one, &other]).await;
    for _ in 0..2 {
        let response = world.send("/v1/completions", &body(4)).await;
        assert_eq!(response.status(), 503);
        assert!(response.headers().contains_key("retry-after"));
        world::assert_error(response, "no_worker").await;
    }
    world.until_quiet().await;
}

#[tokio::test]
async fn invalid_requests_are_refused_in_openais_form() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let chat = "/v1/chat/completions";
    let deep = format!("{{\"model\":\"m\",\"messages\":{}", "[".repeat(100_000));
    for (path, text, status) in [
        (chat, "{\"model\": \"m\", \"messages\": [", 400),
        (chat, "", 400),
        (chat, "{}", 400),
        (chat, deep.as_str(), 400),
        (chat, "{\"model\":\"none\",\"messages\":[]}", 404),
        (
            "/v1/completions",
            "{\"model\":\"none\",\"prompt\":[1]}",
            404,
        ),
        (
            "/v1/embeddings",
            "{\"model\":\"none\",\"input\":\"x\"}",
            404,
        ),
        ("/v2/completions", "{}", 404),
    ] {
        let response = world.raw(path, text).await;
        assert_eq!(
            response.status(),
            status,
            "{path} {}",
            &text[..text.len().min(60)]
        );
        let json: Value = response.json().await.unwrap();
        assert!(json["error"]["message"].is_string(), "{json}");
        assert!(json["error"]["type"].is_string(), "{json}");
    }
    let response = world.get("/v1/completions").await;
    assert_eq!(response.status(), 405);
    world::assert_error(response, "method_not_allowed").await;
    assert_eq!(engine.asked(), 0);
    assert_eq!(world.send("/v1/completions", &body(4)).await.status(), 200);
}

#[tokio::test]
async fn an_empty_fleet_is_a_503() {
    let world = World::with(&[]).await;
    let response = world.send("/v1/completions", &body(4)).await;
    assert_eq!(response.status(), 503);
    assert!(response.headers().contains_key("retry-after"));
    world::assert_error(response, "no_worker").await;
}

#[tokio::test]
async fn full_workers_are_a_429() {
    let engine = Engine::start().await;
    let world = World::with_active_max(&[&engine], 1).await;
    world.set("engines.queue_timeout_secs = 0");
    let mut first = world.send("/v1/completions", &streaming()).await;
    engine.release_event(&mut first).await;
    let second = world.send("/v1/completions", &body(4)).await;
    assert_eq!(second.status(), 429);
    assert!(second.headers().contains_key("retry-after"));
    world::assert_error(second, "workers_full").await;
    drop(first);
    world.until_quiet().await;
    assert_eq!(world.send("/v1/completions", &body(4)).await.status(), 200);
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_a_413_even_to_a_client_that_writes_it_all_first() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let huge = "x".repeat(64 << 20);
    let response = world.raw("/v1/completions", &huge).await;
    assert_eq!(response.status(), 413);
    world::assert_error(response, "request_too_large").await;
    assert_eq!(engine.asked(), 0);
    assert_eq!(world.send("/v1/completions", &body(4)).await.status(), 200);
}

#[tokio::test]
async fn the_models_of_all_workers_are_listed_once() {
    let (one, other) = (Engine::start().await, Engine::start().await);
    let world = World::with(&[&one, &other]).await;
    let list: Value = world.get("/v1/models").await.json().await.unwrap();
    let names: Vec<&str> = list["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|card| card["id"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["a", "m"]);
    assert_eq!(list["data"][0]["parent"], "m");
    let one: Value = world.get("/v1/models/m").await.json().await.unwrap();
    assert_eq!(one["id"], "m");
    for name in ["none", "%ff", "a%00"] {
        let response = world.get(&format!("/v1/models/{name}")).await;
        assert_eq!(response.status(), 404, "{name}");
        world::assert_error(response, "model_not_found").await;
    }
}

#[tokio::test]
async fn other_routes_pass_through_by_load() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    for (path, text) in [
        ("/v1/embeddings?x=1", "{\"model\":\"m\",\"input\":\"a\"}"),
        ("/v1/audio/speech", "anything at all"),
        ("/tokenize", "{\"prompt\":\"a\"}"),
    ] {
        let response = world.raw(path, text).await;
        assert_eq!(response.status(), 200, "{path}");
        let seen = engine.last();
        assert_eq!((seen.path.as_str(), seen.body.as_str()), (path, text));
    }
    world.until_quiet().await;
    // `/tokenize` has no prompt, and that of embeddings is read.
    let unhashed = |reason| format!("unhashed_requests_total{{reason=\"{reason}\"}}");
    assert_eq!(world.metric(&unhashed("other_route")), 1);
    assert_eq!(world.metric(&unhashed("no_tokenizer")), 1);
}

#[tokio::test]
async fn trace_ids_are_passed_on_and_returned() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    for (path, status) in [
        ("/v1/completions", 200),
        ("/v1/embeddings", 200),
        ("/v3/x", 404),
    ] {
        let sent = world
            .post(path, &body(4))
            .header("x-correlation-id", "order 7")
            .header("traceparent", trace);
        let response = sent.send().await.unwrap();
        assert_eq!(response.status(), status);
        assert_eq!(response.headers()["x-correlation-id"], "order 7");
        assert_eq!(response.headers()["traceparent"], trace);
        assert!(response.headers().contains_key("x-request-id"));
    }
    assert_eq!(engine.last().headers["x-correlation-id"], "order 7");
    assert_eq!(engine.last().headers["traceparent"], trace);
    let long = "x".repeat(257);
    let sent = world.post("/v1/completions", &body(4));
    let response = sent.header("x-correlation-id", &long).send().await.unwrap();
    assert!(!response.headers().contains_key("x-correlation-id"));
    assert!(
        !response.headers().contains_key("traceparent"),
        "the client sent none"
    );
    assert_eq!(engine.last().headers["x-correlation-id"], long);
    world.until_quiet().await;
}

#[tokio::test]
async fn reported_cached_tokens_are_in_the_journal() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let response = world
        .post("/v1/completions", &body(40))
        .header("x-request-id", "audited")
        .send()
        .await
        .unwrap();
    response.bytes().await.unwrap();
    world.until_quiet().await;
    let newest = world.newest_decision();
    assert_eq!(newest[0]["request_id"], "audited");
    assert_eq!(newest[0]["cached_tokens"], 32);
    assert_eq!(newest[0]["cheapest"][0]["worker"], "w0");
    assert_eq!(world.metric("overlap_reported_tokens_total"), 32);
}

#[tokio::test]
async fn a_prompt_without_a_stream_counts_as_prefill_for_the_predicted_time() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let waiting = json!({"model": "m", "prompt": vec![7; 64], "hold": true});
    let client = TaskTracker::new().spawn(world.post("/v1/completions", &waiting).send());
    engine.until_asked().await;
    world.until(|loads| loads[0].prefill_tokens == 0).await;
    assert_eq!(world.loads()[0].active_requests, 1);
    client.abort();
    world.until_quiet().await;
}

#[tokio::test]
async fn the_probes_report_readiness() {
    let world = World::with(&[]).await;
    let ask = async |healthy: u16, ready: u16| {
        for path in ["/health", "/healthz", "/liveness"] {
            assert_eq!(world.get(path).await.status(), healthy, "{path}");
        }
        for path in ["/readyz", "/readiness"] {
            assert_eq!(world.get(path).await.status(), ready, "{path}");
        }
    };
    ask(200, 200).await;
    world.app.ready.drain(tokio::time::Instant::now());
    ask(200, 503).await;
    world.app.ready.undrain();
    ask(200, 200).await;
}

#[tokio::test]
async fn a_leaving_router_serves_on_and_closes_each_connection_after_the_answer() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let answer = world.send("/v1/completions", &body(20)).await;
    assert!(!answer.headers().contains_key("connection"));
    world.app.ready.drain(tokio::time::Instant::now());
    for path in ["/v1/completions", "/v1/nothing", "/v1/models"] {
        let answer = world.send(path, &body(20)).await;
        assert_eq!(answer.headers()["connection"], "close", "{path}");
    }
    world.app.ready.undrain();
    let answer = world.send("/v1/completions", &body(20)).await;
    assert_eq!(answer.status(), 200);
    assert!(!answer.headers().contains_key("connection"));
}

/// Connections that the system completed before the socket closed are served, though they were not
/// accepted yet and their requests come later.
#[tokio::test]
async fn connections_in_the_backlog_are_served_after_the_stop() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let world = World::with(&[]).await;
    let address = world.url.trim_start_matches("http://");
    // One thread: they are not accepted before the stop.
    let streams: Vec<std::net::TcpStream> = (0..20)
        .map(|_| std::net::TcpStream::connect(address).unwrap())
        .collect();
    world.app.ready.end(tokio::time::Instant::now());
    world.shutdown.stop.cancel();
    let connected = async {
        while world.app.metrics.connections().open.get() < 20 {
            tokio::task::yield_now().await;
        }
    };
    in_time("all are connected", connected).await;
    for stream in streams {
        stream.set_nonblocking(true).unwrap();
        let mut stream = tokio::net::TcpStream::from_std(stream).unwrap();
        let request = b"GET /health HTTP/1.1\r\nhost: r\r\n\r\n";
        stream.write_all(request).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn a_stop_lets_open_streams_finish_and_a_force_closes_them() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let mut response = world.send("/v1/completions", &streaming()).await;
    engine.release_event(&mut response).await;
    world.shutdown.stop.cancel();
    engine.release_event(&mut response).await;
    world.shutdown.force.cancel();
    assert!(response.chunk().await.is_err());
    world.connections.close();
    world.connections.wait().await;
    world.until_quiet().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_head_that_never_ends_times_out() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let world = World::with(&[]).await;
    let address = world.url.trim_start_matches("http://");
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    stream
        .write_all(b"GET /health HTTP/1.1\r\nx: ")
        .await
        .unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    assert!(!answer.starts_with(b"HTTP/1.1 200"));
    drop(Arc::clone(&world.app));
}

/// The answer is in OpenAI's form, and the connection is closed.
#[tokio::test(start_paused = true)]
async fn a_body_that_never_ends_is_a_408() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let world = World::with(&[]).await;
    let address = world.url.trim_start_matches("http://");
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let head = b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: 90\r\n\r\n{";
    stream.write_all(head).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    assert!(answer.contains("connection: close"), "{answer}");
    assert!(answer.contains("{\"error\":{"), "{answer}");
    world.until_quiet().await;
}

/// All fields that `/admin/decisions` promises.
#[tokio::test]
async fn a_decision_is_shown_with_its_terms_and_the_reported_tokens() {
    let engines = [Engine::start().await, Engine::start().await];
    let world = World::with(&[&engines[0], &engines[1]]).await;
    for (tokens, id) in [(40, "first"), (20, "second")] {
        let sent = world.post("/v1/completions", &body(tokens));
        let answer = sent.header("x-request-id", id).send().await.unwrap();
        answer.bytes().await.unwrap();
    }
    world.until_quiet().await;
    let shown = world.newest_decision();
    let [newest] = &shown[..] else {
        panic!("not one decision: {shown:?}");
    };
    assert_eq!(newest["request_id"], "second");
    assert_eq!(newest["model"], "m");
    assert_eq!(newest["worker"], "w1");
    assert_eq!(newest["rung"], "load_only");
    assert_eq!(newest["index_state"], "unknown");
    for (key, number) in [
        ("number", 1),
        ("overlap_blocks", 0),
        ("predicted_blocks", 0),
        ("block_size", 16),
        ("prefill_tokens", 20),
        ("credited_tokens", 0),
        ("cached_tokens", 16),
        ("candidates", 2),
    ] {
        assert_eq!(newest[key], number, "{key}");
    }
    assert!(newest["predicted_ttft_ms"].is_number());
    let cheapest = newest["cheapest"].as_array().unwrap();
    assert_eq!(cheapest.len(), 2);
    let sum = |key: &str| -> f64 {
        cheapest
            .iter()
            .map(|terms| terms[key].as_f64().unwrap())
            .sum()
    };
    assert!((sum("probability") - 1.0).abs() < 1e-9, "{newest}");
    for terms in cheapest {
        let factor = |term: &str| terms["factors"][term].as_f64().unwrap();
        let [prefill, expected, decode, cost] = [
            "prefill_blocks",
            "prediction_blocks",
            "decode_blocks",
            "cost",
        ]
        .map(|key| terms[key].as_f64().unwrap());
        let sum = (prefill - expected) * factor("prefill") + decode * factor("decode");
        assert!((sum - cost).abs() < 1e-9, "{terms}");
        // The request before was answered with a cached block, and there is no index.
        assert_eq!(terms["overlap"]["gpu"], terms["reported_blocks"]);
        let state = match terms["reported_blocks"].as_u64() {
            Some(1..) => "unverified",
            _ => "unknown",
        };
        assert_eq!(terms["state"], state);
        assert_eq!(terms["active_requests"], 0);
        assert!(terms["worker"].is_string() && terms["dp_rank"] == 0);
    }
}
