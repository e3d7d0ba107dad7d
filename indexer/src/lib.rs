//! Warmroute's indexer.
#![forbid(unsafe_code)]

pub mod tree;
