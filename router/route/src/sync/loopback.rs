//! Is this router heard? It hears its own heartbeats, or it does not.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::ISOLATED_AFTER;

/// Heartbeats whose echo may still come: what is older proves nothing that matters.
const SENT_MAX: usize = 32;

pub(super) struct LoopbackMonitor {
    sent: VecDeque<(u64, Instant)>,
    /// When the last heartbeat that came back was sent: until then this router was heard.
    proven: Instant,
    is_deaf: bool,
}

/// A heartbeat came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LoopbackProof {
    /// Between this heartbeat and the last one before it that came back.
    pub silent: Duration,
    /// It ends a deafness.
    pub ends_deafness: bool,
}

impl LoopbackMonitor {
    pub(super) const fn new(now: Instant) -> Self {
        Self {
            sent: VecDeque::new(),
            proven: now,
            is_deaf: false,
        }
    }

    pub(super) const fn is_deaf(&self) -> bool {
        self.is_deaf
    }

    pub(super) fn beat(&mut self, beat: u64, now: Instant) {
        if self.sent.len() == SENT_MAX {
            self.sent.pop_front();
        }
        self.sent.push_back((beat, now));
    }

    /// None for a beat that proves nothing new. An echo says when its heartbeat was SENT: what waited
    /// in a queue while this router stood still does not prove that it is heard by now.
    pub(super) fn echo(&mut self, beat: u64, now: Instant) -> Option<LoopbackProof> {
        let (_, sent) = *self.sent.iter().find(|(number, _)| *number == beat)?;
        if sent <= self.proven {
            return None;
        }
        let silent = sent.saturating_duration_since(self.proven);
        self.proven = sent;
        let ends_deafness = self.is_deaf && now.saturating_duration_since(sent) < ISOLATED_AFTER;
        self.is_deaf &= !ends_deafness;
        Some(LoopbackProof {
            silent,
            ends_deafness,
        })
    }

    /// Says whether this router has just become deaf.
    pub(super) fn check(&mut self, now: Instant) -> bool {
        let late = now.saturating_duration_since(self.proven) >= ISOLATED_AFTER;
        let newly = late && !self.is_deaf;
        self.is_deaf |= late;
        newly
    }

    /// The connection is down: there is nothing to wait for.
    pub(super) fn cut(&mut self) -> bool {
        !std::mem::replace(&mut self.is_deaf, true)
    }
}
