//! Warmroute's publisher shim: beside one engine, it turns cache events into exact log records.
//!
//! Three pure modules carry the decisions. [`wire`] decodes what engines say; [`mirror`] keeps an
//! exact copy of one rank's cache by content; [`source`] is the state machine of one rank: when
//! events may be believed, what is written to the log, and what may be claimed about it. Around
//! them is the shell: [`Service`] owns sockets, the engine's HTTP, lease and registration; [`http`]
//! shows what a [`Handle`] knows, [`metrics`] what several do.
//!
//! Engine hashes and tokens end here: nothing behind the shim sees them.
#![forbid(unsafe_code)]

pub mod args;
pub mod checkpoint;
mod config;
mod engine;
mod feed;
pub mod http;
pub mod metrics;
pub mod mirror;
mod service;
pub mod source;
mod state_dir;
pub mod wire;

pub use config::{OUTBOX_BYTES_MAX, ShimConfig};
pub use engine::{EngineKey, EngineKeyError};
pub use service::{Error, Handle, NotReady, Service, TaskFailed};
pub use state_dir::{StateDir, StateDirError};

#[cfg(test)]
mod testing;
