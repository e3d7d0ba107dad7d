//! TLS of a router's ports and towards engines, and engines' own keys.

#[path = "../../../proto/process/src/tls/tests/certificates.rs"]
mod certificates;
mod clients;
mod gate;
mod kept;
mod shim;

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::join_all;
use reqwest::StatusCode;
use serde_json::{Value, json};
use warmroute_process::tls::EngineTls;

use crate::fleet::{Engines, Flags, Fleet, Mode, Process, ROUTER, TOKENIZER, free_port};
use certificates::Authority;
use gate::TlsGate;

const ENGINES: Engines = Engines {
    count: 1,
    ranks: 1,
    blocks: 400,
    flags: &["--itl-ms", "10", "--prefill-tokens-per-sec", "200000"],
};

const SECRET: &str = "sk-of-the-engine";

/// A router beside the one of a fleet, with settings in a folder of its own.
struct Router {
    process: Process,
    dir: PathBuf,
    client: reqwest::Client,
    scheme: &'static str,
}

impl Router {
    /// `dir`: has the settings. `ca`: its ports have certificates of this authority.
    async fn start(dir: PathBuf, ca: Option<PathBuf>, workers: &[String]) -> Self {
        let config = dir.join("router.toml").to_str().unwrap().to_owned();
        let ports = [free_port().to_string(), free_port().to_string()];
        let [public, admin] = &ports;
        let mut arguments = vec!["--config", &config, "--tokenizer", TOKENIZER];
        arguments.extend([
            "--host",
            "127.0.0.1",
            "--port",
            public,
            "--admin-port",
            admin,
        ]);
        arguments.extend(workers.iter().flat_map(|worker| ["--worker", worker]));
        let arguments = arguments.into_iter().map(str::to_owned).collect();
        let tls = EngineTls::of_file(ca.as_deref()).unwrap();
        Self {
            process: Process::start(ROUTER, &dir.join("router.log"), arguments).await,
            dir,
            // Each request is a handshake.
            client: tls.client().pool_max_idle_per_host(0).build().unwrap(),
            scheme: ca.map_or("http", |_| "https"),
        }
    }

    fn url(&self, path: &str) -> String {
        let port = &self.process.said["port"];
        format!("{}://127.0.0.1:{port}{path}", self.scheme)
    }

    async fn admin(&self, path: &str) -> String {
        let port = &self.process.said["admin_port"];
        let url = format!("{}://127.0.0.1:{port}{path}", self.scheme);
        let answer = self.client.get(url).send().await.unwrap();
        answer.text().await.unwrap()
    }

    /// Its one worker.
    async fn worker(&self) -> Value {
        let page: Value = serde_json::from_str(&self.admin("/workers").await).unwrap();
        page["workers"][0].clone()
    }

    /// The value of a series; 0 if there is none.
    async fn metric(&self, series: &str) -> f64 {
        let page = self.admin("/metrics").await;
        let name = format!("warmroute_router_{series} ");
        let value = page.lines().find_map(|line| line.strip_prefix(&name));
        value.map_or(0.0, |value| value.parse().unwrap())
    }

    async fn ask(&self, body: &Value) -> reqwest::Response {
        let url = self.url("/v1/completions");
        let asked = self.client.post(url).bearer_auth("of-the-client");
        asked.json(body).send().await.unwrap()
    }
}

/// A folder of the fleet's.
fn folder(fleet: &Fleet, name: &str) -> PathBuf {
    let dir = fleet.file(name);
    fs::create_dir_all(&dir).unwrap();
    dir
}

fn prompt(max_tokens: u32) -> Value {
    let tokens: Vec<usize> = (0..200).map(|at| 300 + at).collect();
    json!({"model": "mock", "prompt": tokens, "max_tokens": max_tokens, "stream": true})
}

/// The worker as a flag, at another URL.
fn flag(fleet: &Fleet, url: &str, more: &str) -> String {
    let spec = fleet.worker_spec(0);
    let parts = ["kv", "replay"].map(|key| format!(",{key}={}", spec[key].as_str().unwrap()));
    format!("{url}{},id=w{more}", parts.concat())
}

/// A router whose ports have certificates, with a healthy worker.
async fn router_with_tls(fleet: &Fleet, name: &str) -> (Router, Authority) {
    let (dir, authority) = (folder(fleet, name), Authority::new());
    let ca = authority.write(&dir, "ca.crt");
    authority.issue_until(2040).write(&dir, "server");
    let pair = "certificate = \"server.crt\"\nkey = \"server.key\"\n";
    let settings = format!("access_log = \"access.log\"\n[tls]\n{pair}[admin.tls]\n{pair}");
    let settings = settings.replace("access.log", dir.join("access.log").to_str().unwrap());
    fs::write(dir.join("router.toml"), settings).unwrap();
    let engine = fleet.engine(0, "");
    let router = Router::start(dir, Some(ca), &[flag(fleet, &engine, "")]).await;
    let is_healthy = async |_: &Fleet| router.worker().await["health"] == "healthy";
    fleet.until("the worker is healthy", is_healthy).await;
    (router, authority)
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_replaced_under_load_without_a_failed_request() {
    let fleet = Fleet::start(Mode::Embedded, ENGINES, Flags::default()).await;
    let (router, authority) = router_with_tls(&fleet, "tls").await;

    let stop = AtomicBool::new(false);
    let load = async || {
        let mut served = 0;
        while !stop.load(Ordering::Relaxed) {
            let answer = router.ask(&prompt(2)).await;
            assert_eq!(answer.status(), StatusCode::OK);
            let text = answer.text().await.unwrap();
            assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
            served += 1;
        }
        served
    };
    let expiry = "tls_certificate_expiry_timestamp_seconds{port=\"public\"}";
    let refused = "settings_reloads_total{outcome=\"refused\"}";
    let changes = async {
        let mut before = router.metric(expiry).await;
        for (round, year) in [2041, 2042, 2043].into_iter().enumerate() {
            // Another's key: the old pair stays.
            let refusals = router.metric(refused).await;
            let pair = authority.issue_until(year);
            fs::write(router.dir.join("server.crt"), &pair.certificate).unwrap();
            let is_refused = async |_: &Fleet| router.metric(refused).await > refusals;
            fleet.until("the bad pair is refused", is_refused).await;
            assert_eq!(router.metric(expiry).await.to_bits(), before.to_bits());
            fs::write(router.dir.join("server.key"), &pair.key).unwrap();
            if round == 0 {
                router.process.signal("HUP");
            }
            let is_new = async |_: &Fleet| router.metric(expiry).await > before;
            fleet.until("the new certificate is served", is_new).await;
            before = router.metric(expiry).await;
        }
        stop.store(true, Ordering::Relaxed);
    };
    let (served, ()) = tokio::join!(join_all((0..4).map(|_| load())), changes);
    println!("{served:?} requests during six changes, none failed");
    assert!(served.iter().all(|&served| served > 0));

    // An open stream ends before the process does.
    let mut answer = router.ask(&prompt(60)).await;
    let mut text = answer.chunk().await.unwrap().unwrap().to_vec();
    router.process.signal("TERM");
    while let Some(chunk) = answer.chunk().await.unwrap() {
        text.extend_from_slice(&chunk);
    }
    assert!(text.ends_with(b"data: [DONE]\n\n"));
    assert!(router.process.ended().await.success());
    let log = fs::read_to_string(router.dir.join("access.log")).unwrap();
    let lines = log
        .lines()
        .filter(|line| line.contains("\"route\":\"completions\""));
    assert_eq!(lines.count(), served.iter().sum::<usize>() + 1);
}

/// The ways to give a router the key of an engine.
#[derive(Clone, Copy, Debug)]
enum KeyWay {
    File,
    Api,
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_with_an_own_authority_and_key_is_credited() {
    let fleet = Fleet::start(Mode::Embedded, ENGINES, Flags::default()).await;
    for way in [KeyWay::File, KeyWay::Api] {
        serve_behind_tls(&fleet, way).await;
    }
}

async fn serve_behind_tls(fleet: &Fleet, way: KeyWay) {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let dir = folder(fleet, &format!("{way:?}"));
    authority.write(&dir, "ca.crt");
    let gate = TlsGate::start(&authority.issue(), &dir, &fleet.engine(0, "")).await;
    fs::write(dir.join("key"), SECRET).unwrap();
    let settings = "[engines]\nca = \"ca.crt\"\n[admin]\nexplain_headers = \"all\"\n";
    fs::write(dir.join("router.toml"), settings).unwrap();
    let key_file = format!(",key_file={}", dir.join("key").display());
    let workers = match way {
        KeyWay::File => vec![flag(fleet, &gate.url(), &key_file)],
        KeyWay::Api => Vec::new(),
    };
    let router = Router::start(dir, None, &workers).await;
    if matches!(way, KeyWay::Api) {
        add_by_api(fleet, &router, &gate.url()).await;
    }
    let is_healthy = async |_: &Fleet| router.worker().await["health"] == "healthy";
    fleet.until("the worker is healthy", is_healthy).await;
    let is_credited = async |_: &Fleet| {
        let answer = router.ask(&prompt(2)).await;
        let overlap = answer.headers().get("x-warmroute-overlap-blocks").cloned();
        answer.text().await.unwrap();
        overlap.is_some_and(|overlap| overlap != "0")
    };
    fleet.until("the prompt is credited", is_credited).await;
    let is_checked =
        async |_: &Fleet| router.worker().await["checks"]["text"]["result"] == "passed";
    fleet.until("its tokens are compared", is_checked).await;

    let sent = gate.requests();
    assert!(
        sent.iter()
            .any(|head| head.starts_with("POST /v1/completions"))
    );
    for path in [
        "GET /health",
        "GET /metrics",
        "GET /v1/models",
        "POST /tokenize",
    ] {
        assert!(sent.iter().any(|head| head.starts_with(path)), "{path}");
    }
    let expected = format!("authorization: bearer {SECRET}");
    for head in &sent {
        assert!(head.to_lowercase().contains(&expected), "{head}");
        assert!(!head.contains("of-the-client"), "{head}");
    }
    for page in ["/workers", "/workers/w", "/metrics", "/v1/digest"] {
        assert!(!router.admin(page).await.contains(SECRET), "{page}");
    }
    let log = fs::read_to_string(router.dir.join("router.log")).unwrap();
    assert!(!log.contains(SECRET));
    stale_connections(&router, &gate).await;
    authority_changes(fleet, &router, &gate, &stranger).await;
    authority.write(&router.dir, "ca.crt");
    fleet.until("the worker is healthy again", is_healthy).await;
    assert_eq!(router.worker().await["tls_error"], Value::Null);
}

/// An engine that closes a connection when it is used again fails no request.
async fn stale_connections(router: &Router, gate: &TlsGate) {
    gate.close_at_reuse();
    for number in 0..8 {
        let answer = router.ask(&prompt(2)).await;
        assert_eq!(answer.status(), StatusCode::OK, "request {number}");
        answer.bytes().await.unwrap();
    }
    let retries = "retries_total{reason=\"stale_connection\"}";
    assert!(router.metric(retries).await >= 1.0);
    assert_eq!(router.metric("retries_total{reason=\"broken\"}").await, 0.0);
}

/// Another authority takes effect without a restart.
async fn authority_changes(fleet: &Fleet, router: &Router, gate: &TlsGate, other: &Authority) {
    let loads = "settings_reloads_total{outcome=\"loaded\"}";
    let before = router.metric(loads).await;
    other.write(&router.dir, "ca.crt");
    let is_loaded = async |_: &Fleet| router.metric(loads).await > before;
    fleet.until("the authority is loaded", is_loaded).await;
    gate.cut();
    let is_refused = async |_: &Fleet| {
        let worker = router.worker().await;
        let why = worker["tls_error"].as_str().unwrap_or_default().to_owned();
        worker["health"] == "unhealthy" && why.contains("UnknownIssuer")
    };
    fleet
        .until("the certificate is not trusted", is_refused)
        .await;
    let answer = router.ask(&prompt(2)).await;
    assert!(answer.status().is_server_error());
}

async fn add_by_api(fleet: &Fleet, router: &Router, url: &str) {
    let port = &router.process.said["admin_port"];
    let mut spec = fleet.worker_spec(0);
    spec["id"] = json!("w");
    spec["url"] = json!(url);
    for (name, value, expected) in [
        (
            "key_file",
            "/etc/hostname",
            StatusCode::UNPROCESSABLE_ENTITY,
        ),
        (
            "url",
            "unix:/run/engine.sock",
            StatusCode::UNPROCESSABLE_ENTITY,
        ),
        ("key", "two\nlines", StatusCode::UNPROCESSABLE_ENTITY),
        ("key", SECRET, StatusCode::CREATED),
    ] {
        let mut spec = spec.clone();
        spec[name] = json!(value);
        let asked = router
            .client
            .post(format!("http://127.0.0.1:{port}/workers"));
        let asked = asked.header("x-warmroute-admin", "1").json(&spec);
        let answer = asked.send().await.unwrap();
        assert_eq!(answer.status(), expected, "{name}");
        assert!(!answer.text().await.unwrap().contains(SECRET));
    }
}
