use std::fs;
use std::path::PathBuf;

use axum::Router;
use axum::routing::{MethodRouter, get, post};
use clap::Parser as _;
use reqwest::{Client, Method};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::sleep;
use warmroute_process::access::keys;

use super::*;
use crate::config::RouterArgs;

/// A router on loopback with settings.
struct Served {
    running: Running,
    settings: PathBuf,
    client: Client,
}

impl Served {
    async fn start(settings: &str) -> Self {
        Self::with_args(settings, &[]).await
    }

    async fn with_args(settings: &str, more: &[&str]) -> Self {
        Self::beside(&Handle::current(), settings, more).await
    }

    async fn beside(background: &Handle, settings: &str, more: &[&str]) -> Self {
        let path = std::env::temp_dir().join(format!("wr-run-{}.toml", Uuid::new_v4()));
        fs::write(&path, settings).unwrap();
        let file = path.to_str().unwrap();
        let ports = ["--host=127.0.0.1", "--port=0", "--admin-port=0"];
        let args = ["warmroute-router", "--config", file];
        let args = RouterArgs::try_parse_from(args.iter().chain(&ports).chain(more)).unwrap();
        let config = Config::try_from(args).unwrap();
        Self {
            running: Box::pin(Running::start(config, background)).await.unwrap(),
            settings: path,
            client: crate::testing::http_client(),
        }
    }

    async fn admin(&self, method: Method, path: &str, key: Option<&str>) -> u16 {
        // A parameter of a path stands for itself.
        let url = format!("http://{}{path}", self.running.addresses.admin);
        let mut request = self.client.request(method, url);
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        request.send().await.unwrap().status().as_u16()
    }

    async fn stop(self) {
        let never = std::future::pending();
        self.running.stop(Leave::Immediate, never).await.unwrap();
        fs::remove_file(self.settings).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_admin_route_needs_its_key_until_the_key_is_revoked() {
    let (operate, operate_hash) = keys::generate().unwrap();
    let (read, read_hash) = keys::generate().unwrap();
    let row = |id: &str, hash: String, role: &str| {
        format!("{{ id = \"{id}\", sha256 = \"{hash}\", role = \"{role}\" }}")
    };
    let reader = row("r", read_hash.to_hex(), "read");
    let operator = row("o", operate_hash.to_hex(), "operate");
    let served = Served::start(&format!("[admin]\nkeys = [{reader}, {operator}]\n")).await;
    let routes = served.running.admin_routes.clone();
    assert!(routes.len() > 15, "{routes:?}");
    for (path, access) in routes {
        let open = access == RouteAccess::Open;
        let is_probe = warmroute_process::server::is_probe(path);
        let expected_open = path == "/metrics" || is_probe || live_page::is_file(path);
        assert_eq!(
            open, expected_open,
            "{path}: an open route shows nothing to protect"
        );
        for method in [Method::GET, Method::POST, Method::DELETE] {
            let is_change = access == RouteAccess::ByMethod && method != Method::GET;
            let status = served.admin(method.clone(), path, None).await;
            assert_eq!(status == 401, !open, "{method} {path}: {status}");
            let status = served.admin(method.clone(), path, Some("wr-other")).await;
            assert_eq!(status == 401, !open, "{method} {path}: {status}");
            let status = served.admin(method.clone(), path, Some(&read)).await;
            assert_eq!(status == 403, is_change, "{method} {path}: {status}");
            let status = served.admin(method.clone(), path, Some(&operate)).await;
            assert!(![401, 403].contains(&status), "{method} {path}: {status}");
        }
    }
    // A bad file keeps the keys, a good one takes effect at the next look at it.
    fs::write(&served.settings, "[admin]\nkeys = [{}]\n").unwrap();
    sleep(Duration::from_secs(3)).await;
    let workers = async |key| served.admin(Method::GET, "/workers", Some(key)).await;
    assert_eq!(workers(&operate).await, 200);
    fs::write(&served.settings, format!("[admin]\nkeys = [{reader}]\n")).unwrap();
    while workers(&operate).await != 401 {
        sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(workers(&read).await, 200);
    served.stop().await;
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}

/// An engine whose answers never begin.
async fn silent_engine() -> String {
    let silence = || async { std::future::pending::<()>().await };
    engine(post(silence)).await
}

async fn engine(completions: MethodRouter) -> String {
    let models = || async { axum::Json(json!({"data": [{"id": "m"}]})) };
    let routes = Router::new()
        .route("/health", get(|| async {}))
        .route("/v1/models", get(models))
        .route("/v1/completions", completions);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(TaskTracker::new().spawn(async move { axum::serve(listener, routes).await }));
    url
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_wait_at_the_end_of_the_drain_get_an_answer() {
    let engine = silent_engine().await;
    let args = [
        "--worker",
        &engine,
        "--max-active-requests=1",
        "--policy=round-robin",
    ];
    let served = Served::with_args("drain_timeout_secs = 3\n", &args).await;
    let app = Arc::clone(&served.running.app);
    while app.core.core().free_places("m", now()).is_none() || app.ready.missing().is_some() {
        sleep(Duration::from_millis(20)).await;
    }
    let url = format!("http://{}/v1/completions", served.running.addresses.public);
    let send = || {
        let request = served
            .client
            .post(&url)
            .json(&json!({"model": "m", "prompt": [1]}));
        TaskTracker::new().spawn(request.send())
    };
    let first = send();
    while app.core.core().free_places("m", now()) != Some(Vec::new()) {
        sleep(Duration::from_millis(20)).await;
    }
    let second = send();
    while app.admission.size().requests != 1 {
        sleep(Duration::from_millis(20)).await;
    }
    let never = std::future::pending();
    served.running.stop(Leave::Noticed, never).await.unwrap();
    assert!(first.await.unwrap().is_err(), "an engine's answer is cut");
    let answer = second.await.unwrap().unwrap();
    assert_eq!(answer.status(), 503);
    assert_eq!(answer.headers()["retry-after"], "1");
    let error = answer.json::<Value>().await.unwrap();
    assert_eq!(error["error"]["code"], "router_ends");
    fs::remove_file(served.settings).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_served_while_the_background_is_blocked() {
    let background = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let engine = engine(post(|| async { axum::Json(json!({"choices": []})) })).await;
    let served = Served::beside(background.handle(), "", &["--worker", &engine]).await;
    let url = format!("http://{}/v1/completions", served.running.addresses.public);
    let status = async || {
        let body = json!({"model": "m", "prompt": [1]});
        let answer = served.client.post(&url).json(&body).send().await.unwrap();
        answer.status()
    };
    while status().await != 200 {
        sleep(Duration::from_millis(20)).await;
    }
    let (unblock, blocked) = std::sync::mpsc::channel::<()>();
    let blocking = background.spawn(async move { blocked.recv() });
    for _ in 0..8 {
        let answered = timeout(Duration::from_secs(30), status()).await;
        assert_eq!(answered.unwrap(), 200);
    }
    assert!(!blocking.is_finished());
    unblock.send(()).unwrap();
    served.stop().await;
    background.shutdown_background();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_whose_load_cannot_be_read_is_shown_with_the_reason() {
    let engine = silent_engine().await;
    let on = "[engines]\nload = true\n";
    let served = Served::with_args(on, &["--worker", &engine]).await;
    let shown = async || {
        let url = format!("http://{}/workers", served.running.addresses.admin);
        let page: Value = served
            .client
            .get(url)
            .send()
            .await
            .unwrap()
            .json()
            .await
            .unwrap();
        page["workers"][0].clone()
    };
    while shown().await["load_error"] != "status 404 Not Found" {
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(shown().await["engine_load"], json!({}));
    assert_eq!(shown().await["health"], "healthy");
    fs::write(&served.settings, on.replace("true", "false")).unwrap();
    while shown().await["load_error"] != Value::Null {
        sleep(Duration::from_millis(20)).await;
    }
    served.stop().await;
}

/// As on a machine of four processors and more, where connections have threads of their own.
#[tokio::test(flavor = "multi_thread")]
async fn requests_on_several_threads_are_all_served_and_counted() {
    let events = || async {
        let event = |number: usize| format!("data: {{\"choices\":[{{\"index\":{number}}}]}}\n\n");
        (0..20).map(event).collect::<String>() + "data: [DONE]\n\n"
    };
    let engine = engine(post(events)).await;
    let served = Served::with_args("request_threads = 3\n", &["--worker", &engine]).await;
    let url = format!("http://{}/v1/completions", served.running.addresses.public);
    let body = json!({"model": "m", "prompt": [1], "stream": true});
    let client = || async {
        // Connections of its own.
        let client = crate::testing::http_client();
        let mut statuses = Vec::new();
        for _ in 0..20 {
            let answer = client.post(&url).json(&body).send().await.unwrap();
            let status = answer.status();
            let text = answer.text().await.unwrap();
            statuses.push((status.as_u16(), text.matches("data: ").count()));
        }
        statuses
    };
    while client().await.iter().any(|status| *status != (200, 21)) {}
    let all = futures_util::future::join_all((0..12).map(|_| client())).await;
    assert!(
        all.iter().flatten().all(|status| *status == (200, 21)),
        "{all:?}"
    );
    while !served.running.app.core.core().own_slots().is_empty() {
        sleep(Duration::from_millis(20)).await;
    }
    served.stop().await;
}
