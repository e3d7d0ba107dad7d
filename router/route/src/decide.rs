//! One decision: the cost terms of every candidate, then the choice of one.
//!
//! The basis of a candidate's cost, from best to least: the index credits blocks there; its engine
//! reported blocks beyond the index's credit; no credit, but blocks are predicted there, because a
//! request with them runs or has just ended; the index says nothing, and such a request completed
//! before ([`super::sent`]); nothing, so that load alone counts. The basis of the chosen candidate is
//! part of the [`Decision`] and counted.
//!
//! A stalled source is left out unless all are stalled. A full source and a source that was tried
//! for this request are always left out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use serde::Serialize;
use warmroute_proto::query::SourceState;
use warmroute_proto::{Source, Tiers};

use super::audit::{ClaimStanding, CreditClaim};
use super::candidates::{Candidate, RouteRefusal};
use super::choice::{Odds, Policy, choose, power_of_two, prefix_hash, rendezvous};
use super::cost::{self, Knobs, TimeTerms};
use super::engine_load::EngineLoads;
use super::expectations::Expectations;
use super::index_view::{TrustedAnswer, TrustedSource};
use super::prompt::{Prompt, PromptBasis};
use super::prompt_match::{CutMatch, PromptMatch};
use super::room::SourceRoom;
use super::slots::{SlotKey, Slots};
use super::slowness::SlownessTracker;
use super::source_table::SourceId;
use super::speed::SpeedTracker;
use super::stall::StallDetector;

/// `Retry-After` when all sources are full: about the time until some request ends.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Everything that a decision depends on, besides its random numbers.
#[derive(Clone, Copy, Debug)]
pub struct DecisionInput<'a> {
    pub prompt: &'a Prompt,
    pub candidates: &'a [Candidate],
    /// Sources that were tried for this request.
    pub exclude: &'a [Source],
    /// A slot to ignore: the one that this request has already, if it is decided again.
    pub except: Option<SlotKey>,
    /// Number of decisions before this one; the order of `round-robin`.
    pub turn: u64,
    pub trusted: &'a TrustedAnswer,
    pub slots: &'a Slots,
    pub expected: &'a Expectations,
    pub stalls: &'a StallDetector,
    pub engines: &'a EngineLoads,
    pub speed: &'a SpeedTracker,
    pub slowness: &'a SlownessTracker,
    pub knobs: &'a Knobs,
    pub now: Instant,
}

/// What the cost of the chosen candidate rests on, from best to least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DecisionBasis {
    Index,
    Reported,
    Prediction,
    Approximate,
    LoadOnly,
}

impl DecisionBasis {
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Index => "index",
            Self::Reported => "reported",
            Self::Prediction => "prediction",
            Self::Approximate => "approximate",
            Self::LoadOnly => "load_only",
        }
    }
}

/// One candidate's cost terms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    pub source: SourceId,
    /// Tokens of the blocks that the other fields count.
    pub block_tokens: u32,
    pub state: SourceState,
    pub basis: DecisionBasis,
    /// Capped credit: the index's, and on the GPU the blocks beyond it that the engine reported.
    pub overlap: Tiers<u32>,
    /// Blocks of the overlap that rest on the engine's reports.
    pub reported_blocks: u32,
    /// Predicted blocks from depth 0 on, uncapped, with or without credit.
    pub expected_blocks: u32,
    /// Blocks from depth 0 on, uncapped, that were sent before; `None` where the index answers.
    pub approximate_blocks: Option<u32>,
    /// Predicted or approximate blocks beyond the credit.
    pub predicted_blocks: u32,
    pub prefill_blocks: f64,
    pub prediction_blocks: f64,
    pub decode_blocks: f64,
    pub active_requests: u32,
    /// Requests of its engine from elsewhere.
    pub foreign_requests: u32,
    /// What they add to the outstanding prefill and to the blocks held.
    pub foreign_prefill_blocks: f64,
    pub foreign_decode_blocks: f64,
    /// Prompt tokens of the source's requests without a first token.
    pub queued_tokens: u64,
    pub time: TimeTerms,
    /// Factor of a slow source under `kv`, else 1.
    pub slowness: f64,
    /// In seconds under `time`, else in blocks of the prompt's first cut.
    pub cost: f64,
}

impl Terms {
    /// Active requests, foreign ones included.
    #[must_use]
    pub const fn requests(&self) -> u32 {
        self.active_requests.saturating_add(self.foreign_requests)
    }
}

/// The source of a request, and the reasons.
#[derive(Clone, Debug)]
pub struct Decision {
    pub source: Source,
    pub url: Arc<str>,
    /// `x-warmroute-index-state`: the weakest state that the credit rests on.
    pub index_state: SourceState,
    /// `x-warmroute-tier-states`.
    pub tier_states: Tiers<SourceState>,
    /// `x-warmroute-overlap-blocks`: the capped credit of all tiers.
    pub overlap_blocks: u32,
    /// `x-warmroute-predicted-blocks`: predicted beyond the credit.
    pub predicted_blocks: u32,
    /// Tokens that this request adds to the source's outstanding prefill.
    pub prefill_tokens: u32,
    /// Tokens to prefill before the first token, this prompt's included.
    pub tokens_ahead: u64,
    /// Expected time from sending to the first token.
    pub predicted_ttft: Duration,
    /// For the audit.
    pub claim: CreditClaim,
    /// Terms of the chosen candidate.
    pub chosen: Terms,
    /// Terms of all candidates that were compared, the chosen one included.
    pub weighed: Vec<Terms>,
    /// The policy that decided: `least-load` for a request without what the router's policy hashes.
    pub policy: Policy,
    pub odds: Odds,
}

impl Decision {
    /// Probability of choosing this candidate.
    #[must_use]
    pub fn probability(&self, of: &Terms) -> f64 {
        match self.policy {
            Policy::RoundRobin | Policy::Session | Policy::PrefixHash => {
                f64::from(u8::from(of.source == self.chosen.source))
            }
            Policy::PowerOfTwo => {
                let active = self.weighed.iter().map(Terms::requests);
                power_of_two::probability(of.requests(), active)
            }
            Policy::Time
            | Policy::Approx
            | Policy::Kv
            | Policy::KvOnce
            | Policy::LeastLoad
            | Policy::Random => self.odds.of(compared_value(self.policy, of)),
        }
    }

    #[must_use]
    pub const fn basis(&self) -> DecisionBasis {
        self.chosen.basis
    }
}

/// Chooses a source, or returns why there is none.
pub fn decide(input: &DecisionInput<'_>, rng: &mut Rng) -> Result<Decision, RouteRefusal> {
    let eligible = eligible(input)?;
    let matched = PromptMatch::new(input);
    let weigh = |candidate: &&Candidate| {
        let cut = matched.cut(candidate.block_size);
        terms(input, cut, candidate)
    };
    let mut weighed: Vec<Terms> = eligible.iter().map(weigh).collect();
    if input.knobs.policy.is_timed() {
        level_near_times(&mut weighed);
    }
    let choice = pick(input, &eligible, &weighed, rng).ok_or(RouteRefusal::AllTried)?;
    Ok(explain(input, eligible[choice.index], choice, weighed))
}

/// Candidates that may be chosen.
fn eligible<'a>(input: &DecisionInput<'a>) -> Result<Vec<&'a Candidate>, RouteRefusal> {
    let mut untried = input
        .candidates
        .iter()
        .filter(|candidate| !input.exclude.contains(&candidate.source))
        .peekable();
    if untried.peek().is_none() {
        return Err(RouteRefusal::AllTried);
    }
    let room = SourceRoom {
        slots: input.slots,
        engines: input.engines,
        active_max: input.knobs.active_max,
        now: input.now,
    };
    let has_room = |candidate: &&Candidate| room.free_places(candidate.id, input.except) > 0;
    let (stalled, live): (Vec<_>, Vec<_>) = untried
        .filter(has_room)
        .partition(|candidate| input.stalls.is_stalled(candidate.id, input.now));
    if !live.is_empty() {
        Ok(live)
    } else if !stalled.is_empty() {
        Ok(stalled)
    } else {
        Err(RouteRefusal::Full {
            retry_after: RETRY_AFTER,
        })
    }
}

/// Hashes of another block size or of other tokens say nothing about the prompt.
fn is_comparable(prompt: &Prompt, candidate: &Candidate) -> bool {
    let is_cut_alike = candidate
        .block_size
        .is_none_or(|size| size == prompt.block_size());
    is_cut_alike && prompt.is_tokenized_by(&candidate.source.worker)
}

/// Upper limit of the credit at a candidate.
fn credit_max(prompt: &Prompt, candidate: &Candidate) -> u32 {
    if is_comparable(prompt, candidate) {
        prompt.credit_max()
    } else {
        0
    }
}

/// Blocks from depth 0 that the engine reported as cached, where the index is not complete.
fn reported(cut: &CutMatch<'_>, candidate: &Candidate, known: Option<&TrustedSource>) -> u32 {
    let is_complete = known.is_some_and(|known| known.state() == SourceState::Exact);
    if is_complete || !candidate.main_attention_only {
        return 0;
    }
    cut.reported.of(candidate.id)
}

/// Blocks from depth 0 that were sent to the candidate before; `None` where the index answers.
fn approximated(
    cut: &CutMatch<'_>,
    candidate: &Candidate,
    known: Option<&TrustedSource>,
) -> Option<u32> {
    let is_answered = cut.prompt.basis() == PromptBasis::Tokens
        && known.is_some_and(|known| known.state() != SourceState::Unknown)
        && is_comparable(cut.prompt, candidate);
    (!is_answered).then(|| cut.sent.of(candidate.id))
}

/// A candidate's credit, capped.
struct CandidateCredit {
    overlap: Tiers<u32>,
    reported_blocks: u32,
    /// The weakest state that the credit rests on.
    state: SourceState,
}

fn credit(
    cut: &CutMatch<'_>,
    candidate: &Candidate,
    known: Option<&TrustedSource>,
    credit_max: u32,
) -> CandidateCredit {
    let run = known.map(|known| known.run).unwrap_or_default();
    let mut overlap = cost::capped(run, credit_max);
    let state = known.map_or(SourceState::Unknown, |known| known.credit_state(&overlap));
    let reported = reported(cut, candidate, known).min(credit_max);
    let reported_blocks = reported.saturating_sub(cost::overlap_blocks(overlap));
    overlap.gpu += reported_blocks;
    CandidateCredit {
        overlap,
        reported_blocks,
        state: match reported_blocks {
            0 => state,
            _ => state.weakest(SourceState::Unverified),
        },
    }
}

/// Blocks of a prompt that no credit proves.
struct ExpectedBlocks {
    predicted: u32,
    approximate: Option<u32>,
    beyond_credit: u32,
    basis: DecisionBasis,
}

fn expected(
    cut: &CutMatch<'_>,
    candidate: &Candidate,
    known: Option<&TrustedSource>,
    overlap_blocks: u32,
) -> ExpectedBlocks {
    let predicted = cut.predicted.of(candidate.id);
    let approximate = approximated(cut, candidate, known);
    let credit_max = credit_max(cut.prompt, candidate);
    let by_prediction = cost::predicted_beyond(predicted, overlap_blocks, credit_max);
    // The index's credit needs equal blocks. What was sent was hashed by a router.
    let sent = approximate.unwrap_or(0);
    let by_sent = cost::predicted_beyond(sent, overlap_blocks, cut.prompt.credit_max());
    ExpectedBlocks {
        predicted,
        approximate,
        beyond_credit: by_prediction.max(by_sent),
        basis: match (by_prediction, by_sent) {
            (0, 0) => DecisionBasis::LoadOnly,
            (predicted, sent) if sent > predicted => DecisionBasis::Approximate,
            (_, _) => DecisionBasis::Prediction,
        },
    }
}

fn terms(input: &DecisionInput<'_>, cut: &CutMatch<'_>, candidate: &Candidate) -> Terms {
    let (id, knobs, prompt) = (candidate.id, input.knobs, cut.prompt);
    let known = input.trusted.of(id);
    let credit = credit(cut, candidate, known, credit_max(prompt, candidate));
    let overlap = credit.overlap;
    let overlap_blocks = cost::overlap_blocks(overlap);
    let overlap_value = cost::overlap_value(overlap, knobs.tier_weights);
    let expected = expected(cut, candidate, known, overlap_blocks);
    let predicted_blocks = expected.beyond_credit;
    let prediction_blocks = cost::prediction_blocks(predicted_blocks);

    let load = input.slots.load_without(id, input.except);
    let prefill_blocks = cost::prefill_blocks(load.prefill_tokens, prompt, overlap_value);
    let decode_blocks = cost::decode_blocks(load.decode_blocks, prompt, cut.shared.of(id));

    let own = cost::own_prefill_tokens(prompt, overlap_value, prediction_blocks);
    let speed = input.speed;
    let foreign = input.engines.foreign(id, input.now);
    let [foreign_prefill_blocks, foreign_decode_blocks] = cost::foreign_blocks(foreign, prompt);
    let foreign_tokens = foreign_prefill_blocks * f64::from(prompt.block_tokens());
    let requests = load.active_requests.saturating_add(foreign.requests);
    let time = TimeTerms {
        queue: speed.queue_secs(id, load.prefill_tokens, input.now),
        // A saturating cast of a number of at least 0.
        foreign: speed.prefill_secs(id, foreign_tokens as u64),
        prefill: speed.prefill_secs(id, own.into()),
        decode: speed.itl.decode_secs(id, requests.saturating_add(1)),
    };
    let (slowness, cost) = if knobs.policy.is_timed() {
        (1.0, time.total(requests))
    } else {
        let slowness = input.slowness.slowness(id, input.now);
        let weight = knobs.overlap_score_weight;
        let prefill_blocks = prefill_blocks + foreign_prefill_blocks;
        let decode_blocks = decode_blocks + foreign_decode_blocks;
        let blocks = cost::total(weight, prefill_blocks, prediction_blocks, decode_blocks);
        // In blocks of one size, so that candidates can be compared.
        let unit = f64::from(prompt.block_tokens()) / f64::from(input.prompt.block_tokens());
        (slowness, slowness * blocks * unit)
    };
    let basis = match known {
        Some(_) | None if credit.reported_blocks > 0 => DecisionBasis::Reported,
        Some(known) if is_comparable(prompt, candidate) && known.gives_credit() => {
            DecisionBasis::Index
        }
        Some(_) | None => expected.basis,
    };
    Terms {
        source: id,
        block_tokens: prompt.block_tokens(),
        state: credit.state,
        basis,
        overlap,
        reported_blocks: credit.reported_blocks,
        expected_blocks: expected.predicted,
        approximate_blocks: expected.approximate,
        predicted_blocks,
        prefill_blocks,
        prediction_blocks,
        decode_blocks,
        active_requests: load.active_requests,
        foreign_requests: foreign.requests,
        foreign_prefill_blocks,
        foreign_decode_blocks,
        queued_tokens: load.prefill_tokens,
        slowness,
        time,
        cost,
    }
}

/// Makes times near the lowest differ by active requests alone: noise in what was learned prefers
/// no source, and sources stay balanced near the requests that their engines run at a time.
fn level_near_times(weighed: &mut [Terms]) {
    let lowest = weighed
        .iter()
        .fold(f64::INFINITY, |lowest, terms| lowest.min(terms.cost));
    for terms in weighed {
        terms.cost = cost::level_near_time(terms.cost, lowest, terms.requests());
    }
}

/// What was chosen, how, and with which odds.
struct Pick {
    index: usize,
    policy: Policy,
    odds: Odds,
}

fn pick(
    input: &DecisionInput<'_>,
    eligible: &[&Candidate],
    weighed: &[Terms],
    rng: &mut Rng,
) -> Option<Pick> {
    let (policy, key) = keyed(input.knobs.policy, input.prompt);
    let costs: Vec<f64> = weighed
        .iter()
        .map(|terms| compared_value(policy, terms))
        .collect();
    let (temperature, scale) = match policy {
        Policy::Kv | Policy::KvOnce => {
            let blocks = f64::from(input.prompt.blocks_taken());
            let knobs = input.knobs;
            (knobs.temperature, knobs.overlap_score_weight * blocks)
        }
        Policy::Time
        | Policy::Approx
        | Policy::LeastLoad
        | Policy::Random
        | Policy::RoundRobin
        | Policy::PowerOfTwo
        | Policy::Session
        | Policy::PrefixHash => (0.0, 1.0),
    };
    let active = || weighed.iter().map(Terms::requests);
    let sources = || eligible.iter().map(|candidate| &candidate.source);
    let index = match policy {
        Policy::Time
        | Policy::Approx
        | Policy::Kv
        | Policy::KvOnce
        | Policy::LeastLoad
        | Policy::Random => choose(&costs, temperature, scale, rng)?,
        Policy::RoundRobin => {
            let count = u64::try_from(weighed.len()).ok()?;
            usize::try_from(input.turn.checked_rem(count)?).ok()?
        }
        Policy::PowerOfTwo => power_of_two::choose(&active().collect::<Vec<_>>(), rng)?,
        Policy::Session => rendezvous::owner(key, sources())?,
        Policy::PrefixHash => {
            let loaded: Vec<_> = sources().zip(active()).collect();
            prefix_hash::taker(key, &loaded, input.knobs.prefix_load_percent)?
        }
    };
    Some(Pick {
        index,
        policy,
        odds: Odds::new(&costs, temperature, scale)?,
    })
}

/// The policy that decides on a prompt, and the key that it hashes; 0 for policies without one.
fn keyed(policy: Policy, prompt: &Prompt) -> (Policy, u64) {
    let key = match policy {
        Policy::Session => prompt.session().map(|session| session.0),
        Policy::PrefixHash => prefix_hash::key(prompt),
        Policy::Time
        | Policy::Approx
        | Policy::Kv
        | Policy::KvOnce
        | Policy::RoundRobin
        | Policy::LeastLoad
        | Policy::Random
        | Policy::PowerOfTwo => return (policy, 0),
    };
    key.map_or((Policy::LeastLoad, 0), |key| (policy, key))
}

/// The value that a policy minimises.
fn compared_value(policy: Policy, terms: &Terms) -> f64 {
    match policy {
        Policy::Time | Policy::Approx | Policy::Kv | Policy::KvOnce => terms.cost,
        Policy::LeastLoad => f64::from(terms.requests()),
        Policy::Random
        | Policy::RoundRobin
        | Policy::PowerOfTwo
        | Policy::Session
        | Policy::PrefixHash => 0.0,
    }
}

fn explain(
    input: &DecisionInput<'_>,
    candidate: &Candidate,
    choice: Pick,
    weighed: Vec<Terms>,
) -> Decision {
    let chosen = weighed[choice.index];
    let prompt = input.prompt.cut(candidate.block_size);
    let overlap_blocks = cost::overlap_blocks(chosen.overlap);
    let value = cost::overlap_value(chosen.overlap, input.knobs.tier_weights);
    let prefill_tokens = cost::own_prefill_tokens(prompt, value, chosen.prediction_blocks);
    let queued = (chosen.time.queue + chosen.time.foreign)
        / input.speed.ttft.fits.line(candidate.id).secs_each;
    // A saturating cast of a number of at least 0.
    let tokens_ahead = u64::from(prefill_tokens).saturating_add(queued as u64);
    Decision {
        source: candidate.source.clone(),
        url: Arc::clone(&candidate.url),
        index_state: chosen.state,
        tier_states: tier_states(input, candidate),
        overlap_blocks,
        predicted_blocks: chosen.predicted_blocks,
        prefill_tokens,
        tokens_ahead,
        predicted_ttft: input.speed.ttft.predict(candidate.id, tokens_ahead),
        claim: claim(input, candidate),
        chosen,
        weighed,
        policy: choice.policy,
        odds: choice.odds,
    }
}

fn tier_states(input: &DecisionInput<'_>, candidate: &Candidate) -> Tiers<SourceState> {
    let known = input.trusted.of(candidate.id);
    known.map_or_else(|| Tiers::all(SourceState::Unknown), |known| known.states)
}

/// The index's part of the credit of the chosen candidate.
fn claim(input: &DecisionInput<'_>, candidate: &Candidate) -> CreditClaim {
    let prompt = input.prompt.cut(candidate.block_size);
    let known = input.trusted.of(candidate.id);
    let (standing, state, run) = match known.map(|known| (known, known.demoted)) {
        Some((_, Some(lost))) => (ClaimStanding::Demoted, lost.state, lost.run),
        Some((known, None)) => (ClaimStanding::Credited, known.state(), known.run),
        None => (
            ClaimStanding::Credited,
            SourceState::Unknown,
            Tiers::default(),
        ),
    };
    let credit = cost::capped(run, credit_max(prompt, candidate));
    CreditClaim {
        source: candidate.id,
        state,
        standing,
        decided: input.now,
        generation: known.map(|known| known.generation),
        number: known.and_then(|known| known.number),
        position: known.and_then(|known| known.position),
        engine_seq: known.and_then(|known| known.engine_seq),
        blocks: cost::overlap_blocks(credit),
        gpu_blocks: credit.gpu,
        credit_max: prompt.credit_max(),
        block_tokens: prompt.block_tokens(),
        main_attention_only: candidate.main_attention_only,
        reads: prompt.reads(),
    }
}

#[cfg(test)]
mod tests;
