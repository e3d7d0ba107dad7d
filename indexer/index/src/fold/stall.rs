//! The oldest possible receive time of the heartbeat that is read next.
//!
//! A running reader reads heartbeats as they arrive. If it stood still (the process was stopped, a
//! snapshot took long to load), queued heartbeats prove only that their shims were alive when it
//! stopped. The stall ends when a request sent afterwards is answered and everything received
//! before the answer is read.

use std::time::{Duration, Instant};

/// Pause that counts as a stall: twice the tick interval, at which an idle reader runs too.
const STILL: Duration = Duration::from_secs(1);

/// Detects that the reader stood still.
pub struct ReaderStall {
    /// When the reader last ran.
    turned: Instant,
    /// Start and end of the stall whose queue is being read.
    doubtful: Option<(Instant, Instant)>,
}

impl ReaderStall {
    /// A reader that has just subscribed, with an empty queue.
    #[must_use]
    pub const fn new(now: Instant) -> Self {
        Self {
            turned: now,
            doubtful: None,
        }
    }

    /// The reader is about to read. Returns the earliest receive time of what it reads.
    pub fn turn(&mut self, now: Instant) -> Instant {
        if now.saturating_duration_since(self.turned) >= STILL {
            let since = self.doubtful.map_or(self.turned, |(since, _)| since);
            self.doubtful = Some((since, now));
        }
        self.turned = now;
        self.doubtful.map_or(now, |(since, _)| since)
    }

    /// Returns true if the answer to a request sent at this moment ends the stall, once everything
    /// received before it is read.
    #[must_use]
    pub fn ends_with(&self, asked: Instant) -> bool {
        self.doubtful.is_some_and(|(_, woken)| asked >= woken)
    }

    pub const fn ended(&mut self) {
        self.doubtful = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waited_is_as_old_as_the_standstill() {
        let start = crate::tests_support::some_instant();
        let at = |millis| start + Duration::from_millis(millis);
        let mut stall = ReaderStall::new(at(0));
        assert_eq!(stall.turn(at(900)), at(900));
        assert!(!stall.ends_with(at(900)));
        assert_eq!(stall.turn(at(9000)), at(900), "it stood still for 8 s");
        assert_eq!(stall.turn(at(9100)), at(900), "and still reads what waited");
        assert!(!stall.ends_with(at(8999)), "asked before it stood still");
        assert_eq!(stall.turn(at(12_000)), at(900), "a second time");
        assert!(!stall.ends_with(at(9100)));
        assert!(stall.ends_with(at(12_000)));
        stall.ended();
        assert_eq!(stall.turn(at(12_100)), at(12_100));
    }
}
