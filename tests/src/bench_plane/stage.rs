//! Engine, shim and indexer around one namespace of the server.

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warmroute_indexer::IndexerConfig;
use warmroute_plane::{InitConfig, NatsConfig, NatsPlane, Plane};
use warmroute_proto::query::SourceState;
use warmroute_proto::{Namespace, WorkerId};
use warmroute_shim::ShimConfig;

use crate::engine::Engine;
use crate::server::NatsServer;

const READY_MAX: Duration = Duration::from_secs(30);

pub(crate) struct Stage {
    pub(crate) engine: Arc<Engine>,
    pub(crate) index: warmroute_indexer::Handle,
    pub(crate) shim: warmroute_shim::Handle,
    /// A router's connection.
    pub(crate) plane: NatsPlane,
    pub(crate) namespace: Namespace,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// Creates an unused namespace with its streams.
pub(crate) async fn namespace(server: &NatsServer) -> anyhow::Result<(Namespace, NatsPlane)> {
    let namespace = Namespace::from(format!("bench-{}", fastrand::u64(..)).as_str());
    let config = config(server, &namespace, "init");
    let sizes = InitConfig {
        max_bytes: 1 << 30,
        snapshots_max_bytes: 1 << 26,
        ..InitConfig::default()
    };
    Ok((namespace, NatsPlane::init(config, sizes).await?))
}

pub(crate) fn config(server: &NatsServer, namespace: &Namespace, name: &str) -> NatsConfig {
    NatsConfig::new(server.url(), namespace.clone(), name)
}

impl Stage {
    pub(crate) async fn start(server: &NatsServer, ranks: u32) -> anyhow::Result<Self> {
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let (namespace, plane) = namespace(server).await?;
        let engine = Engine::start(ranks, &tasks, &stop).await?;
        let connect = async |name: &str| {
            let plane = NatsPlane::connect(config(server, &namespace, name)).await?;
            anyhow::Ok(Arc::new(plane) as Arc<dyn Plane>)
        };
        let indexer = IndexerConfig {
            namespace: namespace.clone(),
            max_memory_bytes: None,
        };
        let indexer = warmroute_indexer::Service::new(indexer, connect("indexer").await?)?;
        let index = indexer.handle();
        tasks.spawn(indexer.run(stop.clone()));
        let endpoint = |port: u16| Some(format!("tcp://127.0.0.1:{port}"));
        let shim = ShimConfig {
            kv_endpoint: endpoint(engine.kv_port),
            kv_replay_endpoint: endpoint(engine.replay_port),
            ranks,
            ..ShimConfig::new(
                namespace.clone(),
                WorkerId::from("engine"),
                engine.url.clone(),
            )
        };
        let shim = warmroute_shim::Service::new(shim, connect("shim").await?)?;
        let shim_handle = shim.handle();
        tasks.spawn(shim.run(stop.clone()));
        let stage = Self {
            engine: Arc::new(engine),
            index,
            shim: shim_handle,
            plane,
            namespace,
            tasks,
            stop,
        };
        stage.until_exact().await?;
        Ok(stage)
    }

    async fn until_exact(&self) -> anyhow::Result<()> {
        let begun = Instant::now();
        loop {
            let sources = self.index.digest().sources;
            let exact = sources
                .iter()
                .filter(|source| source.state == SourceState::Exact);
            if exact.count() == self.engine.ranks() {
                return Ok(());
            }
            ensure!(
                begun.elapsed() < READY_MAX,
                "the sources do not become exact: {sources:?}"
            );
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Records of all sources that the log acknowledged.
    pub(crate) fn records(&self) -> u64 {
        let sources = self.shim.digest().sources;
        sources
            .iter()
            .filter_map(|source| source.number)
            .map(|number| number.0 + 1)
            .sum()
    }

    pub(crate) async fn end(self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}
