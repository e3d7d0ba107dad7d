//! Bytes of all messages: a version byte, a kind byte, bincode, a checksum.
//!
//! The checksum is XXH3-64 of all bytes before it. It covers what a record's digest does not, such
//! as its engine sequence and states. It detects accidents, not forgery.
//!
//! bincode 2.0.1 is frozen upstream, which suits a wire format; only this module uses it. Integers
//! have a fixed width and are little-endian (hashes are random, a variable width would make them
//! longer). Decoding is bounded by [`MESSAGE_BYTES_MAX`] and by the given bytes: a longer length is
//! refused before anything is allocated.
//!
//! A golden sample of every message lies in `proto/testdata`.

use bincode::config::{Configuration, Fixint, Limit, LittleEndian};
use bincode::enc::EncoderImpl;
use bincode::enc::write::SizeWriter;
use bincode::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_64;

use crate::load::{LoadAnswer, LoadFrame, LoadHeartbeat, LoadMessage, LoadRequest, RouterEntry};
use crate::peers::{PeerBeacon, RegistryPage, RegistryPageRequest, RegistryWrite};
use crate::query::{HoldAnswer, HoldQuery, IndexAnswer, IndexQuery};
use crate::registry::{
    DemotionEntry, DrainEntry, GenerationEntry, IndexerEntry, RANKS_MAX, ResyncRequest,
    RouterDoubts, RouterFacts, RouterMisses, RouterRefusals, ShimEntry, SnapshotLease, WorkerEntry,
};
use crate::roster::{DeepHolderQuery, HolderAnswer, HolderQuery, RosterPage, RosterPageRequest};
use crate::snapshot::{SnapshotHead, SnapshotPointer};
use crate::tenant_use::{TenantLevels, TenantReport};
use crate::view::{ReplicaFaults, ReplicaFaultsRequest, ViewPage, ViewPageRequest};
use crate::{Heartbeat, LOOKAHEAD_MAX, Record};

/// The version that is written and read.
pub const VERSION: u8 = 2;

const CHECKSUM_BYTES: usize = size_of::<u64>();

/// Most bytes of a message, encoded or decoded. Queries are the largest: one of a million tokens
/// takes half a MiB.
pub const MESSAGE_BYTES_MAX: usize = 4 << 20;

/// Most bytes of a record, well within the limits of a NATS server by default.
pub const RECORD_BYTES_MAX: usize = 64 << 10;

const CONFIG: Configuration<LittleEndian, Fixint, Limit<MESSAGE_BYTES_MAX>> =
    bincode::config::standard()
        .with_little_endian()
        .with_fixed_int_encoding()
        .with_limit::<MESSAGE_BYTES_MAX>();

/// A type with its own kind byte. Kinds are wire values: stable, never reused. Kinds 22, 30 and 41
/// are retired.
pub trait Message: Encode + Decode<()> {
    const KIND: u8;

    /// Why a well-formed message is refused, if it is.
    #[doc(hidden)]
    fn impossible(&self) -> Option<&'static str> {
        None
    }
}

impl Message for WorkerEntry {
    const KIND: u8 = 6;

    fn impossible(&self) -> Option<&'static str> {
        if !(1..=RANKS_MAX).contains(&self.ranks) {
            Some("a worker of so many ranks")
        } else if self.lookahead > LOOKAHEAD_MAX {
            Some("a lookahead of so many tokens")
        } else {
            None
        }
    }
}
impl Message for HolderAnswer {
    const KIND: u8 = 28;

    fn impossible(&self) -> Option<&'static str> {
        self.fault()
    }
}

macro_rules! kinds {
    ($($message:ident = $kind:literal,)*) => {
        $(impl Message for $message {
            const KIND: u8 = $kind;
        })*
    };
}

kinds! {
    Record = 1,
    Heartbeat = 2,
    IndexQuery = 3,
    IndexAnswer = 4,
    LoadMessage = 5,
    GenerationEntry = 7,
    ResyncRequest = 8,
    LoadHeartbeat = 9,
    LoadFrame = 10,
    LoadRequest = 11,
    LoadAnswer = 12,
    RouterEntry = 13,
    SnapshotHead = 14,
    SnapshotPointer = 15,
    IndexerEntry = 16,
    SnapshotLease = 17,
    ShimEntry = 18,
    ViewPageRequest = 19,
    ViewPage = 20,
    DrainEntry = 21,
    HoldAnswer = 23,
    DemotionEntry = 24,
    RouterFacts = 31,
    RosterPageRequest = 25,
    RosterPage = 26,
    HolderQuery = 27,
    HoldQuery = 29,
    TenantReport = 32,
    ReplicaFaultsRequest = 33,
    ReplicaFaults = 34,
    RouterRefusals = 35,
    TenantLevels = 36,
    RegistryWrite = 37,
    PeerBeacon = 38,
    RegistryPageRequest = 39,
    RegistryPage = 40,
    RouterDoubts = 42,
    DeepHolderQuery = 44,
    RouterMisses = 45,
}

#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    #[error("{0} bytes are no message")]
    TooShort(usize),
    #[error("{0} bytes exceed the limit of {MESSAGE_BYTES_MAX}")]
    TooLong(usize),
    #[error("version {0} is not known here")]
    Version(u8),
    #[error("kind {found} where kind {expected} was expected")]
    Kind { expected: u8, found: u8 },
    #[error("the checksum is not that of the bytes before it")]
    Checksum,
    #[error("{0} bytes follow the message")]
    Trailing(usize),
    #[error("malformed: {0}")]
    Malformed(#[from] bincode::error::DecodeError),
    #[error("impossible: {0}")]
    Impossible(&'static str),
}

#[derive(Debug, thiserror::Error)]
#[error("cannot encode: {0}")]
pub struct EncodeError(#[from] bincode::error::EncodeError);

/// The kind byte, for readers of subjects that carry several kinds. Nothing else is checked.
#[must_use]
pub fn kind(bytes: &[u8]) -> Option<u8> {
    bytes.get(1).copied()
}

/// The message's bytes. They are counted first, so that they are allocated once.
pub fn encode<M: Message>(message: &M) -> Result<Vec<u8>, EncodeError> {
    let mut counter = EncoderImpl::new(SizeWriter::default(), CONFIG);
    message.encode(&mut counter)?;
    let head = [VERSION, M::KIND];
    let body_bytes = counter.into_writer().bytes_written;
    let mut bytes = Vec::with_capacity(head.len() + body_bytes + CHECKSUM_BYTES);
    bytes.extend_from_slice(&head);
    bincode::encode_into_std_write(message, &mut bytes, CONFIG)?;
    seal(&mut bytes);
    Ok(bytes)
}

/// Appends the checksum to version, kind and body. Public for tests that make up bodies.
pub fn seal(bytes: &mut Vec<u8>) {
    let checksum = xxh3_64(bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
}

/// Decodes bytes that are exactly one message of this kind.
pub fn decode<M: Message>(bytes: &[u8]) -> Result<M, DecodeError> {
    let body = body(bytes, M::KIND)?;
    let (message, taken): (M, usize) = bincode::decode_from_slice(body, CONFIG)?;
    match (body.len() - taken, message.impossible()) {
        (0, None) => Ok(message),
        (0, Some(what)) => Err(DecodeError::Impossible(what)),
        (more, _) => Err(DecodeError::Trailing(more)),
    }
}

/// The messages of an encoded [`LoadFrame`], without a copy.
pub fn frame_messages(bytes: &[u8]) -> Result<Vec<&[u8]>, DecodeError> {
    let body = body(bytes, LoadFrame::KIND)?;
    let (messages, taken) = bincode::borrow_decode_from_slice(body, CONFIG)?;
    match body.len() - taken {
        0 => Ok(messages),
        more => Err(DecodeError::Trailing(more)),
    }
}

/// The body of a message of this kind.
fn body(bytes: &[u8], expected: u8) -> Result<&[u8], DecodeError> {
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(DecodeError::TooLong(bytes.len()));
    }
    let &[version, kind, ..] = bytes else {
        return Err(DecodeError::TooShort(bytes.len()));
    };
    if version != VERSION {
        return Err(DecodeError::Version(version));
    }
    let whole = checked(bytes)?;
    if kind != expected {
        return Err(DecodeError::Kind {
            expected,
            found: kind,
        });
    }
    Ok(whole.get(2..).unwrap_or_default())
}

/// The bytes before the checksum, if it is correct.
fn checked(bytes: &[u8]) -> Result<&[u8], DecodeError> {
    let (whole, checksum) = bytes
        .split_last_chunk::<CHECKSUM_BYTES>()
        .ok_or(DecodeError::TooShort(bytes.len()))?;
    if xxh3_64(whole) == u64::from_le_bytes(*checksum) {
        Ok(whole)
    } else {
        Err(DecodeError::Checksum)
    }
}
