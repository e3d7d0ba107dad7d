//! Refused permissions, and when to reconnect because of them. Pure. The tests' simulated client
//! runs this code, too.
//!
//! A server that reloads its permissions removes subscriptions and keeps the connection. Neither
//! side makes them again, not even when the permission is back; a new connection does. A refusal
//! is reported by an error text, which the client may drop, or shows by requests without answers.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;
use warmroute_proto::label_enum;

/// Delay before the first reconnect; it doubles with each one.
const BACKOFF_MIN: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// A subscription that was not refused for so long on a new connection is accepted.
const ACCEPTED_AFTER: Duration = Duration::from_secs(1);

/// A publish permission that was not refused for so long is forgotten, so that it is logged again.
const PUBLISH_FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// Bound on the refusals kept; publish permissions are forgotten first.
const REFUSALS_MAX: usize = 64;

/// The permission to answer requests.
const ALLOW_RESPONSES: &str = "allow_responses";

label_enum! {
    #[derive(PartialOrd, Ord)]
    pub(super) enum RefusedOperation {
        Publish = "publish",
        Subscribe = "subscribe",
    }
}

/// One error text of the server about a permission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PermissionViolation {
    pub(super) operation: RefusedOperation,
    pub(super) subject: String,
}

impl PermissionViolation {
    /// Parses `Permissions Violation for Publish to "X"` and `… for Subscription to "X" …`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (_, violation) = text.split_once("Permissions Violation for ")?;
        let (operation, rest) = violation.split_once(" to \"")?;
        let operation = match operation {
            "Publish" => RefusedOperation::Publish,
            "Subscription" => RefusedOperation::Subscribe,
            _ => return None,
        };
        let (subject, _) = rest.split_once('"')?;
        let subject = subject.to_owned();
        Some(Self { operation, subject })
    }

    /// The subject to grant: without the random parts of inboxes, consumers and chunks. For an
    /// answer to another's inbox, the permission to answer.
    pub(super) fn grant(&self) -> String {
        let tokens: Vec<&str> = self.subject.split('.').collect();
        match tokens.as_slice() {
            ["_INBOX", ..] if self.operation == RefusedOperation::Publish => {
                ALLOW_RESPONSES.to_owned()
            }
            ["_INBOX", user, _, ..] => format!("_INBOX.{user}.>"),
            ["$JS", "API", "CONSUMER", "MSG", "NEXT", stream, ..] => {
                format!("$JS.API.CONSUMER.MSG.NEXT.{stream}.>")
            }
            ["$JS", "API", "CONSUMER", _, stream, _, ..] => {
                format!("$JS.API.CONSUMER.*.{stream}.>")
            }
            ["$O", bucket, _, ..] => format!("$O.{bucket}.>"),
            _ => self.subject.clone(),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct LastRefusal {
    at: Instant,
    epoch: u64,
}

/// The refused permissions of one connection and the schedule of its forced reconnects.
///
/// Invariant: while a subscription is refused or requests are unanswered, a reconnect is due.
pub struct RefusedPermissions {
    /// By operation and subject to grant.
    refusals: BTreeMap<(RefusedOperation, String), LastRefusal>,
    /// Whether no request was answered for a while although the connection is up.
    is_unanswered: bool,
    epoch: u64,
    epoch_since: Instant,
    backoff: Duration,
    reconnect_at: Option<Instant>,
}

impl RefusedPermissions {
    #[must_use]
    pub const fn new(now: Instant) -> Self {
        Self {
            refusals: BTreeMap::new(),
            is_unanswered: false,
            epoch: 0,
            epoch_since: now,
            backoff: BACKOFF_MIN,
            reconnect_at: None,
        }
    }

    /// Records a refusal on the connection with this epoch. Returns whether it is new.
    pub fn refused(&mut self, violation: &PermissionViolation, now: Instant, epoch: u64) -> bool {
        let key = (violation.operation, violation.grant());
        let refusal = LastRefusal { at: now, epoch };
        let is_new = self.refusals.insert(key, refusal).is_none();
        if self.refusals.len() > REFUSALS_MAX {
            self.refusals.pop_first();
        }
        self.schedule(now);
        is_new
    }

    /// Records whether requests are answered.
    pub fn set_unanswered(&mut self, is_unanswered: bool, now: Instant) {
        self.is_unanswered = is_unanswered;
        self.schedule(now);
    }

    /// Whether a subscription is missing.
    #[must_use]
    pub fn is_deaf(&self) -> bool {
        let last = self.refusals.last_key_value();
        let is_refused =
            last.is_some_and(|((operation, _), _)| *operation == RefusedOperation::Subscribe);
        is_refused || self.is_unanswered
    }

    /// Whether publishing on this subject was refused.
    pub(super) fn is_publish_refused(&self, subject: &str) -> bool {
        let key = (RefusedOperation::Publish, subject.to_owned());
        self.refusals.contains_key(&key)
    }

    /// What is refused: the operation and the subject to grant. Refused answers are not listed: a
    /// reload of the server's accounts refuses those in progress once, and who may answer nothing
    /// could not answer with this list.
    pub(super) fn list(&self) -> Vec<String> {
        let refusals = self.refusals.keys();
        let refusals = refusals.filter(|(_, grant)| grant != ALLOW_RESPONSES);
        let refusals = refusals.map(|(operation, grant)| format!("{} {grant}", operation.label()));
        refusals.collect()
    }

    /// Forgets what the connection with this epoch accepted. Returns whether to reconnect now.
    pub fn poll(&mut self, now: Instant, epoch: u64) -> bool {
        if epoch != self.epoch {
            self.epoch = epoch;
            self.epoch_since = now;
        }
        let is_settled = now >= self.epoch_since + ACCEPTED_AFTER;
        self.refusals
            .retain(|(operation, _), refusal| match operation {
                RefusedOperation::Publish => now < refusal.at + PUBLISH_FORGOTTEN_AFTER,
                RefusedOperation::Subscribe => refusal.epoch == epoch || !is_settled,
            });
        self.schedule(now);
        let is_due = self.reconnect_at.is_some_and(|at| at <= now);
        if is_due {
            self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
            self.reconnect_at = Some(now + self.backoff);
        }
        is_due
    }

    /// Keeps the invariant.
    fn schedule(&mut self, now: Instant) {
        if self.is_deaf() {
            self.reconnect_at.get_or_insert(now + self.backoff);
        } else {
            self.reconnect_at = None;
            self.backoff = BACKOFF_MIN;
        }
    }
}

#[cfg(test)]
mod tests;
