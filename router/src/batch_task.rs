//! The task behind a bounded queue of requests that ended: it hands them to a sink in batches.

use std::future::Future;
use std::time::Duration;

use tokio::sync::mpsc::Receiver;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;

/// Time between two looks at the settings.
pub(crate) const CHECK_PERIOD: Duration = Duration::from_secs(1);

/// Where batches go.
pub(crate) trait BatchSink: Send {
    type Entry: Send;

    /// Entries of one batch.
    const BATCH_MAX: usize;

    /// Time for which a batch gathers entries.
    const GATHER: Duration = Duration::ZERO;

    /// Follows the settings, once per [`CHECK_PERIOD`].
    fn follow_settings(&mut self) -> impl Future<Output = ()> + Send;

    /// Writes a batch of at least one entry. After the stop it takes a bounded time.
    fn write(
        &mut self,
        batch: Vec<Self::Entry>,
        stop: &CancellationToken,
    ) -> impl Future<Output = ()> + Send;
}

/// A queue and its sink.
pub(crate) struct BatchTask<S: BatchSink> {
    queue: Receiver<S::Entry>,
    sink: S,
}

impl<S: BatchSink> BatchTask<S> {
    pub(crate) const fn new(queue: Receiver<S::Entry>, sink: S) -> Self {
        Self { queue, sink }
    }

    /// Writes until the stop, then what is queued.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut ticks = interval(CHECK_PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                _ = ticks.tick() => self.sink.follow_settings().await,
                count = self.queue.recv_many(&mut batch, S::BATCH_MAX) => {
                    if count == 0 {
                        // The proxy has ended. A task that ends before the stop counts as failed.
                        stop.cancelled().await;
                        break;
                    }
                    tokio::select! {
                        () = stop.cancelled() => {}
                        () = sleep(S::GATHER) => {}
                    }
                    self.fill(&mut batch);
                    self.sink.write(std::mem::take(&mut batch), &stop).await;
                }
            }
        }
        loop {
            self.fill(&mut batch);
            if batch.is_empty() {
                return;
            }
            self.sink.write(std::mem::take(&mut batch), &stop).await;
        }
    }

    fn fill(&mut self, batch: &mut Vec<S::Entry>) {
        while batch.len() < S::BATCH_MAX
            && let Ok(entry) = self.queue.try_recv()
        {
            batch.push(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;

    /// Keeps the batches until the end.
    struct Kept(mpsc::Sender<Vec<u32>>);

    impl BatchSink for Kept {
        type Entry = u32;
        const BATCH_MAX: usize = 4;
        const GATHER: Duration = Duration::from_millis(10);

        async fn follow_settings(&mut self) {}

        async fn write(&mut self, batch: Vec<u32>, _stop: &CancellationToken) {
            self.0.send(batch).await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn entries_that_come_together_are_one_batch_and_the_stop_loses_none() {
        let (batches, mut written) = mpsc::channel(4);
        let (entries, queue) = mpsc::channel(16);
        let stop = CancellationToken::new();
        let writer = BatchTask::new(queue, Kept(batches)).run(stop.clone());
        let sender = async {
            for entry in [0, 1] {
                entries.send(entry).await.unwrap();
                sleep(Kept::GATHER / 4).await;
            }
            assert_eq!(written.recv().await, Some(vec![0, 1]));
            for entry in 2..8 {
                entries.try_send(entry).unwrap();
            }
            stop.cancel();
        };
        tokio::join!(writer, sender);
        assert_eq!(written.recv().await, Some(vec![2, 3, 4, 5]));
        assert_eq!(written.recv().await, Some(vec![6, 7]));
        assert_eq!(written.recv().await, None);
    }
}
