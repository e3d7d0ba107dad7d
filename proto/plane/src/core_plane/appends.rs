//! Own records on their way: a record that comes back over the network was sent to its other
//! readers, too. Pure.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::Instant;

use warmroute_proto::LogPosition;

/// A record that is not back after this time is lost.
pub(super) const BACK_MAX: Duration = Duration::from_secs(2);

/// Appends by subject, each in the order in which they were sent.
#[derive(Default)]
pub(super) struct PendingAppends {
    by_subject: BTreeMap<String, VecDeque<PendingAppend>>,
}

/// Dropping it makes the append fail.
struct PendingAppend {
    /// XXH3-64 of the payload.
    checksum: u64,
    sent: Instant,
    position: oneshot::Sender<LogPosition>,
    _permit: OwnedSemaphorePermit,
}

impl PendingAppends {
    /// Returns what receives the position.
    pub(super) fn send(
        &mut self,
        now: Instant,
        subject: String,
        checksum: u64,
        permit: OwnedSemaphorePermit,
    ) -> oneshot::Receiver<LogPosition> {
        let (position, receiver) = oneshot::channel();
        let pending = PendingAppend {
            checksum,
            sent: now,
            position,
            _permit: permit,
        };
        self.by_subject
            .entry(subject)
            .or_default()
            .push_back(pending);
        receiver
    }

    /// A message arrived. Own ones arrive in order: those sent before it are lost.
    pub(super) fn received(&mut self, subject: &str, checksum: u64, at: LogPosition) {
        let Some(pending) = self.by_subject.get_mut(subject) else {
            return;
        };
        let own = pending.iter().position(|own| own.checksum == checksum);
        if let Some(own) = own.and_then(|own| pending.drain(..=own).next_back()) {
            // A writer that has given up is no error.
            own.position.send(at).ok();
        }
        if pending.is_empty() {
            self.by_subject.remove(subject);
        }
    }

    /// Gives up what is overdue.
    pub(super) fn expire(&mut self, now: Instant) {
        self.by_subject.retain(|_, pending| {
            pending.retain(|own| now.saturating_duration_since(own.sent) < BACK_MAX);
            !pending.is_empty()
        });
    }

    /// Gives up everything: the connection was lost.
    pub(super) fn clear(&mut self) {
        self.by_subject.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_append_ends_when_it_is_back_or_overtaken_or_overdue() {
        let permits = Arc::new(Semaphore::new(4));
        let mut pending = PendingAppends::default();
        let now = Instant::now();
        let mut send = |checksum| {
            let permit = Arc::clone(&permits).try_acquire_owned().unwrap();
            pending.send(now, "s".to_owned(), checksum, permit)
        };
        let (lost, back, late) = (send(1), send(2), send(3));
        pending.received("other", 2, LogPosition(1));
        pending.received("s", 9, LogPosition(2));
        pending.received("s", 2, LogPosition(3));
        assert!(lost.await.is_err());
        assert_eq!(back.await, Ok(LogPosition(3)));
        pending.expire(now + BACK_MAX / 2);
        assert_eq!(permits.available_permits(), 3);
        pending.expire(now + BACK_MAX);
        assert!(late.await.is_err());
        assert_eq!(permits.available_permits(), 4);
    }
}
