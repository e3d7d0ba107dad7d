//! The wall clock, for the two things that need one: dates in chat templates, and the identity of a
//! log. Nothing is ordered or timed by it.

use std::time::{Duration, SystemTime};

use crate::tokenize::CivilTime;

/// Since the Unix epoch; zero on a clock that stands before it.
#[expect(
    clippy::disallowed_methods,
    reason = "the one place; its readers show a date or draw an identity"
)]
pub(crate) fn unix_time() -> Duration {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
}

pub(crate) fn civil_now() -> CivilTime {
    CivilTime::from_unix(i64::try_from(unix_time().as_secs()).unwrap_or(i64::MAX))
}
