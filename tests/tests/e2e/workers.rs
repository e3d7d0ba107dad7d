//! Workers of an embedded router come and go by API and file, and end by the manifests' hook;
//! SIGHUP ends no process.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fastrand::Rng;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use warmroute_process::access::keys;

use crate::fleet::traffic::{request, send, serve};
use crate::fleet::{Engines, Flags, Fleet, Mode, Place, worker_name};
use crate::prometheus::deploy;

const ENGINES: Engines = Engines {
    count: 2,
    ranks: 1,
    blocks: 400,
    flags: &["--itl-ms", "10", "--prefill-tokens-per-sec", "200000"],
};

async fn call(fleet: &Fleet, method: Method, path: &str, body: Value) -> (StatusCode, Value) {
    let asked = fleet.http.request(method, fleet.admin(0, path));
    let asked = asked.header("x-warmroute-admin", "1").json(&body);
    let answer = asked.send().await.unwrap();
    (answer.status(), answer.json().await.unwrap_or_default())
}

async fn until_serving(fleet: &Fleet, workers: &[usize]) {
    let expected: BTreeSet<String> = workers.iter().map(|&index| worker_name(index)).collect();
    let serve_all = async |fleet: &Fleet| {
        let shown = fleet.get(fleet.admin(0, "/workers")).await;
        let shown = shown["workers"].as_array().unwrap().iter();
        let healthy = shown.filter(|worker| worker["health"] == "healthy");
        let names = healthy.map(|worker| worker["worker"].as_str().unwrap().to_owned());
        names.collect::<BTreeSet<_>>() == expected
    };
    fleet.until("exactly these workers serve", serve_all).await;
}

/// Series that name the worker, those of the router's indexer and shims included.
async fn series(fleet: &Fleet, worker: &str) -> usize {
    let answer = fleet.http.get(fleet.admin(0, "/metrics")).send().await;
    let page = answer.unwrap().text().await.unwrap();
    let label = format!("worker=\"{worker}\"");
    page.lines().filter(|line| line.contains(&label)).count()
}

/// Requests, one after the other, until stopped. All must succeed.
async fn steady_load(fleet: &Fleet, stop: Arc<AtomicBool>) -> u64 {
    let (mut rng, mut served) = (Rng::with_seed(5), 0);
    while !stop.load(Ordering::Relaxed) {
        let (path, body) = request(&mut rng);
        serve(fleet, path, &body).await;
        served += 1;
    }
    served
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_adds_and_removes_workers_under_load() {
    let mut fleet = Fleet::start(Mode::Embedded, ENGINES, Flags::default()).await;
    let added = fleet.add_engine(&ENGINES).await;
    let spec = fleet.worker_spec(added);
    let fleet = fleet;
    let stop = Arc::new(AtomicBool::new(false));
    let changes = async {
        let (status, shown) = call(&fleet, Method::POST, "/workers", spec.clone()).await;
        assert_eq!(status, StatusCode::CREATED, "{shown}");
        assert_eq!(shown["declared_by"], "api");
        let (status, _) = call(&fleet, Method::POST, "/workers", spec.clone()).await;
        assert_eq!(status, StatusCode::OK, "the same again");
        until_serving(&fleet, &[0, 1, 2]).await;
        fleet.until_indexed().await;

        // A stream is open there while the worker leaves.
        let long = json!({"model": "mock", "prompt": "Count.", "max_tokens": 60, "stream": true});
        let stream = loop {
            let answer = send(&fleet, "/v1/completions", &long).await;
            if answer.headers()["x-warmroute-worker"] == "worker-2" {
                break answer;
            }
        };
        let (removed, text) = tokio::join!(
            call(&fleet, Method::DELETE, "/workers/worker-2", Value::Null),
            stream.text()
        );
        assert_eq!(removed.0, StatusCode::OK, "{}", removed.1);
        assert_eq!(removed.1["requests"], 0, "{}", removed.1);
        assert!(
            text.unwrap().ends_with("data: [DONE]\n\n"),
            "what runs may finish"
        );
        until_serving(&fleet, &[0, 1]).await;
        let (status, _) = call(&fleet, Method::GET, "/workers/worker-2", Value::Null).await;
        assert_eq!(status, StatusCode::NOT_FOUND);
        let (status, _) = call(&fleet, Method::DELETE, "/workers/worker-2", Value::Null).await;
        assert_eq!(status, StatusCode::NOT_FOUND);

        // The name begins a new life, of another engine too.
        let mut moved = fleet.worker_spec(added);
        moved["ranks"] = json!(1);
        let (status, shown) = call(&fleet, Method::POST, "/workers", moved).await;
        assert_eq!(status, StatusCode::CREATED, "{shown}");
        until_serving(&fleet, &[0, 1, 2]).await;
        fleet.until_indexed().await;
        let (status, _) = call(&fleet, Method::DELETE, "/workers/worker-2", Value::Null).await;
        assert_eq!(status, StatusCode::OK);
        stop.store(true, Ordering::Relaxed);
    };
    let ((), served) = tokio::join!(changes, steady_load(&fleet, Arc::clone(&stop)));
    println!("{served} requests beside it");
    let gone = async |fleet: &Fleet| series(fleet, "worker-2").await == 0;
    fleet.until("its series are gone", gone).await;
    fleet.until_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_refuses_what_clashes_and_what_is_declared_elsewhere() {
    let fleet = Fleet::start(Mode::Embedded, ENGINES, Flags::default()).await;
    let spec = fleet.worker_spec(0);
    let url = spec["url"].clone();
    for (body, refusal) in [
        (json!({"url": "h:1"}), StatusCode::UNPROCESSABLE_ENTITY),
        (json!({"url": url, "id": "x"}), StatusCode::CONFLICT),
        (
            json!({"url": "http://127.0.0.1:9", "id": "worker-0"}),
            StatusCode::CONFLICT,
        ),
        (
            json!({"url": "http://127.0.0.1:9", "port": 1}),
            StatusCode::UNPROCESSABLE_ENTITY,
        ),
    ] {
        let (status, said) = call(&fleet, Method::POST, "/workers", body).await;
        assert_eq!(status, refusal, "{said}");
        assert!(said["error"].is_string(), "{said}");
    }
    let (status, said) = call(&fleet, Method::DELETE, "/workers/worker-0", Value::Null).await;
    assert_eq!(status, StatusCode::CONFLICT, "{said}");
    until_serving(&fleet, &[0, 1]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workers_file_is_followed() {
    let none = Engines {
        count: 0,
        ..ENGINES
    };
    let place = Place::new();
    let (config, file) = (place.path("router.toml"), place.path("workers.toml"));
    fs::write(
        &config,
        "workers_file = \"workers.toml\"\n[admin]\nexplain_headers = \"all\"\n",
    )
    .unwrap();
    fs::write(&file, "").unwrap();
    let flags: &'static [&'static str] = Vec::leak(vec![
        "--config",
        String::leak(config.to_str().unwrap().to_owned()),
        "--state-dir",
        "PLACE/state",
    ]);
    let flags = Flags {
        router: flags,
        ..Flags::default()
    };
    let mut fleet = Fleet::start(Mode::Embedded, none, flags).await;
    for _ in 0..2 {
        fleet.add_engine(&ENGINES).await;
    }
    let declare = |workers: &[usize]| {
        let table = |&index: &usize| {
            let spec = fleet.worker_spec(index);
            let keys = ["url", "kv", "replay", "id"];
            let lines = keys.map(|key| format!("{key} = {}\n", spec[key]));
            format!("[[workers]]\n{}", lines.concat())
        };
        let text: String = workers.iter().map(table).collect();
        fs::write(&file, text).unwrap();
    };
    declare(&[0]);
    fleet.routers[0].signal("HUP");
    until_serving(&fleet, &[0]).await;
    // A worker that cannot be started is tried again.
    let state = fleet.file("state/worker-1");
    symlink("/nowhere", &state).unwrap();
    declare(&[0, 1]);
    let logged = async |fleet: &Fleet| fleet.shim_log().contains("worker not started");
    fleet.until("the failure is logged", logged).await;
    fs::remove_file(&state).unwrap();
    until_serving(&fleet, &[0, 1]).await;
    fleet.until_indexed().await;
    // A file that cannot be read keeps the workers.
    fs::write(&file, "[[workers]]\nurl = 3\n").unwrap();
    let refused = async |fleet: &Fleet| {
        let name = "warmroute_router_settings_reloads_total{outcome=\"refused\"}";
        let answer = fleet.http.get(fleet.admin(0, "/metrics")).send().await;
        let page = answer.unwrap().text().await.unwrap();
        page.lines()
            .any(|line| line.starts_with(name) && !line.ends_with(" 0"))
    };
    fleet.until("the file is refused", refused).await;
    until_serving(&fleet, &[0, 1]).await;
    declare(&[1]);
    until_serving(&fleet, &[1]).await;
    let (status, _) = call(&fleet, Method::DELETE, "/workers/worker-1", Value::Null).await;
    assert_eq!(status, StatusCode::CONFLICT);
    let (path, body) = request(&mut Rng::with_seed(1));
    assert_eq!(serve(&fleet, path, &body).await.worker, "worker-1");
}

#[tokio::test(flavor = "multi_thread")]
async fn sighup_ends_no_process_and_workers_of_nats_are_not_added() {
    let mode = Mode::Nats {
        indexers: 1,
        routers: 1,
    };
    let fleet = Fleet::start(mode, ENGINES, Flags::default()).await;
    let parts = fleet.parts();
    let engines = fleet.engines.iter().map(|engine| &engine.process);
    let all = engines
        .chain(&parts.shims)
        .chain(&parts.indexers)
        .chain(&fleet.routers);
    let all: Vec<_> = all.collect();
    for process in &all {
        process.signal("HUP");
    }
    for (method, path) in [
        (Method::POST, "/workers"),
        (Method::DELETE, "/workers/worker-0"),
    ] {
        let body = json!({"url": "http://127.0.0.1:9"});
        let (status, said) = call(&fleet, method, path, body).await;
        assert_eq!(status, StatusCode::CONFLICT, "{said}");
        assert!(
            said["error"].as_str().unwrap().contains("warmroute-shim"),
            "{said}"
        );
    }
    let mut rng = Rng::with_seed(2);
    for _ in 0..20 {
        let (path, body) = request(&mut rng);
        serve(&fleet, path, &body).await;
    }
    fleet.until_indexed().await;
    for process in all {
        assert!(process.is_running());
    }
}

/// Runs the preStop hook of the manifests in the pod of a worker.
async fn hook(fleet: &Fleet, worker: &str, key: &str) -> Output {
    let file = fleet.file("admin.key");
    fs::write(&file, key).unwrap();
    let mut command = Command::new("python3");
    command
        .arg(deploy("kubernetes/base/drain.py"))
        .env("WARMROUTE_ADMIN_URL", fleet.admin(0, ""))
        .env("WARMROUTE_ADMIN_KEY_FILE", file)
        .env("POD_NAME", worker)
        .env("DRAIN_SECONDS", "60");
    let run = move || command.output().expect("python3 starts");
    spawn_blocking(run).await.unwrap()
}

/// With a key that routers refuse, or a name that they do not know, the hook fails and does not wait
/// for its end.
#[tokio::test(flavor = "multi_thread")]
async fn the_hook_of_a_pod_drains_with_a_key_that_may() {
    let place = Place::new();
    let [operate, read] = ["operate", "read"].map(|role| {
        let (key, hash) = keys::generate().unwrap();
        let hash = hash.to_hex();
        let row = format!("{{ id = \"{role}\", sha256 = \"{hash}\", role = \"{role}\" }}");
        (key, row)
    });
    let rows = [&*operate.1, &*read.1].join(", ");
    let settings = format!("[admin]\nexplain_headers = \"all\"\nkeys = [{rows}]\n");
    let flags = Flags {
        router: place.router_flags(&settings),
        ..Flags::default()
    };
    let fleet = Fleet::start(Mode::Embedded, ENGINES, flags).await;
    let state = async || {
        let url = fleet.admin(0, "/admin/workers/worker-0/drain");
        let answer = fleet.http.get(url).bearer_auth(&*read.0).send().await;
        answer.unwrap().json::<Value>().await.unwrap()
    };
    for (worker, key, refusal) in [
        ("worker-0", "wr-wrong", "401"),
        ("worker-0", &*read.0, "403"),
        ("worker-9", &*operate.0, "404"),
    ] {
        let ended = hook(&fleet, worker, key).await;
        let error = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(1), "{error}");
        assert!(
            error.starts_with("not drained: ") && error.contains(refusal),
            "{error}"
        );
        assert_eq!(state().await["state"], "serving");
    }

    let long = json!({"model": "mock", "prompt": "Count.", "max_tokens": 200, "stream": true});
    let stream = loop {
        let answer = send(&fleet, "/v1/completions", &long).await;
        if answer.headers()["x-warmroute-worker"] == "worker-0" {
            break answer;
        }
    };
    // A restart of the pod's shim ends the drain, which the hook sets again.
    let interrupted = async {
        while state().await["state"] != "draining" {
            sleep(Duration::from_millis(10)).await;
        }
        let url = fleet.admin(0, "/admin/workers/worker-0/undrain");
        let answer = fleet.http.post(url).bearer_auth(&*operate.0).send().await;
        assert!(answer.unwrap().status().is_success());
    };
    let (ended, text, ()) = tokio::join!(
        hook(&fleet, "worker-0", &operate.0),
        stream.text(),
        interrupted
    );
    assert!(ended.status.success(), "{ended:?}");
    assert!(text.unwrap().ends_with("data: [DONE]\n\n"));
    let state = state().await;
    assert_eq!(
        (&state["state"], &state["until"], &state["requests"]),
        (&json!("draining"), &json!("restart"), &json!(0))
    );
}
