//! The embedded default: plane, indexer and one shim for each worker inside this process. Code
//! above the plane does not differ: every message is encoded and decoded.

use std::sync::Arc;

use anyhow::Context as _;
use uuid::Uuid;
use warmroute_indexer::IndexerConfig;
use warmroute_plane::{MemoryPlane, MemoryPlaneConfig, Plane};
use warmroute_process::tasks::Tasks;
use warmroute_proto::StreamIdentity;
use warmroute_shim::{CheckpointStore, ShimConfig, StateDir};

use crate::clock::unix_time;
use crate::config::{Config, WorkerSpec};

/// Longest lag of a reader. The indexer lags by milliseconds.
const LOG_BYTES_MAX: usize = 64 << 20;

/// Messages that wait for one subscriber.
const QUEUE_MAX: usize = 4096;

/// The plane and the index of this process.
pub(crate) struct Embedded {
    pub plane: Arc<dyn Plane>,
    pub index: warmroute_indexer::Handle,
    pub shims: Vec<warmroute_shim::Handle>,
}

impl Embedded {
    /// Starts indexer and shims.
    pub(crate) async fn start(config: &Config, tasks: &Tasks) -> anyhow::Result<Self> {
        let plane: Arc<dyn Plane> = Arc::new(MemoryPlane::new(MemoryPlaneConfig {
            identity: identity(),
            log_bytes_max: LOG_BYTES_MAX,
            queue_max: QUEUE_MAX,
        }));
        let index = start_indexer(config, &plane, tasks)?;
        let mut shims = Vec::new();
        for worker in &config.workers {
            let checkpoints = checkpoints(config, worker).await?;
            shims.push(start_shim(config, worker, checkpoints, &plane, tasks)?);
        }
        Ok(Self {
            plane,
            index,
            shims,
        })
    }
}

fn start_indexer(
    config: &Config,
    plane: &Arc<dyn Plane>,
    tasks: &Tasks,
) -> anyhow::Result<warmroute_indexer::Handle> {
    let indexer = IndexerConfig {
        namespace: config.namespace.clone(),
        max_memory_bytes: None,
    };
    let service = warmroute_indexer::Service::new(indexer, Arc::clone(plane))
        .context("setting up the indexer")?;
    let handle = service.handle();
    let stop = tasks.stop.clone();
    tasks.spawn("indexer", async move {
        if let Err(error) = service.run(stop).await {
            tracing::error!(%error, "indexer failed");
        }
    });
    Ok(handle)
}

/// Where the worker's shim keeps checkpoints, if anywhere.
async fn checkpoints(
    config: &Config,
    worker: &WorkerSpec,
) -> anyhow::Result<Option<Arc<dyn CheckpointStore>>> {
    let Some(dir) = &config.state_dir else {
        return Ok(None);
    };
    let dir = StateDir::open_when_free(dir, &worker.id).await;
    Ok(Some(Arc::new(dir.context("--state-dir")?)))
}

fn start_shim(
    config: &Config,
    worker: &WorkerSpec,
    checkpoints: Option<Arc<dyn CheckpointStore>>,
    plane: &Arc<dyn Plane>,
    tasks: &Tasks,
) -> anyhow::Result<warmroute_shim::Handle> {
    if worker.replay.is_none() {
        tracing::warn!(
            worker = %worker.id,
            "no replay= endpoint: lost events cannot be seen unless the engine reports one"
        );
    }
    let namespace = config.namespace.clone();
    let shim = ShimConfig {
        kv_endpoint: worker.kv.clone(),
        kv_replay_endpoint: worker.replay.clone(),
        ranks: worker.ranks.get(),
        checkpoints,
        ..ShimConfig::new(namespace, worker.id.clone(), worker.url.clone())
    };
    let service = warmroute_shim::Service::new(shim, Arc::clone(plane))
        .with_context(|| format!("setting up the shim of {}", worker.id))?;
    let handle = service.handle();
    let stop = tasks.stop.clone();
    let id = worker.id.clone();
    tasks.spawn("shim", async move {
        if let Err(error) = service.run(stop).await {
            tracing::error!(worker = %id, %error, "shim failed");
        }
    });
    Ok(handle)
}

fn identity() -> StreamIdentity {
    let (nonce, _) = Uuid::new_v4().as_u64_pair();
    StreamIdentity {
        created_unix_ns: u64::try_from(unix_time().as_nanos()).unwrap_or(u64::MAX),
        nonce,
    }
}
