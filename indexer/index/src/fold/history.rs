//! History of a source for operators: how long it is in its state, and how often it began again.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use warmroute_proto::query::SourceState;

/// Window in which generations are counted.
const LATELY: Duration = Duration::from_secs(600);

/// Counted generations: enough to show that a source resyncs in circles.
const BEGUN_MAX: usize = 16;

/// History of one source.
#[derive(Clone, Debug, Default)]
pub(super) struct SourceHistory {
    /// The state at the last tick, and when it began.
    state: Option<(SourceState, Instant)>,
    /// Starts of generations, the oldest first.
    begun: VecDeque<Instant>,
    /// Earliest time at which the log stored the last record.
    recorded: Option<Instant>,
    /// Delay of the last heartbeat, from sending to reading.
    heartbeat_delay: Option<Duration>,
}

impl SourceHistory {
    pub(super) fn note_state(&mut self, now: Instant, state: SourceState) {
        if self.state.is_none_or(|(known, _)| known != state) {
            self.state = Some((state, now));
        }
    }

    /// A record was stored at this moment or later; `None` if out of reach.
    pub(super) const fn recorded(&mut self, at: Option<Instant>) {
        if at.is_some() {
            self.recorded = at;
        }
    }

    /// Age of the last record read live.
    pub(super) fn record_age(&self, now: Instant) -> Option<Duration> {
        let recorded = self.recorded?;
        Some(now.saturating_duration_since(recorded))
    }

    /// A heartbeat was read that was sent at this moment; `None` if out of reach.
    pub(super) fn heartbeat_read(&mut self, now: Instant, said: Option<Instant>) {
        self.heartbeat_delay = said.map(|said| now.saturating_duration_since(said));
    }

    pub(super) const fn heartbeat_delay(&self) -> Option<Duration> {
        self.heartbeat_delay
    }

    /// A generation began at this moment or later; `None` if out of reach.
    pub(super) fn generation_started(&mut self, at: Option<Instant>) {
        let Some(at) = at else {
            return;
        };
        if self.begun.len() == BEGUN_MAX {
            self.begun.pop_front();
        }
        self.begun.push_back(at);
    }

    /// Age of the state as of the last tick; zero if it changed since.
    pub(super) fn state_age(&self, now: Instant, state: SourceState) -> Duration {
        match self.state {
            Some((known, since)) if known == state => now.saturating_duration_since(since),
            Some(_) | None => Duration::ZERO,
        }
    }

    pub(super) fn generations_lately(&self, now: Instant) -> u8 {
        let lately = |at: &&Instant| now.saturating_duration_since(**at) < LATELY;
        u8::try_from(self.begun.iter().filter(lately).count()).unwrap_or(u8::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_have_an_age_and_generations_are_counted_for_ten_minutes() {
        let start = crate::tests_support::some_instant();
        let at = |secs| start + Duration::from_secs(secs);
        let mut history = SourceHistory::default();
        assert_eq!(history.state_age(at(1), SourceState::Stale), Duration::ZERO);
        history.note_state(at(1), SourceState::Stale);
        history.note_state(at(4), SourceState::Stale);
        let age = history.state_age(at(5), SourceState::Stale);
        assert_eq!(age, Duration::from_secs(4));
        assert_eq!(history.state_age(at(5), SourceState::Exact), Duration::ZERO);
        for secs in 0..20 {
            history.generation_started(Some(at(secs)));
        }
        history.generation_started(None);
        assert_eq!(history.record_age(at(20)), None);
        history.recorded(Some(at(5)));
        history.recorded(None);
        assert_eq!(history.record_age(at(20)), Some(Duration::from_secs(15)));
        assert_eq!(history.generations_lately(at(20)), 16);
        assert_eq!(history.generations_lately(at(610)), 9);
        assert_eq!(history.generations_lately(at(700)), 0);
    }
}
