//! The shell of [`crate::tenants`]' limits over several routers: one task that sends this router's
//! reports and receives those of the others ([ADR 22]).
//!
//! A router *joins* when it has read the registry, its own key in it, and what is left of the limits
//! from each router there. Until then it has a small part of each limit.
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
use warmroute_proto::codec::Message;
use warmroute_proto::subject::Subjects;
use warmroute_proto::tenant_use::{REPORTED_TENANTS_MAX, TenantLevels, TenantReport};
use warmroute_proto::{RouterId, codec};

use crate::ready::Ready;
use crate::tenants::{Newcomers, SharingRouters, Tenants};

/// Time between two reports.
const REPORT_PERIOD: Duration = Duration::from_millis(100);

/// Time after which a router that does not report counts with the n-th part of the limits.
const SILENT_AFTER: Duration = Duration::from_secs(3);

/// Longest time to join. A router that is gone sends no levels.
const JOIN_MAX: Duration = Duration::from_secs(1);

/// Reports for a new router, which may not have subscribed at the first ones.
const NEWCOMER_REPORTS: u32 = 5;

/// Routers that are counted.
const ROUTERS_MAX: usize = 128;

pub(crate) struct TenantSync {
    pub router: RouterId,
    pub tenants: Arc<Tenants>,
    pub ready: Arc<Ready>,
    pub plane: Arc<dyn Plane>,
    pub subjects: Subjects,
}

/// The other routers.
struct TenantPeers {
    /// Those in the registry.
    listed: BTreeSet<RouterId>,
    reports: BTreeMap<RouterId, LastReport>,
    /// `None`: this router has joined.
    joining: Option<JoinProgress>,
    /// Reports that a new router needs.
    newcomer_reports: u32,
}

/// What this router knows before it has joined.
#[derive(Default)]
struct JoinProgress {
    is_listing_read: bool,
    /// The routers of a listing with this key that came before it are all known.
    is_own_key_read: bool,
    /// When both were read.
    since: Option<Instant>,
    /// By router that knows this one: messages that follow in its report of levels, of which none
    /// was lost so far.
    following: BTreeMap<RouterId, u32>,
    /// Routers that know this one, and whose levels are known.
    informed: BTreeSet<RouterId>,
}

impl JoinProgress {
    /// Notes a message of levels. A report begins with the routers that its sender knows; before it
    /// knew this one, its claims did not leave this router's part.
    fn note_levels(&mut self, levels: &TenantLevels, own: RouterId) {
        let (router, following) = (levels.router, levels.following);
        let before = self.following.remove(&router);
        let is_next = before.is_some() && before == following.checked_add(1);
        if !is_next && !levels.known.contains(&own) {
            return;
        }
        match following {
            0 => drop(self.informed.insert(router)),
            1.. => drop(self.following.insert(router, following)),
        }
    }
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
            joining: Some(JoinProgress::default()),
            newcomer_reports: 0,
        };
        let mut ticks = interval(REPORT_PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut number = 0;
        let mut received: Option<PlaneStream<Broadcast>> = None;
        // Not begun again at each turn: it may take longer than the next tick.
        let mut opening = Box::pin(self.subscribe(Instant::now()));
        loop {
            tokio::select! {
                message = next_of(&mut received) => match message {
                    Some(message) => self.receive(&message.payload, &mut peers),
                    None => {
                        received = None;
                        opening.set(self.subscribe(Instant::now()));
                    }
                },
                event = routers.next() => self.observe(event, &mut peers),
                _ = ticks.tick() => self.report(&mut number, &mut peers).await,
                opened = &mut opening, if received.is_none() => match opened {
                    Ok(stream) => received = Some(stream),
                    Err(_) => opening.set(self.subscribe(Instant::now() + RETRY_DELAY)),
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
                let Some(router) = self.subjects.key_router(&key) else {
                    return;
                };
                if router == self.router {
                    if let Some(joining) = &mut peers.joining {
                        joining.is_own_key_read = true;
                    }
                } else if peers.listed.len() < ROUTERS_MAX && peers.listed.insert(router) {
                    peers.newcomer_reports = NEWCOMER_REPORTS;
                }
            }
            RegistryEvent::Gone { key } => {
                if let Some(router) = self.subjects.key_router(&key) {
                    peers.listed.remove(&router);
                    peers.reports.remove(&router);
                }
            }
            RegistryEvent::Current => {
                if let Some(joining) = &mut peers.joining {
                    joining.is_listing_read = true;
                }
            }
        }
    }

    fn receive(&self, payload: &Bytes, peers: &mut TenantPeers) {
        match codec::kind(payload) {
            Some(TenantLevels::KIND) => self.receive_levels(payload, peers),
            Some(_) | None => self.receive_report(payload, peers),
        }
    }

    /// Late and repeated reports, and those of routers that are not listed, say nothing.
    fn receive_report(&self, payload: &Bytes, peers: &mut TenantPeers) {
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

    /// A router that has joined knows the levels itself.
    fn receive_levels(&self, payload: &Bytes, peers: &mut TenantPeers) {
        let Some(joining) = &mut peers.joining else {
            return;
        };
        let Ok(levels) = codec::decode::<TenantLevels>(payload) else {
            tracing::debug!("unreadable levels of a router's tenants");
            return;
        };
        if peers.listed.contains(&levels.router) {
            let now = Instant::now().into_std();
            self.tenants.learn(&levels.tenants, now);
            joining.note_levels(&levels, self.router);
        }
    }

    async fn report(&self, number: &mut u64, peers: &mut TenantPeers) {
        self.join(peers);
        let newcomers = match peers.newcomer_reports {
            0 => Newcomers::None,
            1.. => Newcomers::Some,
        };
        peers.newcomer_reports = peers.newcomer_reports.saturating_sub(1);
        if peers.joining.is_none() {
            self.share(number, peers, newcomers).await;
        }
        match newcomers {
            Newcomers::None => {}
            Newcomers::Some => self.send_levels(peers).await,
        }
    }

    /// Joins if all is known, or if it takes too long.
    fn join(&self, peers: &mut TenantPeers) {
        let Some(joining) = &mut peers.joining else {
            return;
        };
        // No request waits for limits that do not exist. Those of a later reload begin with a small
        // part.
        if self.tenants.are_none() {
            self.ready.limits_shared();
        }
        if !(joining.is_listing_read && joining.is_own_key_read) {
            return;
        }
        let since = *joining.since.get_or_insert_with(Instant::now);
        if peers.listed.is_subset(&joining.informed) || since.elapsed() >= JOIN_MAX {
            peers.joining = None;
            // The others must know this router's claims before they share by demand.
            peers.newcomer_reports = NEWCOMER_REPORTS;
            self.ready.limits_shared();
        }
    }

    /// Takes this router's part of the limits, and reports its use.
    async fn share(&self, number: &mut u64, peers: &TenantPeers, newcomers: Newcomers) {
        let now = Instant::now();
        let is_live = |last: &LastReport| now.duration_since(last.at) < SILENT_AFTER;
        let reporting = peers.reports.iter().filter(|(_, last)| is_live(last));
        let routers = SharingRouters {
            own: self.router,
            count: peers.listed.len() + 1,
            reporting: reporting.map(|(router, _)| *router).collect(),
            newcomers,
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
            self.send(&report).await;
            match parts.next() {
                Some(next) => part = next,
                None => return,
            }
        }
    }

    /// Sends what is left of the limits, to routers that join. One that joins itself knows nothing.
    async fn send_levels(&self, peers: &TenantPeers) {
        let rows = match peers.joining {
            Some(_) => Vec::new(),
            None => self.tenants.levels(Instant::now().into_std()),
        };
        let mut following = rows.len().div_ceil(REPORTED_TENANTS_MAX).max(1);
        let mut parts = rows.chunks(REPORTED_TENANTS_MAX);
        let mut known: Vec<_> = peers.listed.iter().copied().collect();
        while following > 0 {
            following -= 1;
            let levels = TenantLevels {
                router: self.router,
                // In the first message only, so that a reader knows whether it has that.
                known: std::mem::take(&mut known),
                following: following as u32,
                tenants: parts.next().unwrap_or_default().to_vec(),
            };
            self.send(&levels).await;
        }
    }

    /// What is lost is in a later message.
    async fn send(&self, message: &impl Message) {
        if let Ok(bytes) = codec::encode(message) {
            let subject = self.subjects.tenant_reports();
            let sent = self.plane.publish(subject, bytes.into());
            drop(timeout(REPORT_PERIOD, sent).await);
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

#[cfg(test)]
mod tests;
