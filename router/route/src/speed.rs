//! What a router learns of its sources' speed, from its own requests.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::backlog::PrefillBacklog;
use super::fit::Line;
use super::itl::{AnswerTiming, ItlModel};
use super::source_table::SourceId;
use super::ttft::TtftModel;

/// How often what was learned of an unused source fades, and how much of it stays: half in 10 s.
const FADE_EVERY: Duration = Duration::from_secs(5);
const FADE_KEEP: f64 = 0.707;

#[derive(Clone, Debug, Default)]
pub struct SpeedTracker {
    pub ttft: TtftModel,
    pub itl: ItlModel,
    backlog: PrefillBacklog,
    /// By slot counter.
    answers: BTreeMap<u64, AnswerInProgress>,
    faded_at: Option<Instant>,
}

/// An answer that began: measures the time between tokens.
#[derive(Clone, Copy, Debug)]
pub struct AnswerInProgress {
    pub source: SourceId,
    pub since: Instant,
    /// Active requests of the source at its first token.
    pub active_requests: u32,
    pub block_tokens: u32,
    pub tokens: u64,
}

/// Coefficients of a source's predicted times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SourceSpeed {
    /// Time to first token over tokens to prefill.
    pub ttft: Line,
    /// Time between tokens over active requests.
    pub itl: Line,
}

impl SpeedTracker {
    /// Processes deadlines.
    pub fn tick(&mut self, now: Instant) {
        let faded_at = *self.faded_at.get_or_insert(now);
        if now.saturating_duration_since(faded_at) >= FADE_EVERY {
            self.faded_at = Some(now);
            self.ttft.fits.fade(FADE_KEEP);
            self.itl.fits.fade(FADE_KEEP);
        }
    }

    /// Resets a source, whose engine restarted.
    pub fn restarted(&mut self, source: SourceId) {
        self.ttft.fits.restarted(source);
        self.itl.fits.restarted(source);
    }

    /// The source accepted so many tokens of prefill.
    pub fn accepted(&mut self, source: SourceId, tokens: u32, now: Instant) {
        let secs = self.prefill_secs(source, tokens.into());
        self.backlog.added(source, secs, now);
    }

    /// A prefill ended; so many tokens are outstanding.
    pub fn prefilled(&mut self, source: SourceId, outstanding_tokens: u64, now: Instant) {
        let secs = self.prefill_secs(source, outstanding_tokens);
        self.backlog.shortened(source, secs, now);
    }

    /// Seconds until the source has computed the prompts that it accepted, so many tokens in all.
    #[must_use]
    pub fn queue_secs(&self, source: SourceId, outstanding_tokens: u64, now: Instant) -> f64 {
        let secs = self.prefill_secs(source, outstanding_tokens);
        self.backlog.secs(source, secs, now)
    }

    /// Seconds that so many tokens of prefill take.
    #[must_use]
    pub fn prefill_secs(&self, source: SourceId, tokens: u64) -> f64 {
        tokens as f64 * self.ttft.fits.line(source).secs_each
    }

    /// Registers an answer's first token.
    pub fn answer_began(&mut self, counter: u64, answer: AnswerInProgress) {
        self.answers.insert(counter, answer);
    }

    /// Registers generated blocks.
    pub fn answer_grew(&mut self, counter: u64, blocks: u32) {
        if let Some(answer) = self.answers.get_mut(&counter) {
            answer.tokens += u64::from(blocks) * u64::from(answer.block_tokens);
        }
    }

    /// Removes an answer that ended.
    pub fn answer_ended(&mut self, counter: u64) -> Option<AnswerInProgress> {
        self.answers.remove(&counter)
    }

    /// Learns from a complete answer. The source has so many active requests at its end.
    pub fn learn_answer(&mut self, answer: &AnswerInProgress, active_requests: u32, now: Instant) {
        let timing = AnswerTiming {
            tokens: answer.tokens,
            decode: now.saturating_duration_since(answer.since),
            active_requests: answer.active_requests.midpoint(active_requests),
        };
        self.itl.learn(answer.source, timing);
    }

    #[must_use]
    pub fn of(&self, source: SourceId) -> SourceSpeed {
        SourceSpeed {
            ttft: self.ttft.fits.line(source),
            itl: self.itl.fits.line(source),
        }
    }
}
