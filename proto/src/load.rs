//! Messages between routers about the load that they put on sources.
//!
//! A message stays small whatever the prompt's length: instead of every block it names the prefix
//! hashes at fixed depths ([`sampled_lengths`]). The depths depend on depth alone, so that two
//! prompts with a common prefix name the same hashes in it, and shared blocks are counted once. The
//! price: where two prompts part, up to 1/32 of the common length is counted for both.
//!
//! A router applies its own changes as the messages that it sends, so that every replica holds the
//! same approximation. Replicas compare it by [`LoadDigest`], a sum of one [`SlotMark`] a slot, O(1)
//! a change.
//!
//! Broadcast is lossy. A [`LoadHeartbeat`] states what a peer should have; a [`LoadRequest`] is
//! answered ([`LoadAnswer`]) with the missing messages, or with the open slots as of one number.

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::digest::{GOLDEN_GAMMA, mix};
use crate::hash::prefix_hashes;
use crate::{Generation, LocalHash, PrefixHash, RecordNumber, RouterId, Source};

/// One router's numbered changes. Obeys the sequencing rule, with the incarnation as generation.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct LoadMessage {
    pub router: RouterId,
    pub incarnation: Generation,
    pub number: RecordNumber,
    pub changes: Vec<LoadChange>,
}

impl LoadMessage {
    /// The sender in the bytes of an encoded message, unchecked: for readers that skip their own.
    #[must_use]
    pub fn sender(bytes: &[u8]) -> Option<RouterId> {
        // After the version and the kind.
        bytes.get(2..)?.first_chunk().copied().map(RouterId)
    }
}

/// Variant numbers are wire values: stable.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum LoadChange {
    AddRequest {
        /// The slot's counter; router and incarnation are the message's.
        counter: u64,
        source: Source,
        /// Tokens that the source still has to prefill for this request.
        prefill_tokens: u32,
        /// The prompt's blocks, the partial last one included.
        blocks: u32,
        prompt: SampledPrefix,
    },
    MarkPrefillCompleted {
        counter: u64,
    },
    /// So many more blocks were generated. 0 blocks before `MarkPrefillCompleted`: its time is
    /// predicted, not measured.
    Grow {
        counter: u64,
        blocks: u32,
    },
    Free {
        counter: u64,
        end: SlotEnd,
    },
}

/// Several messages in one broadcast, oldest first, each encoded as if sent alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct LoadFrame {
    pub messages: Vec<Vec<u8>>,
}

/// Sent by every router twice a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct LoadHeartbeat {
    pub router: RouterId,
    pub incarnation: Generation,
    /// The last number written; `None` before an incarnation's first.
    pub number: Option<RecordNumber>,
    /// Digest of its own open slots as of that number.
    pub digest: LoadDigest,
    /// Number of this heartbeat within its process. The sender receives it too, and so knows when
    /// it was last received.
    pub beat: u64,
    pub presence: Presence,
}

/// Variant numbers are wire values: stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Presence {
    Staying = 0,
    /// The router ends. None of its slots counts any more.
    Leaving = 1,
}

/// A router's request to another one, answered by a [`LoadAnswer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct LoadRequest {
    /// The requester. It receives broadcasts, and is a peer from here on.
    pub asker: RouterId,
    /// The requested incarnation; `None` accepts any.
    pub incarnation: Option<Generation>,
    pub want: LoadRequestKind,
}

/// Variant numbers are wire values: stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum LoadRequestKind {
    /// The messages from this number on, up to `to` if given. Answered by the state if they are no
    /// longer kept.
    Numbers {
        from: RecordNumber,
        to: Option<RecordNumber>,
    },
    /// The first part of all open slots as of one number.
    State,
    /// A further part of the state as of this number.
    Part {
        number: Option<RecordNumber>,
        part: u32,
    },
}

/// Variant numbers are wire values: stable.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum LoadAnswer {
    /// Whole messages, oldest first; not necessarily all that were requested.
    Messages(Vec<Vec<u8>>),
    State(StatePart),
    /// The requested incarnation or state no longer exists: request the state.
    Gone,
}

/// A part of one router's open slots, all parts as of one number.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct StatePart {
    pub router: RouterId,
    pub incarnation: Generation,
    pub number: Option<RecordNumber>,
    /// Digest of the slots of all parts.
    pub digest: LoadDigest,
    /// From 0.
    pub part: u32,
    pub parts: u32,
    pub slots: Vec<OpenSlot>,
}

/// One open slot, with its changes applied.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct OpenSlot {
    pub counter: u64,
    pub source: Source,
    /// Still to be prefilled.
    pub prefill_tokens: u32,
    /// The prompt's blocks, as in its `AddRequest`.
    pub blocks: u32,
    pub generated_blocks: u32,
    pub prompt: SampledPrefix,
}

/// A router's entry in the registry, under a lease. A revision of the key is the router's
/// incarnation.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RouterEntry {
    pub router: RouterId,
    pub version: String,
}

/// How a request ended. Only a success surely leaves its prompt in the engine's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Encode, Decode)]
#[serde(rename_all = "snake_case")]
pub enum SlotEnd {
    Completed = 0,
    Failed = 1,
    Aborted = 2,
}

/// The prefix hashes of a prompt at the sampled depths that lie in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Encode, Decode)]
pub struct SampledPrefix {
    /// One hash per sampled depth, in the order of [`sampled_lengths`].
    pub hashes: Vec<PrefixHash>,
}

/// Most bytes of a message with one change, whatever the prompt's length.
pub const LOAD_BYTES_MAX: usize = 4 << 10;

/// Most bytes of a frame's messages together.
pub const FRAME_BYTES_MAX: usize = 64 << 10;

/// Most bytes of an answer: a quarter of what a NATS server accepts by default.
pub const ANSWER_BYTES_MAX: usize = 256 << 10;

/// Most samples of a prompt: they cover 262,144 blocks in 3.5 KiB.
pub const SAMPLES_MAX: usize = 448;

/// Up to this many blocks every depth is sampled; beyond, the stride doubles with the depth, so
/// that each doubling takes [`OCTAVE_SAMPLES`].
const DENSE_BLOCKS: u32 = 2 * OCTAVE_SAMPLES;
const OCTAVE_SAMPLES: u32 = 32;

/// An `AddRequest`'s message without the worker's name and without hashes: version and kind (2),
/// router (16), incarnation (8), number (8), count of changes (8), variant (4), counter (8), length
/// of the name (8), rank (4), prefill tokens (4), blocks (4), count of hashes (8), checksum (8).
const ADD_BYTES: usize = 90;

/// The length in blocks of the prefix that the `samples`-th sample names (a sample at length `n`
/// names the prefix of the first `n` blocks); 0 for no sample. Constant beyond [`SAMPLES_MAX`].
///
/// The gap after length `n` is at most `n / 32` blocks, at least one.
#[must_use]
pub fn sampled_length(samples: usize) -> u32 {
    let samples = u32::try_from(samples.min(SAMPLES_MAX)).unwrap_or(0);
    match samples.checked_sub(DENSE_BLOCKS) {
        None => samples,
        Some(above) => {
            let octave = above / OCTAVE_SAMPLES;
            (DENSE_BLOCKS + 2 * (above % OCTAVE_SAMPLES)) << octave
        }
    }
}

/// The sampled lengths in blocks, ascending.
pub fn sampled_lengths() -> impl Iterator<Item = u32> {
    (1..=SAMPLES_MAX).map(sampled_length)
}

impl SampledPrefix {
    #[must_use]
    pub fn of(blocks: &[LocalHash]) -> Self {
        let mut lengths = sampled_lengths();
        let mut next = lengths.next();
        let mut hashes = Vec::with_capacity(blocks.len().min(SAMPLES_MAX));
        for (length, hash) in (1..).zip(prefix_hashes(None, blocks)) {
            if next == Some(length) {
                hashes.push(hash);
                next = lengths.next();
            }
            if next.is_none() {
                break;
            }
        }
        Self { hashes }
    }

    /// Each sample with the number of blocks since the sample before it.
    pub fn weighted(&self) -> impl Iterator<Item = (PrefixHash, u32)> {
        let mut last = 0;
        self.hashes
            .iter()
            .zip(sampled_lengths())
            .map(move |(&hash, length)| {
                let weight = length - last;
                last = length;
                (hash, weight)
            })
    }

    /// The length in blocks of the longest sample.
    #[must_use]
    pub fn covered(&self) -> u32 {
        sampled_length(self.hashes.len())
    }

    /// Truncates the samples so that an `AddRequest` for this source fits into [`LOAD_BYTES_MAX`].
    /// Depends on the source's name only, so that all prompts at one source are cut alike.
    #[must_use]
    pub fn fitting(mut self, source: &Source) -> Self {
        let taken = ADD_BYTES + source.worker.as_str().len();
        let room = LOAD_BYTES_MAX.saturating_sub(taken) / size_of::<PrefixHash>();
        self.hashes.truncate(room.min(SAMPLES_MAX));
        self
    }
}

impl OpenSlot {
    /// At most this many bytes in a message.
    #[must_use]
    pub fn encoded_bytes(&self) -> usize {
        // Counter (8), length of the name (8), rank (4), three counts (12), count of hashes (8).
        40 + self.source.worker.as_str().len() + self.prompt.hashes.len() * size_of::<PrefixHash>()
    }
}

/// A slot's summand in the digest. Changes with the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotMark(u64);

/// The constant part of a slot's mark: its `AddRequest` without the load that changes later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotIdentity(u64);

impl SlotIdentity {
    /// Stable: XXH3-64 over counter, rank, blocks, the length of the worker's name and the name,
    /// then the hashes, all little-endian at their width on the wire.
    #[must_use]
    pub fn of(counter: u64, source: &Source, blocks: u32, prompt: &SampledPrefix) -> Self {
        let mut hasher = Xxh3::with_seed(0);
        hasher.update(&counter.to_le_bytes());
        hasher.update(&source.dp_rank.0.to_le_bytes());
        hasher.update(&blocks.to_le_bytes());
        let name = source.worker.as_str().as_bytes();
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name);
        for hash in &prompt.hashes {
            hasher.update(&hash.0.to_le_bytes());
        }
        Self(hasher.digest())
    }

    /// Stable: the mix of the identity, moved by what is still to be prefilled and by what was
    /// generated.
    #[must_use]
    pub fn mark(self, prefill_tokens: u32, generated_blocks: u32) -> SlotMark {
        let load = (u64::from(prefill_tokens) << 32) | u64::from(generated_blocks);
        let offset = load.wrapping_add(1).wrapping_mul(GOLDEN_GAMMA);
        SlotMark(mix(self.0.wrapping_add(offset)))
    }
}

/// A count and a wrapping sum of the marks of one router's slots: independent of order, equal for
/// equal slots.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, Encode, Decode,
)]
pub struct LoadDigest {
    pub count: u64,
    pub sum: u64,
}

impl LoadDigest {
    pub const fn insert(&mut self, mark: SlotMark) {
        self.count = self.count.wrapping_add(1);
        self.sum = self.sum.wrapping_add(mark.0);
    }

    pub const fn remove(&mut self, mark: SlotMark) {
        self.count = self.count.wrapping_sub(1);
        self.sum = self.sum.wrapping_sub(mark.0);
    }
}

#[cfg(test)]
mod tests;
