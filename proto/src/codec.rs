//! Bytes of everything that crosses a process boundary: a version byte, a kind byte, then bincode.
//!
//! bincode 2.0.1 is frozen upstream, which suits a wire format; this is the one module that names
//! it. Integers have a fixed width and are little-endian (hashes are random, a variable width would
//! make them longer). Decoding is bounded by [`MESSAGE_BYTES_MAX`] and by the bytes that are there:
//! a claimed length beyond the limit is refused before anything is allocated.
//!
//! A golden sample of every message of every released version lies in `proto/testdata`.

use bincode::config::{Configuration, Fixint, Limit, LittleEndian};
use bincode::{Decode, Encode};

use crate::load::{LoadAnswer, LoadAsk, LoadFrame, LoadHeartbeat, LoadMessage, RouterEntry};
use crate::query::{Answer, Query};
use crate::registry::{
    GenerationEntry, IndexerEntry, ResyncRequest, ShimEntry, SnapshotLease, WorkerEntry,
};
use crate::snapshot::{SnapshotHead, SnapshotPointer};
use crate::view::{View, ViewAsk};
use crate::{Heartbeat, Record};

/// The version that this code writes. Reads every version listed in [`decode`].
pub const VERSION: u8 = 1;

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
}

impl Message for Record {
    const KIND: u8 = 1;
}
impl Message for Heartbeat {
    const KIND: u8 = 2;
}
impl Message for Query {
    const KIND: u8 = 3;
}
impl Message for Answer {
    const KIND: u8 = 4;
}
impl Message for LoadMessage {
    const KIND: u8 = 5;
}
impl Message for WorkerEntry {
    const KIND: u8 = 6;
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
impl Message for LoadAsk {
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
impl Message for ViewAsk {
    const KIND: u8 = 19;
}
impl Message for View {
    const KIND: u8 = 20;
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
    #[error("{0} bytes follow the message")]
    Trailing(usize),
    #[error("malformed: {0}")]
    Malformed(#[from] bincode::error::DecodeError),
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
    Ok(bytes)
}

/// The message in these bytes, if they are exactly one message of this kind.
pub fn decode<M: Message>(bytes: &[u8]) -> Result<M, DecodeError> {
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(DecodeError::TooLong(bytes.len()));
    }
    let &[version, kind, ref body @ ..] = bytes else {
        return Err(DecodeError::TooShort(bytes.len()));
    };
    if version != VERSION {
        return Err(DecodeError::Version(version));
    }
    if kind != M::KIND {
        return Err(DecodeError::Kind {
            expected: M::KIND,
            found: kind,
        });
    }
    let (message, read) = bincode::decode_from_slice(body, CONFIG)?;
    match body.len() - read {
        0 => Ok(message),
        more => Err(DecodeError::Trailing(more)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Any bytes into every decoder: an error or a message, never a panic; and what decodes
        /// encodes to the same bytes, so that no two byte strings mean one message.
        #[test]
        fn decoding_is_total_and_canonical(
            mut bytes in prop::collection::vec(any::<u8>(), 0..200),
            kind in 0u8..22,
        ) {
            if let [version, first, ..] = bytes.as_mut_slice() {
                *version = VERSION;
                *first = kind;
            }
            canonical::<Record>(&bytes)?;
            canonical::<Heartbeat>(&bytes)?;
            canonical::<Query>(&bytes)?;
            canonical::<Answer>(&bytes)?;
            canonical::<LoadMessage>(&bytes)?;
            canonical::<WorkerEntry>(&bytes)?;
            canonical::<GenerationEntry>(&bytes)?;
            canonical::<ResyncRequest>(&bytes)?;
            canonical::<LoadHeartbeat>(&bytes)?;
            canonical::<LoadFrame>(&bytes)?;
            canonical::<LoadAsk>(&bytes)?;
            canonical::<LoadAnswer>(&bytes)?;
            canonical::<RouterEntry>(&bytes)?;
            canonical::<SnapshotHead>(&bytes)?;
            canonical::<SnapshotPointer>(&bytes)?;
            canonical::<IndexerEntry>(&bytes)?;
            canonical::<SnapshotLease>(&bytes)?;
            canonical::<ShimEntry>(&bytes)?;
            canonical::<ViewAsk>(&bytes)?;
            canonical::<View>(&bytes)?;
        }
    }

    fn canonical<M: Message>(bytes: &[u8]) -> Result<(), TestCaseError> {
        if let Ok(message) = decode::<M>(bytes) {
            let again = encode(&message).map_err(|error| TestCaseError::fail(error.to_string()))?;
            prop_assert_eq!(again, bytes);
        }
        Ok(())
    }
}
