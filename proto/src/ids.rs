//! Newtypes for every id and position, so that no two bare integers stand side by side.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize,
            Deserialize, Encode, Decode,
        )]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

macro_rules! counts {
    ($($name:ident)*) => {
        $(impl $name {
            /// The following value. Saturates: a counter that wraps would break its order.
            #[must_use]
            pub const fn next(self) -> Self {
                Self(self.0.saturating_add(1))
            }
        })*
    };
}

number! {
    /// The sequence number of an engine's batch, from 0 at every engine start.
    EngineSeq
}
number! {
    /// The fence of a source: messages of an older generation are void.
    Generation
}
number! {
    /// A record's number within its generation: 0, 1, 2, …
    RecordNumber
}
number! {
    /// A position in the log. The first record has 1; 0 means "before the first".
    LogPosition
}

number! {
    /// Nanoseconds since the Unix epoch by the clock that stamps the log's messages, as its user
    /// read it last. Only differences are meaningful, and only while that clock does not jump.
    LogTime
}

counts!(EngineSeq RecordNumber LogPosition);

impl Generation {
    /// No honest generation is so far above a known one: generations are taken one at a time, each
    /// by a write to the registry, and at a thousand a second this takes fifty days.
    const JUMP_MAX: u64 = 1 << 32;

    /// The following generation, or `None` at the last: one that is given twice fences nothing.
    #[must_use]
    pub const fn next(self) -> Option<Self> {
        match self.0.checked_add(1) {
            Some(next) => Some(Self(next)),
            None => None,
        }
    }

    /// Whether a source whose `known` generation is this may have come to it. A reader that accepts
    /// any number could be led to the last one by a single message, and no generation could follow.
    #[must_use]
    pub const fn is_plausible_after(self, known: Self) -> bool {
        self.0 <= known.0.saturating_add(Self::JUMP_MAX)
    }
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Encode,
            Decode,
        )]
        #[serde(transparent)]
        pub struct $name(Arc<str>);

        impl $name {
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $name {
            fn from(name: &str) -> Self {
                Self(name.into())
            }
        }

        impl From<String> for $name {
            fn from(name: String) -> Self {
                Self(name.into())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

name! {
    /// One vLLM server, whatever its number of ranks. Chosen by the operator; unique in a
    /// namespace.
    WorkerId
}
name! {
    /// Separates fleets that share one NATS.
    Namespace
}

/// A data-parallel rank of a worker, from 0.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    Encode,
    Decode,
)]
#[serde(transparent)]
pub struct DpRank(pub u32);

impl fmt::Display for DpRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One data-parallel rank of one worker: the unit that has a cache, a load and a log subject.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Encode, Decode,
)]
pub struct Source {
    pub worker: WorkerId,
    pub dp_rank: DpRank,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.worker, self.dp_rank)
    }
}

/// Tokens per block.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Encode, Decode,
)]
#[serde(transparent)]
pub struct BlockSize(NonZeroU32);

impl BlockSize {
    /// `None` for zero: a block holds at least one token.
    #[must_use]
    pub const fn new(tokens: u32) -> Option<Self> {
        match NonZeroU32::new(tokens) {
            Some(tokens) => Some(Self(tokens)),
            None => None,
        }
    }

    #[must_use]
    pub const fn tokens(self) -> usize {
        self.0.get() as usize
    }
}

impl fmt::Display for BlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Bound of [`BlockCut::lookahead`], far above that of any engine: each block is hashed with so many
/// tokens more.
pub const LOOKAHEAD_MAX: u32 = 64;

/// How an engine cuts a prompt into the blocks that its cache names.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Encode, Decode,
)]
pub struct BlockCut {
    pub size: BlockSize,
    /// Tokens behind a block that its name covers besides its own, as of vLLM with EAGLE or MTP; 0
    /// for most engines. A block without so many tokens behind it has no name.
    pub lookahead: u32,
}

impl BlockCut {
    /// Tokens that the name of one block covers.
    #[must_use]
    pub const fn covered_tokens(self) -> usize {
        self.size.tokens().saturating_add(self.lookahead as usize)
    }

    /// Number of blocks with a name among so many tokens.
    #[must_use]
    pub const fn blocks(self, tokens: usize) -> usize {
        tokens.saturating_sub(self.lookahead as usize) / self.size.tokens()
    }
}

impl From<BlockSize> for BlockCut {
    fn from(size: BlockSize) -> Self {
        Self { size, lookahead: 0 }
    }
}

/// Identity of a log. Positions of logs with different identities cannot be compared, even if the
/// logs have the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Encode, Decode)]
pub struct StreamIdentity {
    /// When the log was created, nanoseconds since the Unix epoch; 0 for a log in the memory of its
    /// one reader.
    pub created_unix_ns: u64,
    /// A random number, drawn at creation.
    pub nonce: u64,
}

impl StreamIdentity {
    /// A log in the memory of the process that reads it.
    #[must_use]
    pub const fn of_one_reader(nonce: u64) -> Self {
        Self {
            created_unix_ns: 0,
            nonce,
        }
    }

    /// Whether one process alone reads this log: no other one can be ahead of it.
    #[must_use]
    pub const fn is_of_one_reader(&self) -> bool {
        self.created_unix_ns == 0
    }
}

/// A router replica: 128 random bits that it draws at its start.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Encode, Decode,
)]
pub struct RouterId(pub [u8; 16]);

impl fmt::Display for RouterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
