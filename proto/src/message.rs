//! What the plane delivers: messages of the log, broadcasts, and the state of the log.

use bytes::Bytes;

use crate::{LogPosition, StreamIdentity};

/// One message of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogMessage {
    pub position: LogPosition,
    pub subject: String,
    pub payload: Bytes,
    /// When the log stored it, in nanoseconds since the Unix epoch. Together with the payload it
    /// identifies the message at a position.
    pub stored_unix_ns: u64,
}

/// One broadcast message. The plane checks who may publish to a subject, never the payload: a
/// receiver accepts a payload only for the sender that the subject names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broadcast {
    pub subject: String,
    pub payload: Bytes,
}

/// Identity and bounds of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogStatus {
    pub identity: StreamIdentity,
    /// The oldest message kept; one past `last` if the log is empty.
    pub first: LogPosition,
    /// The newest message ever stored; 0 before the first.
    pub last: LogPosition,
    /// Time of the query, by the clock that stamps messages; 0 if the log does not report it. Only
    /// comparable with other times of this log, such as [`LogMessage::stored_unix_ns`].
    pub now_unix_ns: u64,
}
