//! Clients with keys: what they may do, and what they cannot see.

use axum::http::Method;
use reqwest::RequestBuilder;
use warmroute_process::access::keys::KeyHash;

use super::super::routes::{FORWARDED, guarded};
use super::*;

const KEY: &str = "wr-of-a";
const OTHER: &str = "wr-of-b";

/// Settings with two tenants, `a` and `b`.
fn two(rules_of_a: &str) -> String {
    let row = |id: &str, key: &str| {
        let hash = KeyHash::of(key.as_bytes()).unwrap().to_hex();
        format!("keys = [{{ id = \"{id}\", sha256 = \"{hash}\" }}]")
    };
    let (a, b) = (row("a1", KEY), row("b1", OTHER));
    format!(
        "[[tenants]]\nname = \"a\"\n{a}\n{rules_of_a}\n\
         [[tenants]]\nname = \"b\"\n{b}\nmodels = [\"n*\"]\n"
    )
}

async fn world(engine: &Engine, rules_of_a: &str) -> World {
    let world = World::with(&[engine]).await;
    world.set(&two(rules_of_a));
    world
}

async fn answer(request: RequestBuilder, key: &str) -> reqwest::Response {
    request.bearer_auth(key).send().await.unwrap()
}

/// Each route and every path that is none.
#[tokio::test]
async fn no_route_but_the_probes_answers_without_a_key() {
    let engine = Engine::start().await;
    let world = world(&engine, "").await;
    let guarded = guarded().map(|(path, _)| path);
    let unknown = ["/v1/added", "/metrics", "/unknown", "/"];
    for path in guarded.iter().chain(&FORWARDED).chain(&unknown) {
        let path = &*path.replace("{*name}", "m").replace("{id}", "r");
        for method in [Method::GET, Method::POST, Method::PUT, Method::OPTIONS] {
            let request = || world.request(method.clone(), path).body("{}");
            let status = request().send().await.unwrap().status();
            assert_eq!(status, 401, "{method} {path}");
            let status = answer(request(), "wr-other").await.status();
            assert_eq!(status, 401, "{method} {path}");
        }
    }
    assert_eq!(engine.asked(), 0);
    for path in [
        "/health",
        "/readyz",
        "/healthz",
        "/liveness",
        "/readiness",
        "/ping",
    ] {
        assert_eq!(world.get(path).await.status(), 200, "{path}");
    }
    let refused = world.send("/v1/completions", &body(3)).await;
    assert_eq!(refused.headers()["www-authenticate"], "Bearer");
    assert!(refused.headers().contains_key("x-request-id"));
    assert_error(refused, "invalid_api_key").await;
    let refused = world.send("/v1/messages", &json!({"model": "m"})).await;
    let json: Value = refused.json().await.unwrap();
    assert_eq!(json["type"], "error");
    assert_eq!(json["error"]["type"], "authentication_error");
    world.set(&two("").replace(
        &KeyHash::of(KEY.as_bytes()).unwrap().to_hex(),
        &"0".repeat(64),
    ));
    let revoked = answer(world.post("/v1/completions", &body(3)), KEY).await;
    assert_eq!(revoked.status(), 401);
}

#[tokio::test]
async fn a_tenant_sees_and_uses_its_models_and_no_engine_gets_its_key() {
    let engine = Engine::start().await;
    let world = world(&engine, "").await;
    let served = answer(world.post("/v1/completions", &body(3)), KEY).await;
    assert_eq!(served.status(), 200);
    let request = world.post("/v1/messages", &json!({"model": "m"}));
    let served = request.header("x-api-key", KEY).send().await.unwrap();
    assert_eq!(served.status(), 200);
    let seen = engine.inner_headers();
    for headers in &seen {
        assert!(!format!("{headers:?}").contains("wr-"), "{headers:?}");
    }
    let asked = engine.asked();
    // A model that exists and one that does not look alike.
    let mut refusals = Vec::new();
    for model in ["m", "x"] {
        for path in ["/v1/completions", "/v1/embeddings", "/v1/responses/render"] {
            let json = json!({"model": model, "prompt": [1], "input": "x"});
            let refused = answer(world.post(path, &json), OTHER).await;
            assert_eq!(refused.status(), 403, "{model} {path}");
            refusals.push(refused.text().await.unwrap());
        }
        let path = format!("/v1/models/{model}");
        let refused = answer(world.request(Method::GET, &path), OTHER).await;
        assert_eq!(refused.status(), 404);
    }
    refusals.dedup();
    assert_eq!(refusals.len(), 1, "{refusals:?}");
    assert_eq!(engine.asked(), asked);
    for (key, is_empty) in [(KEY, false), (OTHER, true)] {
        let list = answer(world.request(Method::GET, "/v1/models"), key).await;
        let list: Value = list.json().await.unwrap();
        assert_eq!(list["data"].as_array().unwrap().is_empty(), is_empty);
    }
}

#[tokio::test(start_paused = true)]
async fn limits_answer_429_with_the_time_to_wait() {
    let _frozen = world::Frozen::new();
    let engine = Engine::start().await;
    let rules = "requests_per_minute = 2\ntokens_per_minute = 100\nmax_prompt_tokens = 90";
    let world = world(&engine, rules).await;
    // The clock passes the time for which idle connections are kept.
    let send = |tokens| {
        let request = world.post("/v1/completions", &body(tokens));
        answer(request.header("connection", "close"), KEY)
    };
    let first = send(40).await;
    assert_eq!(first.status(), 200);
    assert_eq!(first.headers()["x-ratelimit-limit-requests"], "2");
    assert_eq!(first.headers()["x-ratelimit-remaining-requests"], "1");
    assert_eq!(first.headers()["x-ratelimit-limit-tokens"], "100");
    assert_eq!(first.headers()["x-ratelimit-remaining-tokens"], "60");
    first.bytes().await.unwrap();
    let refused = send(91).await;
    assert_eq!(refused.status(), 400);
    assert_error(refused, "context_length_exceeded").await;
    let refused = send(1).await;
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.headers()["retry-after"], "30");
    assert_eq!(refused.headers()["x-ratelimit-remaining-requests"], "0");
    assert_error(refused, "rate_limit_exceeded").await;
    tokio::time::advance(std::time::Duration::from_secs(30)).await;
    // 41 used, 50 came back: full.
    let refused = send(90).await;
    assert_eq!(refused.status(), 200);
    tokio::time::advance(std::time::Duration::from_secs(30)).await;
    let refused = send(80).await;
    assert_eq!(refused.status(), 429);
    assert_error(refused, "rate_limit_exceeded").await;
    assert_eq!(engine.asked(), 2);
}

/// Lists of models and refused models need no engine.
#[tokio::test]
async fn a_tenants_use_is_shown_and_what_no_engine_serves_uses_no_rate() {
    let engine = Engine::start().await;
    let world = world(&engine, "models = [\"m\"]\nrequests_per_minute = 1").await;
    let complete = |model: &str| {
        let json = json!({"model": model, "prompt": [1, 2, 3]});
        answer(world.post("/v1/completions", &json), KEY)
    };
    for _ in 0..3 {
        let list = answer(world.request(Method::GET, "/v1/models"), KEY).await;
        assert_eq!(list.status(), 200);
        assert_eq!(complete("x").await.status(), 403);
    }
    let served = complete("m").await;
    assert_eq!(served.status(), 200);
    served.bytes().await.unwrap();
    assert_eq!(complete("m").await.status(), 429);
    world.until_quiet().await;
    for (series, value) in [
        ("requests_total{model=\"m\",tenant=\"a\",outcome=\"ok\"}", 1),
        ("prompt_tokens_total{model=\"m\",tenant=\"a\"}", 3),
        (
            "requests_total{model=\"other\",tenant=\"a\",outcome=\"limited\"}",
            1,
        ),
    ] {
        assert_eq!(world.metric(&format!("tenant_{series}")), value, "{series}");
    }
    assert_eq!(world.newest_decision()[0]["tenant"], "a");
}

#[tokio::test(start_paused = true)]
async fn a_streams_tokens_count_while_it_runs_and_a_client_that_leaves_frees_its_place() {
    let _frozen = world::Frozen::new();
    let engine = Engine::start().await;
    let world = world(
        &engine,
        "max_concurrent_requests = 1\ntokens_per_minute = 1000",
    )
    .await;
    let mut stream = answer(world.post("/v1/completions", &streaming()), KEY).await;
    for _ in 0..64 {
        engine.release_event(&mut stream).await;
    }
    let refused = answer(world.request(Method::GET, "/v1/models"), KEY).await;
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.headers()["retry-after"], "1");
    let in_flight = || world.app.admission.tokens_in_flight("a");
    assert_eq!(in_flight(), 259, "its place");
    // 3 of the prompt, 64 generated.
    assert_eq!(refused.headers()["x-ratelimit-remaining-tokens"], "933");
    drop(stream);
    let freed = async {
        loop {
            let list = answer(world.request(Method::GET, "/v1/models"), KEY).await;
            if list.status() == 200 {
                return;
            }
        }
    };
    in_time("the place is free", freed).await;
    world.until_quiet().await;
    assert_eq!(in_flight(), 0);
}

/// The salt is the tenant's whatever the client sends, and seeds the router's own hashes.
#[tokio::test]
async fn a_salted_tenant_shares_no_cache_entry_and_no_client_can_ask_for_its_salt() {
    let engine = Engine::start().await;
    let world = world(
        &engine,
        "salt = \"tenant\"\nmax_output_tokens = 50\npriority = 3",
    )
    .await;
    let own = json!({"model": "m", "prompt": [1, 2], "cache_salt": "mine", "priority": -9});
    let mut salts = Vec::new();
    for (path, json) in [
        ("/v1/completions", &body(3)),
        ("/v1/completions", &own),
        ("/v1/embeddings", &json!({"model": "m", "input": "x"})),
    ] {
        let served = answer(world.post(path, json), KEY).await;
        assert_eq!(served.status(), 200);
        let sent: Value = serde_json::from_str(&engine.last().body).unwrap();
        assert_eq!(sent["priority"], 3);
        salts.push(sent["cache_salt"].as_str().unwrap().to_owned());
    }
    assert!(salts.iter().all(|salt| salt.starts_with("warmroute-")));
    assert_eq!(salts[0], salts[2]);
    assert_ne!(salts[0], salts[1]);
    world.set(&two("salt = \"tenant\"").replace("\"n*\"", "\"*\""));
    for path in ["/v1/completions", "/v1/embeddings"] {
        let forged = json!({"model": "m", "prompt": [1], "cache_salt": salts[0]});
        let refused = answer(world.post(path, &forged), OTHER).await;
        assert_eq!(refused.status(), 400);
        assert_error(refused, "reserved_salt").await;
    }
    let asked = engine.asked();
    for body in [
        "{\"model\":\"m\",\"prompt\":[1],\"max_tokens\":51}",
        "{\"model\":\"m\",\"prompt\":[1],\"x\":NaN}",
        "[1]",
        "",
    ] {
        world.set(&two("salt = \"tenant\"\nmax_output_tokens = 50"));
        for path in ["/v1/completions", "/v1/embeddings"] {
            let request = world.request(Method::POST, path).body(body);
            let is_bounded = path == "/v1/embeddings" && body.contains("max_tokens");
            let status = answer(request, KEY).await.status();
            assert_eq!(status == 400, !is_bounded, "{path} {body}");
        }
    }
    assert_eq!(engine.asked(), asked + 1);
}

/// A tenant without a level does not overtake those with one inside the engines.
#[tokio::test]
async fn engines_get_no_priority_that_a_client_chose_beside_levels() {
    let engine = Engine::start().await;
    let world = world(&engine, "").await;
    let own = json!({"model": "m", "prompt": [1], "input": "x", "priority": -9});
    for (rules, level_of_b, sent) in [
        ("", "", json!(-9)),
        ("", "priority = 5", json!(0)),
        ("client_priority = true", "priority = 5", json!(-9)),
        ("priority = 2", "", json!(2)),
    ] {
        let models = "models = [\"n*\"]";
        world.set(&two(rules).replace(models, level_of_b));
        for path in ["/v1/completions", "/v1/embeddings"] {
            let served = answer(world.post(path, &own), KEY).await;
            assert_eq!(served.status(), 200);
            let body: Value = serde_json::from_str(&engine.last().body).unwrap();
            assert_eq!(body["priority"], sent, "{rules} {level_of_b} {path}");
        }
    }
}

/// Headers about decisions show which prompts are cached: nothing by default, and no address ever.
#[tokio::test]
async fn a_client_learns_nothing_about_caches_and_addresses() {
    let engine = Engine::start().await;
    let world = World::with(&[]).await;
    world.add_named("127.0.0.1:8000", &engine);
    let hash = KeyHash::of(KEY.as_bytes()).unwrap().to_hex();
    let admin = format!("keys = [{{ id = \"o\", sha256 = \"{hash}\", role = \"read\" }}]");
    for (rule, key, worker) in [
        ("off", None, None),
        ("off", Some(KEY), None),
        ("admin-key", None, None),
        ("admin-key", Some(OTHER), None),
        ("admin-key", Some(KEY), Some("worker-")),
        ("all", Some(KEY), Some("worker-")),
        ("all", None, Some("worker-")),
    ] {
        let text = format!("[admin]\nexplain_headers = \"{rule}\"\n{admin}");
        world.set(&text);
        for path in ["/v1/completions", "/v1/embeddings"] {
            let mut request = world.post(path, &body(40));
            if let Some(key) = key {
                request = request.header("x-warmroute-admin-key", key);
            }
            let answer = request.send().await.unwrap();
            let mut names = answer.headers().keys().map(|name| name.as_str());
            let explained = names.any(|name| name.starts_with("x-warmroute"));
            assert_eq!(explained, worker.is_some(), "{rule} {key:?}");
            let shown = answer.headers().get("x-warmroute-worker");
            let shown = shown.map(|shown| shown.to_str().unwrap());
            let begins = |begin: &str| shown.is_some_and(|shown| shown.starts_with(begin));
            assert!(worker.is_none_or(begins), "{rule} {key:?} {shown:?}");
            assert!(!engine.last().headers.contains_key("x-warmroute-admin-key"));
        }
    }
}

/// A client cannot compute the names from the addresses that it suspects.
#[tokio::test]
async fn names_of_addresses_are_keyed_and_the_same_at_all_routers() {
    let engine = Engine::start().await;
    let mut names = Vec::new();
    for (worker, operator) in [
        ("10.0.0.1:8000", "a"),
        ("10.0.0.1:8000", "a"),
        ("10.0.0.1:8000", "b"),
        ("10.0.0.1:8000", ""),
        ("10.0.0.2:8000", ""),
        ("engine.internal", "a"),
        ("engine.internal:8000/base", "a"),
        ("gpu_0-a", "a"),
    ] {
        let world = World::with(&[]).await;
        world.add_named(worker, &engine);
        let hash = KeyHash::of(operator.as_bytes()).unwrap().to_hex();
        let key = format!("keys = [{{ id = \"o\", sha256 = \"{hash}\", role = \"read\" }}]");
        let keys = if operator.is_empty() { "" } else { &*key };
        world.set(&format!("[admin]\nexplain_headers = \"all\"\n{keys}"));
        let answer = world.send("/v1/completions", &body(3)).await;
        names.push(answer.headers()["x-warmroute-worker"].clone());
    }
    let plain = KeyHash::of(b"10.0.0.1:8000").unwrap().to_hex();
    let [one, same, other, without, next, host, path, named] = &names[..] else {
        panic!("{names:?}");
    };
    assert_eq!(one, same);
    assert!(
        one != other && one != without && without != next,
        "{names:?}"
    );
    for name in [one, other, without, next, host, path] {
        let name = name.to_str().unwrap();
        let digits = name.strip_prefix("worker-").unwrap();
        assert_eq!(digits.len(), 8, "{name}");
        assert!(!plain.starts_with(digits), "{name}");
    }
    assert_eq!(named, "gpu_0-a");
}

/// The workers of any of its models answer.
#[tokio::test]
async fn a_tenant_gets_the_version_of_a_model_that_it_may_use() {
    let [first, own] = [Engine::start().await, Engine::start().await];
    let world = world(&first, "").await;
    let version = || answer(world.request(Method::GET, "/version"), OTHER);
    assert_eq!(version().await.status(), 403);
    world.add_serving(1, &own, "n1");
    assert_eq!(version().await.status(), 200);
    assert_eq!((first.asked(), own.asked()), (0, 1));
}

/// Two copies of a body are there while its salt is added.
#[tokio::test]
async fn a_copy_with_a_salt_is_charged_to_the_budget() {
    let engine = Engine::start().await;
    let world = world(&engine, "salt = \"tenant\"").await;
    let json = json!({"model": "m", "input": "x".repeat(100_000)});
    let send = async || {
        let sent = answer(world.post("/v1/embeddings", &json), KEY).await;
        sent.status().as_u16()
    };
    assert_eq!(send().await, 200);
    world.until_quiet().await;
    let free = world.app.bodies.free_bytes();
    let rest = world.app.bodies.charge(free - 150_000).unwrap();
    assert_eq!(send().await, 503);
    world.set(&two(""));
    assert_eq!(send().await, 200);
    drop(rest);
}

#[tokio::test]
async fn a_stored_answer_is_its_tenants() {
    let engine = Engine::start().await;
    let world = world(&engine, "").await;
    let json = json!({"model": "m", "input": "x", "store_as": "resp_1"});
    let stored = answer(world.post("/v1/responses", &json), KEY).await;
    assert_eq!(stored.status(), 200);
    stored.bytes().await.unwrap();
    world.set(&two("").replace("\"n*\"", "\"*\""));
    let path = "/v1/responses/resp_1";
    for (key, status) in [(KEY, 200), (OTHER, 404)] {
        let found = world.request(Method::GET, path).body("{\"model\":\"x\"}");
        let found = answer(found, key).await;
        assert_eq!(found.status(), status, "{key}");
        assert!(
            !engine.last().body.contains("\"x\"}"),
            "no engine gets its body"
        );
        let next = json!({"model": "m", "input": "x", "previous_response_id": "resp_1"});
        let next = answer(world.post("/v1/responses", &next), key).await;
        assert_eq!(next.status(), status, "{key}");
    }
}

/// Only some engines read the salt of `/v1/messages`.
#[tokio::test]
async fn a_salted_tenant_has_messages_where_the_operator_vouches_for_the_engines() {
    let engine = Engine::start().await;
    let world = world(&engine, "salt = \"tenant\"").await;
    let json = json!({"model": "m", "messages": [], "max_tokens": 1});
    let messages = || answer(world.post("/v1/messages", &json), KEY);
    let refused = messages().await;
    assert_eq!(refused.status(), 400);
    let error: Value = refused.json().await.unwrap();
    assert_eq!(error["type"], "error", "in Anthropic's form");
    assert_eq!(engine.asked(), 0);
    world.set(&(two("salt = \"tenant\"") + "[engines]\nsalted_messages = true\n"));
    assert_eq!(messages().await.status(), 200);
    let sent: Value = serde_json::from_str(&engine.last().body).unwrap();
    assert!(
        sent["cache_salt"]
            .as_str()
            .unwrap()
            .starts_with("warmroute-")
    );
    // Without separate caches nothing is refused.
    world.set(&two(""));
    assert_eq!(messages().await.status(), 200);
}

/// A prompt that begins with an answer shows it, on whatever route.
#[tokio::test]
async fn no_prompt_of_a_tenant_begins_with_anothers_answer() {
    let engine = Engine::start().await;
    let world = world(&engine, "").await;
    world.set(&two("").replace("\"n*\"", "\"*\""));
    let json = json!({"model": "m", "input": "x", "store_as": "resp_1"});
    let stored = answer(world.post("/v1/responses", &json), KEY).await;
    stored.bytes().await.unwrap();
    engine.stores("render");
    let json = json!({"model": "m", "input": "x", "previous_response_id": "resp_1"});
    for path in ["/v1/responses", "/v1/responses/render"] {
        for (key, status) in [(KEY, 200), (OTHER, 404)] {
            let next = answer(world.post(path, &json), key).await;
            assert_eq!(next.status(), status, "{path} {key}");
        }
    }
    // An id that a client chooses may be that of another one's answer.
    let json = json!({"model": "m", "input": "x", "request_id": "resp_1"});
    let refused = answer(world.post("/v1/responses", &json), OTHER).await;
    assert_eq!(refused.status(), 400);
    assert_error(refused, "request_id_not_permitted").await;
}

/// The answer to a request in the background comes before its tokens.
#[tokio::test(start_paused = true)]
async fn stored_answers_evade_no_limit_and_are_charged_once() {
    let _frozen = world::Frozen::new();
    let engine = Engine::start().await;
    let world = world(&engine, "tokens_per_minute = 1000").await;
    let prompt: Vec<u32> = (0..64).collect();
    let json = json!({"model": "m", "prompt": prompt, "store_as": "resp_1"});
    let stored = answer(world.post("/v1/responses", &json), KEY).await;
    stored.bytes().await.unwrap();
    let left = async || {
        let list = answer(world.request(Method::GET, "/v1/models"), KEY).await;
        list.headers()["x-ratelimit-remaining-tokens"]
            .to_str()
            .unwrap()
            .to_owned()
    };
    // 64 of the prompt, 1 generated.
    assert_eq!(left().await, "935");
    for _ in 0..3 {
        let read = answer(world.request(Method::GET, "/v1/responses/resp_1"), KEY).await;
        assert_eq!(read.status(), 200);
        let read: Value = read.json().await.unwrap();
        assert_eq!(read["usage"]["completion_tokens"], 1);
    }
    assert_eq!(left().await, "935");
    let json = json!({"model": "m", "input": "x", "background": true});
    let refused = answer(world.post("/v1/responses", &json), KEY).await;
    assert_eq!(refused.status(), 400);
    assert_error(refused, "background_not_permitted").await;
    world.set(&two(""));
    assert_eq!(
        answer(world.post("/v1/responses", &json), KEY)
            .await
            .status(),
        200
    );
}

async fn assert_error(response: reqwest::Response, code: &str) {
    world::assert_error(response, code).await;
}
