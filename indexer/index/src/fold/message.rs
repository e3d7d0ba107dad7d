//! Parsing of log messages and heartbeats, done before the lock is taken.

use warmroute_proto::message::{Broadcast, LogMessage};
use warmroute_proto::snapshot::RecordMark;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{Change, Heartbeat, Record, Source, codec};

use super::HeartbeatVerdict;
use crate::same_log::mark;
use crate::tree::blocks_in;

/// A parsed log message.
pub struct ParsedMessage {
    pub(super) mark: RecordMark,
    /// Subject and payload bytes: about its share of the log's bound.
    pub(super) bytes: u64,
    pub(super) content: MessageContent,
}

pub(super) enum MessageContent {
    Record(Record),
    WrongSubject,
    /// With the source that the subject names.
    WrongSource(Source),
    Undecodable(Source),
}

impl ParsedMessage {
    #[must_use]
    pub fn of(subjects: &Subjects, message: &LogMessage) -> Self {
        Self {
            mark: mark(message),
            bytes: (message.subject.len() + message.payload.len()) as u64,
            content: MessageContent::of(subjects, message),
        }
    }

    /// Subject and payload bytes: a measure of the work.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Blocks in its changes.
    #[must_use]
    pub fn blocks(&self) -> usize {
        match &self.content {
            MessageContent::Record(record) => blocks_in(&record.changes),
            MessageContent::WrongSubject
            | MessageContent::WrongSource(_)
            | MessageContent::Undecodable(_) => 0,
        }
    }

    /// Returns true if it clears a tier, which takes time proportional to the tier.
    #[must_use]
    pub fn clears(&self) -> bool {
        let clears = |change: &Change| matches!(change, Change::Cleared { .. });
        matches!(&self.content, MessageContent::Record(record) if record.changes.iter().any(clears))
    }
}

/// Decodes a heartbeat. Its source must be the subject's: permissions guard subjects, not payloads.
pub fn heartbeat(subjects: &Subjects, message: &Broadcast) -> Result<Heartbeat, HeartbeatVerdict> {
    let source = subjects.heartbeat_source(&message.subject);
    let source = source.ok_or(HeartbeatVerdict::WrongSubject)?;
    match codec::decode::<Heartbeat>(&message.payload) {
        Ok(heartbeat) if heartbeat.source == source => Ok(heartbeat),
        Ok(_) => Err(HeartbeatVerdict::WrongSource),
        Err(_) => Err(HeartbeatVerdict::Undecodable),
    }
}

impl MessageContent {
    fn of(subjects: &Subjects, message: &LogMessage) -> Self {
        let Some(source) = subjects.record_source(&message.subject) else {
            return Self::WrongSubject;
        };
        match codec::decode::<Record>(&message.payload) {
            Ok(record) if record.source == source => Self::Record(record),
            Ok(_) => Self::WrongSource(source),
            Err(_) => Self::Undecodable(source),
        }
    }
}
