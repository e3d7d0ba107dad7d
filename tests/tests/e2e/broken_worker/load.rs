//! A steady load of chats, plain and streamed, half of them with a prefix that all of these share.

use std::sync::LazyLock;
use std::time::Duration;

use fastrand::Rng;
use reqwest::{Client, Response};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::fault::MARKER;
use crate::fleet::client;

pub(super) const PATH: &str = "/v1/chat/completions";

/// A request that waits longer for its next byte is late.
pub(super) const LATE: Duration = Duration::from_secs(10);

/// About 6,000 tokens of the fixture's tokenizer.
static HOT: LazyLock<String> = LazyLock::new(|| words(0, 6_000));

/// How a load differs from the usual one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Usual,
    /// One request in 60 has a prompt of about 100,000 tokens.
    LongPrompts,
    /// One request in ten has [`MARKER`].
    Marked,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub(super) per_second: u64,
    pub(super) secs: u64,
    pub(super) shape: Shape,
    /// Seconds in which half of the requests have the hot prefix. Later no cache prefers a worker.
    pub(super) hot_secs: u64,
    /// Silence that is a stream's own, and not counted as lateness.
    pub(super) silence: Duration,
}

impl Load {
    pub(super) const fn usual(secs: u64) -> Self {
        Self {
            per_second: 10,
            secs,
            shape: Shape::Usual,
            hot_secs: secs,
            silence: Duration::ZERO,
        }
    }

    /// When a request is sent. While no cache prefers a worker, a second's requests are sent together:
    /// one by one all would go to the worker that seems fastest.
    fn due(self, number: u64) -> Duration {
        let period = Duration::from_secs(1) / u32::try_from(self.per_second).unwrap();
        match number < self.per_second * self.hot_secs {
            true => period * u32::try_from(number).unwrap(),
            false => Duration::from_secs(number / self.per_second),
        }
    }

    /// Longest time for a whole answer.
    fn patience(self) -> Duration {
        self.silence + 3 * LATE
    }
}

/// A request as its client saw it.
#[derive(Debug)]
pub(super) struct Sent {
    /// Since the load's beginning.
    pub(super) at: Duration,
    pub(super) is_stream: bool,
    pub(super) is_marked: bool,
    /// Longest wait for a byte.
    pub(super) waited: Duration,
    /// The error. `None`: a whole answer.
    pub(super) failed: Option<String>,
}

/// Sends the load to the routers in turn. The client waits as long as the load does, not for the
/// minute of the fleet's own.
pub(super) async fn run(bases: &[String], load: Load) -> Vec<Sent> {
    let http = client().build().expect("a client");
    let (begun, mut requests) = (Instant::now(), JoinSet::new());
    for number in 0..load.per_second * load.secs {
        sleep_until(begun + load.due(number)).await;
        let router = usize::try_from(number).unwrap() % bases.len();
        let url = format!("{}{PATH}", bases[router]);
        // Each of two routers gets all kinds.
        let is_stream = (number / 2) % 2 == 0;
        let (body, is_marked) = chat(number, is_stream, load);
        let (http, at) = (http.clone(), begun.elapsed());
        requests.spawn(async move {
            let (failed, waited) = send(&http, &url, &body, load.patience()).await;
            Sent {
                at,
                is_stream,
                is_marked,
                waited,
                failed: failed.err(),
            }
        });
    }
    requests.join_all().await
}

/// A chat that has the hot prefix.
pub(super) fn hot_chat(number: u64) -> Value {
    body(&HOT, number, false, "")
}

fn chat(number: u64, is_stream: bool, load: Load) -> (Value, bool) {
    let shape = load.shape;
    let is_marked = shape == Shape::Marked && number % 10 == 7;
    let own;
    let system = if shape == Shape::LongPrompts && number % 60 == 30 {
        own = words(number, 100_000);
        &own
    } else if (number / 4).is_multiple_of(2) && number < load.per_second * load.hot_secs {
        &*HOT
    } else {
        own = words(number, 1_000);
        &own
    };
    let marker = if is_marked { MARKER } else { "" };
    // Only a stream can be silent.
    (
        body(system, number, is_stream || is_marked, marker),
        is_marked,
    )
}

fn body(system: &str, number: u64, is_stream: bool, marker: &str) -> Value {
    let messages = json!([
        {"role": "system", "content": system},
        {"role": "user", "content": format!("{marker} Question {number}?")},
    ]);
    json!({"model": "mock", "messages": messages, "max_tokens": 16, "stream": is_stream})
}

/// Text of about so many tokens, another one for each seed.
fn words(seed: u64, tokens: usize) -> String {
    const WORDS: [&str; 4] = [" the", " and", " of", " to"];
    let mut rng = Rng::with_seed(seed);
    (0..tokens)
        .map(|_| WORDS[rng.usize(0..WORDS.len())])
        .collect()
}

/// Whether a whole answer came, and the longest wait for a byte of it.
async fn send(
    http: &Client,
    url: &str,
    body: &Value,
    patience: Duration,
) -> (Result<(), String>, Duration) {
    let begun = Instant::now();
    let mut last = begun;
    let mut waited = Duration::ZERO;
    let mut noted = || {
        waited = waited.max(last.elapsed());
        last = Instant::now();
    };
    let answered = async {
        let asked = http.post(url).json(body).timeout(patience);
        let answer = asked.send().await;
        let answer = answer.map_err(|error| format!("{error:?}"))?;
        read(answer, body["stream"] == true, &mut noted).await
    };
    let result = timeout_at(begun + patience, answered).await;
    noted();
    (
        result.unwrap_or_else(|_| Err("no answer".to_owned())),
        waited,
    )
}

/// Reads an answer to its end. Each piece is `noted`.
async fn read(
    mut answer: Response,
    is_stream: bool,
    noted: &mut impl FnMut(),
) -> Result<(), String> {
    let status = answer.status();
    let mut text = String::new();
    while let Some(piece) = answer.chunk().await.map_err(|error| format!("{error:?}"))? {
        noted();
        text.push_str(&String::from_utf8_lossy(&piece));
    }
    let is_whole = !is_stream || text.trim_end().ends_with("data: [DONE]");
    if status.is_success() && is_whole && !text.contains("{\"error\":") {
        return Ok(());
    }
    let shown: String = text.chars().take(200).collect();
    Err(format!("{status}: {shown}"))
}
