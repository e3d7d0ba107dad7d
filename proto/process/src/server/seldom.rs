//! Futures that are rarely woken, beside one that is polled often.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;

/// Polls a future only when it was woken. A connection is polled for every part of a stream, and
/// polling what may end it would take longer than passing the part on.
pub(super) struct Seldom<F> {
    future: F,
    signal: Arc<SeldomSignal>,
    waker: Waker,
}

struct SeldomSignal {
    is_woken: AtomicBool,
    /// Polls the [`Seldom`].
    task: AtomicWaker,
}

impl<F> Seldom<F> {
    pub(super) fn new(future: F) -> Self {
        let signal = Arc::new(SeldomSignal {
            is_woken: AtomicBool::new(true),
            task: AtomicWaker::new(),
        });
        Self {
            future,
            waker: Waker::from(Arc::clone(&signal)),
            signal,
        }
    }
}

impl Wake for SeldomSignal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_woken.store(true, Ordering::Release);
        self.task.wake();
    }
}

impl<F: Future + Unpin> Future for Seldom<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.get_mut();
        // Before the flag is read, so that the task is woken for a later one.
        this.signal.task.register(context.waker());
        if !this.signal.is_woken.swap(false, Ordering::AcqRel) {
            return Poll::Pending;
        }
        Pin::new(&mut this.future).poll(&mut Context::from_waker(&this.waker))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::{poll_fn, ready};
    use std::pin::pin;

    use futures_util::FutureExt as _;
    use tokio_util::sync::CancellationToken;
    use tokio_util::task::TaskTracker;

    use super::*;

    #[tokio::test]
    async fn a_future_is_polled_when_it_was_woken() {
        let (token, polls) = (CancellationToken::new(), Cell::new(0));
        let mut cancelled = pin!(token.cancelled());
        let mut seldom = Seldom::new(poll_fn(|context| {
            polls.set(polls.get() + 1);
            cancelled.as_mut().poll(context)
        }));
        for _ in 0..3 {
            assert!((&mut seldom).now_or_never().is_none());
        }
        assert_eq!(polls.get(), 1);
        token.cancel();
        seldom.await;
        assert_eq!(polls.get(), 2);
    }

    #[tokio::test]
    async fn the_task_that_waits_is_woken() {
        let token = CancellationToken::new();
        let waiting = token.clone();
        let waits = async move { Seldom::new(pin!(waiting.cancelled())).await };
        let task = TaskTracker::new().spawn(waits);
        tokio::task::yield_now().await;
        token.cancel();
        task.await.unwrap();
        Seldom::new(ready(())).await;
    }
}
