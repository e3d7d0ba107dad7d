//! Workers that are gone without a sign, as when a node crashes with engine and shim. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use warmroute_plane::{LEASE_RENEWAL, LEASE_TTL};
use warmroute_proto::WorkerId;

/// A lost worker is shown for this time: it comes back, or another one was started in its place.
const KEPT: Duration = Duration::from_secs(3600);

/// At the bound the one that was lost first leaves.
const LOST_MAX: usize = 256;

/// A registration that was renewed more recently was deleted. An older one expired.
const EXPIRED_AFTER: Duration = LEASE_TTL.saturating_sub(LEASE_RENEWAL);

/// Whether a registration that ended had expired.
pub(super) fn is_expiry(renewed: Instant, now: Instant) -> bool {
    now.saturating_duration_since(renewed) >= EXPIRED_AFTER
}

/// When each lost worker was registered last.
#[derive(Debug, Default)]
pub(crate) struct LostWorkers(BTreeMap<WorkerId, Instant>);

impl LostWorkers {
    pub(super) fn add(&mut self, worker: WorkerId, renewed: Instant, now: Instant) {
        self.0.retain(|_, lost| is_kept(*lost, now));
        self.0.insert(worker, renewed);
        if self.0.len() > LOST_MAX {
            let first = self.0.iter().min_by_key(|(_, lost)| **lost);
            if let Some(first) = first.map(|(worker, _)| worker.clone()) {
                self.0.remove(&first);
            }
        }
    }

    /// The worker is registered.
    pub(super) fn found(&mut self, worker: &WorkerId) {
        self.0.remove(worker);
    }

    /// Each lost worker, with the time since its last registration.
    pub(crate) fn at(&self, now: Instant) -> Vec<(WorkerId, Duration)> {
        let shown = self.0.iter().filter(|(_, lost)| is_kept(**lost, now));
        let silent = |lost: &Instant| now.saturating_duration_since(*lost);
        shown
            .map(|(worker, lost)| (worker.clone(), silent(lost)))
            .collect()
    }
}

fn is_kept(lost: Instant, now: Instant) -> bool {
    now.saturating_duration_since(lost) < KEPT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::disallowed_methods, reason = "an origin of virtual time")]
    fn origin() -> Instant {
        Instant::now()
    }

    #[test]
    fn the_number_of_lost_workers_and_their_time_are_bounded() {
        let start = origin();
        let mut lost = LostWorkers::default();
        for number in 0..=LOST_MAX {
            let renewed = start + Duration::from_secs(number as u64);
            lost.add(
                WorkerId::from(format!("w{number}").as_str()),
                renewed,
                renewed,
            );
        }
        let now = start + Duration::from_secs(LOST_MAX as u64);
        let shown = lost.at(now);
        assert_eq!(shown.len(), LOST_MAX);
        let first = WorkerId::from("w0");
        assert!(shown.iter().all(|(worker, _)| *worker != first));
        lost.found(&WorkerId::from("w1"));
        assert_eq!(lost.at(now).len(), LOST_MAX - 1);
        assert_eq!(lost.at(now + KEPT), []);
    }
}
