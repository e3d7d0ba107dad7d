//! How the processors are shared between the two runtimes of the process.

use std::num::NonZeroUsize;

/// Threads of each runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadCounts {
    /// Clients, the choice of workers, the plane, and an index in this process.
    pub requests: NonZeroUsize,
    /// All that no request waits for: the admin port, health checks, shims in this process, logs.
    pub background: NonZeroUsize,
}

impl ThreadCounts {
    /// Half of the processors serve requests unless the settings say otherwise. Few busy threads
    /// take less processor time than many that wake each other for single messages.
    pub(super) fn new(processors: usize, request_threads: Option<NonZeroUsize>) -> Self {
        let at_least_one = |count| NonZeroUsize::new(count).unwrap_or(NonZeroUsize::MIN);
        let requests = request_threads.unwrap_or_else(|| at_least_one(processors / 2));
        Self {
            requests,
            background: at_least_one(processors.saturating_sub(requests.get())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(processors: usize, request_threads: usize) -> (usize, usize) {
        let counts = ThreadCounts::new(processors, NonZeroUsize::new(request_threads));
        (counts.requests.get(), counts.background.get())
    }

    #[test]
    fn each_runtime_has_half_of_the_processors_and_at_least_one_thread() {
        assert_eq!(counts(1, 0), (1, 1));
        assert_eq!(counts(2, 0), (1, 1));
        assert_eq!(counts(3, 0), (1, 2));
        assert_eq!(counts(16, 0), (8, 8));
    }

    #[test]
    fn the_setting_leaves_the_other_processors_to_the_background() {
        assert_eq!(counts(16, 12), (12, 4));
        assert_eq!(counts(2, 2), (2, 1));
        assert_eq!(counts(2, 64), (64, 1));
    }
}
