//! Bytes of everything that crosses a process boundary: a version byte, a kind byte, bincode, a checksum.
//!
//! The checksum is XXH3-64 of all before it: a digest covers a record's blocks, and nothing else covers its
//! engine sequence and states. It finds what a transport or a disk bent; it keeps nobody out.
//!
//! bincode 2.0.1 is frozen upstream, which suits a wire format; this is the one module that names
//! it. Integers have a fixed width and are little-endian (hashes are random, a variable width would
//! make them longer). Decoding is bounded by [`MESSAGE_BYTES_MAX`] and by the bytes that are there:
//! a claimed length beyond the limit is refused before anything is allocated.
//!
//! A golden sample of every message of every version lies in `proto/testdata`. Version 1, which had no
//! checksum, is read and not written.

mod v1;

use bincode::config::{Configuration, Fixint, Limit, LittleEndian};
use bincode::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_64;

use crate::load::{LoadAnswer, LoadFrame, LoadHeartbeat, LoadMessage, LoadRequest, RouterEntry};
use crate::query::{IndexAnswer, IndexQuery};
use crate::registry::{
    DrainEntry, GenerationEntry, IndexerEntry, RANKS_MAX, ResyncRequest, ShimEntry, SnapshotLease,
    WorkerEntry,
};
use crate::snapshot::{SnapshotHead, SnapshotPointer};
use crate::view::{ViewPage, ViewPageRequest};
use crate::{Heartbeat, Record};

/// The version that this code writes. Reads every version up to it.
pub const VERSION: u8 = 2;

/// The first one: without a checksum.
const VERSION_1: u8 = 1;

/// Of the checksum at a message's end.
const CHECKSUM_BYTES: usize = size_of::<u64>();

/// No message is larger, decoded or encoded. Queries and answers are the large ones: an answer about
/// 512 sources takes 60 KiB, a query of a million tokens half a MiB.
pub const MESSAGE_BYTES_MAX: usize = 4 << 20;

/// A record's bound: what a log with default limits and small servers takes without a thought.
pub const RECORD_BYTES_MAX: usize = 64 << 10;

const CONFIG: Configuration<LittleEndian, Fixint, Limit<MESSAGE_BYTES_MAX>> =
    bincode::config::standard()
        .with_little_endian()
        .with_fixed_int_encoding()
        .with_limit::<MESSAGE_BYTES_MAX>();

/// A type with a kind byte of its own. Kinds are wire values: stable, never used again.
pub trait Message: Encode + Decode<()> {
    const KIND: u8;

    /// The message in a body of version 1, and how many bytes it took; the same as now, where the kind does
    /// not say otherwise.
    #[doc(hidden)]
    fn of_version_1(body: &[u8]) -> Result<(Self, usize), bincode::error::DecodeError> {
        read(body)
    }

    /// What is impossible about a message whose bytes are well-formed: it is refused.
    #[doc(hidden)]
    fn impossible(&self) -> Option<&'static str> {
        None
    }
}

impl Message for Record {
    const KIND: u8 = 1;

    fn of_version_1(body: &[u8]) -> Result<(Self, usize), bincode::error::DecodeError> {
        read::<v1::Record>(body).map(|(record, taken)| (record.into(), taken))
    }
}
impl Message for Heartbeat {
    const KIND: u8 = 2;

    fn of_version_1(body: &[u8]) -> Result<(Self, usize), bincode::error::DecodeError> {
        read::<v1::Heartbeat>(body).map(|(heartbeat, taken)| (heartbeat.into(), taken))
    }
}
impl Message for IndexQuery {
    const KIND: u8 = 3;
}
impl Message for IndexAnswer {
    const KIND: u8 = 4;
}
impl Message for LoadMessage {
    const KIND: u8 = 5;
}
impl Message for WorkerEntry {
    const KIND: u8 = 6;

    fn impossible(&self) -> Option<&'static str> {
        let possible = (1..=RANKS_MAX).contains(&self.ranks);
        (!possible).then_some("a worker of so many ranks")
    }
}
impl Message for GenerationEntry {
    const KIND: u8 = 7;
}
impl Message for ResyncRequest {
    const KIND: u8 = 8;
}
impl Message for LoadHeartbeat {
    const KIND: u8 = 9;
}
impl Message for LoadFrame {
    const KIND: u8 = 10;
}
impl Message for LoadRequest {
    const KIND: u8 = 11;
}
impl Message for LoadAnswer {
    const KIND: u8 = 12;
}
impl Message for RouterEntry {
    const KIND: u8 = 13;
}
impl Message for SnapshotHead {
    const KIND: u8 = 14;
}
impl Message for SnapshotPointer {
    const KIND: u8 = 15;
}
impl Message for IndexerEntry {
    const KIND: u8 = 16;
}
impl Message for SnapshotLease {
    const KIND: u8 = 17;
}
impl Message for ShimEntry {
    const KIND: u8 = 18;
}
impl Message for ViewPageRequest {
    const KIND: u8 = 19;
}
impl Message for ViewPage {
    const KIND: u8 = 20;
}
impl Message for DrainEntry {
    const KIND: u8 = 21;
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

/// The kind byte of what may be a message: for readers of subjects that carry several kinds.
#[must_use]
pub fn kind(bytes: &[u8]) -> Option<u8> {
    bytes.get(1).copied()
}

/// The message's bytes.
pub fn encode<M: Message>(message: &M) -> Result<Vec<u8>, EncodeError> {
    let mut bytes = vec![VERSION, M::KIND];
    bincode::encode_into_std_write(message, &mut bytes, CONFIG)?;
    seal(&mut bytes);
    Ok(bytes)
}

/// Ends version, kind and body with the checksum that makes a message of them: for whoever makes up bytes
/// that are to be read as far as the body.
pub fn seal(bytes: &mut Vec<u8>) {
    let checksum = xxh3_64(bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
}

/// The message in these bytes, if they are exactly one message of this kind.
pub fn decode<M: Message>(bytes: &[u8]) -> Result<M, DecodeError> {
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(DecodeError::TooLong(bytes.len()));
    }
    let &[version, kind, ..] = bytes else {
        return Err(DecodeError::TooShort(bytes.len()));
    };
    let whole = match version {
        VERSION => checked(bytes)?,
        VERSION_1 => bytes,
        other => return Err(DecodeError::Version(other)),
    };
    if kind != M::KIND {
        return Err(DecodeError::Kind {
            expected: M::KIND,
            found: kind,
        });
    }
    let body = whole.get(2..).unwrap_or_default();
    let (message, taken) = match version {
        VERSION_1 => M::of_version_1(body)?,
        _ => read(body)?,
    };
    match (body.len() - taken, message.impossible()) {
        (0, None) => Ok(message),
        (0, Some(what)) => Err(DecodeError::Impossible(what)),
        (more, _) => Err(DecodeError::Trailing(more)),
    }
}

/// What is before the checksum, if that is right.
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

fn read<T: Decode<()>>(body: &[u8]) -> Result<(T, usize), bincode::error::DecodeError> {
    bincode::decode_from_slice(body, CONFIG)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Any bytes into every decoder: an error or a message, never a panic; and what decodes
        /// encodes to the same bytes, so that no two byte strings mean one message of a version.
        #[test]
        fn decoding_is_total_and_canonical(
            mut bytes in prop::collection::vec(any::<u8>(), 0..200),
            version in VERSION_1..=VERSION,
            kind in 0u8..23,
        ) {
            if let [first, second, ..] = bytes.as_mut_slice() {
                *first = version;
                *second = kind;
                if version == VERSION {
                    seal(&mut bytes);
                }
            }
            canonical::<Record>(&bytes)?;
            canonical::<Heartbeat>(&bytes)?;
            canonical::<IndexQuery>(&bytes)?;
            canonical::<IndexAnswer>(&bytes)?;
            canonical::<LoadMessage>(&bytes)?;
            canonical::<WorkerEntry>(&bytes)?;
            canonical::<GenerationEntry>(&bytes)?;
            canonical::<ResyncRequest>(&bytes)?;
            canonical::<LoadHeartbeat>(&bytes)?;
            canonical::<LoadFrame>(&bytes)?;
            canonical::<LoadRequest>(&bytes)?;
            canonical::<LoadAnswer>(&bytes)?;
            canonical::<RouterEntry>(&bytes)?;
            canonical::<SnapshotHead>(&bytes)?;
            canonical::<SnapshotPointer>(&bytes)?;
            canonical::<IndexerEntry>(&bytes)?;
            canonical::<SnapshotLease>(&bytes)?;
            canonical::<ShimEntry>(&bytes)?;
            canonical::<ViewPageRequest>(&bytes)?;
            canonical::<ViewPage>(&bytes)?;
            canonical::<DrainEntry>(&bytes)?;
        }
    }

    fn canonical<M: Message>(bytes: &[u8]) -> Result<(), TestCaseError> {
        if let Ok(message) = decode::<M>(bytes) {
            let again = encode(&message).map_err(|error| TestCaseError::fail(error.to_string()))?;
            if bytes[0] == VERSION {
                prop_assert_eq!(again, bytes);
            } else {
                prop_assert!(decode::<M>(&again).is_ok());
            }
        }
        Ok(())
    }
}
