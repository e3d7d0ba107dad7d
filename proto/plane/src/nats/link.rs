//! State of the connection: up or down, its epoch, pending answers, refused logins and permissions,
//! counts.
//!
//! The client reconnects forever by itself and reports it by events, through a queue of 128 that
//! drops events when it is full (every message that a slow subscription loses is one event).
//! Therefore the client's own counters are polled besides, every [`POLL`].

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{ClientError, ConnectErrorKind, Event, Message, ServerError, Statistics};
use tokio::sync::{OwnedSemaphorePermit, oneshot, watch};
use tokio::time::Instant;

use super::permissions::{PermissionViolation, RefusedPermissions};
use crate::Connection;

/// How often the client polls its state.
pub const POLL: Duration = Duration::from_millis(250);

/// While the server refuses the credentials.
const LOGIN_WARNING_EVERY: Duration = Duration::from_secs(60);

pub(super) struct NatsLink {
    /// The user's name or public key, for the log.
    user: String,
    /// When the last warning of refused credentials was logged.
    login_warned: Mutex<Option<Instant>>,
    /// Whether the server is connected.
    socket: watch::Sender<Connection>,
    /// Up if the server is connected and no subscription is missing.
    usable: watch::Sender<Connection>,
    permissions: Mutex<RefusedPermissions>,
    limit: Mutex<LimitRefresh>,
    /// Number of connections so far. Consumers are opened again when it grows.
    epoch: watch::Sender<u64>,
    /// Pending answers by token. Cleared at a disconnect: their answers are lost with the old
    /// socket.
    pending: Mutex<HashMap<u64, PendingAnswer>>,
    statistics: OnceLock<Arc<Statistics>>,
    pub(super) counters: NatsCounters,
    /// Messages that arrived in the inbox.
    inbox_messages: AtomicU64,
    /// The only trace of a missing permission.
    last_server_error: Mutex<String>,
}

/// Reconnects that read the server's limit of a payload again: the client learns it at a connection
/// only, and it may have been raised since.
#[derive(Debug)]
struct LimitRefresh {
    limit: usize,
    is_due: bool,
    next: Option<Instant>,
    pause: Duration,
}

impl LimitRefresh {
    const PAUSE: Duration = Duration::from_secs(60);
    /// A limit that stays is that of the server.
    const PAUSE_MAX: Duration = Duration::from_secs(3600);

    const fn of(limit: usize) -> Self {
        Self {
            limit,
            is_due: false,
            next: None,
            pause: Self::PAUSE,
        }
    }

    /// A message exceeded the limit. Returns whether a reconnect became due.
    fn exceeded(&mut self, limit: usize, now: Instant) -> bool {
        if limit != self.limit {
            *self = Self::of(limit);
        }
        let is_due = self.next.is_none_or(|next| now >= next);
        if is_due {
            self.is_due = true;
            self.next = Some(now + self.pause);
            self.pause = (self.pause * 2).min(Self::PAUSE_MAX);
        }
        is_due
    }
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
    pub(super) forced_reconnects: AtomicU64,
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
    pub(super) fn new(user: &str) -> Self {
        Self {
            user: user.to_owned(),
            login_warned: Mutex::default(),
            socket: watch::Sender::new(Connection::Down),
            usable: watch::Sender::new(Connection::Down),
            permissions: Mutex::new(RefusedPermissions::new(Instant::now())),
            limit: Mutex::new(LimitRefresh::of(0)),
            epoch: watch::Sender::new(0),
            pending: Mutex::default(),
            statistics: OnceLock::new(),
            counters: NatsCounters::default(),
            inbox_messages: AtomicU64::new(0),
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
                let text = match error {
                    ServerError::AuthorizationViolation => "authorization violation".to_owned(),
                    ServerError::SlowConsumer(_) => "this client reads too slowly".to_owned(),
                    ServerError::Other(text) => text,
                };
                if let Some(violation) = PermissionViolation::parse(&text) {
                    self.refused(&violation);
                }
                self.warn_of_refused_login(&text);
                *lock(&self.last_server_error) = text;
            }
            Event::ClientError(ClientError::Other(text)) => {
                count(&counters.client_errors);
                self.warn_of_refused_login(&text);
            }
            Event::ClientError(ClientError::MaxReconnects)
            | Event::ClientError(ClientError::ServerNotInPool) => count(&counters.client_errors),
        }
    }

    /// Detects changes whose event was dropped. Returns whether to force a reconnect.
    pub(super) fn poll(&self, state: State) -> bool {
        self.follow_epoch();
        let connection = match state {
            State::Connected => Connection::Up,
            State::Pending | State::Disconnected => Connection::Down,
        };
        if self.set(connection) && connection == Connection::Down {
            self.cut_off();
        }
        let reconnect = lock(&self.permissions).poll(Instant::now(), self.connects());
        self.publish_usable();
        let is_limit_due = std::mem::take(&mut lock(&self.limit).is_due);
        (reconnect || is_limit_due) && self.is_up()
    }

    /// A message of this process exceeds the server's limit, as the client knows it.
    pub(super) fn limit_exceeded(&self, bytes: usize, limit: usize) {
        if lock(&self.limit).exceeded(limit, Instant::now()) {
            tracing::warn!(
                bytes,
                max_payload = limit,
                "a message exceeds the server's max_payload: reconnecting to read it again; raise it"
            );
        }
    }

    /// The client tries again each second, forever: the credentials may become valid.
    fn warn_of_refused_login(&self, error: &str) {
        if is_refused_login(error) && self.is_login_warning_due(Instant::now()) {
            tracing::warn!(
                user = self.user,
                error,
                "the server refuses the credentials: allow this user again, or replace them and \
                 restart this process"
            );
        }
    }

    fn is_login_warning_due(&self, now: Instant) -> bool {
        let mut warned = lock(&self.login_warned);
        let is_due = warned.is_none_or(|last| now - last >= LOGIN_WARNING_EVERY);
        if is_due {
            *warned = Some(now);
        }
        is_due
    }

    /// A publish permission needs no reconnect: the server checks it at each message.
    fn refused(&self, violation: &PermissionViolation) {
        let epoch = self.connects();
        let is_new = lock(&self.permissions).refused(violation, Instant::now(), epoch);
        self.publish_usable();
        if is_new {
            tracing::warn!(
                operation = violation.operation.label(),
                subject = violation.subject,
                grant = violation.grant(),
                "the server refuses a permission, grant it to this user"
            );
        }
    }

    /// Records whether requests are answered while the connection is up.
    pub(super) fn set_unanswered(&self, is_unanswered: bool) {
        lock(&self.permissions).set_unanswered(is_unanswered, Instant::now());
        self.publish_usable();
    }

    pub(super) fn is_publish_refused(&self, subject: &str) -> bool {
        lock(&self.permissions).is_publish_refused(subject)
    }

    pub(super) fn refused_permissions(&self) -> Vec<String> {
        lock(&self.permissions).list()
    }

    fn publish_usable(&self) {
        // Under the lock, so that the last writer has seen the last change.
        let permissions = lock(&self.permissions);
        let usable = if self.is_up() && !permissions.is_deaf() {
            Connection::Up
        } else {
            Connection::Down
        };
        self.usable
            .send_if_modified(|is| std::mem::replace(is, usable) != usable);
    }

    fn connects(&self) -> u64 {
        let statistics = self.statistics.get();
        statistics.map_or(0, |statistics| statistics.connects.load(Ordering::Relaxed))
    }

    fn follow_epoch(&self) {
        self.raise_epoch(self.connects());
    }

    /// The epoch never falls: an event that is observed while the link begins reads a count of
    /// zero, and may act on it after [`Self::begin`].
    fn raise_epoch(&self, connects: u64) {
        let grown = self.epoch.send_if_modified(|epoch| {
            let grown = connects > *epoch;
            *epoch = connects.max(*epoch);
            grown
        });
        if grown {
            self.cut_off();
        }
    }

    /// Returns whether this is a change.
    fn set(&self, connection: Connection) -> bool {
        let is_changed = self
            .socket
            .send_if_modified(|is| std::mem::replace(is, connection) != connection);
        self.publish_usable();
        is_changed
    }

    fn cut_off(&self) {
        let pending = std::mem::take(&mut *lock(&self.pending));
        let cut_off = u64::try_from(pending.len()).unwrap_or(u64::MAX);
        self.counters
            .answers_cut_off
            .fetch_add(cut_off, Ordering::Relaxed);
    }

    /// Whether the server is connected; a subscription may be missing.
    pub(super) fn is_up(&self) -> bool {
        *self.socket.borrow() == Connection::Up
    }

    /// Up while the server is connected and no subscription is missing.
    pub(super) fn connection(&self) -> watch::Receiver<Connection> {
        self.usable.subscribe()
    }

    pub(super) fn inbox_messages(&self) -> u64 {
        self.inbox_messages.load(Ordering::Relaxed)
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
        count(&self.inbox_messages);
        if let Some(pending) = lock(&self.pending).remove(&token) {
            drop(pending.answer.send(message));
        }
    }

    pub(super) fn forget(&self, token: u64) {
        lock(&self.pending).remove(&token);
    }
}

/// The server's texts at a login, and when it ends a connection whose login has become void.
fn is_refused_login(error: &str) -> bool {
    let error = error.to_lowercase();
    let is_void =
        || error.contains("authentication expired") || error.contains("authentication revoked");
    error == ConnectErrorKind::AuthorizationViolation.to_string() || is_void()
}

/// A panic under these locks cannot leave a step half done: every step is one call.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
