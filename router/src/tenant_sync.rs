//! The shell of [`crate::tenants`]' limits over several routers: one task that sends this router's
//! reports and receives those of the others ([ADR 22]).
//!
//! [ADR 22]: ../../docs/adr/0022-limits-across-routers.md

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use warmroute_plane::{
    Broadcast, Plane, PlaneError, PlaneStream, RETRY_DELAY, RegistryEvent, RegistryWatch,
};
use warmroute_proto::subject::Subjects;
use warmroute_proto::tenant_use::{REPORTED_TENANTS_MAX, TenantReport};
use warmroute_proto::{RouterId, codec};

use crate::tenants::{SharingRouters, Tenants};

/// Time between two reports.
const REPORT_PERIOD: Duration = Duration::from_millis(100);

/// Time after which a router that does not report counts with the n-th part of the limits.
const SILENT_AFTER: Duration = Duration::from_secs(3);

/// Routers that are counted.
const ROUTERS_MAX: usize = 128;

pub(crate) struct TenantSync {
    pub router: RouterId,
    pub tenants: Arc<Tenants>,
    pub plane: Arc<dyn Plane>,
    pub subjects: Subjects,
}

/// The other routers.
struct TenantPeers {
    /// Those in the registry.
    listed: BTreeSet<RouterId>,
    reports: BTreeMap<RouterId, LastReport>,
}

struct LastReport {
    number: u64,
    at: Instant,
}

impl TenantSync {
    /// Runs until stopped.
    pub(crate) async fn run(self, stop: CancellationToken) {
        stop.run_until_cancelled(self.exchange()).await;
    }

    async fn exchange(self) {
        let mut routers = RegistryWatch::new(Arc::clone(&self.plane), self.subjects.router_keys());
        let mut peers = TenantPeers {
            listed: BTreeSet::new(),
            reports: BTreeMap::new(),
        };
        let mut ticks = interval(REPORT_PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut number = 0;
        let mut received: Option<PlaneStream<Broadcast>> = None;
        let mut retry_at = Instant::now();
        loop {
            tokio::select! {
                message = next_of(&mut received) => match message {
                    Some(message) => self.receive(&message.payload, &mut peers),
                    None => received = None,
                },
                event = routers.next() => self.observe(event, &mut peers),
                _ = ticks.tick() => self.report(&mut number, &mut peers).await,
                opened = self.subscribe(retry_at), if received.is_none() => match opened {
                    Ok(stream) => received = Some(stream),
                    Err(_) => retry_at = Instant::now() + RETRY_DELAY,
                },
            }
        }
    }

    async fn subscribe(&self, at: Instant) -> Result<PlaneStream<Broadcast>, PlaneError> {
        sleep_until(at).await;
        self.plane.subscribe(self.subjects.tenant_reports()).await
    }

    fn observe(&self, event: RegistryEvent, peers: &mut TenantPeers) {
        match event {
            RegistryEvent::Put { key, .. } => {
                let router = self.subjects.key_router(&key);
                let router = router.filter(|router| *router != self.router);
                if peers.listed.len() < ROUTERS_MAX {
                    peers.listed.extend(router);
                }
            }
            RegistryEvent::Gone { key } => {
                if let Some(router) = self.subjects.key_router(&key) {
                    peers.listed.remove(&router);
                    peers.reports.remove(&router);
                }
            }
            RegistryEvent::Current => {}
        }
    }

    /// Late and repeated reports, and those of routers that are not listed, say nothing.
    fn receive(&self, payload: &Bytes, peers: &mut TenantPeers) {
        let Ok(report) = codec::decode::<TenantReport>(payload) else {
            tracing::debug!("unreadable report of a router's tenants");
            return;
        };
        let router = report.router;
        let last = peers.reports.get(&router);
        let is_old = last.is_some_and(|last| report.number <= last.number);
        if is_old || !peers.listed.contains(&router) {
            return;
        }
        let (number, at) = (report.number, Instant::now());
        peers.reports.insert(router, LastReport { number, at });
        self.tenants.receive(router, &report.tenants);
    }

    async fn report(&self, number: &mut u64, peers: &mut TenantPeers) {
        let now = Instant::now();
        let is_live = |last: &LastReport| now.duration_since(last.at) < SILENT_AFTER;
        let reporting = peers.reports.iter().filter(|(_, last)| is_live(last));
        let routers = SharingRouters {
            own: self.router,
            count: peers.listed.len() + 1,
            reporting: reporting.map(|(router, _)| *router).collect(),
        };
        let rows = self.tenants.report(&routers, now.into_std());
        if routers.is_alone() {
            return;
        }
        let mut parts = rows.chunks(REPORTED_TENANTS_MAX);
        // A report without tenants is a sign of life.
        let mut part = parts.next().unwrap_or_default();
        loop {
            *number += 1;
            let report = TenantReport {
                router: self.router,
                number: *number,
                tenants: part.to_vec(),
            };
            if let Ok(bytes) = codec::encode(&report) {
                let sent = self
                    .plane
                    .publish(self.subjects.tenant_reports(), bytes.into());
                // What is lost is in a later report.
                drop(timeout(REPORT_PERIOD, sent).await);
            }
            match parts.next() {
                Some(next) => part = next,
                None => return,
            }
        }
    }
}

/// The next message; pending without a subscription.
async fn next_of(received: &mut Option<PlaneStream<Broadcast>>) -> Option<Broadcast> {
    match received {
        Some(stream) => stream.next().await,
        None => std::future::pending().await,
    }
}
