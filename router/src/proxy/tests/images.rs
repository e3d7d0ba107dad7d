//! Prompts with images, rendered by an engine or not.

use super::*;
use crate::fleet::CheckResult;

const CHAT: &str = "/v1/chat/completions";

fn chat() -> Value {
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}});
    let content = json!([{"type": "text", "text": "What is it?"}, image]);
    json!({"model": "m", "messages": [{"role": "user", "content": content}]})
}

fn rendering() -> String {
    let features = json!({
        "mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 3, "length": 40}]},
    });
    let tokens: Vec<u32> = (0..100).collect();
    json!({"token_ids": tokens, "features": features}).to_string()
}

async fn world(engine: &Engine) -> World {
    let world = World::with(&[engine]).await;
    let fleet = &world.app.fleet;
    fleet.set_checks(&"w0".into(), &CheckResult::Passed);
    world.set("multimodal = \"render\"");
    world
}

fn unhashed(world: &World, reason: &str) -> u64 {
    world.metric(&format!("unhashed_requests_total{{reason=\"{reason}\"}}"))
}

#[tokio::test]
async fn a_worker_renders_a_prompt_with_images_before_it_is_routed() {
    let engine = Engine::start().await;
    engine.render_with(StatusCode::OK, rendering());
    let world = world(&engine).await;
    let ask = world.post(CHAT, &chat()).header("x-request-id", "r1");
    let response = ask.bearer_auth("of the client").send().await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let [asked, sent]: [Value; 2] = engine
        .bodies()
        .iter()
        .map(|body| serde_json::from_str(body).unwrap())
        .collect::<Vec<_>>()
        .try_into()
        .unwrap();
    assert_eq!(sent, chat(), "the client's bytes");
    assert_eq!(asked["mm_payload"], "none");
    assert_eq!(asked["messages"], sent["messages"]);
    let headers = &engine.inner_headers()[0];
    assert_eq!(headers["authorization"], "Bearer of the client");
    assert_ne!(headers.get("x-request-id"), Some(&"r1".parse().unwrap()));
    assert_eq!(
        world.metric("decision_step_seconds_count{step=\"render\"}"),
        1
    );
    assert_eq!(unhashed(&world, "multimodal"), 0);
    assert_eq!(world.newest_decision()[0]["prefill_tokens"], 100);
}

#[tokio::test]
async fn a_worker_gets_its_own_key_with_a_prompt_to_render() {
    let engine = Engine::start().await;
    engine.render_with(StatusCode::OK, rendering());
    let world = world(&engine).await;
    let key = warmroute_shim::EngineKey::parse("own").unwrap();
    let keys = world.app.engines.keys();
    let url = world.app.fleet.snapshot()[0].entry.url.clone();
    keys.set(&"w0".into(), &url, Some(key));
    let ask = world.post(CHAT, &chat()).bearer_auth("of the client");
    ask.send().await.unwrap();
    let sent = engine.inner_headers();
    let keys: Vec<_> = sent.iter().map(|head| &head["authorization"]).collect();
    assert_eq!(keys, ["Bearer own", "Bearer own"]);
}

#[tokio::test]
async fn a_prompt_that_is_not_rendered_is_routed_with_its_reason() {
    let large = format!("{}{}", rendering(), " ".repeat(4 << 20));
    let text_only = json!({"token_ids": [1, 2], "features": null}).to_string();
    for (status, answer, reason) in [
        (StatusCode::BAD_REQUEST, String::new(), "render_refused"),
        (
            StatusCode::INTERNAL_SERVER_ERROR,
            String::new(),
            "render_refused",
        ),
        (
            StatusCode::SERVICE_UNAVAILABLE,
            String::new(),
            "render_failed",
        ),
        (StatusCode::FOUND, String::new(), "render_failed"),
        (StatusCode::NOT_FOUND, String::new(), "render_failed"),
        // Another client's key may be good.
        (StatusCode::TOO_MANY_REQUESTS, String::new(), "render_busy"),
        (StatusCode::OK, "[]".to_owned(), "render_unusable"),
        (StatusCode::OK, text_only, "render_unusable"),
        (StatusCode::OK, large, "render_too_large"),
    ] {
        let engine = Engine::start().await;
        engine.render_with(status, answer);
        let world = world(&engine).await;
        let response = world.send(CHAT, &chat()).await;
        assert_eq!(response.status(), StatusCode::OK, "{reason}");
        assert_eq!(unhashed(&world, reason), 1, "{reason}");
        let again = world.send(CHAT, &chat()).await;
        assert_eq!(again.status(), StatusCode::OK, "{reason}");
        let pauses = reason == "render_failed";
        assert_eq!(
            unhashed(&world, "render_paused"),
            u64::from(pauses),
            "{reason}"
        );
    }
}

#[tokio::test]
async fn images_are_not_rendered_where_no_worker_or_no_operator_offers_it() {
    let engine = Engine::start().await;
    engine.render_with(StatusCode::OK, rendering());
    let world = world(&engine).await;
    for (rule, path, reason) in [
        ("multimodal = \"load\"", CHAT, "multimodal"),
        ("", CHAT, "multimodal"),
    ] {
        world.set(rule);
        world.send(path, &chat()).await;
        assert!(unhashed(&world, reason) > 0, "{rule}");
    }
    world.set("multimodal = \"render\"");
    // This worker is not checked yet.
    let other = Engine::start().await;
    world.add_serving(1, &other, "n");
    let mut body = chat();
    body["model"] = json!("n");
    world.send(CHAT, &body).await;
    assert_eq!(unhashed(&world, "render_not_offered"), 1);
    let sound = json!({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}});
    let mut body = chat();
    body["messages"][0]["content"][1] = sound;
    world.send(CHAT, &body).await;
    assert_eq!(unhashed(&world, "other_media"), 1);
    let engines = [engine, other];
    let paths = engines.iter().map(Engine::last).map(|seen| seen.path);
    assert!(paths.into_iter().all(|path| path == CHAT));
    assert_eq!(
        world.metric("decision_step_seconds_count{step=\"render\"}"),
        1
    );
}

#[tokio::test]
async fn a_rendering_that_does_not_end_costs_its_time_limit() {
    let engine = Engine::start().await;
    engine.render_never();
    let world = world(&engine).await;
    let response = in_time("the answer", world.send(CHAT, &chat())).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(unhashed(&world, "render_timeout"), 1);
    engine.until_abandoned().await;
}

#[tokio::test]
async fn a_client_that_goes_ends_the_rendering_of_its_images() {
    let engine = Engine::start().await;
    engine.render_never();
    let world = world(&engine).await;
    let ask = world.post(CHAT, &chat());
    let asking = TaskTracker::new().spawn(async move { drop(ask.send().await) });
    engine.until_asked().await;
    asking.abort();
    engine.until_abandoned().await;
    world.until_quiet().await;
    assert_eq!(engine.asked(), 1, "the request itself is not sent");
}
