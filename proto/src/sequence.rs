//! The sequencing rule: what a numbered message does to its reader.
//!
//! One rule for log → indexer and router → router. It is deterministic, idempotent and total: every
//! input has a verdict, and no input panics.
//!
//! Invariant: while [`Sequencer::is_complete`], the reader has applied exactly the numbers
//! `0..next` of the fenced generation, each once and in order, and knows of no later one. A lost
//! tail shows only in a heartbeat ([`Sequencer::observe_heartbeat`]).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::{Generation, RecordNumber};

/// Applied messages whose payload hashes are kept, to distinguish a duplicate from a violation.
/// Well above the publisher's window of 64, which bounds what it sends again.
const RECENT_PAYLOADS: usize = 256;

/// What a message does to its reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceVerdict {
    /// The next number: apply it.
    Apply,
    /// First of a newer generation: forget the source, then apply it.
    Start,
    /// In a newer generation whose beginning is missing: forget the source, do not apply it.
    StartBehind,
    /// An earlier number is missing: do not apply it; it is sent again.
    Ahead,
    /// Applied before.
    Duplicate,
    /// Its number was applied before with other bytes: one of the two is wrong.
    Violation,
    /// In a generation below the fence: drop it.
    Old,
}

/// A reader's position against the position that a heartbeat reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceComparison {
    /// At the sender's number: digests can be compared.
    Level,
    /// Behind the sender: messages are in transit or lost.
    Behind,
    /// Ahead of the heartbeat, which was delayed.
    Ahead,
    /// The heartbeat is of a generation below the fence.
    Old,
}

/// A reader's state of one numbered sequence.
#[derive(Clone, Debug)]
pub struct Sequencer {
    /// Age of a gap at which the reader asks for recovery.
    patience: Duration,
    fence: Option<Generation>,
    next: RecordNumber,
    /// The highest number known to exist that is not applied.
    ahead: Option<RecordNumber>,
    gap_deadline: Option<Instant>,
    violated: bool,
    /// Payload hashes of the last applied numbers, the newest at the back.
    recent: VecDeque<u64>,
}

impl Sequencer {
    /// A reader that has received nothing. `patience` is three times the sender's ack time-out.
    #[must_use]
    pub const fn new(patience: Duration) -> Self {
        Self {
            patience,
            fence: None,
            next: RecordNumber(0),
            ahead: None,
            gap_deadline: None,
            violated: false,
            recent: VecDeque::new(),
        }
    }

    /// A reader whose state was restored as of `last` of `generation`.
    #[must_use]
    pub const fn restored(
        patience: Duration,
        generation: Generation,
        last: Option<RecordNumber>,
    ) -> Self {
        let mut restored = Self::new(patience);
        restored.fence = Some(generation);
        restored.next = match last {
            Some(last) => last.next(),
            None => RecordNumber(0),
        };
        restored
    }

    /// Sequences a message. `payload` is a hash of its bytes.
    pub fn accept(
        &mut self,
        now: Instant,
        generation: Generation,
        number: RecordNumber,
        payload: u64,
    ) -> SequenceVerdict {
        let newer = self.fence.is_none_or(|fence| generation > fence);
        if newer {
            self.open(generation);
            return if number == RecordNumber(0) {
                self.applied(payload);
                SequenceVerdict::Start
            } else {
                self.missing(now, number);
                SequenceVerdict::StartBehind
            };
        }
        if self.fence != Some(generation) {
            return SequenceVerdict::Old;
        }
        if number == self.next {
            self.applied(payload);
            return SequenceVerdict::Apply;
        }
        if number > self.next {
            self.missing(now, number);
            return SequenceVerdict::Ahead;
        }
        match self.payload_of(number) {
            Some(known) if known != payload => {
                self.violated = true;
                SequenceVerdict::Violation
            }
            Some(_) | None => SequenceVerdict::Duplicate,
        }
    }

    /// Compares with a heartbeat, whose sender had published up to `number` of `generation`.
    pub fn observe_heartbeat(
        &mut self,
        now: Instant,
        generation: Generation,
        number: Option<RecordNumber>,
    ) -> SequenceComparison {
        match self.fence {
            Some(fence) if generation < fence => return SequenceComparison::Old,
            Some(fence) if generation == fence => {}
            // The log orders the new generation's records, which follow.
            Some(_) | None => return SequenceComparison::Behind,
        }
        match number {
            Some(number) if number >= self.next => {
                self.missing(now, number);
                SequenceComparison::Behind
            }
            number if number == self.last() => SequenceComparison::Level,
            Some(_) | None => SequenceComparison::Ahead,
        }
    }

    /// Whether no number is known to be missing and no two messages contradicted each other.
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        self.fence.is_some() && self.ahead.is_none() && !self.violated
    }

    #[must_use]
    pub const fn is_violated(&self) -> bool {
        self.violated
    }

    /// Whether a number is known to be missing.
    #[must_use]
    pub const fn has_gap(&self) -> bool {
        self.ahead.is_some()
    }

    #[must_use]
    pub const fn generation(&self) -> Option<Generation> {
        self.fence
    }

    /// The last number applied; `None` before the generation's first.
    #[must_use]
    pub const fn last(&self) -> Option<RecordNumber> {
        match self.next.0.checked_sub(1) {
            Some(last) => Some(RecordNumber(last)),
            None => None,
        }
    }

    /// When to call [`Self::gap_expired`].
    #[must_use]
    pub const fn deadline(&self) -> Option<Instant> {
        self.gap_deadline
    }

    /// Whether recovery from the gap is due. True once per patience, as long as the gap stays.
    pub fn gap_expired(&mut self, now: Instant) -> bool {
        match self.gap_deadline {
            Some(deadline) if deadline <= now => {
                self.gap_deadline = Some(now + self.patience);
                true
            }
            Some(_) | None => false,
        }
    }

    fn open(&mut self, generation: Generation) {
        *self = Self::new(self.patience);
        self.fence = Some(generation);
    }

    fn applied(&mut self, payload: u64) {
        self.next = self.next.next();
        if self.recent.len() == RECENT_PAYLOADS {
            self.recent.pop_front();
        }
        self.recent.push_back(payload);
        if self.ahead.is_some_and(|ahead| ahead < self.next) {
            self.ahead = None;
            self.gap_deadline = None;
        }
    }

    fn missing(&mut self, now: Instant, number: RecordNumber) {
        self.ahead = self.ahead.max(Some(number));
        self.gap_deadline.get_or_insert(now + self.patience);
    }

    fn payload_of(&self, number: RecordNumber) -> Option<u64> {
        let back = self.next.0.checked_sub(number.0)?;
        let index = self.recent.len().checked_sub(usize::try_from(back).ok()?)?;
        self.recent.get(index).copied()
    }
}

#[cfg(test)]
mod tests;
