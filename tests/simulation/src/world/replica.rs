//! What has to hold of what routers know of each other's load.

use std::collections::BTreeMap;

use warmroute_proto::load::LoadDigest;
use warmroute_proto::{Generation, RecordNumber, RouterId};
use warmroute_router::sync::{ReplicaStatus, StatusDetail, ViewStatus, head};

use super::World;
use super::check::SEEN_WITHIN;
use super::host::Kind;
use super::plane::At;

/// No test has so many concurrent requests: a count below zero looks like more.
const REQUESTS_MAX: u64 = 1_000_000;

/// What a router held when it wrote a number.
pub(super) type Written = BTreeMap<(RouterId, Generation, Option<RecordNumber>), LoadDigest>;

impl World {
    // --- always

    /// The router's own report of its views. Its tasks run for it.
    fn replica_status(&mut self, at: usize) -> Option<ReplicaStatus> {
        let host = self.routers[at].host;
        self.step(host);
        let replication = self.routers[at].run.as_ref()?.replication.clone();
        let running = self.hosts[host].running.as_mut()?;
        let status = running
            .process
            .answer(replication.status(StatusDetail::Sources));
        self.step(host);
        status?
    }

    /// A view at a number is what its router held when it wrote that number, and one of a dead router
    /// is empty; nothing is below zero.
    pub(super) fn check_replica(&mut self, at: usize) -> Result<(), String> {
        let Some(snapshot) = self.replica_status(at) else {
            return Ok(());
        };
        for view in &snapshot.replicas {
            if view.standing == ViewStatus::Dead && view.digest.active_requests > 0 {
                return Err(format!("holds requests of a dead router: {view:?}"));
            }
            let Some(incarnation) = view.incarnation else {
                continue;
            };
            if !matches!(view.standing, ViewStatus::Own | ViewStatus::Following) {
                continue;
            }
            let key = (view.router, incarnation, view.number);
            let shown = (view.digest.active_requests, view.digest.digest);
            let truth = self
                .checks
                .routers
                .written
                .lock()
                .unwrap()
                .get(&key)
                .copied();
            let is_true = match truth {
                Some(truth) => (truth.count, truth.sum) == shown,
                None => view.number.is_none() && shown.0 == 0,
            };
            self.checks.routers.views += 1;
            if !is_true {
                return Err(format!("holds {shown:?} of {key:?}, which held {truth:?}"));
            }
        }
        let Some(run) = &self.routers[at].run else {
            return Ok(());
        };
        let core = run.shared_core().core();
        let counts = core.counts();
        let ignored = counts.ignored;
        if (
            ignored.opened_twice,
            ignored.unknown_slot,
            ignored.prefilled_twice,
        ) != (0, 0, 0)
        {
            return Err(format!("was told nonsense: {ignored:?}"));
        }
        let loads = core.loads();
        let active: u64 = loads.iter().map(|row| u64::from(row.active_requests)).sum();
        let is_sound = |row: &warmroute_router::route::SourceLoad| {
            row.prefill_tokens < REQUESTS_MAX && row.decode_blocks < REQUESTS_MAX
        };
        if active != counts.open_slots as u64 || !loads.iter().all(is_sound) {
            return Err(format!(
                "counts {} open slots as {loads:?}",
                counts.open_slots
            ));
        }
        let own = core.digest(run.id).count;
        if own != run.client.observed.held() {
            return Err(format!("has {own} slots of its own, and other requests"));
        }
        Ok(())
    }

    /// A router queries no replica that the registry has not listed for long.
    pub(super) fn check_asked(&mut self, from: usize, subject: &str) {
        let host = &self.hosts[from];
        let is_lossy = self.rates.call_lost > 0 || self.rates.late > 0 || self.was_late;
        let undisturbed = host.disturbed_at.max(host.stalled_until);
        let is_router = matches!(host.kind, Kind::Router(_));
        if !is_router || host.is_cut || is_lossy || undisturbed + SEEN_WITHIN > self.now {
            return;
        }
        let mut keys = self.checks.registry.registered.iter();
        let is_it = |key: &str| {
            let indexer = self.subjects.key_indexer(key);
            indexer.is_some_and(|id| self.subjects.query_at(&id) == subject)
        };
        let long_gone = keys
            .find(|(key, (at, is_there))| !is_there && *at + SEEN_WITHIN < self.now && is_it(key));
        if let Some((key, (at, _))) = long_gone {
            let why = format!("host {from} queries {key}, which is gone since {at:?}");
            self.fail(why);
        }
    }

    // --- in the end

    /// What is not right yet with the routers.
    pub(super) fn are_routers_ill(&mut self, index_well_since: At) -> Option<String> {
        (0..self.routers.len()).find_map(|at| {
            let ill = self.is_router_ill(at, index_well_since)?;
            Some(format!("router {at} {ill}"))
        })
    }

    fn is_router_ill(&mut self, at: usize, since: At) -> Option<String> {
        let status = self.replica_status(at);
        let (Some(status), Some(run)) = (status, &self.routers[at].run) else {
            return Some("is down".to_owned());
        };
        if !run.is_ready() {
            return Some("is not ready".to_owned());
        }
        if run.probed.is_none_or(|probed| probed < since) {
            return Some(format!("does not believe the index: {:?}", run.doubted));
        }
        let left = run.shared_core().core().counts().open_slots;
        let loads = run.shared_core().core().loads();
        let bears = |row: &warmroute_router::route::SourceLoad| {
            (row.active_requests, row.prefill_tokens, row.decode_blocks) != (0, 0, 0)
        };
        if left > 0 || !run.clients.is_empty() || loads.iter().any(bears) {
            return Some(format!("has {left} slots left: {loads:?}"));
        }
        let created = &self.checks.registry.created;
        let taken = created.get(&self.subjects.router_key(run.id));
        let taken = taken.map(|revision| Generation(revision.0));
        if status.incarnation < taken {
            let incarnation = status.incarnation;
            return Some(format!(
                "has {incarnation:?} of a lease before its own of {taken:?}"
            ));
        }
        if status.is_deaf {
            return Some("is deaf".to_owned());
        }
        for (other, node) in self.routers.iter().enumerate() {
            let Some(peer) = node.run.as_ref().filter(|_| other != at) else {
                continue;
            };
            let head = head(&peer.shared_core().core());
            let view = status.replicas.iter().find(|view| view.router == peer.id);
            let is_level = view.is_some_and(|view| {
                view.standing == ViewStatus::Following
                    && (view.incarnation, view.number) == (Some(head.incarnation), head.number)
                    && view.digest.digest == head.digest.sum
            });
            if !is_level {
                return Some(format!("is at {view:?} of router {other}, at {head:?}"));
            }
        }
        None
    }
}
