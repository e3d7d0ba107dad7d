//! What an operator wants to know of a source beside what it is: since when, and how often it began anew.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use warmroute_proto::query::SourceState;

/// Generations that began longer ago do not count as "lately".
const LATELY: Duration = Duration::from_secs(600);

/// More than anybody needs to see that a source goes in circles.
const BEGUN_MAX: usize = 16;

/// One source's part.
#[derive(Clone, Debug, Default)]
pub(super) struct SourceHistory {
    /// The state at the last look, and when it was first seen.
    state: Option<(SourceState, Instant)>,
    /// When generations began, the oldest first.
    begun: VecDeque<Instant>,
    /// When the log took the last record, or later.
    recorded: Option<Instant>,
    /// How long the last heartbeat was on its way.
    heartbeat_delay: Option<Duration>,
}

impl SourceHistory {
    pub(super) fn note_state(&mut self, now: Instant, state: SourceState) {
        if self.state.is_none_or(|(known, _)| known != state) {
            self.state = Some((state, now));
        }
    }

    /// The log did not have the last record before this moment; none if it is older than all that matters.
    pub(super) const fn recorded(&mut self, at: Option<Instant>) {
        if at.is_some() {
            self.recorded = at;
        }
    }

    /// Since the last record that came while this replica followed.
    pub(super) fn record_age(&self, now: Instant) -> Option<Duration> {
        let recorded = self.recorded?;
        Some(now.saturating_duration_since(recorded))
    }

    /// A heartbeat is read that was said at this moment; none if that is longer ago than any moment here.
    pub(super) fn heartbeat_read(&mut self, now: Instant, said: Option<Instant>) {
        self.heartbeat_delay = said.map(|said| now.saturating_duration_since(said));
    }

    pub(super) const fn heartbeat_delay(&self) -> Option<Duration> {
        self.heartbeat_delay
    }

    /// A generation began at this moment or later; none if it is older than all that matters.
    pub(super) fn generation_started(&mut self, at: Option<Instant>) {
        let Some(at) = at else {
            return;
        };
        if self.begun.len() == BEGUN_MAX {
            self.begun.pop_front();
        }
        self.begun.push_back(at);
    }

    /// To the last look: a state that has changed since is new.
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
