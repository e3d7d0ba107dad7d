//! Prefill that a source has accepted and not computed yet, in seconds.
//!
//! A source's outstanding prefill ([`super::slots`]) falls only when a request returns its first
//! token. The engine computes the prompts one after the other, so that it also falls in between:
//! the source is expected to be free when the seconds of all accepted prompts have passed.
//!
//! Invariant: the backlog is never longer than all outstanding prompts take, and never shorter than
//! seven tenths of that: predicted times scatter, and a prompt that is late is still ahead.

use std::time::Instant;

use super::source_table::{PerSource, SourceId};

/// Share of the outstanding prefill that is assumed when its time is over.
const LATE: f64 = 0.7;

/// A longer backlog is as bad.
const BACKLOG_SECS_MAX: f64 = 3600.0;

/// When each source is expected to be free.
#[derive(Clone, Debug, Default)]
pub struct PrefillBacklog {
    /// The first time that was counted. Times are kept as numbers, which a decision compares for
    /// every source.
    epoch: Option<Instant>,
    free_at: PerSource<BacklogTime>,
}

/// Seconds since a backlog's epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BacklogTime(f64);

impl PrefillBacklog {
    /// A request with so many seconds of prefill was accepted.
    pub fn added(&mut self, source: SourceId, secs: f64, now: Instant) {
        self.epoch.get_or_insert(now);
        let now = self.time(now);
        let free_at = self.free_at.get_mut(source);
        free_at.0 = free_at.0.max(now.0) + bounded(secs);
    }

    /// A request returned its first token or ended; so many seconds of prefill are outstanding.
    pub fn shortened(&mut self, source: SourceId, outstanding_secs: f64, now: Instant) {
        let latest = self.time(now).0 + bounded(outstanding_secs);
        let free_at = self.free_at.get_mut(source);
        free_at.0 = free_at.0.min(latest);
    }

    /// The time for [`Self::secs`].
    #[must_use]
    pub fn time(&self, now: Instant) -> BacklogTime {
        let elapsed = self.epoch.map(|epoch| now.saturating_duration_since(epoch));
        BacklogTime(elapsed.map_or(0.0, |elapsed| elapsed.as_secs_f64()))
    }

    /// Seconds until the source has computed what it accepted, `outstanding_secs` in all.
    #[must_use]
    #[inline]
    pub fn secs(&self, source: SourceId, outstanding_secs: f64, now: BacklogTime) -> f64 {
        let left = (self.free_at.of(source).0 - now.0).max(0.0);
        left.min(outstanding_secs).max(LATE * outstanding_secs)
    }
}

fn bounded(secs: f64) -> f64 {
    if secs.is_nan() {
        0.0
    } else {
        secs.clamp(0.0, BACKLOG_SECS_MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    use crate::testing::{source_id, start};

    fn setup() -> (PrefillBacklog, SourceId, Instant) {
        (PrefillBacklog::default(), source_id(), start())
    }

    impl PrefillBacklog {
        fn secs_at(&self, source: SourceId, outstanding_secs: f64, now: Instant) -> f64 {
            self.secs(source, outstanding_secs, self.time(now))
        }
    }

    #[test]
    fn it_falls_with_time_to_a_share_of_what_is_outstanding() {
        let (mut backlog, id, now) = setup();
        assert_eq!(backlog.secs_at(id, 0.0, now), 0.0);
        backlog.added(id, 2.0, now);
        backlog.added(id, 3.0, now);
        let after = |secs| backlog.secs_at(id, 5.0, now + Duration::from_secs(secs));
        assert_eq!(after(0), 5.0);
        assert_eq!(after(1), 4.0);
        assert_eq!(after(2), LATE * 5.0);
        assert_eq!(after(100), LATE * 5.0);
    }

    #[test]
    fn a_first_token_shortens_it_to_what_is_outstanding() {
        let (mut backlog, id, now) = setup();
        backlog.added(id, 2.0, now);
        backlog.added(id, 3.0, now);
        backlog.shortened(id, 3.0, now);
        assert_eq!(backlog.secs_at(id, 3.0, now), 3.0);
        let later = now + Duration::from_millis(500);
        assert_eq!(backlog.secs_at(id, 3.0, later), 2.5);
        // A shorter backlog stays as it is.
        backlog.shortened(id, 3.0, later);
        assert_eq!(backlog.secs_at(id, 3.0, later), 2.5);
        backlog.shortened(id, 0.0, later);
        assert_eq!(backlog.secs_at(id, 0.0, later), 0.0);
    }

    #[test]
    fn absurd_seconds_are_bounded() {
        let (mut backlog, id, now) = setup();
        backlog.added(id, f64::NAN, now);
        backlog.added(id, 1e300, now);
        assert!(backlog.secs_at(id, 1e300, now).is_finite());
    }
}
