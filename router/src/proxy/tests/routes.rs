//! Which requests reach an engine, and which engine.

use axum::http::Method;

use super::*;

#[tokio::test]
async fn listed_routes_reach_an_engine_and_no_others_do() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    for path in [
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/score",
        "/v1/score",
        "/pooling",
        "/classify",
        "/v1/messages",
        "/v1/audio/transcriptions",
    ] {
        let response = world.send(path, &json!({"model": "m", "x": 1})).await;
        assert_eq!((response.status().as_u16(), path), (200, path));
        assert_eq!(engine.last().path, path);
    }
    assert_eq!(world.get("/version").await.status(), 200);
    assert_eq!(engine.last().path, "/version");
    let asked = engine.asked();
    for (path, status) in [
        ("/v1/load_lora_adapter", 404),
        ("/v1/unload_lora_adapter", 404),
        ("/v1/anything", 404),
        ("/v1/%65mbeddings", 404),
        ("/v1//embeddings", 404),
        ("/v1/x%2f..%2fmetrics", 404),
        ("/v1/a;b", 404),
        ("/metrics", 404),
        ("/reset_prefix_cache", 404),
        ("/v1/models", 405),
        ("/version", 405),
    ] {
        let response = world.send(path, &json!({"model": "m"})).await;
        assert_eq!((response.status().as_u16(), path), (status, path));
    }
    assert_eq!(world.get("/v1/embeddings").await.status(), 405);
    assert_eq!(world.get("/ping").await.status(), 200);
    assert_eq!(world.send("/ping", &json!({})).await.status(), 200);
    assert_eq!(engine.asked(), asked);
    world.until_quiet().await;
}

#[tokio::test]
async fn an_operator_adds_routes() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    world.set("extra_routes = [\"/v1/voices\", \"/v1/batches/\", \"/v2/voices\"]");
    for (method, path, status) in [
        (Method::GET, "/v1/voices", 200),
        (Method::POST, "/v1/batches/b1/cancel", 200),
        (Method::POST, "/v2/voices", 200),
        (Method::POST, "/v2/other", 404),
        (Method::DELETE, "/v1/voices", 405),
        (Method::GET, "/v1/voices/x", 404),
        (Method::GET, "/v1/batches", 404),
        (Method::GET, "/v1/batches/%2e%2e/load_lora_adapter", 404),
    ] {
        let response = world.request(method, path).send().await.unwrap();
        assert_eq!((response.status().as_u16(), path), (status, path));
    }
    world.until_quiet().await;
}

/// Engines cache the prompts of these routes as those of completions.
#[tokio::test]
async fn prompts_of_other_routes_are_read() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    world.set("extra_routes = [\"/invocations\", \"/inference/v1/generate\"]");
    let unhashed = |reason| {
        let series = format!("unhashed_requests_total{{reason=\"{reason}\"}}");
        world.metric(&series)
    };
    let ids: Vec<u32> = (0..40).collect();
    for (path, body) in [
        ("/v1/embeddings", json!({"model": "m", "input": ids})),
        ("/classify", json!({"model": "m", "input": [ids]})),
        ("/pooling", json!({"input": ids, "task": "embed"})),
        ("/inference/v1/generate", json!({"token_ids": ids})),
        ("/invocations", json!({"prompt": ids})),
        ("/invocations", json!({"input": ids})),
    ] {
        let response = world.post(path, &body).send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        let seen = engine.last();
        assert_eq!((seen.path.as_str(), seen.body), (path, body.to_string()));
    }
    let reasons = [
        "other_route",
        "unknown_item",
        "several_prompts",
        "no_tokenizer",
    ];
    assert_eq!(reasons.map(unhashed), [0; 4]);
    for (path, body, reason) in [
        (
            "/v1/embeddings",
            json!({"input": ["a", "b"]}),
            "several_prompts",
        ),
        ("/v1/embeddings", json!({"messages": []}), "unknown_item"),
        (
            "/inference/v1/generate",
            json!({"model": "m"}),
            "unknown_item",
        ),
        (
            "/invocations",
            json!({"messages": [{"role": "user", "content": "a"}]}),
            "no_tokenizer",
        ),
        (
            "/invocations",
            json!({"query": "a", "documents": []}),
            "other_route",
        ),
    ] {
        let before = unhashed(reason);
        let response = world.post(path, &body).send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        assert_eq!(unhashed(reason), before + 1, "{path} {body}");
    }
    world.until_quiet().await;
}

/// A path that an operator added is read as the route that it ends with. Others reach the engine
/// unread.
#[tokio::test]
async fn prompts_of_added_routes_are_read() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    world.set("extra_routes = [\"/v2/embed\", \"/custom\", \"/team/\"]");
    let unhashed = |reason| {
        let series = format!("unhashed_requests_total{{reason=\"{reason}\"}}");
        world.metric(&series)
    };
    let ids: Vec<u32> = (0..40).collect();
    for (path, body, reason) in [
        ("/v2/embed", json!({"texts": ["a"]}), "no_tokenizer"),
        ("/v2/embed", json!({"texts": ["a", "b"]}), "several_prompts"),
        ("/team/v2/embed", json!({"texts": ["a"]}), "no_tokenizer"),
        ("/team/pooling", json!({"messages": []}), "unknown_item"),
        ("/team/embed", json!({"texts": ["a"]}), "other_route"),
        ("/custom", json!({"prompt": ids}), "other_route"),
        ("/custom", json!([1]), "other_route"),
    ] {
        let before = unhashed(reason);
        let response = world.post(path, &body).send().await.unwrap();
        assert_eq!(response.status(), 200, "{path} {body}");
        let seen = engine.last();
        assert_eq!((seen.path.as_str(), seen.body), (path, body.to_string()));
        assert_eq!(unhashed(reason), before + 1, "{path} {body}");
    }
    let before = unhashed("no_tokenizer");
    let body = json!({"prompt": ids});
    let response = world
        .post("/team/v1/completions", &body)
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(engine.last().path, "/team/v1/completions");
    assert_eq!(unhashed("no_tokenizer"), before, "its tokens are known");
    assert_eq!(unhashed("other_route"), 3);
    world.until_quiet().await;
}

/// It would make the engine announce its blocks again.
#[tokio::test]
async fn no_route_passes_the_report_mode() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    world.set("extra_routes = [\"/invocations\", \"/inference/v1/generate\"]");
    let mode = json!({"kv_cache_report_mode": "full"});
    for (path, body) in [
        ("/invocations", json!({"prompt": [1], "vllm_xargs": mode})),
        (
            "/inference/v1/generate",
            json!({"token_ids": [1], "sampling_params": {"extra_args": mode}}),
        ),
    ] {
        let response = world.post(path, &body).send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        let seen = engine.last().body;
        assert!(!seen.contains("report_mode"), "{path} {seen}");
    }
}

/// As engines do, which clients that follow redirects never see.
#[tokio::test]
async fn a_slash_behind_a_route_is_redirected() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    world.set("extra_routes = [\"/v2/embed\"]");
    for (path, target) in [
        (
            "/v1/chat/completions/?x=1",
            Some("/v1/chat/completions?x=1"),
        ),
        ("/v1/embeddings/", Some("/v1/embeddings")),
        ("/v2/embed/", Some("/v2/embed")),
        ("/v1/voices/", None),
        ("//", None),
        ("/v1/chat/completions//", None),
    ] {
        let response = world.send(path, &json!({"model": "m"})).await;
        let status = target.map_or(404, |_| 307);
        assert_eq!((response.status().as_u16(), path), (status, path));
        let location = response.headers().get("location");
        assert_eq!(location.map(|to| to.to_str().unwrap()), target, "{path}");
    }
    world.until_quiet().await;
}

/// The engine takes its only model.
#[tokio::test]
async fn the_only_model_need_not_be_named() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    for body in ["{\"prompt\":[1]}", "{\"prompt\":[1],\"model\":null}"] {
        let response = world.raw("/v1/completions", body).await;
        assert_eq!(response.status(), 200);
        assert_eq!(engine.last().body, body);
    }
    let repeated = "{\"model\":\"none\",\"model\":\"m\"}";
    assert_eq!(world.raw("/v1/embeddings", repeated).await.status(), 200);
    let other = Engine::start().await;
    world.add_serving(1, &other, "other");
    for path in ["/v1/completions", "/v1/embeddings"] {
        let response = world.raw(path, "{\"prompt\":[1]}").await;
        assert_eq!(response.status(), 400, "{path}");
        world::assert_error(response, "missing_model").await;
    }
    world.until_quiet().await;
}

/// A form names its model behind the file, which is larger than what is read in the request's task.
#[tokio::test]
async fn a_form_is_routed_by_its_model_and_passes_unchanged() {
    let engines = [Engine::start().await, Engine::start().await];
    let world = World::with(&[&engines[0]]).await;
    world.add_serving(1, &engines[1], "whisper");
    let file = "RIFF\r\n--b\r\n".repeat(4_000);
    let form = |model: &str| {
        let head = "Content-Disposition: form-data; name=";
        format!(
            "--b0\r\n{head}\"file\"; filename=\"a.wav\"\r\n\r\n{file}\r\n\
             --b0\r\n{head}\"model\"\r\n\r\n{model}\r\n--b0--\r\n"
        )
    };
    let send = async |path: &str, body: &str| {
        let request = world.request(Method::POST, path).body(body.to_owned());
        let kind = "multipart/form-data; boundary=b0";
        request.header("content-type", kind).send().await.unwrap()
    };
    let asked = || [engines[0].asked(), engines[1].asked()];
    for path in ["/v1/audio/transcriptions", "/v1/audio/translations"] {
        let before = asked();
        for model in ["m", "whisper", "whisper"] {
            assert_eq!(send(path, &form(model)).await.status(), 200, "{model}");
        }
        assert_eq!(asked(), [before[0] + 1, before[1] + 2]);
        assert_eq!(engines[1].last().body, form("whisper"));
    }
    let response = send("/v1/audio/transcriptions", &form("none")).await;
    assert_eq!(response.status(), 404);
    world::assert_error(response, "model_not_found").await;
    let response = send("/v1/audio/transcriptions", "--b0--\r\n").await;
    world::assert_error(response, "missing_model").await;
    world.until_quiet().await;
}

#[tokio::test]
async fn web_pages_of_named_origins_may_call() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let preflight = async |origin: &str| {
        let request = world.request(Method::OPTIONS, "/v1/completions");
        let request = request
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header(
                "access-control-request-headers",
                "authorization, content-type",
            );
        request.send().await.unwrap()
    };
    assert_eq!(preflight("https://a.example").await.status(), 405);
    world.set("cors_origins = [\"https://a.example\"]");
    let answer = preflight("https://a.example").await;
    assert_eq!(answer.status(), 204);
    for (name, value) in [
        ("access-control-allow-origin", "https://a.example"),
        ("access-control-allow-methods", "GET, POST"),
        (
            "access-control-allow-headers",
            "authorization, content-type",
        ),
        ("vary", "origin"),
    ] {
        assert_eq!(answer.headers()[name], value);
    }
    assert_eq!(preflight("https://b.example").await.status(), 405);
    for (origin, allowed) in [("https://a.example", true), ("https://b.example", false)] {
        let request = world.post("/v1/completions", &body(4));
        let answer = request.header("origin", origin).send().await.unwrap();
        assert_eq!(answer.status(), 200);
        let named = answer.headers().get("access-control-allow-origin");
        assert_eq!(named.is_some(), allowed, "{origin}");
    }
    world.until_quiet().await;
}

/// Only one worker has a stored answer.
#[tokio::test]
async fn a_stored_response_is_asked_of_the_worker_that_has_it() {
    let engines = [Engine::start().await, Engine::start().await];
    let world = World::with(&[&engines[0], &engines[1]]).await;
    for (number, engine) in engines.iter().enumerate() {
        let sent = json!({"model": "m", "store_as": format!("resp_{number}")});
        let response = world.send("/v1/responses", &sent).await;
        assert_eq!(response.status(), 200);
        response.bytes().await.unwrap();
        assert_eq!(engine.asked(), 1);
    }
    for (number, engine) in engines.iter().enumerate().rev() {
        let path = format!("/v1/responses/resp_{number}");
        for _ in 0..2 {
            assert_eq!(world.get(&path).await.status(), 200);
            assert_eq!(engine.last().path, path);
        }
        let cancel = format!("{path}/cancel");
        assert_eq!(world.send(&cancel, &json!({})).await.status(), 200);
        assert_eq!(engine.last().path, cancel);
        let next = json!({"model": "m", "previous_response_id": format!("resp_{number}")});
        assert_eq!(world.send("/v1/responses", &next).await.status(), 200);
        assert_eq!(engine.asked(), 5);
    }
    // Its worker's model need not be named, where there are several.
    let other = Engine::start().await;
    world.add_serving(2, &other, "other");
    for id in ["resp_0", "resp_none"] {
        let next = json!({"input": "x", "previous_response_id": id});
        let response = world.send("/v1/responses", &next).await;
        assert_eq!(response.status(), if id == "resp_0" { 200 } else { 400 });
    }
    assert_eq!(engines[0].last().path, "/v1/responses/resp_none");
    // One of another router is searched for.
    other.stores("resp_far");
    let next = json!({"input": "x", "previous_response_id": "resp_far"});
    for _ in 0..2 {
        let response = world.send("/v1/responses", &next).await;
        assert_eq!(response.status(), 200);
        assert_eq!(other.last().path, "/v1/responses");
    }
    world.until_quiet().await;
}

/// An engine that does not answer may have it.
#[tokio::test(start_paused = true)]
async fn a_stored_response_is_not_missing_while_a_worker_cannot_be_asked() {
    let (alive, hung) = (Engine::start().await, Engine::hung().await);
    let world = World::with(&[&alive, &hung]).await;
    let response = world.get("/v1/responses/resp_x").await;
    assert_eq!(response.status(), 503);
    assert_eq!(response.headers()["retry-after"], "1");
    world::assert_error(response, "owner_unknown").await;
    alive.stores("resp_x");
    assert_eq!(world.get("/v1/responses/resp_x").await.status(), 200);
    world.until_quiet().await;
}

/// Known to an engine, and not to this router: another one passed the answer on.
#[tokio::test]
async fn a_stored_response_of_another_router_is_found() {
    let engines = [
        Engine::start().await,
        Engine::hung().await,
        Engine::start().await,
    ];
    let world = World::with(&[&engines[0], &engines[1], &engines[2]]).await;
    engines[2].stores("resp_x");
    engines[2].stores("resp_y");
    let next = json!({"model": "m", "previous_response_id": "resp_x"});
    for _ in 0..3 {
        assert_eq!(world.send("/v1/responses", &next).await.status(), 200);
        assert_eq!(engines[2].last().path, "/v1/responses");
    }
    assert_eq!(world.get("/v1/responses/resp_x").await.status(), 200);
    // One question, and what it found.
    assert_eq!(engines[2].asked(), 1 + 3 + 1);
    let cancel = "/v1/responses/resp_y/cancel";
    assert_eq!(world.send(cancel, &json!({})).await.status(), 200);
    assert_eq!(engines[2].last().path, cancel);
    assert!(engines[0].asked() <= 2, "one question for an id at most");
    assert_eq!(world.get("/v1/responses/a%2fb").await.status(), 404);
    world.until_quiet().await;
    let alone = Engine::start().await;
    let world = World::with(&[&alone]).await;
    assert_eq!(world.get("/v1/responses/resp_none").await.status(), 404);
    assert_eq!(alone.asked(), 2, "a question, and the engine's own answer");
    world.until_quiet().await;
}
