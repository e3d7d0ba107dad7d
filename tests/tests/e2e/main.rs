//! The whole product in real processes: HTTP and ZMQ between mock engines and one router.
//!
//! Nothing here decides by time: what has to come true is waited for, and figures are printed.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking, its helpers too"
)]

mod abuse;
mod churn;
mod credit;
mod fleet;
mod pages;
mod separation;
mod traffic;
