//! Messages between routers about tenants, so that a tenant's limits hold over all routers.
//!
//! Counters grow with the life of a router, so that a message that is lost costs nothing, and one
//! that comes twice changes nothing.

use bincode::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_64;

use crate::RouterId;

/// One router's use by tenants, ten times a second. Without tenants: a sign of life.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct TenantReport {
    pub router: RouterId,
    /// Grows with each message of the router. An older message after a newer one says nothing.
    pub number: u64,
    pub tenants: Vec<TenantUse>,
}

/// One tenant's use of one router.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct TenantUse {
    /// XXH3-64 of the tenant's name.
    pub tenant: u64,
    pub requests: UnitUse,
    pub tokens: UnitUse,
    /// Requests in progress.
    pub open: u32,
    /// Requests that may be in progress at the router.
    pub open_claim: u32,
    /// Claim on the requests of a second. That on the requests of a minute is in `requests`.
    pub second_claim: i64,
}

impl TenantUse {
    /// The id of a tenant's name.
    #[must_use]
    pub fn id(name: &str) -> u64 {
        xxh3_64(name.as_bytes())
    }
}

/// Use of one kind of units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct UnitUse {
    /// Used since the router's start, some messages ago: the base for a reader that has none.
    pub before: i64,
    /// Used since the router's start.
    pub used: i64,
    /// Recent demand in thousandths of units a report, refused ones included.
    pub demand: u64,
    /// Units of the tenant's budget that the router may still spend before it reports.
    pub claim: i64,
}

/// What is left of each tenant's limits as a router knows it, for routers that start. Sent while a
/// router is new. Without rows from a router that starts itself: it knows nothing of them.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct TenantLevels {
    pub router: RouterId,
    /// The others that it knows, in the first message of a report. Its claims leave room for their
    /// parts.
    pub known: Vec<RouterId>,
    /// Messages of the same report that follow.
    pub following: u32,
    pub tenants: Vec<TenantLevel>,
}

/// Units left of one tenant's limits; below zero: debt. `None`: no such limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct TenantLevel {
    /// XXH3-64 of the tenant's name.
    pub tenant: u64,
    /// Requests of a second.
    pub second: Option<i64>,
    /// Requests of a minute.
    pub minute: Option<i64>,
    pub tokens: Option<i64>,
}

/// Most tenants in a report.
pub const REPORTED_TENANTS_MAX: usize = 512;
