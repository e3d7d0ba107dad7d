//! An append-only log in memory, bounded by bytes. Drops the oldest messages first.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use futures_util::stream;
use tokio::sync::Notify;

use crate::{LogMessage, LogStatus, LogTail};
use warmroute_proto::{LogPosition, StreamIdentity};

/// A log with its readers. Clones share it.
#[derive(Clone)]
pub(crate) struct TailedLog {
    shared: Arc<(Mutex<MemoryLog>, Notify)>,
}

impl TailedLog {
    pub(crate) fn new(identity: StreamIdentity, bytes_max: usize) -> Self {
        let log = Mutex::new(MemoryLog::new(identity, bytes_max));
        let shared = Arc::new((log, Notify::new()));
        Self { shared }
    }

    /// For reads. A panic under the lock cannot leave a step half done: every step is one call.
    pub(crate) fn read(&self) -> MutexGuard<'_, MemoryLog> {
        let (log, _) = &*self.shared;
        log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends a message that was stored then.
    pub(crate) fn append(
        &self,
        subject: String,
        payload: Bytes,
        stored_unix_ns: impl FnOnce(LogPosition) -> u64,
    ) -> LogPosition {
        let position = self.read().append(subject, payload, stored_unix_ns);
        self.shared.1.notify_waiters();
        position
    }

    /// Replaces the log by an empty one of this size.
    pub(crate) fn recreate(&self, identity: StreamIdentity) {
        let log = &mut *self.read();
        *log = MemoryLog::new(identity, log.bytes_max);
        self.shared.1.notify_waiters();
    }

    pub(crate) fn tail(&self, after: LogPosition, batch_max: usize) -> LogTail {
        let identity = self.read().status().identity;
        Box::pin(stream::unfold(
            (self.clone(), after),
            move |(log, after)| async move {
                let batch = log.next_batch(identity, after, batch_max).await?;
                let after = batch.last().map_or(after, |message| message.position);
                Some((batch, (log, after)))
            },
        ))
    }

    /// The next messages after a position, or `None` if the log was replaced.
    async fn next_batch(
        &self,
        identity: StreamIdentity,
        after: LogPosition,
        max: usize,
    ) -> Option<Vec<LogMessage>> {
        loop {
            let appended = self.shared.1.notified();
            tokio::pin!(appended);
            appended.as_mut().enable();
            let batch = {
                let log = self.read();
                let status = log.status();
                if status.identity != identity || status.last < after {
                    return None;
                }
                log.after(after, max)
            };
            if !batch.is_empty() {
                return Some(batch);
            }
            appended.await;
        }
    }
}

pub(crate) struct MemoryLog {
    identity: StreamIdentity,
    bytes_max: usize,
    bytes: usize,
    messages: VecDeque<LogMessage>,
    last: LogPosition,
    /// The newest position of each subject that has a message.
    newest: BTreeMap<String, LogPosition>,
}

impl MemoryLog {
    const fn new(identity: StreamIdentity, bytes_max: usize) -> Self {
        Self {
            identity,
            bytes_max,
            bytes: 0,
            messages: VecDeque::new(),
            last: LogPosition(0),
            newest: BTreeMap::new(),
        }
    }

    /// Without the time.
    pub(crate) fn status(&self) -> LogStatus {
        LogStatus {
            identity: self.identity,
            first: self.first(),
            last: self.last,
            now_unix_ns: 0,
        }
    }

    fn append(
        &mut self,
        subject: String,
        payload: Bytes,
        stored_unix_ns: impl FnOnce(LogPosition) -> u64,
    ) -> LogPosition {
        // A part of a larger buffer would keep all of it, uncounted.
        let payload = Bytes::copy_from_slice(&payload);
        self.last = self.last.next();
        self.bytes += cost(&subject, &payload);
        self.newest.insert(subject.clone(), self.last);
        self.messages.push_back(LogMessage {
            position: self.last,
            subject,
            payload,
            stored_unix_ns: stored_unix_ns(self.last),
        });
        while self.bytes > self.bytes_max && self.messages.len() > 1 {
            if let Some(oldest) = self.messages.pop_front() {
                self.bytes -= cost(&oldest.subject, &oldest.payload);
                if self.newest.get(&oldest.subject) == Some(&oldest.position) {
                    self.newest.remove(&oldest.subject);
                }
            }
        }
        self.last
    }

    pub(crate) fn at(&self, position: LogPosition) -> Option<LogMessage> {
        let index = position.0.checked_sub(self.first().0)?;
        self.messages.get(usize::try_from(index).ok()?).cloned()
    }

    pub(crate) fn last_on(&self, subject: &str) -> Option<LogMessage> {
        self.at(*self.newest.get(subject)?)
    }

    fn after(&self, after: LogPosition, max: usize) -> Vec<LogMessage> {
        let skip = after.next().0.saturating_sub(self.first().0);
        let skip = usize::try_from(skip).unwrap_or(usize::MAX);
        let skip = skip.min(self.messages.len());
        self.messages.range(skip..).take(max).cloned().collect()
    }

    fn first(&self) -> LogPosition {
        self.messages
            .front()
            .map_or_else(|| self.last.next(), |message| message.position)
    }
}

/// A message's bytes in memory.
fn cost(subject: &str, payload: &Bytes) -> usize {
    subject.len() + payload.len() + size_of::<LogMessage>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> MemoryLog {
        let identity = StreamIdentity {
            created_unix_ns: 1,
            nonce: 1,
        };
        MemoryLog::new(identity, 10_000)
    }

    /// Subjects come from the network.
    #[test]
    fn a_subject_without_messages_is_forgotten() {
        let mut log = small();
        for number in 0..1000 {
            for subject in ["stays".to_owned(), format!("subject.{number}")] {
                log.append(subject, Bytes::from_static(b"payload"), |_| 0);
            }
        }
        assert!(log.newest.len() <= log.messages.len());
        let newest = log.last_on("stays").unwrap();
        assert_eq!(newest.position.next(), log.last);
        assert!(log.last_on("subject.0").is_none());
    }

    /// A client's payloads are parts of the buffers that it reads into.
    #[test]
    fn a_record_keeps_no_more_than_its_bytes() {
        let mut log = small();
        let buffer = Bytes::from(vec![7; 1 << 15]);
        let position = log.append("subject".to_owned(), buffer.slice(..10), |_| 0);
        assert!(buffer.is_unique());
        assert_eq!(log.at(position).unwrap().payload, buffer[..10]);
    }
}
