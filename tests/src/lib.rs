//! Test support that the tests across crates share: the checker and the simulated world.
#![forbid(unsafe_code)]

pub mod checker;
pub mod world;
