//! Real processes: mock engines and routers; with NATS also a server, shims and indexers.
//!
//! A [`Fleet`] is embedded or distributed by its [`Mode`]; scenarios are the same for both.

pub(crate) mod cluster;
mod dump;
mod form;
mod limit;
mod lossy;
mod nats;
mod place;
mod process;
mod proxy;
mod report;
mod runbook;
pub(crate) mod traffic;

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::sync::SemaphorePermit;
use tokio::time::{sleep, timeout};
use warmroute_process::tls::EngineTls;

pub(crate) use dump::BySource;
pub(crate) use form::{EngineKind, Events, Form};
use limit::LifeLimit;
use nats::Distributed;
pub(crate) use nats::NAMESPACE;
pub(crate) use place::Place;
pub(crate) use place::{free_port, free_ports};
pub(crate) use process::Process;
pub(crate) use process::signal;
pub(crate) use proxy::{Proxy, Way};
pub(crate) use report::report;
pub(crate) use runbook::runbook;

pub(crate) const BLOCK: u64 = 16;
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/tiny");
pub(crate) const ENGINE: &str = env!("CARGO_BIN_EXE_warmroute-mock-engine-under-test");
pub(crate) const ROUTER: &str = env!("CARGO_BIN_EXE_warmroute-router-under-test");
pub(crate) const INDEXER: &str = env!("CARGO_BIN_EXE_warmroute-indexer-under-test");
const SHIM: &str = env!("CARGO_BIN_EXE_warmroute-shim-under-test");

/// First and longest pause between two looks. Tests run beside each other: one that waits for long
/// leaves the processors to the others.
const LOOK_PAUSE: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(100)];

/// The caller bounds the time.
pub(crate) async fn until_true(condition: impl AsyncFn() -> bool) {
    look(LOOK_PAUSE, condition).await;
}

async fn look([mut pause, longest]: [Duration; 2], condition: impl AsyncFn() -> bool) {
    while !condition().await {
        sleep(pause).await;
        pause = (pause * 2).min(longest);
    }
}

/// A client without proxies that trusts the system's authorities.
pub(crate) fn client() -> reqwest::ClientBuilder {
    EngineTls::system().expect("TLS").client()
}

/// The plane of a fleet.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mode {
    /// One router with all parts inside.
    Embedded,
    /// Each part is a process, over a real nats-server.
    Nats { indexers: usize, routers: usize },
}

/// Flags of the processes beyond the defaults.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flags {
    pub(crate) init: &'static [&'static str],
    pub(crate) shim: &'static [&'static str],
    /// Further flags of the last one.
    pub(crate) last_shim: &'static [&'static str],
    pub(crate) indexer: &'static [&'static str],
    pub(crate) router: &'static [&'static str],
    pub(crate) access: Access,
    pub(crate) links: Links,
    /// Engines that differ from [`Form::USUAL`], from the first on.
    pub(crate) forms: &'static [Form],
}

impl Flags {
    pub(crate) const NONE: Self = Self {
        init: &[],
        shim: &[],
        last_shim: &[],
        indexer: &[],
        router: &[],
        access: Access::Open,
        links: Links::Direct,
        forms: &[],
    };
}

impl Default for Flags {
    fn default() -> Self {
        Self::NONE
    }
}

/// Permissions and links at the nats-server.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Access {
    /// All permissions.
    Open,
    /// As `deploy/nats/nats.conf` has it: a user for each role and each of two workers.
    LeastPrivilege,
    /// Operator mode: each process has a user that `warmroute-indexer credentials` signed.
    SignedUsers,
    /// All permissions, except that routers receive no messages of each other.
    MuteRouters,
    /// All permissions; routers connect through a proxy that can lose load messages.
    LossyRouters,
    /// All permissions; messages reach routers a few milliseconds later.
    FarRouters,
    /// [`Access::Open`] with three servers.
    Cluster,
    /// As `deploy/nats/nats-core.conf` has it: a server without JetStream, and `?log=none`.
    WithoutLog,
}

/// The shims' links to the nats-server.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Links {
    Direct,
    /// Each through its own proxy, [`Fleet::link`].
    Proxied,
}

/// Settings of a fleet's mock engines.
pub(crate) struct Engines {
    pub(crate) count: usize,
    pub(crate) ranks: u16,
    pub(crate) blocks: u32,
    pub(crate) flags: &'static [&'static str],
}

/// A mock engine on ports that it keeps over restarts.
pub(crate) struct Engine {
    pub(crate) process: Process,
    kv: u16,
    replay: u16,
}

/// Handles drop in this order: clients before their servers.
pub(crate) struct Fleet {
    pub(crate) routers: Vec<Process>,
    /// `None` if embedded.
    distributed: Option<Distributed>,
    pub(crate) engines: Vec<Engine>,
    pub(crate) http: reqwest::Client,
    /// Round-robin position of the next client.
    turn: AtomicUsize,
    flags: Flags,
    place: Place,
    _life: LifeLimit,
    /// The last field, so that the next fleet starts after this one has ended.
    _turn: Option<SemaphorePermit<'static>>,
}

impl Fleet {
    /// Starts it, and waits until routers and indexers are ready.
    pub(crate) async fn start(mode: Mode, setup: Engines, flags: Flags) -> Self {
        let turn = match mode {
            Mode::Embedded => None,
            Mode::Nats { .. } => Some(nats::turn().await),
        };
        let place = Place::new();
        let life = LifeLimit::start(place.path(""));
        let starts = (0..setup.count).map(|index| {
            let form = Form::of(index, flags.forms);
            start_engine(&place, index, &setup, form)
        });
        let engines: Vec<Engine> = join_all(starts).await;
        let mut fleet = Self {
            routers: Vec::new(),
            distributed: None,
            engines,
            http: client()
                .connect_timeout(PATIENCE)
                .read_timeout(PATIENCE)
                .build()
                .expect("a client"),
            turn: AtomicUsize::new(0),
            flags,
            place,
            _life: life,
            _turn: turn,
        };
        match mode {
            Mode::Embedded => fleet.add_embedded_router(&setup).await,
            Mode::Nats { indexers, routers } => {
                fleet.distribute(&setup).await;
                for _ in 0..indexers {
                    fleet.add_indexer().await;
                }
                for _ in 0..routers {
                    fleet.add_router().await;
                }
            }
        }
        let is_ready = async |fleet: &Self| fleet.all_ready().await;
        fleet
            .until("routers and indexers are ready", is_ready)
            .await;
        fleet
    }

    async fn add_embedded_router(&mut self, setup: &Engines) {
        let mut arguments = self.router_arguments();
        for index in 0..self.engines.len() {
            let spec = self.worker_spec(index);
            let parts = ["kv", "replay", "id"].map(|key| match spec.get(key) {
                Some(value) => format!(",{key}={}", text(value)),
                None => String::new(),
            });
            let form = Form::of(index, self.flags.forms);
            let (url, ranks, role) = (text(&spec["url"]), setup.ranks, form.role);
            let assumed = form.assumed().iter().map(|what| format!(",assume={what}"));
            let assumed: String = assumed.collect();
            let worker = format!("{url}{},ranks={ranks},role={role}{assumed}", parts.concat());
            arguments.extend(["--worker".to_owned(), worker]);
        }
        let log = self.place.path("router.log");
        let router = Process::start(ROUTER, &log, arguments).await;
        self.routers.push(router);
    }

    /// Starts another engine, which no router knows yet. Returns its index.
    pub(crate) async fn add_engine(&mut self, setup: &Engines) -> usize {
        let index = self.engines.len();
        let form = Form::of(index, self.flags.forms);
        let engine = start_engine(&self.place, index, setup, form).await;
        self.engines.push(engine);
        index
    }

    pub(crate) fn form(&self, index: usize) -> Form {
        Form::of(index, self.flags.forms)
    }

    /// A worker of one rank as the API and files declare it.
    pub(crate) fn worker_spec(&self, index: usize) -> Value {
        let engine = &self.engines[index];
        let (url, id) = (engine.process.base(), worker_name(index));
        let form = Form::of(index, self.flags.forms);
        match (form.events, form.engine) {
            (Events::Published, EngineKind::Trtllm) => json!({
                "url": url, "id": id, "kv": format!("{url}/kv_cache_events"),
            }),
            (Events::Published, EngineKind::Vllm | EngineKind::Lmcache) => json!({
                "url": url, "id": id,
                "kv": endpoint(engine.kv), "replay": endpoint(engine.replay),
            }),
            // The shim asks the engine.
            (Events::Published, EngineKind::Sglang) | (Events::None, _) => {
                json!({"url": url, "id": id})
            }
        }
    }

    /// A router's flags on either plane. With forms, its settings name the tokenizers.
    fn router_arguments(&self) -> Vec<String> {
        let mut arguments = router_ports();
        if self.flags.forms.is_empty() {
            arguments.extend(strings(&["--tokenizer", TOKENIZER]));
        }
        arguments.extend(self.placed(self.flags.router));
        arguments
    }

    /// The next client's router, in turn.
    pub(crate) fn url(&self, path: &str) -> String {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        format!("{}{path}", self.routers[turn % self.routers.len()].base())
    }

    /// A path in the fleet's directory.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.place.path(name)
    }

    /// The log of the process that follows the first engine.
    pub(crate) fn shim_log(&self) -> String {
        let name = match &self.distributed {
            Some(_) => "shim-0.log",
            None => "router.log",
        };
        std::fs::read_to_string(self.file(name)).expect("a log")
    }

    /// The admin URL of one router.
    pub(crate) fn admin(&self, router: usize, path: &str) -> String {
        let port = &self.routers[router].said["admin_port"];
        format!("http://127.0.0.1:{port}{path}")
    }

    pub(crate) fn engine(&self, index: usize, path: &str) -> String {
        format!("{}{path}", self.engines[index].process.base())
    }

    /// The URLs of all indexes: the indexers, or the router that contains one.
    pub(crate) fn indexes(&self) -> Vec<String> {
        match &self.distributed {
            Some(parts) => parts.indexers.iter().map(Process::base).collect(),
            None => vec![self.admin(0, "")],
        }
    }

    pub(crate) async fn get(&self, url: String) -> Value {
        let answer = self.http.get(&url).send().await;
        let answer = answer.unwrap_or_else(|error| panic!("{url}: {error}"));
        answer
            .json()
            .await
            .unwrap_or_else(|error| panic!("{url}: {error}"))
    }

    /// Waits until a condition holds.
    pub(crate) async fn until(&self, what: &str, condition: impl AsyncFn(&Self) -> bool) {
        self.until_within(PATIENCE, what, condition).await;
    }

    /// Like `until`, with a shorter bound: `most` is what only a defect takes.
    pub(crate) async fn until_within(
        &self,
        most: Duration,
        what: &str,
        condition: impl AsyncFn(&Self) -> bool,
    ) {
        let held = timeout(most, until_true(async || condition(self).await)).await;
        assert!(held.is_ok(), "in vain for {most:?}: {what}");
    }

    /// Like `until_within`, for what may be true for milliseconds only, and for conditions that assert
    /// what holds until then.
    pub(crate) async fn until_caught(
        &self,
        most: Duration,
        what: &str,
        condition: impl AsyncFn(&Self) -> bool,
    ) {
        let often = [LOOK_PAUSE[0]; 2];
        let held = timeout(most, look(often, async || condition(self).await)).await;
        assert!(held.is_ok(), "in vain for {most:?}: {what}");
    }

    pub(crate) async fn all_ready(&self) -> bool {
        let mut bases = self.indexes();
        bases.extend(self.routers.iter().map(Process::base));
        for base in bases {
            if !self.is_ready(&base).await {
                return false;
            }
        }
        true
    }

    pub(crate) async fn is_ready(&self, base: &str) -> bool {
        let answer = self.http.get(format!("{base}/readyz")).send().await;
        answer.is_ok_and(|answer| answer.status().is_success())
    }

    /// Waits until every index has applied every engine's last batch that changed a pair.
    pub(crate) async fn until_indexed(&self) {
        self.until_states(|form, state| state == form.best_state())
            .await;
    }

    /// Like `until_indexed`, with every source in one of these states.
    pub(crate) async fn until_indexed_as(&self, states: &[&str]) {
        self.until_states(|_, state| states.contains(&state)).await;
    }

    async fn until_states(&self, is_wanted: impl Fn(Form, &str) -> bool) {
        self.until("the index has caught up", async |fleet| {
            for base in fleet.indexes() {
                if !fleet.has_caught_up(&base, &is_wanted).await {
                    return false;
                }
            }
            true
        })
        .await;
    }

    async fn has_caught_up(&self, index: &str, is_wanted: impl Fn(Form, &str) -> bool) -> bool {
        let indexed = self.positions(index).await;
        for engine in 0..self.engines.len() {
            let form = Form::of(engine, self.flags.forms);
            match form.events {
                Events::Published => {}
                Events::None => continue,
            }
            let truth = self.get(self.engine(engine, "/debug/blocks")).await;
            for rank in truth["ranks"].as_array().expect("ranks") {
                let number = rank["dp_rank"].as_u64().expect("a rank");
                let wanted = rank["published_seq_that_changed"].as_u64();
                match indexed.get(&(worker_name(engine), number)) {
                    Some((state, seq)) if is_wanted(form, state) && *seq >= wanted => {}
                    Some(_) | None => return false,
                }
            }
        }
        true
    }

    /// State and engine sequence of every source.
    pub(crate) async fn positions(&self, index: &str) -> BySource<(String, Option<u64>)> {
        let digest = self.get(format!("{index}/v1/digest")).await;
        let sources = digest["sources"].as_array().expect("sources");
        let row = |source: &Value| {
            let rank = source["dp_rank"].as_u64().expect("a rank");
            let known = (text(&source["state"]), source["engine_seq"].as_u64());
            ((text(&source["worker"]), rank), known)
        };
        sources.iter().map(row).collect()
    }

    /// Active requests, prefill tokens and decode blocks in a router's view, summed over all
    /// sources.
    pub(crate) async fn load(&self, router: usize) -> (u64, u64, u64) {
        let slots = self.get(self.admin(router, "/v1/slots")).await;
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
            for router in 0..fleet.routers.len() {
                if fleet.load(router).await != (0, 0, 0) {
                    return false;
                }
            }
            true
        })
        .await;
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

    /// One metric, summed over the routers and its labels.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let mut sum = 0.0;
        for router in 0..self.routers.len() {
            sum += self.metric_at(self.admin(router, "/metrics"), name).await;
        }
        sum
    }

    pub(crate) async fn metric_at(&self, url: String, name: &str) -> f64 {
        let answer = self.http.get(url).send().await.expect("metrics");
        let page = answer.text().await.expect("text");
        page.lines()
            .filter(|line| line.starts_with(name) && !line.starts_with('#'))
            .filter(|line| matches!(line.as_bytes().get(name.len()), Some(b' ' | b'{')))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }
}

async fn start_engine(place: &Place, index: usize, setup: &Engines, form: Form) -> Engine {
    let (kv, replay) = (free_ports(setup.ranks), free_ports(setup.ranks));
    let mut arguments = form.flags();
    let numbers = [
        ("--port", u64::from(free_port())),
        ("--kv-port", u64::from(kv)),
        ("--replay-port", u64::from(replay)),
        ("--ranks", u64::from(setup.ranks)),
        ("--block-size", form.block_size),
        ("--num-blocks", u64::from(setup.blocks)),
    ];
    for (flag, number) in numbers {
        arguments.extend([flag.to_owned(), number.to_string()]);
    }
    arguments.extend(strings(setup.flags));
    let log = place.path(&format!("{}.log", worker_name(index)));
    Engine {
        process: Process::start(ENGINE, &log, arguments).await,
        kv,
        replay,
    }
}

fn router_ports() -> Vec<String> {
    let (public, admin) = (free_port().to_string(), free_port().to_string());
    strings(&[
        "--host",
        "127.0.0.1",
        "--port",
        &public,
        "--admin-port",
        &admin,
    ])
}

fn endpoint(port: u16) -> String {
    format!("tcp://127.0.0.1:{port}")
}

pub(crate) fn worker_name(index: usize) -> String {
    format!("worker-{index}")
}

pub(crate) fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}

pub(crate) fn text(value: &Value) -> String {
    value
        .as_str()
        .unwrap_or_else(|| panic!("text, not {value}"))
        .to_owned()
}
