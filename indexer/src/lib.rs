//! Warmroute's indexer: folds the log into one tree and answers what each worker holds.
//!
//! The crate is the IO shell of `warmroute-index`, whose modules it re-exports. [`Service`] tails
//! the log and serves queries through a plane, [`http`] serves them over HTTP, and a [`Handle`]
//! answers them within the process. [`doctor`] diagnoses a whole plane.
//!
//! It takes no part in routing: the router values tiers and selects workers.
#![forbid(unsafe_code)]

pub mod args;
pub mod credentials;
pub mod doctor;
pub mod http;
mod metrics;
mod service;

pub use metrics::unix_ns;
pub use service::{
    Handle, IndexerConfig, NotReady, READY_LAG_MAX, Replica, Service, SnapshotConfig, TaskFailed,
};
pub use warmroute_index::view::{SourceCut, SourceView, TierWords, WorkerView};
pub use warmroute_index::{fair_lock, fold, query, same_log, snapshot, tree};

#[cfg(test)]
mod tests_support;
