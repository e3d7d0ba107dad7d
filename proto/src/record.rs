//! Records and heartbeats: the net changes of one source's cache, numbered and self-checking.

use std::fmt;

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::{
    Digest, EngineSeq, Generation, LocalHash, LogTime, PrefixHash, RecordNumber, Source,
    hash::prefix_hashes,
};

/// Where a block lies. Numbers are wire values: stable.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Encode, Decode,
)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    Gpu = 0,
    Cpu = 1,
    Disk = 2,
}

impl Tier {
    pub const ALL: [Self; 3] = [Self::Gpu, Self::Cpu, Self::Disk];

    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }

    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Cpu => "cpu",
            Self::Disk => "disk",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// What a shim can vouch for in a tier. Ordered from the strongest to the weakest; the weakest
/// wins. Numbers are wire values: stable.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Encode, Decode,
)]
#[serde(rename_all = "snake_case")]
pub enum TierState {
    /// The pairs are the fold of all that the engine published.
    Complete = 0,
    /// What is credited is held; more may be held.
    Partial = 1,
    /// Apparently complete, but this engine's set-up hides some losses.
    Unverified = 2,
    /// May be wrong.
    Stale = 3,
    /// Further changes are in transit.
    CatchingUp = 4,
    /// The engine has no such tier.
    Absent = 5,
}

impl TierState {
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Partial => "partial",
            Self::Unverified => "unverified",
            Self::Stale => "stale",
            Self::CatchingUp => "catching_up",
            Self::Absent => "absent",
        }
    }

    /// A tier that does not exist stays absent.
    #[must_use]
    pub fn weakest(self, other: Self) -> Self {
        self.max(other)
    }
}

/// One value per tier, indexed by [`Tier`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, Encode, Decode,
)]
pub struct Tiers<T> {
    pub gpu: T,
    pub cpu: T,
    pub disk: T,
}

impl<T> Tiers<T> {
    pub fn all(value: T) -> Self
    where
        T: Copy,
    {
        Self {
            gpu: value,
            cpu: value,
            disk: value,
        }
    }

    #[must_use]
    pub const fn get(&self, tier: Tier) -> &T {
        match tier {
            Tier::Gpu => &self.gpu,
            Tier::Cpu => &self.cpu,
            Tier::Disk => &self.disk,
        }
    }

    pub const fn get_mut(&mut self, tier: Tier) -> &mut T {
        match tier {
            Tier::Gpu => &mut self.gpu,
            Tier::Cpu => &mut self.cpu,
            Tier::Disk => &mut self.disk,
        }
    }

    pub fn map<U>(&self, mut f: impl FnMut(&T) -> U) -> Tiers<U> {
        Tiers {
            gpu: f(&self.gpu),
            cpu: f(&self.cpu),
            disk: f(&self.disk),
        }
    }
}

pub type TierStates = Tiers<TierState>;

/// One change of a source's held (prefix hash, tier) pairs. Variant numbers are wire values.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum Change {
    /// A run of blocks is held from now on, each the child of the one before it.
    Stored {
        parent: Option<PrefixHash>,
        blocks: Vec<LocalHash>,
        tier: Tier,
    },
    /// Exactly these pairs are no longer held; descendants stay.
    Removed { blocks: Vec<PrefixHash>, tier: Tier },
    /// No pair of the tier is held any more.
    Cleared { tier: Tier },
}

impl Change {
    /// The prefix hashes of a `Stored`; empty for the others.
    pub fn stored_prefixes(&self) -> impl Iterator<Item = PrefixHash> {
        let (parent, blocks) = match self {
            Self::Stored { parent, blocks, .. } => (*parent, blocks.as_slice()),
            Self::Removed { .. } | Self::Cleared { .. } => (None, &[][..]),
        };
        prefix_hashes(parent, blocks)
    }
}

/// The net changes of one or more whole engine batches of one source.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Record {
    pub source: Source,
    pub generation: Generation,
    pub number: RecordNumber,
    /// The last engine batch contained; `None` before the first.
    pub engine_seq: Option<EngineSeq>,
    pub changes: Vec<Change>,
    pub states: TierStates,
    /// Digest of the pairs held once the record is applied.
    pub after: Digest,
    /// The log's clock when the record was made: it proves its content as of then.
    pub sent_at: Option<LogTime>,
}

/// An engine's health as its shim observes it over HTTP. Numbers are wire values: stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Encode, Decode)]
#[serde(rename_all = "snake_case")]
pub enum EngineHealth {
    Unknown = 0,
    Healthy = 1,
    Unhealthy = 2,
}

/// Sent each second outside the log: the state of a source as of its last acknowledged record.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Heartbeat {
    pub source: Source,
    pub generation: Generation,
    /// The last acknowledged record; `None` before the generation's first.
    pub number: Option<RecordNumber>,
    pub engine_seq: Option<EngineSeq>,
    pub states: TierStates,
    pub after: Digest,
    pub health: EngineHealth,
    /// The log's clock when the heartbeat was made.
    pub sent_at: Option<LogTime>,
}
