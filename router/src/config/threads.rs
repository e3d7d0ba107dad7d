//! How the processors are shared between the runtimes of the process.

use std::num::NonZeroUsize;

/// Threads beside the one of the plane, the exchange with other routers, and an index in this
/// process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadCounts {
    /// Clients, engines and the choice of workers, a runtime each; 0: the plane's thread has these
    /// too.
    pub connections: usize,
    /// All that no request waits for: the admin port, health checks, shims in this process, logs.
    pub background: NonZeroUsize,
}

impl ThreadCounts {
    /// Half of the processors serve requests unless the settings say otherwise. Few busy threads
    /// take less processor time than many that wake each other for single messages.
    pub(super) fn new(processors: usize, request_threads: Option<NonZeroUsize>) -> Self {
        let requests = request_threads.map_or(processors / 2, NonZeroUsize::get);
        // One thread that does both has no other thread to wake.
        let connections = if requests > 1 { requests } else { 0 };
        let background = processors.saturating_sub(connections + 1);
        Self {
            connections,
            background: NonZeroUsize::new(background).unwrap_or(NonZeroUsize::MIN),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(processors: usize, request_threads: usize) -> (usize, usize) {
        let counts = ThreadCounts::new(processors, NonZeroUsize::new(request_threads));
        (counts.connections, counts.background.get())
    }

    #[test]
    fn half_of_the_processors_serve_connections_and_one_the_plane() {
        assert_eq!(counts(1, 0), (0, 1));
        assert_eq!(counts(2, 0), (0, 1));
        assert_eq!(counts(3, 0), (0, 2));
        assert_eq!(counts(4, 0), (2, 1));
        assert_eq!(counts(16, 0), (8, 7));
    }

    #[test]
    fn the_setting_leaves_the_other_processors_to_the_background() {
        assert_eq!(counts(16, 1), (0, 15));
        assert_eq!(counts(16, 12), (12, 3));
        assert_eq!(counts(2, 2), (2, 1));
        assert_eq!(counts(2, 64), (64, 1));
    }
}
