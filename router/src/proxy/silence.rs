//! Streams that go silent: how long nothing may come between two pieces of a stream.
//!
//! On a worker that is in service the setting `engines.token_timeout_secs` bounds it, if it is set:
//! models pause for minutes. On a worker that is unhealthy or asleep a pause ends the wait that is
//! longer than the stream's own pauses explain.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::time::{Instant, Sleep, sleep_until};
use warmroute_proto::Source;

use crate::lost_sources::{Loss, LossWatch};

/// Pause of any stream that is no loss, if the worker is unhealthy.
const PAUSE_MIN: Duration = Duration::from_secs(5);

/// Multiple of the stream's longest pause so far.
const FACTOR: u32 = 4;

/// Watches one stream.
pub(super) struct SilenceWatch {
    source: Source,
    /// Longest pause on any worker.
    pause_max: Option<Duration>,
    /// Ready when the worker is lost.
    loss: BoxFuture<'static, LossWatch>,
    /// Present once it was.
    lost: Option<LossWatch>,
    heard: Instant,
    longest: Duration,
    timer: Option<Pin<Box<Sleep>>>,
}

impl SilenceWatch {
    /// `losses`: made before the source was chosen.
    pub(super) fn new(losses: LossWatch, source: Source, pause_max: Option<Duration>) -> Self {
        Self {
            loss: next_loss(losses, source.clone()),
            source,
            pause_max,
            lost: None,
            heard: Instant::now(),
            longest: Duration::ZERO,
            timer: None,
        }
    }

    /// Longest pause on any worker.
    pub(super) const fn pause_max(&self) -> Option<Duration> {
        self.pause_max
    }

    /// A piece of the stream came.
    pub(super) fn heard(&mut self) {
        let now = Instant::now();
        self.longest = self.longest.max(now - self.heard);
        self.heard = now;
    }

    /// Ready, with the time since the last piece, when the stream is silent for too long. To be
    /// polled while no piece is there.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Duration> {
        loop {
            if self.lost.is_none()
                && let Poll::Ready(losses) = self.loss.poll_unpin(context)
            {
                self.lost = Some(losses);
            }
            let own = self.longest.saturating_mul(FACTOR).max(PAUSE_MIN);
            let own = self.lost.as_ref().map(|_| own);
            let Some(pause) = own.into_iter().chain(self.pause_max).min() else {
                return Poll::Pending;
            };
            let due = self.heard + pause;
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
            if timer.deadline() != due {
                timer.as_mut().reset(due);
            }
            ready!(timer.as_mut().poll(context));
            let silent = self.heard.elapsed();
            let is_over = self.pause_max.is_some_and(|max| silent >= max);
            match self.lost.take() {
                // The worker is back: its stream may go on.
                Some(losses) if !is_over && !losses.is_worker_lost(&self.source.worker) => {
                    self.loss = next_loss(losses, self.source.clone());
                }
                lost => {
                    self.lost = lost;
                    return Poll::Ready(silent);
                }
            }
        }
    }
}

fn next_loss(mut losses: LossWatch, source: Source) -> BoxFuture<'static, LossWatch> {
    let lost = async move {
        // A stall is judged by what has no first token.
        while losses.lost(&source).await != Loss::Worker {}
        losses
    };
    lost.boxed()
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::advance;
    use warmroute_proto::{DpRank, WorkerId};

    use super::*;
    use crate::lost_sources::LossBoard;

    fn watch(board: &LossBoard, pause_max: Option<u64>) -> SilenceWatch {
        let source = Source {
            worker: "w".into(),
            dp_rank: DpRank(0),
        };
        let pause_max = pause_max.map(Duration::from_secs);
        SilenceWatch::new(board.watch(), source, pause_max)
    }

    fn set_lost(board: &LossBoard, is_lost: bool) {
        let worker = is_lost.then(|| WorkerId::from("w"));
        board.set_workers(&worker.into_iter().collect());
    }

    /// Whether the stream is given up by now.
    async fn is_over(watch: &mut SilenceWatch) -> bool {
        poll_fn(|context| Poll::Ready(watch.poll(context).is_ready())).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_stream_of_a_worker_in_service_waits_unless_the_setting_bounds_it() {
        let board = LossBoard::default();
        let (mut free, mut bounded) = (watch(&board, None), watch(&board, Some(60)));
        for (secs, over) in [(59, false), (1, true)] {
            advance(Duration::from_secs(secs)).await;
            assert!(!is_over(&mut free).await);
            assert_eq!(is_over(&mut bounded).await, over);
        }
        bounded.heard();
        assert!(!is_over(&mut bounded).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_of_a_lost_worker_ends_after_a_pause_that_its_own_do_not_explain() {
        let board = LossBoard::default();
        let mut stream = watch(&board, None);
        advance(Duration::from_secs(3)).await;
        stream.heard();
        set_lost(&board, true);
        for (secs, over) in [(11, false), (1, true)] {
            advance(Duration::from_secs(secs)).await;
            assert_eq!(is_over(&mut stream).await, over);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_goes_on_with_its_worker() {
        let board = LossBoard::default();
        let mut stream = watch(&board, None);
        set_lost(&board, true);
        assert!(!is_over(&mut stream).await);
        set_lost(&board, false);
        advance(Duration::from_secs(100)).await;
        assert!(!is_over(&mut stream).await);
        set_lost(&board, true);
        assert!(is_over(&mut stream).await, "it is lost again, and silent");
    }
}
