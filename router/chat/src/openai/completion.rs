//! `/v1/completions`: text, several texts, token ids or several lists of them.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, SeqAccess, Visitor};

use super::SpecialTokens;
use super::error::ApiError;
use super::fields::{Fields, Text, body_error};
use super::request::{Notes, Opaque};

pub(crate) const FIELDS: &[&str] = &[
    "model",
    "prompt",
    "prompt_embeds",
    "suffix",
    "echo",
    "logprobs",
    "prompt_logprobs",
    "add_special_tokens",
    "stream",
    "stream_options",
    "max_tokens",
    "n",
    "user",
    "cache_salt",
    "truncate_prompt_tokens",
    "kv_transfer_params",
    "vllm_xargs",
];

/// The prompts of one request. The engine treats each as a request of its own.
#[derive(Debug, PartialEq, Eq)]
pub enum Prompts<'a> {
    Texts(Vec<Cow<'a, str>>),
    Tokens(Vec<Vec<u32>>),
}

#[derive(Debug)]
pub struct CompletionParts<'a> {
    pub prompts: Prompts<'a>,
    pub special_tokens: SpecialTokens,
}

pub(crate) fn read<'a>(
    fields: &Fields<'a>,
    notes: &mut Notes,
) -> Result<CompletionParts<'a>, ApiError> {
    let embeds = fields.has("prompt_embeds");
    if embeds {
        notes.opaque(Opaque::PromptEmbeds);
    }
    if fields.has("suffix") {
        notes.opaque(Opaque::Suffix);
    }
    let prompts = match fields.raw("prompt") {
        Some(raw) => serde_json::from_str(raw.get()).map_err(|error| ApiError {
            param: Some("prompt"),
            ..body_error(&error)
        })?,
        None if embeds => Prompts::Texts(Vec::new()),
        None => {
            return Err(ApiError::invalid(
                "prompt",
                "Either prompt or prompt_embeds must be provided.",
            )
            .with_code("missing_prompt"));
        }
    };
    let special = notes.flag(fields, "add_special_tokens").unwrap_or(true);
    let special_tokens = if special {
        SpecialTokens::Add
    } else {
        SpecialTokens::Omit
    };
    Ok(CompletionParts {
        prompts,
        special_tokens,
    })
}

impl<'de> Deserialize<'de> for Prompts<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptVisitor(PhantomData))
    }
}

struct PromptVisitor<'de>(PhantomData<&'de ()>);

impl<'de> Visitor<'de> for PromptVisitor<'de> {
    type Value = Prompts<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, token ids, or a list of one of them")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Prompts::Texts(vec![Cow::Borrowed(text)]))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Prompts::Texts(vec![Cow::Owned(text.to_owned())]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        // The first element says which list this is; an element of another kind is an error.
        match seq.next_element::<Item<'de>>()? {
            None => Ok(Prompts::Tokens(vec![Vec::new()])),
            Some(Item::Text(first)) => {
                let mut texts = vec![first];
                while let Some(text) = seq.next_element::<Text<'de>>()? {
                    texts.push(text.0);
                }
                Ok(Prompts::Texts(texts))
            }
            Some(Item::Token(first)) => {
                let mut tokens = vec![first];
                while let Some(token) = seq.next_element::<u32>()? {
                    tokens.push(token);
                }
                Ok(Prompts::Tokens(vec![tokens]))
            }
            Some(Item::Tokens(first)) => {
                let mut lists = vec![first];
                while let Some(list) = seq.next_element::<Vec<u32>>()? {
                    lists.push(list);
                }
                Ok(Prompts::Tokens(lists))
            }
        }
    }
}

enum Item<'a> {
    Text(Cow<'a, str>),
    Token(u32),
    Tokens(Vec<u32>),
}

impl<'de> Deserialize<'de> for Item<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ItemVisitor(PhantomData))
    }
}

struct ItemVisitor<'de>(PhantomData<&'de ()>);

impl<'de> Visitor<'de> for ItemVisitor<'de> {
    type Value = Item<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, a token id or a list of token ids")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Item<'de>, E> {
        Ok(Item::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Item<'de>, E> {
        Ok(Item::Text(Cow::Owned(text.to_owned())))
    }

    fn visit_u64<E: serde::de::Error>(self, id: u64) -> Result<Item<'de>, E> {
        u32::try_from(id)
            .map(Item::Token)
            .map_err(|_| E::invalid_value(serde::de::Unexpected::Unsigned(id), &"a token id"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Item<'de>, A::Error> {
        let mut tokens = Vec::new();
        while let Some(token) = seq.next_element::<u32>()? {
            tokens.push(token);
        }
        Ok(Item::Tokens(tokens))
    }
}
