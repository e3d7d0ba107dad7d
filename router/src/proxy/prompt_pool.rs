//! The threads that prepare large prompts. Work is done in steps; between two steps the next job is
//! chosen: the one that is due first, where a job is due later the more it has left. So short jobs
//! pass long ones, and long ones do not starve. One thread takes short jobs only: no long step
//! (rendering a template cannot be paused) delays those.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Duration, Instant};

use crate::tokenize::TaskState;

/// A job with more bytes left is long.
pub(super) const SHORT_BYTES_MAX: usize = 256 << 10;

/// A job is due this much later for each 64 KiB that it has left: about the time that they take.
const DELAY_OF_64_KIB: Duration = Duration::from_millis(2);

pub(super) const THREADS_MAX: usize = 8;

/// Requests at one time whose prompt took too long. Reading their bodies takes some milliseconds.
const LATE_MAX: usize = 2;

/// Work in steps of a few milliseconds. Dropped when it is done.
pub(super) trait PromptJob: Send {
    /// Does the next step.
    fn step(&mut self) -> TaskState;

    /// A measure of the work left.
    fn bytes_left(&self) -> usize;
}

/// A pool of threads, which end after their current step when the pool is dropped.
pub(crate) struct PromptPool {
    jobs: Arc<JobQueues>,
    late: Arc<Semaphore>,
}

#[derive(Default)]
struct JobQueues {
    waiting: Mutex<WaitingJobs>,
    changed: Condvar,
}

/// Bounded by the budget of bodies: each job holds one.
#[derive(Default)]
struct WaitingJobs {
    short: BinaryHeap<Reverse<WaitingJob>>,
    long: BinaryHeap<Reverse<WaitingJob>>,
    number: u64,
    ended: bool,
}

struct WaitingJob {
    due: Instant,
    /// Breaks ties.
    number: u64,
    job: Box<dyn PromptJob>,
}

/// The jobs that a thread takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JobLane {
    Short,
    Any,
}

impl PromptPool {
    /// Starts one thread for each core, at least two.
    pub(crate) fn start() -> io::Result<Self> {
        let pool = Self {
            jobs: Arc::default(),
            late: Arc::new(Semaphore::new(LATE_MAX)),
        };
        let cores = thread::available_parallelism().map_or(1, usize::from);
        for number in 0..cores.clamp(2, THREADS_MAX) {
            let jobs = Arc::clone(&pool.jobs);
            let lane = match number {
                0 => JobLane::Short,
                _ => JobLane::Any,
            };
            let thread = thread::Builder::new().name(format!("prompts-{number}"));
            thread.spawn(move || jobs.run(lane))?;
        }
        Ok(pool)
    }

    /// Waits for the right to do without this pool what took too long in it.
    pub(super) async fn late_turn(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.late).acquire_owned().await.ok()
    }

    pub(super) fn submit(&self, job: Box<dyn PromptJob>) {
        self.jobs.put(job);
    }
}

impl Drop for PromptPool {
    fn drop(&mut self) {
        self.jobs.lock().ended = true;
        self.jobs.changed.notify_all();
    }
}

impl JobQueues {
    fn lock(&self) -> MutexGuard<'_, WaitingJobs> {
        // Jobs run outside the lock.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, job: Box<dyn PromptJob>) {
        let left = job.bytes_left();
        let parts = u32::try_from(left >> 10).unwrap_or(u32::MAX);
        let due = Instant::now() + DELAY_OF_64_KIB / 64 * parts;
        let mut waiting = self.lock();
        waiting.number += 1;
        let number = waiting.number;
        let job = Reverse(WaitingJob { due, number, job });
        if left <= SHORT_BYTES_MAX {
            waiting.short.push(job);
        } else {
            waiting.long.push(job);
        }
        drop(waiting);
        // The thread of short jobs may be the one that is woken.
        self.changed.notify_all();
    }

    fn run(&self, lane: JobLane) {
        while let Some(mut job) = self.next(lane) {
            // A job that panics is dropped, and with it the sender of its result.
            let stepped = catch_unwind(AssertUnwindSafe(|| job.step()));
            if matches!(stepped, Ok(TaskState::More)) {
                self.put(job);
            }
        }
    }

    /// Waits for a job; `None` after the pool's end.
    fn next(&self, lane: JobLane) -> Option<Box<dyn PromptJob>> {
        let mut waiting = self.lock();
        while !waiting.ended {
            if let Some(job) = waiting.take(lane) {
                return Some(job.job);
            }
            let woken = self.changed.wait(waiting);
            waiting = woken.unwrap_or_else(PoisonError::into_inner);
        }
        None
    }
}

impl WaitingJobs {
    fn take(&mut self, lane: JobLane) -> Option<WaitingJob> {
        let from = match (self.short.peek(), self.long.peek()) {
            (_, None) => &mut self.short,
            (_, Some(_)) if lane == JobLane::Short => &mut self.short,
            (Some(short), Some(long)) if short.0 <= long.0 => &mut self.short,
            (_, Some(_)) => &mut self.long,
        };
        from.pop().map(|Reverse(job)| job)
    }
}

impl Ord for WaitingJob {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.due, self.number).cmp(&(other.due, other.number))
    }
}

impl PartialOrd for WaitingJob {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for WaitingJob {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for WaitingJob {}

#[cfg(test)]
mod tests;
