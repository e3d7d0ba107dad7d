//! A snapshot's head, and the pointer to the newest snapshots, which spare a starting indexer most
//! of the log.
//!
//! The head names the log, the last record and the state of each source; the tree's image follows
//! it in the blob (`indexer/index/src/snapshot/format.rs`). Nothing in it depends on the writer's
//! clock.

use bincode::{Decode, Encode};

use crate::{
    Digest, EngineSeq, Generation, LogPosition, RecordNumber, Source, StreamIdentity, TierStates,
};

/// Identifies one record of the log: a log that was rolled back and refilled has another one there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RecordMark {
    pub position: LogPosition,
    /// When the log stored it, nanoseconds since the Unix epoch.
    pub stored_unix_ns: u64,
    /// XXH3-64 of its payload.
    pub checksum: u64,
}

/// The fold of a log up to a record, without the tree.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct SnapshotHead {
    pub log: StreamIdentity,
    /// The last record contained.
    pub at: RecordMark,
    /// Every source with a generation, in their order. The image names the folded ones by their
    /// index among the folded ones.
    pub sources: Vec<SnapshotSource>,
    pub image_bytes: u64,
}

/// One source as of the head's record.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct SnapshotSource {
    pub source: Source,
    pub generation: Generation,
    /// The last record contained; `None` if the generation's first is missing.
    pub number: Option<RecordNumber>,
    pub engine_seq: Option<EngineSeq>,
    pub states: TierStates,
    pub holding: SnapshotHolding,
    /// Digest of what the image holds for it; empty if it is not folded.
    pub after: Digest,
}

/// Whether a source's blocks are in the image. Numbers are wire values: stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum SnapshotHolding {
    /// In the image.
    Folded = 0,
    /// Absent until the next generation, because the log contradicted itself.
    Diverged = 1,
    /// Absent until the next generation, because the shim was away for long.
    Freed = 2,
}

/// A snapshot's name, and what it contains.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct SnapshotRef {
    pub name: String,
    pub log: StreamIdentity,
    pub at: RecordMark,
    pub bytes: u64,
}

/// The value of the pointer key. It moves forward only.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct SnapshotPointer {
    pub newest: SnapshotRef,
    /// The one before, for the case that the newest is unreadable.
    pub older: Option<SnapshotRef>,
}
