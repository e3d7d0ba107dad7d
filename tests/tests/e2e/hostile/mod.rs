//! Hostile clients and engines, one router and what others see of them: answers, health of the
//! workers, memory.

mod attack;
mod engine;
mod many_keys;
mod memory;
mod resets;

use std::cell::Cell;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use fastrand::Rng;
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use crate::fleet::traffic::{Served, read};
use crate::fleet::{
    PATIENCE, Place, Process, ROUTER, TOKENIZER, client, free_port, strings, until_true,
};
use engine::{HostileEngine, Reuse};

const CHAT: &str = "/v1/chat/completions";

/// Above the 16 KiB up to which a prompt is prepared on the thread of its connection.
const LARGE_BODY_BYTES: usize = 20_000;

/// Workers of one model, which may misbehave.
struct HostileEngines {
    engines: Vec<HostileEngine>,
    place: Place,
    routers: Cell<usize>,
}

/// A router before [`HostileEngines`], with a tokenizer and the policy `kv`.
struct Target {
    process: Process,
    http: reqwest::Client,
}

/// A client that sends one request after the other until it is stopped.
struct OtherClient {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl HostileEngines {
    async fn start(count: usize, reuse: Reuse) -> Self {
        let place = Place::new();
        let mut engines = Vec::new();
        for number in 0..count {
            engines.push(HostileEngine::start(&place, &name(number), reuse).await);
        }
        Self {
            engines,
            place,
            routers: Cell::new(0),
        }
    }

    /// A router whose answers show decisions, with further settings. Returns when it routes by
    /// tokens.
    async fn router(&self, settings: &str) -> Target {
        let number = self.routers.get();
        self.routers.set(number + 1);
        let file = |ending: &str| self.place.path(&format!("router-{number}.{ending}"));
        let text = format!("{settings}\n[admin]\nexplain_headers = \"all\"\n");
        fs::write(file("toml"), text).unwrap();
        let (public, admin) = (free_port().to_string(), free_port().to_string());
        let config = file("toml").display().to_string();
        let mut arguments = strings(&[
            "--host=127.0.0.1",
            "--port",
            &public,
            "--admin-port",
            &admin,
            "--policy=kv",
            "--tokenizer",
            TOKENIZER,
            "--config",
            &config,
        ]);
        for (number, engine) in self.engines.iter().enumerate() {
            arguments.extend(["--worker".to_owned(), engine.worker(&name(number))]);
        }
        let process = Process::start(ROUTER, &file("log"), arguments).await;
        let http = client().read_timeout(PATIENCE).build().unwrap();
        let target = Target { process, http };
        target.until_by_tokens().await;
        target
    }

    fn resets(&self) -> usize {
        self.engines.iter().map(HostileEngine::resets).sum()
    }
}

impl Target {
    fn address(&self) -> String {
        self.process.base().trim_start_matches("http://").to_owned()
    }

    /// Sends a body that must be answered with 200.
    async fn ask(&self, body: String) -> Served {
        let url = format!("{}{CHAT}", self.process.base());
        read(self.http.post(url).body(body).send().await.unwrap()).await
    }

    /// The page of this path of the admin port.
    async fn admin(&self, path: &str) -> String {
        let port = &self.process.said["admin_port"];
        let url = format!("http://127.0.0.1:{port}{path}");
        let page = self.http.get(url).send().await.unwrap();
        page.text().await.unwrap()
    }

    /// A metric by its name without the prefix, summed over its labels.
    async fn metric(&self, name: &str) -> f64 {
        let page = self.admin("/metrics").await;
        let name = format!("warmroute_router_{name}");
        let lines = page.lines().filter_map(|line| line.strip_prefix(&name));
        let values = lines.filter(|rest| rest.starts_with([' ', '{']));
        values
            .map(|rest| rest.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
            .sum()
    }

    /// Requests whose tokens did not decide.
    async fn unhashed(&self) -> f64 {
        self.metric("unhashed_requests_total").await
    }

    /// Why such requests had no tokens.
    async fn unhashed_reasons(&self) -> Vec<String> {
        let page = self.admin("/metrics").await;
        let lines = page.lines().map(str::to_owned);
        let is_reason =
            |line: &String| line.starts_with("warmroute_router_unhashed_requests_total{");
        lines.filter(is_reason).collect()
    }

    async fn health(&self) -> Vec<String> {
        let page: Value = serde_json::from_str(&self.admin("/workers").await).unwrap();
        let workers = page["workers"].as_array().unwrap().iter();
        workers
            .map(|worker| worker["health"].as_str().unwrap().to_owned())
            .collect()
    }

    async fn until(&self, what: &str, condition: impl AsyncFn(&Self) -> bool) {
        let held = timeout(PATIENCE, until_true(async || condition(self).await)).await;
        assert!(held.is_ok(), "in vain: {what}");
    }

    /// Asks with large bodies until one is routed by its tokens.
    async fn until_by_tokens(&self) {
        let mut rng = Rng::with_seed(1);
        let first = large_body(&mut rng);
        let is_by_tokens = async |target: &Self| {
            let url = format!("{}{CHAT}", target.process.base());
            let before = target.unhashed().await;
            let sent = target.http.post(url).body(first.clone()).send().await;
            let Ok(answer) = sent else { return false };
            if !answer.status().is_success() {
                return false;
            }
            let served = read(answer).await;
            target.unhashed().await == before
                && served.state == "exact"
                && served.overlap_blocks > 0
                && served.overlap_blocks != u64::MAX
        };
        self.until("a large body is routed by its tokens", is_by_tokens)
            .await;
    }

    /// Sends a whole request. Its client reads nothing, and hangs up when it is dropped.
    async fn send(&self, request: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address()).await.unwrap();
        // A server that refuses the head may close before all is sent.
        drop(stream.write_all(request).await);
        stream
    }

    /// Sends large bodies one after the other, each of which must be answered with 200.
    fn other_client(&self, seed: u64) -> OtherClient {
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let (stops, counts) = (Arc::clone(&stop), Arc::<AtomicUsize>::clone(&answered));
        let (http, url) = (self.http.clone(), format!("{}{CHAT}", self.process.base()));
        let mut rng = Rng::with_seed(seed);
        let task = TaskTracker::new().spawn(async move {
            while !stops.load(Ordering::Relaxed) {
                let sent = http.post(&url).body(large_body(&mut rng)).send().await;
                read(sent.unwrap()).await;
                counts.fetch_add(1, Ordering::Relaxed);
            }
        });
        OtherClient {
            stop,
            answered,
            task,
        }
    }
}

impl OtherClient {
    fn answered(&self) -> usize {
        self.answered.load(Ordering::Relaxed)
    }

    /// Waits for so many more answers.
    async fn until_answered(&self, more: usize) {
        let wanted = self.answered() + more;
        let is_answered = async || self.answered() >= wanted || self.task.is_finished();
        let held = timeout(PATIENCE, until_true(is_answered)).await;
        assert!(held.is_ok(), "in vain: {more} more answers to others");
    }

    /// The number of answers, each with 200.
    async fn stop(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap();
        self.answered.load(Ordering::Relaxed)
    }
}

fn name(number: usize) -> String {
    format!("worker-{number}")
}

/// A chat of which the beginning is that of all others.
fn large_body(rng: &mut Rng) -> String {
    let mut text = words(&mut Rng::with_seed(7), LARGE_BODY_BYTES / 2);
    text.push_str(&words(rng, LARGE_BODY_BYTES / 2));
    chat("", &text)
}

/// Needs no escapes in JSON.
fn words(rng: &mut Rng, bytes: usize) -> String {
    const WORDS: [&str; 16] = [
        "engine", "router", "prefix", "cache", "block", "token", "the", "of", "is", "sends",
        "holds", "each", "request", "answer", "worker", "and",
    ];
    let mut text = String::with_capacity(bytes + 16);
    while text.len() < bytes {
        text.push_str(WORDS[rng.usize(0..WORDS.len())]);
        text.push(' ');
        if rng.u8(0..8) == 0 {
            text.push_str(&rng.u32(0..100_000).to_string());
            text.push_str(". ");
        }
    }
    text
}

/// A chat with further members, each with its comma.
fn chat(members: &str, text: &str) -> String {
    format!(
        r#"{{"model":"mock",{members}"max_tokens":2,"messages":[{{"role":"user","content":"{text}"}}]}}"#
    )
}

/// A whole request with further header lines.
fn post(headers: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\n{headers}\
         content-length: {length}\r\n\r\n"
    );
    (head + body).into_bytes()
}
