//! How old may a heartbeat be that is read now, whatever it says of itself? Not every shim tells.
//!
//! While the reader turns, it waits for nobody: what it reads came just now. If the reader stood still (its
//! process was stopped, a snapshot took long to load), heartbeats waited, and prove no more than that their
//! shims lived when it stood still. That ends when a question that was asked afterwards is answered and
//! everything that came before the answer has been read: what comes then was sent to us afterwards.

use std::time::{Duration, Instant};

/// Twice the interval of the ticks, which turn the reader even when nothing comes.
const STILL: Duration = Duration::from_secs(1);

/// See the module's documentation.
pub struct ReaderStall {
    /// When the reader turned last.
    turned: Instant,
    /// What is read may be as old as the first, and was waiting until the second at the latest.
    doubtful: Option<(Instant, Instant)>,
}

impl ReaderStall {
    /// Nothing waits for a reader that only just listens.
    #[must_use]
    pub const fn new(now: Instant) -> Self {
        Self {
            turned: now,
            doubtful: None,
        }
    }

    /// The reader turns, and is about to read. What it reads came at the returned moment or later.
    pub fn turn(&mut self, now: Instant) -> Instant {
        if now.saturating_duration_since(self.turned) >= STILL {
            let since = self.doubtful.map_or(self.turned, |(since, _)| since);
            self.doubtful = Some((since, now));
        }
        self.turned = now;
        self.doubtful.map_or(now, |(since, _)| since)
    }

    /// Would an answer to a question that was asked at this moment end the doubt, once what came before
    /// it has been read?
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
