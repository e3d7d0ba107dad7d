//! Wiring: starts a router's tasks from its configuration, and stops them.
//!
//! Shutdown has three phases. First the router reports not-ready and serves on, so that load
//! balancers can notice. Then it accepts no connection, and open requests may finish. After the
//! drain time it closes what is left; requests that still wait for a worker are answered before.
//! Only then it takes leave of the other routers, which count its load until its last request has
//! ended. The admin port stays open to the end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use anyhow::Context as _;
use futures_util::future::OptionFuture;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::time::{Duration, Instant, sleep_until, timeout};
use tokio_util::task::TaskTracker;
use uuid::Uuid;
use warmroute_process::access::{BindScope, PortAccess, RouteAccess, RouteTable};
use warmroute_process::connection_threads::{self, ConnectionThreads};
use warmroute_process::listen::bind;
use warmroute_process::open_files::FileShares;
use warmroute_process::server::{
    ClientRules, ConnectionFiles, Http2, Http2Windows, Server, Shutdown,
};
use warmroute_process::signals::{self, Signals};
use warmroute_process::tasks::Tasks;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{Generation, RouterId};

use crate::access_log::AccessLog;
use crate::admin::{self, Admin, setup_faults};
use crate::admission::Admission;
use crate::audit::Auditor;
use crate::call_report::CallSinks;
use crate::config::Config;
use crate::demotions::DemotionWriter;
use crate::deployment::Deployment;
use crate::embedded::{EmbeddedWorkers, SupervisorParts, WorkerSupervisor};
use crate::engine_clients::SocketRule;
use crate::fleet::{
    EngineLoadReader, Fleet, FleetRegistry, HealthProber, HttpProbe, RegistrationChecker,
};
use crate::index_client::IndexClient;
use crate::journal::Journal;
use crate::live_page::{self, LiveFeed, LiveSampler};
use crate::metrics::Metrics;
use crate::picker;
use crate::proxy::{
    self, App, BodyBudget, EngineClient, EngineFiles, HeldRequests, PromptPool, StoredResponses,
};
use crate::ready::{Ready, notice};
use crate::recorder::Recorder;
use crate::replication::Replication;
use crate::retry_budget::RetryBudget;
use crate::route::{Core, CoreConfig};
use crate::router_facts::FactsWriter;
use crate::selections::Selections;
use crate::settings::{LiveSettings, Settings, SettingsWatcher};
use crate::shared_core::SharedCore;
use crate::spans::Tracer;
use crate::tenant_sync::TenantSync;
use crate::tenants::{LimitSharing, Tenants};
use crate::tokenizers::{DefaultTokenizer, TokenizerLoader, Tokenizers};

/// Operators and scrapers.
const ADMIN_CONNECTIONS_MAX: usize = 256;

/// Time after which an operator's connection is closed that does not read its answer.
const ADMIN_WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Time after which a client's connection or stream ends that takes nothing of its answer. It would
/// keep a connection, and with a key a slot. The time begins again with each 16 KiB taken.
const PUBLIC_WRITE_TIMEOUT: Duration = Duration::from_secs(60);

/// What gateways may send ahead of a stream's reader, and of those of all streams of a connection,
/// each of which may wait for a client that takes nothing.
const GATEWAY_WINDOWS: Http2Windows = Http2Windows {
    stream: 256 << 10,
    connection: 32 << 20,
};

/// Time before the end of the drain for the answers to requests that wait for a worker.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// Time for background tasks to end.
const TASKS_END: Duration = Duration::from_secs(5);

/// The addresses that the router listens on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    pub public: SocketAddr,
    pub admin: SocketAddr,
    /// The endpoint picker's, if gateways are served.
    pub picker: Option<SocketAddr>,
}

/// A router whose tasks run.
pub struct Running {
    pub addresses: Addresses,
    /// The paths of the admin port, each with what it asks of clients.
    pub admin_routes: Vec<(&'static str, RouteAccess)>,
    tasks: Tasks,
    app: Arc<App>,
    clients: Port,
    operators: Port,
}

/// The sockets of the ports.
struct Listeners {
    public: TcpListener,
    admin: TcpListener,
    picker: Option<TcpListener>,
}

impl Listeners {
    async fn bind(config: &Config, settings: &Settings) -> anyhow::Result<(Self, Addresses)> {
        let picker = settings.endpoint_picker.address();
        let listeners = Self {
            public: bind(config.public).await?,
            admin: bind(config.admin).await?,
            picker: OptionFuture::from(picker.map(bind)).await.transpose()?,
        };
        let addresses = Addresses {
            public: listeners
                .public
                .local_addr()
                .context("the public address")?,
            admin: listeners.admin.local_addr().context("the admin address")?,
            picker,
        };
        Ok((listeners, addresses))
    }
}

/// One port's connections and their shutdown.
#[derive(Clone, Default)]
struct Port {
    /// That serve its connections, to the end of the last one.
    threads: ConnectionThreads,
    shutdown: Shutdown,
    connections: TaskTracker,
}

/// How a router leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leave {
    /// Behind load balancers, which must notice first.
    Noticed,
    /// At a terminal, or after a failure: no connection is accepted any more.
    Immediate,
}

/// Runs until a signal or until a task fails. A second signal closes open connections. Requests
/// run on the current runtime; the tasks that no request waits for run on `background`.
pub async fn run(
    config: Config,
    background: &Handle,
    announce: impl FnOnce(Addresses),
) -> anyhow::Result<()> {
    let mut signals = Signals::listen().context("listening for signals")?;
    let running = Box::pin(Running::start(config, background)).await?;
    announce(running.addresses);
    let leave = tokio::select! {
        signal = signals.received() => {
            tracing::info!(signal, "draining");
            if signal == signals::INTERRUPT { Leave::Immediate } else { Leave::Noticed }
        }
        () = running.failed() => Leave::Immediate,
    };
    let second_signal = async {
        let signal = signals.received().await;
        tracing::warn!(signal, "second signal, closing connections");
    };
    running.stop(leave, second_signal).await
}

impl Running {
    /// Binds, loads and spawns. A failure before the tasks start leaves nothing behind.
    pub async fn start(config: Config, background: &Handle) -> anyhow::Result<Self> {
        let metrics = Arc::new(Metrics::new().context("setting up the metrics")?);
        let tasks = Tasks::new(metrics.tasks_failed().clone());
        let background = tasks.on(background);
        let (settings, watcher) = live_settings(&config, &metrics)?;
        let (listeners, addresses) = Listeners::bind(&config, &settings.current()).await?;
        let tokenizers = Arc::<Tokenizers>::default();
        let tokenizer = DefaultTokenizer::load(&config, &tokenizers).await?;
        let shares = file_shares(&config, &settings.current());
        let files = engine_files(&metrics, shares);
        let engines = engine_client(&config, &settings, &metrics, &files)?;
        let threads = ConnectionThreads::start(config.threads.connections);
        let threads = threads.context("starting the threads for requests")?;
        let prompts = PromptPool::start().context("starting the threads for prompts")?;
        let deployment = Arc::new(Deployment::start(&config, &tasks).await?);
        background.spawn("settings", watcher.run(tasks.stop.clone()));
        let clients = Port {
            threads,
            ..Port::default()
        };
        let services = Services {
            metrics,
            settings,
            tokenizers,
            tokenizer,
            prompts,
            engines,
            deployment,
            addresses,
            background: background.clone(),
        };
        let (app, admin_state) = services.spawn(&config, &clients, &tasks).await?;
        let admin_state = Arc::new(admin_state);
        let feed = show_to_operators(&admin_state, &background);
        let admin_routes = admin::routes(&admin_state).merge(live_page::routes(&feed));
        let running = Self {
            addresses,
            admin_routes: admin_routes.entries().collect(),
            tasks: tasks.clone(),
            app,
            clients,
            operators: Port::default(),
        };
        let connections_max = shares.clients.min(config.limits.connections);
        let bounds = (connections_max, files.connections);
        running.serve(listeners, admin_routes, bounds, &background);
        Ok(running)
    }

    /// Serves the ports. `bounds`: those of clients and gateways.
    fn serve(
        &self,
        listeners: Listeners,
        admin_routes: RouteTable,
        bounds: (usize, ConnectionFiles),
        background: &Tasks,
    ) {
        let (app, settings) = (&self.app, &self.app.settings);
        let server = |listener, router, bounds: (usize, ConnectionFiles), clients| Server {
            listener,
            router,
            connections_max: bounds.0,
            files: bounds.1,
            connections: app.metrics.connections().clone(),
            clients,
        };
        if let Some(picker) = listeners.picker {
            let (router, rules) = (picker::router(Arc::clone(app)), gateway_rules(settings));
            let picker = server(picker, router, bounds.clone(), rules);
            self.clients.serve(&self.tasks, "endpoint picker", picker);
        }
        let (router, rules) = (proxy::router(Arc::clone(app)), public_rules(settings));
        let public = server(listeners.public, router, bounds, rules);
        self.clients.serve(&self.tasks, "public", public);
        let access = admin_access(settings, self.addresses.admin);
        let router = admin_routes.guarded(&access);
        let bounds = (ADMIN_CONNECTIONS_MAX, ConnectionFiles::default());
        let admin = server(listeners.admin, router, bounds, admin_rules(settings));
        self.operators.serve(background, "admin", admin);
    }

    /// A task ended early.
    pub async fn failed(&self) {
        self.tasks.down.cancelled().await;
    }

    /// Runs all phases of the shutdown. `hurry` ends the drain early.
    async fn stop(self, leave: Leave, hurry: impl Future<Output = ()>) -> anyhow::Result<()> {
        let failed = self.tasks.down.is_cancelled();
        let now = Instant::now();
        let not_ready_since = self.app.ready.end(now);
        self.app.core.core().stop_moves();
        let drain_timeout = self.app.settings.current().drain_timeout();
        let accept_until = match leave {
            Leave::Noticed => not_ready_since + notice(drain_timeout),
            Leave::Immediate => now,
        };
        let drained = async {
            sleep_until(accept_until).await;
            self.clients.shutdown.stop.cancel();
            self.clients.connections.close();
            self.clients.connections.wait().await;
        };
        let ends = now + drain_timeout;
        let answer_waiting = async {
            sleep_until(ends - LAST_ANSWERS.min(drain_timeout / 4)).await;
            self.app.admission.close();
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = answer_waiting => {}
            () = drained => tracing::info!("drained"),
            () = sleep_until(ends) => self.clients.close().await,
            () = hurry => self.clients.close().await,
        }
        self.operators.close().await;
        if timeout(TASKS_END, self.tasks.end()).await.is_err() {
            tracing::error!("some tasks do not end");
        }
        anyhow::ensure!(!failed, "a task ended early");
        Ok(())
    }
}

impl Port {
    /// Serves until the shutdown begins, then waits for the stop as every task does.
    fn serve(&self, tasks: &Tasks, name: &'static str, server: Server) {
        let port = self.clone();
        let stop = tasks.stop.clone();
        tasks.spawn(name, async move {
            let stopped = port.shutdown.stop.clone();
            let served = server.run_on(port.threads, port.shutdown, port.connections);
            served.await;
            if stopped.is_cancelled() {
                stop.cancelled().await;
            }
        });
    }

    /// Closes all connections.
    async fn close(&self) {
        self.shutdown.stop.cancel();
        self.connections.close();
        if !self.connections.is_empty() {
            tracing::info!(left = self.connections.len(), "closing open connections");
        }
        self.shutdown.force.cancel();
        self.connections.wait().await;
    }
}

/// What the tasks are made from.
struct Services {
    metrics: Arc<Metrics>,
    settings: Arc<LiveSettings>,
    tokenizers: Arc<Tokenizers>,
    /// `--tokenizer`.
    tokenizer: Option<DefaultTokenizer>,
    prompts: PromptPool,
    engines: EngineClient,
    deployment: Arc<Deployment>,
    addresses: Addresses,
    /// For tasks that no request waits for.
    background: Tasks,
}

impl Services {
    /// Starts the tasks behind the ports. Returns the state of the two ports.
    async fn spawn(
        mut self,
        config: &Config,
        clients: &Port,
        tasks: &Tasks,
    ) -> anyhow::Result<(Arc<App>, Admin)> {
        let (stop, plane) = (&tasks.stop, self.deployment.plane());
        let subjects = Subjects::new(&config.namespace);
        let router = RouterId(Uuid::new_v4().into_bytes());
        let core = shared_core(config, router);
        let (ready, journal) = <(Arc<Ready>, Arc<Journal>)>::default();
        let unreadable = self.metrics.bad_entries();

        let (own_core, own_plane) = (Arc::clone(&core), Arc::clone(&plane));
        let (replication, replicas) =
            Replication::new(router, own_core, own_plane, subjects.clone());
        let latch = Arc::clone(&ready);
        let run = replication.run(move || latch.load_known(), stop.clone());
        tasks.spawn("replication", run);

        let index = IndexClient::new(Arc::clone(&plane), subjects.clone());
        let index = index.with_replicas(self.deployment.index_replicas());
        let follower = index.clone();
        let indexers = follower.follow_replicas(unreadable.clone(), stop.clone());
        tasks.spawn("indexers", indexers);
        tasks.spawn("rosters", index.clone().follow_rosters(stop.clone()));

        let auditor = self.audit(&core, &journal, &index, tasks);
        self.write_demotions(router, &core, &subjects);
        tasks.spawn("clock", Arc::clone(&core).run_clock(stop.clone()));

        let fleet = Fleet::new(Arc::clone(&core), config.block_size);
        let registry = Arc::new(FleetRegistry {
            fleet: Arc::clone(&fleet),
            plane,
            subjects,
            ready: Arc::clone(&ready),
            unreadable: unreadable.clone(),
            drains_read: AtomicBool::default(),
        });
        tasks.spawn("registry", Arc::clone(&registry).follow(stop.clone()));
        self.load_tokenizers(&fleet);
        self.watch_engines(&fleet, &ready, config);
        let workers = self.supervise(&fleet, &core, config).await?;
        self.show_facts(router, &fleet, config);

        let app = Arc::new(App {
            admission: self.admission(&core, &fleet, config, tasks),
            tenants: self.share_limits(router, &ready, config, tasks),
            sinks: self.call_sinks(),
            core,
            fleet,
            index,
            auditor,
            journal,
            held: HeldRequests::new(self.metrics.waiting().clone()),
            retries: RetryBudget::default(),
            bodies: body_budget(config, &self.metrics, clients),
            metrics: self.metrics,
            stored: StoredResponses::default(),
            engines: self.engines,
            tokenizers: self.tokenizers,
            policy: config.knobs.policy,
            settings: self.settings,
            prompts: self.prompts,
            planned: AtomicU64::new(0),
            ready,
        });
        let admin = Admin {
            selections: selections(&app, tasks),
            router,
            app: Arc::clone(&app),
            registry,
            replicas,
            deployment: self.deployment,
            workers,
            pages: admin::AdminPages::default(),
        };
        Ok((app, admin))
    }

    /// Starts the giving of places to waiting requests.
    fn admission(
        &self,
        core: &Arc<SharedCore>,
        fleet: &Fleet,
        config: &Config,
        tasks: &Tasks,
    ) -> Arc<Admission> {
        let (core, bytes) = (Arc::clone(core), config.limits.buffered_bytes);
        let admission = Admission::new(core, bytes, &self.metrics);
        let places = Arc::clone(&admission).run(fleet.changes(), tasks.stop.clone());
        tasks.spawn("admission", places);
        admission
    }

    /// Starts the sharing of the tenants' limits with other routers, which only a plane has.
    fn share_limits(
        &self,
        router: RouterId,
        ready: &Arc<Ready>,
        config: &Config,
        tasks: &Tasks,
    ) -> Arc<Tenants> {
        let sharing = match self.deployment.nats() {
            Some(_) => LimitSharing::WithOthers,
            None => LimitSharing::Alone,
        };
        let tenants = Arc::new(Tenants::new(Arc::clone(&self.settings), sharing));
        if sharing == LimitSharing::Alone {
            ready.limits_shared();
        } else {
            let sync = TenantSync {
                router,
                tenants: Arc::clone(&tenants),
                ready: Arc::clone(ready),
                plane: self.deployment.plane(),
                subjects: Subjects::new(&config.namespace),
            };
            tasks.spawn("tenants", sync.run(tasks.stop.clone()));
        }
        tenants
    }

    /// Starts the writing of what tools compare between routers.
    fn show_facts(&self, router: RouterId, fleet: &Arc<Fleet>, config: &Config) {
        let (settings, plane) = (&self.settings, self.deployment.plane());
        let facts = FactsWriter::new(
            config,
            (router, self.deployment.nats().cloned()),
            settings,
            fleet,
            &self.tokenizers,
            plane,
        );
        self.background
            .spawn("facts", facts.run(self.background.stop.clone()));
    }

    /// Starts the workers' shims, if this router is embedded.
    async fn supervise(
        &self,
        fleet: &Arc<Fleet>,
        core: &Arc<SharedCore>,
        config: &Config,
    ) -> anyhow::Result<Option<EmbeddedWorkers>> {
        if self.deployment.nats().is_some() {
            return Ok(None);
        }
        let parts = SupervisorParts {
            plane: self.deployment.plane(),
            fleet: Arc::clone(fleet),
            core: Arc::clone(core),
            settings: Arc::clone(&self.settings),
            engines: self.engines.clone(),
            runtime: self.background.runtime().clone(),
            addresses: vec![self.addresses.public, self.addresses.admin],
        };
        let stop = self.background.stop.clone();
        let (workers, supervisor) = WorkerSupervisor::start(parts, config, stop).await?;
        self.background.spawn("workers", supervisor.run());
        Ok(Some(workers))
    }

    /// Starts the writing of this router's demotions.
    fn write_demotions(&self, router: RouterId, core: &Arc<SharedCore>, subjects: &Subjects) {
        let demotions = DemotionWriter {
            router,
            key: subjects.demotion_key(router),
            core: Arc::clone(core),
            plane: self.deployment.plane(),
        };
        self.background
            .spawn("demotions", demotions.run(self.background.stop.clone()));
    }

    /// Starts what takes the reports of ended requests.
    fn call_sinks(&self) -> Arc<CallSinks> {
        let shared = || (Arc::clone(&self.settings), Arc::clone(&self.metrics));
        let (settings, metrics) = shared();
        let (recorder, records) = Recorder::new(settings, metrics);
        self.background
            .spawn("recorder", records.run(self.background.stop.clone()));
        let (settings, metrics) = shared();
        let (access_log, lines) = AccessLog::new(settings, Arc::clone(&metrics));
        self.background
            .spawn("access log", lines.run(self.background.stop.clone()));
        let client = self.engines.background().plain().clone();
        let (settings, counted) = shared();
        let (tracer, spans) = Tracer::new(settings, counted, client);
        self.background
            .spawn("span export", spans.run(self.background.stop.clone()));
        Arc::new(CallSinks {
            metrics,
            recorder,
            access_log,
            tracer,
        })
    }

    /// Starts the comparison of credit with the engines' reports.
    fn audit(
        &self,
        core: &Arc<SharedCore>,
        journal: &Arc<Journal>,
        index: &IndexClient,
        tasks: &Tasks,
    ) -> Auditor {
        let metrics = Arc::clone(&self.metrics);
        let (core, journal) = (Arc::clone(core), Arc::clone(journal));
        let (auditor, rechecks) = Auditor::new(core, journal, metrics, index.clone());
        tasks.spawn("rechecks", rechecks.run(tasks.stop.clone()));
        auditor
    }

    /// Starts the loading of tokenizers.
    fn load_tokenizers(&mut self, fleet: &Arc<Fleet>) {
        let loader = TokenizerLoader::new(
            Arc::clone(&self.tokenizers),
            Arc::clone(fleet),
            Arc::clone(&self.settings),
            Arc::clone(&self.metrics),
            self.tokenizer.take(),
        );
        self.background
            .spawn("tokenizers", loader.run(self.background.stop.clone()));
    }

    /// Starts the probes and the checks of the fleet's engines, and the reading of their load.
    fn watch_engines(&self, fleet: &Arc<Fleet>, ready: &Arc<Ready>, config: &Config) {
        let prober = HealthProber {
            fleet: Arc::clone(fleet),
            probe: HttpProbe {
                client: self.engines.background().clone(),
                keys: self.engines.keys().clone(),
            },
            period: config.health_interval,
            ready: Arc::clone(ready),
        };
        self.background
            .spawn("health", prober.run(self.background.stop.clone()));
        let checker = RegistrationChecker {
            fleet: Arc::clone(fleet),
            client: self.engines.background().clone(),
            keys: self.engines.keys().clone(),
            tokenizers: Arc::clone(&self.tokenizers),
            settings: Arc::clone(&self.settings),
            metrics: Arc::clone(&self.metrics),
            ready: Arc::clone(ready),
        };
        self.background
            .spawn("checks", checker.run(self.background.stop.clone()));
        let reader = EngineLoadReader {
            fleet: Arc::clone(fleet),
            client: self.engines.background().clone(),
            keys: self.engines.keys().clone(),
            settings: Arc::clone(&self.settings),
        };
        self.background
            .spawn("engine load", reader.run(self.background.stop.clone()));
    }
}

/// The tickets of the admin port, and the task that lets them expire.
fn selections(app: &Arc<App>, tasks: &Tasks) -> Arc<Selections> {
    let selections = Selections::new(app);
    let expiry = Arc::clone(&selections).expire(tasks.stop.clone());
    tasks.spawn("selections", expiry);
    selections
}

fn admin_rules(settings: &Arc<LiveSettings>) -> ClientRules {
    let settings = Arc::clone(settings);
    ClientRules {
        tls: Arc::new(move || settings.current().admin_tls()),
        write_timeout: Some(ADMIN_WRITE_TIMEOUT),
        ..ClientRules::default()
    }
}

fn public_rules(settings: &Arc<LiveSettings>) -> ClientRules {
    let (settings, certificates) = (Arc::clone(settings), Arc::clone(settings));
    ClientRules {
        http2: Http2::Offered,
        tls: Arc::new(move || certificates.current().public_tls()),
        half_closed: Arc::new(move || settings.current().half_closed_clients()),
        write_timeout: Some(PUBLIC_WRITE_TIMEOUT),
        ..ClientRules::default()
    }
}

/// Gateways have many requests on one connection, each with a reader of its own.
fn gateway_rules(settings: &Arc<LiveSettings>) -> ClientRules {
    ClientRules {
        windows: GATEWAY_WINDOWS,
        ..public_rules(settings)
    }
}

/// The keys of the admin port are those of the settings in force.
fn admin_access(settings: &Arc<LiveSettings>, bound: SocketAddr) -> PortAccess {
    let settings = Arc::clone(settings);
    let keys = move || settings.current().admin_keys();
    let access = PortAccess::new(BindScope::of(bound), keys);
    access.warn_if_closed("admin", "keys in the [admin] table of --config");
    access
}

fn body_budget(config: &Config, metrics: &Metrics, clients: &Port) -> BodyBudget {
    BodyBudget::new(
        &config.limits,
        metrics.buffered_bytes().clone(),
        clients.connections.clone(),
        clients.shutdown.force.clone(),
    )
}

/// Files of one rank that is followed in this process: two connections, and pairs of sockets by which
/// libzmq wakes the parts of a context and its four sockets.
const RANK_FILES: u64 = 18;

/// Starts what shows this router to operators: the live page, and its faults in the log.
fn show_to_operators(admin: &Arc<Admin>, background: &Tasks) -> Arc<LiveFeed> {
    let (sampler, feed) = LiveSampler::new(Arc::clone(admin));
    background.spawn("live page", sampler.run(background.stop.clone()));
    let faults = setup_faults::watch(Arc::clone(admin), background.stop.clone());
    background.spawn("setup faults", faults);
    feed
}

fn engine_files(metrics: &Metrics, shares: FileShares) -> EngineFiles {
    let evicted = metrics.connections().evicted.clone();
    EngineFiles {
        requests_max: shares.requests,
        connections: ConnectionFiles::new(shares.connections, evicted),
    }
}

/// The connections that the limit of open files allows, on either side.
fn file_shares(config: &Config, settings: &Settings) -> FileShares {
    let workers = config.workers.iter().chain(&settings.workers);
    let ranks: u64 = workers.map(|worker| u64::from(worker.ranks.get())).sum();
    let threads = connection_threads::FILES * config.threads.connections as u64;
    let shares = FileShares::beside(RANK_FILES * ranks + threads);
    if shares.clients < config.limits.connections {
        tracing::warn!(
            connections = shares.clients,
            "the limit of open files allows fewer client connections than --max-connections"
        );
    }
    shares
}

fn engine_client(
    config: &Config,
    settings: &Arc<LiveSettings>,
    metrics: &Arc<Metrics>,
    files: &EngineFiles,
) -> anyhow::Result<EngineClient> {
    let sockets = match config.nats {
        Some(_) => SocketRule::Refused,
        None => SocketRule::Allowed,
    };
    let (metrics, files) = (Arc::clone(metrics), files.clone());
    EngineClient::new(
        settings,
        metrics,
        files,
        sockets,
        config.threads.connections,
    )
    .context("setting up the HTTP client")
}

/// The settings in force, and their watcher.
fn live_settings(
    config: &Config,
    metrics: &Arc<Metrics>,
) -> anyhow::Result<(Arc<LiveSettings>, SettingsWatcher)> {
    let file = config.settings.clone();
    let settings = file.as_ref().map(|file| file.settings.clone());
    let live = LiveSettings::new(settings.unwrap_or_default());
    let watcher = SettingsWatcher::new(file, Arc::clone(&live), Arc::clone(metrics))
        .context("listening for SIGHUP")?;
    Ok((live, watcher))
}

fn shared_core(config: &Config, router: RouterId) -> Arc<SharedCore> {
    let (seed, _) = Uuid::new_v4().as_u64_pair();
    let core = SharedCore::new(Core::new(CoreConfig {
        knobs: config.knobs.clone(),
        router,
        // Below all that the registry gives: none is taken yet.
        incarnation: Generation(0),
        seed,
    }));
    if config.nats.is_none() {
        core.set_alone();
    }
    core
}

#[cfg(test)]
mod tests;
