//! One-way delay to a peer: half of an echo's round-trip time.
//!
//! An echo is an empty question: numbers from the next one to the last one. It takes the way of
//! broadcasts through the same tasks. Both directions are assumed to take equally long. Lost echoes
//! are ignored.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time between two echoes of a peer, once there are [`KEPT`] measurements.
const PAUSE: Duration = Duration::from_secs(1);

/// Measurements kept. The median counts, since a busy process delays single ones.
const KEPT: usize = 5;

/// Time after which an echo is lost.
const LOST: Duration = Duration::from_millis(400);

pub(super) struct EchoProbe {
    outstanding: Option<(u64, Instant)>,
    due: Instant,
    took: VecDeque<Duration>,
}

impl EchoProbe {
    pub(super) const fn new(now: Instant) -> Self {
        Self {
            outstanding: None,
            due: now,
            took: VecDeque::new(),
        }
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        let is_lost = |asked| now.saturating_duration_since(asked) >= LOST;
        self.due <= now && self.outstanding.is_none_or(|(_, asked)| is_lost(asked))
    }

    /// Registers an echo. An earlier one without an answer is lost.
    pub(super) fn asked(&mut self, id: u64, now: Instant) {
        self.outstanding = Some((id, now));
        if self.took.len() >= KEPT {
            self.due = now + PAUSE;
        }
    }

    /// Returns whether `id` is the outstanding echo.
    pub(super) fn answered(&mut self, id: u64, is_there: bool, now: Instant) -> bool {
        let Some((_, asked)) = self.outstanding.filter(|(asked, _)| *asked == id) else {
            return false;
        };
        self.outstanding = None;
        if is_there {
            self.took.push_back(now.saturating_duration_since(asked));
            if self.took.len() > KEPT {
                self.took.pop_front();
            }
        } else {
            self.due = now + PAUSE;
        }
        true
    }

    /// One-way delay; `None` before the first answer.
    pub(super) fn delay(&self) -> Option<Duration> {
        let mut took: Vec<Duration> = self.took.iter().copied().collect();
        took.sort_unstable();
        Some(*took.get(took.len() / 2)? / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::start;

    const fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// Delay after echoes that took so many milliseconds.
    fn after(took: &[u64]) -> Option<Duration> {
        let mut now = start();
        let mut echo = EchoProbe::new(now);
        for (id, &took) in (0..).zip(took) {
            echo.asked(id, now);
            now += millis(took);
            assert!(echo.answered(id, true, now));
        }
        echo.delay()
    }

    #[test]
    fn it_is_half_of_the_usual_echo() {
        assert_eq!(after(&[]), None);
        assert_eq!(after(&[10]), Some(millis(5)));
        assert_eq!(after(&[10, 180, 10, 12, 8]), Some(millis(5)));
        // Old measurements do not count.
        assert_eq!(after(&[90, 90, 90, 90, 90, 2, 2, 2]), Some(millis(1)));
    }

    #[test]
    fn what_is_lost_or_late_teaches_nothing() {
        let now = start();
        let mut echo = EchoProbe::new(now);
        echo.asked(1, now);
        assert!(echo.answered(1, false, now + millis(200)));
        assert!(!echo.is_due(now + millis(250)));
        assert!(echo.is_due(now + millis(200) + PAUSE));
        echo.asked(2, now + millis(2000));
        echo.asked(3, now + millis(3000));
        assert!(!echo.answered(2, true, now + millis(3001)));
        assert_eq!(echo.delay(), None);
    }

    #[test]
    fn a_few_come_fast_and_then_one_a_second() {
        let mut now = start();
        let mut echo = EchoProbe::new(now);
        for id in 0..=KEPT as u64 {
            assert!(echo.is_due(now), "{id}");
            echo.asked(id, now);
            now += millis(50);
            assert!(echo.answered(id, true, now));
        }
        assert!(!echo.is_due(now));
        assert!(echo.is_due(now + PAUSE));
    }
}
