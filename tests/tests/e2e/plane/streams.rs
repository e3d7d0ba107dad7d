//! Streams that stay open during an event, and streams that must end well.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream;
use reqwest::{Client, Response};
use serde_json::{Value, json};

/// Bound of clients that connect concurrently.
const CONNECTING: usize = 100;

/// Opens streams that run until they are dropped, and reads each first chunk.
pub(crate) async fn open(http: &Client, base: &str, count: u64) -> Vec<Response> {
    let headed = stream::iter(0..count).map(|number| async move {
        let prompt = format!("Stream {number}: count, and do not stop.");
        let body = body(&prompt, 3000);
        let sent = http.post(format!("{base}/v1/completions")).json(&body);
        let answer = sent.send().await.expect("an answer");
        assert!(answer.status().is_success(), "{}", answer.status());
        answer
    });
    let headed: Vec<Response> = headed.buffer_unordered(CONNECTING).collect().await;
    join_all(headed.into_iter().map(|mut answer| async {
        let chunk = answer.chunk().await.expect("no failure");
        assert!(chunk.is_some_and(|chunk| !chunk.is_empty()), "a chunk");
        answer
    }))
    .await
}

pub(crate) fn body(prompt: &str, tokens: u32) -> Value {
    json!({"model": "mock", "prompt": prompt, "max_tokens": tokens, "stream": true})
}

/// The repeated text of a prompt, about ten tokens, and the number of generated tokens.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) rules: usize,
    pub(crate) tokens: u32,
}

/// Counts of the ends of many streams.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) sent: AtomicU64,
    pub(crate) whole: AtomicU64,
    pub(crate) failed: AtomicU64,
}

impl Tally {
    /// Finished requests, then requests that were sent before: never fewer.
    pub(crate) fn ended_and_sent(&self) -> (u64, u64) {
        let ended = self.whole.load(Ordering::SeqCst) + self.failed.load(Ordering::SeqCst);
        (ended, self.sent.load(Ordering::SeqCst))
    }

    /// Runs one stream to its end. Prints and counts failures.
    pub(crate) async fn stream(&self, http: &Client, base: &str, prompt: &str, tokens: u32) {
        self.sent.fetch_add(1, Ordering::SeqCst);
        match whole(http, base, prompt, tokens).await {
            Ok(()) => self.whole.fetch_add(1, Ordering::SeqCst),
            Err(why) => {
                println!("failed: {why}");
                self.failed.fetch_add(1, Ordering::SeqCst)
            }
        };
    }

    /// Starts streams at this rate until they are dropped or stopped.
    pub(crate) async fn at_rate(
        &self,
        (http, base): (&Client, &str),
        rate: u32,
        Shape { rules, tokens }: Shape,
        is_over: impl Fn() -> bool,
    ) {
        let rules = "Be exact, or say that you are not. ".repeat(rules);
        let mut ticks = tokio::time::interval(Duration::from_secs(1) / rate);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
        let mut rng = Rng::with_seed(11);
        let mut open = stream::FuturesUnordered::new();
        while !is_over() {
            tokio::select! {
                _ = ticks.tick() => {
                    let (topic, number) = (rng.u32(0..20), rng.u32(..));
                    let prompt = format!("Topic {topic}. {rules} Question {number}?");
                    open.push(async move { self.stream(http, base, &prompt, tokens).await });
                }
                Some(()) = open.next() => {}
            }
        }
        while open.next().await.is_some() {}
    }
}

async fn whole(http: &Client, base: &str, prompt: &str, tokens: u32) -> Result<(), String> {
    let url = format!("{base}/v1/completions");
    let sent = http.post(url).json(&body(prompt, tokens)).send().await;
    let answer = sent.map_err(|error| format!("no answer: {error:?}"))?;
    let status = answer.status();
    let text = answer.text().await;
    let text = text.map_err(|error| format!("{status}, broken off: {error:?}"))?;
    match status.is_success() && text.trim_end().ends_with("data: [DONE]") {
        true => Ok(()),
        false => Err(format!("{status}: {text}")),
    }
}
