//! An engine that listens at a Unix socket, as vLLM does with `--uds`.

use std::path::Path;

use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpStream, UnixListener};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::fleet::{Engines, Flags, Fleet, Mode, Process, ROUTER, TOKENIZER, free_port};

const ENGINES: Engines = Engines {
    count: 1,
    ranks: 1,
    blocks: 400,
    flags: &["--prefill-tokens-per-sec", "200000"],
};

/// Passes a socket's connections to an engine, until dropped.
fn pass_to(engine: String, path: &Path) -> AbortOnDropHandle<()> {
    let listener = UnixListener::bind(path).unwrap();
    let passing = async move {
        let connections = TaskTracker::new();
        while let Ok((mut from, _)) = listener.accept().await {
            let engine = engine.clone();
            drop(connections.spawn(async move {
                let mut to = TcpStream::connect(engine).await.unwrap();
                copy_bidirectional(&mut from, &mut to).await.ok()
            }));
        }
    };
    AbortOnDropHandle::new(TaskTracker::new().spawn(passing))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_at_a_unix_socket_is_probed_compared_and_credited() {
    let fleet = Fleet::start(Mode::Embedded, ENGINES, Flags::default()).await;
    let socket = fleet.file("engine.sock");
    let engine = fleet.engine(0, "");
    let _passing = pass_to(engine.trim_start_matches("http://").to_owned(), &socket);
    let spec = fleet.worker_spec(0);
    let events = ["kv", "replay"].map(|key| format!(",{key}={}", spec[key].as_str().unwrap()));
    let worker = format!("unix:{}{},id=w", socket.display(), events.concat());
    let ports = [free_port().to_string(), free_port().to_string()];
    let [public, admin] = &ports;
    let arguments = [
        "--tokenizer",
        TOKENIZER,
        "--host",
        "127.0.0.1",
        "--port",
        public,
    ];
    let further = ["--admin-port", admin, "--worker", &worker];
    let arguments = arguments.into_iter().chain(further).map(str::to_owned);
    let log = fleet.file("router.log");
    let router = Process::start(ROUTER, &log, arguments.collect()).await;

    let page = format!("http://127.0.0.1:{}/workers", router.said["admin_port"]);
    let is_checked = async |fleet: &Fleet| {
        let page: Value = fleet.get(page.clone()).await;
        let worker = &page["workers"][0];
        worker["health"] == "healthy" && worker["checks"]["text"]["result"] == "passed"
    };
    fleet.until("its tokens are compared", is_checked).await;
    let tokens: Vec<usize> = (300..500).collect();
    let body = json!({"model": "mock", "prompt": tokens, "max_tokens": 2, "stream": true});
    let url = format!("http://127.0.0.1:{}/v1/completions", router.said["port"]);
    let is_credited = async |fleet: &Fleet| {
        let answer = fleet.http.post(&url).json(&body).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        assert!(answer.text().await.unwrap().ends_with("data: [DONE]\n\n"));
        let decisions = format!("http://127.0.0.1:{}/metrics", router.said["admin_port"]);
        let series = "warmroute_router_ladder_total{step=\"index\"}";
        let page = fleet.http.get(decisions).send().await.unwrap();
        let page = page.text().await.unwrap();
        let value = page.lines().find_map(|line| line.strip_prefix(series));
        value.is_some_and(|value| value.trim() != "0")
    };
    fleet.until("the prompt is credited", is_credited).await;
}
