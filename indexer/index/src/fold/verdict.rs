//! Effects of log messages and heartbeats.

use warmroute_proto::label_enum;

label_enum! {
    /// Effect of a log message. A metric label.
    pub enum RecordVerdict {
        Applied = "applied",
        /// The first record of a new generation.
        Started = "started",
        /// Belongs to a new generation whose first record is missing.
        StartedBehind = "started_behind",
        /// An earlier record is missing.
        Ahead = "ahead",
        Duplicate = "duplicate",
        /// Its number was delivered before with other bytes.
        Violation = "violation",
        /// Belongs to a fenced-off generation.
        Old = "old",
        /// It stores a held pair, removes one that is not held, or names an unknown parent.
        Contradiction = "contradiction",
        /// Count or digest differ from the record's after applying it.
        Mismatch = "mismatch",
        /// The next record of a source that is not folded at present.
        NotFolded = "not_folded",
        Undecodable = "undecodable",
        /// Its subject names another source.
        WrongSource = "wrong_source",
        /// Its subject names no source.
        WrongSubject = "wrong_subject",
        /// Names an impossibly high generation.
        Implausible = "implausible",
        /// Its position is not behind the last one.
        Replayed = "replayed",
    }
}

label_enum! {
    /// Effect of a heartbeat. A metric label.
    pub enum HeartbeatVerdict {
        /// Equal number, equal digest.
        Proof = "proof",
        /// Equal number, different digest.
        Mismatch = "mismatch",
        /// The source is not folded at present.
        NotFolded = "not_folded",
        /// It names records that the log has not delivered.
        Behind = "behind",
        /// Older than what is applied: it proves only that the shim is alive.
        Late = "late",
        /// Belongs to a fenced-off generation.
        Old = "old",
        Undecodable = "undecodable",
        /// Its subject names another source: the sender may not report on this one.
        WrongSource = "wrong_source",
        /// Its subject names no source.
        WrongSubject = "wrong_subject",
        /// Names an impossibly high generation.
        Implausible = "implausible",
    }
}
