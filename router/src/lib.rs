//! Warmroute's router: an OpenAI-compatible proxy that knows every worker's KV cache and load.
//!
//! Pure crates, re-exported: [`openai`] (requests and answers), [`tokenize`] (text to token ids),
//! [`route`] (the decision), [`sync`] (how replicas agree about load), [`sim`] (the engine model),
//! [`simulate`] (a trace replayed against it). This crate is their shell: `proxy` (the public
//! port), `admin` (the admin port), [`fleet`] (the workers), [`index_client`], [`replication`] (the
//! other replicas), [`run`], `deployment` and `embedded` (wiring).
//!
//! What is deliberately absent: anything that knows how the plane carries its bytes, and any copy
//! of an engine's cache. Both are behind `warmroute_plane`.
#![forbid(unsafe_code)]

mod access_log;
mod admin;
mod admission;
mod answer_end;
pub mod audit;
mod batch_task;
mod call_report;
pub mod check;
mod clock;
pub mod config;
mod demotions;
mod deployment;
mod embedded;
mod engine_clients;
mod engine_connector;
mod engine_error;
mod engine_keys;
mod engine_names;
mod error;
pub mod fleet;
pub mod index_client;
pub mod indexer_pool;
mod journal;
pub mod key_command;
mod live_page;
pub mod lost_sources;
mod metrics;
mod picker;
mod proxy;
pub mod ready;
mod recorder;
pub mod replication;
mod retry_budget;
mod router_facts;
pub mod run;
mod selections;
pub mod settings;
pub mod shared_core;
mod spans;
mod tenant_sync;
mod tenants;
#[cfg(test)]
mod testing;
pub mod tokenizers;
pub mod trace_files;
pub mod tune_command;

pub use warmroute_chat::{openai, tokenize};
pub use warmroute_route::{self as route, sync};
pub use warmroute_sim::{fit, sim, simulate, tune};
