//! The pure core of Warmroute's publisher shim: engine cache events in, exact log records out.
//!
//! [`wire`] decodes an engine's messages. [`mirror`] keeps an exact copy of one rank's cache by
//! content. [`source`] is the state machine of one rank: which batches are applied, which records
//! are written to the log, and which state may be claimed. [`checkpoint`] is what a restarted shim
//! resumes from, in the encoding of [`fields`].
//!
//! No sockets, files, clocks or tasks: those are in the crate `warmroute-shim`.
#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod fields;
pub mod mirror;
pub mod source;
pub mod wire;

#[cfg(test)]
mod testing;
