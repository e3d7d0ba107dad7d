//! The queries that routers send to indexers, and the answers.

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::{
    EngineSeq, Generation, LocalHash, LogPosition, PrefixHash, RecordNumber, Source,
    StreamIdentity, Tier, TierState, Tiers,
};

/// Asks what each source holds of a prompt.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct IndexQuery {
    /// The prompt's blocks from depth 0.
    pub blocks: Vec<LocalHash>,
    /// A replica behind this position answers [`IndexAnswer::Behind`].
    pub at_least: Option<LogPosition>,
}

/// A tier's state at an indexer: the shim's state, lowered by what the indexer observed itself.
/// Ordered from the strongest to the weakest; the weakest wins. Numbers are wire values: stable.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Encode, Decode,
)]
#[serde(rename_all = "snake_case")]
pub enum SourceState {
    Exact = 0,
    Partial = 1,
    Unverified = 2,
    Stale = 3,
    CatchingUp = 4,
    Unknown = 5,
    /// The engine has no such tier: it holds nothing there. Not shown, and never of GPU memory.
    Absent = 6,
}

impl SourceState {
    /// Whether blocks of a tier in this state may lower a cost.
    #[must_use]
    pub const fn gives_credit(self) -> bool {
        match self {
            Self::Exact | Self::Partial | Self::Unverified => true,
            Self::Stale | Self::CatchingUp | Self::Unknown | Self::Absent => false,
        }
    }

    /// For serializers that leave out what does not exist.
    #[must_use]
    pub const fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }

    /// A tier that does not exist stays absent.
    #[must_use]
    pub fn weakest(self, other: Self) -> Self {
        self.max(other)
    }

    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Partial => "partial",
            Self::Unverified => "unverified",
            Self::Stale => "stale",
            Self::CatchingUp => "catching_up",
            Self::Unknown => "unknown",
            Self::Absent => "absent",
        }
    }
}

impl From<TierState> for SourceState {
    fn from(state: TierState) -> Self {
        match state {
            TierState::Complete => Self::Exact,
            TierState::Partial => Self::Partial,
            TierState::Unverified => Self::Unverified,
            TierState::Stale => Self::Stale,
            TierState::CatchingUp => Self::CatchingUp,
            TierState::Absent => Self::Absent,
        }
    }
}

/// Why a source is `unknown`. Numbers are wire values: stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Encode, Decode)]
#[serde(rename_all = "snake_case")]
pub enum UnknownReason {
    /// No record or heartbeat within the last 5 s, or the log has not shown its clock for 2.5 s.
    NoProof = 0,
    /// Not folded because the memory bound was reached.
    Memory = 1,
    /// The shim's lease expired.
    ShimGone = 2,
}

impl UnknownReason {
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::NoProof => "no_proof",
            Self::Memory => "memory",
            Self::ShimGone => "shim_gone",
        }
    }
}

/// Whether a source's shim has seen no event of its engine and has no connection to its events: the
/// one cause of `unknown` without a reason.
#[must_use]
pub const fn is_without_events(state: SourceState, reason: Option<UnknownReason>) -> bool {
    matches!((state, reason), (SourceState::Unknown, None))
}

/// Why a source is unknown, in a word.
#[must_use]
pub fn unknown_label(state: SourceState, reason: Option<UnknownReason>) -> Option<&'static str> {
    let label = reason.map(UnknownReason::label);
    label.or_else(|| is_without_events(state, reason).then_some(NO_EVENTS))
}

/// The word for a source without events.
pub const NO_EVENTS: &str = "no_events";

/// An indexer's answer to a [`IndexQuery`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum IndexAnswer {
    Runs {
        log: StreamIdentity,
        /// Records up to here are applied.
        position: LogPosition,
        /// All sources that the indexer knows, in the order of [`Source`].
        sources: Vec<SourceAnswer>,
    },
    /// This replica has not reached the requested position.
    Behind { position: LogPosition },
}

/// One source's part of an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Encode, Decode)]
pub struct SourceAnswer {
    pub source: Source,
    pub generation: Generation,
    /// The last record applied; `None` before the generation's first.
    pub number: Option<RecordNumber>,
    pub engine_seq: Option<EngineSeq>,
    pub states: Tiers<SourceState>,
    pub reason: Option<UnknownReason>,
    /// Milliseconds since the last record or heartbeat that proved this.
    pub proof_age_ms: u32,
    /// Credited blocks per tier: on the GPU the run from depth 0, in the lower tiers the run that
    /// follows the GPU's. A tier without credit holds nothing.
    pub run: Tiers<u32>,
}

/// Asks whether a source has held one block without interruption since a record.
///
/// The record is named twice: a log that lost its end gives positions again, and a generation whose
/// records and key are lost gives numbers again.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct HoldQuery {
    pub source: Source,
    pub log: StreamIdentity,
    pub since: LogPosition,
    pub block: PrefixHash,
    pub tier: Tier,
    pub generation: Generation,
    pub number: RecordNumber,
}

/// The answer to a [`HoldQuery`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct HoldAnswer {
    /// The log that this replica follows; `None` before it knows one.
    pub log: Option<StreamIdentity>,
    /// `None` for a source without records.
    pub generation: Option<Generation>,
    pub engine_seq: Option<EngineSeq>,
    /// State of the queried tier.
    pub state: SourceState,
    /// Milliseconds since the last record or heartbeat that proved this.
    pub proof_age_ms: u32,
    pub span: HoldSpan,
}

/// How long a block is held. Numbers are wire values: stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Encode, Decode)]
#[serde(rename_all = "snake_case")]
pub enum HoldSpan {
    /// Held now, and after every record since the queried one.
    Held = 0,
    /// Not held now.
    Absent = 1,
    /// Held now, and removed in between; rarely another block was.
    Interrupted = 2,
    /// This replica follows another log or generation, has not reached the queried record, or its
    /// list of removals does not reach back to it.
    Uncovered = 3,
}
