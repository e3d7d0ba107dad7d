//! Warmroute's publisher shim: beside one engine, it turns cache events into exact log records.
//!
//! Three pure modules carry the decisions. [`wire`] decodes what engines say; [`mirror`] keeps an
//! exact copy of one rank's cache by content; [`source`] is the state machine of one rank: when
//! events may be believed, what is written to the log, and what may be claimed about it.
//!
//! Engine hashes and tokens end here: nothing behind the shim sees them.
#![forbid(unsafe_code)]

pub mod mirror;
pub mod source;
pub mod wire;

#[cfg(test)]
mod testing;
