//! Named tasks under one tracker. A task that ends early takes the process down: a process that
//! lacks a task looks healthy and is not.

use std::future::Future;

use prometheus::IntCounter;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The process's tasks.
#[derive(Clone)]
pub struct Tasks {
    tracker: TaskTracker,
    runtime: Handle,
    failures: IntCounter,
    /// Cancelled to stop the tasks.
    pub stop: CancellationToken,
    /// Cancelled when a task ends before `stop`.
    pub down: CancellationToken,
}

impl Tasks {
    /// Tasks on the current runtime.
    pub fn new(failures: IntCounter) -> Self {
        Self {
            tracker: TaskTracker::new(),
            runtime: Handle::current(),
            failures,
            stop: CancellationToken::new(),
            down: CancellationToken::new(),
        }
    }

    /// Tasks of the same process on another runtime.
    #[must_use]
    pub fn on(&self, runtime: &Handle) -> Self {
        Self {
            runtime: runtime.clone(),
            ..self.clone()
        }
    }

    #[must_use]
    pub const fn runtime(&self) -> &Handle {
        &self.runtime
    }

    pub fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let guard = TaskGuard {
            name,
            tasks: self.clone(),
        };
        let guarded = async move {
            // Dropped at the task's end, by return and by panic.
            let _guard = guard;
            task.await;
        };
        self.tracker.spawn_on(guarded, &self.runtime);
    }

    /// Stops all tasks and waits for their end.
    pub async fn end(&self) {
        self.stop.cancel();
        self.tracker.close();
        self.tracker.wait().await;
    }
}

struct TaskGuard {
    name: &'static str,
    tasks: Tasks,
}

impl Drop for TaskGuard {
    fn drop(&mut self) {
        if !self.tasks.stop.is_cancelled() {
            tracing::error!(task = self.name, "task ended early");
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
    async fn an_end_after_stop_does_not() {
        let tasks = tasks();
        let stop = tasks.stop.clone();
        tasks.spawn("stopped", async move { stop.cancelled().await });
        tasks.end().await;
        assert!(!tasks.down.is_cancelled());
    }
}
