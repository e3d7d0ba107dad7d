//! Every plane passes the same suite.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking, its helpers too"
)]

mod conformance;

use std::sync::Arc;

use warmroute_proto::StreamIdentity;
use warmroute_proto::bus::{MemoryPlane, MemoryPlaneConfig, Plane};

fn memory() -> Arc<dyn Plane> {
    Arc::new(MemoryPlane::new(MemoryPlaneConfig {
        identity: StreamIdentity {
            created_unix_ns: 1_700_000_000_000_000_000,
            nonce: 7,
        },
        log_bytes_max: conformance::LOG_BYTES,
        queue_max: 1024,
    }))
}

conformance::suite!(memory, super::memory);
