//! The engine model, and the replay of a trace of requests against it in virtual time.
//!
//! [`sim`] models vLLM's block cache, scheduler and step timing. [`simulate`] runs the command
//! `warmroute-router simulate`: routing cores, engine models and an index, no IO, no clock.
//! [`trace`] is what it replays, [`recording`] is the format of recorded requests.
//!
//! The serving path uses [`recording`] only.
#![forbid(unsafe_code)]

pub mod recording;
pub mod sim;
pub mod simulate;
pub mod trace;
