//! Warmroute's publisher shim: runs beside one engine and turns its cache events into log records.
//!
//! The decisions are in the pure crate `warmroute-mirror`. This crate is the shell around it:
//! [`Service`] owns the sockets, the engine's HTTP client, the lease and the registration; [`http`]
//! serves what a [`Handle`] shows; [`metrics`] renders several shims as one page.
//!
//! Engine hashes and tokens do not leave the shim.
#![forbid(unsafe_code)]

pub mod args;
mod config;
pub mod engine;
mod engine_key;
pub mod http;
pub mod metrics;
mod service;
mod state_dir;

pub use config::{Endpoints, OUTBOX_BYTES_MAX, ShimConfig};
pub use engine_key::{EngineKey, EngineKeyError, EngineKeySource};
pub use service::{EngineFault, Error, Handle, NotReady, Service, TaskFailed};
pub use state_dir::{CheckpointStore, StateDir, StateDirError};
pub use warmroute_mirror::{checkpoint, mirror, source, wire};
