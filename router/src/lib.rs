//! Warmroute's router: an OpenAI-compatible proxy that knows every worker's KV cache and load.
//!
//! Pure: [`openai`] (what clients and engines say), [`tokenize`] (text to token ids), [`route`] (what
//! a choice costs, who carries which load, whom to choose), [`sync`] (how replicas agree about load),
//! [`sim`] (the engine model), [`simulate`] (a trace replayed against it), `health`. Shells: `proxy`
//! (the public port), `admin` (the other one), `fleet` and `register` (who the workers are and whether
//! they are what they seem), `index_client`, [`replication`] (the other replicas), [`run`],
//! `surroundings` and `embedded` (wiring).
//!
//! What is deliberately absent: anything that knows how the plane carries its bytes, and any copy of
//! an engine's cache. Both are behind `warmroute_plane`.
#![forbid(unsafe_code)]

mod admin;
mod audit;
mod clock;
pub mod config;
mod drains;
mod embedded;
mod error;
mod fleet;
pub mod health;
pub mod index_client;
mod journal;
mod metrics;
mod proxy;
mod ready;
mod register;
pub mod replicas;
pub mod replication;
pub mod run;
pub mod shared_core;
mod surroundings;
mod workers;

pub use warmroute_chat::{openai, tokenize};
pub use warmroute_route::{self as route, sync};
pub use warmroute_sim::{sim, simulate};
