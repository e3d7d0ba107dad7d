//! A fleet grows and shrinks under load, over a real nats-server, by the hooks that the manifests
//! use: no request fails, and a minute later nothing is left of the workers that went, in metrics,
//! in the shipped alerts as a real Prometheus evaluates them, or in `doctor`.
//!
//! `SCALE_TO` sets the number of workers; `tests/long.sh` uses 40. The processes refuse a name with
//! their own prefix.

use std::path::Path;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join_all;
use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::fleet::traffic::request;
use crate::fleet::{Access, BLOCK, Engines, Flags, Fleet, Mode, report, runbook, worker_name};
use crate::plane::doctor::look;
use crate::prometheus::{Prometheus, discover};

const START: usize = 3;
/// After the fleet shrank.
const STAY: usize = 5;
const CLIENTS: u64 = 4;

/// Workers of the long form, and the bound of its growing and shrinking. The small form has none:
/// other tests run beside it.
const LONG: usize = 40;
const SCALING_MAX: Duration = Duration::from_secs(120);

/// Longer than Prometheus takes to scrape a change and to evaluate its rules.
const QUIET: Duration = Duration::from_secs(5);

/// An indexer's memory is back: at most so many times as much as before the fleet grew, and its
/// process's as that of an indexer that never knew the larger fleet.
const BACK: f64 = 1.2;

/// Bytes by which two processes of equal content may differ: buffers and arenas of their threads.
const RESIDENT_FLOOR: f64 = 4e6;

const ENGINES: Engines = Engines {
    count: START,
    ranks: 1,
    blocks: 200,
    flags: &["--itl-ms", "2", "--prefill-tokens-per-sec", "200000"],
};

/// Engines that stay. Their caches are full before the fleet grows, so that the index needs as much
/// memory for them before and afterwards.
const STAYING: Engines = Engines {
    blocks: 1_500,
    ..ENGINES
};

/// An engine keeps some blocks for what it computes.
const STAYING_HELD: u64 = STAY as u64 * 1_500 * 48 / 50;

/// Requests that put all cached blocks of the workers that stay to new places.
const TURNOVER: u64 = 1_500;

/// Engines that leave: room for prompts of their own, which the index must forget.
const LEAVING: Engines = Engines {
    blocks: 40_000,
    ..ENGINES
};

/// Tokens of each own prompt, and blocks of all of them together: several times as many as the
/// workers that stay hold.
const OWN_TOKENS: usize = 16_000;
const OWN_BLOCKS: usize = 100_000;

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

    /// Requests that succeeded so far.
    fn served(&self) -> u64 {
        self.served.load(Ordering::Relaxed)
    }

    /// Returns the number of requests, which all succeeded.
    pub(crate) async fn end(mut self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.tasks.join_next().await {
            ended.expect("no request fails");
        }
        self.served()
    }
}

/// Runbooks that drain a worker.
const REMOVE: &str = "Remove a worker";
pub(crate) const REPLACE: &str = "Replace a worker under the same name";

/// The runbook's first steps, which the preStop hook of the manifests takes.
pub(crate) async fn drain(title: &str, admin: String, worker: String) -> ExitStatus {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let names = [("http://127.0.0.1:29000", &*admin), ("worker-3", &worker)];
    runbook(title, &names, &root).await
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
        found.extend(text.lines().filter(left).map(str::to_owned));
    }
    found
}

/// Series if an indexer answered too late, after more than 10 ms, for a tenth of the decisions.
const LATE: &str = "sum(rate(warmroute_router_index_failures_total[15m]))
    > 0.1 * sum(rate(warmroute_router_ladder_total[15m]))";

/// Alerts whose condition holds. Where indexers answer too late, as on a busy machine, that decisions
/// are made without the index is right and no trace of the workers that left.
async fn alerts(fleet: &Fleet, prometheus: &Prometheus) -> Vec<String> {
    let mut alerts = prometheus.alerts(fleet).await;
    if !prometheus.query(fleet, LATE).await.is_empty() {
        alerts.retain(|alert| alert["labels"]["alertname"] != "WarmrouteIndexNotUsed");
    }
    alerts.iter().map(Value::to_string).collect()
}

/// Waits until the workers have left metrics, and no alert's condition holds.
async fn until_left(fleet: &Fleet, prometheus: &Prometheus, top: usize) {
    discover(fleet);
    let since = Instant::now();
    let mut quiet_since = None;
    loop {
        let mut traces = traces(fleet, top).await;
        traces.extend(alerts(fleet, prometheus).await);
        quiet_since = traces
            .is_empty()
            .then(|| quiet_since.unwrap_or_else(Instant::now));
        if let Some(quiet_since) = quiet_since.filter(|quiet| quiet.elapsed() > QUIET) {
            let left = quiet_since - since;
            return println!("no trace in metrics and alerts after {left:?}");
        }
        let is_late = since.elapsed() > Duration::from_secs(60);
        assert!(!is_late || traces.is_empty(), "after a minute: {traces:#?}");
        sleep(Duration::from_millis(200)).await;
    }
}

/// Doctor may note what was taken out; no finding needs action.
pub(crate) async fn assert_content(fleet: &Fleet) {
    let (code, found) = look(fleet).await;
    assert_eq!(code, Some(0), "{found:#?}");
}

async fn indexer_metric(fleet: &Fleet, index: usize, name: &str) -> f64 {
    let page = format!("{}/metrics", fleet.indexes()[index]);
    let name = format!("warmroute_indexer_{name}");
    fleet.metric_at(page, &name).await
}

/// All memory that an indexer's tree and lists keep, in use or free.
async fn memory(fleet: &Fleet, index: usize) -> f64 {
    indexer_metric(fleet, index, "memory_estimated_bytes").await
}

/// Memory of an indexer's process.
async fn resident(fleet: &Fleet, index: usize) -> f64 {
    indexer_metric(fleet, index, "resident_bytes").await
}

/// Blocks that an indexer holds, those of sources that left its metrics too.
async fn blocks(fleet: &Fleet, index: usize) -> u64 {
    let digest = fleet.get(format!("{}/v1/digest", fleet.indexes()[index]));
    let digest = digest.await;
    let sources = digest["sources"].as_array().unwrap().iter();
    sources.filter_map(|source| source["blocks"].as_u64()).sum()
}

/// Prints the index's memory, and returns it. That of the process, printed beside it, has buffers of
/// snapshots and messages too.
async fn print_memory(fleet: &Fleet, index: usize, when: &str) -> f64 {
    let kept = memory(fleet, index).await;
    let resident = resident(fleet, index).await;
    let blocks = blocks(fleet, index).await;
    println!("indexer {index}, {when}: {kept} bytes kept, {resident} resident, {blocks} blocks");
    kept
}

/// Adds workers until there are so many.
async fn grow(fleet: &mut Fleet, top: usize) -> Duration {
    let begin = Instant::now();
    for index in fleet.engines.len()..top {
        let setup = if index < STAY { &STAYING } else { &LEAVING };
        let index = fleet.add_engine(setup).await;
        fleet.add_shim(index, setup).await;
    }
    discover(fleet);
    let expected = f64::from(u32::try_from(top * fleet.routers.len()).unwrap());
    let serve_all = async |fleet: &Fleet| {
        let healthy = fleet.metric("warmroute_router_worker_healthy").await;
        (healthy - expected).abs() < 0.5
    };
    fleet
        .until("every router uses every worker", serve_all)
        .await;
    begin.elapsed()
}

/// Fills the caches of the workers that leave, until the indexers hold these blocks.
async fn fill(fleet: &Fleet, top: usize) {
    let blocks_each = OWN_TOKENS / usize::try_from(BLOCK).unwrap();
    let prompts = OWN_BLOCKS.div_ceil(blocks_each * (top - STAY));
    let fills = (STAY..top).map(async |index| {
        let mut rng = Rng::with_seed(u64::try_from(index).unwrap());
        for _ in 0..prompts {
            let prompt: Vec<u32> = (0..OWN_TOKENS).map(|_| rng.u32(300..1300)).collect();
            let body = json!({"model": "mock", "prompt": prompt, "max_tokens": 1});
            let url = fleet.engine(index, "/v1/completions");
            let answer = fleet.http.post(url).json(&body).send().await;
            assert_eq!(answer.unwrap().status(), StatusCode::OK);
        }
    });
    join_all(fills).await;
    let own = u64::try_from((top - STAY) * prompts * blocks_each).unwrap();
    let hold = async |fleet: &Fleet| blocks(fleet, 0).await > own && blocks(fleet, 1).await > own;
    fleet.until("the blocks are indexed", hold).await;
}

/// Drains the workers that leave, and ends them. The first one's engine and shim are killed, so
/// that nothing deregisters it.
async fn shrink(fleet: &Fleet, top: usize) {
    let mut hooks = JoinSet::new();
    for index in STAY..top {
        let admin = fleet.admin(index % fleet.routers.len(), "");
        hooks.spawn(drain(REMOVE, admin, worker_name(index)));
    }
    while let Some(ended) = hooks.join_next().await {
        assert!(ended.unwrap().success());
    }
    fleet.engines[STAY].process.kill();
    fleet.parts().shims[STAY].kill();
    for index in STAY + 1..top {
        fleet.engines[index].process.signal("TERM");
        fleet.parts().shims[index].signal("TERM");
    }
    for index in STAY + 1..top {
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
    let mut fleet = Fleet::start(mode, STAYING, flags).await;
    let prometheus = Prometheus::start(&fleet).await;
    let clients = Clients::start(&fleet);
    let begin = Instant::now();
    let mut grown = grow(&mut fleet, STAY).await;
    let full = async |fleet: &Fleet| {
        blocks(fleet, 0).await >= STAYING_HELD && clients.served() >= TURNOVER
    };
    let most = Duration::from_secs(180);
    fleet.until_within(most, "the caches are full", full).await;
    let before = print_memory(&fleet, 0, "before the fleet grows").await;
    grown += grow(&mut fleet, top).await;
    println!("{START} to {top} workers: {grown:?}");
    fill(&fleet, top).await;
    let full = print_memory(&fleet, 0, "with all workers").await;
    assert!(full > 2.0 * before, "{full}, {before}");

    let shrinking = Instant::now();
    shrink(&fleet, top).await;
    let shrunk = shrinking.elapsed();
    println!("{top} to {STAY} workers: {shrunk:?}");
    assert!(
        top < LONG || grown + shrunk < SCALING_MAX,
        "{grown:?}, {shrunk:?}"
    );
    report(&format!("{START} to {top} to {STAY} workers"), begin);
    until_left(&fleet, &prometheus, top).await;
    let served = clients.end().await;
    println!("{served} requests, none failed");
    assert_content(&fleet).await;

    // Also after a restart of an indexer, which forgets what its snapshot has of workers that left.
    fleet.parts().indexers[1].restart().await;
    let base = fleet.indexes()[1].clone();
    let is_ready = async |fleet: &Fleet| fleet.is_ready(&base).await;
    fleet.until("the indexer is ready again", is_ready).await;
    until_left(&fleet, &prometheus, top).await;
    assert_content(&fleet).await;
    let freed = async |fleet: &Fleet| {
        let (old, new) = (memory(fleet, 0).await, memory(fleet, 1).await);
        old.max(new) <= BACK * before
    };
    let most = Duration::from_secs(120);
    fleet.until_within(most, "memory is freed", freed).await;
    print_memory(&fleet, 0, "with the workers that stay").await;
    print_memory(&fleet, 1, "restarted").await;
    let (old, new) = (resident(&fleet, 0).await, resident(&fleet, 1).await);
    assert!(old <= BACK * new + RESIDENT_FLOOR, "{old}, {new}");
    let fired = prometheus.fired(&fleet).await;
    assert!(fired.is_empty(), "an operator was woken: {fired:#?}");
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
    let drained = drain(REPLACE, fleet.admin(0, ""), worker_name(1)).await;
    assert!(drained.success());
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
        "192MiB",
        "--wait-secs",
        "5",
    ];
    let (code, _) = fleet.command("init", &resize).await;
    assert_ne!(code, Some(0), "the user may not change a stream");
    let call = "\"$JS.API.STREAM.UPDATE.wr_prod\"";
    let import = format!("{{ service: {{ account: SYS, subject: {call} }} }}");
    for line in [&import, call] {
        fleet.reload_nats(&format!("# {line}"), line).await;
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    while fleet.command("init", &resize).await.0 != Some(0) {
        assert!(Instant::now() < deadline, "the permission was granted");
    }
    let (code, _) = fleet
        .command("init", &["init", "--max-bytes", "192MiB"])
        .await;
    assert_eq!(code, Some(0), "the log has the new size");
    println!("{} requests, none failed", clients.end().await);
    assert_content(&fleet).await;
}
