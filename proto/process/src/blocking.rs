//! Blocking work away from the threads that run tasks.
//!
//! A runtime with one thread runs the work inline: it has no other thread that the work could
//! delay, and the order of events stays the same in every run, which the simulation needs.

use std::{io, thread};

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::oneshot;
use tokio::task::{JoinError, spawn_blocking};

use crate::connection_threads;

/// Niceness of a thread of low priority: a tenth of the processor time of a normal thread where both
/// want it, so that a lock that it holds for a moment, such as the allocator's, is released soon.
const LOW_PRIORITY: i32 = 10;

/// Runs blocking work. An error means that it panicked.
pub async fn run<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    if has_one_thread() {
        return Ok(work());
    }
    spawn_blocking(work).await
}

/// Runs work on a thread of its own, of low priority, which gets little processor time where others
/// want it. The work must not hold a lock for which others wait. The caller bounds the number of
/// threads. An error means that it panicked, or that no thread could start.
pub async fn run_low<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    if has_one_thread() {
        return Ok(work());
    }
    let (sender, result) = oneshot::channel();
    let thread = thread::Builder::new().name("low-priority".to_owned());
    thread.spawn(move || {
        lower_priority();
        // The caller may be gone.
        drop(sender.send(work()));
    })?;
    result.await.map_err(io::Error::other)
}

/// Lets a thread run that waits for this processor. Work of low priority calls it after each step of
/// some 50 µs: a thread that wakes up does not interrupt another one within its time slice of up to
/// 4 ms, whatever the priorities are.
pub fn give_way() {
    thread::yield_now();
}

/// Linux keeps a priority for each thread.
fn lower_priority() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::nice(LOW_PRIORITY) {
        tracing::debug!(%error, "the priority of a thread stays as it is");
    }
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

/// A thread that serves connections blocks none of them.
fn has_one_thread() -> bool {
    let flavor = Handle::current().runtime_flavor();
    flavor == RuntimeFlavor::CurrentThread && connection_threads::current_number().is_none()
}

#[cfg(test)]
mod tests {
    use std::thread::current;

    use super::*;

    async fn threads() -> [thread::ThreadId; 3] {
        [
            run(|| current().id()).await.unwrap(),
            run_low(|| current().id()).await.unwrap(),
            run_future(async { current().id() }).await.unwrap(),
        ]
    }

    #[tokio::test]
    async fn one_thread_runs_blocking_work_inline() {
        assert_eq!(threads().await, [current().id(); 3]);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn several_threads_hand_blocking_work_to_another() {
        let own = current().id();
        assert!(threads().await.into_iter().all(|other| other != own));
    }

    #[cfg(target_os = "linux")]
    #[tokio::test(flavor = "multi_thread")]
    async fn only_the_thread_of_its_own_has_a_low_priority() {
        let niceness = || rustix::process::getpriority_process(None).unwrap();
        let own = niceness();
        let low = run_low(niceness).await.unwrap();
        assert_eq!(low, (own + LOW_PRIORITY).min(19));
        assert_eq!(niceness(), own);
    }
}
