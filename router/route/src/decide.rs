//! One decision: every candidate's terms, then one of them.
//!
//! The ladder: where the index credits a source, its credit counts, and what is expected beyond it;
//! where it gives no credit (late, stale, catching up, unknown), only what is expected; where nothing
//! is expected either, the load alone. The basis that the chosen source stood on is part of the
//! [`Decision`] and counted.
//!
//! A stalled source is left out unless all are; a full one always; one that was tried is not tried again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use serde::Serialize;
use warmroute_proto::query::SourceState;
use warmroute_proto::{Source, Tiers};

use super::audit::CreditClaim;
use super::candidates::{Candidate, RouteRefusal};
use super::choice::{Odds, Policy, choose};
use super::cost::{self, Knobs};
use super::index_view::TrustedAnswer;
use super::prediction::Predictions;
use super::prompt::Prompt;
use super::slots::Slots;
use super::slowness::SlownessTracker;
use super::source_table::SourceId;
use super::stall::StallDetector;
use super::ttft::TtftModel;

/// When all are full, the end of some request is at most about this far away.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// What is to be decided.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    pub prompt: &'a Prompt,
    pub candidates: &'a [Candidate],
    /// Sources that were tried for this request.
    pub exclude: &'a [Source],
    /// Grows by one a decision; turns `round-robin`.
    pub turn: u64,
}

/// What the decision rests on.
#[derive(Clone, Copy, Debug)]
pub struct Grounds<'a> {
    pub trusted: &'a TrustedAnswer,
    pub slots: &'a Slots,
    pub predictions: &'a Predictions,
    pub stalls: &'a StallDetector,
    pub ttft: &'a TtftModel,
    pub slowness_tracker: &'a SlownessTracker,
    pub knobs: &'a Knobs,
}

/// What a choice rested on, from the best to the least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DecisionBasis {
    Index,
    Prediction,
    LoadOnly,
}

impl DecisionBasis {
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Index => "index",
            Self::Prediction => "prediction",
            Self::LoadOnly => "load_only",
        }
    }
}

/// One candidate's terms, in blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    pub source: SourceId,
    pub state: SourceState,
    pub basis: DecisionBasis,
    /// Capped credit.
    pub overlap: Tiers<u32>,
    /// Expected from depth 0 on, uncapped and whatever is credited.
    pub expected_blocks: u32,
    /// Expected beyond the credit.
    pub predicted_blocks: u32,
    pub prefill_blocks: f64,
    pub prediction_blocks: f64,
    pub decode_blocks: f64,
    pub active_requests: u32,
    /// Times the others' time to first token: 1 where it is not slow.
    pub slowness: f64,
    pub cost: f64,
}

/// Where a request goes, and why.
#[derive(Clone, Debug)]
pub struct Decision {
    pub source: Source,
    pub url: Arc<str>,
    /// `x-warmroute-index-state`.
    pub index_state: SourceState,
    /// `x-warmroute-overlap-blocks`: the capped credit of all tiers.
    pub overlap_blocks: u32,
    /// `x-warmroute-predicted-blocks`: expected beyond the credit.
    pub predicted_blocks: u32,
    /// What this request adds to the source's outstanding prefill.
    pub prefill_tokens: u32,
    /// When its first token should come, after sending.
    pub predicted_ttft: Duration,
    /// For the audit.
    pub claim: CreditClaim,
    /// The chosen one's terms.
    pub chosen: Terms,
    /// Of all candidates that were weighed, the chosen one too.
    pub weighed: Vec<Terms>,
    /// For [`Self::probability`].
    pub policy: Policy,
    pub odds: Odds,
}

impl Decision {
    /// How likely this candidate was to be chosen.
    #[must_use]
    pub fn probability(&self, of: &Terms) -> f64 {
        match self.policy {
            Policy::RoundRobin => f64::from(u8::from(of.source == self.chosen.source)),
            Policy::Kv | Policy::KvOnce | Policy::LeastLoad | Policy::Random => {
                self.odds.of(weighed_by(self.policy, of))
            }
        }
    }

    #[must_use]
    pub const fn basis(&self) -> DecisionBasis {
        self.chosen.basis
    }
}

/// Decides, or says why nobody can take the request.
pub fn decide(
    question: &Question<'_>,
    grounds: &Grounds<'_>,
    rng: &mut Rng,
    now: Instant,
) -> Result<Decision, RouteRefusal> {
    let eligible = eligible(question, grounds, now)?;
    let weighed: Vec<Terms> = eligible
        .iter()
        .map(|candidate| terms(question.prompt, candidate, grounds, now))
        .collect();
    let picked = pick(question, grounds.knobs, &weighed, rng).ok_or(RouteRefusal::AllTried)?;
    let candidate = eligible[picked.index];
    Ok(explain(
        question.prompt,
        candidate,
        grounds,
        picked,
        weighed,
    ))
}

fn eligible<'a>(
    question: &Question<'a>,
    grounds: &Grounds<'_>,
    now: Instant,
) -> Result<Vec<&'a Candidate>, RouteRefusal> {
    let mut untried = question
        .candidates
        .iter()
        .filter(|candidate| !question.exclude.contains(&candidate.source))
        .peekable();
    if untried.peek().is_none() {
        return Err(RouteRefusal::AllTried);
    }
    let has_room = |candidate: &&Candidate| match grounds.knobs.active_max {
        Some(most) => active_requests(grounds.slots, candidate.id) < most,
        None => true,
    };
    let (stalled, lively): (Vec<_>, Vec<_>) = untried
        .filter(has_room)
        .partition(|candidate| grounds.stalls.is_stalled(candidate.id, now));
    if !lively.is_empty() {
        Ok(lively)
    } else if !stalled.is_empty() {
        Ok(stalled)
    } else {
        Err(RouteRefusal::Full {
            retry_after: RETRY_AFTER,
        })
    }
}

fn active_requests(slots: &Slots, source: SourceId) -> u32 {
    slots.load(source).map_or(0, |load| load.active_requests())
}

fn terms(prompt: &Prompt, candidate: &Candidate, grounds: &Grounds<'_>, now: Instant) -> Terms {
    let id = candidate.id;
    let knobs = grounds.knobs;
    let known = grounds.trusted.of(id);
    // Another block size makes other blocks: nothing that is said of them is about this prompt.
    let comparable = candidate
        .block_size
        .is_none_or(|size| size == prompt.block_size());
    let credit_max = if comparable { prompt.credit_max() } else { 0 };
    let run = known.map(|known| known.run).unwrap_or_default();
    let overlap = cost::capped(run, credit_max);
    let overlap_blocks = cost::overlap_blocks(overlap);
    let overlap_value = cost::overlap_value(overlap, knobs.tier_weights);
    let expected_blocks = grounds.predictions.predicted(id, prompt.sampled());
    let predicted_blocks = cost::predicted_beyond(expected_blocks, overlap_blocks, credit_max);
    let prediction_blocks = cost::prediction_blocks(predicted_blocks);

    let load = grounds.slots.load(id);
    let outstanding = load.map_or(0, |load| load.prefill_tokens());
    let active = load.map_or(0, |load| load.decode_blocks());
    let shared = load.map_or(0, |load| load.shared_blocks(prompt.sampled()));
    let prefill_blocks = cost::prefill_blocks(outstanding, prompt, overlap_value);
    let decode_blocks = cost::decode_blocks(active, prompt, shared);

    let slowness = grounds.slowness_tracker.slowness(id, now);
    let basis = match known {
        Some(known) if comparable && known.gives_credit() => DecisionBasis::Index,
        Some(_) | None if predicted_blocks > 0 => DecisionBasis::Prediction,
        Some(_) | None => DecisionBasis::LoadOnly,
    };
    Terms {
        source: id,
        state: known.map_or(SourceState::Unknown, |known| known.state()),
        basis,
        overlap,
        expected_blocks,
        predicted_blocks,
        prefill_blocks,
        prediction_blocks,
        decode_blocks,
        active_requests: active_requests(grounds.slots, id),
        slowness,
        cost: slowness
            * cost::total(
                knobs.overlap_score_weight,
                prefill_blocks,
                prediction_blocks,
                decode_blocks,
            ),
    }
}

/// The chosen one among all, and how likely each was.
struct Picked {
    index: usize,
    odds: Odds,
}

fn pick(
    question: &Question<'_>,
    knobs: &Knobs,
    weighed: &[Terms],
    rng: &mut Rng,
) -> Option<Picked> {
    let policy = knobs.policy;
    let costs: Vec<f64> = weighed
        .iter()
        .map(|terms| weighed_by(policy, terms))
        .collect();
    let (temperature, scale) = match policy {
        Policy::Kv | Policy::KvOnce => {
            let blocks = f64::from(question.prompt.blocks_taken());
            (knobs.temperature, knobs.overlap_score_weight * blocks)
        }
        Policy::LeastLoad | Policy::Random | Policy::RoundRobin => (0.0, 1.0),
    };
    let odds = Odds::new(&costs, temperature, scale)?;
    let index = match policy {
        Policy::Kv | Policy::KvOnce | Policy::LeastLoad | Policy::Random => {
            choose(&costs, temperature, scale, rng)?
        }
        Policy::RoundRobin => {
            let count = u64::try_from(weighed.len()).ok()?;
            usize::try_from(question.turn.checked_rem(count)?).ok()?
        }
    };
    Some(Picked { index, odds })
}

/// What a policy compares.
fn weighed_by(policy: Policy, terms: &Terms) -> f64 {
    match policy {
        Policy::Kv | Policy::KvOnce => terms.cost,
        Policy::LeastLoad => f64::from(terms.active_requests),
        Policy::Random | Policy::RoundRobin => 0.0,
    }
}

fn explain(
    prompt: &Prompt,
    candidate: &Candidate,
    grounds: &Grounds<'_>,
    picked: Picked,
    weighed: Vec<Terms>,
) -> Decision {
    let chosen = weighed[picked.index];
    let overlap_blocks = cost::overlap_blocks(chosen.overlap);
    let value = cost::overlap_value(chosen.overlap, grounds.knobs.tier_weights);
    let prefill_tokens = cost::own_prefill_tokens(prompt, value, chosen.prediction_blocks);
    let load = grounds.slots.load(candidate.id);
    let ahead = load.map_or(0, |load| load.prefill_tokens());
    let known = grounds.trusted.of(candidate.id);
    Decision {
        source: candidate.source.clone(),
        url: Arc::clone(&candidate.url),
        index_state: chosen.state,
        overlap_blocks,
        predicted_blocks: chosen.predicted_blocks,
        prefill_tokens,
        predicted_ttft: grounds
            .ttft
            .predict(candidate.id, ahead + u64::from(prefill_tokens)),
        claim: CreditClaim {
            source: candidate.id,
            state: chosen.state,
            generation: known.map(|known| known.generation),
            engine_seq: known.and_then(|known| known.engine_seq),
            blocks: overlap_blocks,
            credit_max: prompt.credit_max(),
            block_tokens: prompt.block_tokens(),
            main_attention_only: candidate.main_attention_only,
            reads: prompt.reads(),
        },
        chosen,
        weighed,
        policy: grounds.knobs.policy,
        odds: picked.odds,
    }
}

#[cfg(test)]
mod tests;
