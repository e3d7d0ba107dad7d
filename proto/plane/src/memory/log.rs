//! An append-only log in memory, bounded by bytes. Drops the oldest messages first.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;

use crate::{LogMessage, LogStatus};
use warmroute_proto::{LogPosition, StreamIdentity};

pub(super) struct MemoryLog {
    identity: StreamIdentity,
    bytes_max: usize,
    bytes: usize,
    messages: VecDeque<LogMessage>,
    last: LogPosition,
    /// The newest position of each subject, which may have been dropped.
    newest: BTreeMap<String, LogPosition>,
}

impl MemoryLog {
    pub(super) const fn new(identity: StreamIdentity, bytes_max: usize) -> Self {
        Self {
            identity,
            bytes_max,
            bytes: 0,
            messages: VecDeque::new(),
            last: LogPosition(0),
            newest: BTreeMap::new(),
        }
    }

    /// An empty log of this size.
    pub(super) const fn replaced_by(&self, identity: StreamIdentity) -> Self {
        Self::new(identity, self.bytes_max)
    }

    pub(super) fn status(&self) -> LogStatus {
        LogStatus {
            identity: self.identity,
            first: self.first(),
            last: self.last,
            now_unix_ns: self.identity.created_unix_ns.wrapping_add(self.last.0),
        }
    }

    pub(super) fn append(&mut self, subject: String, payload: Bytes) -> LogPosition {
        self.last = self.last.next();
        self.bytes += cost(&subject, &payload);
        self.newest.insert(subject.clone(), self.last);
        self.messages.push_back(LogMessage {
            position: self.last,
            subject,
            payload,
            // Positions are never reused here, so that they can stand for the time.
            stored_unix_ns: self.identity.created_unix_ns.wrapping_add(self.last.0),
        });
        while self.bytes > self.bytes_max && self.messages.len() > 1 {
            if let Some(oldest) = self.messages.pop_front() {
                self.bytes -= cost(&oldest.subject, &oldest.payload);
            }
        }
        self.last
    }

    pub(super) fn at(&self, position: LogPosition) -> Option<LogMessage> {
        let index = position.0.checked_sub(self.first().0)?;
        self.messages.get(usize::try_from(index).ok()?).cloned()
    }

    pub(super) fn last_on(&self, subject: &str) -> Option<LogMessage> {
        self.at(*self.newest.get(subject)?)
    }

    pub(super) fn after(&self, after: LogPosition, max: usize) -> Vec<LogMessage> {
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
