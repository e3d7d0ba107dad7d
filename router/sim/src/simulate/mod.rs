//! `warmroute-router simulate`: what a choice of routing would do to a trace of requests.
//!
//! A discrete-event simulation in virtual time around the served parts: the decision core
//! ([`warmroute_route`]) once a router, the engine model ([`crate::sim`]) once a worker, the indexer's
//! tree between them. Nothing of them is written anew here; this module only moves their messages,
//! with delays.
//!
//! Pure: equal flags and an equal trace give equal bytes. What the load and the other figures mean, and
//! what was found with it, is in docs/SIMULATION.md.
//!
//! Not simulated: networks but for three constant delays, tokenization, failures (the failure world
//! is for these), retries, prompts of several models.

mod args;
mod arrivals;
mod capacity;
mod index;
mod outcome;
mod replicas;
mod report;
mod trace;
mod world;

pub use args::SimulateArgs;
pub use report::simulate;

use warmroute_proto::codec::DecodeError;

use index::Contradiction;
use warmroute_route::ledger::LedgerError;

/// Parts that do not fit together: no input can cause it.
#[derive(Debug, thiserror::Error)]
enum SimulationError {
    #[error("the index contradicts an engine: {0}")]
    Index(#[from] Contradiction),
    #[error("a change of load cannot be written: {0}")]
    Ledger(#[source] LedgerError),
    #[error("a router cannot read what another one wrote: {0}")]
    Decode(#[source] DecodeError),
    #[error("a decision names a source that is not in the fleet")]
    UnknownSource,
    #[error("a request that was moved is not where it was sent")]
    UnknownFlight,
}

#[cfg(test)]
mod tests;
