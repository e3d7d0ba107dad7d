//! Clients and engines that break the protocol: what they may cost, and what others see of it.
//!
//! Slow heads and bodies, too many headers and deep JSON are in the tests of their modules.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::super::prompt_pool::{PromptJob, THREADS_MAX as PROMPT_THREADS_MAX};
use super::*;
use crate::tokenize::{ChatTemplates, TaskState, Tokenizer};
use crate::tokenizers::TokenizerTable;

/// Bytes that the sockets and the router may hold of an answer that its client does not read.
const HELD_BYTES_MAX: usize = 32 << 20;

/// Sends these bytes and the end of sending. Returns all that comes back.
async fn talk(world: &World, bytes: &[u8]) -> String {
    let address = world.url.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).await.unwrap();
    // A server that refuses the head may close before all is sent.
    drop(stream.write_all(bytes).await);
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer);
    // An error is a reset, after which there is no more.
    drop(in_time("the connection ends", read).await);
    String::from_utf8_lossy(&answer).into_owned()
}

/// However a request is framed, the engine gets as many requests as the client gets answers, so
/// that no client's bytes become the request of another one.
#[tokio::test]
async fn no_framing_smuggles_a_request() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let json = r#"{"model":"m","prompt":[1]}"#;
    let hidden = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n{json}",
        json.len()
    );
    let chunked = format!("{:x}\r\n{json}\r\n0\r\n\r\n{hidden}", json.len());
    let shapes = [
        (
            "content-length: 5\r\ntransfer-encoding: chunked\r\n",
            &chunked,
        ),
        (
            "transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
            &chunked,
        ),
        ("transfer-encoding: xchunked\r\n", &chunked),
        ("transfer-encoding: chunked, gzip\r\n", &chunked),
        ("transfer-encoding : chunked\r\n", &chunked),
        (" transfer-encoding: chunked\r\n", &chunked),
        ("x: y\r\n transfer-encoding: chunked\r\n", &chunked),
        ("content-length: 26\r\ncontent-length: 5\r\n", &chunked),
        ("content-length: +26\r\n", &chunked),
        ("content-length: 0x1a\r\n", &chunked),
        ("content-length: 26, 26\r\n", &chunked),
        ("content-length: 99999999999999999999\r\n", &chunked),
        ("content-length: -1\r\n", &chunked),
        ("content-length: 0\r\n", &hidden),
        ("x: a\rcontent-length: 26\r\n", &hidden),
        ("x\0y: a\r\n", &hidden),
    ];
    for (headers, body) in shapes {
        let before = engine.asked();
        let request = format!("POST /v1/completions HTTP/1.1\r\nhost: h\r\n{headers}\r\n{body}");
        let answer = talk(&world, request.as_bytes()).await;
        let asked = engine.asked() - before;
        let served = answer.matches("HTTP/1.1 200").count();
        assert_eq!(asked, served, "{headers:?}: {answer}");
    }
    for chunks in [
        "fffffffffffffffff\r\n{}\r\n0\r\n\r\n",
        "-1\r\n{}\r\n0\r\n\r\n",
        "2 \r\n{}0\r\n\r\n",
        "2;a=\"\n{}\r\n0\r\n\r\n",
    ] {
        let before = engine.asked();
        let head = "POST /v1/embeddings HTTP/1.1\r\nhost: h\r\nconnection: close\r\n";
        let request = format!("{head}transfer-encoding: chunked\r\n\r\n{chunks}{hidden}");
        let answer = talk(&world, request.as_bytes()).await;
        let served = answer.matches("HTTP/1.1 200").count();
        assert_eq!(engine.asked() - before, served, "{chunks:?}: {answer}");
    }
    assert_eq!(world.send("/v1/completions", &body(4)).await.status(), 200);
    world.until_quiet().await;
}

/// An engine that decodes it would read another model and prompt than the router's rules saw.
#[tokio::test]
async fn a_body_of_an_unknown_encoding_reaches_no_engine() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let json = r#"{"model":"m","prompt":[1]}"#;
    for path in ["/v1/completions", "/v1/embeddings"] {
        for encoding in ["br", "gzip, gzip"] {
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: h\r\ncontent-encoding: {encoding}\r\n\
                 content-length: {}\r\n\r\n{json}",
                json.len()
            );
            let answer = talk(&world, head.as_bytes()).await;
            assert!(answer.starts_with("HTTP/1.1 415 "), "{answer}");
            assert!(answer.contains("unsupported_encoding"), "{answer}");
            assert!(
                answer.contains("accept-encoding: gzip, zstd\r\n"),
                "{answer}"
            );
        }
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: h\r\ncontent-encoding: gzip\r\n\
             connection: close\r\ncontent-length: {}\r\n\r\n{json}",
            json.len()
        );
        let answer = talk(&world, head.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    }
    assert_eq!(engine.asked(), 0);
}

/// Engines decode no bodies.
#[tokio::test]
async fn an_encoded_body_reaches_the_engine_decoded() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let json = r#"{"model":"m","prompt":[1]}"#;
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    std::io::Write::write_all(&mut gzip, json.as_bytes()).unwrap();
    let gzip = gzip.finish().unwrap();
    let zstd = compress_to_vec(json.as_bytes(), CompressionLevel::Fastest);
    for path in ["/v1/completions", "/v1/embeddings"] {
        for (encoding, body) in [("gzip", &gzip), ("zstd", &zstd)] {
            let request = world.client.post(format!("{}{path}", world.url));
            let request = request
                .header("content-encoding", encoding)
                .header("content-type", "application/json");
            let response = request.body(body.clone()).send().await.unwrap();
            assert_eq!(response.status(), 200, "{path} {encoding}");
            let seen = engine.last();
            assert_eq!(seen.body, json);
            assert!(!seen.headers.contains_key("content-encoding"));
        }
    }
}

/// Bytes after an answer are not the answer to the next request on that connection.
#[tokio::test]
async fn an_engine_that_sends_more_than_its_length_answers_no_other_client() {
    let lie = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}\
        HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged";
    let engine = Engine::scripted(lie).await;
    let world = World::with(&[&engine]).await;
    for _ in 0..20 {
        let response = world.send("/v1/completions", &body(4)).await;
        if response.status() == 200 {
            assert_eq!(response.text().await.unwrap(), "{}");
        }
    }
    world.until_quiet().await;
}

/// Its connection ends before the promised bytes.
#[tokio::test]
async fn an_engine_that_sends_less_than_its_length_breaks_only_its_answer() {
    let lie = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{";
    let (engine, good) = (Engine::closing_after(lie).await, Engine::start().await);
    let world = World::with(&[&engine, &good]).await;
    let response = world.send("/v1/completions", &body(4)).await;
    assert_eq!(response.status(), 200);
    assert!(response.bytes().await.is_err());
    assert_eq!(counting(&world), 1);
    let response = world.send("/v1/completions", &body(4)).await;
    assert!(response.bytes().await.is_ok());
    world.until_quiet().await;
}

/// Heads without an end, headers without a number and bytes that are no HTTP.
#[tokio::test]
async fn answers_that_are_no_http_are_a_502() {
    let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "a: b\r\n".repeat(2000));
    let long = format!("HTTP/1.1 200 OK\r\na: {}\r\n\r\n", "b".repeat(300 << 10));
    let bad = [
        // One that is repeated, which clients read in different ways.
        b"HTTP/1.1 200 OK\r\ncontent-length: 2, 2\r\n\r\n{}".to_vec(),
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}".to_vec(),
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n".to_vec(),
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n".to_vec(),
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n".to_vec(),
        b"HTTP/1.1 999999 OK\r\n\r\n".to_vec(),
        many.into_bytes(),
        long.into_bytes(),
    ];
    for answer in bad {
        let engine = Engine::closing_after(Box::leak(answer.clone().into_boxed_slice())).await;
        let world = World::with(&[&engine]).await;
        let response = world.send("/v1/completions", &body(4)).await;
        let shown = String::from_utf8_lossy(&answer[..answer.len().min(60)]);
        assert_eq!(response.status(), 502, "{shown}");
        world.until_quiet().await;
    }
}

/// The engine sends one line without an end, and the client reads nothing: the engine is slowed
/// down, and memory does not grow.
#[tokio::test]
async fn an_endless_line_is_not_buffered() {
    let (engine, mut written) = Engine::endless().await;
    let world = World::with(&[&engine]).await;
    let mut response = world.send("/v1/completions", &streaming()).await;
    assert_eq!(response.status(), 200);
    // The engine's writes stall.
    let stalled = async {
        loop {
            let more = timeout(Duration::from_millis(500), written.changed()).await;
            if more.is_err() {
                return *written.borrow();
            }
        }
    };
    let held = in_time("the engine's writes stall", stalled).await;
    println!("held of an answer that is not read: {} KiB", held >> 10);
    assert!(held < HELD_BYTES_MAX, "{held}");
    // It goes on with a reader.
    let mut read = 0;
    while read < 2 * HELD_BYTES_MAX {
        read += response.chunk().await.unwrap().unwrap().len();
    }
    drop(response);
    world.until_quiet().await;
}

/// A stream that cannot be resumed for lack of memory gets none for an event without an end, either.
#[tokio::test]
async fn an_endless_event_of_a_resumable_stream_is_bounded_by_the_budget() {
    let (engine, written) = Engine::endless().await;
    let world = World::with(&[]).await;
    world.add_bounded(0, &engine);
    world.set("resume_streams = \"completions\"");
    let others = world
        .app
        .bodies
        .charge(world.app.bodies.free_bytes() - (1 << 20));
    assert!(others.is_some());
    let json = json!({"model": "m", "prompt": [1, 2, 3], "max_tokens": 50, "stream": true});
    let response = in_time("an answer", world.send("/v1/completions", &json)).await;
    assert_eq!(response.status(), 200);
    assert!(in_time("the end", response.bytes()).await.is_err());
    // As much as the sockets between hold, beside the event.
    assert!(*written.borrow() < 12 << 20, "{}", *written.borrow());
    drop(others);
    world.until_quiet().await;
}

/// A step that does not end, as that of a slow chat template.
struct StuckJob(Receiver<()>);

impl PromptJob for StuckJob {
    fn step(&mut self) -> TaskState {
        // Ends with the test, which drops the sender.
        self.0.recv().unwrap_or_default();
        TaskState::Done
    }

    fn bytes_left(&self) -> usize {
        0
    }
}

/// Occupies all prompt threads until the result is dropped.
fn stuck_prompt_threads(world: &World) -> Vec<Sender<()>> {
    let jobs = (0..PROMPT_THREADS_MAX).map(|_| {
        let (end, ended) = channel();
        world.app.prompts.submit(Box::new(StuckJob(ended)));
        end
    });
    jobs.collect()
}

fn unhashed(world: &World, reason: &str) -> u64 {
    world.metric(&format!("unhashed_requests_total{{reason=\"{reason}\"}}"))
}

/// A few such steps once kept all bodies above 16 KiB from an answer.
#[tokio::test]
async fn stuck_work_on_prompts_delays_large_bodies_for_a_bounded_time() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let running = stuck_prompt_threads(&world);
    world.set("prompt_timeout_ms = 50");
    let large = json!({"model": "m", "prompt": "word ".repeat(8 << 10)});
    for number in 1..=3 {
        let response = world.send("/v1/completions", &large).await;
        assert_eq!(response.status(), 200);
        assert_eq!(unhashed(&world, "prompt_timeout"), number);
    }
    drop(running);
    world.set("");
    let response = world.send("/v1/completions", &large).await;
    assert_eq!(response.status(), 200);
    assert_eq!(unhashed(&world, "no_tokenizer"), 1);
    world.until_quiet().await;
}

/// Short bodies are rendered on the thread of their connection, where a slow template once held up
/// all others.
#[tokio::test]
async fn a_slow_chat_template_is_left_to_the_prompt_threads() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny");
    let slow = "{% for m in messages %}{{ m.content }}{% if m.content == 'slow' %}\
                {% for a in range(300) %}{% for b in range(1000) %}{% endfor %}{% endfor %}\
                {% endif %}{% endfor %}";
    let templates = ChatTemplates::single(slow.to_owned(), [].into()).unwrap();
    let tokenizer = Tokenizer::load(&fixture.join("tokenizer.json")).unwrap();
    let table = TokenizerTable::with(&["m"], tokenizer.with_templates(templates));
    let version = table.of("m").unwrap().version;
    world.app.tokenizers.publish(table);
    world.app.fleet.trust_tokens(&"w0".into(), version);
    let chat = |text: &str| json!({"model": "m", "messages": [{"role": "user", "content": text}]});
    let all_unhashed = || {
        let reasons = ["no_tokenizer", "parity", "template_failed", "template_slow"];
        let others: u64 = reasons.map(|why| unhashed(&world, why)).iter().sum();
        others + unhashed(&world, "prompt_timeout")
    };
    for text in ["plain", "slow"] {
        let response = world.send("/v1/chat/completions", &chat(text)).await;
        assert_eq!(response.status(), 200);
    }
    assert_eq!(all_unhashed(), 0);
    let running = stuck_prompt_threads(&world);
    world.set("prompt_timeout_ms = 50");
    for (text, late) in [("plain", 0), ("slow", 1), ("plain", 1)] {
        let response = world.send("/v1/chat/completions", &chat(text)).await;
        assert_eq!(response.status(), 200);
        assert_eq!(unhashed(&world, "prompt_timeout"), late, "{text}");
        assert_eq!(all_unhashed(), late);
    }
    drop(running);
    world.until_quiet().await;
}
