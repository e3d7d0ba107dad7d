//! The embedded default: plane, indexer and one shim for each worker inside this process. Code
//! above the plane does not differ: every message is encoded and decoded.

mod own_address;
pub(crate) mod supervisor;
pub(crate) mod worker_plan;

use std::sync::Arc;

use anyhow::Context as _;
use uuid::Uuid;
use warmroute_indexer::IndexerConfig;
use warmroute_plane::{MemoryPlane, MemoryPlaneConfig, Plane};
use warmroute_process::tasks::Tasks;
use warmroute_proto::StreamIdentity;

use crate::clock::unix_time;
use crate::config::Config;

pub(crate) use supervisor::{EmbeddedWorkers, SupervisorParts, WorkerSupervisor};

/// Longest lag of a reader. The indexer lags by milliseconds.
const LOG_BYTES_MAX: usize = 64 << 20;

/// Messages that wait for one subscriber.
const QUEUE_MAX: usize = 4096;

/// The plane and the index of this process.
pub(crate) struct Embedded {
    pub plane: Arc<dyn Plane>,
    pub index: warmroute_indexer::Handle,
}

impl Embedded {
    /// Starts the indexer.
    pub(crate) fn start(config: &Config, tasks: &Tasks) -> anyhow::Result<Self> {
        let plane: Arc<dyn Plane> = Arc::new(MemoryPlane::new(MemoryPlaneConfig {
            identity: identity(),
            log_bytes_max: LOG_BYTES_MAX,
            queue_max: QUEUE_MAX,
        }));
        let index = start_indexer(config, &plane, tasks)?;
        Ok(Self { plane, index })
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

fn identity() -> StreamIdentity {
    let (nonce, _) = Uuid::new_v4().as_u64_pair();
    StreamIdentity {
        created_unix_ns: u64::try_from(unix_time().as_nanos()).unwrap_or(u64::MAX),
        nonce,
    }
}
