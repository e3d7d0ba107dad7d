//! A connection to NATS without JetStream: the network of a [`CorePlane`](crate::CorePlane).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;

use super::core::{NatsCore, RoundTrip};
use super::{NamespaceSetup, NatsConfig, NatsError, NatsStats, service, setup};
use crate::{Broadcast, Bus, Connection, PlaneFuture, PlaneLog, PlaneStream, ServiceRequest};

/// A connection to NATS. Clones share it.
#[derive(Clone)]
pub struct NatsBus {
    pub(super) core: Arc<NatsCore>,
}

impl NatsBus {
    /// Connects once. The server needs no JetStream.
    pub async fn connect(config: NatsConfig) -> Result<Self, NatsError> {
        let core = setup::connect(config, RoundTrip::Ping).await?;
        Ok(Self { core })
    }

    /// Like [`NatsBus::connect`], for tools that only read: to a server of any version.
    pub async fn connect_to_any(config: NatsConfig) -> Result<Self, NatsError> {
        let core = setup::connect_to_any(config, RoundTrip::Ping).await?;
        Ok(Self { core })
    }

    /// What a plane without streams needs of the server.
    #[must_use]
    pub fn setup(&self) -> NamespaceSetup {
        NamespaceSetup {
            log: PlaneLog::None,
            server_version: self.core.client.server_info().version,
            differences: setup::server_differences(&self.core),
            ..NamespaceSetup::default()
        }
    }

    /// Counts since the start.
    #[must_use]
    pub fn stats(&self) -> NatsStats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.core.link.counters;
        let mut stats = NatsStats {
            disconnects: of(&counters.disconnects),
            forced_reconnects: of(&counters.forced_reconnects),
            slow_consumers: of(&counters.slow_consumers),
            lame_ducks: of(&counters.lame_ducks),
            closed: of(&counters.closed),
            server_errors: of(&counters.server_errors),
            client_errors: of(&counters.client_errors),
            answers_late: of(&counters.answers_late),
            answers_cut_off: of(&counters.answers_cut_off),
            tails_reopened: of(&counters.tails_reopened),
            watches_reopened: of(&counters.watches_reopened),
            tail_lag: of(&counters.tail_lag),
            snapshots_torn: of(&counters.snapshots_torn),
            ..NatsStats::default()
        };
        if let Some(statistics) = self.core.link.statistics() {
            stats.connects = statistics.connects.load(Ordering::Relaxed);
            stats.in_messages = statistics.in_messages.load(Ordering::Relaxed);
            stats.out_messages = statistics.out_messages.load(Ordering::Relaxed);
            stats.in_bytes = statistics.in_bytes.load(Ordering::Relaxed);
            stats.out_bytes = statistics.out_bytes.load(Ordering::Relaxed);
        }
        stats
    }

    /// What the server refuses to this user: `publish` or `subscribe`, and the subject to grant. At
    /// most 64. A refused publication counts for ten minutes.
    #[must_use]
    pub fn refused_permissions(&self) -> Vec<String> {
        self.core.link.refused_permissions()
    }

    /// The last error that the server reported, if any. A missing permission shows nowhere else.
    #[must_use]
    pub fn last_server_error(&self) -> Option<String> {
        Some(self.core.link.last_server_error()).filter(|error| !error.is_empty())
    }
}

impl Bus for NatsBus {
    fn connection(&self) -> watch::Receiver<Connection> {
        self.core.link.connection()
    }

    fn payload_max(&self) -> usize {
        self.core.payload_max()
    }

    fn publish(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, ()> {
        Box::pin(service::publish(&self.core, subject, payload))
    }

    fn subscribe(&self, subject: String) -> PlaneFuture<'_, PlaneStream<Broadcast>> {
        Box::pin(service::subscribe(Arc::clone(&self.core), subject))
    }

    fn request(
        &self,
        subject: String,
        payload: Bytes,
        deadline: Duration,
    ) -> PlaneFuture<'_, Option<Bytes>> {
        let asked = service::request_if_served(&self.core, subject, payload, deadline);
        Box::pin(asked)
    }

    fn serve(&self, subject: String) -> PlaneFuture<'_, PlaneStream<ServiceRequest>> {
        Box::pin(service::serve(Arc::clone(&self.core), subject))
    }
}
