//! `/v1/completions`: text, several texts, token ids or several lists of them.

use std::borrow::Cow;

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
fn has_too_many(json: &str) -> bool {
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
fn ids_max(json: &str) -> usize {
    let list = json.strip_prefix('[').map(str::trim_start);
    match list {
        Some(list) if !list.starts_with('"') => {
            memchr::memchr_iter(b',', list.as_bytes()).count() + 1
        }
        Some(_) | None => 0,
    }
}

/// Reads the form that the first bytes announce; an element of another form is an error.
fn prompts(raw: &RawValue) -> serde_json::Result<PromptList<'_>> {
    let json = raw.get();
    let first = json.strip_prefix('[').map(str::trim_start).unwrap_or("");
    Ok(match (json.as_bytes(), first.as_bytes()) {
        ([b'"', ..], _) => PromptList::Texts(vec![serde_json::from_str::<JsonText<'_>>(json)?.0]),
        (_, [b'"', ..]) => {
            let texts: Vec<JsonText<'_>> = serde_json::from_str(json)?;
            PromptList::Texts(texts.into_iter().map(|text| text.0).collect())
        }
        (_, [b'[', ..]) => PromptList::Tokens(serde_json::from_str(json)?),
        _ => PromptList::Tokens(vec![serde_json::from_str(json)?]),
    })
}
