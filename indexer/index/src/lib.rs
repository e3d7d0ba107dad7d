//! Warmroute's index: a pure fold of the log into one tree, and the answers read from it.
//!
//! [`tree`] stores which source holds which blocks, [`fold`] applies log messages, heartbeats and
//! time to it, [`query`] answers queries, [`view`] describes sources as plain values, [`snapshot`]
//! is the persistent form, [`same_log`] detects a log that was replaced or rolled back.
//! [`fair_lock`] is the lock between the one writer and the readers, [`writer`] applies messages
//! under it.
//!
//! No IO, no clock, no runtime: time is an argument.
#![forbid(unsafe_code)]

pub mod fair_lock;
pub mod fold;
pub mod query;
pub mod same_log;
pub mod snapshot;
#[cfg(any(test, feature = "testing"))]
pub mod tests_support;
pub mod tree;
pub mod view;
pub mod writer;
