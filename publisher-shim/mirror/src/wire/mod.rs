//! What an engine says, decoded: ZMQ frames and msgpack payloads of vLLM 0.9 to 0.33 and SGLang.
//!
//! [`Batch::decode`] takes any bytes. It fails only where not even the envelope can be read; an
//! event that is not understood is counted in its batch, because what it was decides how far the
//! mirror may still be trusted. Nothing is allocated on the word of a claimed length.
//!
//! Not here: what the events mean for the cache (`mirror`), and when they may be applied
//! (`source`).

mod event;
mod frames;
mod keys;
mod msgpack;

pub use frames::{LiveFrames, ReplayFrames, live_frames, replay_frames, replay_request};
pub use keys::BlockKeys;
pub use msgpack::WireError;

use warmroute_proto::Tier;

use event::{Decoded, NotUnderstood};
use msgpack::Cursor;

/// A larger payload is refused. A batch of 128 k-token prompts on every slot of a large engine
/// stays far below.
pub const PAYLOAD_BYTES_MAX: usize = 16 << 20;

/// An engine's own name of a block, opaque: it links an event to its parent and names what is
/// removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineHash(pub u64);

/// What the engine published at one scheduler step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// Unix seconds by the engine's clock; for display.
    pub ts: f64,
    pub events: Vec<Event>,
    /// Absent in the oldest envelopes.
    pub dp_rank: Option<u32>,
    pub skipped: Skipped,
}

/// Events that are not in a batch's list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Stores whose fields are not understood: blocks are missing.
    pub stores: u32,
    /// Unknown types and removals that are not understood: what is credited may be gone.
    pub others: u32,
    /// Events about another machine's memory or an untracked medium.
    pub elsewhere: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Stored(Box<Stored>),
    Removed(Removed),
    /// The whole prefix cache of the rank is gone.
    Cleared,
}

/// A run of blocks that the engine now holds, once more each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    pub hashes: Vec<EngineHash>,
    /// The block before the first one; none at the start of a sequence.
    pub parent: Option<EngineHash>,
    /// All blocks' tokens, in order.
    pub tokens: Vec<u32>,
    /// Numbers in `tokens` for each of the engine's positions: 2 where it publishes pairs.
    pub tokens_each: u32,
    pub block_size: u32,
    pub lora: Lora,
    pub salt: Option<String>,
    /// Further keys of single blocks, by their index, ascending.
    pub keys: Vec<(usize, BlockKeys)>,
    /// Whether a block has extra keys can be seen. If not, its tokens alone do not name it.
    pub tells_extra_keys: bool,
    pub medium: Medium,
    pub group: BlockGroup,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removed {
    pub hashes: Vec<EngineHash>,
    pub medium: Medium,
    pub group: Option<u32>,
}

/// The adapter whose keys and values a block holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lora {
    None,
    Named(String),
    /// Old engines send a number that means nothing outside.
    Unnamed(u64),
}

/// The engine's KV-cache group that an event speaks of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockGroup {
    pub index: Option<u32>,
    pub kind: Option<GroupKind>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// Every token's keys and values stay: a block held is a block usable.
    Main,
    /// Part of the blocks is masked (sliding window, state space, …): positions cannot be told.
    Masked,
    /// A word that this version does not know.
    Unknown,
}

impl GroupKind {
    fn of_word(word: &str) -> Self {
        match word {
            "full_attention" | "mla_attention" | "sink_full_attention" => Self::Main,
            "sliding_window"
            | "sliding_window_mla"
            | "mamba"
            | "chunked_local_attention"
            | "encoder_only_attention"
            | "cross_attention" => Self::Masked,
            _ => Self::Unknown,
        }
    }
}

/// Where the engine says that a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    Gpu,
    Cpu,
    Disk,
}

impl Medium {
    /// `None` for a word that names none of the tiers.
    fn of_word(word: &str) -> Option<Self> {
        const WORDS: [(&str, Medium); 8] = [
            ("gpu", Medium::Gpu),
            ("cpu", Medium::Cpu),
            ("cpu_pinned", Medium::Cpu),
            ("disk", Medium::Disk),
            ("storage", Medium::Disk),
            ("external", Medium::Disk),
            ("fs", Medium::Disk),
            ("obj", Medium::Disk),
        ];
        WORDS
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(word))
            .map(|&(_, medium)| medium)
    }

    #[must_use]
    pub const fn tier(self) -> Tier {
        match self {
            Self::Gpu => Tier::Gpu,
            Self::Cpu => Tier::Cpu,
            Self::Disk => Tier::Disk,
        }
    }
}

impl Batch {
    /// Decodes a payload: `[ts, events]` or `[ts, events, data-parallel rank]`.
    pub fn decode(payload: &[u8]) -> Result<Self, WireError> {
        if payload.len() > PAYLOAD_BYTES_MAX {
            return Err(WireError::TooLong {
                max: PAYLOAD_BYTES_MAX,
            });
        }
        let mut cursor = Cursor::new(payload);
        let len = cursor.array()?;
        if len < 2 {
            return Err(WireError::Missing);
        }
        let mut batch = Self {
            ts: cursor.float()?,
            ..Self::default()
        };
        for _ in 0..cursor.array()? {
            match event::decode(cursor.skip()?) {
                Ok(Decoded::Event(event)) => batch.events.push(event),
                Ok(Decoded::Elsewhere) => batch.skipped.elsewhere += 1,
                Err(NotUnderstood::Stored) => batch.skipped.stores += 1,
                Err(NotUnderstood::Other) => batch.skipped.others += 1,
            }
        }
        if len > 2 && !cursor.nil()? {
            batch.dp_rank = Some(cursor.u32()?);
        }
        Ok(batch)
    }
}

/// The rank that a payload names, without a look at its events.
#[must_use]
pub fn rank_of(payload: &[u8]) -> Option<u32> {
    let mut cursor = Cursor::new(payload);
    if cursor.array().ok()? < 3 {
        return None;
    }
    cursor.skip().ok()?;
    cursor.skip().ok()?;
    cursor.u32().ok()
}

#[cfg(test)]
mod tests;
