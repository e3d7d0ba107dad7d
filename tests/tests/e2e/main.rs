//! The whole product in real processes: HTTP and ZMQ between mock engines and routers, embedded and
//! over a real nats-server.
//!
//! No assertion depends on time: tests wait for conditions, and print figures.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test fails by panicking and tells its figures, its helpers too"
)]

/// Makes two tests of one scenario: embedded, and over NATS.
macro_rules! on_both_planes {
    ($scenario:ident) => {
        mod $scenario {
            use crate::fleet::Mode;

            #[tokio::test(flavor = "multi_thread")]
            async fn embedded() {
                super::$scenario(Mode::Embedded).await;
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn on_nats() {
                let mode = Mode::Nats {
                    indexers: 2,
                    routers: 2,
                };
                super::$scenario(mode).await;
            }
        }
    };
}

mod abuse;
mod access_log;
mod adapters;
mod bench_plane;
mod broken_worker;
mod browser;
mod churn;
mod conformance;
mod credit;
mod engine_load;
mod faults;
mod fleet;
mod gateway;
mod hostile;
mod idle_connections;
mod images;
mod live_page;
mod mixed;
#[path = "../../../proto/plane/tests/nats_server/mod.rs"]
mod nats_server;
mod own_engine;
mod pages;
mod plane;
mod prometheus;
mod prompt_ids;
mod queue_memory;
mod recording;
mod resume;
mod roles;
mod scaling;
mod separation;
mod sglang;
mod steady;
mod strange_events;
mod tiers;
mod tls;
mod trtllm;
mod unix_socket;
mod windows;
mod without_events;
mod workers;
