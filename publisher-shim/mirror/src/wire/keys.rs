//! Classifier of extra keys, which distinguish blocks of equal tokens in an engine's cache.
//!
//! The engine lists a block's keys without tags, in the order LoRA name, multimodal items, cache
//! salt (block 0 only), digest of prompt embeddings. A router can reproduce the first three. Any
//! other key makes a block opaque: its raw bytes are digested, so that equal keys stay equal and no
//! query matches.
//!
//! An item is hashed with its offset from the block's start, which is a part of the engine's key.
//! vLLM 0.17 and 0.18 have no offsets in their keys: such an item is the number of its identifier.

use std::collections::BTreeMap;

use warmroute_proto::hash::{item_hash, item_number};
use xxhash_rust::xxh3::xxh3_64;

use super::msgpack::{Cursor, ValueKind, WireError};

/// The keys of one block beyond LoRA and salt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockKeys {
    /// Hashes of the multimodal items in the block.
    pub items: Vec<u64>,
    /// Digest of the keys that no router can reproduce.
    pub opaque: Option<u64>,
}

/// The extra keys of an event's blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct EventKeys {
    /// The salt in block 0's keys.
    pub(super) salt: Option<String>,
    /// By the block's index in the event; blocks without keys are left out.
    pub(super) blocks: BTreeMap<usize, BlockKeys>,
}

/// The facts about an event by which its keys are classified.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyContext<'a> {
    pub(super) lora_name: Option<&'a str>,
    pub(super) blocks: usize,
    /// The event's first block is block 0 of its sequence.
    pub(super) is_root: bool,
    /// The array encoding of 0.17 to 0.19: an item may be its bare identifier, unless another one of
    /// the event has an offset.
    pub(super) bare_items: bool,
}

pub(super) fn classify(raw: &[u8], mut context: KeyContext<'_>) -> Result<EventKeys, WireError> {
    let mut keys = EventKeys::default();
    let mut cursor = Cursor::new(raw);
    if cursor.nil()? {
        return Ok(keys);
    }
    let len = cursor.array()?;
    if len != context.blocks {
        return Err(WireError::Range);
    }
    context.bare_items = context.bare_items && !has_placed_item(cursor, len)?;
    for index in 0..len {
        let entry = cursor.skip()?;
        keys.add_block(index, entry, context)?;
    }
    Ok(keys)
}

/// Whether one of these blocks' keys is an item with its offset.
fn has_placed_item(mut blocks: Cursor<'_>, len: usize) -> Result<bool, WireError> {
    for _ in 0..len {
        let mut entry = Cursor::new(blocks.skip()?);
        if entry.kind()? != ValueKind::Array {
            continue;
        }
        for _ in 0..entry.array()? {
            if item(entry.skip()?).is_some() {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

fn is_hex_digest(identifier: &str) -> bool {
    identifier.len() == 64 && identifier.bytes().all(|byte| byte.is_ascii_hexdigit())
}

impl EventKeys {
    fn add_block(
        &mut self,
        index: usize,
        entry: &[u8],
        context: KeyContext<'_>,
    ) -> Result<(), WireError> {
        let mut cursor = Cursor::new(entry);
        if cursor.nil()? {
            return Ok(());
        }
        if cursor.kind()? != ValueKind::Array {
            self.add_opaque(index, entry);
            return Ok(());
        }
        let may_be_salted = context.is_root && index == 0;
        let mut lora = context.lora_name;
        let mut items = Vec::new();
        let mut strings = Vec::new();
        for _ in 0..cursor.array()? {
            match cursor.kind()? {
                ValueKind::Str => {
                    let key = cursor.str()?;
                    if lora == Some(key) {
                        lora = None;
                    } else if context.bare_items && (is_hex_digest(key) || !may_be_salted) {
                        items.push(item_number(key));
                    } else {
                        strings.push(key);
                    }
                }
                ValueKind::Array => match item(cursor.skip()?) {
                    Some(hash) => items.push(hash),
                    None => return self.opaque_entry(index, entry),
                },
                ValueKind::Nil
                | ValueKind::Int
                | ValueKind::Bin
                | ValueKind::Map
                | ValueKind::Float
                | ValueKind::Other => {
                    return self.opaque_entry(index, entry);
                }
            }
        }
        match strings.as_slice() {
            [] => {}
            [salt] if may_be_salted => self.salt = Some((*salt).to_owned()),
            _ => return self.opaque_entry(index, entry),
        }
        if !items.is_empty() {
            self.block(index).items = items;
        }
        Ok(())
    }

    #[expect(
        clippy::unnecessary_wraps,
        reason = "ends the classification of a block in one expression"
    )]
    fn opaque_entry(&mut self, index: usize, entry: &[u8]) -> Result<(), WireError> {
        self.add_opaque(index, entry);
        Ok(())
    }

    fn add_opaque(&mut self, index: usize, raw: &[u8]) {
        let digest = xxh3_64(raw);
        let block = self.block(index);
        block.opaque = Some(
            block
                .opaque
                .map_or(digest, |other| other.rotate_left(1) ^ digest),
        );
    }

    fn block(&mut self, index: usize) -> &mut BlockKeys {
        self.blocks.entry(index).or_default()
    }
}

/// `[identifier, offset in the block]`.
fn item(raw: &[u8]) -> Option<u64> {
    let mut cursor = Cursor::new(raw);
    if cursor.array().ok()? != 2 {
        return None;
    }
    let identifier = cursor.str().ok()?;
    let offset = cursor.int_bits().ok()?;
    Some(item_hash(identifier, offset.cast_signed()))
}
