//! A fleet grows and shrinks under load, over a real nats-server, by the hooks that the manifests
//! use: no request fails, and a minute later nothing is left of the workers that went.
//!
//! `SCALE_TO` sets the number of workers; `tests/long.sh` uses 40. The processes refuse a name with
//! their own prefix.

use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use reqwest::StatusCode;
use serde_json::Value;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{Instant, sleep};

use crate::fleet::traffic::request;
use crate::fleet::{Access, Engines, Flags, Fleet, Mode, worker_name};
use crate::plane::doctor::look;

const STAY: usize = 3;
const CLIENTS: u64 = 4;

/// The tree keeps up to a segment of blocks and one of runs, 64 KiB each, whatever its size; the
/// estimate adds an eighth.
const SEGMENTS: f64 = 147_456.0;

const ENGINES: Engines = Engines {
    count: STAY,
    ranks: 1,
    blocks: 200,
    flags: &["--itl-ms", "2", "--prefill-tokens-per-sec", "200000"],
};

/// Clients that send one request after the other until stopped. Each answer must be whole.
pub(crate) struct Clients {
    stop: Arc<AtomicBool>,
    served: Arc<AtomicU64>,
    tasks: JoinSet<()>,
}

impl Clients {
    pub(crate) fn start(fleet: &Fleet) -> Self {
        let mut clients = Self {
            stop: Arc::default(),
            served: Arc::default(),
            tasks: JoinSet::new(),
        };
        let routers: Vec<String> = fleet.routers.iter().map(|router| router.base()).collect();
        for client in 0..CLIENTS {
            let (stop, served) = (Arc::clone(&clients.stop), Arc::clone(&clients.served));
            let (http, routers) = (fleet.http.clone(), routers.clone());
            clients.tasks.spawn(async move {
                let mut rng = Rng::with_seed(client);
                while !stop.load(Ordering::Relaxed) {
                    let (path, body) = request(&mut rng);
                    let router = &routers[rng.usize(..routers.len())];
                    let answer = http
                        .post(format!("{router}{path}"))
                        .json(&body)
                        .send()
                        .await;
                    let answer = answer.expect("a router answers");
                    assert_eq!(answer.status(), StatusCode::OK);
                    let body: Value = answer.json().await.expect("a whole answer");
                    assert!(body["choices"].is_array(), "{body}");
                    served.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        clients
    }

    /// Returns the number of requests, which all succeeded.
    pub(crate) async fn end(mut self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.tasks.join_next().await {
            ended.expect("no request fails");
        }
        self.served.load(Ordering::Relaxed)
    }
}

/// The preStop hook of the manifests.
pub(crate) async fn drain(admin: String, worker: String) -> ExitStatus {
    let hook = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kubernetes/base/drain.py");
    let mut command = Command::new("python3");
    command.arg(hook).env("WARMROUTE_ADMIN_URL", admin);
    command.env("POD_NAME", worker).env("DRAIN_SECONDS", "60");
    let run = move || command.status().expect("python3 starts");
    spawn_blocking(run).await.expect("it ended")
}

/// What a scraper and an operator see of workers beyond the first [`STAY`].
async fn traces(fleet: &Fleet, top: usize) -> Vec<String> {
    let mut pages: Vec<String> = fleet.indexes();
    pages.extend((0..fleet.routers.len()).map(|router| fleet.admin(router, "")));
    let mut found = Vec::new();
    for page in pages {
        let answer = fleet.http.get(format!("{page}/metrics")).send().await;
        let text = answer.unwrap().text().await.unwrap();
        let left = |line: &&str| {
            (STAY..top).any(|index| line.contains(&format!("worker=\"{}\"", worker_name(index))))
        };
        let alarm = |line: &&str| {
            line.starts_with("warmroute_indexer_sources{")
                && !line.contains("exact")
                && !line.ends_with(" 0")
        };
        found.extend(
            text.lines()
                .filter(|line| left(line) || alarm(line))
                .map(str::to_owned),
        );
    }
    found
}

async fn until_left(fleet: &Fleet, top: usize) {
    let since = Instant::now();
    loop {
        let traces = traces(fleet, top).await;
        if traces.is_empty() {
            return println!("no trace in metrics after {:?}", since.elapsed());
        }
        let is_late = since.elapsed() > Duration::from_secs(60);
        assert!(!is_late, "after a minute: {traces:#?}");
        sleep(Duration::from_millis(200)).await;
    }
}

/// Doctor may note what was taken out; no finding needs action.
pub(crate) async fn assert_content(fleet: &Fleet) {
    let (code, found) = look(fleet).await;
    assert_eq!(code, Some(0), "{found:#?}");
}

async fn memory(fleet: &Fleet, index: usize) -> f64 {
    let page = format!("{}/metrics", fleet.indexes()[index]);
    let name = "warmroute_indexer_memory_estimated_bytes";
    fleet.metric_at(page, name).await
}

async fn grow(fleet: &mut Fleet, top: usize) {
    for _ in STAY..top {
        let index = fleet.add_engine(&ENGINES).await;
        fleet.add_shim(index, &ENGINES).await;
    }
    let expected = f64::from(u32::try_from(top * fleet.routers.len()).unwrap());
    let serve_all = async |fleet: &Fleet| {
        let healthy = fleet.metric("warmroute_router_worker_healthy").await;
        (healthy - expected).abs() < 0.5
    };
    fleet
        .until("every router uses every worker", serve_all)
        .await;
}

async fn shrink(fleet: &Fleet, top: usize) {
    let mut hooks = JoinSet::new();
    for index in STAY..top {
        let admin = fleet.admin(index % fleet.routers.len(), "");
        hooks.spawn(drain(admin, worker_name(index)));
    }
    while let Some(ended) = hooks.join_next().await {
        assert!(ended.unwrap().success());
    }
    for index in STAY..top {
        fleet.engines[index].process.signal("TERM");
        fleet.parts().shims[index].signal("TERM");
    }
    for index in STAY..top {
        fleet.engines[index].process.ended().await;
        fleet.parts().shims[index].ended().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_come_and_go_under_load_and_leave_nothing() {
    #[expect(clippy::disallowed_methods, reason = "a test has no flags")]
    let top = std::env::var("SCALE_TO").map_or(8, |text| text.parse().unwrap());
    let mode = Mode::Nats {
        indexers: 2,
        routers: 2,
    };
    let flags = Flags {
        access: Access::LeastPrivilege,
        indexer: &["--snapshot-every-secs", "5"],
        ..Flags::default()
    };
    let mut fleet = Fleet::start(mode, ENGINES, flags).await;
    let clients = Clients::start(&fleet);
    let begin = Instant::now();
    grow(&mut fleet, top).await;
    println!("{STAY} to {top} workers: {:?}", begin.elapsed());
    sleep(Duration::from_secs(5)).await;
    let full = memory(&fleet, 0).await;

    let begin = Instant::now();
    shrink(&fleet, top).await;
    println!("{top} to {STAY} workers: {:?}", begin.elapsed());
    until_left(&fleet, top).await;
    let served = clients.end().await;
    println!("{served} requests, none failed");
    assert_content(&fleet).await;

    // Also after a restart of an indexer, and as much memory as one that never knew more.
    fleet.parts().indexers[1].restart().await;
    let base = fleet.indexes()[1].clone();
    let is_ready = async |fleet: &Fleet| fleet.is_ready(&base).await;
    fleet.until("the indexer is ready again", is_ready).await;
    until_left(&fleet, top).await;
    assert_content(&fleet).await;
    let freed = async |fleet: &Fleet| {
        let (old, new) = (memory(fleet, 0).await, memory(fleet, 1).await);
        old <= 1.2 * new + SEGMENTS
    };
    let most = Duration::from_secs(120);
    fleet.until_within(most, "memory is freed", freed).await;
    let (old, new) = (memory(&fleet, 0).await, memory(&fleet, 1).await);
    println!("estimated memory: {full} bytes at {top} workers, {old} after, {new} restarted");
}

/// A worker that is drained until its restart serves again under its name; the hook ends without
/// waiting for anything where nothing runs.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_replaced_under_its_name_serves_again() {
    let mode = Mode::Nats {
        indexers: 1,
        routers: 2,
    };
    let flags = Flags {
        access: Access::LeastPrivilege,
        ..Flags::default()
    };
    let fleet = Fleet::start(mode, ENGINES, flags).await;
    let clients = Clients::start(&fleet);
    assert!(drain(fleet.admin(0, ""), worker_name(1)).await.success());
    let state = async |fleet: &Fleet, router: usize| {
        let url = fleet.admin(router, "/admin/workers/worker-1/drain");
        fleet.get(url).await
    };
    let shown = state(&fleet, 0).await;
    assert_eq!(
        (&shown["state"], &shown["until"]),
        (&"draining".into(), &"restart".into())
    );
    let (engine, shim) = (&fleet.engines[1].process, &fleet.parts().shims[1]);
    for process in [engine, shim] {
        process.signal("TERM");
        process.ended().await;
    }
    for process in [engine, shim] {
        process.restart().await;
    }
    let serving = async |fleet: &Fleet| {
        state(fleet, 0).await["state"] == "serving" && state(fleet, 1).await["state"] == "serving"
    };
    fleet
        .until("its drain has ended at both routers", serving)
        .await;
    let before = fleet.get(fleet.engine(1, "/debug/counters")).await;
    let used = async |fleet: &Fleet| fleet.get(fleet.engine(1, "/debug/counters")).await != before;
    fleet.until("it gets requests", used).await;
    println!("{} requests, none failed", clients.end().await);
}

/// The runbook: without the permission nothing changes; with it the bound grows while all parts run.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_is_enlarged_in_place() {
    let mode = Mode::Nats {
        indexers: 2,
        routers: 1,
    };
    let flags = Flags {
        access: Access::LeastPrivilege,
        ..Flags::default()
    };
    let fleet = Fleet::start(mode, ENGINES, flags).await;
    let clients = Clients::start(&fleet);
    let resize = [
        "init",
        "--resize",
        "--max-bytes",
        "3GiB",
        "--wait-secs",
        "5",
    ];
    let (code, _) = fleet.command("init", &resize).await;
    assert_ne!(code, Some(0), "the user may not change a stream");
    let permission = "\"$JS.API.STREAM.UPDATE.wr_prod\"";
    fleet
        .reload_nats(&format!("# {permission}"), permission)
        .await;
    let deadline = Instant::now() + Duration::from_secs(20);
    while fleet.command("init", &resize).await.0 != Some(0) {
        assert!(Instant::now() < deadline, "the permission was granted");
    }
    let (code, _) = fleet
        .command("init", &["init", "--max-bytes", "3GiB"])
        .await;
    assert_eq!(code, Some(0), "the log has the new size");
    println!("{} requests, none failed", clients.end().await);
    assert_content(&fleet).await;
}
