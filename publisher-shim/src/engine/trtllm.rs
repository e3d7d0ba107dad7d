//! TensorRT-LLM's cache events, as payloads in vLLM's form. Pure.
//!
//! Each rank numbers its events without gaps, over all windows; an event becomes one payload with
//! that number. A block is held once, in one level of memory, and events name that level only when
//! it changes, so that the translation keeps the level of each block. It says of no block more than
//! the events do:
//!
//! - A block with fewer tokens than the others is never published. The size is that of the first
//!   block with a successor; before, stores wait.
//! - Blocks with token extras, multimodal keys or tokens that are no numbers are opaque. A store
//!   whose events have no field for salts, multimodal keys or adapters, or never fill it, says so.
//! - The largest window stands for full attention. The rule of smaller ones is not known, and a
//!   block counts only if they hold it too.
//! - A removal of an unknown block is dropped: nothing that is published depends on it.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::fmt;

use bytes::Bytes;
use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use warmroute_proto::{BlockSize, EngineSeq};

/// Events of an answer.
const EVENTS_MAX: usize = 1_000_000;
/// Stores that wait for the block size.
const WAITING_MAX: usize = 4096;
/// Bytes of JSON of events that wait for it.
const WAITING_BYTES_MAX: usize = 4 << 20;
/// Groups of blocks, more than an engine has.
const WINDOWS_MAX: usize = 16;
/// Blocks whose level is kept, more than an engine has.
const BLOCKS_MAX: usize = 1 << 22;

/// One event of an answer. What it says is decoded later, so that one that is not understood has
/// its number.
#[derive(Deserialize)]
pub(super) struct NumberedEvent<'a> {
    #[serde(rename = "event_id")]
    pub(super) number: u64,
    #[serde(borrow)]
    data: &'a RawValue,
    #[serde(default)]
    window_size: Option<i64>,
    #[serde(default)]
    layer_group_id: Option<i64>,
    #[serde(borrow, default)]
    hash_algo: Option<Cow<'a, str>>,
    #[serde(default)]
    attention_dp_rank: Option<u32>,
}

/// The events of an answer. Empty objects stand for iterations without events.
pub(super) fn events(answer: &[u8]) -> serde_json::Result<Vec<NumberedEvent<'_>>> {
    let mut answer = serde_json::Deserializer::from_slice(answer);
    let events = answer.deserialize_seq(AnswerVisitor)?;
    answer.end()?;
    Ok(events)
}

/// Bounds the list while it is read.
struct AnswerVisitor;

impl<'de> Visitor<'de> for AnswerVisitor {
    type Value = Vec<NumberedEvent<'de>>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut events = Vec::new();
        let mut iterations = 0;
        while let Some(event) = list.next_element::<&RawValue>()? {
            iterations += 1;
            if iterations > EVENTS_MAX {
                return Err(A::Error::custom("too many events"));
            }
            if event.get() != "{}" {
                events.push(serde_json::from_str(event.get()).map_err(A::Error::custom)?);
            }
        }
        Ok(events)
    }
}

impl NumberedEvent<'_> {
    pub(super) fn rank(&self) -> u32 {
        self.attention_dp_rank.unwrap_or(0)
    }

    /// The second KV manager never fills the fields of salts and multimodal keys.
    fn reports_keys(&self) -> bool {
        let is_v2 = |algorithm: &Cow<str>| algorithm.starts_with("v2");
        self.layer_group_id.is_none() && !self.hash_algo.as_ref().is_some_and(is_v2)
    }

    const fn window(&self) -> BlockWindow {
        BlockWindow {
            tokens: self.window_size,
            layers: self.layer_group_id,
        }
    }
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum EventData {
    Created {},
    Stored {
        parent_hash: Option<BlockHash>,
        blocks: Vec<StoredBlock>,
    },
    Removed {
        block_hashes: Vec<Option<BlockHash>>,
    },
    Updated {
        block_hash: BlockHash,
        cache_level: Option<LevelChange>,
    },
}

#[derive(Deserialize)]
struct LevelChange {
    new_value: u32,
}

#[derive(Deserialize)]
struct StoredBlock {
    block_hash: Option<BlockHash>,
    tokens: Vec<UniqueToken>,
    #[serde(default)]
    cache_level: u32,
    #[serde(default, deserialize_with = "present")]
    mm_keys: Option<Value>,
    #[serde(default, deserialize_with = "present")]
    cache_salt: Option<Value>,
    #[serde(default, deserialize_with = "present")]
    lora_id: Option<Value>,
    #[serde(default, deserialize_with = "present")]
    lora_name: Option<Value>,
}

#[derive(Deserialize)]
struct UniqueToken {
    token_id: TokenId,
    #[serde(default)]
    token_extra_id: u64,
}

/// What stands for a part of an image may be no number.
#[derive(Deserialize)]
#[serde(from = "Value")]
enum TokenId {
    Text(u32),
    Other(String),
}

impl From<Value> for TokenId {
    fn from(value: Value) -> Self {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.map_or_else(|| Self::Other(value.to_string()), Self::Text)
    }
}

/// A field's value; `null` is one.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

/// Numbers, or the hexadecimal digits of a digest.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Value")]
struct BlockHash(u64);

impl TryFrom<Value> for BlockHash {
    type Error = &'static str;

    fn try_from(value: Value) -> Result<Self, Self::Error> {
        let signed = || value.as_i64().map(i64::cast_unsigned);
        let digits = || {
            let text = value.as_str()?;
            let tail = text.get(text.len().saturating_sub(16)..)?;
            u64::from_str_radix(tail, 16).ok()
        };
        let hash = value.as_u64().or_else(signed).or_else(digits);
        hash.map(Self).ok_or("no block hash")
    }
}

/// Blocks that are allocated and removed together.
#[derive(Clone, Copy, PartialEq, Eq)]
struct BlockWindow {
    tokens: Option<i64>,
    layers: Option<i64>,
}

/// Where the engine holds a block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// It is not full: not published.
    Partial,
    Level(u32),
}

/// A payload in vLLM's form, at the number of its event.
pub(super) type NumberedPayload = (EngineSeq, Bytes);

/// The translation of one rank's events within a life of the engine.
#[derive(Default)]
pub(super) struct Translator {
    rank: u32,
    block_size: Option<usize>,
    /// By group.
    windows: Vec<BlockWindow>,
    places: HashMap<(u32, u64), Place>,
    waiting: VecDeque<DecodedEvent>,
    waiting_bytes: usize,
}

struct DecodedEvent {
    seq: EngineSeq,
    window: BlockWindow,
    reports_keys: bool,
    /// Its length as JSON.
    bytes: usize,
    data: EventData,
}

impl Translator {
    /// Without a block size it is learned.
    pub(super) fn new(rank: u32, block_size: Option<BlockSize>) -> Self {
        Self {
            rank,
            block_size: block_size.map(BlockSize::tokens),
            ..Self::default()
        }
    }

    /// Events were lost: any block may be gone. Keeps the facts of this life.
    pub(super) fn forget(&mut self) {
        self.places.clear();
        self.waiting.clear();
        self.waiting_bytes = 0;
    }

    /// Events wait for the block size.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Translates the next event, and with it those that waited for it.
    pub(super) fn translate(
        &mut self,
        unix_seconds: f64,
        event: &NumberedEvent<'_>,
    ) -> Vec<NumberedPayload> {
        let seq = EngineSeq(event.number);
        let data = match serde_json::from_str(event.data.get()) {
            Ok(data) => data,
            Err(_) => {
                self.forget();
                return vec![(seq, self.payload(unix_seconds, &[WireEvent::Unreadable]))];
            }
        };
        if let EventData::Stored { blocks, .. } = &data
            && let [first, _, ..] = blocks.as_slice()
        {
            self.block_size.get_or_insert(first.tokens.len());
        }
        let is_store = matches!(data, EventData::Stored { .. });
        let waits = self.block_size.is_none() && (is_store || self.is_waiting());
        let decoded = DecodedEvent {
            seq,
            window: event.window(),
            reports_keys: event.reports_keys(),
            bytes: event.data.get().len(),
            data,
        };
        self.waiting_bytes += decoded.bytes;
        self.waiting.push_back(decoded);
        if waits {
            self.bound_waiting();
            if self.is_waiting() {
                return Vec::new();
            }
            return vec![(seq, self.payload(unix_seconds, &[WireEvent::Unreadable]))];
        }
        self.waiting_bytes = 0;
        let events = std::mem::take(&mut self.waiting);
        let translated = events.into_iter().map(|event| {
            let seq = event.seq;
            let events = self.wire_events(event);
            (seq, self.payload(unix_seconds, &events))
        });
        translated.collect()
    }

    /// What goes is missed by its number.
    fn bound_waiting(&mut self) {
        while self.waiting.len() > WAITING_MAX || self.waiting_bytes > WAITING_BYTES_MAX {
            let Some(first) = self.waiting.pop_front() else {
                return;
            };
            self.waiting_bytes -= first.bytes;
        }
    }

    fn payload(&self, unix_seconds: f64, events: &[WireEvent]) -> Bytes {
        let encoded = rmp_serde::to_vec_named(&(unix_seconds, events, self.rank));
        // Nothing in it can fail to encode; an empty payload would be an unreadable one.
        encoded.unwrap_or_default().into()
    }

    fn wire_events(&mut self, event: DecodedEvent) -> Vec<WireEvent> {
        let Some(group) = self.group(event.window) else {
            self.forget();
            return vec![WireEvent::Unreadable];
        };
        match event.data {
            EventData::Created {} => Vec::new(),
            EventData::Stored {
                parent_hash,
                blocks,
            } => {
                let mut events = self.store(group, parent_hash, &blocks);
                if !event.reports_keys {
                    events.iter_mut().for_each(WireEvent::lack_keys);
                }
                events
            }
            EventData::Removed { block_hashes } => block_hashes
                .into_iter()
                .flatten()
                .filter_map(|hash| self.remove(group, hash))
                .collect(),
            EventData::Updated {
                block_hash,
                cache_level: Some(change),
            } => self.move_block(group, block_hash, change.new_value),
            EventData::Updated { .. } => Vec::new(),
        }
    }

    fn group(&mut self, window: BlockWindow) -> Option<u32> {
        let known = self.windows.iter().position(|known| *known == window);
        let group = known.unwrap_or(self.windows.len());
        if known.is_none() {
            if group == WINDOWS_MAX {
                return None;
            }
            self.windows.push(window);
        }
        u32::try_from(group).ok()
    }

    fn kind(&self, group: u32) -> String {
        let tokens = |window: &BlockWindow| window.tokens.unwrap_or(i64::MAX);
        let own = self.windows.get(group as usize).map_or(i64::MAX, tokens);
        let largest = self.windows.iter().map(tokens).max();
        if largest.is_none_or(|largest| own == largest) {
            "full_attention".to_owned()
        } else {
            format!("window_of_{own}_tokens")
        }
    }

    fn remove(&mut self, group: u32, hash: BlockHash) -> Option<WireEvent> {
        match self.places.remove(&(group, hash.0))? {
            Place::Partial => None,
            Place::Level(level) => Some(WireEvent::removed(group, hash, level)),
        }
    }

    /// Held at the new level before it is gone from the old one, so that its content stays known.
    fn move_block(&mut self, group: u32, hash: BlockHash, to: u32) -> Vec<WireEvent> {
        match self.places.get_mut(&(group, hash.0)) {
            Some(Place::Level(level)) if *level != to => {
                let from = std::mem::replace(level, to);
                let moved = Run {
                    hashes: vec![hash.0],
                    ..Run::new(None, to)
                };
                vec![
                    self.stored(group, moved),
                    WireEvent::removed(group, hash, from),
                ]
            }
            Some(_) | None => Vec::new(),
        }
    }

    /// The full blocks that were not held, in runs of one level.
    fn store(
        &mut self,
        group: u32,
        parent: Option<BlockHash>,
        blocks: &[StoredBlock],
    ) -> Vec<WireEvent> {
        let size = self.block_size.unwrap_or_default();
        let mut events = Vec::new();
        let mut parent = parent;
        let mut run: Option<Run> = None;
        for block in blocks {
            let Some(hash) = block.block_hash else { break };
            let key = (group, hash.0);
            if block.tokens.len() < size {
                self.places.entry(key).or_insert(Place::Partial);
                break;
            }
            if block.tokens.len() > size || self.places.len() >= BLOCKS_MAX {
                self.forget();
                return vec![WireEvent::Unreadable];
            }
            let level = block.cache_level;
            let before = self.places.insert(key, Place::Level(level));
            if before != Some(Place::Level(level)) {
                if run.as_ref().is_none_or(|run| run.level != level) {
                    let done = run.replace(Run::new(parent, level));
                    events.extend(done.map(|run| self.stored(group, run)));
                }
                if let Some(run) = &mut run {
                    run.add(hash, block);
                }
                if let Some(Place::Level(before)) = before {
                    events.push(WireEvent::removed(group, hash, before));
                }
            } else {
                events.extend(run.take().map(|run| self.stored(group, run)));
            }
            parent = Some(hash);
        }
        events.extend(run.map(|run| self.stored(group, run)));
        events
    }

    fn stored(&self, group: u32, run: Run) -> WireEvent {
        let has_keys = run.keys.iter().any(Option::is_some);
        WireEvent::BlockStored {
            block_hashes: run.hashes,
            parent_block_hash: run.parent.map(|hash| hash.0),
            token_ids: run.tokens,
            block_size: self.block_size.unwrap_or_default(),
            lora_id: run.lora_id,
            medium: medium(run.level),
            lora_name: run.lora_name,
            extra_keys: has_keys.then_some(run.keys),
            cache_salt: run.salt,
            group_idx: group,
            kv_cache_spec_kind: self.kind(group),
            unreported_keys: run.lacks_keys.then_some(true),
        }
    }
}

/// Consecutive blocks of one level, stored together.
struct Run {
    parent: Option<BlockHash>,
    level: u32,
    hashes: Vec<u64>,
    tokens: Vec<u32>,
    keys: Vec<Option<String>>,
    salt: Option<String>,
    lora_id: Option<u64>,
    lora_name: Option<String>,
    lacks_keys: bool,
}

impl Run {
    const fn new(parent: Option<BlockHash>, level: u32) -> Self {
        Self {
            parent,
            level,
            hashes: Vec::new(),
            tokens: Vec::new(),
            keys: Vec::new(),
            salt: None,
            lora_id: None,
            lora_name: None,
            lacks_keys: false,
        }
    }

    fn add(&mut self, hash: BlockHash, block: &StoredBlock) {
        let lora = [&block.lora_id, &block.lora_name].map(Option::as_ref);
        let has_lora_field = lora.iter().any(Option::is_some);
        self.lacks_keys |= !has_lora_field || block.mm_keys.is_none() || block.cache_salt.is_none();
        let text = |value: &Option<Value>| value.as_ref()?.as_str().map(str::to_owned);
        self.salt = self.salt.take().or_else(|| text(&block.cache_salt));
        self.lora_name = self.lora_name.take().or_else(|| text(&block.lora_name));
        let lora_id = || block.lora_id.as_ref()?.as_u64();
        self.lora_id = self.lora_id.or_else(lora_id);
        self.keys.push(block.opaque_keys());
        self.hashes.push(hash.0);
        self.tokens
            .extend(block.tokens.iter().map(|token| match token.token_id {
                TokenId::Text(id) => id,
                // The block is opaque.
                TokenId::Other(_) => 0,
            }));
    }
}

impl StoredBlock {
    /// What distinguishes it from others of equal tokens and no router can reproduce.
    fn opaque_keys(&self) -> Option<String> {
        let extras = self.tokens.iter().map(|token| token.token_extra_id);
        let extras: Vec<u64> = extras.collect();
        let others = self
            .tokens
            .iter()
            .filter_map(|token| match &token.token_id {
                TokenId::Text(_) => None,
                TokenId::Other(value) => Some(value),
            });
        let others: Vec<&String> = others.collect();
        let is_void = |value: &Value| match value {
            Value::Null => true,
            Value::Array(items) => items.is_empty(),
            Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Object(_) => false,
        };
        let items = self.mm_keys.as_ref().filter(|items| !is_void(items));
        let salt = self.cache_salt.as_ref();
        let salt = salt.filter(|salt| !salt.is_null() && !salt.is_string());
        let has_extra = extras.iter().any(|&extra| extra != 0);
        let is_plain = items.is_none() && salt.is_none() && others.is_empty() && !has_extra;
        (!is_plain).then(|| format!("{extras:?} {items:?} {salt:?} {others:?}"))
    }
}

const fn medium(level: u32) -> &'static str {
    match level {
        0 => "GPU",
        1 => "CPU",
        _ => "DISK",
    }
}

/// Fields in vLLM's order, and one of the shim's own.
#[derive(Serialize)]
#[serde(tag = "type")]
enum WireEvent {
    BlockStored {
        block_hashes: Vec<u64>,
        parent_block_hash: Option<u64>,
        token_ids: Vec<u32>,
        block_size: usize,
        lora_id: Option<u64>,
        medium: &'static str,
        lora_name: Option<String>,
        extra_keys: Option<Vec<Option<String>>>,
        cache_salt: Option<String>,
        group_idx: u32,
        kv_cache_spec_kind: String,
        /// The engine's events do not carry all that distinguishes blocks.
        #[serde(skip_serializing_if = "Option::is_none")]
        unreported_keys: Option<bool>,
    },
    BlockRemoved {
        block_hashes: [u64; 1],
        medium: &'static str,
        group_idx: u32,
    },
    /// Known to no decoder: the source forgets what it knew.
    #[serde(rename = "TensorRT-LLM event")]
    Unreadable,
}

impl WireEvent {
    fn lack_keys(&mut self) {
        if let Self::BlockStored {
            unreported_keys, ..
        } = self
        {
            *unreported_keys = Some(true);
        }
    }

    const fn removed(group: u32, hash: BlockHash, level: u32) -> Self {
        Self::BlockRemoved {
            block_hashes: [hash.0],
            medium: medium(level),
            group_idx: group,
        }
    }
}

#[cfg(test)]
mod tests;
