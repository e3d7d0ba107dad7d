//! Hints of other routers' clients.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

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
async fn vllms_own_rank_header_is_obeyed_where_the_setting_says_so() {
    let engine = Engine::start().await.with_ranks(3);
    let world = World::with(&[&engine]).await;
    let rank = || engine.last().headers["x-data-parallel-rank"].clone();
    let named = [("x-data-parallel-rank", "2")];
    let mut ranks = Vec::new();
    for _ in 0..6 {
        assert_eq!(hinted(&world, CHAT, &named).await, 200);
        ranks.push(rank());
    }
    assert!(ranks.iter().any(|rank| rank != "2"), "ignored by default");
    world.set("worker_hint = \"follow\"");
    for path in [CHAT, EMBEDDINGS] {
        for _ in 0..6 {
            assert_eq!(hinted(&world, path, &named).await, 200);
            assert_eq!(rank(), "2");
        }
    }
    for other in ["7", "none"] {
        let headers = [("x-data-parallel-rank", other)];
        assert_eq!(hinted(&world, CHAT, &headers).await, 200);
        assert_ne!(rank(), other);
    }
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
async fn a_named_worker_that_is_full_is_chosen_around_and_the_queue_stays() {
    let engines = [Engine::start().await, Engine::start().await];
    let world = World::with_active_max(&[&engines[0], &engines[1]], 1).await;
    world.set("worker_hint = \"follow\"");
    let send = |headers: &'static [(&'static str, &'static str)], body: &Value| {
        let request = world.post("/v1/completions", body);
        let add = |request: reqwest::RequestBuilder, (name, value): &(&str, &str)| {
            request.header(*name, *value)
        };
        headers.iter().fold(request, add).send()
    };
    const NAMED: &[(&str, &str)] = &[("x-dynamo-worker-instance-id", "w1")];
    let mut first = send(NAMED, &streaming()).await.unwrap();
    engines[1].release_event(&mut first).await;
    let mut second = send(NAMED, &streaming()).await.unwrap();
    engines[0].release_event(&mut second).await;
    assert_eq!([engines[0].asked(), engines[1].asked()], [1, 1]);
    let tasks = TaskTracker::new();
    let third = tasks.spawn(send(NAMED, &body(4)));
    let queued = async {
        while world.app.admission.size().requests != 1 {
            tokio::task::yield_now().await;
        }
    };
    in_time("the request waits", queued).await;
    drop(first);
    let answer = in_time("an answer", third).await.unwrap().unwrap();
    assert_eq!(answer.status(), 200);
    answer.bytes().await.unwrap();
    assert_eq!([engines[0].asked(), engines[1].asked()], [1, 2]);
    drop(second);
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
    let salt = salted["cache_salt"].as_str().unwrap().to_owned();
    assert!(salt.starts_with("warmroute-"), "{salt}");
    assert_eq!(hinted(&world, CHAT, &named).await, 200);
    assert!(engine.last().body.contains(&salt));
    // Another tenant has another salt, also if it sends this one's name as its own.
    for own in [None, Some("acme-1")] {
        let mut body = request(CHAT);
        body["cache_salt"] = own.into();
        let sent = world.post(CHAT, &body).header("x-tenant-id", "other");
        assert_eq!(sent.send().await.unwrap().status(), 200);
        assert!(!engine.last().body.contains(&salt), "{own:?}");
    }
    // Neither without the header nor where engines read no salt.
    assert_eq!(hinted(&world, CHAT, &[]).await, 200);
    assert_eq!(engine.last().body, request(CHAT).to_string());
    assert_eq!(hinted(&world, EMBEDDINGS, &named).await, 200);
    assert_eq!(engine.last().body, request(EMBEDDINGS).to_string());
    let asked = engine.asked();
    let twice = [("x-tenant-id", "a"), ("x-tenant-id", "b")];
    for headers in [&twice[..], &[("x-tenant-id", "")]] {
        assert_eq!(hinted(&world, CHAT, headers).await, 400, "{headers:?}");
    }
    // Neither by its salt nor by the ids of its blocks is another tenant's cache read, on any route.
    for path in [CHAT, EMBEDDINGS, "/v1/messages"] {
        for (name, value) in [
            ("cache_salt", json!(salt)),
            ("kv_transfer_params", json!({"do_remote_prefill": true})),
        ] {
            let mut body = request(path);
            body[name] = value;
            let sent = world.post(path, &body).header("x-tenant-id", "other");
            assert_eq!(sent.send().await.unwrap().status(), 400, "{path} {name}");
        }
    }
    assert_eq!(engine.asked(), asked);
    world.until_quiet().await;
}

/// Its tenant was read by the settings before.
#[tokio::test]
async fn a_named_tenant_holds_when_settings_change_before_the_body_is_whole() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    world.set("tenant_hint = \"cache-salt\"");
    let whole = request(CHAT).to_string();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: h\r\nx-tenant-id: acme\r\nconnection: close\r\n\
         expect: 100-continue\r\ncontent-length: {}\r\n\r\n",
        whole.len()
    );
    let address = world.url.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    // The router waits for the body.
    stream.read_exact(&mut [0; 25]).await.unwrap();
    world.set("tenant_hint = \"ignore\"");
    stream.write_all(whole.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let salted: Value = serde_json::from_str(&engine.last().body).unwrap();
    assert!(salted["cache_salt"].is_string());
    world.until_quiet().await;
}
