//! What routers say to each other: `replication` without tasks, around the real [`LoadReplica`],
//! and what has to hold of it.

use std::collections::BTreeMap;
use std::time::Duration;

use warmroute_proto::load::LoadDigest;
use warmroute_proto::{Generation, RecordNumber, RouterId};
use warmroute_router::sync::{ASK_TIMEOUT, ReplicaEffect, StatusDetail, ViewStatus, head};

use super::World;
use super::host::{Input, Timer};
use super::plane::At;
use super::router::RouterRun;

/// No test has so many concurrent requests: a count below zero looks like more.
const REQUESTS_MAX: u64 = 1_000_000;

/// What a router held when it wrote a number.
pub(super) type Written = BTreeMap<(RouterId, Generation, Option<RecordNumber>), LoadDigest>;

impl World {
    /// Something was written to the books.
    pub(super) fn wrote(&mut self, at: usize, run: &mut RouterRun) {
        self.write_down(run);
        let now = self.local(self.routers[at].host);
        run.replica.wrote(&mut run.core, now);
    }

    /// What the replica wants done.
    pub(super) fn talk(&mut self, at: usize, run: &mut RouterRun) {
        let host = self.routers[at].host;
        while let Some(effect) = run.replica.effect() {
            match effect {
                ReplicaEffect::Publish(bytes) => {
                    for other in 0..self.routers.len() {
                        let to = self.routers[other].host;
                        self.broadcast(host, to, Input::Load(bytes.clone()));
                    }
                }
                ReplicaEffect::Ask { peer, id, question } => {
                    let timeout = self.hosts[host].clock.span(ASK_TIMEOUT);
                    self.send_host(host, timeout, Input::Answered(peer, id, None));
                    let from = (host, self.hosts[host].life);
                    let is_it = |node: &super::router::Router| {
                        node.run.as_ref().is_some_and(|run| run.id == peer)
                    };
                    // Its own process is being worked on, and is not asked.
                    if let Some(other) = self.routers.iter().position(is_it) {
                        let to = self.routers[other].host;
                        self.send_if_up(host, to, Input::Asked(from, id, question));
                    }
                }
                ReplicaEffect::TakeIncarnation => self.want_lease(host, &mut run.lease),
                ReplicaEffect::Ready => {
                    self.note(|| format!("router {at}: ready"));
                    run.is_ready = true;
                }
            }
        }
        self.write_down(run);
        if let Some(due) = run.replica.due()
            && run.due != Some(due)
        {
            run.due = Some(due);
            // Timers fire late, never early.
            let after = due.saturating_duration_since(self.local(host));
            self.timer(host, after + Duration::from_micros(1), Timer::Due);
        }
    }

    /// To one host, by the plane, if it gets there.
    pub(super) fn send_if_up(&mut self, from: usize, to: usize, input: Input) {
        let is_lost = self.strikes(self.rates.call_lost);
        let after = self.delay();
        if !self.hosts[from].is_cut && !is_lost {
            self.send_host(to, after, input);
        }
    }

    fn write_down(&mut self, run: &RouterRun) {
        let head = head(&run.core);
        let key = (run.id, head.incarnation, head.number);
        self.checks.routers.written.insert(key, head.digest);
    }

    // --- always

    /// A view at a number is what its router held when it wrote that number; nothing is below zero.
    pub(super) fn check_replica(&mut self, at: usize, run: &mut RouterRun) -> Result<(), String> {
        let now = self.local(self.routers[at].host);
        let snapshot = run
            .replica
            .snapshot(&mut run.core, StatusDetail::Sources, now);
        for view in &snapshot.replicas {
            let Some(incarnation) = view.incarnation else {
                continue;
            };
            if !matches!(view.standing, ViewStatus::Own | ViewStatus::Following) {
                continue;
            }
            let key = (view.router, incarnation, view.number);
            let shown = (view.digest.active_requests, view.digest.digest);
            let truth = self.checks.routers.written.get(&key);
            let is_true = match truth {
                Some(truth) => (truth.count, truth.sum) == shown,
                None => view.number.is_none() && shown.0 == 0,
            };
            self.checks.routers.views += 1;
            if !is_true {
                return Err(format!("holds {shown:?} of {key:?}, which held {truth:?}"));
            }
        }
        let counts = run.core.counts();
        let ignored = counts.ignored;
        if (
            ignored.opened_twice,
            ignored.unknown_slot,
            ignored.prefilled_twice,
        ) != (0, 0, 0)
        {
            return Err(format!("was told nonsense: {ignored:?}"));
        }
        let loads = run.core.loads();
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
        let own = run.core.digest(run.id).count;
        let open = run.requests.values().filter(|open| open.slot.is_some());
        if own != open.count() as u64 {
            return Err(format!("has {own} slots of its own, and other requests"));
        }
        Ok(())
    }

    // --- in the end

    /// What is not right yet with the routers.
    pub(super) fn are_routers_ill(&mut self, index_well_since: At) -> Option<String> {
        for at in 0..self.routers.len() {
            let Some(mut run) = self.routers[at].run.take() else {
                return Some(format!("router {at} is down"));
            };
            let ill = self.is_router_ill(at, &mut run, index_well_since);
            self.routers[at].run = Some(run);
            if let Some(ill) = ill {
                return Some(format!("router {at} {ill}"));
            }
        }
        None
    }

    fn is_router_ill(&self, at: usize, run: &mut RouterRun, since: At) -> Option<String> {
        let now = self.local(self.routers[at].host);
        if !run.is_ready {
            return Some("is not ready".to_owned());
        }
        if run.probed.is_none_or(|probed| probed < since) {
            return Some(format!("does not believe the index: {:?}", run.doubted));
        }
        let left = run.core.counts().open_slots;
        let loads = run.core.loads();
        let bears = |row: &warmroute_router::route::SourceLoad| {
            (row.active_requests, row.prefill_tokens, row.decode_blocks) != (0, 0, 0)
        };
        if left > 0 || !run.requests.is_empty() || loads.iter().any(bears) {
            return Some(format!("has {left} slots left: {loads:?}"));
        }
        let snapshot = run
            .replica
            .snapshot(&mut run.core, StatusDetail::Sources, now);
        if snapshot.is_deaf {
            return Some("is deaf".to_owned());
        }
        for (other, node) in self.routers.iter().enumerate() {
            let Some(peer) = node.run.as_ref().filter(|_| other != at) else {
                continue;
            };
            let head = head(&peer.core);
            let view = snapshot.replicas.iter().find(|view| view.router == peer.id);
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

/// How often a replica wants to be ticked.
pub(super) const TICK: Duration = warmroute_router::sync::TICK;
