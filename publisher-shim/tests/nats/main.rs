//! The shim over a real nats-server: kills, lost state, full outboxes, rivals, restarts.
//!
//! What an engine truly holds is kept by the test; equal means that the log's fold, by an
//! independent reader, has that count and digest.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking, its helpers too"
)]

#[path = "../engine/mod.rs"]
mod engine;
#[path = "../../../proto/plane/tests/nats_server/mod.rs"]
mod nats_server;
mod process;
mod shim;
mod world;
