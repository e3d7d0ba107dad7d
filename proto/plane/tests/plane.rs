//! Every plane passes the same suite.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking, its helpers too"
)]

mod conformance;

use std::sync::Arc;

use conformance::{Fixture, Steps};
use warmroute_plane::{MemoryPlane, MemoryPlaneConfig, Plane};
use warmroute_proto::StreamIdentity;

struct Memory(MemoryPlane);

const fn identity(nonce: u64) -> StreamIdentity {
    StreamIdentity {
        created_unix_ns: 1_700_000_000_000_000_000,
        nonce,
    }
}

async fn memory() -> Memory {
    std::future::ready(Memory(MemoryPlane::new(MemoryPlaneConfig {
        identity: identity(7),
        log_bytes_max: conformance::LOG_BYTES,
        queue_max: 1024,
    })))
    .await
}

impl Fixture for Memory {
    fn plane(&self) -> Arc<dyn Plane> {
        Arc::new(self.0.clone())
    }

    fn recreate_log(&self) -> Steps<'_> {
        self.0.recreate_log(identity(8));
        Box::pin(std::future::ready(()))
    }
}

conformance::suite!(memory, super::memory);
