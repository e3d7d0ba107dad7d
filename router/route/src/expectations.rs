//! What caches hold beyond the index's credit: what was sent, runs, or was reported.

use std::time::Instant;

use super::prediction::Predictions;
use super::prefix_table::{PrefixLimits, PrefixTable};
use super::sent::SentPrompts;
use super::source_table::SourceId;

#[derive(Clone, Debug)]
pub struct Expectations {
    /// Prompts of requests that run or have just ended.
    pub predictions: Predictions,
    /// Prefixes that engines reported as cached.
    pub reported: PrefixTable,
    /// Prompts of completed requests, where the index says nothing.
    pub sent: SentPrompts,
}

impl Default for Expectations {
    fn default() -> Self {
        Self {
            predictions: Predictions::default(),
            reported: PrefixTable::new(PrefixLimits::REPORTED),
            sent: SentPrompts::default(),
        }
    }
}

impl Expectations {
    /// Ends all expectations of a source, whose cache is empty.
    pub fn restarted(&mut self, source: SourceId) {
        self.predictions.restarted(source);
        self.distrust(source);
    }

    /// Ends what rests on answers of the source's engine, which may be another one.
    pub fn distrust(&mut self, source: SourceId) {
        self.reported.void(source);
        self.sent.void(source);
    }

    /// Processes deadlines.
    pub fn expire(&mut self, now: Instant) {
        self.predictions.expire(now);
        self.reported.expire(now);
        self.sent.expire(now);
    }
}
