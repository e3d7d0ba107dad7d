//! The simulated world, and the checker that it shares with the end-to-end tests.
#![forbid(unsafe_code)]

pub mod checker;
pub mod world;
