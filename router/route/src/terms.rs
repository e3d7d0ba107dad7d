//! The terms of a candidate's cost.
//!
//! A decision compares all candidates and explains a few. So the compared value of a candidate is
//! computed without its [`Terms`], and in a source that holds nothing of the prompt without what only
//! holders need. `CandidateScale::terms` computes the same value with all that led to it.

use warmroute_proto::query::SourceState;
use warmroute_proto::{BlockCut, Tiers};

use super::backlog::BacklogTime;
use super::candidates::{Candidate, Leg};
use super::cost::{self, CostFactors, TimeTerms};
use super::decide::{DecisionBasis, DecisionInput};
use super::engine_load::ForeignLoad;
use super::index_view::TrustedSource;
use super::prompt::{Prompt, PromptBasis};
use super::prompt_match::{CutMatch, PromptMatch};
use super::slots::ActiveLoad;
use super::source_table::SourceId;

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
    pub decode_blocks: f64,
    pub active_requests: u32,
    /// Requests of its engine from elsewhere.
    pub foreign_requests: u32,
    /// What they add to the outstanding prefill and to the blocks held.
    pub foreign_prefill_blocks: f64,
    pub foreign_decode_blocks: f64,
    pub time: TimeTerms,
    pub factors: CostFactors,
    /// In seconds under `time`, else in blocks of the prompt's first cut.
    pub cost: f64,
    /// Under `time`: near the lowest cost, so that active requests decide.
    pub is_near: bool,
    /// The probability that the policy chooses it.
    pub probability: f64,
}

impl Terms {
    /// Value of the predicted blocks, in blocks of prefill.
    #[must_use]
    pub fn prediction_blocks(&self) -> f64 {
        cost::prediction_blocks(self.predicted_blocks)
    }

    /// Active requests, foreign ones included.
    #[must_use]
    pub const fn requests(&self) -> u32 {
        self.active_requests.saturating_add(self.foreign_requests)
    }
}

/// A candidate as a choice compares it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ComparedCandidate {
    pub source: SourceId,
    /// Active requests, foreign ones included.
    pub requests: u32,
    /// As [`Terms::cost`], but near times differ by active requests alone.
    pub cost: f64,
    /// As [`Terms::expected_blocks`].
    pub expected_blocks: u32,
    /// The cut of the expected blocks.
    pub cut: BlockCut,
    pub knowledge: IndexKnowledge,
}

/// Whether the index answers for a candidate and prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexKnowledge {
    Answered,
    /// What was sent before stands in for it.
    Silent,
}

/// Computes the costs of one decision's candidates.
pub(crate) struct CandidateScale<'a> {
    input: &'a DecisionInput<'a>,
    matched: PromptMatch<'a>,
    backlog_time: BacklogTime,
}

/// What a source holds of the prompt, in blocks of prefill.
#[derive(Clone, Copy, Debug, Default)]
struct CachedValue {
    overlap: f64,
    prediction: f64,
}

/// The load of a source: the routers', and that from elsewhere.
#[derive(Clone, Copy, Debug)]
struct SourceLoads {
    load: ActiveLoad,
    foreign: ForeignLoad,
}

/// The load of a source, in blocks of the prompt.
#[derive(Clone, Copy, Debug)]
struct LoadBlocks {
    prefill: f64,
    decode: f64,
    foreign_prefill: f64,
    foreign_decode: f64,
}

impl<'a> CandidateScale<'a> {
    pub(crate) fn new(input: &'a DecisionInput<'a>) -> Self {
        Self {
            input,
            matched: PromptMatch::new(input),
            backlog_time: input.speed.backlog_time(input.now),
        }
    }

    pub(crate) fn compared(&self, candidate: &Candidate) -> ComparedCandidate {
        let (id, input) = (candidate.id, self.input);
        let cut = self.matched.cut(candidate.cut);
        let known = input.trusted.of(id);
        let value = self.cached_value(cut, candidate, known);
        let loads = self.loads(id);
        let cost = if input.knobs.policy.is_timed() {
            let time = self.time(cut, candidate, value, &loads);
            time.total(loads.requests())
        } else {
            let blocks = self.load_blocks(cut, candidate, value, &loads);
            self.block_cost(cut, candidate, value, blocks)
        };
        ComparedCandidate {
            source: id,
            requests: loads.requests(),
            cost,
            expected_blocks: cut.predicted.of(id),
            cut: cut.prompt.block_cut(),
            knowledge: knowledge(cut.prompt, candidate, known),
        }
    }

    /// The reference for [`Self::compared`], with everything that an explanation shows but the
    /// probability, which depends on all candidates.
    pub(crate) fn terms(&self, candidate: &Candidate) -> Terms {
        let (id, input) = (candidate.id, self.input);
        let cut = self.matched.cut(candidate.cut);
        let known = input.trusted.of(id);
        let credit = credit(cut, candidate, known);
        let expected = expected(cut, candidate, known, cost::overlap_blocks(credit.overlap));
        let value = self.value(&credit, &expected);
        let loads = self.loads(id);
        let blocks = self.load_blocks(cut, candidate, value, &loads);
        let time = self.time(cut, candidate, value, &loads);
        let (cost, factors) = if input.knobs.policy.is_timed() {
            let requests = loads.requests();
            (time.total(requests), TimeTerms::factors(requests))
        } else {
            let cost = self.block_cost(cut, candidate, value, blocks);
            let slowness = input.slowness.slowness(id, input.now);
            let decode = slowness * self.unit(cut);
            let prefill = decode * input.knobs.overlap_score_weight;
            let factors = CostFactors {
                prefill,
                decode,
                slowness,
            };
            (cost, factors)
        };
        let basis = match known {
            Some(_) | None if credit.reported_blocks > 0 => DecisionBasis::Reported,
            Some(known) if is_comparable(cut.prompt, candidate) && known.gives_credit() => {
                DecisionBasis::Index
            }
            Some(_) | None => expected.basis,
        };
        Terms {
            source: id,
            block_tokens: cut.prompt.block_tokens(),
            state: credit.state,
            basis,
            overlap: credit.overlap,
            reported_blocks: credit.reported_blocks,
            expected_blocks: expected.predicted,
            approximate_blocks: expected.approximate,
            predicted_blocks: expected.beyond_credit,
            prefill_blocks: blocks.prefill,
            decode_blocks: blocks.decode,
            active_requests: loads.load.active_requests,
            foreign_requests: loads.foreign.requests,
            foreign_prefill_blocks: blocks.foreign_prefill,
            foreign_decode_blocks: blocks.foreign_decode,
            time,
            factors,
            cost,
            is_near: false,
            probability: 0.0,
        }
    }

    #[inline]
    fn loads(&self, source: SourceId) -> SourceLoads {
        let input = self.input;
        SourceLoads {
            load: input.slots.load_without(source, input.except),
            foreign: input.engines.foreign(source, input.now),
        }
    }

    fn cached_value(
        &self,
        cut: &CutMatch<'_>,
        candidate: &Candidate,
        known: Option<&TrustedSource>,
    ) -> CachedValue {
        let is_credited = known.is_some_and(|known| known.run != Tiers::default());
        if !is_credited && cut.expects_nothing(candidate.id) {
            return CachedValue::default();
        }
        let credit = credit(cut, candidate, known);
        let expected = expected(cut, candidate, known, cost::overlap_blocks(credit.overlap));
        self.value(&credit, &expected)
    }

    fn value(&self, credit: &CandidateCredit, expected: &ExpectedBlocks) -> CachedValue {
        CachedValue {
            overlap: cost::overlap_value(credit.overlap, self.input.knobs.tier_weights),
            prediction: cost::prediction_blocks(expected.beyond_credit),
        }
    }

    fn time(
        &self,
        cut: &CutMatch<'_>,
        candidate: &Candidate,
        value: CachedValue,
        loads: &SourceLoads,
    ) -> TimeTerms {
        let SourceLoads { load, foreign } = loads;
        let (id, input, prompt) = (candidate.id, self.input, cut.prompt);
        let speed = input.speed;
        let own = cost::own_prefill_tokens(prompt, value.overlap, value.prediction);
        let foreign_secs = || {
            let [blocks, _] = cost::foreign_blocks(*foreign, prompt);
            // A saturating cast of a number of at least 0.
            speed.prefill_secs(id, (blocks * f64::from(prompt.block_tokens())) as u64)
        };
        let requests = loads.requests();
        let (prefill, transfer) = match input.leg {
            Leg::Whole | Leg::Prefill => (speed.prefill_secs(id, own.into()), 0.0),
            Leg::Decode => (0.0, speed.transfers.secs(id, own)),
        };
        TimeTerms {
            queue: speed.queue_secs(id, load.prefill_tokens, self.backlog_time),
            // Most engines have no others.
            foreign: match foreign.requests {
                0 => 0.0,
                _ => foreign_secs(),
            },
            prefill,
            transfer,
            decode: speed.itl.decode_secs(id, requests.saturating_add(1)),
        }
    }

    fn block_cost(
        &self,
        cut: &CutMatch<'_>,
        candidate: &Candidate,
        value: CachedValue,
        blocks: LoadBlocks,
    ) -> f64 {
        let input = self.input;
        let slowness = input.slowness.slowness(candidate.id, input.now);
        let weight = input.knobs.overlap_score_weight;
        let prefill_blocks = blocks.prefill + blocks.foreign_prefill;
        let decode_blocks = blocks.decode + blocks.foreign_decode;
        let prediction = match input.leg {
            Leg::Whole | Leg::Prefill => value.prediction,
            Leg::Decode => cost::TRANSFER_WEIGHT * value.prediction,
        };
        let blocks = cost::total(weight, prefill_blocks, prediction, decode_blocks);
        slowness * blocks * self.unit(cut)
    }

    fn load_blocks(
        &self,
        cut: &CutMatch<'_>,
        candidate: &Candidate,
        value: CachedValue,
        loads: &SourceLoads,
    ) -> LoadBlocks {
        let SourceLoads { load, foreign } = loads;
        let (prompt, shared) = (cut.prompt, cut.shared.of(candidate.id));
        let [foreign_prefill, foreign_decode] = cost::foreign_blocks(*foreign, prompt);
        let prefill = match self.input.leg {
            Leg::Whole | Leg::Prefill => cost::prefill_blocks,
            Leg::Decode => cost::transfer_blocks,
        };
        LoadBlocks {
            prefill: prefill(load.prefill_tokens, prompt, value.overlap),
            decode: cost::decode_blocks(load.decode_blocks, prompt, shared),
            foreign_prefill,
            foreign_decode,
        }
    }

    /// Makes blocks of one size, so that candidates can be compared.
    fn unit(&self, cut: &CutMatch<'_>) -> f64 {
        let size = f64::from(cut.prompt.block_tokens());
        size / f64::from(self.input.prompt.block_tokens())
    }
}

impl SourceLoads {
    const fn requests(&self) -> u32 {
        let Self { load, foreign } = self;
        load.active_requests.saturating_add(foreign.requests)
    }
}

/// Hashes of another cut or of other tokens say nothing about the prompt.
fn is_comparable(prompt: &Prompt, candidate: &Candidate) -> bool {
    let is_cut_alike = candidate.cut.is_none_or(|cut| cut == prompt.block_cut());
    is_cut_alike && prompt.is_tokenized_by(&candidate.source.worker)
}

/// Upper limit of the credit at a candidate.
pub(crate) fn credit_max(prompt: &Prompt, candidate: &Candidate) -> u32 {
    if is_comparable(prompt, candidate) {
        prompt.credit_max()
    } else {
        0
    }
}

/// Blocks from depth 0 that the engine reported as cached, where the index is not complete.
fn reported(cut: &CutMatch<'_>, candidate: &Candidate, known: Option<&TrustedSource>) -> u32 {
    match candidate.main_attention_only {
        true => cut.reported_beyond(candidate.id, known),
        false => 0,
    }
}

/// Blocks from depth 0 that were sent to the candidate before; `None` where the index answers.
fn approximated(
    cut: &CutMatch<'_>,
    candidate: &Candidate,
    known: Option<&TrustedSource>,
) -> Option<u32> {
    let knowledge = knowledge(cut.prompt, candidate, known);
    (knowledge == IndexKnowledge::Silent).then(|| cut.sent.of(candidate.id))
}

fn knowledge(
    prompt: &Prompt,
    candidate: &Candidate,
    known: Option<&TrustedSource>,
) -> IndexKnowledge {
    let is_answered = prompt.basis() == PromptBasis::Tokens
        && known.is_some_and(|known| known.state() != SourceState::Unknown)
        && is_comparable(prompt, candidate);
    match is_answered {
        true => IndexKnowledge::Answered,
        false => IndexKnowledge::Silent,
    }
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
) -> CandidateCredit {
    let credit_max = credit_max(cut.prompt, candidate);
    let run = known.map(|known| known.run).unwrap_or_default();
    let mut overlap = cost::capped(run, credit_max);
    let state = known.map_or(SourceState::Unknown, |known| known.credit_state(&overlap));
    let reported = reported(cut, candidate, known).min(credit_max);
    let index_blocks = cost::overlap_blocks(overlap);
    let reported_blocks = reported.saturating_sub(index_blocks);
    overlap.gpu += reported_blocks;
    CandidateCredit {
        overlap,
        reported_blocks,
        state: match (index_blocks, reported_blocks) {
            (_, 0) => state,
            // A state without credit says nothing of what the engine reported.
            (0, 1..) => SourceState::Unverified,
            (1.., 1..) => state.weakest(SourceState::Unverified),
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
