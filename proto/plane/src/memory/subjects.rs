//! Who listens to which subject. Queues are bounded; what a full one cannot take is counted.

use futures_util::stream;
use tokio::sync::mpsc;

use crate::PlaneStream;
use warmroute_proto::subject::matches;

pub(super) struct Subjects<T> {
    queue_max: usize,
    open: Vec<(String, mpsc::Sender<T>)>,
    /// Whose turn it is, so that servers of one subject share the work.
    turn: usize,
    dropped: u64,
}

/// Nobody takes this subject.
pub(super) struct Nobody;

impl<T: Send + 'static> Subjects<T> {
    pub(super) const fn new(queue_max: usize) -> Self {
        Self {
            queue_max,
            open: Vec::new(),
            turn: 0,
            dropped: 0,
        }
    }

    pub(super) fn open(&mut self, filter: String) -> mpsc::Receiver<T> {
        self.forget_closed();
        let (sender, receiver) = mpsc::channel(self.queue_max);
        self.open.push((filter, sender));
        receiver
    }

    /// To every listener whose filter matches.
    pub(super) fn send_all(&mut self, subject: &str, message: &T)
    where
        T: Clone,
    {
        self.forget_closed();
        for (filter, sender) in &self.open {
            if matches(filter, subject) && sender.try_send(message.clone()).is_err() {
                self.dropped += 1;
            }
        }
    }

    /// To one listener that has room, in turn.
    pub(super) fn send_one(&mut self, subject: &str, message: T) -> Result<(), Nobody> {
        self.forget_closed();
        let mut message = message;
        for offset in 0..self.open.len() {
            let index = (self.turn + offset) % self.open.len();
            let Some((filter, sender)) = self.open.get(index) else {
                continue;
            };
            if !matches(filter, subject) {
                continue;
            }
            match sender.try_send(message) {
                Ok(()) => {
                    self.turn = index + 1;
                    return Ok(());
                }
                Err(error) => message = error.into_inner(),
            }
        }
        self.dropped += 1;
        Err(Nobody)
    }

    pub(super) const fn dropped(&self) -> u64 {
        self.dropped
    }

    fn forget_closed(&mut self) {
        self.open.retain(|(_, sender)| !sender.is_closed());
    }
}

pub(super) fn into_stream<T: Send + 'static>(receiver: mpsc::Receiver<T>) -> PlaneStream<T> {
    Box::pin(stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|message| (message, receiver))
    }))
}
