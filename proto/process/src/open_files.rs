//! The limit of open files: a proxied request needs two, one to its client and one to its engine.

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
    // The old limit stays in force; [`connections_max`] shows it.
    setrlimit(Resource::Nofile, raised).unwrap_or_default();
}

/// Files beside those of requests and workers: ports, the plane, logs, operators' connections.
const RESERVE: u64 = 128;

/// One file of so many is for the checks of workers, whose number is not known at the start.
const CHECKS_SHARE: u64 = 16;

/// So many connections fit into the limit, each with a file of its own and one to an engine, beside
/// `others` files.
#[must_use]
pub fn connections_max(others: u64) -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let reserved = RESERVE.saturating_add(limit / CHECKS_SHARE);
    let free = limit.saturating_sub(reserved.saturating_add(others));
    usize::try_from(free / 2).unwrap_or(usize::MAX).max(1)
}

/// This process, or the system, has as many open files as it may.
#[must_use]
pub fn are_exhausted(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_get_half_of_what_others_leave() {
        raise_limit();
        let limit = getrlimit(Resource::Nofile).current.unwrap();
        let connections = |others| connections_max(others) as u64;
        let free = limit - RESERVE - limit / CHECKS_SHARE;
        assert_eq!(connections(0), free / 2);
        assert_eq!(connections(free - 10), 5);
        assert_eq!(connections(u64::MAX), 1);
    }
}
