//! The nats-server of the tests.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "it is the tests' own helper: without a server there is nothing to measure"
)]

#[path = "../../../proto/plane/tests/nats_server/mod.rs"]
mod nats_server;

pub(crate) use nats_server::NatsServer;

/// A server with its own port and directory. Dropping it removes both.
pub(crate) async fn start() -> NatsServer {
    NatsServer::start().await
}
