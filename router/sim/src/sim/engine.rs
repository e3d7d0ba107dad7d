//! Interface of the engine model.

use std::collections::BTreeMap;

use warmroute_proto::PrefixHash;

use super::config::EngineConfig;
use super::event::{EngineHash, Medium, engine_hash};
use super::request::{EngineRequest, EngineSequence, RequestId};
use super::scheduler::{EngineLoad, EngineTotals, StepOutcome, StepScheduler};

/// One data-parallel rank of one engine.
pub struct EngineModel {
    scheduler: StepScheduler,
    next_id: u64,
}

/// Reason for rejecting a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    #[error("the prompt is empty")]
    EmptyPrompt,
    #[error("at least one token must be asked for")]
    NothingAsked,
    #[error("prompt and output are {tokens} tokens, the engine takes at most {max}")]
    TooLong { tokens: usize, max: usize },
}

/// One held prefix in one tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HeldPrefix {
    pub prefix: PrefixHash,
    pub medium: Medium,
    /// Physical blocks that hold it.
    pub copies: u32,
}

impl EngineModel {
    #[must_use]
    pub fn new(config: EngineConfig) -> Self {
        Self {
            scheduler: StepScheduler::new(config),
            next_id: 0,
        }
    }

    #[must_use]
    pub const fn config(&self) -> &EngineConfig {
        &self.scheduler.config
    }

    /// Appends a request to the waiting queue.
    pub fn submit(&mut self, request: EngineRequest) -> Result<RequestId, SubmitError> {
        if request.prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        if request.max_tokens == 0 {
            return Err(SubmitError::NothingAsked);
        }
        let tokens = request.prompt.len().saturating_add(request.max_tokens);
        let max = self.config().longest_request();
        if tokens > max {
            return Err(SubmitError::TooLong { tokens, max });
        }
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let sequence = EngineSequence::new(id, request, self.config().block_cut());
        self.scheduler.enqueue(sequence);
        Ok(id)
    }

    /// Drops a request; its blocks stay cached. Returns false for an unknown request.
    pub fn abort(&mut self, id: RequestId) -> bool {
        self.scheduler.abort(id)
    }

    /// Does one scheduler step. Without requests it does nothing, takes no time and publishes
    /// nothing, not even a reset.
    pub fn step(&mut self) -> StepOutcome {
        let mut outcome = StepOutcome::default();
        self.step_into(&mut outcome);
        outcome
    }

    /// Like [`Self::step`], into a reused outcome.
    pub fn step_into(&mut self, outcome: &mut StepOutcome) {
        self.scheduler.step(outcome);
    }

    /// Clears the GPU's cache; fails while a request uses a block. The event leaves with the next
    /// step that has work. The CPU tier stays.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.scheduler.reset_prefix_cache()
    }

    /// Evicts the oldest GPU copy of a prefix even if it is in use, as vLLM does with a block that
    /// a connector reports as invalid. This creates holes: full attention alone evicts children
    /// before parents. Returns false without a copy.
    pub fn evict(&mut self, prefix: PrefixHash) -> bool {
        self.scheduler.evict(prefix)
    }

    #[must_use]
    pub fn has_requests(&self) -> bool {
        self.scheduler.has_requests()
    }

    #[must_use]
    pub fn load(&self) -> EngineLoad {
        self.scheduler.load()
    }

    #[must_use]
    pub const fn totals(&self) -> EngineTotals {
        self.scheduler.totals
    }

    /// All cached prefixes, by prefix and tier.
    #[must_use]
    pub fn held(&self) -> Vec<HeldPrefix> {
        let mut copies: BTreeMap<(PrefixHash, Medium), u32> = BTreeMap::new();
        for pair in self.scheduler.held_pairs() {
            *copies.entry(pair).or_default() += 1;
        }
        let held = |((prefix, medium), copies)| HeldPrefix {
            prefix,
            medium,
            copies,
        };
        copies.into_iter().map(held).collect()
    }

    /// The engine's hash of a prefix, in this life.
    #[must_use]
    pub const fn hash_of(&self, prefix: PrefixHash) -> EngineHash {
        engine_hash(self.config().life, prefix)
    }

    #[cfg(test)]
    pub(super) fn check(&self) {
        self.scheduler.check();
    }
}
