//! The registry's values, and the request that asks a shim for a new generation.

use std::str::FromStr;

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::{
    BlockCut, BlockSize, Generation, LogPosition, RouterId, Source, StreamIdentity, WorkerId,
};

/// More data-parallel ranks than any server has. Readers create one source for each, so that an
/// entry with more ranks, or with none, does not decode.
pub const RANKS_MAX: u32 = 1024;

/// One worker as its shim registers it. Together with the engine's health it decides whether the
/// worker is a candidate.
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
    /// `None` until the engine's `/metrics` or first event shows it.
    pub block_size: Option<BlockSize>,
    /// KV blocks of one rank, if the engine reports them.
    pub blocks_per_rank: Option<u64>,
    /// Bound on prompt plus output, in tokens, if the engine reports it.
    pub max_model_len: Option<u32>,
    /// All of the engine's KV groups are main attention, so that a credited block is a cached one.
    pub main_attention_only: bool,
    /// The shim's version.
    pub version: String,
    /// [`BlockCut::lookahead`].
    pub lookahead: u32,
    pub role: WorkerRole,
}

impl WorkerEntry {
    /// An engine of one rank of which nothing else is known.
    #[must_use]
    pub fn new(worker: impl Into<WorkerId>, url: impl Into<String>) -> Self {
        Self {
            worker: worker.into(),
            url: url.into(),
            models: Vec::new(),
            loras: Vec::new(),
            ranks: 1,
            block_size: None,
            blocks_per_rank: None,
            max_model_len: None,
            main_attention_only: false,
            version: String::new(),
            lookahead: 0,
            role: WorkerRole::Both,
        }
    }

    /// `None` until the block size is known.
    #[must_use]
    pub fn block_cut(&self) -> Option<BlockCut> {
        let lookahead = self.lookahead;
        self.block_size.map(|size| BlockCut { size, lookahead })
    }
}

/// Which part of a request a worker serves. Numbers are wire values: stable.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, Encode, Decode,
)]
#[serde(rename_all = "snake_case")]
pub enum WorkerRole {
    /// Whole requests.
    #[default]
    Both = 0,
    /// Prompts, whose blocks a worker with another role takes over.
    Prefill = 1,
    /// Answers to prompts that a prefill worker computed, and whole requests.
    Decode = 2,
}

impl WorkerRole {
    pub const ALL: [Self; 3] = [Self::Both, Self::Prefill, Self::Decode];

    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// A text that names no [`WorkerRole`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no role: both, prefill or decode")]
pub struct UnknownRole(String);

impl FromStr for WorkerRole {
    type Err = UnknownRole;

    fn from_str(text: &str) -> Result<Self, UnknownRole> {
        let named = |role: &Self| role.label() == text;
        let role = Self::ALL.into_iter().find(named);
        role.ok_or_else(|| UnknownRole(text.to_owned()))
    }
}

/// A LoRA adapter as a model of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Encode, Decode)]
pub struct Lora {
    pub name: String,
    /// The base model, if the engine reports it.
    pub parent: Option<String>,
}

/// Whether an operator drains a worker. Numbers are wire values: stable.
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

/// An operator's setting of a worker. It holds until the next one, across restarts of everything, and
/// has no lease. Routers delete it a week after it was set to serving.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct DrainEntry {
    pub worker: WorkerId,
    pub drain: DrainState,
    /// One above the setting before: the highest is the last.
    pub turn: u64,
    /// By the clock of the router that received it, for operators.
    pub set_unix_s: u64,
    /// [`ShimEntry::instance`] when the worker was drained: its life. `None` if no shim held the
    /// lease, and of a worker that serves.
    pub shim: Option<[u8; 16]>,
    /// When the drain ends.
    pub until: DrainUntil,
}

/// When a drain ends. Numbers are wire values: stable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[serde(rename_all = "snake_case")]
pub enum DrainUntil {
    /// When an operator undrains the worker.
    #[default]
    Undone = 0,
    /// When another shim than [`DrainEntry::shim`] registers the worker.
    Restart = 1,
}

/// What operators' tools compare between routers. Nothing decides by it. It expires with its
/// router.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RouterFacts {
    pub router: RouterId,
    /// Digest of the settings that decide where requests go.
    pub settings: u64,
    /// The router's clock.
    pub unix_ns: u64,
    /// The first [`FACTS_SHOWN_MAX`] failed checks of workers.
    pub failed_checks: Vec<FailedCheck>,
    /// The first [`FACTS_SHOWN_MAX`] workers that answer and are not registered.
    pub unregistered: Vec<WorkerId>,
    /// The first [`FACTS_SHOWN_MAX`] models without a tokenizer, if the router's policy needs one.
    pub without_tokenizer: Vec<ModelProblem>,
}

/// What the plane's server refuses a router's user, for operators' tools. It expires with its
/// router, and there is none while nothing is refused.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RouterRefusals {
    pub router: RouterId,
    /// `publish` or `subscribe`, and the subject.
    pub refused: Vec<String>,
}

/// What engines' reports contradict of the index's credit, for operators' tools. It expires with its
/// router, and there is none while nothing is doubted.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RouterDoubts {
    pub router: RouterId,
    /// Number of doubted scopes.
    pub total: u32,
    /// The first [`FACTS_SHOWN_MAX`] of them.
    pub doubts: Vec<CreditDoubt>,
}

/// Requests whose credit is not exact although the index says so.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct CreditDoubt {
    /// What they have in common.
    pub about: String,
    /// The engines had `more` or `less` than was credited.
    pub engine_had: String,
    pub likely_cause: String,
}

/// The workers that a router misses, for operators' tools. It expires with its router, and there is
/// none while no worker is missed.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RouterMisses {
    pub router: RouterId,
    /// The first [`FACTS_SHOWN_MAX`] registered workers that do not answer this router.
    pub unreachable: Vec<UnreachableWorker>,
    /// The first [`FACTS_SHOWN_MAX`] workers that are gone: their registration expired, neither a
    /// deregistration nor a drain came before, and their engine does not answer.
    pub lost: Vec<LostWorker>,
}

/// A registered worker whose engine does not answer a router.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct UnreachableWorker {
    pub worker: WorkerId,
    pub url: String,
    pub why: String,
}

/// A worker that is gone without a sign.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct LostWorker {
    pub worker: WorkerId,
    /// Since its last registration.
    pub silent_secs: u32,
}

/// A model whose prompts in text a router cannot hash.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ModelProblem {
    pub model: String,
    pub why: String,
}

/// A worker whose engine tokenizes or cuts blocks otherwise than this router.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct FailedCheck {
    pub worker: WorkerId,
    pub check: String,
    pub why: String,
}

/// Most checks, most workers and most models in [`RouterFacts`].
pub const FACTS_SHOWN_MAX: usize = 64;

/// The sources that one router demoted, for operators' tools. It expires with its router.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct DemotionEntry {
    pub router: RouterId,
    /// Number of demoted sources.
    pub total: u32,
    /// The first [`DEMOTIONS_SHOWN_MAX`] of them.
    pub sources: Vec<DemotedSource>,
}

/// A source whose index credit a router ignores until its engine agrees with it again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Encode, Decode)]
pub struct DemotedSource {
    pub source: Source,
    pub generation: Generation,
    /// Consecutive requests since then that found all blocks that the index credits.
    pub agreements: u32,
}

/// Most sources in a [`DemotionEntry`].
pub const DEMOTIONS_SHOWN_MAX: usize = 256;

/// The value of the lease under which one shim serves a worker.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ShimEntry {
    /// Random for each process: two holders never write the same value.
    pub instance: [u8; 16],
    /// The shim's version.
    pub version: String,
}

/// The value of a generation key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct GenerationEntry {
    pub generation: Generation,
}

/// One indexer replica as it registers itself, under a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Encode, Decode)]
pub struct IndexerEntry {
    /// Never reused by another replica.
    pub id: String,
    /// URL of its HTTP port, without a trailing slash; `None` if it is not configured.
    pub url: Option<String>,
    pub version: String,
    pub ready: bool,
    /// `None` before the log is known.
    pub log: Option<StreamIdentity>,
    /// Records up to here are applied.
    pub position: LogPosition,
}

/// The value of the lease under which one indexer writes a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct SnapshotLease {
    /// [`IndexerEntry::id`].
    pub writer: String,
    /// Counts the writer's attempts, so that no two values are equal.
    pub attempt: u64,
}

/// Asks a shim for a new generation, because an indexer cannot follow the source.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ResyncRequest {
    pub source: Source,
    /// The requester's fence: the next generation must be above it.
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
