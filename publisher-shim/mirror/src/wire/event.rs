//! Decoder of one event, in either of its two encodings.
//!
//! Up to vLLM 0.23 and SGLang 0.5.18 an event is an array whose length depends on the version;
//! later it is a map. Both are accepted, event by event. Unknown keys and additional elements are
//! ignored; keys may come in any order.

use warmroute_proto::LOOKAHEAD_MAX;
use xxhash_rust::xxh3::xxh3_64;

use super::keys::{self, EventKeys, KeyContext};
use super::msgpack::{Cursor, ValueKind, WireError};
use super::removal::RemovalShape;
use super::{
    BlockGroup, CacheEvent, EngineHash, EngineName, GroupKind, LoraRef, Medium, RemovedBlocks,
    StoredBlocks, UnknownEvent,
};

/// Length of vLLM's array from 0.17 to 0.19, with items as bare identifiers up to 0.18.
const BARE_ITEMS_LEN: usize = 9;

/// What an event is.
pub(super) enum Decoded<'a> {
    Event(CacheEvent),
    /// A removal, and the bytes that further ones share with it.
    Removed(RemovedBlocks, Option<RemovalShape<'a>>),
    /// A store in a group of a kind with this name.
    OfUnknownKind(CacheEvent, EngineName),
    /// It concerns memory that is not tracked.
    Untracked,
    /// An event with this type that does not decode.
    Unknown(UnknownEvent, EngineName),
}

/// A field's raw value, decoded after all fields are found.
type Raw<'a> = Option<&'a [u8]>;

/// The raw fields of both event types, by name.
#[derive(Default)]
struct Fields<'a> {
    tag: &'a str,
    is_map: bool,
    /// Elements of the array encoding.
    len: usize,
    /// `None` also for one that does not decode, as for the tokens.
    hashes: Option<Vec<EngineHash>>,
    hashes_bytes: usize,
    /// Bytes of the payload behind the hashes.
    bytes_behind: usize,
    parent: Raw<'a>,
    tokens: Option<TokenIds>,
    block_size: Raw<'a>,
    lora_id: Raw<'a>,
    lora_name: Raw<'a>,
    medium: Raw<'a>,
    extra_keys: Raw<'a>,
    cache_salt: Raw<'a>,
    group: Raw<'a>,
    kind: Raw<'a>,
    window: Raw<'a>,
    locality: Raw<'a>,
    lookahead: Raw<'a>,
    unreported_keys: Raw<'a>,
}

/// Decodes one event and passes over it. An error is one of the payload: no later event is found.
pub(super) fn decode<'a>(cursor: &mut Cursor<'a>) -> Result<Decoded<'a>, WireError> {
    let start = cursor.rest();
    let mut fields_end = *cursor;
    let Ok(mut fields) = Fields::read(&mut fields_end) else {
        cursor.skip()?;
        return Ok(Fields::default().unknown());
    };
    *cursor = fields_end;
    Ok(match fields.tag {
        "BlockStored" => fields.stored().unwrap_or_else(|_| fields.unknown()),
        "BlockRemoved" => {
            let event = &start[..start.len() - cursor.rest().len()];
            let bytes_after = fields.bytes_behind.saturating_sub(cursor.rest().len());
            let shape = RemovalShape::of(event, fields.hashes_bytes, bytes_after);
            fields.removed(shape).unwrap_or_else(|_| fields.unknown())
        }
        "AllBlocksCleared" => Decoded::Event(CacheEvent::Cleared),
        _ => fields.unknown(),
    })
}

impl<'a> Fields<'a> {
    fn read(cursor: &mut Cursor<'a>) -> Result<Self, WireError> {
        match cursor.kind()? {
            ValueKind::Map => Self::from_map(cursor),
            ValueKind::Array => Self::from_array(cursor),
            ValueKind::Nil
            | ValueKind::Int
            | ValueKind::Str
            | ValueKind::Bin
            | ValueKind::Float
            | ValueKind::Other => Err(WireError::Type),
        }
    }

    fn from_map(cursor: &mut Cursor<'a>) -> Result<Self, WireError> {
        let mut fields = Self {
            is_map: true,
            ..Self::default()
        };
        for _ in 0..cursor.map()? {
            if cursor.kind()? != ValueKind::Str {
                cursor.skip()?;
                cursor.skip()?;
                continue;
            }
            let key = cursor.str()?;
            match key {
                "type" => fields.tag = cursor.str()?,
                "block_hashes" => fields.read_hashes(cursor)?,
                "token_ids" => fields.tokens = decoded(cursor, tokens)?,
                _ => fields.set(key, Some(cursor.skip()?)),
            }
        }
        Ok(fields)
    }

    fn read_hashes(&mut self, cursor: &mut Cursor<'a>) -> Result<(), WireError> {
        let bytes = cursor.rest().len();
        self.hashes = decoded(cursor, hashes)?;
        self.bytes_behind = cursor.rest().len();
        self.hashes_bytes = bytes - self.bytes_behind;
        Ok(())
    }

    fn set(&mut self, key: &str, value: Raw<'a>) {
        match key {
            "parent_block_hash" => self.parent = value,
            "block_size" => self.block_size = value,
            "lora_id" => self.lora_id = value,
            "lora_name" => self.lora_name = value,
            "medium" => self.medium = value,
            "extra_keys" => self.extra_keys = value,
            "cache_salt" => self.cache_salt = value,
            "group_idx" => self.group = value,
            "kv_cache_spec_kind" => self.kind = value,
            "kv_cache_spec_sliding_window" => self.window = value,
            "locality" => self.locality = value,
            "lookahead_token_ids" => self.lookahead = value,
            "unreported_keys" => self.unreported_keys = value,
            _ => {}
        }
    }

    fn from_array(cursor: &mut Cursor<'a>) -> Result<Self, WireError> {
        let len = cursor.array()?;
        let mut fields = Self {
            len,
            ..Self::default()
        };
        if len == 0 {
            return Err(WireError::Missing);
        }
        fields.tag = cursor.str()?;
        let is_removal = fields.tag == "BlockRemoved";
        for index in 1..len {
            match (index, is_removal) {
                (1, _) => {
                    fields.read_hashes(cursor)?;
                    continue;
                }
                (3, false) => {
                    fields.tokens = decoded(cursor, tokens)?;
                    continue;
                }
                _ => {}
            }
            let is_map = cursor.kind()? == ValueKind::Map;
            let value = Some(cursor.skip()?);
            match (index, is_removal) {
                (2, true) => fields.medium = value,
                (3, true) => fields.group = value,
                (2, false) => fields.parent = value,
                (4, false) => fields.block_size = value,
                (5, false) => fields.lora_id = value,
                (6, false) => fields.medium = value,
                // The eighth element is SGLang's map of further fields or vLLM's LoRA name.
                (7, false) if is_map => fields.cache_salt = salt_of_map(value)?,
                (7, false) => fields.lora_name = value,
                (8, false) => fields.extra_keys = value,
                (9, false) => fields.group = value,
                (10, false) => fields.kind = value,
                (11, false) => fields.window = value,
                _ => {}
            }
        }
        Ok(fields)
    }

    fn stored(&mut self) -> Result<Decoded<'a>, WireError> {
        let Some(medium) = self.medium()? else {
            return Ok(Decoded::Untracked);
        };
        let hashes = self.hashes.take().ok_or(WireError::Missing)?;
        let parent = match self.parent {
            Some(raw) => optional(raw, engine_hash)?,
            None => None,
        };
        let lora_name = text(self.lora_name)?.filter(|name| !name.is_empty());
        let context = KeyContext {
            lora_name,
            blocks: hashes.len(),
            is_root: parent.is_none(),
            bare_items: !self.is_map && self.len == BARE_ITEMS_LEN,
        };
        let keys = match self.extra_keys {
            Some(raw) => keys::classify(raw, context)?,
            None => EventKeys::default(),
        };
        let lookahead = match self.lookahead {
            Some(raw) => optional(raw, |cursor| Lookahead::read(cursor, hashes.len()))?,
            None => None,
        };
        let lookahead = lookahead.unwrap_or_default();
        let tokens = self.tokens.take().ok_or(WireError::Missing)?;
        let salt = text(self.cache_salt)?.map(str::to_owned).or(keys.salt);
        let group = self.group()?;
        let event = CacheEvent::Stored(Box::new(StoredBlocks {
            hashes,
            parent,
            tokens: tokens.values,
            tokens_per_position: tokens.each,
            block_size: match self.block_size {
                Some(raw) => Cursor::new(raw).u32()?,
                None => return Err(WireError::Missing),
            },
            lookahead: lookahead.each,
            lookahead_tokens: lookahead.tokens,
            lora: self.lora(lora_name)?,
            lora_number: lora_name.and_then(|_| self.lora_number()),
            salt,
            keys: keys.blocks.into_iter().collect(),
            reports_extra_keys: self.reports_extra_keys(medium),
            reports_removals: self.reports_removals(group)?,
            medium,
            group,
        }));
        Ok(match (group.kind, text(self.kind)?) {
            (Some(GroupKind::Unknown), Some(kind)) => {
                Decoded::OfUnknownKind(event, EngineName::new(kind))
            }
            _ => Decoded::Event(event),
        })
    }

    /// GPU stores list extra keys in every version that has a field for them. Offloading
    /// connectors omit the field even if the block has keys. The shim's own translations of other
    /// engines' events say so by a field of their own.
    fn reports_extra_keys(&self, medium: Medium) -> bool {
        if self.unreported_keys.is_some() {
            return false;
        }
        let has_field = match medium {
            Medium::Gpu => self.is_map || self.len > 8,
            Medium::Cpu | Medium::Disk => self.extra_keys.is_some(),
        };
        has_field || self.cache_salt.is_some()
    }

    /// The engine itself, and vLLM's own offloading connectors, which name their medium `CPU` and
    /// the KV group. Mooncake's and LMCache's write `cpu`, LMCache's server `CPU` without a group;
    /// removals from storage are not assured.
    fn reports_removals(&self, group: BlockGroup) -> Result<bool, WireError> {
        Ok(match text(self.medium)? {
            None => true,
            Some("CPU") => group.index.is_some(),
            Some(name) => Medium::of_name(name) == Some(Medium::Gpu),
        })
    }

    fn removed(&mut self, shape: Option<RemovalShape<'a>>) -> Result<Decoded<'a>, WireError> {
        let Some(medium) = self.medium()? else {
            return Ok(Decoded::Untracked);
        };
        let removed = RemovedBlocks {
            hashes: self.hashes.take().ok_or(WireError::Missing)?,
            medium,
            group: self.group()?.index,
        };
        Ok(Decoded::Removed(removed, shape))
    }

    /// An event that does not decode, with the fields that say what it can concern. The positions of
    /// an array are those of known types only.
    fn unknown(&self) -> Decoded<'a> {
        let is_known_type = matches!(self.tag, "BlockStored" | "BlockRemoved");
        let has_fields = self.is_map || is_known_type;
        let names_medium = has_fields && matches!(text(self.medium), Ok(Some(_)));
        let medium = match self.medium() {
            Ok(None) if has_fields => return Decoded::Untracked,
            Ok(medium) if names_medium => medium,
            Ok(_) | Err(_) => None,
        };
        let group = self.group().ok().filter(|_| has_fields);
        let event = UnknownEvent {
            is_store: self.tag == "BlockStored",
            medium,
            group: group.and_then(|group| group.index),
        };
        Decoded::Unknown(event, EngineName::new(self.tag))
    }

    fn lora(&self, name: Option<&str>) -> Result<LoraRef, WireError> {
        if let Some(name) = name {
            return Ok(LoraRef::Named(name.to_owned()));
        }
        let Some(raw) = self.lora_id else {
            return Ok(LoraRef::None);
        };
        let id = optional(raw, |cursor| match cursor.kind()? {
            // Some publishers send the name in place of vLLM's number.
            ValueKind::Str => Ok(LoraRef::Named(cursor.str()?.to_owned())),
            ValueKind::Nil
            | ValueKind::Int
            | ValueKind::Bin
            | ValueKind::Array
            | ValueKind::Map
            | ValueKind::Float
            | ValueKind::Other => Ok(LoraRef::Unnamed(cursor.int_bits()?)),
        })?;
        Ok(id.unwrap_or(LoraRef::None))
    }

    fn lora_number(&self) -> Option<u64> {
        let mut cursor = Cursor::new(self.lora_id?);
        let is_number = cursor.kind() == Ok(ValueKind::Int);
        cursor.int_bits().ok().filter(|_| is_number)
    }

    fn group(&self) -> Result<BlockGroup, WireError> {
        let index = match self.group {
            Some(raw) => optional(raw, Cursor::u32)?,
            None => None,
        };
        let window = match self.window {
            Some(raw) => optional(raw, Cursor::u32)?,
            None => None,
        };
        let kind = text(self.kind)?.map(|name| GroupKind::of_name(name, window));
        Ok(BlockGroup { index, kind })
    }

    /// `None` for another machine's memory, or for a medium of no tier.
    fn medium(&self) -> Result<Option<Medium>, WireError> {
        if let Some(locality) = text(self.locality)?
            && locality.eq_ignore_ascii_case("remote")
        {
            return Ok(None);
        }
        Ok(match text(self.medium)? {
            Some(name) => Medium::of_name(name),
            None => Some(Medium::Gpu),
        })
    }
}

/// The raw salt in SGLang's map of further fields.
fn salt_of_map(raw: Raw<'_>) -> Result<Raw<'_>, WireError> {
    let mut cursor = Cursor::new(raw.unwrap_or_default());
    let mut salt: Raw<'_> = Some(&[0xc0]);
    for _ in 0..cursor.map()? {
        let mut key = Cursor::new(cursor.skip()?);
        let is_salt = key.str() == Ok("cache_salt");
        let value = cursor.skip()?;
        if is_salt {
            salt = Some(value);
        }
    }
    Ok(salt)
}

fn optional<'a, T>(
    raw: &'a [u8],
    read: impl FnOnce(&mut Cursor<'a>) -> Result<T, WireError>,
) -> Result<Option<T>, WireError> {
    let mut cursor = Cursor::new(raw);
    if cursor.nil()? {
        return Ok(None);
    }
    read(&mut cursor).map(Some)
}

fn text(raw: Raw<'_>) -> Result<Option<&str>, WireError> {
    match raw {
        Some(raw) => optional(raw, Cursor::str),
        None => Ok(None),
    }
}

/// A value, or `None` for one that does not decode, which is passed over.
fn decoded<'a, T>(
    cursor: &mut Cursor<'a>,
    read: impl FnOnce(&mut Cursor<'a>) -> Result<T, WireError>,
) -> Result<Option<T>, WireError> {
    let mut value_end = *cursor;
    if let Ok(value) = read(&mut value_end) {
        *cursor = value_end;
        return Ok(Some(value));
    }
    cursor.skip()?;
    Ok(None)
}

fn hashes(cursor: &mut Cursor<'_>) -> Result<Vec<EngineHash>, WireError> {
    let len = cursor.array()?;
    let mut hashes = Vec::with_capacity(len);
    for _ in 0..len {
        hashes.push(engine_hash(cursor)?);
    }
    Ok(hashes)
}

fn engine_hash(cursor: &mut Cursor<'_>) -> Result<EngineHash, WireError> {
    match cursor.kind()? {
        ValueKind::Int => Ok(EngineHash(cursor.int_bits()?)),
        ValueKind::Bin => Ok(EngineHash::of_bytes(cursor.bin()?)),
        ValueKind::Nil
        | ValueKind::Str
        | ValueKind::Array
        | ValueKind::Map
        | ValueKind::Float
        | ValueKind::Other => Err(WireError::Type),
    }
}

impl EngineHash {
    /// The last eight bytes, big endian: the integer that the engine's other mode sends.
    pub(crate) fn of_bytes(digest: &[u8]) -> Self {
        match digest.last_chunk::<8>() {
            Some(last) => Self(u64::from_be_bytes(*last)),
            None => Self(xxh3_64(digest)),
        }
    }
}

/// Tokens behind each of an event's blocks.
#[derive(Default)]
struct Lookahead {
    tokens: Vec<u32>,
    each: u32,
}

impl Lookahead {
    /// One list for each hash, all of one length.
    fn read(cursor: &mut Cursor<'_>, hashes: usize) -> Result<Self, WireError> {
        let mut lookahead = Self::default();
        if cursor.array()? != hashes {
            return Err(WireError::Range);
        }
        for index in 0..hashes {
            let behind = tokens(cursor)?;
            let each = u32::try_from(behind.values.len()).unwrap_or(u32::MAX);
            let is_equal = index == 0 || each == lookahead.each;
            if behind.each != 1 || !is_equal || each > LOOKAHEAD_MAX {
                return Err(WireError::Range);
            }
            lookahead.each = each;
            lookahead.tokens.extend(behind.values);
        }
        Ok(lookahead)
    }
}

struct TokenIds {
    values: Vec<u32>,
    each: u32,
}

/// Token ids, or pairs of them (speculative decoding with EAGLE), which no router hashes.
fn tokens(cursor: &mut Cursor<'_>) -> Result<TokenIds, WireError> {
    let len = cursor.array()?;
    let mut tokens = TokenIds {
        values: Vec::with_capacity(len),
        each: 1,
    };
    if len > 0 && cursor.kind()? == ValueKind::Array {
        tokens.each = 2;
    }
    for _ in 0..len {
        if tokens.each == 2 {
            if cursor.array()? != 2 {
                return Err(WireError::Type);
            }
            tokens.push(cursor)?;
        }
        tokens.push(cursor)?;
    }
    Ok(tokens)
}

impl TokenIds {
    fn push(&mut self, cursor: &mut Cursor<'_>) -> Result<(), WireError> {
        /// Marks folded ids: no vocabulary is this large.
        const STAND_IN: u32 = 1 << 31;
        let bits = cursor.int_bits()?;
        let token = u32::try_from(bits).unwrap_or_else(|_| {
            #[expect(clippy::cast_possible_truncation, reason = "folded on purpose")]
            let folded = (bits ^ (bits >> 32)) as u32;
            folded | STAND_IN
        });
        self.values.push(token);
        Ok(())
    }
}
