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
use warmroute_proto::{Source, Tier, Tiers};

use super::audit::{ClaimStanding, CreditClaim};
use super::candidates::{Candidate, Leg, RouteRefusal};
use super::choice::{Odds, Policy, power_of_two, prefix_hash, rendezvous};
use super::cost::{self, Knobs};
use super::engine_load::EngineLoads;
use super::expectations::Expectations;
use super::index_view::{TrustedAnswer, TrustedSource, are_complete};
use super::prompt::Prompt;
use super::room::SourceRoom;
use super::slots::{SlotKey, Slots};
use super::slowness::SlownessTracker;
use super::speed::SpeedTracker;
use super::stall::StallDetector;
use super::terms::{CandidateScale, ComparedCandidate, Terms, credit_max};

/// Candidates of a decision that are explained.
pub const WEIGHED_MAX: usize = 8;

/// `Retry-After` when all sources are full: about the time until some request ends.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Everything that a decision depends on, besides its random numbers.
#[derive(Clone, Copy, Debug)]
pub struct DecisionInput<'a> {
    pub prompt: &'a Prompt,
    pub candidates: &'a [Candidate],
    /// The part of the request that the candidates are for.
    pub leg: Leg,
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
    /// Tokens whose blocks come from a prefill source.
    pub transfer_tokens: u32,
    /// Tokens to prefill before the first token, this prompt's included.
    pub tokens_ahead: u64,
    /// Expected time from sending to the first token.
    pub predicted_ttft: Duration,
    /// For the audit.
    pub claim: CreditClaim,
    /// Terms of the chosen candidate.
    pub chosen: Terms,
    /// Terms of the cheapest candidates, at most [`WEIGHED_MAX`], in the order of the candidates.
    pub weighed: Vec<Terms>,
    /// All candidates that were compared.
    pub compared: Vec<ComparedCandidate>,
    /// The policy that decided: `least-load` for a request without what the router's policy hashes.
    pub policy: Policy,
}

impl Decision {
    #[must_use]
    pub const fn basis(&self) -> DecisionBasis {
        self.chosen.basis
    }
}

/// Chooses a source, or returns why there is none.
pub fn decide(input: &DecisionInput<'_>, rng: &mut Rng) -> Result<Decision, RouteRefusal> {
    let eligible = eligible(input)?;
    let scale = CandidateScale::new(input);
    let mut lowest = f64::INFINITY;
    let mut compared = Vec::with_capacity(eligible.len());
    for candidate in &eligible {
        let one = scale.compared(candidate);
        lowest = lowest.min(one.cost);
        compared.push(one);
    }
    let lowest = input.knobs.policy.is_timed().then_some(lowest);
    if let Some(lowest) = lowest {
        level_near_times(&mut compared, lowest);
    }
    let choice = pick(input, &eligible, &compared, rng).ok_or(RouteRefusal::AllTried)?;
    let weigh = |index: usize| {
        let terms = scale.terms(eligible[index]);
        let requests = terms.requests();
        let level = |lowest| cost::level_near_time(terms.cost, lowest, requests);
        let value = lowest.map_or(terms.cost, level);
        debug_assert_eq!(value.to_bits(), compared[index].cost.to_bits());
        Terms {
            is_near: lowest.is_some_and(|lowest| cost::is_near_time(terms.cost, lowest)),
            probability: choice.probability(index, &compared),
            ..terms
        }
    };
    let chosen = weigh(choice.index);
    let weighed = cheapest(&compared).into_iter().map(weigh).collect();
    let candidate = eligible[choice.index];
    Ok(Decision {
        weighed,
        compared,
        ..explain(input, candidate, choice, chosen)
    })
}

/// The cheapest candidates, in their order.
fn cheapest(compared: &[ComparedCandidate]) -> Vec<usize> {
    let mut cheapest: Vec<(f64, usize)> = Vec::with_capacity(WEIGHED_MAX + 1);
    for (index, one) in compared.iter().enumerate() {
        let is_cheaper = |than: &(f64, usize)| one.cost.total_cmp(&than.0).is_lt();
        if cheapest.len() == WEIGHED_MAX && !cheapest.last().is_some_and(is_cheaper) {
            continue;
        }
        let place = cheapest.partition_point(|known| !is_cheaper(known));
        cheapest.insert(place, (one.cost, index));
        cheapest.truncate(WEIGHED_MAX);
    }
    let mut cheapest: Vec<usize> = cheapest.into_iter().map(|(_, index)| index).collect();
    cheapest.sort_unstable();
    cheapest
}

/// Candidates that may be chosen.
fn eligible<'a>(input: &DecisionInput<'a>) -> Result<Vec<&'a Candidate>, RouteRefusal> {
    let room = SourceRoom {
        slots: input.slots,
        engines: input.engines,
        active_max: input.knobs.active_max,
        now: input.now,
    };
    let has_room = |id| !room.is_bounded() || room.free_places(id, input.except) > 0;
    // Sorted: a request may exclude all sources but one.
    let mut excluded: Vec<&Source> = input.exclude.iter().collect();
    excluded.sort_unstable();
    let mut refusal = RouteRefusal::AllTried;
    let mut live = Vec::with_capacity(input.candidates.len());
    let mut last_resort = Vec::new();
    for candidate in input.candidates {
        if excluded.binary_search(&&candidate.source).is_ok() {
            continue;
        }
        refusal = RouteRefusal::Full {
            retry_after: RETRY_AFTER,
        };
        if has_room(candidate.id) {
            let is_risk = candidate.on_trial && input.prompt.is_shown();
            match is_risk || input.stalls.is_stalled(candidate.id, input.now) {
                true => last_resort.push(candidate),
                false => live.push(candidate),
            }
        }
    }
    if !live.is_empty() {
        Ok(live)
    } else if !last_resort.is_empty() {
        Ok(last_resort)
    } else {
        Err(refusal)
    }
}

/// Makes times near the lowest differ by active requests alone: noise in what was learned prefers
/// no source, and sources stay balanced near the requests that their engines run at a time.
fn level_near_times(compared: &mut [ComparedCandidate], lowest: f64) {
    for one in compared {
        one.cost = cost::level_near_time(one.cost, lowest, one.requests);
    }
}

/// What was chosen, how, and with which odds.
struct Pick {
    index: usize,
    policy: Policy,
    odds: Odds,
}

impl Pick {
    /// Probability of choosing this candidate.
    fn probability(&self, index: usize, compared: &[ComparedCandidate]) -> f64 {
        let of = compared[index];
        match self.policy {
            Policy::RoundRobin | Policy::Session | Policy::PrefixHash => {
                f64::from(u8::from(index == self.index))
            }
            Policy::PowerOfTwo => {
                let active = compared.iter().map(|one| one.requests);
                power_of_two::probability(of.requests, active)
            }
            Policy::Time
            | Policy::Approx
            | Policy::Kv
            | Policy::KvOnce
            | Policy::LeastLoad
            | Policy::Random => {
                let value = compared_value(self.policy, of.cost, of.requests);
                self.odds.of(value)
            }
        }
    }
}

fn pick(
    input: &DecisionInput<'_>,
    eligible: &[&Candidate],
    compared: &[ComparedCandidate],
    rng: &mut Rng,
) -> Option<Pick> {
    let (policy, key) = keyed(input.knobs.policy, input.prompt);
    let costs: Vec<f64> = compared
        .iter()
        .map(|one| compared_value(policy, one.cost, one.requests))
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
    let odds = Odds::new(&costs, temperature, scale)?;
    let active = || compared.iter().map(|one| one.requests);
    let sources = || eligible.iter().map(|candidate| &candidate.source);
    let index = match policy {
        Policy::Time
        | Policy::Approx
        | Policy::Kv
        | Policy::KvOnce
        | Policy::LeastLoad
        | Policy::Random => odds.choose(&costs, rng),
        Policy::RoundRobin => {
            let count = u64::try_from(compared.len()).ok()?;
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
        odds,
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
fn compared_value(policy: Policy, cost: f64, requests: u32) -> f64 {
    match policy {
        Policy::Time | Policy::Approx | Policy::Kv | Policy::KvOnce => cost,
        Policy::LeastLoad => f64::from(requests),
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
    chosen: Terms,
) -> Decision {
    let prompt = input.prompt.cut(candidate.cut);
    let overlap_blocks = cost::overlap_blocks(chosen.overlap);
    let value = cost::overlap_value(chosen.overlap, input.knobs.tier_weights);
    let own_tokens = cost::own_prefill_tokens(prompt, value, chosen.prediction_blocks());
    let (prefill_tokens, transfer_tokens) = match input.leg {
        Leg::Whole | Leg::Prefill => (own_tokens, 0),
        Leg::Decode => (0, own_tokens),
    };
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
        transfer_tokens,
        tokens_ahead,
        predicted_ttft: input.speed.ttft.predict(candidate.id, tokens_ahead)
            + Duration::from_secs_f64(chosen.time.transfer),
        claim: claim(input, candidate),
        chosen,
        weighed: Vec::new(),
        compared: Vec::new(),
        policy: choice.policy,
    }
}

fn tier_states(input: &DecisionInput<'_>, candidate: &Candidate) -> Tiers<SourceState> {
    let known = input.trusted.of(candidate.id);
    known.map_or_else(|| Tiers::all(SourceState::Unknown), |known| known.states)
}

/// The index's part of the credit of the chosen candidate.
fn claim(input: &DecisionInput<'_>, candidate: &Candidate) -> CreditClaim {
    let prompt = input.prompt.cut(candidate.cut);
    let known = input.trusted.of(candidate.id);
    let standing = match known.and_then(|known| known.demoted) {
        Some(_) => ClaimStanding::Demoted,
        None => ClaimStanding::Credited,
    };
    let unknown = || (Tiers::all(SourceState::Unknown), Tiers::default());
    let known_credit = known.map(TrustedSource::undoubted);
    let (states, run) = known_credit.map_or_else(unknown, |credit| (credit.states, credit.run));
    let credit = cost::capped(run, credit_max(prompt, candidate));
    CreditClaim {
        source: candidate.id,
        state: states.gpu,
        shows_all_tiers: are_complete(&states),
        standing,
        decided: input.now,
        generation: known.map(|known| known.generation),
        number: known.and_then(|known| known.number),
        position: known.and_then(|known| known.position),
        engine_seq: known.and_then(|known| known.engine_seq),
        blocks: cost::overlap_blocks(credit),
        gpu_blocks: credit.gpu,
        lower_tier: lower_tier(states, credit),
        credit_max: prompt.credit_max(),
        cut: prompt.block_cut(),
        main_attention_only: candidate.main_attention_only,
        reads: prompt.reads(),
    }
}

/// The tier that holds all blocks beyond those on the GPU, if that is certain.
fn lower_tier(states: Tiers<SourceState>, credit: Tiers<u32>) -> Option<Tier> {
    let tier = match (credit.cpu, credit.disk) {
        (1.., 0) => Tier::Cpu,
        (0, 1..) => Tier::Disk,
        (_, _) => return None,
    };
    (*states.get(tier) == SourceState::Exact).then_some(tier)
}

#[cfg(test)]
mod tests;
