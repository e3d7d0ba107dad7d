//! What the registry holds, and the request that asks a shim for a fresh start.

use bincode::{Decode, Encode};
use serde::Serialize;

use crate::{BlockSize, Generation, LogPosition, Source, StreamIdentity, WorkerId};

/// More data-parallel ranks than any server has. Readers make up one source for each: an entry that claims
/// more, or none, is refused where it is decoded, by everybody.
pub const RANKS_MAX: u32 = 1024;

/// One worker as its shim registers it. Decides who is a candidate, together with the engine's own
/// health; its lease only fences and masks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Encode, Decode)]
pub struct WorkerEntry {
    pub worker: WorkerId,
    /// Where routers reach the engine's HTTP, without a trailing slash.
    pub url: String,
    /// The models that the engine serves, as `/v1/models` lists them, adapters excluded.
    pub models: Vec<String>,
    /// LoRA adapters, which are model names of their own.
    pub loras: Vec<Lora>,
    /// Data-parallel ranks, 0 to `ranks - 1`; 1 to [`RANKS_MAX`] of them.
    pub ranks: u32,
    /// Not known before the engine's `/metrics` or first event told it.
    pub block_size: Option<BlockSize>,
    /// KV blocks of one rank, where the engine tells it.
    pub blocks_per_rank: Option<u64>,
    /// The longest prompt plus output, in tokens, where the engine tells it.
    pub max_model_len: Option<u32>,
    /// All of the engine's KV groups are main attention, so that a credited block is a cached one.
    pub main_attention_only: bool,
    /// The shim's version.
    pub version: String,
}

/// A LoRA adapter as a model of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Encode, Decode)]
pub struct Lora {
    pub name: String,
    /// The base model, where the engine tells it.
    pub parent: Option<String>,
}

/// An operator's wish.
///
/// Numbers are wire values: stable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Encode, Decode)]
#[serde(rename_all = "snake_case")]
pub enum DrainState {
    #[default]
    Serving = 0,
    /// Takes no new requests.
    Draining = 1,
}

impl DrainState {
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Draining => "draining",
        }
    }
}

/// An operator's word on a worker: it stands, whatever becomes of the worker and of who was told, until
/// the next one. No lease, never deleted.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct DrainEntry {
    pub worker: WorkerId,
    pub drain: DrainState,
    /// One above the word before: the higher one is the last.
    pub turn: u64,
    /// By the clock of the router that was told, for people.
    pub set_unix_s: u64,
}

/// The value of the lock under which one shim serves a worker.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ShimEntry {
    /// Drawn by each process at its start: two holders never write the same value.
    pub instance: [u8; 16],
    /// The shim's version.
    pub version: String,
}

/// The value of a generation key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct GenerationEntry {
    pub generation: Generation,
}

/// One indexer replica as it registers itself, under a lease: for operators, and for whoever wants to
/// reach its HTTP. Queries find replicas without it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Encode, Decode)]
pub struct IndexerEntry {
    /// Unique among all replicas that ever were.
    pub id: String,
    /// Where its HTTP is reached, without a trailing slash; none if it was not told.
    pub url: Option<String>,
    pub version: String,
    pub ready: bool,
    /// None before the log is known.
    pub log: Option<StreamIdentity>,
    /// Everything up to here is in.
    pub position: LogPosition,
}

/// The value of the snapshot lease: who is writing one.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct SnapshotLease {
    /// [`IndexerEntry::id`].
    pub writer: String,
    /// Counts this writer's attempts, so that no two values are equal.
    pub attempt: u64,
}

/// An indexer cannot follow a source any more: please start a new generation.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ResyncRequest {
    pub source: Source,
    /// The asker's own fence: the next generation must be above it.
    pub above: Generation,
    pub reason: ResyncReason,
}

/// Numbers are wire values: stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Encode, Decode)]
#[serde(rename_all = "snake_case")]
pub enum ResyncReason {
    Gap = 0,
    Mismatch = 1,
    Fenced = 2,
    LogLost = 3,
}

impl ResyncReason {
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Gap => "gap",
            Self::Mismatch => "mismatch",
            Self::Fenced => "fenced",
            Self::LogLost => "log_lost",
        }
    }
}
