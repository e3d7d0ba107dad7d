//! What it costs to send a prompt to a source: one pure function a term.
//!
//! `cost = overlap_score_weight × max(0, prefill_blocks − prediction_blocks) + decode_blocks`, lower is
//! better, all in blocks.
//!
//! - [`prefill_blocks`]: what the source has still to prefill, this prompt included, less what the
//!   index credits.
//! - [`prediction_blocks`]: what of this prompt is expected to be cached there beyond that credit,
//!   because a request that begins alike was sent there lately. A term of its own: it never becomes
//!   credit, and counts [`PREDICTION_WEIGHT`] of a credited block.
//! - [`decode_blocks`]: the cache that running requests hold there, plus what this one adds.
//!
//! What a slow source's blocks take longer multiplies its sum: [`super::slowness`].
//!
//! Credit is capped once, by [`capped`], before anything else: header, cost and audit see one number.

use warmroute_proto::Tiers;

use super::choice::Policy;
use super::prompt::Prompt;

/// An expected block saves less than a proven one: the request that brings it may still be queued, so
/// that this one waits for the same prefill. Below the GPU's 1.0, above the CPU's 0.8, since what was
/// just computed lies on the GPU.
pub const PREDICTION_WEIGHT: f64 = 0.9;

/// What an operator can turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Knobs {
    /// How much a block to prefill weighs against a block to hold.
    pub overlap_score_weight: f64,
    /// 0: always the cheapest. See [`super::choice`] for what a value above means.
    pub temperature: f64,
    /// What a block saves when it is found in this tier, 0 to 1.
    pub tier_weights: Tiers<f64>,
    pub policy: Policy,
    /// A source with this many active requests takes no more.
    pub active_max: Option<u32>,
    /// By how many tokens of prefill another source must be cheaper for a request to be moved there.
    pub move_margin_tokens: u32,
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
            policy: Policy::Kv,
            active_max: None,
            // What an accelerator computes in the ten or so milliseconds that a move may cost at both ends.
            move_margin_tokens: 256,
        }
    }
}

/// The index's runs, cut to the most blocks that a cache can save for this prompt. The tiers' runs
/// follow each other, so that the cut takes from the last tier first.
#[must_use]
pub fn capped(run: Tiers<u32>, credit_max: u32) -> Tiers<u32> {
    let gpu = run.gpu.min(credit_max);
    let cpu = run.cpu.min(credit_max - gpu);
    let disk = run.disk.min(credit_max - gpu - cpu);
    Tiers { gpu, cpu, disk }
}

/// Credited blocks of all tiers: what the engine should report as cached.
#[must_use]
pub const fn overlap_blocks(credit: Tiers<u32>) -> u32 {
    credit
        .gpu
        .saturating_add(credit.cpu)
        .saturating_add(credit.disk)
}

/// What the credited blocks save, in blocks of prefill.
#[must_use]
pub fn overlap_value(credit: Tiers<u32>, weights: Tiers<f64>) -> f64 {
    f64::from(credit.gpu) * weights.gpu
        + f64::from(credit.cpu) * weights.cpu
        + f64::from(credit.disk) * weights.disk
}

/// What the source has to prefill before this request's first token, in blocks.
/// `outstanding_tokens`: of requests that are there and have no first token yet.
#[must_use]
pub fn prefill_blocks(outstanding_tokens: u64, prompt: &Prompt, overlap_value: f64) -> f64 {
    let block = f64::from(prompt.block_tokens());
    let own = f64::from(prompt.tokens()) / block - overlap_value;
    outstanding_tokens as f64 / block + own.max(0.0)
}

/// Blocks expected beyond the credit. `predicted`: of this prompt, from depth 0.
#[must_use]
pub fn predicted_beyond(predicted: u32, overlap_blocks: u32, credit_max: u32) -> u32 {
    predicted.min(credit_max).saturating_sub(overlap_blocks)
}

/// What the expected blocks save, in blocks of prefill. Never more than this prompt's own prefill.
#[must_use]
pub fn prediction_blocks(predicted_beyond: u32) -> f64 {
    f64::from(predicted_beyond) * PREDICTION_WEIGHT
}

/// The blocks that running requests hold at the source, with this one. `shared`: blocks of this
/// prompt that are active there already.
#[must_use]
pub fn decode_blocks(active: u64, prompt: &Prompt, shared: u32) -> f64 {
    let new = prompt.blocks_taken().saturating_sub(shared);
    active as f64 + f64::from(new)
}

/// A source's terms put together.
#[must_use]
pub fn total(weight: f64, prefill_blocks: f64, prediction_blocks: f64, decode_blocks: f64) -> f64 {
    weight * (prefill_blocks - prediction_blocks).max(0.0) + decode_blocks
}

/// The tokens that this request adds to the source's outstanding prefill: its prompt less what is
/// credited and expected, as its own cost counted them.
#[must_use]
pub fn own_prefill_tokens(prompt: &Prompt, overlap_value: f64, prediction_blocks: f64) -> u32 {
    let saved = (overlap_value + prediction_blocks) * f64::from(prompt.block_tokens());
    let left = (f64::from(prompt.tokens()) - saved).max(0.0).ceil();
    // A saturating cast of a number between 0 and the prompt's tokens.
    left as u32
}

#[cfg(test)]
mod tests;
