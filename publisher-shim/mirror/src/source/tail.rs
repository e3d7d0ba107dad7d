//! Is the end of the log still what this shim last wrote there?
//!
//! Asked at every heartbeat, and thoroughly (with the registry's generation and the log's identity)
//! before anything is said again after the log was out of reach or the lease had lapsed. A log that
//! lost records, or was written by somebody else, is answered with a new generation. A copy of the
//! log that is a moment behind answers like one that lost records: such a surprise counts only when
//! it comes several times in a row. A generation that nobody can have come to is as good as none.

use std::time::{Duration, Instant};

use warmroute_proto::{Generation, RecordNumber, StreamIdentity};

use super::publisher::Publisher;
use super::{Effect, GenerationReason, SourceCore};

/// So many times in a row, or it was only a copy that lagged.
const MISMATCHES_MAX: u32 = 3;
const RETRY_AFTER: Duration = Duration::from_millis(300);

/// What the log and the registry have of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tail {
    /// Nobody could tell.
    Unanswered,
    Seen(LogTail),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogTail {
    /// The last record on the source's subject, if it is one.
    pub last: Option<(Generation, RecordNumber)>,
    /// There is none, and older records than ours were dropped from the log on purpose.
    pub is_trimmed: bool,
    /// Which log it is, if that was asked.
    pub log: Option<StreamIdentity>,
    /// The generation in the registry, if that was asked.
    pub registered: Option<Option<Generation>>,
}

/// A request under way.
#[derive(Clone, Copy, Debug)]
struct TailRequest {
    id: u64,
    generation: Generation,
    /// What was acknowledged when it was asked.
    at_least: Option<RecordNumber>,
}

#[derive(Debug, Default)]
pub(super) struct TailMonitor {
    asked: u64,
    request: Option<TailRequest>,
    /// Nothing is said before an answer was as expected.
    is_required: bool,
    again: Option<Instant>,
    mismatches: u32,
    log: Option<StreamIdentity>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TailVerdict {
    AsExpected,
    /// Lost, or a copy that lags.
    Behind,
    /// The registry does not know the generation; likewise.
    Unregistered,
    /// Somebody else wrote, with this generation.
    Overtaken(Generation),
    OtherLog,
}

impl TailMonitor {
    pub(super) const fn is_required(&self) -> bool {
        self.is_required
    }

    /// Nothing is said before the log's end was looked at.
    pub(super) const fn require(&mut self) {
        self.is_required = true;
    }

    /// What is known of the end is about another generation from now on.
    pub(super) fn forget(&mut self) {
        *self = Self {
            asked: self.asked,
            log: self.log,
            ..Self::default()
        };
    }

    fn judge(&mut self, request: TailRequest, publisher: &Publisher, seen: LogTail) -> TailVerdict {
        let own = request.generation;
        let plausible = |generation: &Generation| generation.is_plausible_after(own);
        let last = seen.last.filter(|(last, _)| plausible(last));
        let registered = seen.registered.map(|known| known.filter(plausible));
        if let Some(log) = seen.log
            && self.log.replace(log).is_some_and(|known| known != log)
        {
            return TailVerdict::OtherLog;
        }
        if let Some(Some(registered)) = registered
            && registered > own
        {
            return TailVerdict::Overtaken(registered);
        }
        let as_acknowledged = match (last, request.at_least) {
            (Some((generation, _)), _) if generation > own => {
                return TailVerdict::Overtaken(generation);
            }
            (Some((generation, number)), _)
                if generation == own && Some(number) > publisher.last_cut() =>
            {
                return TailVerdict::Overtaken(generation);
            }
            (_, None) => true,
            (Some((generation, number)), Some(least)) => generation == own && number >= least,
            (None, Some(_)) => seen.is_trimmed,
        };
        if !as_acknowledged {
            TailVerdict::Behind
        } else if registered.is_some_and(|known| known != Some(own)) {
            TailVerdict::Unregistered
        } else {
            TailVerdict::AsExpected
        }
    }
}

impl SourceCore {
    /// The answer to [`Effect::ReadTail`]. Every request must be answered.
    pub fn log_tail(&mut self, now: Instant, id: u64, tail: Tail) {
        let Some(request) = self.tail.request.take_if(|request| request.id == id) else {
            return;
        };
        let is_current =
            self.publisher.is_open() && self.publisher.generation() == Some(request.generation);
        if is_current {
            match tail {
                Tail::Unanswered => self.tail.again = Some(now + RETRY_AFTER),
                Tail::Seen(seen) => {
                    let verdict = self.tail.judge(request, &self.publisher, seen);
                    self.act_on(now, verdict);
                }
            }
        }
        self.try_unpause(now);
        self.settle(now);
    }

    fn act_on(&mut self, now: Instant, verdict: TailVerdict) {
        match verdict {
            TailVerdict::AsExpected => {
                self.tail.mismatches = 0;
                self.tail.again = None;
                self.tail.is_required = false;
            }
            TailVerdict::Behind | TailVerdict::Unregistered => {
                self.counters.tails_unexpected += 1;
                self.tail.mismatches += 1;
                self.tail.again = Some(now + RETRY_AFTER);
                if self.tail.mismatches >= MISMATCHES_MAX {
                    let reason = match verdict {
                        TailVerdict::Unregistered => GenerationReason::RegistryLost,
                        TailVerdict::AsExpected
                        | TailVerdict::Behind
                        | TailVerdict::Overtaken(_)
                        | TailVerdict::OtherLog => GenerationReason::LogLost,
                    };
                    self.new_generation(now, reason);
                }
            }
            TailVerdict::Overtaken(generation) => {
                self.publisher.raise_fence(generation);
                self.new_generation(now, GenerationReason::Overtaken);
            }
            TailVerdict::OtherLog => self.new_generation(now, GenerationReason::LogLost),
        }
    }

    /// Asks when it is time to: with each heartbeat, soon after a surprise, and at once before the
    /// first word.
    pub(super) fn tail_tick(&mut self, now: Instant, is_heartbeat: bool) {
        let may_ask = self.is_reachable && !self.has_lapsed && self.publisher.is_open();
        let is_due = match self.tail.again {
            Some(due) => due <= now,
            None if self.tail.is_required => true,
            None => is_heartbeat && self.publisher.acknowledged_point().is_some(),
        };
        if may_ask && is_due {
            self.ask_for_tail();
        }
    }

    fn ask_for_tail(&mut self) {
        let Some(generation) = self.publisher.generation() else {
            return;
        };
        if self.tail.request.is_some() {
            return;
        }
        self.tail.asked += 1;
        self.tail.again = None;
        self.tail.request = Some(TailRequest {
            id: self.tail.asked,
            generation,
            at_least: self
                .publisher
                .acknowledged_point()
                .map(|point| point.number),
        });
        self.effects.push_back(Effect::ReadTail {
            id: self.tail.asked,
            is_thorough: self.tail.is_required
                || self.tail.mismatches > 0
                || self.tail.log.is_none(),
        });
    }
}
