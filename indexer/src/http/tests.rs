use std::io::{Read as _, Write as _};
use std::iter::repeat_n;
use std::net::{SocketAddr, TcpStream};

use futures_util::FutureExt as _;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_util::task::TaskTracker;
use warmroute_process::access::{BindScope, PortAccess};
use warmroute_proto::hash::local_hashes;
use warmroute_proto::query::SourceState;
use warmroute_proto::registry::{Lora, WorkerEntry};
use warmroute_proto::{BlockSize, Change, Seed, Tier};

use super::*;
use crate::tests_support::{self, Running, TestShim};

/// Status and body. HTTP/1.0: the body ends with the connection.
async fn ask(address: SocketAddr, head: &str, body: &str) -> (u16, String) {
    let request = format!(
        "{head} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let exchange = move || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    };
    let response = TaskTracker::new().spawn_blocking(exchange).await.unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, body.to_owned())
}

async fn json(address: SocketAddr, head: &str, body: &Value) -> (u16, Value) {
    let body = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    let (status, body) = ask(address, head, &body).await;
    (status, serde_json::from_str(&body).unwrap())
}

fn tokens() -> Vec<u32> {
    (0..64).collect()
}

/// The clock is paused, so that no proof lapses however slow the machine is.
/// Two ranks of `w1`: rank 0 holds two blocks on the GPU and one more on the CPU, rank 1 one block.
async fn served() -> (Running, SocketAddr) {
    let running = Running::start(tests_support::plane());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let access = PortAccess::new(BindScope::of(address), || None);
    let router = routes(&running.handle).guarded(&access);
    TaskTracker::new().spawn(async move { axum::serve(listener, router).await });
    let (status, _) = ask(address, "GET /health", "").await;
    assert_eq!(status, 200);
    let hashes = local_hashes(&tokens(), BlockSize::new(16).unwrap(), Seed::PLAIN);
    for (name, gpu, all) in [("w1/0", 2, 3), ("w1/1", 1, 1)] {
        let mut shim = TestShim::new(name);
        let stored = |length: usize, tier| Change::Stored {
            parent: None,
            blocks: hashes[..length].to_vec(),
            tier,
        };
        let changes = vec![stored(gpu, Tier::Gpu), stored(all, Tier::Cpu)];
        running.publish(&shim.record(changes)).await;
        // A position may have been taken up as backlog; a heartbeat proves it in any case.
        running.heartbeat(&shim).await;
    }
    running.register("w1", None).await;
    until_proven(&running).await;
    (running, address)
}

/// Without keys a port on the network serves probes, metrics and digests.
#[tokio::test]
async fn every_route_that_shows_the_index_is_protected() {
    let running = Running::start(tests_support::plane());
    let access = PortAccess::new(BindScope::Network, || None);
    let open: Vec<_> = routes(&running.handle)
        .entries()
        .filter(|(_, access)| *access == RouteAccess::Open)
        .map(|(path, _)| path)
        .collect();
    let probes = ["/health", "/healthz", "/liveness", "/readyz", "/readiness"];
    assert_eq!(open, [&["/v1/digest", "/metrics"], &probes[..]].concat());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = routes(&running.handle).guarded(&access);
    TaskTracker::new().spawn(async move { axum::serve(listener, router).await });
    for (path, access) in routes(&running.handle).entries() {
        for method in ["GET", "POST"] {
            let (status, _) = ask(address, &format!("{method} {path}"), "").await;
            let refused = access != RouteAccess::Open;
            assert_eq!(status == 403, refused, "{method} {path}: {status}");
        }
    }
}

/// Every source is exact, and every worker registered.
async fn until_proven(running: &Running) {
    let proven = || {
        let ready = running.handle.is_ready();
        let digest = running.handle.digest();
        let workers = running.handle.workers();
        ready
            && workers.iter().all(|worker| worker.registered)
            && digest
                .sources
                .iter()
                .all(|source| source.state == SourceState::Exact)
    };
    while !proven() {
        tokio::task::yield_now().await;
    }
}

/// To what [`served`] has: an adapter `a` of `w1`, of which its rank 2 holds four blocks, and a
/// worker
/// `w2` of the same model with blocks of 32 tokens, which holds four blocks of those very names.
async fn served_with_others() -> (Running, SocketAddr) {
    let (running, address) = served().await;
    let adapter = Lora {
        name: "a".to_owned(),
        parent: Some("m".to_owned()),
    };
    let size = |tokens| BlockSize::new(tokens);
    let first = WorkerEntry {
        loras: vec![adapter],
        ..tests_support::worker_entry("w1")
    };
    let second = WorkerEntry {
        block_size: size(32),
        ..tests_support::worker_entry("w2")
    };
    for entry in [first, second] {
        running.register_as(&entry, None).await;
    }
    for (name, lora) in [("w1/2", Some("a")), ("w2/0", None)] {
        let mut shim = TestShim::new(name);
        let blocks = local_hashes(&tokens(), size(16).unwrap(), Seed::new(lora, None));
        let (parent, tier) = (None, Tier::Gpu);
        let stored = Change::Stored {
            parent,
            blocks,
            tier,
        };
        running.publish(&shim.record(vec![stored])).await;
        running.heartbeat(&shim).await;
    }
    until_proven(&running).await;
    (running, address)
}

/// Tokens on the GPU by rank, of `w1`, which alone is asked of.
fn of_first(answer: &Value) -> Vec<u64> {
    let instances = answer["instances"].as_object().unwrap();
    assert_eq!(instances.keys().collect::<Vec<_>>(), ["w1"], "{answer}");
    let ranks = instances["w1"]["dp"].as_object().unwrap();
    ranks.values().map(|gpu| gpu.as_u64().unwrap()).collect()
}

#[tokio::test(start_paused = true)]
async fn an_adapter_is_asked_for_as_a_model_or_by_its_name() {
    let (_running, address) = served_with_others().await;
    let tokens = tokens();
    for (body, expected) in [
        (json!({ "model": "a", "token_ids": tokens }), [0, 0, 64]),
        (
            json!({ "model": "m", "lora_name": "a", "block_size": 16, "token_ids": tokens }),
            [0, 0, 64],
        ),
        (
            json!({ "model": "m", "block_size": 16, "token_ids": tokens }),
            [32, 16, 0],
        ),
    ] {
        let (status, answer) = json(address, "POST /query", &body).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!(of_first(&answer), expected, "{body}");
    }
}

#[tokio::test(start_paused = true)]
async fn blocks_of_different_sizes_are_not_counted_together() {
    let (_running, address) = served_with_others().await;
    let hashes = local_hashes(&tokens(), BlockSize::new(16).unwrap(), Seed::PLAIN);
    for scope in [json!({}), json!({ "model": "m" })] {
        for (head, key, value) in [
            ("POST /query", "token_ids", json!(tokens())),
            ("POST /query_by_hash", "block_hashes", json!(hashes)),
        ] {
            let mut body = scope.clone();
            body[key] = value;
            let (status, answer) = json(address, head, &body).await;
            assert_eq!(status, 400, "{answer}");
            let error = answer["error"].as_str().unwrap();
            assert!(error.contains("block sizes differ"), "{error}");
            body["block_size"] = json!(16);
            let (status, answer) = json(address, head, &body).await;
            assert_eq!(status, 200, "{answer}");
            assert_eq!(of_first(&answer), [32, 16, 0]);
        }
    }
    let body = json!({ "instance_id": "w2", "block_hashes": hashes });
    let (_, answer) = json(address, "POST /query_by_hash", &body).await;
    assert_eq!(answer["instances"]["w2"]["gpu"], 4 * 32, "in its own unit");
}

#[tokio::test(start_paused = true)]
async fn query_counts_tokens_by_instance_tier_and_rank() {
    let (_running, address) = served().await;
    let body = json!({ "model": "m", "token_ids": tokens() });
    let (status, answer) = json(address, "POST /query", &body).await;
    assert_eq!(status, 200);
    let expected = json!({
        "longest_matched": 48, "gpu": 32, "cpu": 48, "disk": 48,
        "dp": { "0": 32, "1": 16 },
        "rank_matches": {
            "0": { "gpu": 32, "cpu": 48, "disk": 48 },
            "1": { "gpu": 16, "cpu": 16, "disk": 16 },
        },
        "states": { "0": "exact", "1": "exact" },
        "engine_seqs": { "0": 0, "1": 0 },
    });
    assert_eq!(answer["instances"], json!({ "w1": expected }));
    assert_eq!(answer["scores"], json!({ "w1": { "0": 32, "1": 16 } }));
    assert_eq!(answer["position"], 2);
    let salted = json!({ "token_ids": tokens(), "cache_salt": "s", "instance_id": "w1" });
    let (_, answer) = json(address, "POST /query", &salted).await;
    assert_eq!(answer["instances"]["w1"]["longest_matched"], 0);
}

#[tokio::test(start_paused = true)]
async fn query_by_hash_takes_local_hashes() {
    let (_running, address) = served().await;
    let hashes = local_hashes(&tokens(), BlockSize::new(16).unwrap(), Seed::PLAIN);
    let body = json!({ "block_hashes": hashes, "block_size": 16 });
    let (status, answer) = json(address, "POST /query_by_hash", &body).await;
    assert_eq!(status, 200);
    assert_eq!(answer["instances"]["w1"]["gpu"], 32);
    let salted = json!({ "block_hashes": hashes, "cache_salt": "" });
    let (status, _) = json(address, "POST /query_by_hash", &salted).await;
    assert_eq!(status, 400);
}

#[tokio::test(start_paused = true)]
async fn errors_are_json() {
    let (_running, address) = served().await;
    for (body, expected) in [
        (json!({ "token_ids": [1], "model": "absent" }), 404),
        (json!({ "token_ids": [1], "instance_id": "absent" }), 404),
        (json!({ "token_ids": [1], "block_size": 0 }), 400),
        (json!({ "token_ids": ["x"] }), 422),
        (json!({}), 422),
    ] {
        let (status, answer) = json(address, "POST /query", &body).await;
        assert_eq!(status, expected, "{body}");
        assert!(answer["error"].is_string());
    }
    let (status, _) = ask(address, "POST /query", "{").await;
    assert_eq!(status, 400);
}

#[tokio::test(start_paused = true)]
async fn digest_workers_and_dump_show_what_is_folded() {
    let (running, address) = served().await;
    let (_, digest) = json(address, "GET /v1/digest", &Value::Null).await;
    let sum = running.handle.digest().sources[0].digest.clone();
    let expected = json!({
        "worker": "w1", "dp_rank": 0, "state": "exact", "generation": 1, "number": 0,
        "engine_seq": 0, "blocks": 5, "digest": sum,
    });
    assert_eq!(digest["position"], 2);
    assert_eq!(digest["sources"][0], expected);
    let (_, workers) = json(address, "GET /workers", &Value::Null).await;
    assert_eq!(workers[0]["instance_id"], "w1");
    assert_eq!(workers[0]["entry"]["models"], json!(["m"]));
    assert_eq!(workers[0]["sources"][1]["tiers"]["gpu"], "exact");
    let (_, dump) = ask(address, "GET /dump", "").await;
    let lines: Vec<Value> = dump
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines[0]["source"], expected);
    assert_eq!(lines[1]["stored"]["tier"], "gpu");
    assert_eq!(lines[1]["stored"]["parent"], Value::Null);
    assert_eq!(lines.len(), 7);
    let (status, metrics) = ask(address, "GET /metrics", "").await;
    assert_eq!(status, 200);
    assert!(metrics.contains("warmroute_indexer_sources{state=\"exact\"} 2"));
    assert!(metrics.contains(&build::metrics_text()), "{metrics}");
    assert_eq!(ask(address, "GET /readyz", "").await.0, 200);
}

/// However fast a client sends, a body does not keep a processor busy.
#[tokio::test(start_paused = true)]
async fn a_body_is_taken_in_with_rests() {
    let turns = 20;
    let chunks = repeat_n(vec![0; BODY_TURN_BYTES / 4], 4 * turns);
    let chunks = chunks.map(Ok::<_, std::io::Error>);
    let body = axum::body::Body::from_stream(futures_util::stream::iter(chunks));
    let began = tokio::time::Instant::now();
    let body = body_of(Request::new(body)).await.ok().unwrap();
    assert_eq!(body.len(), turns * BODY_TURN_BYTES);
    assert!(began.elapsed() >= BODY_REST * u32::try_from(turns).unwrap());
    // The longest one is far within its deadline.
    let turns_max = u32::try_from(BODY_BYTES_MAX / BODY_TURN_BYTES).unwrap();
    assert!(8 * turns_max * BODY_REST < BODY_DEADLINE);
}

/// Parallel bodies are bounded, and a silent client loses its slot.
#[tokio::test(start_paused = true)]
async fn few_bodies_are_read_at_a_time_and_none_for_ever() {
    let (_running, address) = served().await;
    let slow = async |_| {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let head =
            b"POST /query HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n";
        stream.write_all(head).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        response.split(' ').nth(1).unwrap().parse::<u16>().unwrap()
    };
    let all = futures_util::future::join_all((0..=BODIES_MAX).map(slow));
    let all = timeout(6 * BODY_DEADLINE, all).await;
    let mut all = all.expect("none for ever");
    all.sort_unstable();
    assert_eq!(all, [408, 408, 503]);
    let body = json!({ "model": "m", "token_ids": tokens() });
    let (status, _) = json(address, "POST /query", &body).await;
    assert_eq!(status, 200);
}

/// A dump's work on a large source takes long, at the lowest priority.
#[tokio::test(start_paused = true)]
async fn work_on_one_kind_of_request_holds_up_no_other() {
    let running = Running::start(tests_support::plane());
    let [dumps, queries] = [DUMPS_MAX, BODIES_MAX].map(|max| Limited::new(&running.handle, max));
    let dump = dumps.slot().await.ok().unwrap();
    let place = dumps.place().await;
    assert!(
        dumps.compute(&dump, || ()).now_or_never().is_none(),
        "one at a time"
    );
    let query = queries.slot().await.ok().unwrap();
    assert!(queries.compute(&query, || ()).now_or_never().is_some());
    assert!(dumps.slot().await.is_err(), "there is one slot for dumps");
    assert_eq!(running.handle.faults().turned_away, 1);
    drop(place);
    assert!(dumps.compute(&dump, || ()).await.is_ok());
}
