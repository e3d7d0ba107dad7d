//! Streams whose worker is killed are finished by another worker, where that gives the same answer.

use std::collections::BTreeSet;
use std::fs;

use reqwest::{Response, StatusCode};
use serde_json::{Value, json};

use crate::fleet::traffic::send;
use crate::fleet::{Engines, Flags, Fleet, Mode, Place, worker_name};

const TOKENS: u64 = 400;

/// Events before a worker is killed.
const BEFORE: usize = 10;

const RESUMES: &str = "warmroute_router_stream_resumes_total";

const ENGINES: Engines = Engines {
    count: 3,
    ranks: 1,
    blocks: 400,
    flags: &["--itl-ms", "8", "--no-prompt-tokens-details"],
};

/// What a client reads of a stream.
#[derive(Debug, Default, PartialEq)]
struct Answer {
    text: String,
    roles: usize,
    usage: Value,
    reasons: Vec<Value>,
    names: BTreeSet<String>,
    done: bool,
}

impl Answer {
    fn of(stream: &str) -> Self {
        let mut answer = Self::default();
        for event in stream.split_terminator("\n\n") {
            let data = event.strip_prefix("data: ").unwrap();
            assert!(!answer.done, "an event after the last one: {data}");
            if data == "[DONE]" {
                answer.done = true;
                continue;
            }
            let chunk: Value = serde_json::from_str(data).unwrap();
            let name = ["id", "object", "created", "model"].map(|key| chunk[key].to_string());
            answer.names.insert(name.join(" "));
            assert!(!data.contains("_ids\":["), "{data}");
            let choice = &chunk["choices"][0];
            let (text, delta) = (&choice["text"], &choice["delta"]["content"]);
            let text = text.as_str().or(delta.as_str()).unwrap_or_default();
            answer.text.push_str(text);
            answer.roles += usize::from(choice["delta"]["role"] == "assistant");
            let reason = &choice["finish_reason"];
            answer
                .reasons
                .extend((!reason.is_null()).then(|| reason.clone()));
            if !chunk["usage"].is_null() {
                answer.usage = chunk["usage"].clone();
            }
        }
        assert_eq!(answer.names.len(), 1, "one stream: {:?}", answer.names);
        answer
    }

    /// Without its id and the time, which differ from request to request.
    fn unnamed(self) -> Self {
        let names = BTreeSet::new();
        Self { names, ..self }
    }
}

async fn start() -> (Fleet, Place) {
    let place = Place::new();
    let settings = place.path("settings.toml");
    fs::write(&settings, "resume_streams = \"all\"\n").unwrap();
    let config = format!("--config={}", settings.display());
    let flags = Flags {
        router: Box::leak(Box::new([&*config.leak()])),
        ..Flags::default()
    };
    (Fleet::start(Mode::Embedded, ENGINES, flags).await, place)
}

/// Reads until so many events are there.
async fn read_events(answer: &mut Response, count: usize, text: &mut String) {
    while text.matches("\n\n").count() < count {
        let chunk = answer.chunk().await.unwrap().expect("the stream goes on");
        text.push_str(std::str::from_utf8(&chunk).unwrap());
    }
}

/// The index of the engine that generates a stream now.
async fn busy_engine(fleet: &Fleet, dead: &[usize]) -> usize {
    for index in (0..ENGINES.count).filter(|index| !dead.contains(index)) {
        let load = fleet.get(fleet.engine(index, "/debug/counters")).await;
        let rank = &load["ranks"][0];
        let count = |key: &str| rank[key].as_u64().expect("a count");
        if count("started") > count("finished") + count("aborted") {
            return index;
        }
    }
    panic!("no engine generates");
}

/// The bytes of a stream without the values of `id` and `created`.
fn without_names(stream: &str) -> String {
    let lines = stream.lines().map(|line| {
        let (head, tail) = line.split_once(",\"object\"").unwrap_or(("", line));
        let (created, tail) = tail.split_once(",\"model\"").unwrap_or(("", tail));
        assert!(head.len() < 80 && created.len() < 80, "{line}");
        tail.to_owned() + "\n"
    });
    lines.collect()
}

/// A stream during which `kills` workers are killed; `None` for one that breaks off.
async fn disturbed(fleet: &Fleet, path: &str, body: &Value, kills: usize) -> Option<Answer> {
    let mut answer = send(fleet, path, body).await;
    assert_eq!(answer.status(), StatusCode::OK);
    let (mut text, mut dead) = (String::new(), Vec::new());
    for kill in 1..=kills {
        read_events(&mut answer, kill * BEFORE, &mut text).await;
        let busy = busy_engine(fleet, &dead).await;
        fleet.engines[busy].process.kill();
        dead.push(busy);
    }
    let whole = loop {
        match answer.chunk().await {
            Ok(Some(chunk)) => text.push_str(std::str::from_utf8(&chunk).unwrap()),
            Ok(None) => break true,
            Err(_) => break false,
        }
    };
    for index in dead {
        fleet.engines[index].process.restart().await;
        let healthy = async |fleet: &Fleet| {
            let shown = fleet.get(fleet.admin(0, "/workers")).await;
            let mut shown = shown["workers"].as_array().unwrap().iter();
            shown.any(|one| one["worker"] == worker_name(index) && one["health"] == "healthy")
        };
        fleet.until("the worker is healthy again", healthy).await;
    }
    fleet.until_idle().await;
    whole.then(|| Answer::of(&text))
}

fn completion() -> Value {
    json!({
        "model": "mock", "prompt": "Count, and do not stop.", "max_tokens": TOKENS, "stream": true,
        "stream_options": {"include_usage": true},
    })
}

fn chat() -> Value {
    let messages = json!([{"role": "user", "content": "Count, and do not stop."}]);
    json!({
        "model": "mock", "messages": messages, "max_tokens": TOKENS, "stream": true,
        "stream_options": {"include_usage": true},
    })
}

async fn outcome(fleet: &Fleet, outcome: &str) -> f64 {
    let name = format!("{RESUMES}{{outcome=\"{outcome}\"}}");
    let page = fleet.http.get(fleet.admin(0, "/metrics")).send().await;
    let page = page.unwrap().text().await.unwrap();
    let line = page.lines().find_map(|line| line.strip_prefix(&name));
    line.map_or(0.0, |value| value.trim().parse().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_whose_workers_are_killed_equals_an_undisturbed_one() {
    let (fleet, _place) = start().await;
    for (path, body) in [
        ("/v1/completions", completion()),
        ("/v1/chat/completions", chat()),
    ] {
        // With the engine's own bytes, although the router asks for token ids.
        let direct = fleet.http.post(fleet.engine(0, path)).json(&body).send();
        let direct = direct.await.unwrap().text().await.unwrap();
        let routed = send(&fleet, path, &body).await.text().await.unwrap();
        assert_eq!(without_names(&direct), without_names(&routed));
        let expected = Answer::of(&direct).unnamed();
        assert_eq!(expected.usage["completion_tokens"], TOKENS);
        for kills in [1, 2] {
            let answer = disturbed(&fleet, path, &body, kills).await;
            let answer = answer.expect("the stream is finished").unnamed();
            assert_eq!(answer, expected, "{path}, {kills} killed");
        }
    }
    assert_eq!(outcome(&fleet, "resumed").await, 6.0);
    assert_eq!(outcome(&fleet, "not_resumable").await, 0.0);
}

/// Such a stream breaks off, as all do without the setting.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_whose_rest_may_differ_breaks_off() {
    let (fleet, _place) = start().await;
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {}}});
    for (path, mut body, field, value) in [
        ("/v1/completions", completion(), "stop", json!(["zq"])),
        (
            "/v1/completions",
            completion(),
            "presence_penalty",
            json!(0.5),
        ),
        ("/v1/completions", completion(), "seed", json!(7)),
        ("/v1/chat/completions", chat(), "tools", json!([tool])),
    ] {
        body[field] = value;
        assert_eq!(disturbed(&fleet, path, &body, 1).await, None, "{field}");
    }
    assert_eq!(fleet.metric(RESUMES).await, 0.0, "none was resumable");
    // The third worker dies too.
    assert_eq!(
        disturbed(&fleet, "/v1/completions", &completion(), 3).await,
        None
    );
    assert_eq!(outcome(&fleet, "resumed").await, 2.0);
    assert_eq!(outcome(&fleet, "not_resumable").await, 1.0);
    let failed = "warmroute_router_requests_total{outcome=\"failed\",route=\"completions\"}";
    let page = fleet.http.get(fleet.admin(0, "/metrics")).send().await;
    let page = page.unwrap().text().await.unwrap();
    assert!(page.contains(&format!("{failed} 4")), "{page}");
}
