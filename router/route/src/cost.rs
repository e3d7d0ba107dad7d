//! Cost of sending a prompt to a source: one function for each term.
//!
//! # Policy `kv`
//!
//! `cost = overlap_score_weight × max(0, prefill_blocks − prediction_blocks) + decode_blocks`, in
//! blocks; the lowest cost wins.
//!
//! - [`prefill_blocks`]: outstanding prefill of the source, this prompt included, less the credit.
//! - [`prediction_blocks`]: blocks of this prompt that are expected beyond the credit, because a
//!   request with the same beginning was sent there. They never become credit and count
//!   [`PREDICTION_WEIGHT`] of a credited block.
//! - [`decode_blocks`]: blocks that the running requests hold there, and those that this request
//!   adds.
//!
//! A slow source's cost is multiplied by its slowness ([`super::slowness`]). Requests that an engine
//! has from elsewhere add to both sides ([`foreign_blocks`]).
//!
//! # Policy `time`
//!
//! `cost = queue + foreign + prefill + RUNNING × (prefill × active requests + decode)`, in seconds
//! ([`TimeTerms::total`]). The coefficients of each source are learned ([`super::ttft`],
//! [`super::itl`]), so that a slow source needs no factor. A request whose prompt another source
//! computes has a transfer ([`super::transfer`]) in place of the prefill.
//!
//! # Credit
//!
//! [`capped`] limits the credit once, before anything else: header, cost and audit use one number.

use warmroute_proto::Tiers;

use super::choice::Policy;
use super::engine_load::ForeignLoad;
use super::prompt::Prompt;

/// Less than a credited block, since the request that brings it may still be queued. Below the
/// GPU's 1.0 and above the CPU's 0.8, since new blocks are on the GPU.
pub const PREDICTION_WEIGHT: f64 = 0.9;

/// Parameters of the decision.
#[derive(Clone, Debug, PartialEq)]
pub struct Knobs {
    /// Weight of a block to prefill against a block to hold.
    pub overlap_score_weight: f64,
    /// 0 takes the lowest cost. Values above: [`super::choice`].
    pub temperature: f64,
    /// Value of a cached block in each tier, 0 to 1.
    pub tier_weights: Tiers<f64>,
    pub policy: Policy,
    /// Active requests at which a source takes no more.
    pub active_max: Option<u32>,
    /// Tokens of prefill that a move must save.
    pub move_margin_tokens: u32,
    /// `prefix-hash`: active requests of a source in percent of the mean, at which it takes no more.
    pub prefix_load_percent: u32,
}

/// The default parameters under another policy.
impl From<Policy> for Knobs {
    fn from(policy: Policy) -> Self {
        Self {
            policy,
            ..Self::default()
        }
    }
}

impl Default for Knobs {
    fn default() -> Self {
        Self {
            overlap_score_weight: 1.0,
            temperature: 0.0,
            tier_weights: Tiers {
                gpu: 1.0,
                cpu: 0.8,
                disk: 0.3,
            },
            policy: Policy::Time,
            active_max: None,
            // What an accelerator computes in the 10 ms that a move may cost at both ends.
            move_margin_tokens: 256,
            prefix_load_percent: 125,
        }
    }
}

/// The index's runs, limited to the blocks that a cache can save for this prompt. The tiers' runs
/// follow each other, so the limit shortens the last tier first.
#[must_use]
pub fn capped(run: Tiers<u32>, credit_max: u32) -> Tiers<u32> {
    let gpu = run.gpu.min(credit_max);
    let cpu = run.cpu.min(credit_max - gpu);
    let disk = run.disk.min(credit_max - gpu - cpu);
    Tiers { gpu, cpu, disk }
}

/// Credited blocks of all tiers: the number that the engine should report as cached.
#[must_use]
pub const fn overlap_blocks(credit: Tiers<u32>) -> u32 {
    credit
        .gpu
        .saturating_add(credit.cpu)
        .saturating_add(credit.disk)
}

/// Value of the credited blocks, in blocks of prefill.
#[must_use]
pub fn overlap_value(credit: Tiers<u32>, weights: Tiers<f64>) -> f64 {
    f64::from(credit.gpu) * weights.gpu
        + f64::from(credit.cpu) * weights.cpu
        + f64::from(credit.disk) * weights.disk
}

/// Prefill before this request's first token, in blocks. `outstanding_tokens` are prompt tokens of
/// the source's requests without a first token.
#[must_use]
pub fn prefill_blocks(outstanding_tokens: u64, prompt: &Prompt, overlap_value: f64) -> f64 {
    let block = f64::from(prompt.block_tokens());
    let own = f64::from(prompt.tokens()) / block - overlap_value;
    outstanding_tokens as f64 / block + own.max(0.0)
}

/// A block that another source sends takes about this part of the time that its prefill takes.
pub const TRANSFER_WEIGHT: f64 = 0.1;

/// [`prefill_blocks`] of a request whose prompt another source computes: the prefill of others, and
/// the transfer of the blocks that are not held.
#[must_use]
pub fn transfer_blocks(outstanding_tokens: u64, prompt: &Prompt, overlap_value: f64) -> f64 {
    let others = outstanding_tokens as f64 / f64::from(prompt.block_tokens());
    others + TRANSFER_WEIGHT * prefill_blocks(0, prompt, overlap_value)
}

/// Blocks expected beyond the credit. `predicted` counts from depth 0.
#[must_use]
pub fn predicted_beyond(predicted: u32, overlap_blocks: u32, credit_max: u32) -> u32 {
    predicted.min(credit_max).saturating_sub(overlap_blocks)
}

/// Value of the expected blocks, in blocks of prefill.
#[must_use]
pub fn prediction_blocks(predicted_beyond: u32) -> f64 {
    f64::from(predicted_beyond) * PREDICTION_WEIGHT
}

/// Blocks that the running requests hold, this one included. `shared` blocks of its prompt are
/// active already.
#[must_use]
pub fn decode_blocks(active: u64, prompt: &Prompt, shared: u32) -> f64 {
    let new = prompt.blocks_taken().saturating_sub(shared);
    active as f64 + f64::from(new)
}

/// Blocks to prefill and blocks held of requests from elsewhere. They have the size of the engine's
/// running requests, or of this prompt where that is not known.
#[must_use]
pub fn foreign_blocks(foreign: ForeignLoad, prompt: &Prompt) -> [f64; 2] {
    if foreign.requests == 0 {
        return [0.0; 2];
    }
    let own_blocks = || f64::from(prompt.blocks_taken());
    let each = foreign.request_blocks.unwrap_or_else(own_blocks);
    [foreign.waiting, foreign.requests].map(|requests| f64::from(requests) * each)
}

/// A source's cost.
#[must_use]
pub fn total(weight: f64, prefill_blocks: f64, prediction_blocks: f64, decode_blocks: f64) -> f64 {
    weight * (prefill_blocks - prediction_blocks).max(0.0) + decode_blocks
}

/// What a cost multiplies its terms by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostFactors {
    /// Prompt tokens to compute, beyond those predicted to be cached.
    pub prefill: f64,
    /// What is held or generated.
    pub decode: f64,
    /// Part of the others for a slow source under `kv`, else 1.
    pub slowness: f64,
}

/// Weight of a second that running requests lose against a second until this first token.
const RUNNING: f64 = 0.1;

/// Terms of the policy `time`, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TimeTerms {
    /// Until the source has computed the prompts that it accepted before.
    pub queue: f64,
    /// Until it has computed the waiting prompts from elsewhere.
    pub foreign: f64,
    /// Prefill of this prompt, less what is credited and predicted.
    pub prefill: f64,
    /// Until the prompt's blocks have come from another source, which delays no running request.
    pub transfer: f64,
    /// From the first token to the end of a typical answer.
    pub decode: f64,
}

impl TimeTerms {
    /// The cost. The prefill delays each running request by as much as it takes, foreign ones
    /// included.
    #[must_use]
    pub fn total(&self, active_requests: u32) -> f64 {
        let running = self.prefill * f64::from(active_requests) + self.decode;
        self.queue + self.foreign + self.prefill + self.transfer + RUNNING * running
    }

    /// What running requests lose to the prefill, as the cost counts it.
    #[must_use]
    pub fn delay(&self, active_requests: u32) -> f64 {
        RUNNING * self.prefill * f64::from(active_requests)
    }

    /// What the cost multiplies `prefill` and `decode` by. The other terms count once.
    #[must_use]
    pub fn factors(active_requests: u32) -> CostFactors {
        CostFactors {
            prefill: 1.0 + RUNNING * f64::from(active_requests),
            decode: RUNNING,
            slowness: 1.0,
        }
    }
}

/// Predicted times that differ by less are equal: a share, and seconds.
const NEAR_SHARE: f64 = 0.02;
const NEAR_SECS: f64 = 0.002;

/// Added per active request, so that of near times the source with the fewest wins.
const ACTIVE_SECS: f64 = 1e-6;

/// Whether a time is so near the lowest that the load decides between them.
#[must_use]
pub fn is_near_time(time: f64, lowest: f64) -> bool {
    time <= near_max(lowest)
}

/// The value by which a source whose time is near the lowest is compared, and the time of others.
#[must_use]
pub fn level_near_time(time: f64, lowest: f64, active_requests: u32) -> f64 {
    match is_near_time(time, lowest) {
        true => near_max(lowest) + ACTIVE_SECS * f64::from(active_requests),
        false => time,
    }
}

fn near_max(lowest: f64) -> f64 {
    lowest * (1.0 + NEAR_SHARE) + NEAR_SECS
}

/// Tokens that this request adds to the source's outstanding prefill: its prompt less credited and
/// expected blocks.
#[must_use]
pub fn own_prefill_tokens(prompt: &Prompt, overlap_value: f64, prediction_blocks: f64) -> u32 {
    // Most sources hold nothing.
    if overlap_value + prediction_blocks == 0.0 {
        return prompt.tokens();
    }
    let saved = (overlap_value + prediction_blocks) * f64::from(prompt.block_tokens());
    let left = (f64::from(prompt.tokens()) - saved).max(0.0).ceil();
    // A saturating cast of a number between 0 and the prompt's tokens.
    left as u32
}

#[cfg(test)]
mod tests;
