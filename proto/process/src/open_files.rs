//! The limit of open files: a proxied request needs two, one to its client and one to its engine; an
//! idle client needs one.

use std::error::Error;
use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit to the hard one: shells and containers often set it to 1,024, which is a
/// bound of `select(2)` and none of this process.
pub fn raise_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    // The old limit stays in force; [`FileShares`] shows it.
    setrlimit(Resource::Nofile, raised).unwrap_or_default();
}

/// Files beside those of requests and workers: ports, the plane, logs, operators' connections.
const RESERVE: u64 = 128;

/// One file of so many is for the checks of workers, whose number is not known at the start.
const CHECKS_SHARE: u64 = 16;

/// One file of so many is for engines, even if clients hold all that they may.
const ENGINES_SHARE: u64 = 8;

/// What the limit of open files allows a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileShares {
    /// Files of connections to clients and to engines together.
    pub connections: usize,
    /// Connections to clients.
    pub clients: usize,
    /// Requests in flight, each with a connection on either side.
    pub requests: usize,
}

impl FileShares {
    /// Beside `others` files.
    #[must_use]
    pub fn beside(others: u64) -> Self {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let reserved = RESERVE.saturating_add(limit / CHECKS_SHARE);
        let free = limit.saturating_sub(reserved.saturating_add(others));
        let count = |files| usize::try_from(files).unwrap_or(usize::MAX).max(1);
        Self {
            connections: count(free),
            clients: count(free - free / ENGINES_SHARE),
            requests: count(free / 2),
        }
    }
}

/// The error of a file beyond [`FileShares::connections`], as the system's beyond its limit.
#[must_use]
pub fn exhausted() -> io::Error {
    Errno::MFILE.into()
}

/// This process, or the system, has as many open files as it may.
#[must_use]
pub fn are_exhausted(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE))
}

/// That is the cause of an error: no connection was tried, so that it says nothing of the server.
#[must_use]
pub fn are_cause_of(error: &(dyn Error + 'static)) -> bool {
    let mut causes = std::iter::successors(Some(error), |&cause| cause.source());
    causes.any(|cause| cause.downcast_ref().is_some_and(are_exhausted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("not sent")]
    struct NotSent(#[source] io::Error);

    #[test]
    fn a_lack_of_files_is_found_below_other_errors() {
        assert!(are_cause_of(&NotSent(exhausted())));
        assert!(!are_cause_of(&NotSent(
            io::ErrorKind::ConnectionRefused.into()
        )));
    }

    #[test]
    fn clients_get_most_of_what_others_leave_and_requests_half() {
        raise_limit();
        let limit = getrlimit(Resource::Nofile).current.unwrap();
        let free = limit - RESERVE - limit / CHECKS_SHARE;
        let shares = |others| {
            let shares = FileShares::beside(others);
            [shares.connections, shares.clients, shares.requests].map(|count| count as u64)
        };
        assert_eq!(shares(0), [free, free - free / 8, free / 2]);
        assert_eq!(shares(free - 16), [16, 14, 8]);
        assert_eq!(shares(u64::MAX), [1; 3]);
    }
}
