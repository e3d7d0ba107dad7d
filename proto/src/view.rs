//! What parts say of the sources that they hold, for operators and their tools, not for routers: over the
//! plane ([`ViewPage`], an indexer's), and over HTTP ([`DigestView`], indexers' and shims').
//!
//! A view is asked for in pages, so that it fits into a message however many sources there are. Each
//! page is of one moment; two pages need not be of the same.

use bincode::{Decode, Encode};
use serde::Serialize;

use crate::query::{SourceState, UnknownReason};
use crate::{
    Digest, DpRank, EngineHealth, EngineSeq, Generation, LogPosition, RecordNumber, Source,
    StreamIdentity, Tiers, WorkerId,
};

/// No page has more sources, whatever was asked for: about 150 bytes each.
pub const PAGE_SOURCES_MAX: u32 = 2000;

/// Asks a replica for a page of its view.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ViewPageRequest {
    /// Only sources behind this one, in their order; none: from the first.
    pub after: Option<Source>,
    pub sources_max: u32,
}

/// A page.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ViewPage {
    pub version: String,
    pub ready: bool,
    /// None before the log is known.
    pub log: Option<StreamIdentity>,
    /// Everything up to here is in.
    pub position: LogPosition,
    pub lag_messages: u64,
    /// Since the log was in up to its end; none if that is out of reach.
    pub lag_ms: Option<u64>,
    /// The replica's own clock: to show how far it is off, nothing else.
    pub unix_ns: u64,
    /// Seconds within which it writes a snapshot if anything came; none if it writes none.
    pub snapshot_every_secs: Option<u64>,
    pub sources: Vec<SourceView>,
    /// There are sources behind the last one.
    pub more: bool,
}

/// One source as a replica sees it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct SourceView {
    pub source: Source,
    pub generation: Option<Generation>,
    pub number: Option<RecordNumber>,
    pub engine_seq: Option<EngineSeq>,
    pub states: Tiers<SourceState>,
    pub reason: Option<UnknownReason>,
    /// Why it may be wrong, where the replica itself found out.
    pub doubt: Option<SourceFault>,
    /// Since its GPU tier is in that state, to half a second.
    pub state_age_ms: u64,
    pub proof_age_ms: Option<u64>,
    /// None while nothing is folded.
    pub digest: Option<Digest>,
    pub health: EngineHealth,
    /// Generations that this replica saw begin within the last ten minutes, at most 255.
    pub begun_lately: u8,
}

/// What a replica found wrong with a source. Numbers are wire values: stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Encode, Decode)]
#[serde(rename_all = "snake_case")]
pub enum SourceFault {
    /// A record before the last one is missing.
    Gap = 0,
    /// What a heartbeat announced did not come.
    Overdue = 1,
    /// Something on its subject could not be read, or positions were skipped.
    Unread = 2,
    /// One number came with two contents.
    Violation = 3,
    /// Count or digest differed, or a change contradicted what is held.
    Diverged = 4,
    /// Heartbeats name a generation that the log does not have.
    Unseen = 5,
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

/// The body of `/v1/digest`. What is not known is null; a shim has no position.
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
    pub reason: Option<UnknownReason>,
    pub generation: Option<Generation>,
    pub number: Option<RecordNumber>,
    pub engine_seq: Option<EngineSeq>,
    /// Held (prefix hash, tier) pairs; null while nothing is folded.
    pub blocks: Option<u64>,
    pub digest: Option<String>,
}
