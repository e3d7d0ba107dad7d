//! Cache resets that an engine performed and may not have published.
//!
//! vLLM publishes a reset with its next batch, so the mirror of an idle engine may hold blocks that
//! are gone. The engine's metrics count the calls that can reset its cache. From a rise of that
//! count on, the source is unverified until a batch published after the rise is applied, or until a
//! flush (a request for one token) was answered and a later replay brought nothing more.

use std::time::{Duration, Instant};

/// Time from a step to the engine's publishing of its batch; 0.14 s is the longest measured.
const PUBLISHING_MAX: Duration = Duration::from_secs(1);
/// Between two flushes, while the engine answers none: it may be paused or asleep.
const FLUSH_EVERY: Duration = Duration::from_secs(5);

/// Identifies a flush; answers to an earlier one are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlushId(pub u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushResult {
    /// The engine generated a token: it published what was pending.
    Answered,
    Failed,
}

#[derive(Debug, Default)]
pub(super) struct ResetMonitor {
    /// Calls that the engine counted; `None` before the first reading.
    calls: Option<u64>,
    flushes: u64,
    pending: Option<PendingReset>,
}

/// A reset that may not be published.
#[derive(Clone, Copy, Debug)]
struct PendingReset {
    since: Instant,
    flush: Flush,
}

#[derive(Clone, Copy, Debug)]
enum Flush {
    Due(Instant),
    InFlight(FlushId),
    Answered(Instant),
}

impl ResetMonitor {
    pub(super) const fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Takes a reading of the engine's count. Returns whether a reset may be pending because of it:
    /// the count rose, or was not zero when it was first read.
    pub(super) fn count(&mut self, now: Instant, calls: u64) -> bool {
        let before = self.calls.replace(calls).unwrap_or(0);
        // A lower count is that of another life of the engine, which began at zero.
        let before = if calls < before { 0 } else { before };
        let has_risen = calls > before;
        if has_risen {
            self.pending = Some(PendingReset {
                since: now,
                flush: Flush::Due(now),
            });
        }
        has_risen
    }

    /// The next flush, if one is due.
    pub(super) fn next_flush(&mut self, now: Instant) -> Option<FlushId> {
        let pending = self.pending.as_mut()?;
        let is_due = matches!(pending.flush, Flush::Due(due) if due <= now);
        is_due.then(|| {
            self.flushes += 1;
            let id = FlushId(self.flushes);
            pending.flush = Flush::InFlight(id);
            id
        })
    }

    pub(super) fn flushed(&mut self, now: Instant, id: FlushId, result: FlushResult) {
        if let Some(pending) = &mut self.pending
            && matches!(pending.flush, Flush::InFlight(current) if current == id)
        {
            pending.flush = match result {
                FlushResult::Answered => Flush::Answered(now),
                FlushResult::Failed => Flush::Due(now + FLUSH_EVERY),
            };
        }
    }

    /// A live batch arrived and is applied, and so are all before it.
    pub(super) fn batch_arrived(&mut self, at: Instant) {
        let is_later = |pending: PendingReset| at >= pending.since + PUBLISHING_MAX;
        if self.pending.is_some_and(is_later) {
            self.pending = None;
        }
    }

    /// A replay requested at `at` passed: all batches published before it are applied.
    pub(super) fn replay_passed(&mut self, at: Instant) {
        let is_published = |pending: PendingReset| match pending.flush {
            Flush::Answered(answered) => at >= answered + PUBLISHING_MAX,
            Flush::Due(_) | Flush::InFlight(_) => false,
        };
        if self.pending.is_some_and(is_published) {
            self.pending = None;
        }
    }
}
