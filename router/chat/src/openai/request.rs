//! One request, whatever its route: what the router decides by, beside the prompt itself.

use std::borrow::Cow;

use super::chat::{self, ChatParts};
use super::completion::{self, CompletionParts};
use super::error::ApiError;
use super::fields::{Fields, Unreadable, body_error};
use super::rewrite;

/// The routes whose prompts are read. Others pass through untouched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    ChatCompletions,
    Completions,
}

/// What the client asks of the generation, owned so that it outlives the body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestInfo {
    pub model: String,
    pub user: Option<String>,
    pub cache_salt: Option<String>,
    pub stream: bool,
    pub include_usage: bool,
    pub limits: Limits,
    /// False if the engine computes the whole prompt though it may hold a prefix of it: it does so
    /// when log probabilities of the prompt are asked for.
    pub reads_cache: bool,
    /// Why the prompt's tokens cannot be known here, if so.
    pub opaque: Option<Opaque>,
}

/// Bounds on lengths and counts, as sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub max_tokens: Option<u32>,
    pub choices: Option<u32>,
    /// Tokens of the prompt that are kept; -1 means as many as the model takes.
    pub truncate_prompt: Option<i64>,
}

impl Limits {
    /// Whether a prompt of this many tokens stays whole. A length beyond `model_max` (unknown:
    /// none) is truncated or refused by the engine; both are up to it.
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
pub enum Opaque {
    /// Images, audio or video: placeholder tokens and content hashes are the engine's.
    Multimodal,
    /// Prompt embeddings have no tokens.
    PromptEmbeds,
    /// The engine is handed ready token ids of an earlier stage.
    TransferredTokens,
    /// Fill-in-the-middle rendering belongs to the model.
    Suffix,
    /// The field's value is not one that this router understands.
    Unreadable(&'static str),
}

impl Opaque {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Multimodal => "multimodal",
            Self::PromptEmbeds => "prompt_embeds",
            Self::TransferredTokens => "transferred_tokens",
            Self::Suffix => "suffix",
            Self::Unreadable(_) => "unreadable_field",
        }
    }
}

impl From<Unreadable> for Opaque {
    fn from(value: Unreadable) -> Self {
        Self::Unreadable(value.0)
    }
}

/// The prompt's source, borrowed from the body.
#[derive(Debug)]
pub enum Prompt<'a> {
    Chat(ChatParts<'a>),
    Completion(CompletionParts<'a>),
}

#[derive(Debug)]
pub struct ParsedRequest<'a> {
    pub info: RequestInfo,
    pub prompt: Prompt<'a>,
    body: &'a [u8],
    rewritten: Option<Vec<u8>>,
}

impl<'a> ParsedRequest<'a> {
    /// What the engine gets: the body as it came, byte for byte, unless it asks the engine to
    /// announce cached blocks again (`vllm_xargs.kv_cache_report_mode`), which would break the
    /// reference counts of whoever mirrors the cache. Only that option is cut out.
    pub fn forward_body(&self) -> Cow<'_, [u8]> {
        match &self.rewritten {
            Some(bytes) => Cow::Borrowed(bytes),
            None => Cow::Borrowed(self.body),
        }
    }

    /// The changed body, if it had to be changed.
    pub fn into_rewritten(self) -> Option<Vec<u8>> {
        self.rewritten
    }
}

/// Reads a body for a route.
pub fn parse(route: Route, body: &[u8]) -> Result<ParsedRequest<'_>, ApiError> {
    let names = match route {
        Route::ChatCompletions => chat::FIELDS,
        Route::Completions => completion::FIELDS,
    };
    let fields = Fields::read(body, names).map_err(|error| body_error(&error))?;
    let model = fields
        .text("model")?
        .filter(|model| !model.is_empty())
        .ok_or_else(|| {
            ApiError::invalid("model", "You must provide a model parameter.")
                .with_code("missing_model")
        })?;
    let mut notes = Notes::default();
    let prompt = match route {
        Route::ChatCompletions => Prompt::Chat(chat::read(&fields, &mut notes)?),
        Route::Completions => Prompt::Completion(completion::read(&fields, &mut notes)?),
    };
    let stream = notes.flag(&fields, "stream").unwrap_or(false);
    let limits = Limits {
        max_tokens: max_tokens(&fields, route),
        choices: count(&fields, "n"),
        truncate_prompt: notes.note(fields.integer("truncate_prompt_tokens")),
    };
    if transferred_tokens(&fields) {
        notes.opaque(Opaque::TransferredTokens);
    }
    let info = RequestInfo {
        model: model.into_owned(),
        user: fields.text("user").unwrap_or_default().map(Cow::into_owned),
        cache_salt: fields.text("cache_salt")?.map(Cow::into_owned),
        stream,
        include_usage: include_usage(&fields),
        limits,
        reads_cache: reads_cache(&fields, route),
        opaque: notes.opaque,
    };
    let rewritten = fields
        .raw("vllm_xargs")
        .and_then(|xargs| rewrite::without_report_mode(body, xargs));
    Ok(ParsedRequest {
        info,
        prompt,
        body,
        rewritten,
    })
}

/// Collects the first reason for which a prompt cannot be reproduced.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    opaque: Option<Opaque>,
}

impl Notes {
    pub(crate) fn opaque(&mut self, reason: Opaque) {
        self.opaque.get_or_insert(reason);
    }

    /// The value, or nothing and a note if it is not understood.
    pub(crate) fn note<T>(&mut self, value: Result<Option<T>, Unreadable>) -> Option<T> {
        value.unwrap_or_else(|unreadable| {
            self.opaque(unreadable.into());
            None
        })
    }

    pub(crate) fn flag(&mut self, fields: &Fields<'_>, name: &'static str) -> Option<bool> {
        self.note(fields.flag(name))
    }
}

fn count(fields: &Fields<'_>, name: &'static str) -> Option<u32> {
    fields
        .integer(name)
        .ok()
        .flatten()
        .and_then(|value| u32::try_from(value).ok())
}

fn max_tokens(fields: &Fields<'_>, route: Route) -> Option<u32> {
    match route {
        Route::ChatCompletions => {
            count(fields, "max_completion_tokens").or_else(|| count(fields, "max_tokens"))
        }
        Route::Completions => count(fields, "max_tokens"),
    }
}

/// vLLM turns prefix reading off when log probabilities of the prompt are wanted. `echo` asks for
/// them together with `logprobs`; in a chat `top_logprobs` is 0 by default, which is enough.
fn reads_cache(fields: &Fields<'_>, route: Route) -> bool {
    let echo = fields.flag("echo") == Ok(Some(true));
    let echoed = match route {
        Route::ChatCompletions => echo,
        Route::Completions => echo && fields.has("logprobs"),
    };
    !(fields.has("prompt_logprobs") || echoed)
}

fn include_usage(fields: &Fields<'_>) -> bool {
    fields
        .raw("stream_options")
        .and_then(|raw| Fields::read(raw.get().as_bytes(), &["include_usage"]).ok())
        .is_some_and(|options| options.flag("include_usage") == Ok(Some(true)))
}

fn transferred_tokens(fields: &Fields<'_>) -> bool {
    fields
        .raw("kv_transfer_params")
        .and_then(|raw| Fields::read(raw.get().as_bytes(), &["prompt_token_ids"]).ok())
        .is_some_and(|params| params.has("prompt_token_ids"))
}

#[cfg(test)]
mod tests;
