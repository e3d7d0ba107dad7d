//! Bounded queues of messages by subject filter. Messages that a full queue drops are counted.

use futures_util::stream;
use tokio::sync::mpsc;

use crate::PlaneStream;
use warmroute_proto::subject::matches;

pub(super) struct SubjectQueues<T> {
    queue_max: usize,
    open: Vec<(String, mpsc::Sender<T>)>,
    /// Index of the next receiver, so that servers of one subject share the work.
    next: usize,
    dropped: u64,
}

/// No receiver with room matches the subject.
pub(super) struct NoReceiver;

impl<T: Send + 'static> SubjectQueues<T> {
    pub(super) const fn new(queue_max: usize) -> Self {
        Self {
            queue_max,
            open: Vec::new(),
            next: 0,
            dropped: 0,
        }
    }

    pub(super) fn open(&mut self, filter: String) -> mpsc::Receiver<T> {
        self.remove_closed();
        let (sender, receiver) = mpsc::channel(self.queue_max);
        self.open.push((filter, sender));
        receiver
    }

    /// Sends to every receiver whose filter matches.
    pub(super) fn send_all(&mut self, subject: &str, message: &T)
    where
        T: Clone,
    {
        self.remove_closed();
        for (filter, sender) in &self.open {
            if matches(filter, subject) && sender.try_send(message.clone()).is_err() {
                self.dropped += 1;
            }
        }
    }

    /// Sends to one matching receiver that has room, in turn.
    pub(super) fn send_one(&mut self, subject: &str, message: T) -> Result<(), NoReceiver> {
        self.remove_closed();
        let mut message = message;
        for offset in 0..self.open.len() {
            let index = (self.next + offset) % self.open.len();
            let Some((filter, sender)) = self.open.get(index) else {
                continue;
            };
            if !matches(filter, subject) {
                continue;
            }
            match sender.try_send(message) {
                Ok(()) => {
                    self.next = index + 1;
                    return Ok(());
                }
                Err(error) => message = error.into_inner(),
            }
        }
        self.dropped += 1;
        Err(NoReceiver)
    }

    pub(super) const fn dropped(&self) -> u64 {
        self.dropped
    }

    fn remove_closed(&mut self) {
        self.open.retain(|(_, sender)| !sender.is_closed());
    }
}

pub(super) fn into_stream<T: Send + 'static>(receiver: mpsc::Receiver<T>) -> PlaneStream<T> {
    Box::pin(stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|message| (message, receiver))
    }))
}
