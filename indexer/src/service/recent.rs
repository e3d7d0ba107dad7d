//! Counts events of the last minutes.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const AGE_MAX: Duration = Duration::from_secs(600);

/// Times of events, of which the latest 255 are kept.
#[derive(Default)]
pub(super) struct RecentEvents(Mutex<VecDeque<Instant>>);

impl RecentEvents {
    fn times(&self) -> MutexGuard<'_, VecDeque<Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, now: Instant) {
        let mut times = self.times();
        if times.len() == usize::from(u8::MAX) {
            times.pop_front();
        }
        times.push_back(now);
    }

    /// Events within the last ten minutes, at most 255.
    pub(super) fn count(&self, now: Instant) -> u8 {
        let mut times = self.times();
        times.retain(|at| now < *at + AGE_MAX);
        u8::try_from(times.len()).unwrap_or(u8::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_forgotten_after_ten_minutes() {
        let start = tokio::time::Instant::now().into_std();
        let events = RecentEvents::default();
        events.add(start);
        for _ in 0..300 {
            events.add(start + Duration::from_secs(60));
        }
        assert_eq!(events.count(start + Duration::from_secs(659)), 255);
        assert_eq!(events.count(start + AGE_MAX + Duration::from_secs(60)), 0);
    }
}
