//! Engines of one's own, which publish by the library: its examples in C and Python, as processes.
//! An embedded router credits what they hold, also after it was killed.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tokio::time::{Duration, sleep, timeout};

use crate::fleet::traffic::{Served, read};
use crate::fleet::{Place, Process, ROUTER, client, free_port, strings};

const LIBRARY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../publisher-shim/publisher");
/// Tokens in a block of the examples.
const BLOCK: u32 = 16;
const PATIENCE: Duration = Duration::from_secs(60);

struct OwnEngine {
    router: Process,
    engine: Process,
    http: reqwest::Client,
    _place: Place,
}

/// Where cargo leaves the library of this build.
fn built() -> PathBuf {
    Path::new(ROUTER).parent().unwrap().join("deps")
}

/// `env` becomes the process, so that the test can kill it.
fn command(variables: &[(&str, String)], command: &[&str]) -> Vec<String> {
    let variables = variables
        .iter()
        .map(|(name, value)| format!("{name}={value}"));
    variables.chain(strings(command)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_in_python_is_credited() {
    let library = built().join("libwarmroute_publisher.so");
    let variables = [
        ("PYTHONPATH", format!("{LIBRARY}/python")),
        ("LIBWARMROUTE_PUBLISHER", library.display().to_string()),
    ];
    let script = format!("{LIBRARY}/examples/engine.py");
    let engine = command(&variables, &["python3", "-B", &script]);
    OwnEngine::start(Place::new(), engine)
        .await
        .is_credited()
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_in_c_is_credited() {
    let place = Place::new();
    let (program, built) = (place.path("engine"), built());
    let compiled = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-I"])
        .arg(format!("{LIBRARY}/include"))
        .arg(format!("{LIBRARY}/examples/engine.c"))
        .arg("-L")
        .arg(&built)
        .args(["-lwarmroute_publisher", "-o"])
        .arg(&program)
        .status();
    assert!(compiled.expect("cc").success());
    let variables = [("LD_LIBRARY_PATH", built.display().to_string())];
    let engine = command(&variables, &[program.to_str().unwrap()]);
    OwnEngine::start(place, engine).await.is_credited().await;
}

impl OwnEngine {
    /// An engine whose command gets its ports, and a router before it.
    async fn start(place: Place, mut engine: Vec<String>) -> Self {
        let ports = [free_port(), free_port(), free_port()];
        engine.extend(ports.map(|port| port.to_string()));
        let engine = Process::start("/usr/bin/env", &place.path("engine.log"), engine).await;
        let [_, kv, replay] = ports.map(|port| format!("tcp://127.0.0.1:{port}"));
        let worker = format!(
            "{},kv={kv},replay={replay},id=own,assume=plain-lookup",
            engine.base()
        );
        let (public, admin) = (free_port().to_string(), free_port().to_string());
        let router = strings(&[
            "--host=127.0.0.1",
            "--port",
            &public,
            "--admin-port",
            &admin,
            "--worker",
            &worker,
        ]);
        Self {
            router: Process::start(ROUTER, &place.path("router.log"), router).await,
            engine,
            http: client().build().unwrap(),
            _place: place,
        }
    }

    /// Stores, evictions, a router that is killed, and a reset.
    async fn is_credited(&self) {
        let (first, second, third) = (prompt(1, 5), prompt(2, 40), prompt(3, 40));
        self.until("the router is ready", async |own| own.is_ready().await)
            .await;
        assert_eq!(self.ask(&first).await.cached_tokens, 0);
        self.until_at(4).await;
        self.until_credited(&first, 5).await;

        // 64 blocks are held: the first prompt's and some of the second's go.
        for prompt in [&second, &third] {
            assert_eq!(self.ask(prompt).await.cached_tokens, 0);
        }
        self.until_at(105).await;
        let evicted = self.ask(&first).await;
        assert_eq!((evicted.overlap_blocks, evicted.cached_tokens), (0, 0));
        self.until_at(115).await;
        self.until_credited(&third, 40).await;

        self.router.kill();
        self.router.restart().await;
        self.until_at(115).await;
        self.until_credited(&third, 40).await;
        self.until_credited(&first, 5).await;

        let reset = self.http.post(format!("{}/reset", self.engine.base()));
        assert!(reset.send().await.unwrap().status().is_success());
        self.until_at(116).await;
        let empty = self.ask(&third).await;
        assert_eq!((empty.overlap_blocks, empty.cached_tokens), (0, 0));
    }

    async fn ask(&self, prompt: &[u32]) -> Served {
        let url = format!("{}/v1/completions", self.router.base());
        let body = json!({"model": "own", "prompt": prompt, "max_tokens": 1});
        read(self.http.post(url).json(&body).send().await.unwrap()).await
    }

    /// Asks for a prompt that is held, which changes nothing, until the index answers.
    async fn until_credited(&self, prompt: &[u32], blocks: u64) {
        let is_credited = async |own: &Self| {
            let served = own.ask(prompt).await;
            assert_eq!(served.cached_tokens, blocks * u64::from(BLOCK));
            served.overlap_blocks == blocks && served.state == "exact"
        };
        self.until("all blocks that are held are credited", is_credited)
            .await;
    }

    /// Waits until the index is exact at a batch.
    async fn until_at(&self, seq: u64) {
        let is_at = async |own: &Self| {
            let digest = own.get("/v1/digest").await;
            let source = &digest["sources"][0];
            source["state"] == "exact" && source["engine_seq"] == seq
        };
        self.until("the index is at the engine's last batch", is_at)
            .await;
    }

    async fn is_ready(&self) -> bool {
        let workers = self.get("/workers").await;
        workers["workers"][0]["health"] == "healthy" && workers["workers"][0]["models"][0] == "own"
    }

    async fn get(&self, path: &str) -> Value {
        let url = format!("http://127.0.0.1:{}{path}", self.router.said["admin_port"]);
        match self.http.get(url).send().await {
            Ok(answer) => answer.json().await.unwrap_or_default(),
            Err(_) => Value::Null,
        }
    }

    async fn until(&self, what: &str, condition: impl AsyncFn(&Self) -> bool) {
        let holds = async {
            while !condition(self).await {
                sleep(Duration::from_millis(10)).await;
            }
        };
        assert!(timeout(PATIENCE, holds).await.is_ok(), "in vain: {what}");
    }
}

/// Blocks of one topic and a token more, so that all of them can be read from a cache.
fn prompt(topic: u32, blocks: u32) -> Vec<u32> {
    (0..=blocks * BLOCK).map(|at| topic * 10_000 + at).collect()
}
