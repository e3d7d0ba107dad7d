//! `/v1/responses` and `/v1/messages`: converted into the chat that the engine makes of them.
//!
//! The conversion is that of vLLM 0.32, for what it does with certainty. Anything else, and every
//! field that is not known to leave the prompt alone, makes the prompt [`OpaqueReason`]. The engine
//! judges every body but those that cannot be read: they could have an option that none may have.

mod anthropic;
mod members;
mod responses;

use std::borrow::Cow;

use serde::Serialize;
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

use super::chat::{
    ChatApi, ChatEnding, ChatParts, ThinkingRequest, ToolChoice, is_dense, values_max,
};
use super::error::OpenAiError;
use super::fields::{BodyFields, body_error};
use super::request::{
    FirstOpaque, OpaqueReason, ParsedRequest, PromptRoute, PromptSource, RequestInfo,
    transferred_tokens,
};
use super::{SpecialTokens, rewrite};

/// A route whose bodies are converted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConvertedRoute {
    Responses,
    Messages,
}

/// What a conversion makes of a body.
#[derive(Default)]
struct ConvertedChat {
    messages: Vec<Value>,
    /// The messages for a template that accepts system messages at the front only.
    system_first: Option<Box<RawValue>>,
    tools: Option<Vec<ChatTool>>,
    reasoning_effort: Option<String>,
    thinking: ThinkingRequest,
    /// `tool_choice` is `none`.
    tool_choice: ToolChoice,
    /// The last message goes on.
    is_continued: bool,
}

/// A tool in the form of the chat route.
#[derive(Serialize)]
struct ChatTool {
    r#type: &'static str,
    function: ChatFunction,
}

#[derive(Serialize)]
struct ChatFunction {
    name: String,
    description: Option<String>,
    parameters: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    strict: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    defer_loading: Option<bool>,
}

impl ChatTool {
    const fn new(function: ChatFunction) -> Self {
        Self {
            r#type: "function",
            function,
        }
    }
}

/// Fields that a conversion reads as a whole.
const DENSE_FIELDS: [&str; 4] = ["input", "messages", "system", "tools"];

type Conversion<T> = Result<T, OpaqueReason>;

/// An unknown form of a value.
fn unknown<E>(_: E) -> OpaqueReason {
    OpaqueReason::UnknownItem
}

/// Memory for each byte of these fields while they are converted: in values, and in the chat's JSON,
/// which may be there in two orders.
const MEMORY_OF_BYTE: usize = 4;
/// Memory for each of their values.
const MEMORY_OF_VALUE: usize = 96;

/// Reads a body of one of these routes. `admits` is asked for bytes of memory before it is converted.
pub(super) fn parse<'b>(
    route: ConvertedRoute,
    body: &'b [u8],
    admits: &mut dyn FnMut(usize) -> bool,
) -> Result<ParsedRequest<'b>, OpenAiError> {
    let (names, prompt) = match route {
        ConvertedRoute::Responses => (responses::FIELDS, "input"),
        ConvertedRoute::Messages => (anthropic::FIELDS, "messages"),
    };
    let mut opaque = FirstOpaque::default();
    let fields = BodyFields::read(body, names).map_err(|error| body_error(&error))?;
    if fields.has_unknown() {
        opaque.set(OpaqueReason::UnknownField);
    }
    if transferred_tokens(&fields) {
        opaque.set(OpaqueReason::TransferredTokens);
    }
    let stream = opaque.flag(&fields, "stream").unwrap_or(false);
    let parts = DENSE_FIELDS.into_iter().filter_map(|name| fields.raw(name));
    let is_dense = parts.clone().any(|raw| is_dense(raw.get()));
    let memory = parts.map(|raw| {
        let json = raw.get();
        json.len() * MEMORY_OF_BYTE + values_max(json) * MEMORY_OF_VALUE
    });
    let converted = match route {
        _ if is_dense || !admits(memory.sum()) => Err(OpaqueReason::PromptMemory),
        ConvertedRoute::Responses => responses::convert(&fields),
        ConvertedRoute::Messages => anthropic::convert(&fields),
    };
    let (api, special_tokens) = match route {
        ConvertedRoute::Responses => (ChatApi::Responses, SpecialTokens::Add),
        ConvertedRoute::Messages => (ChatApi::Messages, SpecialTokens::Omit),
    };
    let text = |name| fields.text(name).ok().flatten().map(Cow::into_owned);
    let info = RequestInfo {
        model: text("model").filter(|model| !model.is_empty()),
        cache_salt: text("cache_salt"),
        user: text("user"),
        previous_response: text("previous_response_id"),
        stream,
        truncate_prompt: responses::truncation(&fields),
        reads_cache: true,
        several_sequences: false,
        opaque: None,
    };
    let chat = converted.and_then(|chat| chat.into_parts(&fields, special_tokens));
    let chat = chat.unwrap_or_else(|reason| {
        opaque.set(reason);
        unconverted(&fields, prompt, special_tokens)
    });
    let chat = ChatParts { api, ..chat };
    let xargs = fields.raw("vllm_xargs");
    Ok(ParsedRequest {
        route: match route {
            ConvertedRoute::Responses => PromptRoute::Responses,
            ConvertedRoute::Messages => PromptRoute::Messages,
        },
        info: RequestInfo {
            opaque: opaque.reason(),
            ..info
        },
        prompt: PromptSource::Chat(chat),
        rewritten: xargs.and_then(|xargs| rewrite::without_report_mode(body, xargs)),
    })
}

/// The client's own JSON, by which equal beginnings are found where no tokens are known.
fn unconverted<'a>(
    fields: &BodyFields<'a>,
    prompt: &'static str,
    special_tokens: SpecialTokens,
) -> ChatParts<'a> {
    let empty = || Cow::Owned(RawValue::NULL.to_owned());
    ChatParts {
        api: ChatApi::default(),
        messages: fields.raw(prompt).map_or_else(empty, Cow::Borrowed),
        system_first: None,
        tools: fields.raw("tools").map(Cow::Borrowed),
        tool_choice: ToolChoice::Other,
        documents: None,
        template: None,
        template_kwargs: None,
        reasoning_effort: None,
        thinking: ThinkingRequest::Default,
        ending: ChatEnding::GenerationPrompt,
        special_tokens,
    }
}

impl ConvertedChat {
    fn into_parts<'a>(
        self,
        fields: &BodyFields<'a>,
        special_tokens: SpecialTokens,
    ) -> Conversion<ChatParts<'a>> {
        let tools = self
            .tools
            .map(|tools| to_raw_value(&tools).map_err(unknown));
        Ok(ChatParts {
            api: ChatApi::default(),
            messages: Cow::Owned(to_raw_value(&self.messages).map_err(unknown)?),
            system_first: self.system_first,
            tools: tools.transpose()?.map(Cow::Owned),
            tool_choice: self.tool_choice,
            documents: None,
            template: None,
            template_kwargs: fields.raw("chat_template_kwargs"),
            reasoning_effort: self.reasoning_effort.map(Cow::Owned),
            thinking: self.thinking,
            ending: match self.is_continued {
                true => ChatEnding::InsideLastMessage,
                false => ChatEnding::GenerationPrompt,
            },
            special_tokens,
        })
    }
}

/// Text, or a list.
enum TextOr<'a> {
    Text(String),
    List(&'a RawValue),
}

impl<'a> TextOr<'a> {
    fn read(raw: &'a RawValue) -> Conversion<Self> {
        match raw.get().as_bytes().first() {
            Some(b'"') => Ok(Self::Text(
                serde_json::from_str(raw.get()).map_err(unknown)?,
            )),
            Some(b'[') => Ok(Self::List(raw)),
            Some(_) | None => Err(OpaqueReason::UnknownItem),
        }
    }
}

#[cfg(test)]
mod tests;
