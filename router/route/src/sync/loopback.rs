//! Detects the isolation of this router by the heartbeats that come back to it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::ISOLATED_AFTER;

/// Heartbeats kept; older ones prove nothing useful.
const SENT_MAX: usize = 32;

pub(super) struct LoopbackMonitor {
    sent: VecDeque<(u64, Instant)>,
    /// When the last heartbeat that came back was sent.
    proven: Instant,
    is_isolated: bool,
}

/// An own heartbeat that came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LoopbackProof {
    /// Time between this heartbeat and the last one before it that came back.
    pub silent: Duration,
    /// It ends an isolation.
    pub ends_isolation: bool,
}

impl LoopbackMonitor {
    pub(super) const fn new(now: Instant) -> Self {
        Self {
            sent: VecDeque::new(),
            proven: now,
            is_isolated: false,
        }
    }

    pub(super) const fn is_isolated(&self) -> bool {
        self.is_isolated
    }

    pub(super) fn beat(&mut self, beat: u64, now: Instant) {
        if self.sent.len() == SENT_MAX {
            self.sent.pop_front();
        }
        self.sent.push_back((beat, now));
    }

    /// Returns `None` for a heartbeat that proves nothing new. A heartbeat proves the connection at
    /// the time of its sending: it may have waited in a queue while this process was paused.
    pub(super) fn echo(&mut self, beat: u64, now: Instant) -> Option<LoopbackProof> {
        let (_, sent) = *self.sent.iter().find(|(number, _)| *number == beat)?;
        if sent <= self.proven {
            return None;
        }
        let silent = sent.saturating_duration_since(self.proven);
        self.proven = sent;
        let ends_isolation =
            self.is_isolated && now.saturating_duration_since(sent) < ISOLATED_AFTER;
        self.is_isolated &= !ends_isolation;
        Some(LoopbackProof {
            silent,
            ends_isolation,
        })
    }

    /// Returns whether this router has just become isolated.
    pub(super) fn check(&mut self, now: Instant) -> bool {
        let late = now.saturating_duration_since(self.proven) >= ISOLATED_AFTER;
        let newly = late && !self.is_isolated;
        self.is_isolated |= late;
        newly
    }

    /// The connection is down. Returns whether this router was not isolated before.
    pub(super) fn cut(&mut self) -> bool {
        !std::mem::replace(&mut self.is_isolated, true)
    }
}
