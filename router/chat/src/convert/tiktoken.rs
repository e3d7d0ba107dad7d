//! Ranks of tokens: tiktoken's files, and Mistral's `tekken.json`. Merges are recovered from the
//! ranks, as transformers' `TikTokenConverter` does.

use std::collections::{HashMap, HashSet};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::definition::{
    AddedTokenEntry, BpeModel, Definition, MergeOrder, Vocabulary, post_processor, surround,
};
use super::{
    ConversionError, TOKEN_BYTES_MAX, TOKENS_MAX, TokenizerClass, listed_tokens, malformed, text_of,
};
use crate::tokenize::byte_level_alphabet;

/// Most special tokens after the ranks.
const SPECIAL_TOKENS_MAX: usize = 1 << 14;

/// The default of `TikTokenConverter`: that of cl100k and Llama 3.
const CL100K_PATTERN: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// That of `tokenization_qwen.py`.
const QWEN_PATTERN: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// That of `tokenization_kimi.py`.
const KIMI_PATTERN: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

type Ranks = HashMap<Vec<u8>, u32>;

/// Whether a file begins with a line of tiktoken's form.
pub(super) fn is_form(content: &[u8]) -> bool {
    let first = content.split(|byte| *byte == b'\n').next();
    first.is_some_and(|line| matches!(ranked(line), Ok(Some(_))))
}

/// The `tokenizer.json` of a file with a token and its rank in each line.
pub(super) fn convert(
    content: &[u8],
    class: TokenizerClass,
    config: &mut Map<String, Value>,
) -> Result<Vec<u8>, ConversionError> {
    class.name_tokens(config);
    let mut ranks = Ranks::new();
    for line in content.split(|byte| *byte == b'\n') {
        if let Some((token, rank)) = ranked(line)? {
            learn(&mut ranks, token, rank)?;
        }
    }
    if ranks.is_empty() {
        return Err(malformed("it has no tokens"));
    }
    let base = ranks.len();
    let pattern = match class {
        TokenizerClass::Llama | TokenizerClass::Gemma | TokenizerClass::Generic => CL100K_PATTERN,
        TokenizerClass::Kimi => KIMI_PATTERN,
        TokenizerClass::Qwen => QWEN_PATTERN,
    };
    let special = match class {
        TokenizerClass::Llama | TokenizerClass::Gemma | TokenizerClass::Generic => {
            special_tokens(base, config)?
        }
        TokenizerClass::Kimi => reserved(base, base + 256, config),
        TokenizerClass::Qwen => qwen_tokens(),
    };
    let special: Vec<(String, u32)> = special.into_iter().zip(base as u32..).collect();
    let post_processor = match class {
        TokenizerClass::Kimi | TokenizerClass::Qwen => Value::Null,
        TokenizerClass::Llama | TokenizerClass::Gemma | TokenizerClass::Generic => {
            let ids: HashMap<&str, u32> = special.iter().map(|(text, id)| (&**text, *id)).collect();
            post_processor(config, |token| ids.get(token).copied())?
        }
    };
    let mut definition = definition(vocabulary(&ranks, 0)?, pattern)?;
    definition.post_processor = post_processor;
    if class == TokenizerClass::Qwen {
        definition.normalizer = json!({"type": "NFC"});
    }
    let added = special.into_iter();
    definition.added_tokens = added
        .map(|(text, id)| AddedTokenEntry::plain(id, text))
        .collect();
    definition.to_json()
}

/// A token and its rank; `None` for an empty line.
fn ranked(line: &[u8]) -> Result<Option<(Vec<u8>, u32)>, ConversionError> {
    let malformed = || malformed("a line is not a token with a rank");
    let line = std::str::from_utf8(line).map_err(|_| malformed())?;
    let mut parts = line.split_ascii_whitespace();
    let Some(token) = parts.next() else {
        return Ok(None);
    };
    let token = BASE64_STANDARD.decode(token).map_err(|_| malformed())?;
    let rank = parts.next().and_then(|rank| rank.parse().ok());
    match (rank, parts.next()) {
        (Some(rank), None) => Ok(Some((token, rank))),
        (_, _) => Err(malformed()),
    }
}

fn learn(ranks: &mut Ranks, token: Vec<u8>, rank: u32) -> Result<(), ConversionError> {
    if token.is_empty() {
        return Err(malformed("a token is empty"));
    }
    if ranks.len() == TOKENS_MAX || token.len() > TOKEN_BYTES_MAX {
        return Err(ConversionError::TooLarge("too many tokens, or a long one"));
    }
    match ranks.insert(token, rank) {
        None => Ok(()),
        Some(_) => Err(malformed("a token has two ranks")),
    }
}

/// Texts in the byte-level alphabet, with ids from `first` on.
fn vocabulary(ranks: &Ranks, first: u32) -> Result<Vocabulary, ConversionError> {
    let mut letters = ['\0'; 256];
    for (letter, byte) in byte_level_alphabet() {
        letters[usize::from(byte)] = letter;
    }
    let mut ids = HashSet::new();
    let mut tokens = Vec::with_capacity(ranks.len());
    for (token, rank) in ranks {
        let id = rank.checked_add(first).filter(|id| ids.insert(*id));
        let id = id.ok_or_else(|| malformed("two tokens have one rank, or a rank is too large"))?;
        let text = token.iter().map(|byte| letters[usize::from(*byte)]);
        tokens.push((text.collect(), id));
    }
    Ok(Vocabulary::new(tokens))
}

fn definition(
    vocabulary: Vocabulary,
    pattern: &str,
) -> Result<Definition<BpeModel>, ConversionError> {
    let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
        "invert": false});
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": false});
    Ok(Definition {
        added_tokens: Vec::new(),
        normalizer: Value::Null,
        pre_tokenizer: json!({"type": "Sequence", "pretokenizers": [split, bytes]}),
        post_processor: Value::Null,
        model: BpeModel {
            merges: vocabulary.merges(MergeOrder::LeftId)?,
            vocabulary,
            unknown: None,
            fuses_unknown: false,
            byte_fallback: false,
            ignores_merges: true,
        },
    })
}

/// `_convert_from_tiktoken` of transformers: listed tokens by id, with placeholders for the ids
/// between them, then those without an id.
fn special_tokens(
    base: usize,
    config: &Map<String, Value>,
) -> Result<Vec<String>, ConversionError> {
    let last = listed_tokens(config).into_iter().map(|(id, _)| id as usize);
    let end = last.max().map_or(base, |last| base.max(last + 1));
    if end - base > SPECIAL_TOKENS_MAX {
        return Err(ConversionError::TooLarge("an added token has a large id"));
    }
    let mut tokens = reserved(base, end, config);
    let more = ["extra_special_tokens", "additional_special_tokens"];
    let more = more
        .into_iter()
        .filter_map(|name| config.get(name)?.as_array());
    for text in more.flatten().filter_map(text_of) {
        if tokens.len() < SPECIAL_TOKENS_MAX && !tokens.iter().any(|token| token == text) {
            tokens.push(text.to_owned());
        }
    }
    Ok(tokens)
}

/// Listed tokens by id, and names for the ids without one.
fn reserved(start: usize, end: usize, config: &Map<String, Value>) -> Vec<String> {
    let listed: HashMap<usize, &str> = listed_tokens(config)
        .into_iter()
        .map(|(id, text)| (id as usize, text))
        .collect();
    (start..end)
        .map(|id| {
            let text = listed.get(&id).map(|text| (*text).to_owned());
            text.unwrap_or_else(|| format!("<|reserved_token_{id}|>"))
        })
        .collect()
}

/// `SPECIAL_TOKENS` of `tokenization_qwen.py`.
fn qwen_tokens() -> Vec<String> {
    let named = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
    let extra = (0..205).map(|number| format!("<|extra_{number}|>"));
    named.map(str::to_owned).into_iter().chain(extra).collect()
}

/// `tekken.json`. Other fields are skipped.
#[derive(Deserialize)]
struct Tekken {
    config: TekkenConfig,
    vocab: Vec<TekkenToken>,
    /// Absent in old files, which have the same first ones.
    special_tokens: Option<Vec<TekkenSpecialToken>>,
}

#[derive(Deserialize)]
struct TekkenConfig {
    pattern: String,
    default_vocab_size: usize,
    default_num_special_tokens: u32,
}

#[derive(Deserialize)]
struct TekkenToken {
    token_bytes: String,
}

#[derive(Deserialize)]
struct TekkenSpecialToken {
    rank: u32,
    token_str: String,
}

/// The `tokenizer.json` of Mistral's file, as the library `mistral_common` reads it: its ids follow
/// those of the special tokens, which it does not look for in a text.
pub(super) fn of_tekken(content: &[u8]) -> Result<Vec<u8>, ConversionError> {
    const BOS: &str = "<s>";
    let tekken: Tekken = serde_json::from_slice(content)
        .map_err(|error| ConversionError::Malformed(error.to_string()))?;
    let first = tekken.config.default_num_special_tokens;
    let size = tekken.config.default_vocab_size.checked_sub(first as usize);
    let used = size.and_then(|size| tekken.vocab.get(..size));
    let used = used.ok_or_else(|| malformed("it has fewer tokens than it says"))?;
    let mut ranks = Ranks::new();
    for (rank, token) in (0..).zip(used) {
        let token = BASE64_STANDARD.decode(&token.token_bytes);
        let token = token.map_err(|_| malformed("a token is not in base64"))?;
        learn(&mut ranks, token, rank)?;
    }
    let bos = match &tekken.special_tokens {
        None => Some(1),
        Some(special) => special
            .iter()
            .find_map(|token| (token.token_str == BOS).then_some(token.rank)),
    };
    let mut definition = definition(vocabulary(&ranks, first)?, &tekken.config.pattern)?;
    definition.post_processor = surround(Some(BOS), None, |_| bos)?;
    definition.to_json()
}
