//! The limit of open files: a proxied request needs two, one to its client and one to its engine.

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

/// Files beside those of requests: ports, the plane, event sockets, logs, operators' connections.
const RESERVE: u64 = 128;

/// So many connections whose requests are forwarded fit into the limit.
#[must_use]
pub fn connections_max() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit.saturating_sub(RESERVE) / 2)
        .unwrap_or(usize::MAX)
        .max(1)
}
