//! Seeded client requests: conversations that share prefixes.

use fastrand::Rng;
use reqwest::Response;
use serde_json::{Value, json};

use super::{BLOCK, Fleet};

/// A request and its answer.
pub(crate) struct Served {
    pub(crate) worker: String,
    pub(crate) dp_rank: u64,
    /// The rank that served it, by its header.
    pub(crate) served_by_rank: u64,
    pub(crate) overlap_blocks: u64,
    /// What the decision rests on.
    pub(crate) basis: String,
    pub(crate) state: String,
    /// The state of each tier.
    pub(crate) tier_states: String,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
}

impl Served {
    /// Whether no index answered in time, as on a busy machine: the request is routed without
    /// credit of the index. Engines' reports may credit it.
    pub(crate) fn is_without_answer(&self) -> bool {
        let without = self.tier_states.starts_with("gpu=unknown");
        assert!(
            !without || self.overlap_blocks == 0 || self.basis == "reported",
            "credit without an answer"
        );
        let has_credit = ["exact", "partial", "unverified"].contains(&self.state.as_str());
        assert!(has_credit || self.overlap_blocks == 0, "{}", self.state);
        without
    }
}

/// A chat or completion that shares its beginning with others.
pub(crate) fn request(rng: &mut Rng) -> (&'static str, Value) {
    let topic = rng.usize(0..6);
    let rules = rng.usize(3..30);
    let system: String = (0..rules)
        .map(|rule| format!("Rule {rule} of topic {topic}: be exact, or say that you are not. "))
        .collect();
    let question = format!("Question {} about topic {topic}?", rng.u32(0..1000));
    let max_tokens = rng.u32(1..40);
    if rng.bool() {
        let mut messages = vec![
            json!({"role": "system", "content": system}),
            json!({"role": "user", "content": question}),
        ];
        if rng.bool() {
            messages.push(json!({"role": "assistant", "content": "It depends."}));
            messages.push(json!({"role": "user", "content": "On what?"}));
        }
        let body = json!({"model": "mock", "messages": messages, "max_tokens": max_tokens});
        return ("/v1/chat/completions", body);
    }
    let prompt = if rng.bool() {
        json!(system + &question)
    } else {
        let length = rng.usize(1..400);
        let tokens: Vec<usize> = (0..length)
            .map(|at| 300 + (at * 7 + topic) % 1000)
            .collect();
        json!(tokens)
    };
    let mut body = json!({"model": "mock", "prompt": prompt, "max_tokens": max_tokens});
    if rng.u8(0..4) == 0 {
        body["cache_salt"] = json!(format!("tenant-{}", rng.u8(0..2)));
    }
    ("/v1/completions", body)
}

/// A completion of whole blocks and one token, with a beginning of its own.
pub(crate) fn prompt(first: u64, blocks: u64) -> Value {
    let tokens: Vec<u64> = (0..=blocks * BLOCK)
        .map(|at| 300 + (first * 131 + at * 7) % 1000)
        .collect();
    json!({"model": "mock", "prompt": tokens, "max_tokens": 1})
}

/// Sends a request to the next router.
pub(crate) async fn send(fleet: &Fleet, path: &str, body: &Value) -> Response {
    let request = fleet.http.post(fleet.url(path)).json(body);
    request.send().await.expect("an answer")
}

/// Sends a request that must succeed, and reads its answer and headers.
pub(crate) async fn serve(fleet: &Fleet, path: &str, body: &Value) -> Served {
    read(send(fleet, path, body).await).await
}

/// Reads an answer that must be a success, and its headers.
pub(crate) async fn read(answer: Response) -> Served {
    let status = answer.status();
    let header = |name: &str| {
        let value = answer.headers().get(name);
        value.map_or("", |value| value.to_str().unwrap()).to_owned()
    };
    let number = |name: &str| header(name).parse().unwrap_or(u64::MAX);
    let (worker, state) = (
        header("x-warmroute-worker"),
        header("x-warmroute-index-state"),
    );
    let (dp_rank, served_by_rank) = (number("x-warmroute-dp-rank"), number("x-mock-dp-rank"));
    let basis = header("x-warmroute-basis");
    let tier_states = header("x-warmroute-tier-states");
    let overlap_blocks = number("x-warmroute-overlap-blocks");
    let body: Value = answer.json().await.expect("JSON");
    assert!(status.is_success(), "{status}: {body}");
    let usage = &body["usage"];
    let count = |key: &str| usage.pointer(key).and_then(Value::as_u64);
    // `/v1/messages` excludes what is read from the cache from its input.
    let read = count("/cache_read_input_tokens");
    let cached_tokens = count("/prompt_tokens_details/cached_tokens")
        .or_else(|| count("/input_tokens_details/cached_tokens"))
        .or(read)
        .unwrap_or(0);
    let prompt_tokens = count("/prompt_tokens").or_else(|| count("/input_tokens"));
    Served {
        worker,
        dp_rank,
        served_by_rank,
        overlap_blocks,
        basis,
        state,
        tier_states,
        prompt_tokens: prompt_tokens.expect("a count") + read.unwrap_or(0),
        cached_tokens,
    }
}
