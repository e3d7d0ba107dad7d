//! Whether the log is still the one that was read. A log that was deleted, rolled back or refilled
//! looks healthy.
//!
//! The last record read is identified by its position, store time and checksum, and looked up again
//! at startup, after a reconnect and periodically. Serves a running indexer's position and a
//! snapshot's.

use warmroute_proto::label_enum;
use warmroute_proto::message::{LogMessage, LogStatus};
use warmroute_proto::snapshot::RecordMark;
use warmroute_proto::{LogPosition, StreamIdentity};
use xxhash_rust::xxh3::xxh3_64;

label_enum! {
    /// Comparison of the last record read with the present log.
    pub enum LogMatch {
        /// Same log and same record at the position, or nothing was read yet.
        Same = "same",
        /// Same log, which no longer keeps that record.
        Trimmed = "trimmed",
        /// The record is absent though in range: a stale copy of the log, or a hole.
        Missing = "missing",
        /// A different log of that name.
        AnotherLog = "another_log",
        /// The log ends before the position.
        LostEnd = "lost_end",
        /// A different record is at the position: the log lost its end and went on.
        OtherRecord = "other_record",
    }
}

impl LogMatch {
    /// Returns true if the log lost what was read.
    #[must_use]
    pub const fn is_broken(self) -> bool {
        match self {
            Self::AnotherLog | Self::LostEnd | Self::OtherRecord => true,
            Self::Same | Self::Trimmed | Self::Missing => false,
        }
    }
}

/// Identifies a log message.
#[must_use]
pub fn mark(message: &LogMessage) -> RecordMark {
    RecordMark {
        position: message.position,
        stored_unix_ns: message.stored_unix_ns,
        checksum: xxh3_64(&message.payload),
    }
}

/// Returns true if the log keeps this position, so that a lookup makes sense.
#[must_use]
pub fn is_there(at: &RecordMark, status: &LogStatus) -> bool {
    (status.first..=status.last).contains(&at.position)
}

/// Compares the last record read with the log; `found` is the log's message at its position.
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

/// Returns true if the log keeps everything after the position.
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
    fn every_way_to_lose_a_log_is_detected() {
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
