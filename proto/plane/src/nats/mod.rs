//! The plane on NATS JetStream.
//!
//! [`NatsPlane::connect`] verifies the set-up of the namespace; [`NatsPlane::init`] creates it. The
//! log is one stream, the registry a key-value bucket, the snapshots an object store (`layout` has
//! their names and configuration). Request/reply and broadcast are core NATS.
//!
//! A server may restart, lose the end of its log, or be replaced, and the client hides some of it.
//! Therefore positions are kept here, consumers are short-lived (`pull`, `tail`, `watch`), and
//! requests in flight fail immediately at a disconnect (`link`, `core`). Users repeat them, because
//! only they know the order.

mod bus;
mod config;
mod core;
mod inspect;
mod layout;
mod link;
mod permissions;
mod pull;
mod registry;
mod service;
mod setup;
mod snapshots;
mod supervision;
mod tail;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use self::core::{NatsCore, OutgoingMessage, RoundTrip};
use self::layout::Sizes;
use super::{
    Appended, Broadcast, Connection, LogMessage, LogStatus, LogTail, Plane, PlaneFuture,
    PlaneStream, PutIf, RegistryEntry, RegistryEvent, Revision, ServiceRequest,
};
use warmroute_proto::LogPosition;

pub use bus::NatsBus;
pub use config::{
    ExistingStreams, InitConfig, NatsAuth, NatsConfig, NatsError, NatsTls, SetupDifference,
};
pub use inspect::{ClockOffset, NamespaceSetup, StreamRole, StreamUsage, unix_ns_of_rfc3339};
pub use link::POLL;
pub use permissions::{PermissionViolation, RefusedPermissions};
pub use supervision::{INBOX_PROBE, InboxProbe, next_supervised};

/// A plane on NATS. Clones share the connection.
#[derive(Clone)]
pub struct NatsPlane {
    core: Arc<NatsCore>,
}

impl NatsPlane {
    /// Connects once, and verifies that the namespace is set up.
    pub async fn connect(config: NatsConfig) -> Result<Self, NatsError> {
        let every = config.setup_check;
        let core = setup::connect(config, RoundTrip::Stream).await?;
        setup::verify(&core, Sizes::Bounded).await?;
        setup::keep_checked(&core, every);
        Ok(Self { core })
    }

    /// Like [`NatsPlane::connect`], but creates what is missing first. Changes nothing that exists
    /// but bounds, and these only if `init` says so; the error lists the differences to it.
    pub async fn init(config: NatsConfig, init: InitConfig) -> Result<Self, NatsError> {
        let every = config.setup_check;
        let core = setup::connect(config, RoundTrip::Stream).await?;
        setup::init(&core, &init).await?;
        setup::keep_checked(&core, every);
        Ok(Self { core })
    }

    /// Connects and reports the set-up without refusing it, for tools that only read. `unix_ns` is
    /// this machine's clock.
    pub async fn inspect(
        config: NatsConfig,
        unix_ns: fn() -> u64,
    ) -> Result<(Self, NamespaceSetup), NatsError> {
        let core = setup::connect_to_any(config, RoundTrip::Stream).await?;
        let setup = inspect::inspect(&core, unix_ns).await;
        Ok((Self { core }, setup))
    }

    /// The connection.
    #[must_use]
    pub fn bus(&self) -> NatsBus {
        NatsBus {
            core: Arc::clone(&self.core),
        }
    }

    /// See [`NatsBus::stats`].
    #[must_use]
    pub fn stats(&self) -> NatsStats {
        self.bus().stats()
    }

    /// See [`NatsBus::last_server_error`].
    #[must_use]
    pub fn last_server_error(&self) -> Option<String> {
        self.bus().last_server_error()
    }
}

/// Counts of a connection. The client drops events under load, so that most counts are lower
/// bounds; `connects` is exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NatsStats {
    pub connects: u64,
    pub disconnects: u64,
    /// Reconnects forced because a subscription was missing.
    pub forced_reconnects: u64,
    /// Messages that a full subscription dropped.
    pub slow_consumers: u64,
    pub lame_ducks: u64,
    pub closed: u64,
    pub server_errors: u64,
    pub client_errors: u64,
    /// Acknowledgements and answers that timed out.
    pub answers_late: u64,
    /// Acknowledgements and answers that a disconnect cut off.
    pub answers_cut_off: u64,
    /// Consumers opened for tails, the first ones too.
    pub tails_reopened: u64,
    /// Consumers opened for watches, the first ones too.
    pub watches_reopened: u64,
    /// Messages after the last one that a tail delivered.
    pub tail_lag: u64,
    /// Reads of snapshots whose chunks are missing or whose description is damaged.
    pub snapshots_torn: u64,
    pub in_messages: u64,
    pub out_messages: u64,
    pub in_bytes: u64,
    pub out_bytes: u64,
}

impl Plane for NatsPlane {
    fn payload_max(&self) -> usize {
        self.core.payload_max()
    }

    fn connection(&self) -> tokio::sync::watch::Receiver<Connection> {
        self.core.link.connection()
    }

    fn log_status(&self) -> PlaneFuture<'_, LogStatus> {
        Box::pin(tail::status(&self.core))
    }

    fn append(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, Appended> {
        Box::pin(async move {
            let stored = self
                .core
                .store(OutgoingMessage::new(subject, payload))
                .await?;
            let log = self.core.layout.log();
            let acknowledged: Appended =
                Box::pin(async move { stored.acknowledged(&log).await.map(LogPosition) });
            Ok(acknowledged)
        })
    }

    fn last_on(&self, subject: String) -> PlaneFuture<'_, Option<LogMessage>> {
        Box::pin(async move { tail::last_on(&self.core, &subject).await })
    }

    fn at(&self, position: LogPosition) -> PlaneFuture<'_, Option<LogMessage>> {
        Box::pin(tail::at(&self.core, position))
    }

    fn tail(&self, after: LogPosition, batch_max: usize) -> PlaneFuture<'_, LogTail> {
        Box::pin(tail::tail(Arc::clone(&self.core), after, batch_max))
    }

    fn get(&self, key: String) -> PlaneFuture<'_, Option<RegistryEntry>> {
        Box::pin(async move { registry::get(&self.core, &key).await })
    }

    fn put(
        &self,
        key: String,
        value: Bytes,
        condition: PutIf,
        lease: Option<Duration>,
    ) -> PlaneFuture<'_, Revision> {
        Box::pin(async move { registry::put(&self.core, &key, value, condition, lease).await })
    }

    fn delete(&self, key: String, revision: Revision) -> PlaneFuture<'_, ()> {
        Box::pin(async move { registry::delete(&self.core, &key, revision).await })
    }

    fn watch(&self, prefix: String) -> PlaneFuture<'_, PlaneStream<RegistryEvent>> {
        Box::pin(watch::watch(Arc::clone(&self.core), prefix))
    }

    fn put_snapshot(&self, name: String, blob: Bytes) -> PlaneFuture<'_, ()> {
        Box::pin(snapshots::put(&self.core, name, blob))
    }

    fn get_snapshot(&self, name: String) -> PlaneFuture<'_, Option<Bytes>> {
        Box::pin(async move { snapshots::get(&self.core, &name).await })
    }

    fn delete_snapshot(&self, name: String) -> PlaneFuture<'_, ()> {
        Box::pin(async move { snapshots::delete(&self.core, &name).await })
    }

    fn snapshots(&self) -> PlaneFuture<'_, Vec<String>> {
        Box::pin(snapshots::list(&self.core))
    }

    fn request(
        &self,
        subject: String,
        payload: Bytes,
        deadline: Duration,
    ) -> PlaneFuture<'_, Bytes> {
        Box::pin(service::request(&self.core, subject, payload, deadline))
    }

    fn serve(&self, subject: String) -> PlaneFuture<'_, PlaneStream<ServiceRequest>> {
        Box::pin(service::serve(Arc::clone(&self.core), subject))
    }

    fn publish(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, ()> {
        Box::pin(service::publish(&self.core, subject, payload))
    }

    fn subscribe(&self, subject: String) -> PlaneFuture<'_, PlaneStream<Broadcast>> {
        Box::pin(service::subscribe(Arc::clone(&self.core), subject))
    }
}
