//! How long a prompt's blocks take from a prefill source to a decode source: learned from the time
//! between sending the decode leg and its first token.
//!
//! A line over the transferred tokens for each decode source ([`super::fit`]), with the fleet's as its
//! prior. Only this router's own streams are measured: a peer's messages do not show what was
//! transferred. What was learned ends [`KEEP`] after the last measurement, so that a fleet in which
//! transfers were slow once tries them again.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::fit::{Line, SourceFits};
use super::source_table::SourceId;

/// Long enough for a quiet fleet, and far below the time in which networks are repaired.
const KEEP: Duration = Duration::from_secs(60);

/// A longer measurement is ignored.
const LESSON_MAX: Duration = Duration::from_secs(600);

/// Below this many tokens, the handshake and the decode step dominate.
const SCATTER_TOKENS: f64 = 1024.0;

/// Before the first measurement: a step, and 160 KiB a token over 400 Gbit/s.
const PRIOR: Line = Line {
    base_secs: 0.01,
    secs_each: 4e-6,
};

#[derive(Clone, Debug)]
pub struct TransferTimes {
    fits: SourceFits,
    /// Open decode legs of this router without a first token, by slot counter.
    open: BTreeMap<u64, OpenTransfer>,
    measured: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct OpenTransfer {
    source: SourceId,
    tokens: u32,
    since: Instant,
}

impl Default for TransferTimes {
    fn default() -> Self {
        Self {
            fits: SourceFits::new(PRIOR, SCATTER_TOKENS),
            open: BTreeMap::new(),
            measured: None,
        }
    }
}

impl TransferTimes {
    /// A decode leg was sent, for which so many tokens are transferred.
    pub fn sent(&mut self, counter: u64, source: SourceId, tokens: u32, now: Instant) {
        let transfer = OpenTransfer {
            source,
            tokens,
            since: now,
        };
        self.open.insert(counter, transfer);
    }

    /// The first token of a decode leg came. Ignored for other slots.
    pub fn arrived(&mut self, counter: u64, now: Instant) {
        let Some(transfer) = self.open.remove(&counter) else {
            return;
        };
        let elapsed = now.saturating_duration_since(transfer.since);
        if elapsed <= LESSON_MAX {
            let tokens = f64::from(transfer.tokens);
            self.fits
                .learn(transfer.source, tokens, elapsed.as_secs_f64());
            self.measured = Some(now);
        }
    }

    /// A slot was freed.
    pub fn ended(&mut self, counter: u64) {
        self.open.remove(&counter);
    }

    /// Resets a source, whose engine restarted.
    pub fn restarted(&mut self, source: SourceId) {
        self.fits.restarted(source);
    }

    /// Ends what was learned long ago.
    pub fn expire(&mut self, now: Instant) {
        let is_over = |at: &Instant| now.saturating_duration_since(*at) >= KEEP;
        if self.measured.as_ref().is_some_and(is_over) {
            self.fits = SourceFits::new(PRIOR, SCATTER_TOKENS);
            self.measured = None;
        }
    }

    /// Expected seconds until so many tokens have come to the source.
    #[must_use]
    #[inline]
    pub fn secs(&self, source: SourceId, tokens: u32) -> f64 {
        self.fits.line(source).at(f64::from(tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{source_id, start};

    const SLOW: Duration = Duration::from_secs(2);

    /// Ten transfers of 1,000 tokens that take 2 s each.
    fn slow() -> (TransferTimes, Instant) {
        let (mut times, mut now) = (TransferTimes::default(), start());
        for counter in 0..100 {
            times.sent(counter, source_id(), 1_000, now);
            now += SLOW;
            times.arrived(counter, now);
        }
        (times, now)
    }

    #[test]
    fn transfers_are_learned_and_forgotten() {
        let before = TransferTimes::default().secs(source_id(), 1_000);
        let (mut times, now) = slow();
        let learned = times.secs(source_id(), 1_000);
        assert!((learned - 2.0).abs() < 0.2, "{learned}");
        times.expire(now + KEEP - Duration::from_millis(1));
        assert_eq!(times.secs(source_id(), 1_000), learned);
        times.expire(now + KEEP);
        assert_eq!(times.secs(source_id(), 1_000), before);
    }

    #[test]
    fn only_open_decode_legs_are_measured() {
        let (mut times, now) = (TransferTimes::default(), start());
        let before = times.secs(source_id(), 1_000);
        times.arrived(1, now + SLOW);
        times.sent(2, source_id(), 1_000, now);
        times.ended(2);
        times.arrived(2, now + SLOW);
        assert_eq!(times.secs(source_id(), 1_000), before);
        assert!(times.open.is_empty());
    }
}
