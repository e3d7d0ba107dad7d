//! The connection as everybody here sees it: up or down, its epoch, what waits for an answer, counts.
//!
//! The client reconnects for ever by itself, and tells of it by events through a queue of 128 that
//! drops when it is full (every message that a slow subscription loses is one event). So events are
//! believed when they come, and the client's own counters are looked at besides, every
//! [`LOOK`].

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{ClientError, Event, Message, ServerError, Statistics};
use tokio::sync::{OwnedSemaphorePermit, oneshot, watch};

use crate::Connection;

pub(super) const LOOK: Duration = Duration::from_millis(250);

pub(super) struct Link {
    connection: watch::Sender<Connection>,
    /// Connections made so far. Whoever follows something starts again when it grows.
    epoch: watch::Sender<u64>,
    /// Who waits for which answer. Emptied at a disconnect: those answers went with the old socket.
    waiting: Mutex<HashMap<u64, Waiting>>,
    statistics: OnceLock<Arc<Statistics>>,
    pub(super) counters: Counters,
    /// The server's last complaint: the only trace of a permission that is missing.
    complaint: Mutex<String>,
}

/// Its place is free as soon as the answer is here, whenever the asker looks at it: one that asks on
/// before it looks would otherwise wait for itself.
struct Waiting {
    answer: oneshot::Sender<Message>,
    _place: OwnedSemaphorePermit,
}

#[derive(Default)]
pub(super) struct Counters {
    pub(super) disconnects: AtomicU64,
    pub(super) slow_consumers: AtomicU64,
    pub(super) lame_ducks: AtomicU64,
    pub(super) closed: AtomicU64,
    pub(super) server_errors: AtomicU64,
    pub(super) client_errors: AtomicU64,
    pub(super) answers_late: AtomicU64,
    pub(super) answers_cut_off: AtomicU64,
    pub(super) tails_reopened: AtomicU64,
    pub(super) watches_reopened: AtomicU64,
    pub(super) tail_lag: AtomicU64,
    pub(super) snapshots_torn: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Link {
    pub(super) fn new() -> Self {
        Self {
            connection: watch::Sender::new(Connection::Down),
            epoch: watch::Sender::new(0),
            waiting: Mutex::default(),
            statistics: OnceLock::new(),
            counters: Counters::default(),
            complaint: Mutex::default(),
        }
    }

    /// The first connection stands.
    pub(super) fn begin(&self, statistics: Arc<Statistics>) {
        self.epoch
            .send_replace(statistics.connects.load(Ordering::Relaxed));
        // Set once, here.
        drop(self.statistics.set(statistics));
        self.set(Connection::Up);
    }

    pub(super) fn observe(&self, event: Event) {
        let counters = &self.counters;
        match event {
            Event::Connected => {
                self.follow_epoch();
                self.set(Connection::Up);
            }
            Event::Disconnected => {
                count(&counters.disconnects);
                self.set(Connection::Down);
                self.cut_off();
            }
            Event::LameDuckMode => count(&counters.lame_ducks),
            Event::Draining | Event::Closed => {
                count(&counters.closed);
                self.set(Connection::Down);
                self.cut_off();
            }
            Event::SlowConsumer(_) => count(&counters.slow_consumers),
            Event::ServerError(error) => {
                count(&counters.server_errors);
                *lock(&self.complaint) = match error {
                    ServerError::AuthorizationViolation => "authorization violation".to_owned(),
                    ServerError::SlowConsumer(_) => "we read too slowly".to_owned(),
                    ServerError::Other(text) => text,
                };
            }
            Event::ClientError(ClientError::Other(_))
            | Event::ClientError(ClientError::MaxReconnects)
            | Event::ClientError(ClientError::ServerNotInPool) => count(&counters.client_errors),
        }
    }

    /// Finds what no event told.
    pub(super) fn look(&self, state: State) {
        self.follow_epoch();
        let connection = match state {
            State::Connected => Connection::Up,
            State::Pending | State::Disconnected => Connection::Down,
        };
        if self.set(connection) && connection == Connection::Down {
            self.cut_off();
        }
    }

    fn follow_epoch(&self) {
        let Some(statistics) = self.statistics.get() else {
            return;
        };
        let connects = statistics.connects.load(Ordering::Relaxed);
        let grown = self.epoch.send_if_modified(|epoch| {
            let grown = connects > *epoch;
            *epoch = connects;
            grown
        });
        if grown {
            self.cut_off();
        }
    }

    /// Did this change it?
    fn set(&self, connection: Connection) -> bool {
        self.connection.send_if_modified(|is| {
            let changed = *is != connection;
            *is = connection;
            changed
        })
    }

    fn cut_off(&self) {
        let waiting = std::mem::take(&mut *lock(&self.waiting));
        let cut_off = u64::try_from(waiting.len()).unwrap_or(u64::MAX);
        self.counters
            .answers_cut_off
            .fetch_add(cut_off, Ordering::Relaxed);
    }

    pub(super) fn is_up(&self) -> bool {
        *self.connection.borrow() == Connection::Up
    }

    pub(super) fn connection(&self) -> watch::Receiver<Connection> {
        self.connection.subscribe()
    }

    pub(super) fn epochs(&self) -> watch::Receiver<u64> {
        self.epoch.subscribe()
    }

    pub(super) fn last_server_error(&self) -> String {
        lock(&self.complaint).clone()
    }

    pub(super) fn statistics(&self) -> Option<&Arc<Statistics>> {
        self.statistics.get()
    }

    pub(super) fn await_answer(
        &self,
        token: u64,
        place: OwnedSemaphorePermit,
    ) -> oneshot::Receiver<Message> {
        let (answer, receiver) = oneshot::channel();
        let waiting = Waiting {
            answer,
            _place: place,
        };
        lock(&self.waiting).insert(token, waiting);
        receiver
    }

    /// An answer that nobody waits for any more is dropped.
    pub(super) fn answered(&self, token: u64, message: Message) {
        let waiting = lock(&self.waiting).remove(&token);
        if let Some(Waiting { answer, _place }) = waiting {
            drop(answer.send(message));
        }
    }

    pub(super) fn forget(&self, token: u64) {
        lock(&self.waiting).remove(&token);
    }
}

/// Every step under these locks is one call that leaves nothing half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> OwnedSemaphorePermit {
        let places = Arc::new(tokio::sync::Semaphore::new(1));
        places.try_acquire_owned().expect("a free place")
    }

    fn connected() -> (Link, Arc<Statistics>) {
        let link = Link::new();
        let statistics = Arc::new(Statistics::default());
        statistics.connects.store(1, Ordering::Relaxed);
        link.begin(Arc::clone(&statistics));
        (link, statistics)
    }

    #[test]
    fn a_disconnect_fails_what_is_in_flight() {
        let (link, statistics) = connected();
        let mut answer = link.await_answer(7, place());
        link.observe(Event::Disconnected);
        assert!(!link.is_up());
        assert!(answer.try_recv().is_err());
        let epochs = link.epochs();
        statistics.connects.store(2, Ordering::Relaxed);
        link.observe(Event::Connected);
        assert!(link.is_up());
        assert_eq!(*epochs.borrow(), 2);
        assert_eq!(link.counters.answers_cut_off.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_reconnect_without_events_is_seen() {
        let (link, statistics) = connected();
        let mut answer = link.await_answer(7, place());
        let epochs = link.epochs();
        statistics.connects.store(2, Ordering::Relaxed);
        link.look(State::Connected);
        assert_eq!(
            epochs.has_changed().ok(),
            Some(true),
            "who follows is woken"
        );
        assert_eq!(*epochs.borrow(), 2);
        assert!(answer.try_recv().is_err());
        link.look(State::Disconnected);
        assert!(!link.is_up());
    }

    #[test]
    fn every_event_is_counted() {
        let (link, _) = connected();
        link.observe(Event::SlowConsumer(1));
        link.observe(Event::LameDuckMode);
        link.observe(Event::ServerError(ServerError::Other("no".into())));
        link.observe(Event::ClientError(ClientError::MaxReconnects));
        link.observe(Event::Closed);
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &link.counters;
        assert_eq!(of(&counters.slow_consumers), 1);
        assert_eq!(of(&counters.lame_ducks), 1);
        assert_eq!(of(&counters.server_errors), 1);
        assert_eq!(of(&counters.client_errors), 1);
        assert_eq!(of(&counters.closed), 1);
        assert_eq!(link.last_server_error(), "no");
    }
}
