//! What routers tell each other about the load that they put on sources.
//!
//! A message stays small whatever the prompt's length: instead of every block it names the prefix
//! hashes at fixed depths ([`sampled_lengths`]). The depths depend on nothing but depth itself, so
//! two prompts with a common prefix name the same hashes in it, and shared blocks are counted once.
//! The price: where two prompts part, up to 1/32 of the common length is counted for both.
//!
//! A router applies its own changes through the same encoded bytes that it sends, so that every
//! replica holds the same approximation.

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::{
    Generation, LocalHash, PrefixHash, RecordNumber, RouterId, Source, hash::prefix_hashes,
};

/// One request's place on one source. New for every attempt.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Encode, Decode,
)]
pub struct SlotId {
    pub router: RouterId,
    /// Fences messages of an earlier life of this router.
    pub incarnation: Generation,
    pub counter: u64,
}

/// One router's numbered statement. Obeys the sequencing rule, with the incarnation as generation.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct LoadMessage {
    pub router: RouterId,
    pub incarnation: Generation,
    pub number: RecordNumber,
    pub changes: Vec<LoadChange>,
}

/// Variant numbers are wire values: stable.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum LoadChange {
    AddRequest {
        /// The slot's counter; router and incarnation are the message's.
        counter: u64,
        source: Source,
        /// Tokens that the source has still to prefill for this request.
        prefill_tokens: u32,
        /// The prompt's blocks, the partial last one included.
        blocks: u32,
        prompt: SampledPrefix,
    },
    MarkPrefillCompleted {
        counter: u64,
    },
    /// This many more blocks were generated.
    Grow {
        counter: u64,
        blocks: u32,
    },
    Free {
        counter: u64,
        end: SlotEnd,
    },
}

/// How a request ended: only a success leaves its prompt in the engine's cache for certain.
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

/// Below this many blocks every depth is sampled; afterwards the stride doubles as the depth does.
const DENSE_BLOCKS: u32 = 32;

/// More samples than these are not sent: 32 × (1 + 14) cover 524,288 blocks in 3.8 KiB.
pub const SAMPLES_MAX: usize = 480;

/// The sampled lengths in blocks (a sample at length `n` names the prefix of the first `n` blocks),
/// ascending without end. The gap after length `n` is at most `n / 32` blocks, at least one.
pub fn sampled_lengths() -> impl Iterator<Item = u32> {
    let mut length: u32 = 0;
    std::iter::from_fn(move || {
        length = length.checked_add(stride_after(length))?;
        Some(length)
    })
    .take(SAMPLES_MAX)
}

/// Blocks from one sampled length to the next.
const fn stride_after(length: u32) -> u32 {
    let octave = length / DENSE_BLOCKS;
    match octave.checked_ilog2() {
        Some(log) => 1 << log,
        None => 1,
    }
}

impl SampledPrefix {
    #[must_use]
    pub fn of(blocks: &[LocalHash]) -> Self {
        let mut lengths = sampled_lengths().peekable();
        let mut hashes = Vec::new();
        for (length, hash) in (1..).zip(prefix_hashes(None, blocks)) {
            if lengths.peek() == Some(&length) {
                hashes.push(hash);
                lengths.next();
            }
        }
        Self { hashes }
    }

    /// Each sample with the number of blocks that it stands for: those since the sample before it.
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
        self.weighted().map(|(_, weight)| weight).sum()
    }
}
