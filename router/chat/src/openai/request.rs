//! One request of either route: the prompt and the options that routing depends on.

use std::borrow::Cow;

use serde_json::value::RawValue;

use super::chat::{self, ChatParts};
use super::completion::{self, CompletionParts};
use super::converted::{self, ConvertedRoute};
use super::error::OpenAiError;
use super::fields::{BodyFields, UnreadableField, body_error};
use super::{embed, pooling, rewrite, token_ids};

/// The routes whose prompts are read. Others pass through untouched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptRoute {
    ChatCompletions,
    Completions,
    /// OpenAI's `/v1/responses`.
    Responses,
    /// Anthropic's `/v1/messages`.
    Messages,
    /// `/v1/embeddings`, and `/classify`, whose bodies have the same prompt.
    Embeddings,
    /// Like embeddings, with a task.
    Pooling,
    /// vLLM's `/inference/v1/generate`.
    TokenIds,
    /// Cohere's `/v2/embed`.
    Embed,
}

impl PromptRoute {
    pub const ALL: [Self; 8] = [
        Self::ChatCompletions,
        Self::Completions,
        Self::Responses,
        Self::Messages,
        Self::Embeddings,
        Self::Pooling,
        Self::TokenIds,
        Self::Embed,
    ];

    /// The path that requests of the route have first of all.
    pub const fn path(self) -> &'static str {
        match self {
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
            Self::Embeddings => "/v1/embeddings",
            Self::Pooling => "/pooling",
            Self::TokenIds => "/inference/v1/generate",
            Self::Embed => "/v2/embed",
        }
    }
}

/// The route as which vLLM serves a body that came to a path which an operator added; `None` if the
/// router knows no such one. A path names a route by its end, as behind a prefix; on `/invocations`
/// the body's prompt does.
pub fn added_route(path: &str, body: &[u8]) -> Option<PromptRoute> {
    let mut routes = PromptRoute::ALL.into_iter();
    match path {
        "/invocations" => invoked_route(body),
        _ => routes.find(|route| path.ends_with(route.path())),
    }
}

fn invoked_route(body: &[u8]) -> Option<PromptRoute> {
    let fields = BodyFields::read(body, &["messages", "prompt", "input"]).ok()?;
    [
        ("messages", PromptRoute::ChatCompletions),
        ("prompt", PromptRoute::Completions),
        ("input", PromptRoute::Embeddings),
    ]
    .into_iter()
    .find_map(|(name, route)| fields.has(name).then_some(route))
}

/// The options of a request, owned so that they outlive the body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestInfo {
    /// `None` where it is left out, null or empty: the engine takes its only model.
    pub model: Option<String>,
    pub cache_salt: Option<String>,
    /// The client's user, as it names it.
    pub user: Option<String>,
    /// An answer of `/v1/responses` that only one worker has.
    pub previous_response: Option<String>,
    pub stream: bool,
    /// Tokens of the prompt that the engine keeps; -1 means up to the model's maximum.
    pub truncate_prompt: Option<i64>,
    /// False if the engine computes the whole prompt although it may hold a prefix: it does so to
    /// compute log probabilities of the prompt.
    pub reads_cache: bool,
    /// The engine computes several sequences for the prompt, and reports the cached tokens of one of
    /// them.
    pub several_sequences: bool,
    /// Why the router cannot know the prompt's tokens.
    pub opaque: Option<OpaqueReason>,
}

impl RequestInfo {
    /// Whether the engine keeps all of `prompt_tokens`. It truncates or refuses a prompt beyond
    /// `model_max` (`None`: unknown).
    pub fn keeps_whole(&self, prompt_tokens: usize, model_max: Option<usize>) -> bool {
        match self.truncate_prompt {
            None => true,
            Some(keep) if keep < 0 => model_max.is_some_and(|max| prompt_tokens < max),
            Some(keep) => usize::try_from(keep).is_ok_and(|keep| prompt_tokens <= keep),
        }
    }
}

/// A reason to route by load only. Closed, so that it can be a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OpaqueReason {
    /// Images, and nothing else that is opaque: an engine may render the prompt.
    Images,
    /// Audio, video, embeddings of media, and parts of unknown types.
    OtherMedia,
    /// Prompt embeddings have no tokens.
    PromptEmbeds,
    /// The request carries token ids of an earlier stage.
    TransferredTokens,
    /// A field that may change the prompt in an unknown way.
    UnknownField,
    /// A message, block or tool whose conversion is not reproduced.
    UnknownItem,
    /// The prompt begins with an earlier answer that the engine keeps.
    StoredHistory,
    /// Fill-in-the-middle rendering belongs to the model.
    Suffix,
    /// Its prompts or JSON values would take many times the memory of its text.
    PromptMemory,
    /// Python reads a number of the chat that the router cannot.
    Number,
    /// Texts to be pooled one by one, which are seldom alike.
    SeveralPrompts,
    /// The router cannot read the value of this field.
    Unreadable(&'static str),
}

impl OpaqueReason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Images => "multimodal",
            Self::OtherMedia => "other_media",
            Self::PromptEmbeds => "prompt_embeds",
            Self::TransferredTokens => "transferred_tokens",
            Self::UnknownField => "unknown_field",
            Self::UnknownItem => "unknown_item",
            Self::StoredHistory => "stored_history",
            Self::Suffix => "suffix",
            Self::PromptMemory => "prompt_memory",
            Self::Number => "number",
            Self::SeveralPrompts => "several_prompts",
            Self::Unreadable(_) => "unreadable_field",
        }
    }
}

/// The prompt's source, borrowed from the body.
#[derive(Debug)]
pub enum PromptSource<'a> {
    Chat(ChatParts<'a>),
    Completion(CompletionParts<'a>),
}

#[derive(Debug)]
pub struct ParsedRequest<'a> {
    pub route: PromptRoute,
    pub info: RequestInfo,
    pub prompt: PromptSource<'a>,
    /// The body for the engine if it is not the client's: without
    /// `vllm_xargs.kv_cache_report_mode`. That option makes the engine announce cached blocks
    /// again, which breaks the reference counts of every mirror of its cache.
    pub rewritten: Option<Vec<u8>>,
}

/// Parses the body of a request.
pub fn parse(route: PromptRoute, body: &[u8]) -> Result<ParsedRequest<'_>, OpenAiError> {
    parse_admitted(route, body, &mut |_| true)
}

/// Memory for each token id of a client until its prompt is hashed: a list that grows, its copy, and
/// the ids as bytes.
pub(super) const MEMORY_OF_ID: usize = 16;

/// Like [`parse`]. `admits` is asked for bytes of memory before token ids are read, and before a
/// prompt is converted to a chat; without them
/// the prompt is opaque.
pub fn parse_admitted<'b>(
    route: PromptRoute,
    body: &'b [u8],
    admits: &mut dyn FnMut(usize) -> bool,
) -> Result<ParsedRequest<'b>, OpenAiError> {
    let names = match route {
        PromptRoute::ChatCompletions => chat::FIELDS,
        PromptRoute::Completions => completion::FIELDS,
        PromptRoute::Responses => {
            return converted::parse(ConvertedRoute::Responses, body, admits);
        }
        PromptRoute::Messages => {
            return converted::parse(ConvertedRoute::Messages, body, admits);
        }
        PromptRoute::Embeddings | PromptRoute::Pooling => {
            return pooling::parse(route, body, admits);
        }
        PromptRoute::TokenIds => return token_ids::parse(body, admits),
        PromptRoute::Embed => return embed::parse(body, admits),
    };
    let fields = BodyFields::read(body, names).map_err(|error| body_error(&error))?;
    let model = fields.text("model")?.filter(|model| !model.is_empty());
    let mut opaque = FirstOpaque::default();
    let prompt = if route == PromptRoute::Completions {
        PromptSource::Completion(completion::read(&fields, &mut opaque, &mut |ids| {
            admits(ids.saturating_mul(MEMORY_OF_ID))
        })?)
    } else {
        PromptSource::Chat(chat::read(&fields, &mut opaque)?)
    };
    let stream = opaque.flag(&fields, "stream").unwrap_or(false);
    let truncate_prompt = opaque.readable(fields.integer("truncate_prompt_tokens"));
    if transferred_tokens(&fields) {
        opaque.set(OpaqueReason::TransferredTokens);
    }
    let info = RequestInfo {
        model: model.map(Cow::into_owned),
        cache_salt: fields.text("cache_salt")?.map(Cow::into_owned),
        user: fields.text("user").ok().flatten().map(Cow::into_owned),
        previous_response: None,
        stream,
        truncate_prompt,
        reads_cache: reads_cache(&fields, route),
        several_sequences: several_sequences(&fields),
        opaque: opaque.0,
    };
    let xargs = fields.raw("vllm_xargs");
    Ok(ParsedRequest {
        route,
        info,
        prompt,
        rewritten: xargs.and_then(|xargs| rewrite::without_report_mode(body, xargs)),
    })
}

/// The first reason for which a prompt cannot be reproduced. Images give way to any other, as an
/// engine may render them.
#[derive(Debug, Default)]
pub(super) struct FirstOpaque(Option<OpaqueReason>);

impl FirstOpaque {
    pub(super) fn set(&mut self, reason: OpaqueReason) {
        if matches!(self.0, None | Some(OpaqueReason::Images)) {
            self.0 = Some(reason);
        }
    }

    pub(super) const fn reason(&self) -> Option<OpaqueReason> {
        self.0
    }

    /// The value; an unreadable one is recorded and counts as absent.
    pub(super) fn readable<T>(&mut self, value: Result<Option<T>, UnreadableField>) -> Option<T> {
        value.unwrap_or_else(|UnreadableField(name)| {
            self.set(OpaqueReason::Unreadable(name));
            None
        })
    }

    pub(super) fn flag(&mut self, fields: &BodyFields<'_>, name: &'static str) -> Option<bool> {
        self.readable(fields.flag(name))
    }
}

/// vLLM does not read its prefix cache for a request of prompt log probabilities. `echo` requests
/// them together with `logprobs`; in a chat the default `top_logprobs` of 0 is enough.
fn reads_cache(fields: &BodyFields<'_>, route: PromptRoute) -> bool {
    let echo = fields.flag("echo") == Ok(Some(true));
    let echoed = echo && (route != PromptRoute::Completions || fields.has("logprobs"));
    !(fields.has("prompt_logprobs") || echoed)
}

fn several_sequences(fields: &BodyFields<'_>) -> bool {
    let counts = ["n", "best_of"].map(|name| fields.raw(name).map(RawValue::get));
    let is_one = |count: &str| matches!(count, "null" | "1" | "\"1\"");
    let has_more = counts.into_iter().flatten().any(|count| !is_one(count));
    has_more || fields.flag("use_beam_search") == Ok(Some(true))
}

pub(super) fn transferred_tokens(fields: &BodyFields<'_>) -> bool {
    fields
        .raw("kv_transfer_params")
        .and_then(|raw| BodyFields::read(raw.get().as_bytes(), &["prompt_token_ids"]).ok())
        .is_some_and(|params| params.has("prompt_token_ids"))
}

#[cfg(test)]
mod tests;
