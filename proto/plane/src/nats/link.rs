//! State of the connection: up or down, its epoch, the pending answers, counts.
//!
//! The client reconnects forever by itself and reports it by events, through a queue of 128 that
//! drops events when it is full (every message that a slow subscription loses is one event).
//! Therefore the client's own counters are polled besides, every [`POLL`].

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{ClientError, Event, Message, ServerError, Statistics};
use tokio::sync::{OwnedSemaphorePermit, oneshot, watch};

use crate::Connection;

pub(super) const POLL: Duration = Duration::from_millis(250);

pub(super) struct NatsLink {
    connection: watch::Sender<Connection>,
    /// Number of connections so far. Consumers are opened again when it grows.
    epoch: watch::Sender<u64>,
    /// Pending answers by token. Cleared at a disconnect: their answers are lost with the old
    /// socket.
    pending: Mutex<HashMap<u64, PendingAnswer>>,
    statistics: OnceLock<Arc<Statistics>>,
    pub(super) counters: NatsCounters,
    /// The only trace of a missing permission.
    last_server_error: Mutex<String>,
}

/// Its permit is released with the answer, not when the requester reads it: a requester that sends
/// more before it reads would otherwise wait for itself.
struct PendingAnswer {
    answer: oneshot::Sender<Message>,
    _permit: OwnedSemaphorePermit,
}

#[derive(Default)]
pub(super) struct NatsCounters {
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

impl NatsLink {
    pub(super) fn new() -> Self {
        Self {
            connection: watch::Sender::new(Connection::Down),
            epoch: watch::Sender::new(0),
            pending: Mutex::default(),
            statistics: OnceLock::new(),
            counters: NatsCounters::default(),
            last_server_error: Mutex::default(),
        }
    }

    /// The first connection is up.
    pub(super) fn begin(&self, statistics: Arc<Statistics>) {
        self.epoch
            .send_replace(statistics.connects.load(Ordering::Relaxed));
        let is_first = self.statistics.set(statistics).is_ok();
        assert!(is_first, "a link begins once");
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
                *lock(&self.last_server_error) = match error {
                    ServerError::AuthorizationViolation => "authorization violation".to_owned(),
                    ServerError::SlowConsumer(_) => "this client reads too slowly".to_owned(),
                    ServerError::Other(text) => text,
                };
            }
            Event::ClientError(ClientError::Other(_))
            | Event::ClientError(ClientError::MaxReconnects)
            | Event::ClientError(ClientError::ServerNotInPool) => count(&counters.client_errors),
        }
    }

    /// Detects changes whose event was dropped.
    pub(super) fn poll(&self, state: State) {
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

    /// Returns whether this is a change.
    fn set(&self, connection: Connection) -> bool {
        self.connection.send_if_modified(|is| {
            let changed = *is != connection;
            *is = connection;
            changed
        })
    }

    fn cut_off(&self) {
        let pending = std::mem::take(&mut *lock(&self.pending));
        let cut_off = u64::try_from(pending.len()).unwrap_or(u64::MAX);
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
        lock(&self.last_server_error).clone()
    }

    pub(super) fn statistics(&self) -> Option<&Arc<Statistics>> {
        self.statistics.get()
    }

    pub(super) fn await_answer(
        &self,
        token: u64,
        permit: OwnedSemaphorePermit,
    ) -> oneshot::Receiver<Message> {
        let (answer, receiver) = oneshot::channel();
        let pending = PendingAnswer {
            answer,
            _permit: permit,
        };
        lock(&self.pending).insert(token, pending);
        receiver
    }

    /// Delivers an answer. One whose requester has given up is dropped.
    pub(super) fn answered(&self, token: u64, message: Message) {
        if let Some(pending) = lock(&self.pending).remove(&token) {
            drop(pending.answer.send(message));
        }
    }

    pub(super) fn forget(&self, token: u64) {
        lock(&self.pending).remove(&token);
    }
}

/// A panic under these locks cannot leave a step half done: every step is one call.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
