//! Warmroute's indexer: folds the log into one tree and answers what each worker holds.
//!
//! Pure: [`tree`] (which source holds which blocks), [`fold`] (what the log's messages, heartbeats
//! and time do to it), [`query`] (a question's answer), [`snapshot`] (what outlives a process),
//! [`same_log`] (whether the log is still the one that was read). [`Service`] is the shell that tails the log
//! and serves queries through a plane; [`http`] serves the same over HTTP. [`Handle`] is how others
//! in the same process ask. [`turns`] is the lock between the one that writes and those that ask.
//!
//! It takes part in no decision: which worker is chosen, what a tier is worth, who is a candidate,
//! is the router's.
#![forbid(unsafe_code)]

pub mod args;
pub mod doctor;
pub mod fold;
pub mod http;
mod metrics;
pub mod query;
pub mod same_log;
mod service;
pub mod snapshot;
pub mod tree;
pub mod turns;
pub mod verify;
mod view;

pub use metrics::unix_ns;
pub use service::{
    Handle, IndexerConfig, READY_LAG_MAX, Replica, Service, SnapshotConfig, TaskFailed,
};
pub use view::{SourceDump, SourceView, TierWords, WorkerView};

#[cfg(test)]
mod tests_support;
