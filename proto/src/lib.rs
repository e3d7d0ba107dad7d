//! Warmroute's vocabulary: what the parts say to each other, and the rules they share.
//!
//! Everything here is pure: no IO, no clock, no randomness, no runtime. The main types are
//! [`Record`] (one step of one source's cache), [`Sequencer`] (the one rule that decides what a
//! numbered message does to its reader), [`Digest`] (how two views of one cache are compared) and
//! [`LocalHash`] / [`PrefixHash`] (how a prompt is named without ever being written down).
//!
//! What is deliberately absent: engine hashes and tokens. Both end at the shim.
#![forbid(unsafe_code)]

pub mod codec;
mod digest;
pub mod hash;
mod ids;
pub mod load;
pub mod message;
pub mod query;
mod record;
pub mod registry;
mod sequence;
pub mod snapshot;
pub mod subject;
pub mod view;

pub use digest::Digest;
pub use hash::{LocalHash, PrefixHash, Seed};
pub use ids::{
    BlockSize, DpRank, EngineSeq, Generation, LogPosition, LogTime, Namespace, RecordNumber,
    RouterId, Source, StreamIdentity, WorkerId,
};
pub use record::{Change, EngineHealth, Heartbeat, Record, Tier, TierState, TierStates, Tiers};
pub use sequence::{SequenceComparison, SequenceVerdict, Sequencer};
