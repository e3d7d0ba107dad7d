//! Messages between the processes of a plane without a log server: the replicated registry and the
//! common clock.
//!
//! Every process keeps the whole registry. A write is broadcast; a beacon shows by a digest who
//! lacks one, and pages bring what is missing.

use bincode::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_64;

/// One write of a registry key. The write with the highest revision counts, and at equal revisions
/// the one with the higher value.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RegistryWrite {
    pub key: String,
    /// The writer's counter, above the revision of the key that it knows, and 16 bits of the writer's
    /// id.
    pub revision: u64,
    /// `None`: the key was deleted.
    pub value: Option<Vec<u8>>,
    /// Time until the key expires, when the message was sent; `None` without a lease.
    pub lease_ms: Option<u64>,
}

/// One process's sign of life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct PeerBeacon {
    pub peer: PeerId,
    /// The sender's common clock, in nanoseconds since the Unix epoch.
    pub unix_ns: u64,
    /// What the sender holds without leases.
    pub registry: RegistryDigest,
}

/// A process of the plane: 64 random bits that it draws at its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
pub struct PeerId(pub u64);

/// Count and sum of the registry's present keys without leases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct RegistryDigest {
    pub count: u64,
    pub sum: u64,
}

impl RegistryDigest {
    /// Adds a key with its revision.
    pub fn insert(&mut self, key: &str, revision: u64) {
        let mix = crate::digest::mix(xxh3_64(key.as_bytes()) ^ crate::digest::mix(revision));
        self.count = self.count.wrapping_add(1);
        self.sum = self.sum.wrapping_add(mix);
    }
}

/// Asks a process for the part of its registry behind a key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct RegistryPageRequest {
    /// The empty key: from the beginning.
    pub after: String,
}

/// A part of a process's registry, in the order of keys.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RegistryPage {
    /// The sender's common clock, in nanoseconds since the Unix epoch.
    pub unix_ns: u64,
    pub writes: Vec<RegistryWrite>,
    /// Further keys follow the last one.
    pub more: bool,
}
