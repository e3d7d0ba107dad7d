//! How the processors are shared between the runtimes of the process.

use std::num::NonZeroUsize;

/// Threads by what they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadCounts {
    /// Clients, engines and the choice of workers, a runtime each; 0: the plane's thread has these
    /// too.
    pub connections: usize,
    /// The plane, the exchange with other routers, and an index in this process.
    pub plane: NonZeroUsize,
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
        let at_least_one = |count| NonZeroUsize::new(count).unwrap_or(NonZeroUsize::MIN);
        let plane = match connections {
            0 => NonZeroUsize::MIN,
            _ => at_least_one(processors / 8),
        };
        Self {
            connections,
            plane,
            background: at_least_one(processors.saturating_sub(connections + plane.get())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(processors: usize, request_threads: usize) -> (usize, usize, usize) {
        let counts = ThreadCounts::new(processors, NonZeroUsize::new(request_threads));
        let ThreadCounts {
            connections,
            plane,
            background,
        } = counts;
        (connections, plane.get(), background.get())
    }

    #[test]
    fn half_of_the_processors_serve_connections_and_an_eighth_the_plane() {
        assert_eq!(counts(1, 0), (0, 1, 1));
        assert_eq!(counts(2, 0), (0, 1, 1));
        assert_eq!(counts(3, 0), (0, 1, 2));
        assert_eq!(counts(4, 0), (2, 1, 1));
        assert_eq!(counts(16, 0), (8, 2, 6));
    }

    #[test]
    fn the_setting_leaves_the_other_processors_to_the_background() {
        assert_eq!(counts(16, 1), (0, 1, 15));
        assert_eq!(counts(16, 12), (12, 2, 2));
        assert_eq!(counts(2, 2), (2, 1, 1));
        assert_eq!(counts(2, 64), (64, 1, 1));
    }
}
