//! State of the sources that a process holds, for operators' tools: an indexer's over the plane
//! ([`ViewPage`]), an indexer's or shim's over HTTP ([`DigestView`]).
//!
//! A view is read in pages, so that each fits into a message. Each page shows one moment; two pages
//! may show different ones.

use bincode::{Decode, Encode};
use serde::Serialize;

use crate::query::{NO_EVENTS, SourceState, UnknownReason, is_without_events};
use crate::{
    Digest, DpRank, EngineHealth, EngineSeq, Generation, LogPosition, RecordNumber, Source,
    StreamIdentity, Tiers, WorkerId,
};

/// Most sources in a page, at about 150 bytes each.
pub const PAGE_SOURCES_MAX: u32 = 2000;

/// Bytes at which a page of a view ends: half of what NATS accepts by default.
pub const PAGE_BYTES_MAX: usize = 512 << 10;

/// Asks an indexer replica for a page of its view.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ViewPageRequest {
    /// Only sources after this one, in their order; `None` starts at the first.
    pub after: Option<Source>,
    pub sources_max: u32,
}

/// One page of an indexer's view.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ViewPage {
    pub version: String,
    pub ready: bool,
    /// `None` before the log is known.
    pub log: Option<StreamIdentity>,
    /// Records up to here are applied.
    pub position: LogPosition,
    pub lag_messages: u64,
    /// Time since the log was applied to its end; `None` if its end is unknown.
    pub lag_ms: Option<u64>,
    /// The replica's own clock, only to show its offset.
    pub unix_ns: u64,
    /// Seconds within which it snapshots new records; `None` if it writes no snapshots.
    pub snapshot_every_secs: Option<u64>,
    pub sources: Vec<SourceView>,
    /// Whether further sources follow the last one.
    pub more: bool,
}

/// Asks an indexer replica what went wrong there.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ReplicaFaultsRequest {}

/// What went wrong at an indexer replica within the last ten minutes. Counts end at 255.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct ReplicaFaults {
    /// Answers to routers that were larger than a message of the plane may be.
    pub answers_too_large: u8,
    /// HTTP requests that found no free slot.
    pub turned_away: u8,
    /// What the plane's server refuses its user: `publish` or `subscribe`, and the subject.
    pub refused: Vec<String>,
}

/// One source as a replica holds it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct SourceView {
    pub source: Source,
    pub generation: Option<Generation>,
    pub number: Option<RecordNumber>,
    pub engine_seq: Option<EngineSeq>,
    pub states: Tiers<SourceState>,
    pub reason: Option<UnknownReason>,
    /// Why the source may be wrong, if the replica itself found a fault.
    pub doubt: Option<SourceFault>,
    /// Time since its GPU tier entered its state, to half a second.
    pub state_age_ms: u64,
    pub proof_age_ms: Option<u64>,
    /// `None` while nothing is folded.
    pub digest: Option<Digest>,
    pub health: EngineHealth,
    /// Generations that began at this replica within the last ten minutes, at most 255.
    pub begun_lately: u8,
}

/// A fault that a replica found in a source. Numbers are wire values: stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Encode, Decode)]
#[serde(rename_all = "snake_case")]
pub enum SourceFault {
    /// A record before the last one is missing.
    Gap = 0,
    /// A record that a heartbeat announced did not arrive.
    Overdue = 1,
    /// A message on its subject could not be read, or positions were skipped.
    Unread = 2,
    /// One number arrived with two contents.
    Violation = 3,
    /// Count or digest differed, or a change contradicted what is held.
    Diverged = 4,
    /// Heartbeats name a generation that the log does not have.
    Unseen = 5,
}

impl SourceView {
    /// The state of its GPU tier, or `no_events`.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        if self.is_without_events() {
            NO_EVENTS
        } else {
            self.states.gpu.label()
        }
    }

    #[must_use]
    pub const fn is_without_events(&self) -> bool {
        is_without_events(self.states.gpu, self.reason)
    }
}

impl SourceFault {
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Gap => "gap",
            Self::Overdue => "overdue",
            Self::Unread => "unread",
            Self::Violation => "violation",
            Self::Diverged => "diverged",
            Self::Unseen => "unseen",
        }
    }
}

/// The body of `/v1/digest`. Unknown values are null; a shim has no position.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DigestView {
    pub position: Option<LogPosition>,
    pub sources: Vec<SourceDigest>,
}

/// One source in `/v1/digest`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SourceDigest {
    pub worker: WorkerId,
    pub dp_rank: DpRank,
    /// The state of the GPU tier.
    pub state: SourceState,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
    pub generation: Option<Generation>,
    pub number: Option<RecordNumber>,
    pub engine_seq: Option<EngineSeq>,
    /// Held (prefix hash, tier) pairs; null while nothing is folded.
    pub blocks: Option<u64>,
    pub digest: Option<String>,
}
