//! Keys of `[engines]` about requests that wait while all workers of their model are full.

use std::time::Duration;

use super::file::Settings;

/// Most waiting requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueLengths {
    pub all: usize,
    pub per_model: usize,
}

impl Settings {
    /// Longest time in the queue; zero: no request waits.
    pub(crate) const fn queue_timeout(&self) -> Duration {
        self.engines.queue_timeout_secs.duration()
    }

    pub(crate) const fn queue_lengths(&self) -> QueueLengths {
        QueueLengths {
            all: self.engines.max_queued_requests,
            per_model: self.engines.max_queued_requests_per_model,
        }
    }
}
