//! The engine model: vLLM v1's block cache, scheduler and step timing, without a model.
//!
//! An [`EngineModel`] is one data-parallel rank. [`EngineModel::step`] does one scheduler step of
//! vLLM: running requests first, then waiting ones, chunked prefill under a token budget,
//! preemption when blocks run out. It returns the step's duration, the generated tokens and the
//! published cache events. [`EngineModel::held`] returns the true cache content.
//!
//! Pure: no clock, no randomness, no IO. Equal inputs give equal outputs. The mock engine, the
//! simulated world and the `simulate` command use it.
//!
//! Deliberately absent: speculative decoding, priorities, stop tokens, and step times that depend
//! on the context's length. A request generates exactly `max_tokens`. Groups other than full
//! attention exist only in the events.

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
pub use engine::{EngineModel, HeldPrefix, SubmitError};
pub use event::{CacheEvent, EngineHash, ExtraKey, GroupKind, Medium, StoredBlocks};
pub use request::{CachedTokens, EngineRequest, FinishReason, RequestId};
pub use scheduler::{Admitted, EngineLoad, EngineTotals, Finished, Produced, StepOutcome};
pub use timing::{StepWork, TimingProfile};

#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;
