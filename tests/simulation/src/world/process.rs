//! One simulated process: a tokio runtime of its own, whose paused clock the world moves.
//!
//! The runtime has one thread and no I/O driver. Dropping it is a SIGKILL, not running it a SIGSTOP, and
//! moving its clock faster or slower than the world's a clock that drifts. Its clock shows whole
//! milliseconds, the grain of tokio's timers.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::pin;
use std::task::{Poll, Waker};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::task::{JoinHandle, yield_now};
use tokio::time::{Instant, advance, sleep_until};

use super::plane::At;

/// Task polls between two looks at the main future: the grain of [`Process::run_some`].
const POLLS: u32 = 8;

thread_local! {
    /// Woken when the runtime that is running has nothing left to do.
    static IDLE: Cell<Option<Waker>> = const { Cell::new(None) };
}

pub(super) struct Process {
    runtime: Runtime,
    /// Ends only with the process, unless something went wrong.
    main: JoinHandle<()>,
    started: At,
    /// The local time of `started`.
    origin: Instant,
}

impl Process {
    pub(super) fn start<F>(started: At, main: impl FnOnce() -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let runtime = Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .event_interval(POLLS)
            .on_thread_park(|| {
                if let Some(waker) = IDLE.take() {
                    waker.wake();
                }
            })
            .build()
            .unwrap();
        let (main, origin) = {
            let _context = runtime.enter();
            (main(), Instant::now())
        };
        let main = runtime.spawn(main);
        Self {
            runtime,
            main,
            started,
            origin,
        }
    }

    /// Runs all tasks until nothing is left to do at this local time since the start.
    pub(super) fn run_until(&mut self, local: Duration) {
        let target = self.at(local);
        self.runtime.block_on(async {
            if Instant::now() < target {
                sleep_until(target).await;
            }
            idle().await;
        });
    }

    /// Moves the clock while all tasks stand still: every timer in between is late.
    pub(super) fn stand_until(&mut self, local: Duration) {
        let target = self.at(local);
        self.runtime.block_on(async {
            let by = target.saturating_duration_since(Instant::now());
            let mut standstill = pin!(advance(by));
            // Its first poll moves the clock; no task runs before it returns.
            poll_fn(|context| {
                let _moved = standstill.as_mut().poll(context);
                Poll::Ready(())
            })
            .await;
        });
    }

    /// Runs a few tasks at the present moment.
    pub(super) fn run_some(&mut self) {
        self.runtime.block_on(yield_now());
    }

    /// The answer of the process's tasks, if they give it at the present moment.
    pub(super) fn answer<T>(&mut self, question: impl Future<Output = T>) -> Option<T> {
        self.runtime.block_on(async {
            tokio::select! {
                biased;
                answer = question => Some(answer),
                () = idle() => None,
            }
        })
    }

    /// Calls what reads the process's clock.
    pub(super) fn enter<R>(&self, call: impl FnOnce() -> R) -> R {
        let _context = self.runtime.enter();
        call()
    }

    pub(super) const fn started(&self) -> At {
        self.started
    }

    pub(super) fn has_ended(&self) -> bool {
        self.main.is_finished()
    }

    fn at(&self, local: Duration) -> Instant {
        let millis = u64::try_from(local.as_millis()).unwrap();
        self.origin + Duration::from_millis(millis)
    }
}

/// Ready once every other task waits for something.
async fn idle() {
    let mut is_registered = false;
    poll_fn(|context| {
        if is_registered {
            return Poll::Ready(());
        }
        is_registered = true;
        IDLE.set(Some(context.waker().clone()));
        Poll::Pending
    })
    .await;
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tokio::time::{interval, sleep};

    use super::*;

    type Ticks = Arc<Mutex<Vec<u128>>>;

    fn ticking() -> (Process, Ticks) {
        let ticks = Ticks::default();
        let seen = Arc::clone(&ticks);
        let process = Process::start(At::ZERO, || async move {
            let start = Instant::now();
            let mut every = interval(Duration::from_millis(100));
            loop {
                every.tick().await;
                yield_now().await;
                seen.lock().unwrap().push(start.elapsed().as_millis());
                sleep(Duration::from_millis(7)).await;
            }
        });
        (process, ticks)
    }

    #[test]
    fn timers_fire_at_their_own_time() {
        let (mut process, ticks) = ticking();
        process.run_until(Duration::from_millis(99));
        assert_eq!(*ticks.lock().unwrap(), [0]);
        process.run_until(Duration::from_millis(100));
        assert_eq!(*ticks.lock().unwrap(), [0, 100]);
        process.run_until(Duration::from_millis(350));
        assert_eq!(*ticks.lock().unwrap(), [0, 100, 200, 300]);
    }

    #[test]
    fn timers_of_a_standstill_are_late() {
        let (mut process, ticks) = ticking();
        process.run_until(Duration::from_millis(50));
        process.stand_until(Duration::from_millis(340));
        assert_eq!(*ticks.lock().unwrap(), [0], "nothing ran");
        // Late timers fire before the clock moves on.
        process.run_until(Duration::from_millis(341));
        assert_eq!(*ticks.lock().unwrap(), [0, 340]);
    }
}
