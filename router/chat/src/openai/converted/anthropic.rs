//! `/v1/messages`, as vLLM's `AnthropicServingMessages` converts it.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use super::{ChatFunction, ChatTool, Conversion, ConvertedChat, TextOr, unknown};
use crate::openai::chat::{ThinkingRequest, ToolChoice};
use crate::openai::fields::BodyFields;
use crate::openai::request::OpaqueReason;

/// All others may change the prompt.
pub(super) const FIELDS: &[&str] = &[
    "model",
    "messages",
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "chat_template_kwargs",
    "stream",
    "cache_salt",
    "kv_transfer_params",
    "vllm_xargs",
    "max_tokens",
    "metadata",
    "stop_sequences",
    "temperature",
    "top_k",
    "top_p",
    "mm_payload",
    "return_mm_kwargs",
    "watermarking",
    "ec_transfer_params",
    "service_tier",
    "anthropic_version",
    "betas",
    "cache_control",
    "container",
    "context_management",
    "diagnostics",
    "fallbacks",
    "inference_geo",
    "mcp_servers",
    "speed",
    "user_profile_id",
];

/// A client's attribution line that differs in every request. The engine drops such blocks and
/// messages; of a system prompt that is one text it drops the line, as in a chat.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Message<'a> {
    role: String,
    #[serde(borrow)]
    content: &'a RawValue,
}

/// A content block. The engine ignores the members of type `IgnoredAny`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Block<'a> {
    r#type: String,
    text: Option<String>,
    id: Option<String>,
    tool_use_id: Option<String>,
    name: Option<String>,
    tool_name: Option<String>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    thinking: Option<String>,
    #[serde(rename = "source")]
    _source: Option<IgnoredAny>,
    #[serde(rename = "is_error")]
    _is_error: Option<bool>,
    #[serde(rename = "signature")]
    _signature: Option<IgnoredAny>,
    #[serde(rename = "data")]
    _data: Option<IgnoredAny>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<IgnoredAny>,
    #[serde(rename = "citations")]
    _citations: Option<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tool<'a> {
    name: String,
    description: Option<String>,
    #[serde(borrow)]
    input_schema: &'a RawValue,
    strict: Option<bool>,
    defer_loading: Option<bool>,
    /// `custom` is a function. The engine ignores it, as it does the following.
    r#type: Option<String>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<IgnoredAny>,
    #[serde(rename = "eager_input_streaming")]
    _eager_input_streaming: Option<IgnoredAny>,
    #[serde(rename = "allowed_callers")]
    _allowed_callers: Option<IgnoredAny>,
    #[serde(rename = "input_examples")]
    _input_examples: Option<IgnoredAny>,
}

pub(super) fn convert(fields: &BodyFields<'_>) -> Conversion<ConvertedChat> {
    let raw = fields.raw("messages").ok_or(OpaqueReason::UnknownItem)?;
    let messages: Vec<Message<'_>> = serde_json::from_str(raw.get()).map_err(unknown)?;
    let system = fields.raw("system").map(TextOr::read).transpose()?;
    let system = match system {
        None => Vec::new(),
        Some(TextOr::Text(text)) => vec![text],
        Some(TextOr::List(list)) => block_texts(list)?,
    };
    let mut chat = ConvertedChat::default();
    chat.messages.extend(system_message(&system));
    let mut inline = Vec::new();
    for message in &messages {
        if message.role == "system" {
            let text = match TextOr::read(message.content)? {
                TextOr::Text(text) => Some(text).filter(|text| is_kept(text)).unwrap_or_default(),
                TextOr::List(list) => block_texts(list)?.concat(),
            };
            chat.messages
                .extend(system_message(std::slice::from_ref(&text)));
            inline.extend(Some(text).filter(|text| !text.is_empty()));
        } else {
            message.convert(&mut chat.messages)?;
        }
    }
    if !inline.is_empty() {
        let all: Vec<String> = system.into_iter().chain(inline).collect();
        let is_other = |message: &&Value| message["role"] != "system";
        let rest = chat.messages.iter().filter(is_other);
        let first = system_message(&all);
        let ordered: Vec<&Value> = first.iter().chain(rest).collect();
        chat.system_first = Some(to_raw_value(&ordered).map_err(unknown)?);
    }
    chat.tools = fields.raw("tools").map(tools).transpose()?;
    chat.tool_choice = tool_choice(fields)?;
    options(fields, &mut chat)?;
    Ok(chat)
}

/// `None` for no text: the engine leaves the message out.
fn system_message(texts: &[String]) -> Option<Value> {
    let text = texts.concat();
    (!text.is_empty()).then(|| json!({ "role": "system", "content": text }))
}

fn is_kept(text: &str) -> bool {
    !text.starts_with(BILLING_HEADER)
}

/// The texts of a system prompt's blocks.
fn block_texts(list: &RawValue) -> Conversion<Vec<String>> {
    let blocks: Vec<Block<'_>> = serde_json::from_str(list.get()).map_err(unknown)?;
    let text = |block: Block<'_>| match block.r#type.as_str() {
        "text" => Ok(block.text.unwrap_or_default()),
        _ => Err(OpaqueReason::UnknownItem),
    };
    let texts = blocks.into_iter().map(text);
    let texts = texts.collect::<Conversion<Vec<_>>>()?;
    Ok(texts.into_iter().filter(|text| is_kept(text)).collect())
}

impl Message<'_> {
    fn convert(&self, chat: &mut Vec<Value>) -> Conversion<()> {
        if !["user", "assistant"].contains(&self.role.as_str()) {
            return Err(OpaqueReason::UnknownItem);
        }
        let list = match TextOr::read(self.content)? {
            TextOr::Text(text) => {
                chat.push(json!({ "role": self.role, "content": text }));
                return Ok(());
            }
            TextOr::List(list) => list,
        };
        let blocks: Vec<Block<'_>> = serde_json::from_str(list.get()).map_err(unknown)?;
        let mut own = OwnMessage::default();
        for block in blocks {
            own.add(block, &self.role, chat)?;
        }
        chat.extend(own.into_message(&self.role));
        Ok(())
    }
}

/// What stays of a message besides the results of tools, which become messages before it.
#[derive(Default)]
struct OwnMessage {
    texts: Vec<String>,
    calls: Vec<Value>,
    reasoning: Vec<String>,
}

impl OwnMessage {
    fn add(&mut self, block: Block<'_>, role: &str, chat: &mut Vec<Value>) -> Conversion<()> {
        match block.r#type.as_str() {
            "text" => self
                .texts
                .extend(block.text.filter(|text| !text.is_empty())),
            "thinking" => self.reasoning.extend(block.thinking),
            "redacted_thinking" | "tool_reference" => {}
            "tool_use" => self.calls.push(call(block)?),
            "tool_result" if role == "user" => tool_result(block, chat)?,
            "image" => return Err(OpaqueReason::Images),
            _ => return Err(OpaqueReason::UnknownItem),
        }
        Ok(())
    }

    fn into_message(self, role: &str) -> Option<Value> {
        let mut message = json!({ "role": role });
        if !self.reasoning.is_empty() {
            message["reasoning"] = self.reasoning.concat().into();
        }
        if !self.calls.is_empty() {
            message["tool_calls"] = self.calls.into();
        }
        match self.texts.as_slice() {
            [] if role == "user" => return None,
            [] => {}
            [only] => message["content"] = only.as_str().into(),
            texts => {
                let part = |text: &String| json!({ "type": "text", "text": text });
                message["content"] = texts.iter().map(part).collect();
            }
        }
        Some(message)
    }
}

fn call(block: Block<'_>) -> Conversion<Value> {
    // The engine makes an id of the time where there is none.
    let id = block.id.filter(|id| !id.is_empty());
    let id = id.ok_or(OpaqueReason::UnknownItem)?;
    let arguments = block.input.map_or("{}", RawValue::get);
    if !arguments.starts_with('{') {
        return Err(OpaqueReason::UnknownItem);
    }
    let function = json!({ "name": block.name.unwrap_or_default(), "arguments": arguments });
    Ok(json!({ "id": id, "type": "function", "function": function }))
}

fn tool_result(block: Block<'_>, chat: &mut Vec<Value>) -> Conversion<()> {
    let id = block.tool_use_id.unwrap_or_default();
    let (mut texts, mut references) = (Vec::new(), Vec::new());
    match block.content.map(TextOr::read).transpose()? {
        None => {}
        Some(TextOr::Text(text)) => texts.push(text),
        Some(TextOr::List(list)) => {
            let blocks: Vec<Block<'_>> = serde_json::from_str(list.get()).map_err(unknown)?;
            for block in blocks {
                match block.r#type.as_str() {
                    "text" => texts.push(block.text.ok_or(OpaqueReason::UnknownItem)?),
                    "tool_reference" => {
                        let named = [block.tool_name, block.name];
                        let name = named.into_iter().flatten().find(|name| !name.is_empty());
                        let part = |name| json!({ "type": "tool_reference", "name": name });
                        references.extend(name.map(part));
                    }
                    "image" => return Err(OpaqueReason::Images),
                    _ => return Err(OpaqueReason::UnknownItem),
                }
            }
        }
    }
    let message =
        |content: Value| json!({ "role": "tool", "tool_call_id": id, "content": content });
    chat.push(message(texts.join("\n").into()));
    if !references.is_empty() {
        chat.push(message(references.into()));
    }
    Ok(())
}

fn tools(raw: &RawValue) -> Conversion<Vec<ChatTool>> {
    let tools: Vec<Tool<'_>> = serde_json::from_str(raw.get()).map_err(unknown)?;
    let convert = |tool: Tool<'_>| {
        if tool.r#type.is_some_and(|kind| kind != "custom") {
            return Err(OpaqueReason::UnknownItem);
        }
        Ok(ChatTool::new(ChatFunction {
            name: tool.name,
            description: tool.description,
            parameters: Some(schema(tool.input_schema)?),
            strict: tool.strict,
            defer_loading: tool.defer_loading,
        }))
    };
    tools.into_iter().map(convert).collect()
}

/// The schema, of the type `object` where it names none.
fn schema(raw: &RawValue) -> Conversion<Box<RawValue>> {
    let members: serde_json::Map<String, Value> =
        serde_json::from_str(raw.get()).map_err(unknown)?;
    if members.contains_key("type") {
        return Ok(raw.to_owned());
    }
    let text = raw.get().trim_end();
    let text = text.strip_suffix('}').ok_or(OpaqueReason::UnknownItem)?;
    let comma = if members.is_empty() { "" } else { "," };
    RawValue::from_string(format!("{text}{comma}\"type\":\"object\"}}")).map_err(unknown)
}

fn tool_choice(fields: &BodyFields<'_>) -> Conversion<ToolChoice> {
    #[derive(Deserialize)]
    struct Choice {
        r#type: String,
    }
    let Some(raw) = fields.raw("tool_choice") else {
        return Ok(ToolChoice::Other);
    };
    let choice: Choice = serde_json::from_str(raw.get()).map_err(unknown)?;
    Ok(match choice.r#type.as_str() {
        "none" => ToolChoice::None,
        _ => ToolChoice::Other,
    })
}

/// The effort, and whether thinking is disabled.
fn options(fields: &BodyFields<'_>, chat: &mut ConvertedChat) -> Conversion<()> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct OutputConfig {
        effort: Option<String>,
        #[serde(rename = "format")]
        _format: Option<IgnoredAny>,
    }
    #[derive(Deserialize)]
    struct Thinking {
        r#type: String,
    }
    if let Some(raw) = fields.raw("output_config") {
        let config: OutputConfig = serde_json::from_str(raw.get()).map_err(unknown)?;
        chat.reasoning_effort = config.effort;
    }
    if let Some(raw) = fields.raw("thinking") {
        let thinking: Thinking = serde_json::from_str(raw.get()).map_err(unknown)?;
        match thinking.r#type.as_str() {
            "enabled" | "adaptive" => {}
            "disabled" => chat.thinking = ThinkingRequest::Disabled,
            _ => return Err(OpaqueReason::UnknownItem),
        }
    }
    Ok(())
}
