//! Hints of other routers' clients.

use super::*;

const CHAT: &str = "/v1/chat/completions";
const EMBEDDINGS: &str = "/v1/embeddings";

fn request(path: &str) -> Value {
    match path {
        CHAT => json!({"model": "m", "messages": [{"role": "user", "content": "x"}]}),
        _ => json!({"model": "m", "input": "x"}),
    }
}

async fn hinted(world: &World, path: &str, headers: &[(&str, &str)]) -> u16 {
    let mut request = world.post(path, &request(path));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.send().await.unwrap().status().as_u16()
}

#[tokio::test]
async fn a_named_worker_gets_the_request_while_it_can_take_it() {
    let engines = [Engine::start().await, Engine::start().await];
    let world = World::with(&[&engines[0], &engines[1]]).await;
    let named = [("x-dynamo-worker-instance-id", "w1")];
    let asked = || [engines[0].asked(), engines[1].asked()];
    for _ in 0..8 {
        assert_eq!(hinted(&world, CHAT, &named).await, 200);
    }
    assert!(asked()[0] > 0, "ignored by default: {:?}", asked());
    world.set("worker_hint = \"follow\"");
    for path in [CHAT, EMBEDDINGS] {
        let before = asked();
        for _ in 0..8 {
            assert_eq!(hinted(&world, path, &named).await, 200);
        }
        assert_eq!(asked(), [before[0], before[1] + 8], "{path}");
    }
    // Unknown workers and ranks are no reason to refuse.
    for headers in [
        [
            ("x-dynamo-worker-instance-id", "other"),
            ("x-dynamo-dp-rank", "0"),
        ],
        [
            ("x-dynamo-worker-instance-id", "w1"),
            ("x-dynamo-dp-rank", "7"),
        ],
        [
            ("x-dynamo-worker-instance-id", "w1"),
            ("x-dynamo-dp-rank", "none"),
        ],
    ] {
        assert_eq!(hinted(&world, CHAT, &headers).await, 200, "{headers:?}");
    }
    world.set_down(1, &engines[1]);
    let before = asked();
    assert_eq!(hinted(&world, CHAT, &named).await, 200);
    assert_eq!(asked(), [before[0] + 1, before[1]]);
    world.until_quiet().await;
}

#[tokio::test]
async fn a_named_worker_that_fails_is_followed_by_another() {
    let (mute, engine) = (Engine::mute().await, Engine::start().await);
    let world = World::with(&[&mute, &engine]).await;
    world.set("worker_hint = \"follow\"");
    let named = [
        ("x-dynamo-worker-instance-id", "w0"),
        ("x-dynamo-dp-rank", "0"),
    ];
    assert_eq!(hinted(&world, CHAT, &named).await, 200);
    assert_eq!(engine.asked(), 1);
    world.until_quiet().await;
}

#[tokio::test]
async fn a_named_tenant_divides_the_caches() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let named = [("x-tenant-id", "acme-1")];
    assert_eq!(hinted(&world, CHAT, &named).await, 200);
    assert_eq!(
        engine.last().body,
        request(CHAT).to_string(),
        "ignored by default"
    );
    world.set("tenant_hint = \"cache-salt\"");
    assert_eq!(hinted(&world, CHAT, &named).await, 200);
    let salted: Value = serde_json::from_str(&engine.last().body).unwrap();
    assert_eq!(salted["cache_salt"], "acme-1");
    // Neither without the header, nor where engines read no salt, nor over the client's own.
    assert_eq!(hinted(&world, CHAT, &[]).await, 200);
    assert_eq!(engine.last().body, request(CHAT).to_string());
    assert_eq!(hinted(&world, EMBEDDINGS, &named).await, 200);
    assert_eq!(engine.last().body, request(EMBEDDINGS).to_string());
    let own = r#"{"cache_salt": "own", "model": "m", "prompt": "x"}"#;
    let sent = world.post("/v1/completions", &json!({})).body(own);
    let answer = sent.header("x-tenant-id", "acme-1").send().await.unwrap();
    assert_eq!(
        (answer.status().as_u16(), engine.last().body.as_str()),
        (200, own)
    );
    let asked = engine.asked();
    for name in ["", "a/b", "a b", &"a".repeat(129)] {
        assert_eq!(
            hinted(&world, CHAT, &[("x-tenant-id", name)]).await,
            400,
            "{name:?}"
        );
    }
    assert_eq!(engine.asked(), asked);
    world.until_quiet().await;
}
