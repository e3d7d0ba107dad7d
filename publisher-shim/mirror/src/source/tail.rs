//! Check that the log still ends with the records that this shim wrote.
//!
//! The check runs with every heartbeat. After the log was unreachable or the lease had lapsed, a
//! thorough one, with the registry's generation and the log's identity, runs before publishing goes
//! on. A log that lost records or has those of another writer gets a new generation. A replica of
//! the log that lags looks like one that lost records: such a mismatch counts only if it occurs
//! several times in a row. An implausible generation counts as none.

use std::time::{Duration, Instant};

use warmroute_proto::{Generation, RecordNumber, StreamIdentity};

use super::publisher::Publisher;
use super::{Effect, GenerationReason, SourceCore};

/// Mismatches in a row that show records to be lost; fewer may be a replica that lags.
const MISMATCHES_MAX: u32 = 3;
const RETRY_AFTER: Duration = Duration::from_millis(300);

/// The answer to [`Effect::ReadTail`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tail {
    /// The log or the registry did not answer.
    Unanswered,
    Seen(LogTail),
}

/// What the log and the registry have of a source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogTail {
    /// The last record on the source's subject, if there is one that decodes.
    pub last: Option<(Generation, RecordNumber)>,
    /// The subject is empty, and the log dropped this shim's records by its age or size limit.
    pub is_trimmed: bool,
    /// The log's identity, if it was requested.
    pub log: Option<StreamIdentity>,
    pub registered: RegistryReading,
}

/// The source's generation in the registry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RegistryReading {
    #[default]
    NotRequested,
    /// `None` if the registry has none.
    Read(Option<Generation>),
}

/// When [`SourceCore::check_tail`] begins a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TailCheck {
    /// If one is required before publishing goes on, or a repeated one is due.
    IfRequired,
    /// In any case, once a record is acknowledged.
    WithHeartbeat,
}

/// A check in flight.
#[derive(Clone, Copy, Debug)]
struct TailRequest {
    id: u64,
    generation: Generation,
    /// The last record acknowledged when it was sent.
    at_least: Option<RecordNumber>,
}

#[derive(Debug, Default)]
pub(super) struct TailMonitor {
    /// Number of requests sent.
    requests: u64,
    request: Option<TailRequest>,
    /// Publishing pauses until an answer is as expected.
    is_required: bool,
    retry: Option<Instant>,
    mismatches: u32,
    log: Option<StreamIdentity>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TailVerdict {
    AsExpected,
    /// Records are lost, or a replica lags.
    Behind,
    /// The registry does not have the generation, or a replica lags.
    Unregistered,
    /// Another shim wrote, with this generation.
    Overtaken(Generation),
    OtherLog,
}

impl TailMonitor {
    pub(super) const fn is_required(&self) -> bool {
        self.is_required
    }

    /// Pauses publishing until the log's end is as expected.
    pub(super) const fn require(&mut self) {
        self.is_required = true;
    }

    /// Drops the checks of the generation before.
    pub(super) fn forget(&mut self) {
        *self = Self {
            requests: self.requests,
            log: self.log,
            ..Self::default()
        };
    }

    fn judge(&mut self, request: TailRequest, publisher: &Publisher, seen: LogTail) -> TailVerdict {
        let own = request.generation;
        let plausible = |generation: &Generation| generation.is_plausible_after(own);
        let last = seen.last.filter(|(last, _)| plausible(last));
        let registered = match seen.registered {
            RegistryReading::NotRequested => None,
            RegistryReading::Read(registered) => Some(registered.filter(plausible)),
        };
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
                if generation == own && Some(number) > publisher.last_number() =>
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
    /// The answer to [`Effect::ReadTail`]. Every one must be answered.
    pub fn log_tail(&mut self, now: Instant, id: u64, tail: Tail) {
        let Some(request) = self.tail.request.take_if(|request| request.id == id) else {
            return;
        };
        let is_current =
            self.publisher.is_open() && self.publisher.generation() == Some(request.generation);
        if is_current {
            match tail {
                Tail::Unanswered => self.tail.retry = Some(now + RETRY_AFTER),
                Tail::Seen(seen) => {
                    let verdict = self.tail.judge(request, &self.publisher, seen);
                    self.apply_verdict(now, verdict);
                }
            }
        }
        self.try_unpause(now);
        self.settle(now);
    }

    fn apply_verdict(&mut self, now: Instant, verdict: TailVerdict) {
        match verdict {
            TailVerdict::AsExpected => {
                self.tail.mismatches = 0;
                self.tail.retry = None;
                self.tail.is_required = false;
            }
            TailVerdict::Behind | TailVerdict::Unregistered => {
                self.counters.tails_unexpected += 1;
                self.tail.mismatches += 1;
                self.tail.retry = Some(now + RETRY_AFTER);
                if self.tail.mismatches >= MISMATCHES_MAX {
                    let reason = if verdict == TailVerdict::Unregistered {
                        GenerationReason::RegistryLost
                    } else {
                        GenerationReason::LogLost
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

    /// Begins a check if one is due and possible.
    pub(super) fn check_tail(&mut self, now: Instant, check: TailCheck) {
        let is_possible = self.is_reachable && !self.has_lapsed && self.publisher.is_open();
        let is_due = match self.tail.retry {
            Some(due) => due <= now,
            None if self.tail.is_required => true,
            None => {
                check == TailCheck::WithHeartbeat && self.publisher.acknowledged_point().is_some()
            }
        };
        if is_possible && is_due {
            self.request_tail();
        }
    }

    fn request_tail(&mut self) {
        let Some(generation) = self.publisher.generation() else {
            return;
        };
        if self.tail.request.is_some() {
            return;
        }
        self.tail.requests += 1;
        self.tail.retry = None;
        self.tail.request = Some(TailRequest {
            id: self.tail.requests,
            generation,
            at_least: self
                .publisher
                .acknowledged_point()
                .map(|point| point.number),
        });
        self.effects.push_back(Effect::ReadTail {
            id: self.tail.requests,
            is_thorough: self.tail.is_required
                || self.tail.mismatches > 0
                || self.tail.log.is_none(),
        });
    }
}
