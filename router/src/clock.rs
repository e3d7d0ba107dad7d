//! The wall clock: for dates in chat templates, the time of a drain, and the identity of a log. No
//! event is ordered or timed by it.

use std::time::{Duration, SystemTime};

use crate::tokenize::CivilTime;

/// Time since the Unix epoch; zero on a clock that is before it.
#[expect(
    clippy::disallowed_methods,
    reason = "the only place; callers show a date or draw an identity"
)]
pub(crate) fn unix_time() -> Duration {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
}

pub(crate) fn civil_now() -> CivilTime {
    CivilTime::from_unix(i64::try_from(unix_time().as_secs()).unwrap_or(i64::MAX))
}
