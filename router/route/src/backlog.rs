//! Prefill that a source has accepted and not computed yet, in seconds.
//!
//! A source's outstanding prefill ([`super::slots`]) falls only when a request returns its first
//! token. The engine computes the prompts one after the other, so that it also falls in between:
//! the source is expected to be free when the seconds of all accepted prompts have passed.
//!
//! Invariant: the backlog is never longer than all outstanding prompts take, and never shorter than
//! a fifth of that, so that a wrong rate is corrected by each first token.

use std::time::{Duration, Instant};

use super::source_table::{PerSource, SourceId};

/// Share of the outstanding prefill that is assumed when its time is over.
const LATE: f64 = 0.2;

/// A longer backlog is as bad.
const BACKLOG_SECS_MAX: f64 = 3600.0;

/// When each source is expected to be free.
#[derive(Clone, Debug, Default)]
pub struct PrefillBacklog(PerSource<Option<Instant>>);

impl PrefillBacklog {
    /// A request with so many seconds of prefill was accepted.
    pub fn added(&mut self, source: SourceId, secs: f64, now: Instant) {
        let free_at = self.0.get_mut(source);
        let from = free_at.map_or(now, |at| at.max(now));
        *free_at = from.checked_add(duration(secs));
    }

    /// A request returned its first token or ended; so many seconds of prefill are outstanding.
    pub fn shortened(&mut self, source: SourceId, outstanding_secs: f64, now: Instant) {
        let free_at = self.0.get_mut(source);
        let latest = now.checked_add(duration(outstanding_secs));
        *free_at = (*free_at).min(latest);
    }

    /// Seconds until the source has computed what it accepted, `outstanding_secs` in all.
    #[must_use]
    #[inline]
    pub fn secs(&self, source: SourceId, outstanding_secs: f64, now: Instant) -> f64 {
        // Many sources, and reading the time left takes long.
        if outstanding_secs == 0.0 {
            return 0.0;
        }
        let free_at = self.0.get(source).copied().flatten();
        let left = free_at.map_or(0.0, |at| at.saturating_duration_since(now).as_secs_f64());
        left.min(outstanding_secs).max(LATE * outstanding_secs)
    }
}

fn duration(secs: f64) -> Duration {
    // `max` also turns NaN into 0.
    let secs = secs.max(0.0);
    Duration::from_secs_f64(secs.min(BACKLOG_SECS_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::testing::{source_id, start};

    fn setup() -> (PrefillBacklog, SourceId, Instant) {
        (PrefillBacklog::default(), source_id(), start())
    }

    #[test]
    fn it_falls_with_time_to_a_share_of_what_is_outstanding() {
        let (mut backlog, id, now) = setup();
        assert_eq!(backlog.secs(id, 0.0, now), 0.0);
        backlog.added(id, 2.0, now);
        backlog.added(id, 3.0, now);
        let after = |secs| backlog.secs(id, 5.0, now + Duration::from_secs(secs));
        assert_eq!(after(0), 5.0);
        assert_eq!(after(3), 2.0);
        assert_eq!(after(100), LATE * 5.0);
    }

    #[test]
    fn a_first_token_shortens_it_to_what_is_outstanding() {
        let (mut backlog, id, now) = setup();
        backlog.added(id, 2.0, now);
        backlog.added(id, 3.0, now);
        backlog.shortened(id, 3.0, now);
        assert_eq!(backlog.secs(id, 3.0, now), 3.0);
        let later = now + Duration::from_secs(2);
        assert_eq!(backlog.secs(id, 3.0, later), 1.0);
        // A shorter backlog stays as it is.
        backlog.shortened(id, 3.0, later);
        assert_eq!(backlog.secs(id, 3.0, later), 1.0);
        backlog.shortened(id, 0.0, later);
        assert_eq!(backlog.secs(id, 0.0, later), 0.0);
    }

    #[test]
    fn absurd_seconds_are_bounded() {
        let (mut backlog, id, now) = setup();
        backlog.added(id, f64::NAN, now);
        backlog.added(id, 1e300, now);
        assert!(backlog.secs(id, 1e300, now).is_finite());
    }
}
