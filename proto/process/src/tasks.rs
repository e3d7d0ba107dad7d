//! Named tasks under one tracker. A task that ends before it was told to takes the process down:
//! half a router looks healthy and is not.

use std::future::Future;

use prometheus::IntCounter;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The process's tasks.
#[derive(Clone)]
pub struct Tasks {
    tracker: TaskTracker,
    failures: IntCounter,
    /// Tells the tasks to end.
    pub stop: CancellationToken,
    /// A task ended without being told.
    pub down: CancellationToken,
}

impl Tasks {
    pub fn new(failures: IntCounter) -> Self {
        Self {
            tracker: TaskTracker::new(),
            failures,
            stop: CancellationToken::new(),
            down: CancellationToken::new(),
        }
    }

    pub fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let watched = Watched {
            name,
            tasks: self.clone(),
        };
        self.tracker.spawn(async move {
            // Dropped at the task's end, by return and by panic.
            let _watched = watched;
            task.await;
        });
    }

    /// Tells all to end, and waits until they did.
    pub async fn end(&self) {
        self.stop.cancel();
        self.tracker.close();
        self.tracker.wait().await;
    }
}

struct Watched {
    name: &'static str,
    tasks: Tasks,
}

impl Drop for Watched {
    fn drop(&mut self) {
        if !self.tasks.stop.is_cancelled() {
            tracing::error!(task = self.name, "a task ended early");
            self.tasks.failures.inc();
            self.tasks.down.cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tasks() -> Tasks {
        Tasks::new(IntCounter::new("failures", "Tasks that ended early").unwrap())
    }

    #[tokio::test]
    async fn an_early_end_takes_the_process_down() {
        let tasks = tasks();
        tasks.spawn("short", async {});
        tasks.down.cancelled().await;
    }

    #[tokio::test]
    async fn an_end_that_was_told_does_not() {
        let tasks = tasks();
        let stop = tasks.stop.clone();
        tasks.spawn("obedient", async move { stop.cancelled().await });
        tasks.end().await;
        assert!(!tasks.down.is_cancelled());
    }
}
