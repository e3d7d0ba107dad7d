//! `/v1/completions`: text, several texts, token ids or several lists of them.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, DeserializeOwned, Deserializer, Error, Unexpected, Visitor};
use serde_json::value::RawValue;

use super::SpecialTokens;
use super::chat::{VALUES_ALLOWED, values_max};
use super::error::OpenAiError;
use super::fields::{BodyFields, JsonText, body_error};
use super::request::{FirstOpaque, OpaqueReason};

pub(super) const FIELDS: &[&str] = &[
    "model",
    "prompt",
    "prompt_embeds",
    "suffix",
    "echo",
    "logprobs",
    "prompt_logprobs",
    "add_special_tokens",
    "stream",
    "cache_salt",
    "user",
    "truncate_prompt_tokens",
    "n",
    "best_of",
    "use_beam_search",
    "kv_transfer_params",
    "vllm_xargs",
];

/// The prompts of one request. The engine treats each as a request of its own.
#[derive(Debug, PartialEq, Eq)]
pub enum PromptList<'a> {
    Texts(Vec<Cow<'a, str>>),
    Tokens(Vec<Vec<u32>>),
}

#[derive(Debug)]
pub struct CompletionParts<'a> {
    pub prompts: PromptList<'a>,
    pub special_tokens: SpecialTokens,
}

/// `admits_ids`: whether there is memory for so many token ids.
pub(super) fn read<'a>(
    fields: &BodyFields<'a>,
    opaque: &mut FirstOpaque,
    admits_ids: &mut dyn FnMut(usize) -> bool,
) -> Result<CompletionParts<'a>, OpenAiError> {
    let embeds = fields.has("prompt_embeds");
    if embeds {
        opaque.set(OpaqueReason::PromptEmbeds);
    }
    if fields.has("suffix") {
        opaque.set(OpaqueReason::Suffix);
    }
    let prompts = match fields.raw("prompt") {
        Some(raw) if has_too_many(raw.get()) || !admits_ids(ids_max(raw.get())) => {
            opaque.set(OpaqueReason::PromptMemory);
            PromptList::Texts(Vec::new())
        }
        Some(raw) => prompts(raw).map_err(|error| body_error(&error).with_param("prompt"))?,
        None if embeds => PromptList::Texts(Vec::new()),
        None => {
            let message = "Either prompt or prompt_embeds must be provided.";
            return Err(OpenAiError::invalid("prompt", message).with_code("missing_prompt"));
        }
    };
    let add = opaque.flag(fields, "add_special_tokens");
    Ok(CompletionParts {
        prompts,
        special_tokens: SpecialTokens::from_flag(add, SpecialTokens::Add),
    })
}

/// Whether a list has so many prompts that those take more memory than their text. Numbers are tokens
/// of one prompt.
pub(super) fn has_too_many(json: &str) -> bool {
    let lists = || json.bytes().filter(|byte| *byte == b'[').count();
    match json
        .strip_prefix('[')
        .map(|rest| rest.trim_start().as_bytes())
    {
        Some([b'"', ..]) => values_max(json) > VALUES_ALLOWED,
        Some([b'[', ..]) => lists() > VALUES_ALLOWED,
        Some(_) | None => false,
    }
}

/// At least the token ids of the prompts; 0 for texts.
pub(super) fn ids_max(json: &str) -> usize {
    let list = json.strip_prefix('[').map(str::trim_start);
    match list {
        Some(list) if !list.starts_with('"') => {
            memchr::memchr_iter(b',', list.as_bytes()).count() + 1
        }
        Some(_) | None => 0,
    }
}

/// Reads the form that the first bytes announce; an element of another form is an error.
pub(super) fn prompts(raw: &RawValue) -> serde_json::Result<PromptList<'_>> {
    let json = raw.get();
    let first = json.strip_prefix('[').map(str::trim_start).unwrap_or("");
    Ok(match (json.as_bytes(), first.as_bytes()) {
        ([b'"', ..], _) => PromptList::Texts(vec![serde_json::from_str::<JsonText<'_>>(json)?.0]),
        (_, [b'"', ..]) => {
            let texts: Vec<JsonText<'_>> = serde_json::from_str(json)?;
            PromptList::Texts(texts.into_iter().map(|text| text.0).collect())
        }
        (_, [b'[', ..]) => PromptList::Tokens(ids(json)?),
        _ => PromptList::Tokens(vec![ids(json)?]),
    })
}

/// Token ids, which an engine also reads from `1.0` and `true`.
fn ids<T: DeserializeOwned + OfIds>(json: &str) -> serde_json::Result<T> {
    serde_json::from_str(json).or_else(|error| {
        let read = serde_json::from_str::<T::Lenient>(json);
        read.map(T::of).map_err(|_| error)
    })
}

/// One list of token ids, or several.
trait OfIds: Sized {
    type Lenient: DeserializeOwned;

    fn of(read: Self::Lenient) -> Self;
}

impl OfIds for Vec<u32> {
    type Lenient = Vec<TokenId>;

    fn of(read: Vec<TokenId>) -> Self {
        read.into_iter().map(|id| id.0).collect()
    }
}

impl OfIds for Vec<Vec<u32>> {
    type Lenient = Vec<Vec<TokenId>>;

    fn of(read: Vec<Vec<TokenId>>) -> Self {
        read.into_iter().map(Vec::<u32>::of).collect()
    }
}

struct TokenId(u32);

impl<'de> Deserialize<'de> for TokenId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self(0))
    }
}

impl Visitor<'_> for TokenId {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a token id")
    }

    fn visit_bool<E: Error>(self, id: bool) -> Result<Self, E> {
        Ok(Self(id.into()))
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<Self, E> {
        let read = u32::try_from(id).map(Self);
        read.map_err(|_| E::invalid_value(Unexpected::Unsigned(id), &self))
    }

    fn visit_f64<E: Error>(self, id: f64) -> Result<Self, E> {
        if id.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&id) {
            Ok(Self(id as u32))
        } else {
            Err(E::invalid_value(Unexpected::Float(id), &self))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(json: &str) -> Option<Vec<Vec<u32>>> {
        let raw = RawValue::from_string(json.to_owned()).unwrap();
        match prompts(&raw).ok()? {
            PromptList::Tokens(lists) => Some(lists),
            PromptList::Texts(_) => None,
        }
    }

    #[test]
    fn integral_floats_are_token_ids() {
        assert_eq!(tokens("[1, 2.0, 1e1, true]"), Some(vec![vec![1, 2, 10, 1]]));
        assert_eq!(tokens("[[1.0], [2, 3.0]]"), Some(vec![vec![1], vec![2, 3]]));
        for json in [
            "[1.5]",
            "[-1.0]",
            "[null]",
            "[1e300]",
            "[4294967296.0]",
            "[[1], 2]",
        ] {
            assert_eq!(tokens(json), None, "{json}");
        }
    }
}
