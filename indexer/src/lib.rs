//! Warmroute's indexer: folds the log into one tree and answers what each worker holds.
//!
//! Pure: [`tree`] (which source holds which blocks), [`fold`] (what the log's messages, heartbeats
//! and time do to it), [`query`] (a question's answer). `service` is the shell that tails the log
//! and serves queries through a plane; `http` serves the same over HTTP.
//!
//! It takes part in no decision: which worker is chosen, what a tier is worth, who is a candidate,
//! is the router's.
#![forbid(unsafe_code)]

pub mod fold;
pub mod query;
pub mod tree;

#[cfg(test)]
mod testing;
