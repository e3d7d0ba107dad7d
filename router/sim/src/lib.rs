//! The engine model, and the replay of a trace of requests against it in virtual time.
//!
//! [`sim`] models vLLM's block cache, scheduler and step timing. [`simulate`] runs the command
//! `warmroute-router simulate`: routing cores, engine models and an index, no IO, no clock.
//! [`tune`] searches for the parameters that suit a trace. [`trace`] is what is replayed,
//! [`recording`] is the format of recorded requests, and [`fit`] finds an engine's speed in them.
//!
//! The serving path uses [`recording`] only.
#![forbid(unsafe_code)]

pub mod fit;
pub mod recording;
pub mod sim;
pub mod simulate;
pub mod trace;
pub mod tune;
