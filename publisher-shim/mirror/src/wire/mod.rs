//! Decoder of an engine's messages: ZMQ frames and msgpack payloads of vLLM 0.9 to 0.33 and SGLang.
//!
//! [`Batch::decode`] takes any bytes. It fails only if the envelope cannot be read. An event that
//! does not decode is in its batch with what it names, because that decides which claims of the
//! mirror remain valid. A length field alone never causes an allocation.
//!
//! `mirror` gives the events their meaning; `source` decides when they are applied.

mod event;
mod frames;
mod keys;
mod msgpack;
mod removal;
mod unknown;

pub use frames::{
    END_OF_REPLAY, LiveFrames, ReplayFrames, live_frames, replay_frames, replay_request,
};
pub use keys::BlockKeys;
pub use msgpack::WireError;
pub use unknown::{EngineName, NotUnderstood};

use std::num::NonZeroU32;

use warmroute_proto::Tier;

use event::Decoded;
use msgpack::Cursor;
use removal::RemovalShape;

/// Bound of a payload. A batch of 128 k-token prompts on every slot of a large engine is far below.
pub const PAYLOAD_BYTES_MAX: usize = 16 << 20;

/// The engine's opaque identifier of a block: links a block to its parent, and names removed blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineHash(pub u64);

/// The events that the engine published at one scheduler step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// Unix seconds by the engine's clock, for display.
    pub ts: f64,
    pub events: Vec<CacheEvent>,
    /// `None` in the oldest envelopes.
    pub dp_rank: Option<u32>,
    pub skipped: SkippedEvents,
    /// The first few different parts that this version does not understand.
    pub not_understood: Vec<NotUnderstood>,
}

/// Counts of a batch's events that are not understood or not tracked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SkippedEvents {
    /// Stores that do not decode.
    pub stores: u32,
    /// Unknown types, and removals that do not decode.
    pub others: u32,
    /// Events of another machine's memory or of an untracked medium.
    pub untracked: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    Stored(Box<StoredBlocks>),
    Removed(RemovedBlocks),
    /// The engine dropped the rank's whole prefix cache.
    Cleared,
    /// An event that does not decode; equal ones in a row are one.
    Unknown(UnknownEvent),
}

/// What an event that does not decode can have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownEvent {
    /// It only adds blocks.
    pub is_store: bool,
    /// `None`: it names no memory, and may concern any.
    pub medium: Option<Medium>,
    pub group: Option<u32>,
}

/// A run of consecutive blocks, each of which the engine holds one copy more of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBlocks {
    pub hashes: Vec<EngineHash>,
    /// The block before the first one; `None` at the start of a sequence.
    pub parent: Option<EngineHash>,
    /// Token ids of all blocks, in order.
    pub tokens: Vec<u32>,
    /// Numbers in `tokens` per position: 2 where the engine publishes pairs.
    pub tokens_per_position: u32,
    pub block_size: u32,
    /// Tokens behind each block that its hash covers.
    pub lookahead: u32,
    /// These tokens, of one block after the other.
    pub lookahead_tokens: Vec<u32>,
    pub lora: LoraRef,
    /// The engine's number of the load of a named adapter, which rises with each.
    pub lora_number: Option<u64>,
    pub salt: Option<String>,
    /// Extra keys by block index, ascending; blocks without any are left out.
    pub keys: Vec<(usize, BlockKeys)>,
    /// The event has a field for extra keys. Without it the tokens alone do not identify a block.
    pub reports_extra_keys: bool,
    /// The sender is known to publish the removal of every block that it stores.
    pub reports_removals: bool,
    pub medium: Medium,
    pub group: BlockGroup,
}

impl StoredBlocks {
    /// The tokens behind a block that its hash covers. `named` counts the hashes of the event.
    pub(crate) fn lookahead_of(&self, named: usize) -> &[u32] {
        let lookahead = self.lookahead as usize;
        let behind = self.lookahead_tokens.get(named * lookahead..);
        let behind = behind.and_then(|tokens| tokens.get(..lookahead));
        behind.unwrap_or_default()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemovedBlocks {
    pub hashes: Vec<EngineHash>,
    pub medium: Medium,
    pub group: Option<u32>,
}

impl RemovedBlocks {
    fn is_like(&self, other: &Self) -> bool {
        self.medium == other.medium && self.group == other.group
    }
}

/// The LoRA adapter that a block's keys and values were computed with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoraRef {
    None,
    Named(String),
    /// Old engines send a number that has no meaning outside of the engine.
    Unnamed(u64),
}

/// The engine's KV-cache group of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockGroup {
    pub index: Option<u32>,
    pub kind: Option<GroupKind>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// A hit needs every block of the prefix.
    Main,
    /// A hit needs the blocks of the last tokens only, as many as the window has.
    Sliding(NonZeroU32),
    /// A hit needs the state at its end only.
    State,
    /// A kind whose rule is not known, or whose length the events do not carry: a block counts only
    /// if this group holds it as well.
    Unknown,
}

impl GroupKind {
    fn of_name(name: &str, window: Option<u32>) -> Self {
        match name {
            "full_attention" | "mla_attention" | "sink_full_attention" => Self::Main,
            "sliding_window" | "sliding_window_mla" => {
                let window = window.and_then(NonZeroU32::new);
                window.map_or(Self::Unknown, Self::Sliding)
            }
            "mamba" => Self::State,
            _ => Self::Unknown,
        }
    }
}

/// The memory that holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    Gpu,
    Cpu,
    Disk,
}

impl Medium {
    /// `None` for a name of no tier.
    fn of_name(name: &str) -> Option<Self> {
        let is_one_of = |names: &[&str]| names.iter().any(|known| name.eq_ignore_ascii_case(known));
        if is_one_of(&["gpu"]) {
            Some(Self::Gpu)
        } else if is_one_of(&["cpu", "cpu_pinned"]) {
            Some(Self::Cpu)
        } else if is_one_of(&["disk", "storage", "external", "fs", "obj"]) {
            Some(Self::Disk)
        } else {
            None
        }
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
    /// Decodes `[ts, events]` or `[ts, events, data-parallel rank]`.
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
        // That of the last event.
        let mut shape: Option<RemovalShape<'_>> = None;
        for _ in 0..cursor.array()? {
            if let Some(hash) = shape.and_then(|shape| shape.next(&mut cursor))
                && let Some(CacheEvent::Removed(last)) = batch.events.last_mut()
            {
                last.hashes.push(hash);
                continue;
            }
            shape = None;
            match event::decode(&mut cursor)? {
                Decoded::Event(event) => batch.events.push(event),
                Decoded::Removed(removed, its_shape) => {
                    batch.remove(removed);
                    shape = its_shape;
                }
                Decoded::Untracked => batch.skipped.untracked += 1,
                Decoded::OfUnknownKind(event, kind) => {
                    batch.events.push(event);
                    unknown::note(&mut batch.not_understood, NotUnderstood::GroupKind(kind));
                }
                Decoded::Unknown(event, name) => batch.meet_unknown(event, name),
            }
        }
        if len > 2 && !cursor.nil()? {
            batch.dp_rank = Some(cursor.u32()?);
        }
        Ok(batch)
    }

    fn meet_unknown(&mut self, event: UnknownEvent, name: EngineName) {
        if event.is_store {
            self.skipped.stores += 1;
        } else {
            self.skipped.others += 1;
        }
        unknown::note(&mut self.not_understood, NotUnderstood::Event(name));
        let event = CacheEvent::Unknown(event);
        if self.events.last() != Some(&event) {
            self.events.push(event);
        }
    }

    /// Joins removals in a row: they are folded faster together.
    fn remove(&mut self, removed: RemovedBlocks) {
        match self.events.last_mut() {
            Some(CacheEvent::Removed(last)) if last.is_like(&removed) => {
                last.hashes.extend(removed.hashes);
            }
            _ => self.events.push(CacheEvent::Removed(removed)),
        }
    }
}

/// The data-parallel rank in a payload; does not decode its events.
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
