//! Fixtures of this crate's tests.

use std::future::Future;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warmroute_plane::{MemoryPlane, MemoryPlaneConfig, Plane};
use warmroute_process::tls::EngineTls;
use warmroute_proto::registry::{Lora, WorkerEntry};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{BlockSize, Generation, Namespace, RouterId, StreamIdentity};

use crate::engine_clients::{EngineClients, SocketRule};
use crate::route::{Core, CoreConfig, Knobs};

pub(crate) const ROUTER: RouterId = RouterId([1; 16]);

pub(crate) const LOG: StreamIdentity = StreamIdentity {
    created_unix_ns: 1,
    nonce: 1,
};

pub(crate) fn core(router: RouterId, knobs: Knobs) -> Core {
    Core::new(CoreConfig {
        knobs,
        router,
        incarnation: Generation(1),
        seed: 1,
    })
}

/// A client as the router has them for engines.
pub(crate) fn engine_clients() -> EngineClients {
    let build = || EngineTls::system().unwrap().client();
    EngineClients::new(SocketRule::Allowed, build).unwrap()
}

pub(crate) fn http_client() -> reqwest::Client {
    EngineTls::system().unwrap().client().build().unwrap()
}

pub(crate) fn plane() -> Arc<dyn Plane> {
    Arc::new(MemoryPlane::new(MemoryPlaneConfig {
        identity: LOG,
        log_bytes_max: 1 << 20,
        queue_max: 16,
    }))
}

pub(crate) fn subjects() -> Subjects {
    Subjects::new(&Namespace::from("t"))
}

/// A worker of the model `m` with the adapter `a`. `block_tokens`: 0 if not reported yet.
pub(crate) fn worker_entry(worker: &str, block_tokens: u32) -> WorkerEntry {
    WorkerEntry {
        models: vec!["m".to_owned()],
        loras: vec![Lora {
            name: "a".to_owned(),
            parent: Some("m".to_owned()),
        }],
        block_size: BlockSize::new(block_tokens),
        main_attention_only: true,
        ..WorkerEntry::new(worker, format!("http://{worker}:1"))
    }
}

/// A task of a test.
pub(crate) struct TestTask {
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl TestTask {
    pub(crate) fn spawn<F>(run: impl FnOnce(CancellationToken) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        tasks.spawn(run(stop.clone()));
        Self { tasks, stop }
    }

    /// Stops it and waits until it has ended.
    pub(crate) async fn end(self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}
