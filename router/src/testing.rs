//! Fixtures of this crate's tests.

use std::sync::Arc;

use warmroute_plane::{MemoryPlane, MemoryPlaneConfig, Plane};
use warmroute_process::tls::EngineTls;
use warmroute_proto::registry::{Lora, WorkerEntry};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{BlockSize, Generation, Namespace, RouterId, StreamIdentity};

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
        worker: worker.into(),
        url: format!("http://{worker}:1"),
        models: vec!["m".to_owned()],
        loras: vec![Lora {
            name: "a".to_owned(),
            parent: Some("m".to_owned()),
        }],
        ranks: 1,
        block_size: BlockSize::new(block_tokens),
        blocks_per_rank: None,
        max_model_len: None,
        main_attention_only: true,
        version: "0".to_owned(),
    }
}
