//! Blocking work away from the threads that run tasks.
//!
//! A runtime with one thread runs the work inline: it has no other thread that the work could
//! delay, and the order of events stays the same in every run, which the simulation needs.

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::{JoinError, spawn_blocking};

/// Runs blocking work. An error means that it panicked.
pub async fn run<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    if has_one_thread() {
        return Ok(work());
    }
    spawn_blocking(work).await
}

/// Runs a future whose polls block for long. An error means that it panicked.
pub async fn run_future<F>(future: F) -> Result<F::Output, JoinError>
where
    F: Future<Output: Send> + Send + 'static,
{
    if has_one_thread() {
        return Ok(future.await);
    }
    let runtime = Handle::current();
    spawn_blocking(move || runtime.block_on(future)).await
}

/// Runs blocking work without waiting for its end.
pub fn detach(work: impl FnOnce() + Send + 'static) {
    if has_one_thread() {
        work();
    } else {
        drop(spawn_blocking(work));
    }
}

fn has_one_thread() -> bool {
    Handle::current().runtime_flavor() == RuntimeFlavor::CurrentThread
}

#[cfg(test)]
mod tests {
    use std::thread::current;

    use super::*;

    async fn threads() -> [std::thread::ThreadId; 2] {
        [
            run(|| current().id()).await.unwrap(),
            run_future(async { current().id() }).await.unwrap(),
        ]
    }

    #[tokio::test]
    async fn one_thread_runs_blocking_work_inline() {
        assert_eq!(threads().await, [current().id(); 2]);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn several_threads_hand_blocking_work_to_another() {
        let own = current().id();
        assert!(threads().await.into_iter().all(|other| other != own));
    }
}
