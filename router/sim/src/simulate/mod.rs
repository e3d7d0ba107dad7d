//! `warmroute-router simulate`: replays a trace of requests against a simulated fleet.
//!
//! A discrete-event simulation in virtual time around production code: a routing core per router
//! ([`warmroute_route`]), an engine model per worker ([`crate::sim`]) and the indexer's tree. This
//! module only delivers their messages, with delays.
//!
//! Pure: equal flags and traces give equal bytes. docs/WORKBENCH.md defines the figures.
//!
//! Not simulated: networks besides three constant delays, tokenization, failures (see the simulated
//! world in `tests`), retries, several models.

pub(crate) mod args;
pub(crate) mod arrivals;
pub(crate) mod capacity;
mod index;
pub(crate) mod outcome;
pub(crate) mod replicas;
mod report;
pub(crate) mod world;

pub use args::{ReplayArgs, SimulateArgs};
pub use report::simulate;

use warmroute_proto::codec::DecodeError;

use index::Contradiction;
use warmroute_route::ledger::LedgerError;

/// An inconsistency between parts, which no input can cause.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SimulationError {
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
