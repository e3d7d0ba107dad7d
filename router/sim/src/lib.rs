//! The engine model, and the replay of a trace of requests against it in virtual time.
//!
//! [`sim`] models vLLM's block cache, scheduler and step timing. [`simulate`] runs the command
//! `warmroute-router simulate`: routing cores, engine models and an index, no IO, no clock.
//!
//! No serving path depends on this crate.
#![forbid(unsafe_code)]

pub mod sim;
pub mod simulate;
