//! What caches hold beyond the index's credit: what was sent, runs, or was reported.

use std::time::Instant;

use super::prediction::Predictions;
use super::prefix_table::{CacheReport, PrefixLimits, PrefixTable};
use super::sent::SentPrompts;
use super::source_table::{PerSource, SourceId};

#[derive(Clone, Debug)]
pub struct Expectations {
    /// Prompts of requests that run or have just ended.
    pub predictions: Predictions,
    /// Prefixes that engines reported as cached.
    pub reported: PrefixTable,
    /// Sources whose GPU tier the index showed when those were reported.
    beyond_gpu: PerSource<bool>,
    /// Prompts of completed requests, where the index says nothing.
    pub sent: SentPrompts,
}

impl Default for Expectations {
    fn default() -> Self {
        Self {
            predictions: Predictions::default(),
            reported: PrefixTable::new(PrefixLimits::REPORTED),
            beyond_gpu: PerSource::default(),
            sent: SentPrompts::default(),
        }
    }
}

impl Expectations {
    /// Keeps a report. `shows_gpu`: the index shows the GPU tier, so that the report is of a lower one.
    /// Reports from before it did say nothing of a lower tier.
    pub fn report(&mut self, report: &CacheReport<'_>, shows_gpu: bool, now: Instant) {
        if *self.beyond_gpu.get(report.source).unwrap_or(&false) != shows_gpu {
            self.reported.void(report.source);
            *self.beyond_gpu.get_mut(report.source) = shows_gpu;
        }
        self.reported.report(report, now);
    }

    /// Whether reports may stand in for tiers that the index does not show.
    pub fn are_reports_beyond_gpu(&self, source: SourceId) -> bool {
        *self.beyond_gpu.get(source).unwrap_or(&false)
    }

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
