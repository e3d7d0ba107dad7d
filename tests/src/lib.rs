//! Test support: the mock engine, and what the tests across crates share.
#![forbid(unsafe_code)]

pub mod checker;
pub mod mock;
pub mod world;
