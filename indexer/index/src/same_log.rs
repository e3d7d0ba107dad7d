//! Is the log still the one that was read? A log that was deleted, rolled back or refilled looks healthy.
//!
//! What was read last is remembered by its position, the time at which the log took it and a checksum;
//! whoever starts, reconnects or doubts looks it up again. Used for the applied position of a running
//! indexer and for the position of a snapshot alike. Pure: values in, a verdict out.

use warmroute_proto::message::{LogMessage, LogStatus};
use warmroute_proto::snapshot::RecordMark;
use warmroute_proto::{LogPosition, StreamIdentity};
use xxhash_rust::xxh3::xxh3_64;

/// How what was read stands to the log that is there now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogMatch {
    /// The same log, and the same record at the position; or nothing was read yet.
    Same,
    /// The same log, which has let that record go: nothing can be compared.
    Trimmed,
    /// The record should be there and is not: a copy of the log that is behind, or a hole.
    Missing,
    /// Another log of that name.
    AnotherLog,
    /// The log ends before the position: it lost its end.
    LostEnd,
    /// Another record is at the position: the log lost its end and went on.
    OtherRecord,
}

impl LogMatch {
    /// What was read is in this log no more.
    #[must_use]
    pub const fn is_broken(self) -> bool {
        match self {
            Self::AnotherLog | Self::LostEnd | Self::OtherRecord => true,
            Self::Same | Self::Trimmed | Self::Missing => false,
        }
    }

    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Same => "same",
            Self::Trimmed => "trimmed",
            Self::Missing => "missing",
            Self::AnotherLog => "another_log",
            Self::LostEnd => "lost_end",
            Self::OtherRecord => "other_record",
        }
    }
}

/// How a message of the log is recognised later.
#[must_use]
pub fn mark(message: &LogMessage) -> RecordMark {
    RecordMark {
        position: message.position,
        stored_unix_ns: message.stored_unix_ns,
        checksum: xxh3_64(&message.payload),
    }
}

/// Is the record worth looking up? Only if the log says that it has it.
#[must_use]
pub fn is_there(at: &RecordMark, status: &LogStatus) -> bool {
    (status.first..=status.last).contains(&at.position)
}

/// Judges what was read (the last record, if there was one) against the log that is there; `found` is
/// what lies at its position.
#[must_use]
pub fn judge(
    log: StreamIdentity,
    at: Option<&RecordMark>,
    status: &LogStatus,
    found: Option<&LogMessage>,
) -> LogMatch {
    if log != status.identity {
        return LogMatch::AnotherLog;
    }
    let Some(at) = at else {
        return LogMatch::Same;
    };
    if at.position > status.last {
        return LogMatch::LostEnd;
    }
    match found {
        Some(found) if mark(found) == *at => LogMatch::Same,
        Some(_) => LogMatch::OtherRecord,
        None if at.position < status.first => LogMatch::Trimmed,
        None => LogMatch::Missing,
    }
}

/// Does the log still have everything behind the position?
#[must_use]
pub fn goes_on_from(position: LogPosition, status: &LogStatus) -> bool {
    position.next() >= status.first
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::tests_support::IDENTITY;

    fn message(position: u64, payload: &'static [u8], stored_unix_ns: u64) -> LogMessage {
        LogMessage {
            position: LogPosition(position),
            subject: "s".to_owned(),
            payload: Bytes::from_static(payload),
            stored_unix_ns,
        }
    }

    fn status(first: u64, last: u64) -> LogStatus {
        LogStatus {
            identity: IDENTITY,
            first: LogPosition(first),
            last: LogPosition(last),
            now_unix_ns: 0,
        }
    }

    #[test]
    fn every_way_to_lose_a_log_is_told() {
        let read = message(5, b"a", 50);
        let at = mark(&read);
        let check = |status: LogStatus, found: Option<&LogMessage>, fit: LogMatch| {
            assert_eq!(judge(IDENTITY, Some(&at), &status, found), fit);
        };
        check(status(1, 9), Some(&read), LogMatch::Same);
        check(
            status(1, 9),
            Some(&message(5, b"b", 50)),
            LogMatch::OtherRecord,
        );
        check(
            status(1, 9),
            Some(&message(5, b"a", 51)),
            LogMatch::OtherRecord,
        );
        check(status(1, 4), None, LogMatch::LostEnd);
        check(status(1, 9), None, LogMatch::Missing);
        check(status(6, 9), None, LogMatch::Trimmed);
        let mut other = status(1, 9);
        other.identity.nonce += 1;
        check(other, Some(&read), LogMatch::AnotherLog);
        assert_eq!(judge(IDENTITY, None, &status(1, 9), None), LogMatch::Same);
    }

    #[test]
    fn a_record_that_was_trimmed_leaves_the_rest_readable() {
        assert!(goes_on_from(LogPosition(5), &status(6, 9)));
        assert!(!goes_on_from(LogPosition(5), &status(7, 9)));
        assert!(is_there(&mark(&message(6, b"", 0)), &status(6, 9)));
        assert!(!is_there(&mark(&message(5, b"", 0)), &status(6, 9)));
    }
}
