//! `/v1/responses`, as vLLM's `construct_input_messages` converts it.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::{ChatFunction, ChatTool, Conversion, ConvertedChat, TextOr, unknown};
use crate::openai::chat::ToolChoice;
use crate::openai::fields::BodyFields;
use crate::openai::request::OpaqueReason;

/// All others may change the prompt.
pub(super) const FIELDS: &[&str] = &[
    "model",
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "reasoning",
    "truncation",
    "background",
    "previous_response_id",
    "previous_input_messages",
    "prompt",
    "chat_template_kwargs",
    "stream",
    "cache_salt",
    "kv_transfer_params",
    "vllm_xargs",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "logit_bias",
    "parallel_tool_calls",
    "include_reasoning",
    "include",
    "service_tier",
    "store",
    "temperature",
    "text",
    "top_logprobs",
    "top_p",
    "top_k",
    "min_p",
    "user",
    "safety_identifier",
    "stream_options",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "prompt_cache_key",
    "prompt_cache_retention",
    "watermarking",
    "request_id",
    "session_id",
    "priority",
    "mm_payload",
    "return_mm_kwargs",
    "enable_response_messages",
    "structured_outputs",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "ec_transfer_params",
];

/// Fields that add what only the engine has.
const HISTORY: [&str; 3] = ["previous_response_id", "previous_input_messages", "prompt"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Item<'a> {
    r#type: Option<String>,
    role: Option<String>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    status: Option<String>,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
    output: Option<String>,
    summary: Option<Vec<TextPart>>,
    #[serde(rename = "id")]
    _id: Option<String>,
}

/// A part of a content.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TextPart {
    r#type: String,
    text: Option<String>,
    #[serde(rename = "annotations")]
    _annotations: Option<IgnoredAny>,
    #[serde(rename = "logprobs")]
    _logprobs: Option<IgnoredAny>,
    /// Images and files have it.
    #[serde(rename = "image_url")]
    _image_url: Option<IgnoredAny>,
    #[serde(rename = "file_id")]
    _file_id: Option<IgnoredAny>,
    #[serde(rename = "detail")]
    _detail: Option<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tool {
    r#type: String,
    name: String,
    description: Option<String>,
    parameters: Option<Box<RawValue>>,
    strict: Option<bool>,
}

/// What the engine does with a prompt beyond the model's length: it truncates it unless this is left
/// out or "disabled".
pub(super) fn truncation(fields: &BodyFields<'_>) -> Option<i64> {
    let given = fields.given("truncation")?;
    (given.get() != "\"disabled\"").then_some(-1)
}

pub(super) fn convert(fields: &BodyFields<'_>) -> Conversion<ConvertedChat> {
    if HISTORY.into_iter().any(|name| fields.has(name)) {
        return Err(OpaqueReason::StoredHistory);
    }
    if fields.flag("background") != Ok(None) && fields.flag("background") != Ok(Some(false)) {
        return Err(OpaqueReason::UnknownField);
    }
    let mut chat = ConvertedChat::default();
    let instructions = fields.text("instructions").map_err(unknown)?;
    if let Some(text) = instructions.filter(|text| !text.is_empty()) {
        chat.messages
            .push(json!({ "role": "system", "content": text }));
    }
    let input = fields.raw("input").ok_or(OpaqueReason::UnknownItem)?;
    match TextOr::read(input)? {
        TextOr::Text(text) => chat
            .messages
            .push(json!({ "role": "user", "content": text })),
        TextOr::List(list) => {
            let items: Vec<Item<'_>> = serde_json::from_str(list.get()).map_err(unknown)?;
            for item in items {
                item.convert(&mut chat.messages)?;
            }
        }
    }
    chat.tools = fields.raw("tools").map(tools).transpose()?;
    chat.tool_choice = ToolChoice::of(fields);
    chat.reasoning_effort = effort(fields)?;
    Ok(chat)
}

impl Item<'_> {
    fn convert(self, chat: &mut Vec<Value>) -> Conversion<()> {
        // The engine may continue an incomplete item.
        if self
            .status
            .as_deref()
            .is_some_and(|status| status != "completed")
        {
            return Err(OpaqueReason::UnknownItem);
        }
        match (self.r#type.as_deref(), self.role.as_deref()) {
            (Some("message") | None, Some("assistant")) => {
                let text = self.assistant_text()?;
                set_or_push(chat, "content", text.into());
            }
            (Some("message") | None, Some(role @ ("user" | "system" | "developer"))) => {
                let content = self.content.ok_or(OpaqueReason::UnknownItem)?;
                let content = input_content(content)?;
                chat.push(json!({ "role": role, "content": content }));
            }
            (Some("function_call"), None) => self.call(chat)?,
            (Some("function_call_output"), None) => {
                let (Some(output), Some(id)) = (self.output, self.call_id) else {
                    return Err(OpaqueReason::UnknownItem);
                };
                chat.push(json!({ "role": "tool", "content": output, "tool_call_id": id }));
            }
            (Some("reasoning"), None) => {
                let text = self.reasoning_text()?;
                set_or_push(chat, "reasoning", text.into());
            }
            _ => return Err(OpaqueReason::UnknownItem),
        }
        Ok(())
    }

    /// The engine takes the first part only.
    fn assistant_text(&self) -> Conversion<String> {
        let content = self.content.ok_or(OpaqueReason::UnknownItem)?;
        match TextOr::read(content)? {
            TextOr::Text(text) => Ok(text),
            TextOr::List(list) if self.r#type.is_some() => {
                let parts: Vec<TextPart> = serde_json::from_str(list.get()).map_err(unknown)?;
                if parts.iter().any(|part| part.r#type != "output_text") {
                    return Err(OpaqueReason::UnknownItem);
                }
                let text = parts.into_iter().next().and_then(|part| part.text);
                text.ok_or(OpaqueReason::UnknownItem)
            }
            TextOr::List(_) => Err(OpaqueReason::UnknownItem),
        }
    }

    fn reasoning_text(self) -> Conversion<String> {
        let content = self
            .content
            .map(|raw| serde_json::from_str::<Vec<TextPart>>(raw.get()));
        let content = content.transpose().map_err(unknown)?.unwrap_or_default();
        let first = content
            .into_iter()
            .chain(self.summary.unwrap_or_default())
            .next();
        match first {
            Some(part) => part.text.ok_or(OpaqueReason::UnknownItem),
            None => Ok(String::new()),
        }
    }

    fn call(self, chat: &mut Vec<Value>) -> Conversion<()> {
        let (Some(id), Some(name), Some(arguments)) = (self.call_id, self.name, self.arguments)
        else {
            return Err(OpaqueReason::UnknownItem);
        };
        let function = json!({ "name": name, "arguments": arguments });
        let call = json!({ "id": id, "function": function, "type": "function" });
        match last_of_assistant(chat) {
            Some(last) => match last.get_mut("tool_calls").and_then(Value::as_array_mut) {
                Some(calls) => calls.push(call),
                None => last["tool_calls"] = json!([call]),
            },
            None => chat.push(json!({ "role": "assistant", "tool_calls": [call] })),
        }
        Ok(())
    }
}

fn last_of_assistant(chat: &mut [Value]) -> Option<&mut Value> {
    chat.last_mut().filter(|last| last["role"] == "assistant")
}

/// Completes the assistant's last message, or begins the next one.
fn set_or_push(chat: &mut Vec<Value>, member: &str, text: Value) {
    match last_of_assistant(chat).filter(|last| last.get(member).is_none()) {
        Some(last) => last[member] = text,
        None => {
            let mut message = json!({ "role": "assistant" });
            message[member] = text;
            chat.push(message);
        }
    }
}

/// Text, or a list of texts.
fn input_content(raw: &RawValue) -> Conversion<Value> {
    let list = match TextOr::read(raw)? {
        TextOr::Text(text) => return Ok(text.into()),
        TextOr::List(list) => list,
    };
    let parts: Vec<TextPart> = serde_json::from_str(list.get()).map_err(unknown)?;
    let part = |part: TextPart| match (part.r#type.as_str(), part.text) {
        ("input_text", Some(text)) => Ok(json!({ "type": "input_text", "text": text })),
        ("input_image", _) => Err(OpaqueReason::Images),
        ("input_file" | "input_audio", _) => Err(OpaqueReason::OtherMedia),
        _ => Err(OpaqueReason::UnknownItem),
    };
    parts.into_iter().map(part).collect()
}

/// Functions only: others are run by the engine, or renamed.
fn tools(raw: &RawValue) -> Conversion<Vec<ChatTool>> {
    let tools: Vec<Tool> = serde_json::from_str(raw.get()).map_err(unknown)?;
    let convert = |tool: Tool| match tool.r#type.as_str() {
        "function" => Ok(ChatTool::new(ChatFunction {
            name: tool.name,
            description: tool.description,
            parameters: tool.parameters,
            strict: tool.strict,
            defer_loading: None,
        })),
        _ => Err(OpaqueReason::UnknownItem),
    };
    tools.into_iter().map(convert).collect()
}

fn effort(fields: &BodyFields<'_>) -> Conversion<Option<String>> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Reasoning {
        effort: Option<String>,
        #[serde(rename = "summary")]
        _summary: Option<IgnoredAny>,
        #[serde(rename = "generate_summary")]
        _generate_summary: Option<IgnoredAny>,
    }
    let raw = fields.raw("reasoning");
    let read = raw.map(|raw| serde_json::from_str::<Reasoning>(raw.get()));
    let read = read.transpose().map_err(unknown)?;
    Ok(read.and_then(|reasoning| reasoning.effort))
}
