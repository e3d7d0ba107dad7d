//! The engine model: vLLM v1's block cache and the timing of its steps, without a model in it.
//!
//! An [`EngineModel`] is one data-parallel rank. Requests are submitted to it, [`EngineModel::step`] does
//! what one scheduler step of vLLM does (running requests first, then waiting ones, chunked prefill
//! under a token budget, preemption when blocks run out) and tells how long that took, which tokens
//! came out and what was published about the cache. [`EngineModel::held`] is the truth to be found.
//!
//! Pure: no clock, no randomness, no IO. Equal inputs give equal outputs. The mock engine, the
//! simulated world and the `simulate` command are built on it.
//!
//! What is deliberately absent: speculative decoding, priorities, stop tokens (a request generates
//! exactly what it asks for), and step times that depend on the context's length. Groups other than
//! full attention exist only in the published events.

mod config;
mod engine;
mod event;
mod journal;
mod offload;
mod pool;
mod request;
mod scheduler;
mod slot_list;
mod timing;

pub use config::{EngineConfig, EventMode};
pub use engine::{EngineLoad, EngineModel, EngineTotals, HeldPrefix, SubmitError};
pub use event::{CacheEvent, EngineHash, ExtraKey, GroupKind, Medium, StoredBlocks};
pub use request::{CachedTokens, EngineRequest, FinishReason, PromptItem, RequestId};
pub use scheduler::{Admitted, Finished, Produced, StepOutcome};
pub use timing::{StepWork, TimingProfile};

#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;
