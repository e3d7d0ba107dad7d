//! Real processes: mock engines and a router, each ended by pid when its handle goes.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep};

pub(crate) const BLOCK: u64 = 16;
const PATIENCE: Duration = Duration::from_secs(30);
const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/tiny");

/// A child process and what it said first: one JSON line with its addresses.
pub(crate) struct Process {
    child: Child,
    pub(crate) said: Value,
}

impl Process {
    fn start(program: &str, arguments: &[String]) -> Self {
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .env("WARMROUTE_LOG", "warn")
            .spawn()
            .unwrap_or_else(|error| panic!("{program}: {error}"));
        let stdout = child.stdout.take().expect("piped");
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        let said = serde_json::from_str(&line)
            .unwrap_or_else(|error| panic!("{program} said {line:?}: {error}"));
        Self { child, said }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it is our child");
        self.child.wait().expect("it was killed");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            self.kill();
        }
    }
}

/// How the mock engines of a fleet are set up.
pub(crate) struct Engines {
    pub(crate) count: usize,
    pub(crate) ranks: u16,
    pub(crate) blocks: u32,
    pub(crate) flags: &'static [&'static str],
}

pub(crate) struct Fleet {
    pub(crate) engines: Vec<Process>,
    pub(crate) router: Process,
    pub(crate) http: reqwest::Client,
}

impl Fleet {
    pub(crate) async fn start(engines: Engines, router_flags: &[&str]) -> Self {
        let mut started = Vec::new();
        let mut arguments: Vec<String> = ["--port", "0", "--admin-port", "0", "--tokenizer"]
            .map(str::to_owned)
            .to_vec();
        arguments.push(TOKENIZER.to_owned());
        arguments.extend(router_flags.iter().map(|&flag| flag.to_owned()));
        for index in 0..engines.count {
            let (engine, worker) = engine(index, &engines);
            arguments.extend(["--worker".to_owned(), worker]);
            started.push(engine);
        }
        let router = Process::start(
            env!("CARGO_BIN_EXE_warmroute-router-under-test"),
            &arguments,
        );
        let fleet = Self {
            engines: started,
            router,
            http: reqwest::Client::builder()
                .no_proxy()
                .build()
                .expect("a client"),
        };
        fleet
            .until("the router is ready", async |fleet| fleet.is_ready().await)
            .await;
        fleet
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.router.said["port"])
    }

    pub(crate) fn admin(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.router.said["admin_port"])
    }

    pub(crate) fn engine(&self, index: usize, path: &str) -> String {
        format!(
            "http://127.0.0.1:{}{path}",
            self.engines[index].said["port"]
        )
    }

    pub(crate) async fn get(&self, url: String) -> Value {
        let answer = self.http.get(&url).send().await.expect("an answer");
        answer
            .json()
            .await
            .unwrap_or_else(|error| panic!("{url}: {error}"))
    }

    async fn is_ready(&self) -> bool {
        match self.http.get(self.url("/readyz")).send().await {
            Ok(answer) => answer.status().is_success(),
            Err(_) => false,
        }
    }

    /// Waits for a condition that has to come true by itself.
    pub(crate) async fn until(&self, what: &str, condition: impl AsyncFn(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !condition(self).await {
            assert!(Instant::now() < deadline, "in vain: {what}");
            sleep(Duration::from_millis(2)).await;
        }
    }

    /// Waits until the index has applied every engine's last batch that changed a pair.
    pub(crate) async fn until_indexed(&self) {
        self.until("the index has caught up", async |fleet| {
            let indexed = fleet.indexed().await;
            for index in 0..fleet.engines.len() {
                let truth = fleet.get(fleet.engine(index, "/debug/blocks")).await;
                for rank in truth["ranks"].as_array().expect("ranks") {
                    let key = (
                        worker_name(index),
                        rank["dp_rank"].as_u64().expect("a rank"),
                    );
                    let wanted = rank["published_seq_that_changed"].as_u64();
                    let Some((state, seq)) = indexed.get(&key) else {
                        return false;
                    };
                    if state != "exact" || *seq < wanted {
                        return false;
                    }
                }
            }
            true
        })
        .await;
    }

    /// State and engine sequence of every source.
    async fn indexed(&self) -> BTreeMap<(String, u64), (String, Option<u64>)> {
        let digest = self.get(self.admin("/v1/digest")).await;
        let sources = digest["sources"].as_array().expect("sources");
        sources
            .iter()
            .map(|source| {
                let key = (
                    text(&source["worker"]),
                    source["dp_rank"].as_u64().expect("a rank"),
                );
                (key, (text(&source["state"]), source["engine_seq"].as_u64()))
            })
            .collect()
    }

    /// (active requests, prefill tokens, decode blocks) summed over all sources.
    pub(crate) async fn load(&self) -> (u64, u64, u64) {
        let slots = self.get(self.admin("/v1/slots")).await;
        let sum = |key: &str| {
            let sources = slots["sources"].as_array().expect("sources");
            sources
                .iter()
                .map(|source| source[key].as_u64().expect("a count"))
                .sum()
        };
        (
            sum("active_requests"),
            sum("prefill_tokens"),
            sum("decode_blocks"),
        )
    }

    pub(crate) async fn until_idle(&self) {
        self.until("no slot is left", async |fleet| {
            fleet.load().await == (0, 0, 0)
        })
        .await;
    }

    /// What the engines truly hold, as text, by source.
    pub(crate) async fn truth(&self) -> BTreeMap<(String, u64), BTreeSet<(String, String)>> {
        let mut held = BTreeMap::new();
        for index in 0..self.engines.len() {
            let truth = self.get(self.engine(index, "/debug/blocks")).await;
            for rank in truth["ranks"].as_array().expect("ranks") {
                let blocks = rank["blocks"].as_array().expect("blocks").iter();
                let blocks =
                    blocks.map(|block| (text(&block["prefix_hash"]), text(&block["tier"])));
                let key = (
                    worker_name(index),
                    rank["dp_rank"].as_u64().expect("a rank"),
                );
                held.insert(key, blocks.collect());
            }
        }
        held
    }

    /// The sum of a counter over all engines and ranks.
    pub(crate) async fn counted(&self, counter: &str) -> u64 {
        let mut sum = 0;
        for index in 0..self.engines.len() {
            let counters = self.get(self.engine(index, "/debug/counters")).await;
            for rank in counters["ranks"].as_array().expect("ranks") {
                sum += rank[counter].as_u64().expect("a count");
            }
        }
        sum
    }

    /// One sample of the router's metrics, summed over its labels.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let answer = self
            .http
            .get(self.admin("/metrics"))
            .send()
            .await
            .expect("metrics");
        let page = answer.text().await.expect("text");
        page.lines()
            .filter(|line| line.starts_with(name) && !line.starts_with('#'))
            .filter(|line| matches!(line.as_bytes().get(name.len()), Some(b' ' | b'{')))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }
}

fn engine(index: usize, engines: &Engines) -> (Process, String) {
    let kv = free_ports(engines.ranks);
    let replay = free_ports(engines.ranks);
    let mut arguments: Vec<String> = ["--port", "0", "--model", "mock", "--tokenizer", TOKENIZER]
        .map(str::to_owned)
        .to_vec();
    let numbers = [
        ("--kv-port", u64::from(kv)),
        ("--replay-port", u64::from(replay)),
        ("--ranks", u64::from(engines.ranks)),
        ("--block-size", BLOCK),
        ("--num-blocks", u64::from(engines.blocks)),
    ];
    for (flag, number) in numbers {
        arguments.extend([flag.to_owned(), number.to_string()]);
    }
    arguments.extend(engines.flags.iter().map(|&flag| flag.to_owned()));
    let engine = Process::start(env!("CARGO_BIN_EXE_warmroute-mock-engine"), &arguments);
    let worker = format!(
        "http://127.0.0.1:{},kv=tcp://127.0.0.1:{kv},replay=tcp://127.0.0.1:{replay},id={},ranks={}",
        engine.said["port"],
        worker_name(index),
        engines.ranks
    );
    (engine, worker)
}

fn worker_name(index: usize) -> String {
    format!("engine-{index}")
}

/// The first of so many free ports in a row: a rank's port is its base plus its number.
fn free_ports(count: u16) -> u16 {
    for _ in 0..100 {
        let first = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = first.local_addr().expect("bound").port();
        let others: Vec<_> = (1..count)
            .filter_map(|offset| TcpListener::bind(("127.0.0.1", port.checked_add(offset)?)).ok())
            .collect();
        if others.len() + 1 == usize::from(count) {
            return port;
        }
    }
    panic!("no {count} free ports in a row");
}

fn text(value: &Value) -> String {
    value
        .as_str()
        .unwrap_or_else(|| panic!("text, not {value}"))
        .to_owned()
}
