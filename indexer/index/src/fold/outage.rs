//! Which expired registrations count during and after a lost connection to the plane.
//!
//! A lease that expires while the registry is unreachable proves nothing about its holder. So an
//! expiry during an outage, or within one lease time after it, counts only after that time; by then
//! a live shim has renewed. Earlier expiries stay. The 5 s limit of a proof applies regardless.

use std::time::{Duration, Instant};

/// One lease time.
pub(super) const QUIET: Duration = Duration::from_secs(6);

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PlaneOutage {
    /// Start of the last outage; `None` if it has no effect any more.
    cut_since: Option<Instant>,
    /// End of its effect; `None` while it lasts.
    quiet_until: Option<Instant>,
}

impl PlaneOutage {
    pub(super) fn down(&mut self, now: Instant) {
        // An outage soon after another one extends it.
        if !self.is_quiet(now) {
            self.cut_since = Some(now);
        }
        self.quiet_until = None;
    }

    pub(super) fn up(&mut self, now: Instant) {
        if self.is_down() {
            self.quiet_until = Some(now + QUIET);
        }
    }

    pub(super) const fn is_down(&self) -> bool {
        self.cut_since.is_some() && self.quiet_until.is_none()
    }

    /// The moment at which [`Self::counts`] changes without a call.
    pub(super) const fn quiet_ends(&self) -> Option<Instant> {
        self.quiet_until
    }

    fn is_quiet(&self, now: Instant) -> bool {
        self.cut_since.is_some() && self.quiet_until.is_none_or(|until| now < until)
    }

    /// Returns true if an expiry at `gone_since` counts.
    pub(super) fn counts(&self, gone_since: Instant, now: Instant) -> bool {
        !self.is_quiet(now) || self.cut_since.is_some_and(|cut| gone_since < cut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn what_goes_during_a_cut_counts_one_lease_after_it() {
        let start = crate::tests_support::some_instant();
        let at = |seconds: u32| start + SECOND * seconds;
        let mut link = PlaneOutage::default();
        assert!(link.counts(at(1), at(1)), "never cut");
        link.down(at(10));
        assert!(link.is_down());
        assert!(link.counts(at(9), at(60)), "gone before");
        assert!(!link.counts(at(11), at(60)));
        link.up(at(60));
        assert!(!link.is_down());
        assert!(!link.counts(at(11), at(65)));
        assert!(!link.counts(at(61), at(65)), "listed late");
        assert!(link.counts(at(11), at(66)));
        assert!(link.counts(at(61), at(66)));
    }

    #[test]
    fn a_second_cut_prolongs_the_first() {
        let start = crate::tests_support::some_instant();
        let at = |seconds: u32| start + SECOND * seconds;
        let mut link = PlaneOutage::default();
        link.down(at(10));
        link.up(at(20));
        link.down(at(22));
        link.up(at(30));
        assert!(!link.counts(at(12), at(35)), "gone in the first cut");
        assert!(link.counts(at(12), at(36)));
        link.down(at(50));
        assert!(link.counts(at(12), at(51)), "long gone by now");
    }
}
