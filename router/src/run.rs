//! Wiring: from a configuration to running tasks, and back to none.
//!
//! Shutdown has three phases. First the router says that it is not ready and serves on, so that load
//! balancers can notice; then it accepts nothing more, and what is open may finish; when the drain time
//! is over, what is left is cut. Only then does it say goodbye to the other routers: until its last
//! request has ended, they hear of its load. The admin port stays open to the end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::available_parallelism;

use anyhow::Context as _;
use axum::Router;
use tokio::sync::Semaphore;
use tokio::time::{Duration, Instant, MissedTickBehavior, interval, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;
use warmroute_process::listen::bind;
use warmroute_process::server::{Server, Shutdown};
use warmroute_process::signals::{self, Signals};
use warmroute_process::tasks::Tasks;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{Generation, RouterId};

use crate::admin::{self, Admin};
use crate::audit::{Auditor, Rechecks};
use crate::config::{Config, Limits};
use crate::fleet::{Fleet, FleetRegistry, HealthProber, RegistrationChecker};
use crate::index_client::IndexClient;
use crate::journal::Journal;
use crate::metrics::Metrics;
use crate::proxy::{self, App, Budget};
use crate::ready::{Ready, notice};
use crate::replication::{self, Replication};
use crate::route::{Core, CoreConfig};
use crate::shared_core::SharedCore;
use crate::surroundings::Surroundings;
use crate::tokenize::Tokenizer;

/// How often the core lets time pass where no request does.
const TICK: Duration = Duration::from_millis(250);

/// Below the 5 s for which uvicorn, vLLM's HTTP server, keeps an idle connection: the side that
/// writes next should be the one that closes.
const UPSTREAM_IDLE: Duration = Duration::from_secs(4);

/// Few look at the admin port.
const ADMIN_CONNECTIONS_MAX: usize = 256;

/// What background tasks get to end in.
const TASKS_END: Duration = Duration::from_secs(5);

/// The addresses that the router listens on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    pub public: SocketAddr,
    pub admin: SocketAddr,
}

/// A router whose tasks run.
pub struct Running {
    pub addresses: Addresses,
    tasks: Tasks,
    ready: Arc<Ready>,
    desk: Arc<SharedCore>,
    clients: Port,
    operators: Port,
    drain_timeout: Duration,
}

/// One port's connections and how they end.
#[derive(Clone, Default)]
struct Port {
    shutdown: Shutdown,
    connections: TaskTracker,
}

/// How a router ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leave {
    /// Behind a load balancer, which has to notice.
    Noticed,
    /// Somebody waits at a terminal, or the router is broken: nothing new is accepted.
    AtOnce,
}

/// Runs until a signal comes or a task fails. A second signal cuts what is still open.
pub async fn run(config: Config, announce: impl FnOnce(Addresses)) -> anyhow::Result<()> {
    let mut signals = Signals::listen().context("listening for signals")?;
    let running = Running::start(config).await?;
    announce(running.addresses);
    let leave = tokio::select! {
        signal = signals.received() => {
            tracing::info!(signal, "draining");
            if signal == signals::INTERRUPT { Leave::AtOnce } else { Leave::Noticed }
        }
        () = running.failed() => Leave::AtOnce,
    };
    let hurried = async {
        let signal = signals.received().await;
        tracing::warn!(signal, "told again to end");
    };
    running.stop(leave, hurried).await
}

impl Running {
    /// Binds, loads, spawns. Nothing is left behind where it fails before the tasks start.
    pub async fn start(config: Config) -> anyhow::Result<Self> {
        let public = bind(config.public).await?;
        let admin = bind(config.admin).await?;
        let addresses = Addresses {
            public: public.local_addr().context("the public address")?,
            admin: admin.local_addr().context("the admin address")?,
        };
        let metrics = Arc::new(Metrics::new().context("setting up the metrics")?);
        let tokenizer = load_tokenizer(&config).await?;
        let tasks = Tasks::new(metrics.tasks_failed().clone());
        let client = client(&config.limits).context("setting up the HTTP client")?;
        let around = Arc::new(Surroundings::start(&config, &tasks).await?);
        let (clients, operators) = (Port::default(), Port::default());
        let parts = Parts::new(&config, &around, client, metrics, tokenizer);
        let budget = Budget::new(
            (config.limits.buffered_bytes, config.limits.body_bytes),
            parts.metrics.buffered_bytes().clone(),
            clients.connections.clone(),
            clients.shutdown.force.clone(),
        );
        let ready = Arc::clone(&parts.ready);
        let (app, admin_app) = parts.spawn(&config, &around, budget, &tasks);
        let spawn = |name, port: &Port, listener, router, connections_max| {
            let server = Server {
                listener,
                router,
                connections_max,
                connections: app.metrics.connections().clone(),
            };
            tasks.spawn(name, serve(server, port.clone(), &tasks));
        };
        let limits = config.limits;
        let served = proxy::router(Arc::clone(&app));
        spawn("public", &clients, public, served, limits.connections);
        let shown = admin_app;
        spawn("admin", &operators, admin, shown, ADMIN_CONNECTIONS_MAX);
        Ok(Self {
            addresses,
            tasks,
            ready,
            desk: Arc::clone(&app.desk),
            clients,
            operators,
            drain_timeout: limits.drain_timeout,
        })
    }

    /// A task ended that should not have.
    pub async fn failed(&self) {
        self.tasks.down.cancelled().await;
    }

    /// All phases of the shutdown. `hurried`: what is open is to be cut.
    async fn stop(self, leave: Leave, hurried: impl Future<Output = ()>) -> anyhow::Result<()> {
        let failed = self.tasks.down.is_cancelled();
        let now = Instant::now();
        let unready = self.ready.end(now);
        self.desk.core().stop_moves();
        let silent = match leave {
            Leave::Noticed => unready + notice(self.drain_timeout),
            Leave::AtOnce => now,
        };
        let drained = async {
            sleep_until(silent).await;
            self.clients.shutdown.stop.cancel();
            self.clients.connections.close();
            self.clients.connections.wait().await;
        };
        tokio::select! {
            () = drained => tracing::info!("drained"),
            () = sleep_until(now + self.drain_timeout) => self.clients.cut().await,
            () = hurried => self.clients.cut().await,
        }
        self.operators.cut().await;
        if timeout(TASKS_END, self.tasks.end()).await.is_err() {
            tracing::error!("some tasks do not end");
        }
        anyhow::ensure!(!failed, "a task ended early");
        Ok(())
    }
}

impl Port {
    /// Ends what is open.
    async fn cut(&self) {
        self.shutdown.stop.cancel();
        self.connections.close();
        if !self.connections.is_empty() {
            tracing::info!(left = self.connections.len(), "cutting what is open");
        }
        self.shutdown.force.cancel();
        self.connections.wait().await;
    }
}

/// Serves until the shutdown begins, then waits to be told to end like any other task.
fn serve(server: Server, port: Port, tasks: &Tasks) -> impl Future<Output = ()> + Send + use<> {
    let stop = tasks.stop.clone();
    async move {
        let told = port.shutdown.stop.clone();
        server.run(port.shutdown, port.connections).await;
        if told.is_cancelled() {
            stop.cancelled().await;
        }
    }
}

/// What the tasks share.
struct Parts {
    desk: Arc<SharedCore>,
    replication: Replication,
    replicas: replication::ReplicationHandle,
    fleet: Arc<Fleet>,
    registry: Arc<FleetRegistry>,
    index: IndexClient,
    auditor: Arc<Auditor>,
    rechecks: Rechecks,
    journal: Arc<Journal>,
    metrics: Arc<Metrics>,
    client: reqwest::Client,
    tokenizer: Option<Arc<Tokenizer>>,
    ready: Arc<Ready>,
    router: RouterId,
}

impl Parts {
    fn new(
        config: &Config,
        around: &Arc<Surroundings>,
        client: reqwest::Client,
        metrics: Arc<Metrics>,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> Self {
        let router = RouterId(Uuid::new_v4().into_bytes());
        let (seed, _) = Uuid::new_v4().as_u64_pair();
        let core = Core::new(CoreConfig {
            knobs: config.knobs.clone(),
            router,
            // Below all that the registry gives: none is taken yet.
            incarnation: Generation(0),
            seed,
        });
        let desk = SharedCore::new(core);
        let subjects = Subjects::new(&config.namespace);
        let (replication, replicas) =
            Replication::new(router, Arc::clone(&desk), around.plane(), subjects.clone());
        let index = IndexClient::new(around.plane(), subjects.clone());
        let journal = Arc::new(Journal::default());
        let (auditor, rechecks) = Auditor::new(
            Arc::clone(&desk),
            Arc::clone(&journal),
            Arc::clone(&metrics),
            index.clone(),
        );
        let fleet = Fleet::new(Arc::clone(&desk), config.block_size);
        let ready: Arc<Ready> = Arc::default();
        Self {
            registry: Arc::new(FleetRegistry {
                fleet: Arc::clone(&fleet),
                plane: around.plane(),
                subjects,
                ready: Arc::clone(&ready),
                unreadable: metrics.bad_entries().clone(),
                drains_read: AtomicBool::default(),
            }),
            fleet,
            desk,
            replication,
            replicas,
            index,
            auditor: Arc::new(auditor),
            rechecks,
            journal,
            metrics,
            client,
            tokenizer,
            ready,
            router,
        }
    }

    /// Starts the background tasks; what the two ports serve.
    fn spawn(
        self,
        config: &Config,
        around: &Arc<Surroundings>,
        budget: Budget,
        tasks: &Tasks,
    ) -> (Arc<App>, Router) {
        let stop = &tasks.stop;
        self.follow_workers(config, tasks);
        let ready = Arc::clone(&self.ready);
        let known = move || ready.load_known();
        tasks.spawn("replication", self.replication.run(known, stop.clone()));
        let follow = self
            .index
            .clone()
            .follow_replicas(self.metrics.bad_entries().clone(), stop.clone());
        tasks.spawn("indexers", follow);
        tasks.spawn("clock", tick(Arc::clone(&self.desk), stop.clone()));
        tasks.spawn("rechecks", self.rechecks.run(stop.clone()));
        let admin = Admin {
            router: self.router,
            desk: Arc::clone(&self.desk),
            fleet: Arc::clone(&self.fleet),
            registry: self.registry,
            journal: Arc::clone(&self.journal),
            metrics: Arc::clone(&self.metrics),
            ready: Arc::clone(&self.ready),
            replicas: self.replicas,
            around: Arc::clone(around),
        };
        let app = App {
            desk: self.desk,
            fleet: self.fleet,
            index: self.index,
            auditor: self.auditor,
            journal: self.journal,
            metrics: self.metrics,
            budget,
            client: self.client,
            tokenizer: self.tokenizer,
            policy: config.knobs.policy,
            readers: Arc::new(Semaphore::new(
                available_parallelism().map_or(1, usize::from),
            )),
            ready: self.ready,
        };
        (Arc::new(app), admin::router(Arc::new(admin)))
    }

    /// Starts what keeps the workers true: who they are, how they are, which are taken out.
    fn follow_workers(&self, config: &Config, tasks: &Tasks) {
        let stop = &tasks.stop;
        let registry = Arc::clone(&self.registry);
        tasks.spawn("registry", registry.follow(stop.clone()));
        let prober = HealthProber {
            fleet: Arc::clone(&self.fleet),
            client: self.client.clone(),
            period: config.health_interval,
            ready: Arc::clone(&self.ready),
        };
        tasks.spawn("health", prober.run(stop.clone()));
        let checker = RegistrationChecker {
            fleet: Arc::clone(&self.fleet),
            client: self.client.clone(),
            tokenizer: self.tokenizer.clone(),
            metrics: Arc::clone(&self.metrics),
            ready: Arc::clone(&self.ready),
        };
        tasks.spawn("checks", checker.run(stop.clone()));
    }
}

async fn tick(desk: Arc<SharedCore>, stop: CancellationToken) {
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            now = ticks.tick() => desk.core().tick(now.into_std()),
        }
    }
}

async fn load_tokenizer(config: &Config) -> anyhow::Result<Option<Arc<Tokenizer>>> {
    let Some(path) = config.tokenizer.clone() else {
        tracing::warn!("no --tokenizer: prompts in text are routed by load only");
        return Ok(None);
    };
    let shown = path.display().to_string();
    let load = move || Tokenizer::load(&path);
    let tokenizer = tokio::task::spawn_blocking(load)
        .await?
        .with_context(|| format!("loading the tokenizer of {shown}"))?;
    if !tokenizer.has_chat_template() {
        tracing::warn!(
            path = shown,
            "no chat template: chats are routed by load only"
        );
    }
    Ok(Some(Arc::new(tokenizer)))
}

/// The way to the engines. Nothing is followed, unpacked, sent through a proxy or timed as a whole:
/// a stream may last an hour.
pub(crate) fn client(limits: &Limits) -> reqwest::Result<reqwest::Client> {
    reqwest::Client::builder()
        .http1_only()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .referer(false)
        .tcp_nodelay(true)
        .connect_timeout(limits.connect_timeout)
        .pool_idle_timeout(UPSTREAM_IDLE)
        .build()
}
