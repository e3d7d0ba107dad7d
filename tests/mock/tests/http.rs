//! The mock engine as a process: the promises that clients, event readers and tests rely on.

#![expect(clippy::unwrap_used, reason = "test code, helpers included")]

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use reqwest::{Response, StatusCode};
use serde_json::{Value, json};
use warmroute_chat::tokenize::parity::{self, ProbeVerdict};
use warmroute_chat::tokenize::{CivilTime, Tokenizer};
use warmroute_mock_engine::{Args, Mock};
use warmroute_process::tls::EngineTls;
use warmroute_proto::{BlockSize, Seed, hash};

/// Bound of every wait. A working engine never reaches it.
const PATIENCE: Duration = Duration::from_secs(20);

fn client() -> reqwest::Client {
    EngineTls::system().unwrap().client().build().unwrap()
}

struct Engine {
    process: Child,
    url: String,
    ports: Value,
    client: reqwest::Client,
}

impl Engine {
    fn start(flags: &[&str]) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_warmroute-mock-engine"))
            .args(["--port=0", "--kv-port=0", "--replay-port=0"])
            .args(flags)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let stdout = process.stdout.take().unwrap();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        let ports: Value = serde_json::from_str(&line).unwrap();
        Self {
            process,
            url: format!("http://127.0.0.1:{}", ports["port"]),
            ports,
            client: client(),
        }
    }

    async fn get(&self, path: &str) -> Value {
        serde_json::from_str(&self.get_text(path).await).unwrap()
    }

    async fn get_text(&self, path: &str) -> String {
        let request = self.client.get(format!("{}{path}", self.url));
        request.send().await.unwrap().text().await.unwrap()
    }

    async fn post(&self, path: &str, body: Value) -> Response {
        let url = format!("{}{path}", self.url);
        self.client.post(url).json(&body).send().await.unwrap()
    }

    /// The answer's body, whatever its status.
    async fn answer(&self, path: &str, body: Value) -> Value {
        self.post(path, body).await.json().await.unwrap()
    }

    async fn on_rank(&self, rank: &str, body: Value) -> Response {
        let url = format!("{}/v1/completions", self.url);
        let request = self.client.post(url).header("X-data-parallel-rank", rank);
        request.json(&body).send().await.unwrap()
    }

    async fn complete(&self, body: Value) -> Value {
        let response = self.post("/v1/completions", body).await;
        assert_eq!(response.status(), StatusCode::OK);
        response.json().await.unwrap()
    }

    /// Polls until the first rank's counter has reached `value`.
    async fn wait_for(&self, counter: &str, value: u64) {
        let reached = async {
            while self.get("/debug/counters").await["ranks"][0][counter] != value {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, reached).await.unwrap();
    }

    fn replay(&self, rank: usize, start: u64) -> Vec<(u64, Vec<u8>)> {
        let context = zmq::Context::new();
        let dealer = context.socket(zmq::DEALER).unwrap();
        dealer.set_linger(0).unwrap();
        dealer.set_rcvtimeo(timeout_ms()).unwrap();
        dealer
            .connect(&endpoint(&self.ports["replay"][rank]))
            .unwrap();
        let request = [&[][..], &start.to_be_bytes()];
        dealer.send_multipart(request, 0).unwrap();
        let mut batches = Vec::new();
        loop {
            let [empty, topic, sequence, payload] =
                <[Vec<u8>; 4]>::try_from(dealer.recv_multipart(0).unwrap()).unwrap();
            assert_eq!(empty, b"");
            let sequence = u64::from_be_bytes(sequence.try_into().unwrap());
            if sequence == u64::MAX {
                assert_eq!((topic.as_slice(), payload.as_slice()), (&b""[..], &b""[..]));
                return batches;
            }
            assert_eq!(topic, b"kv-events");
            batches.push((sequence, payload));
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

fn timeout_ms() -> i32 {
    i32::try_from(PATIENCE.as_millis()).unwrap()
}

fn endpoint(port: &Value) -> String {
    format!("tcp://127.0.0.1:{port}")
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap()
}

fn events(payload: &[u8]) -> Vec<Value> {
    let batch: Value = rmp_serde::from_slice(payload).unwrap();
    batch[1].as_array().unwrap().clone()
}

fn types(payload: &[u8]) -> Vec<String> {
    let kind = |event: &Value| event["type"].as_str().unwrap().to_owned();
    events(payload).iter().map(kind).collect()
}

/// The data of every server-sent event.
fn sse(body: &str) -> Vec<&str> {
    let events = body.strip_suffix("\n\n").unwrap().split("\n\n");
    events
        .map(|event| event.strip_prefix("data: ").unwrap())
        .collect()
}

#[tokio::test]
async fn a_repeated_prompt_is_cached_and_its_blocks_are_published() {
    let engine = Engine::start(&["--block-size=4", "--topic=kv-events"]);
    let tokens: Vec<u32> = (0..18).collect();
    let body = json!({"prompt": tokens, "max_tokens": 1, "return_token_ids": true});
    let first = engine.complete(body.clone()).await;
    let second = engine.complete(body).await;
    assert_eq!((cached(&first), cached(&second)), (0, 16));
    assert_eq!(
        first["choices"], second["choices"],
        "the output depends on the prompt alone"
    );
    assert_eq!(first["choices"][0]["finish_reason"], "length");
    assert_eq!(first["choices"][0]["prompt_token_ids"], json!(tokens));

    let blocks = engine.get("/debug/blocks").await;
    let local = hash::local_hashes(&tokens, BlockSize::new(4).unwrap(), Seed::PLAIN);
    let mut expected: Vec<u64> = hash::prefix_hashes(None, &local)
        .map(|hash| hash.0)
        .collect();
    expected.sort_unstable();
    let held = |hash: u64| json!({"prefix_hash": hash.to_string(), "tier": "gpu", "references": 1});
    let expected: Vec<Value> = expected.into_iter().map(held).collect();
    assert_eq!(blocks["ranks"][0]["blocks"], json!(expected));
    assert_eq!(blocks["ranks"][0]["last_seq"], 0);
    assert_eq!(blocks["ranks"][0]["published_seq_that_changed"], 0);

    let batches = engine.replay(0, 0);
    assert_eq!(batches.len(), 1);
    let event = &events(&batches[0].1)[0];
    assert_eq!(event["token_ids"], json!(tokens[..16]));
    assert_eq!(event["parent_block_hash"], Value::Null);
    assert_eq!(event["block_hashes"].as_array().unwrap().len(), 4);
    assert_eq!(engine.replay(0, 1), []);
}

#[tokio::test]
async fn a_stream_has_the_form_of_vllm() {
    let engine = Engine::start(&[]);
    let body = json!({
        "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "stream": true,
        "stream_options": {"include_usage": true}, "return_token_ids": true,
    });
    let response = engine.post("/v1/chat/completions", body.clone()).await;
    let kind = response.headers()["content-type"].to_str().unwrap();
    assert!(kind.starts_with("text/event-stream"));
    let text = response.text().await.unwrap();
    let data = sse(&text);
    assert_eq!(data.last(), Some(&"[DONE]"));
    let chunks: Vec<Value> = data[..data.len() - 1]
        .iter()
        .map(|chunk| serde_json::from_str(chunk).unwrap())
        .collect();
    assert_eq!(chunks.len(), 5, "the role, three tokens, the usage");
    assert_eq!(chunks[0]["object"], "chat.completion.chunk");
    assert_eq!(
        chunks[0]["choices"][0]["delta"],
        json!({"role": "assistant", "content": ""})
    );
    let prompt = chunks[0]["prompt_token_ids"].as_array().unwrap().len();
    let reason = |at: usize| &chunks[at]["choices"][0]["finish_reason"];
    assert_eq!(
        [reason(1), reason(2), reason(3)],
        [&json!(null), &json!(null), &json!("length")]
    );
    let usage = &chunks[4]["usage"];
    assert_eq!(chunks[4]["choices"], json!([]));
    assert_eq!(usage["prompt_tokens"], prompt);
    assert_eq!(usage["completion_tokens"], 3);

    // Without a stream the tokens are equal; `/tokenize` returns the same prompt.
    let mut whole = body.clone();
    whole["stream"] = json!(false);
    let whole = engine.answer("/v1/chat/completions", whole).await;
    let content: String = chunks[1..4]
        .iter()
        .map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().unwrap())
        .collect();
    assert_eq!(whole["choices"][0]["message"]["content"], json!(content));
    let tokenized = engine.answer("/tokenize", body).await;
    assert_eq!(tokenized["tokens"], chunks[0]["prompt_token_ids"]);
    assert_eq!(tokenized["count"], prompt);
}

#[tokio::test]
async fn a_tokenizer_directory_decides_about_tokens_and_chats() {
    let fixture = concat!(
        "--tokenizer=",
        env!("CARGO_MANIFEST_DIR"),
        "/../fixtures/tiny"
    );
    let engine = Engine::start(&[fixture]);
    let tokenize = async |body| {
        let answer = engine.answer("/tokenize", body).await;
        answer["tokens"].as_array().unwrap().clone()
    };
    let text = json!({"prompt": "What is a cache?"});
    assert!(tokenize(text).await.len() < "What is a cache?".len());
    let chat = json!({
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is a cache?"}]}],
        "max_tokens": 4, "return_token_ids": true,
    });
    let answer = engine.answer("/v1/chat/completions", chat.clone()).await;
    let rendered = "<|im_start|>system\nYou answer briefly.<|im_end|>\n<|im_start|>user\n\
                    What is a cache?<|im_end|>\n<|im_start|>assistant\n";
    let expected = tokenize(json!({"prompt": rendered, "add_special_tokens": false})).await;
    assert_eq!(tokenize(chat).await, expected);
    assert_eq!(answer["prompt_token_ids"], json!(expected));
    let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(content.bytes().all(|byte| byte.is_ascii()));
}

/// The router's registration probes over HTTP, against its own reading of the same files.
#[tokio::test]
async fn the_router_s_parity_probes_agree() {
    check_parity("tiny", &[]).await;
    // Its template refuses conversations that do not alternate between user and assistant.
    let refused = [
        "tool result",
        "tool history",
        "responses tools",
        "messages tool history",
        "nested tool history",
        "responses own output",
    ];
    check_parity("tiny_sp", &refused).await;
}

/// A repeated prompt of either route is cached up to its last block, and each route reports it.
#[tokio::test]
async fn responses_and_messages_report_cached_tokens() {
    let fixture = concat!(
        "--tokenizer=",
        env!("CARGO_MANIFEST_DIR"),
        "/../fixtures/tiny"
    );
    let engine = Engine::start(&[fixture]);
    let text = "What is a cache, and what does it keep? ".repeat(20);
    let chat = json!([{"role": "user", "content": text}]);
    let bodies = [
        (
            "/v1/responses",
            json!({"input": text, "max_output_tokens": 2}),
        ),
        (
            "/v1/messages",
            json!({"messages": chat, "max_tokens": 2, "cache_salt": "own"}),
        ),
    ];
    for (path, body) in bodies {
        let rendered = engine.answer(&format!("{path}/render"), body.clone()).await;
        let tokens = rendered["token_ids"].as_array().unwrap().len() as u64;
        let mut cached = Vec::new();
        for _ in 0..2 {
            let answer = engine.answer(path, body.clone()).await;
            let usage =
                warmroute_chat::openai::TokenUsage::from_json(answer.to_string().as_bytes());
            let usage = usage.unwrap();
            assert_eq!((usage.prompt_tokens, usage.completion_tokens), (tokens, 2));
            cached.push(usage.cached_tokens.unwrap());
        }
        assert_eq!(cached, [0, (tokens - 1) / 16 * 16], "{path}");
    }
}

/// Placeholders, identifiers and places of images are in render answers and in the cache.
#[tokio::test]
async fn images_are_placed_and_cached() {
    let fixture = concat!(
        "--tokenizer=",
        env!("CARGO_MANIFEST_DIR"),
        "/../fixtures/tiny"
    );
    let engine = Engine::start(&[fixture]);
    let path = "/v1/chat/completions";
    let body = |image: &str, text: &str| {
        let image = json!({"type": "image_url", "image_url": {"url": image}});
        let parts =
            json!([{"type": "text", "text": "Look:"}, image, {"type": "text", "text": text}]);
        json!({
            "messages": [{"role": "user", "content": parts}], "max_tokens": 1, "mm_payload": "none",
        })
    };
    let rendered = engine
        .answer(&format!("{path}/render"), body("a", "What?"))
        .await;
    let (features, tokens) = (
        &rendered["features"],
        rendered["token_ids"].as_array().unwrap(),
    );
    let place = &features["mm_placeholders"]["image"][0];
    let offset = usize::try_from(place["offset"].as_u64().unwrap()).unwrap();
    assert_eq!(place["length"], 40);
    assert!(tokens[offset..][..40].iter().all(|token| token == 3));
    assert_ne!(tokens[offset + 40], 3);
    let digits = features["mm_hashes"]["image"][0].as_str().unwrap();
    assert_eq!(digits.len(), 64);
    assert!(features["kwargs_data"].is_null());
    let cached = async |image, text| {
        let answer = engine.answer(path, body(image, text)).await;
        let usage = &answer["usage"];
        assert!(usage["prompt_tokens"].as_u64().unwrap() > 40);
        usage["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
    };
    assert_eq!(cached("a", "What?").await, 0);
    let before_image = offset as u64 / 16 * 16;
    assert_eq!(cached("b", "What?").await, before_image);
    assert!(cached("a", "Where?").await > before_image + 16);
}

async fn check_parity(fixture: &str, refused_by_both: &[&str]) {
    let directory = PathBuf::from(format!(
        "{}/../fixtures/{fixture}",
        env!("CARGO_MANIFEST_DIR")
    ));
    let tokenizer = Tokenizer::load(&directory).unwrap();
    let mut args = Args::on_free_ports();
    args.tokenizer = Some(directory);
    let probes = parity::probes(&tokenizer, &args.model, CivilTime::from_unix(0));
    assert_eq!(probes.len(), 35);
    let mock = Mock::start(args).await.unwrap();
    let client = client();
    let mut refused = Vec::new();
    for probe in probes {
        let request = client.post(format!("{}{}", mock.url(), probe.path.label()));
        let answer = request.body(probe.body).send().await.unwrap();
        let status = answer.status().as_u16();
        let answer = parity::read_answer(status, &answer.bytes().await.unwrap());
        let verdict = parity::compare(&probe.ours, &answer);
        match verdict {
            ProbeVerdict::Equal { .. } => {}
            ProbeVerdict::BothRefuse => refused.push(probe.name),
            verdict @ (ProbeVerdict::Differ { .. }
            | ProbeVerdict::OnlyEngineRefuses
            | ProbeVerdict::OnlyWeRefuse(_)
            | ProbeVerdict::Unanswered) => panic!("{fixture}, {}: {verdict}", probe.name),
        }
    }
    assert_eq!(refused, refused_by_both, "{fixture}");
    drop(client);
    mock.stop().await;
}

/// The mock's routes agree on every option of the template, and each option has its effect.
#[tokio::test]
async fn a_chat_s_options_decide_about_its_tokens() {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("options");
    std::fs::create_dir_all(&directory).unwrap();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/tiny/tokenizer.json");
    std::fs::copy(fixture, directory.join("tokenizer.json")).unwrap();
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}{{ mood }}\
                    {{ tools | length if tools }}{{ 'assistant:' if add_generation_prompt }}";
    std::fs::write(directory.join("chat_template.jinja"), template).unwrap();
    let tokenizer = format!("--tokenizer={}", directory.display());
    let tool = json!({"type": "function", "function": {"name": "look", "parameters": {}}});
    let options = [
        json!({}),
        json!({"add_generation_prompt": false}),
        json!({"add_generation_prompt": false, "continue_final_message": true}),
        json!({"tools": [tool]}),
        json!({"chat_template_kwargs": {"mood": "glad"}}),
    ];
    // Without a template, its arguments have no effect.
    for (flags, distinct) in [(&[tokenizer.as_str()][..], 5), (&[], 4)] {
        let engine = Engine::start(flags);
        let mut seen = BTreeSet::new();
        for option in &options {
            let mut body = json!({
                "messages": [
                    {"role": "user", "content": "Count."},
                    {"role": "assistant", "content": "One, two"},
                ],
                "max_tokens": 1, "return_token_ids": true,
            });
            let fields = body.as_object_mut().unwrap();
            fields.extend(option.as_object().unwrap().clone());
            let tokenized = engine.answer("/tokenize", body.clone()).await;
            let answer = engine.answer("/v1/chat/completions", body).await;
            assert!(tokenized["tokens"].is_array(), "{option}: {tokenized}");
            assert_eq!(answer["prompt_token_ids"], tokenized["tokens"], "{option}");
            seen.insert(tokenized["tokens"].to_string());
        }
        assert_eq!(seen.len(), distinct, "{flags:?}");
        let contradiction = json!({
            "messages": [{"role": "user", "content": "Count."}], "continue_final_message": true,
        });
        let refused = engine.post("/tokenize", contradiction).await;
        assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
    }
}

#[tokio::test]
async fn lists_of_prompts_have_one_choice_each() {
    let engine = Engine::start(&[]);
    for prompt in [json!(["ab", "cd"]), json!([[97, 98], [99, 100]])] {
        let mut body = json!({"prompt": prompt, "max_tokens": 2, "stream": false});
        let whole = engine.complete(body.clone()).await;
        assert_eq!(whole["choices"].as_array().unwrap().len(), 2);
        assert_eq!(whole["usage"]["prompt_tokens"], 4);
        body["stream"] = json!(true);
        let streamed = engine.post("/v1/completions", body).await;
        let text = streamed.text().await.unwrap();
        let mut streamed = [String::new(), String::new()];
        for data in sse(&text) {
            if data != "[DONE]" {
                let chunk: Value = serde_json::from_str(data).unwrap();
                let choice = &chunk["choices"][0];
                let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
                streamed[index].push_str(choice["text"].as_str().unwrap());
            }
        }
        assert_eq!(whole["choices"][0]["text"], json!(streamed[0]));
        assert_eq!(whole["choices"][1]["text"], json!(streamed[1]));
    }
}

#[tokio::test]
async fn a_client_that_disconnects_aborts_its_request() {
    let engine = Engine::start(&["--itl-ms=5", "--num-blocks=1000"]);
    let endless = json!({"prompt": "abc", "max_tokens": 10_000, "stream": true});
    // In mid-stream …
    let mut response = engine.post("/v1/completions", endless.clone()).await;
    assert!(response.chunk().await.unwrap().is_some());
    drop(response);
    engine.wait_for("aborted", 1).await;
    // … and before the first token.
    engine.post("/debug/fault", json!({"hang": true})).await;
    let response = engine.post("/v1/completions", endless.clone()).await;
    engine.wait_for("active", 1).await;
    drop(response);
    engine.wait_for("aborted", 2).await;
    // … and while it waits for the whole answer.
    let mut whole = endless;
    whole["stream"] = json!(false);
    tokio::select! {
        _ = engine.post("/v1/completions", whole) => panic!("an engine that hangs answered"),
        () = engine.wait_for("active", 1) => {}
    }
    engine.wait_for("aborted", 3).await;
    engine.post("/debug/fault", json!({"hang": false})).await;
    engine
        .complete(json!({"prompt": "abc", "max_tokens": 1}))
        .await;
    engine.wait_for("active", 0).await;
    let counters = &engine.get("/debug/counters").await["ranks"][0];
    assert_eq!(
        (&counters["started"], &counters["finished"]),
        (&json!(4), &json!(1))
    );
}

#[tokio::test]
async fn the_client_chooses_the_rank_and_adapters_are_models() {
    let engine = Engine::start(&["--ranks=2", "--block-size=2", "--lora=adapter"]);
    let body = json!({"prompt": "abcdef", "max_tokens": 1});
    for rank in ["1", "0", "1"] {
        let response = engine.on_rank(rank, body.clone()).await;
        assert_eq!(response.headers()["x-mock-dp-rank"], rank);
    }
    let response = engine.on_rank("2", body.clone()).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    let blocks = engine.get("/debug/blocks").await;
    let last = |rank: usize| &blocks["ranks"][rank]["last_seq"];
    assert_eq!((last(0), last(1)), (&json!(0), &json!(1)));
    // The second prompt of whole blocks stored its last block again: same set, two copies.
    assert_eq!(blocks["ranks"][1]["published_seq_that_changed"], 0);

    let mut adapted = body.clone();
    adapted["model"] = json!("adapter");
    adapted["cache_salt"] = json!("tenant");
    assert_eq!(cached(&engine.complete(adapted.clone()).await), 0);
    let stored = engine.get("/debug/blocks").await;
    assert_eq!(
        stored["ranks"][0]["last_seq"], 1,
        "the least loaded rank is the first one"
    );
    adapted["model"] = json!("nobody");
    let response = engine.post("/v1/completions", adapted).await;
    assert_eq!(response.status(), StatusCode::NOT_FOUND);
    let error: Value = response.json().await.unwrap();
    assert_eq!(error["error"]["code"], 404);
    let models = engine.get("/v1/models").await;
    assert_eq!(models["data"][1]["id"], "adapter");
    assert_eq!(models["data"][1]["parent"], models["data"][0]["id"]);
}

#[tokio::test]
async fn a_reset_is_published_with_the_next_batch_and_lost_batches_can_be_replayed() {
    let engine = Engine::start(&["--block-size=2", "--topic=kv-events", "--itl-ms=1"]);
    let context = zmq::Context::new();
    let sub = context.socket(zmq::SUB).unwrap();
    sub.set_subscribe(b"kv-events").unwrap();
    sub.connect(&endpoint(&engine.ports["kv"][0])).unwrap();
    // A new subscriber misses messages that were sent before its subscription arrived.
    let mut seen = None;
    for prompt in 0.. {
        engine
            .complete(json!({"prompt": [prompt, 7, 8], "max_tokens": 1}))
            .await;
        if sub.poll(zmq::POLLIN, 50).unwrap() > 0 {
            seen = Some(sub.recv_multipart(0).unwrap());
            break;
        }
    }
    let [topic, sequence, payload] = <[Vec<u8>; 3]>::try_from(seen.unwrap()).unwrap();
    assert_eq!(topic, b"kv-events");
    assert_eq!(types(&payload), ["BlockStored"]);
    let last = u64::from_be_bytes(sequence.try_into().unwrap());

    let reset = engine.answer("/reset_prefix_cache", json!({})).await;
    assert_eq!(reset, json!({"success": true}));
    let blocks = engine.get("/debug/blocks").await;
    assert_eq!(blocks["ranks"][0]["blocks"], json!([]));
    let drop_one = json!({"drop_batches": 1});
    engine.post("/debug/fault", drop_one).await;
    for prompt in [[1, 2, 3], [4, 5, 6]] {
        let request = json!({"prompt": prompt, "max_tokens": 1});
        engine.complete(request).await;
    }
    sub.set_rcvtimeo(timeout_ms()).unwrap();
    let live = sub.recv_multipart(0).unwrap();
    let live = u64::from_be_bytes(live[1].as_slice().try_into().unwrap());
    assert_eq!(live, last + 2, "one batch is missing");
    let replayed = engine.replay(0, last);
    let sequences: Vec<u64> = replayed.iter().map(|(sequence, _)| *sequence).collect();
    assert_eq!(sequences, [last, last + 1, last + 2]);
    assert_eq!(replayed[0].1, payload, "byte for byte");
    assert_eq!(types(&replayed[1].1), ["AllBlocksCleared", "BlockStored"]);
}

#[tokio::test]
async fn an_engine_that_stops_ends_its_requests_and_frees_its_ports() {
    let mut args = Args::on_free_ports();
    args.ranks = 2;
    let mock = Mock::start(args.clone()).await.unwrap();
    let url = format!("{}/v1/completions", mock.url());
    let endless = json!({"prompt": "abc", "max_tokens": 10_000, "stream": true});
    let client = client();
    let request = client.post(url).json(&endless);
    let mut response = request.send().await.unwrap();
    assert!(response.chunk().await.unwrap().is_some());
    let ports = mock.ports().clone();
    mock.stop().await;
    let cut = async {
        loop {
            match response.chunk().await {
                Ok(Some(_)) => {}
                Ok(None) => return false,
                Err(_) => return true,
            }
        }
    };
    let cut = tokio::time::timeout(PATIENCE, cut).await.unwrap();
    assert!(cut, "a stream that was cut must not look complete");
    args.port = ports.port;
    args.events.kv_port = ports.kv[0];
    args.events.replay_port = Some(ports.replay[0]);
    args.ranks = 1;
    Mock::start(args).await.unwrap().stop().await;
}

#[tokio::test]
async fn a_request_in_flight_forbids_a_reset() {
    let engine = Engine::start(&["--itl-ms=5"]);
    let endless = json!({"prompt": "abc", "max_tokens": 10_000, "stream": true});
    let mut response = engine.post("/v1/completions", endless).await;
    assert!(response.chunk().await.unwrap().is_some());
    let reset = engine.answer("/reset_prefix_cache", json!({})).await;
    assert_eq!(reset, json!({"success": false}));
}

#[tokio::test]
async fn operator_pages_have_the_form_of_vllm() {
    let engine = Engine::start(&["--ranks=2", "--num-blocks=77", "--topic=t"]);
    let sources = engine.get("/kv_event_sources").await;
    let expected = format!("tcp://*:{}", engine.ports["kv"][1]);
    assert_eq!(sources["1"]["endpoint"], json!(expected));
    assert_eq!(sources["0"]["topic"], "t");
    let metrics = engine.get_text("/metrics").await;
    assert!(
        metrics.contains("num_gpu_blocks=\"154\""),
        "the sum over the ranks"
    );
    assert!(
        metrics.contains("vllm:num_requests_running{engine=\"1\",model_name=\"mock-model\"} 0")
    );
    let health = format!("{}/health", engine.url);
    let status = async || engine.client.get(&health).send().await.unwrap().status();
    assert_eq!(status().await, StatusCode::OK);
    engine.post("/debug/fault", json!({"health": 503})).await;
    assert_eq!(status().await, StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn bad_requests_get_errors_in_openai_form() {
    let engine = Engine::start(&["--num-blocks=4"]);
    let bad = [
        json!({}),
        json!({"prompt": {"text": "no"}}),
        json!({"prompt": ""}),
        json!({"prompt": "abc", "n": 2}),
        json!({"prompt": "abc", "max_tokens": 0}),
        json!({"prompt": "abc", "max_tokens": 1000}),
    ];
    for body in bad {
        let response = engine.post("/v1/completions", body.clone()).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{body}");
        let error: Value = response.json().await.unwrap();
        assert!(error["error"]["message"].is_string());
    }
    let response = engine
        .post("/v1/chat/completions", json!({"messages": []}))
        .await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
}

fn data(stream: &str) -> Vec<&str> {
    let events = stream.split_terminator("\n\n");
    events
        .filter_map(|event| event.strip_prefix("data: "))
        .collect()
}

#[tokio::test]
async fn requests_fail_on_demand_all_or_those_with_a_marker() {
    let engine = Engine::start(&[]);
    let plain = json!({"prompt": "abc", "max_tokens": 8});
    for status in [500, 503, 429, 401, 404] {
        let fault = json!({"answer": {"status": status}});
        engine.post("/debug/fault", fault).await;
        let refused = engine.post("/v1/completions", plain.clone()).await;
        assert_eq!(refused.status().as_u16(), status);
        let retry_after = refused.headers().contains_key("retry-after");
        assert_eq!(retry_after, matches!(status, 429 | 503));
        let error: Value = refused.json().await.unwrap();
        assert_eq!(error["error"]["code"], status);
    }
    let counters = engine.get("/debug/counters").await;
    assert_eq!(counters["ranks"][0]["started"], 0, "nothing is computed");
    assert_eq!(counters["received"], 5);
    let fault = json!({"answer": {"status": 500}, "marker": "poison"});
    engine.post("/debug/fault", fault).await;
    engine.complete(plain.clone()).await;
    let poison = json!({"prompt": "a poison pill", "max_tokens": 1});
    let refused = engine.post("/v1/completions", poison.clone()).await;
    assert_eq!(refused.status(), StatusCode::INTERNAL_SERVER_ERROR);
    engine.post("/debug/fault", json!({"answer": "none"})).await;
    engine.complete(poison).await;
}

#[tokio::test]
async fn a_stream_fails_with_an_event_at_its_beginning_or_in_its_middle() {
    let engine = Engine::start(&[]);
    let stream = json!({"prompt": "abc", "max_tokens": 8, "stream": true});
    for events in [0, 3] {
        let fault = json!({"answer": {"error_event": events}});
        engine.post("/debug/fault", fault).await;
        let answer = engine.post("/v1/completions", stream.clone()).await;
        assert_eq!(answer.status(), StatusCode::OK);
        let text = answer.text().await.unwrap();
        let data = data(&text);
        assert_eq!(data.len(), events + 2, "{text}");
        let last: Value = serde_json::from_str(data[events]).unwrap();
        assert_eq!(last["error"]["code"], 500);
        assert_eq!(data[events + 1], "[DONE]");
        let plain = json!({"prompt": "abc", "max_tokens": 8});
        let refused = engine.post("/v1/completions", plain).await;
        assert_eq!(refused.status(), StatusCode::INTERNAL_SERVER_ERROR);
    }
    engine.wait_for("active", 0).await;
}

/// The engine generates during the silence, and others are served.
#[tokio::test]
async fn a_stream_is_silent_on_demand_while_others_are_served() {
    let engine = Engine::start(&[]);
    let fault = json!({"answer": {"silence_ms": 3_600_000}, "marker": "think"});
    engine.post("/debug/fault", fault).await;
    let thinking = json!({"prompt": "think", "max_tokens": 8, "stream": true});
    let mut silent = engine.post("/v1/completions", thinking).await;
    assert!(silent.chunk().await.unwrap().is_some());
    engine.wait_for("finished", 1).await;
    engine
        .complete(json!({"prompt": "abc", "max_tokens": 8}))
        .await;
    engine.wait_for("finished", 2).await;
    engine.post("/debug/fault", json!({"answer": "none"})).await;
}

#[tokio::test]
async fn a_slowed_engine_answers_all_the_same() {
    let engine = Engine::start(&["--itl-ms=1"]);
    engine.post("/debug/fault", json!({"slowdown": 20})).await;
    let begun = tokio::time::Instant::now();
    engine
        .complete(json!({"prompt": "abc", "max_tokens": 8}))
        .await;
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(7 * 20), "{took:?}");
}

/// A leg as a router sends it, but for these members.
fn prefill_leg(id: &str, other: &[(&str, Value)]) -> (String, Value) {
    let mut body = json!({
        "prompt": "hello", "max_tokens": 1, "stream": false,
        "kv_transfer_params": {
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null,
        },
    });
    for (name, value) in other {
        body[*name] = value.clone();
    }
    (id.to_owned(), body)
}

impl Engine {
    async fn leg(&self, (id, body): &(String, Value)) -> (StatusCode, Value) {
        let url = format!("{}/v1/completions", self.url);
        let request = self.client.post(url).header("x-request-id", id);
        let answer = request.json(body).send().await.unwrap();
        (answer.status(), answer.json().await.unwrap())
    }

    /// Parameters for a decode leg with this id.
    async fn offer(&self, id: &str) -> Value {
        let (status, answer) = self.leg(&prefill_leg(id, &[])).await;
        assert_eq!(status, StatusCode::OK);
        answer["kv_transfer_params"].clone()
    }
}

fn decode_leg(id: &str, params: &Value) -> (String, Value) {
    let body = json!({"prompt": "hello", "max_tokens": 4, "kv_transfer_params": params});
    (id.to_owned(), body)
}

#[tokio::test]
async fn a_transfer_is_good_once_for_the_same_request_as_it_is() {
    let prefill = Engine::start(&["--role=prefill"]);
    let (decode, both) = (Engine::start(&["--role=decode"]), Engine::start(&[]));
    let params = prefill.offer("a").await;
    let mut changed = params.clone();
    changed["remote_block_ids"] = json!([[7]]);
    let mut missing = params.clone();
    missing.as_object_mut().unwrap().remove("remote_port");
    for (id, params) in [
        ("b", &params),
        ("a", &changed),
        ("a", &missing),
        ("a", &json!({})),
    ] {
        let (status, answer) = decode.leg(&decode_leg(id, params)).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
    }
    let (status, answer) = decode.leg(&decode_leg("a", &params)).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let (_, whole) = both.leg(&decode_leg("a", &Value::Null)).await;
    assert_eq!(answer["choices"], whole["choices"]);
    let (status, _) = decode.leg(&decode_leg("a", &params)).await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "a second use");
    let (status, _) = decode.leg(&decode_leg("a", &Value::Null)).await;
    assert_eq!(status, StatusCode::OK, "whole");
    let transfers = decode.get("/debug/counters").await["transfers"].clone();
    let counts = ["received", "refused", "whole"].map(|name| transfers[name].as_u64().unwrap());
    assert_eq!(counts, [1, 5, 1]);
    assert_eq!(prefill.get("/debug/counters").await["transfers"]["sent"], 1);
    let late = prefill.offer("c").await;
    drop(prefill);
    let (status, _) = decode.leg(&decode_leg("c", &late)).await;
    assert_eq!(
        status,
        StatusCode::INTERNAL_SERVER_ERROR,
        "no engine to fetch from"
    );
}

#[tokio::test]
async fn a_lease_expires_and_a_prefill_engine_takes_prefill_legs_only() {
    let prefill = Engine::start(&["--role=prefill", "--transfer-lease-ms=0"]);
    let decode = Engine::start(&["--role=decode"]);
    let params = prefill.offer("a").await;
    let (status, _) = decode.leg(&decode_leg("a", &params)).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    for (name, value) in [
        ("max_tokens", json!(2)),
        ("max_completion_tokens", json!(2)),
        ("stream", json!(true)),
        ("stream_options", json!({})),
        ("min_tokens", json!(1)),
        ("kv_transfer_params", Value::Null),
        ("kv_transfer_params", params),
    ] {
        let (status, _) = prefill.leg(&prefill_leg("a", &[(name, value)])).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{name}");
    }
}
