//! What an indexer keeps so that the next one need not read the whole log: a snapshot's head, and the
//! pointer to the newest ones.
//!
//! The head says of which log, up to which record, and what each source was; the tree's image follows
//! it in the blob (`indexer/index/src/snapshot/format.rs`). Nothing in it depends on a clock of the writer.

use bincode::{Decode, Encode};

use crate::{
    Digest, EngineSeq, Generation, LogPosition, RecordNumber, Source, StreamIdentity, TierStates,
};

/// One record of the log, recognisable: a log that was rolled back and refilled has another one there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RecordMark {
    pub position: LogPosition,
    /// When the log took it, nanoseconds since the Unix epoch.
    pub stored_unix_ns: u64,
    /// XXH3-64 of its payload.
    pub checksum: u64,
}

/// The fold of a log up to a record, without the tree.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct SnapshotHead {
    pub log: StreamIdentity,
    /// The last record that is in.
    pub at: RecordMark,
    /// Every source with a generation, in their order. The image names the folded ones by their place
    /// among the folded ones.
    pub sources: Vec<SnapshotSource>,
    pub image_bytes: u64,
}

/// One source as the log tells it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct SnapshotSource {
    pub source: Source,
    pub generation: Generation,
    /// The last record that is in; none if the generation's first is missing.
    pub number: Option<RecordNumber>,
    pub engine_seq: Option<EngineSeq>,
    pub states: TierStates,
    pub holding: SnapshotHolding,
    /// Of what the image holds for it; empty if it is not folded.
    pub after: Digest,
}

/// What became of a source's blocks. Numbers are wire values: stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum SnapshotHolding {
    /// They are in the image.
    Folded = 0,
    /// The log contradicted itself: nothing until the next generation.
    Diverged = 1,
    /// The shim was gone for long: nothing until the next generation.
    Freed = 2,
}

/// Where a snapshot lies, and what of.
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
    /// The one before, kept in case the newest turns out to be unreadable.
    pub older: Option<SnapshotRef>,
}
