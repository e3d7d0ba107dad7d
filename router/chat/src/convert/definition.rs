//! A `tokenizer.json`, written from its parts.

use std::collections::HashMap;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use super::{ConversionError, text_of};

/// Most bytes that all merges have together.
const MERGE_BYTES_MAX: usize = 64 << 20;

/// Most bytes that are hashed in the search for merges.
const HASHED_BYTES_MAX: usize = 1 << 30;

const TOO_MANY_MERGES: ConversionError =
    ConversionError::TooLarge("its tokens have too many merges");

/// The parts that encoding needs.
#[derive(Serialize)]
pub(super) struct Definition<M> {
    pub added_tokens: Vec<AddedTokenEntry>,
    pub normalizer: Value,
    pub pre_tokenizer: Value,
    pub post_processor: Value,
    pub model: M,
}

impl<M: Serialize> Definition<M> {
    pub(super) fn to_json(&self) -> Result<Vec<u8>, ConversionError> {
        serde_json::to_vec(self).map_err(|error| ConversionError::Malformed(error.to_string()))
    }
}

#[derive(Serialize)]
pub(super) struct AddedTokenEntry {
    pub id: u32,
    pub content: String,
    pub single_word: bool,
    pub lstrip: bool,
    pub rstrip: bool,
    pub normalized: bool,
    pub special: bool,
}

impl AddedTokenEntry {
    /// Found in the text as it is, and nothing around it.
    pub(super) fn plain(id: u32, content: String) -> Self {
        Self {
            id,
            content,
            single_word: false,
            lstrip: false,
            rstrip: false,
            normalized: false,
            special: true,
        }
    }
}

/// Byte pair encoding.
pub(super) struct BpeModel {
    pub vocabulary: Vocabulary,
    pub merges: Vec<Merge>,
    pub unknown: Option<String>,
    pub fuses_unknown: bool,
    pub byte_fallback: bool,
    pub ignores_merges: bool,
}

/// Texts and ids, by id.
pub(super) struct Vocabulary(Vec<(String, u32)>);

/// A token, cut in two: its position in the vocabulary, and a byte of its text.
#[derive(Clone, Copy)]
pub(super) struct Merge {
    token: u32,
    at: u32,
}

/// The order of the merges that make one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MergeOrder {
    /// `generate_merges` of transformers.
    LeftLength,
    /// `TikTokenConverter` of transformers.
    LeftId,
}

impl Vocabulary {
    /// The last of equal texts counts.
    pub(super) fn new(mut tokens: Vec<(String, u32)>) -> Self {
        tokens.sort_unstable();
        tokens.dedup_by(|later, kept| {
            let is_equal = later.0 == kept.0;
            if is_equal {
                kept.1 = later.1;
            }
            is_equal
        });
        tokens.sort_unstable_by_key(|(_, id)| *id);
        Self(tokens)
    }

    pub(super) fn ids(&self) -> HashMap<&str, u32> {
        let tokens = self.0.iter();
        tokens.map(|(text, id)| (text.as_str(), *id)).collect()
    }

    /// All cuts of tokens into two other tokens.
    pub(super) fn merges(&self, order: MergeOrder) -> Result<Vec<Merge>, ConversionError> {
        let ids = self.ids();
        let (mut hashed, mut written) = (0, 0);
        let mut merges = Vec::new();
        let mut cuts = Vec::new();
        for (token, (text, _)) in (0..).zip(&self.0) {
            hashed += text.len() * text.len();
            if hashed > HASHED_BYTES_MAX {
                return Err(TOO_MANY_MERGES);
            }
            cuts.clear();
            cuts.extend(text.char_indices().skip(1).filter_map(|(at, _)| {
                let (left, right) = text.split_at(at);
                Some((*ids.get(left)?, *ids.get(right)?, at as u32))
            }));
            written += cuts.len() * text.len();
            if written > MERGE_BYTES_MAX {
                return Err(TOO_MANY_MERGES);
            }
            if order == MergeOrder::LeftId {
                cuts.sort_unstable();
            }
            merges.extend(cuts.iter().map(|(_, _, at)| Merge { token, at: *at }));
        }
        Ok(merges)
    }
}

impl Serialize for Vocabulary {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, id)| (text, id)))
    }
}

impl Serialize for BpeModel {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let merges = MergeTexts(self);
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("type", "BPE")?;
        map.serialize_entry("unk_token", &self.unknown)?;
        map.serialize_entry("fuse_unk", &self.fuses_unknown)?;
        map.serialize_entry("byte_fallback", &self.byte_fallback)?;
        map.serialize_entry("ignore_merges", &self.ignores_merges)?;
        map.serialize_entry("vocab", &self.vocabulary)?;
        map.serialize_entry("merges", &merges)?;
        map.end()
    }
}

struct MergeTexts<'m>(&'m BpeModel);

impl Serialize for MergeTexts<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let tokens = &self.0.vocabulary.0;
        serializer.collect_seq(self.0.merges.iter().map(|merge| {
            let (text, _) = &tokens[merge.token as usize];
            text.split_at(merge.at as usize)
        }))
    }
}

/// The post-processor for `add_bos_token` and `add_eos_token`: transformers'
/// `update_post_processor`.
pub(super) fn post_processor(
    config: &Map<String, Value>,
    id: impl Fn(&str) -> Option<u32>,
) -> Result<Value, ConversionError> {
    let surrounding = |flag: &str, name: &str| {
        let is_set = config.get(flag).is_some_and(|flag| flag == true);
        config.get(name).and_then(text_of).filter(|_| is_set)
    };
    let bos = surrounding("add_bos_token", "bos_token");
    let eos = surrounding("add_eos_token", "eos_token");
    surround(bos, eos, id)
}

/// The post-processor that puts a token before each text and one after it.
pub(super) fn surround(
    before: Option<&str>,
    after: Option<&str>,
    id: impl Fn(&str) -> Option<u32>,
) -> Result<Value, ConversionError> {
    let mut tokens = Map::new();
    for text in before.into_iter().chain(after) {
        let id = id(text).ok_or_else(|| ConversionError::NoToken(text.to_owned()))?;
        let token = json!({"id": text, "ids": [id], "tokens": [text]});
        tokens.insert(text.to_owned(), token);
    }
    let special = |text: &str| json!({"SpecialToken": {"id": text, "type_id": 0}});
    let sequence = |name: &str| json!({"Sequence": {"id": name, "type_id": 0}});
    let single = before.map(special).into_iter().chain([sequence("A")]);
    let single: Vec<Value> = single.chain(after.map(special)).collect();
    // Nothing encodes pairs.
    let pair = [sequence("A"), sequence("B")];
    Ok(
        json!({"type": "TemplateProcessing", "single": single, "pair": pair,
        "special_tokens": tokens}),
    )
}
