//! The age of messages, from observations of the log's end and the log's clock.
//!
//! A record behind the end observed at some moment was stored after that moment. So the backlog
//! read at startup proves nothing about the present, and a lagging indexer does not take old
//! records for fresh proof. Clocks of different machines are not compared. The log's clock is
//! compared with itself: a record stamped before a moment at which it was absent was restored from
//! an older copy of the log, and proves nothing.
//!
//! A message may be delayed before the log stores it or a reader reads it. Its send time is by the
//! log's clock, whose present value is the last observed one plus the time passed here. The send
//! time can only weaken a proof: if the log's clock jumped back or was not observed recently, it
//! has no effect.
//!
//! The clock of a suspended virtual machine stands still. If the log's clock ran ahead of ours
//! between two answers, every moment before the second one is that much older. Without an answer
//! for [`CLOCK_SILENCE_MAX`] no proof counts, because nothing shows how old it is.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use warmroute_proto::{LogPosition, LogTime};

/// Observations kept: 8 s at two a second, longer than a proof is valid.
const OBSERVATIONS_MAX: usize = 16;

/// Age limit of the clock observation: at 1 % drift the error stays below the validity of a proof.
const CLOCK_AGE_MAX: Duration = Duration::from_secs(60);

/// Longest time without an answer about the log's clock for which proofs count. At two questions a
/// second with a deadline of 1 s, one lost answer does not exceed it.
pub(super) const CLOCK_SILENCE_MAX: Duration = Duration::from_millis(2_500);

/// Whether the log's clock was observed recently enough to judge the age of proofs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LogClockState {
    /// Observed, or the log does not report a clock.
    Known,
    Silent,
}

#[derive(Clone, Copy)]
struct ObservedEnd {
    at: Instant,
    last: LogPosition,
    /// By the log's clock; 0 if unknown.
    unix_ns: u64,
}

/// The log's clock was `unix_ns` at a moment between `asked` and `answered`.
#[derive(Clone, Copy, Debug)]
pub struct ClockAnswer {
    pub asked: Instant,
    pub answered: Instant,
    /// 0 if the log does not report a clock.
    pub unix_ns: u64,
}

impl ClockAnswer {
    /// Whether it shows at least as much as another one that was asked for before this one came.
    #[must_use]
    pub fn overtook(&self, other: &Self) -> bool {
        self.answered >= other.asked && self.unix_ns >= other.unix_ns
    }
}

#[derive(Default)]
pub(super) struct LogEnds {
    /// The oldest first.
    seen: VecDeque<ObservedEnd>,
    /// The last answer, if the log reports a clock.
    clock: Option<ClockAnswer>,
}

impl LogEnds {
    /// The log ended at `last` or later at the moment `at`, which is `unix_ns` by its clock.
    pub(super) fn observe(&mut self, at: Instant, last: LogPosition, unix_ns: u64) {
        if self.seen.len() == OBSERVATIONS_MAX {
            self.seen.pop_front();
        }
        self.seen.push_back(ObservedEnd { at, last, unix_ns });
    }

    /// Returns the time by which our clock fell behind the log's since the last answer; what was
    /// observed is older by as much. Zero unless it certainly fell behind; then the most that the two
    /// answers permit.
    pub(super) fn observe_clock(&mut self, answer: ClockAnswer) -> Duration {
        // Applied, it would let the next answer count a time twice.
        if self.clock.is_some_and(|newest| newest.overtook(&answer)) {
            return Duration::ZERO;
        }
        let observed = (answer.unix_ns > 0).then_some(answer);
        let before = std::mem::replace(&mut self.clock, observed);
        let stood = before
            .zip(observed)
            .map_or(Duration::ZERO, |(before, answer)| {
                let by_the_log =
                    Duration::from_nanos(answer.unix_ns.saturating_sub(before.unix_ns));
                let longest = answer.answered.saturating_duration_since(before.asked);
                let shortest = answer.asked.saturating_duration_since(before.answered);
                match by_the_log.saturating_sub(longest) {
                    Duration::ZERO => Duration::ZERO,
                    _ => by_the_log.saturating_sub(shortest),
                }
            });
        if !stood.is_zero() {
            self.seen.retain_mut(|end| {
                let earlier = end.at.checked_sub(stood);
                end.at = earlier.unwrap_or(end.at);
                earlier.is_some()
            });
        }
        stood
    }

    pub(super) fn clock_state(&self, now: Instant) -> LogClockState {
        let is_silent =
            |clock: ClockAnswer| now.saturating_duration_since(clock.asked) > CLOCK_SILENCE_MAX;
        match self.clock.is_some_and(is_silent) {
            true => LogClockState::Silent,
            false => LogClockState::Known,
        }
    }

    /// Forgets the log's ends; its clock stays.
    pub(super) fn clear(&mut self) {
        self.seen.clear();
    }

    /// The latest observed moment at which the log had neither this position nor the time
    /// `stamped`;
    /// `None` if out of reach. Both count: a replicated log stamps a message when it is proposed,
    /// before it is committed, and a message may be restored from a backup.
    pub(super) fn stored_after(&self, position: LogPosition, stamped: u64) -> Option<Instant> {
        let was_before = |end: &&ObservedEnd| end.last < position && end.unix_ns <= stamped;
        self.seen.iter().rev().find(was_before).map(|end| end.at)
    }

    /// Time as of which a message holds: when it was received, or earlier if it was delayed. `None`
    /// if that precedes every representable moment.
    pub(super) fn sent_at(
        &self,
        now: Instant,
        came: Instant,
        sent_at: Option<LogTime>,
    ) -> Option<Instant> {
        match sent_at.and_then(|sent_at| self.age(now, sent_at)) {
            Some(age) => Some(now.checked_sub(age)?.min(came)),
            None => Some(came),
        }
    }

    /// Age of a message; `None` if the log's clock is unknown.
    fn age(&self, now: Instant, sent_at: LogTime) -> Option<Duration> {
        let end = self.seen.back().filter(|end| end.unix_ns > 0)?;
        let since = now.saturating_duration_since(end.at);
        if since > CLOCK_AGE_MAX {
            return None;
        }
        let shows = Duration::from_nanos(end.unix_ns) + since;
        Some(shows.saturating_sub(Duration::from_nanos(sent_at.0)))
    }

    /// The latest observed moment whose log is read completely; `None` if out of reach. What was
    /// announced before it and is not read is missing, however far behind the reader is.
    pub(super) fn reached(&self, position: LogPosition) -> Option<Instant> {
        self.seen
            .iter()
            .rev()
            .find(|end| end.last <= position)
            .map(|end| end.at)
    }

    pub(super) fn last(&self) -> Option<LogPosition> {
        self.seen.back().map(|end| end.last)
    }
}

#[cfg(test)]
mod tests;
