//! The messages that shims, indexers and routers exchange, and the rules that they share.
//!
//! Everything here is pure: no IO, no clock, no randomness, no runtime. The main types are
//! [`Record`] (one step of one source's cache), [`Sequencer`] (decides what a numbered message does
//! to its reader), [`Digest`] (compares two images of one cache) and [`LocalHash`] / [`PrefixHash`]
//! (name a prompt's blocks without its text).
//!
//! Absent on purpose: engine hashes and tokens. Both end at the shim.
#![forbid(unsafe_code)]

pub mod codec;
mod digest;
pub mod hash;
mod ids;
mod labels;
pub mod load;
pub mod message;
pub mod peers;
pub mod query;
mod record;
pub mod registry;
pub mod roster;
mod sequence;
pub mod snapshot;
pub mod subject;
pub mod tenant_use;
pub mod view;

pub use digest::Digest;
pub use hash::{LocalHash, PrefixHash, Seed};
pub use ids::{
    BlockCut, BlockSize, DpRank, EngineSeq, Generation, LOOKAHEAD_MAX, LogPosition, LogTime,
    Namespace, RecordNumber, RouterId, Source, StreamIdentity, WorkerId,
};
pub use record::{Change, EngineHealth, Heartbeat, Record, Tier, TierState, TierStates, Tiers};
pub use sequence::{SequenceComparison, SequenceVerdict, Sequencer};
