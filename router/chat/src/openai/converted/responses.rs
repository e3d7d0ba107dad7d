//! `/v1/responses`, as vLLM's `construct_input_messages` converts it.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::members::Members;
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
    "client_metadata",
    "context_management",
    "moderation",
];

/// Fields that add what only the engine has.
const HISTORY: [&str; 3] = ["previous_response_id", "previous_input_messages", "prompt"];

/// Tools that the engine runs itself, or knows nothing of: it leaves them out of the prompt.
const DROPPED_TOOLS: &[&str] = &[
    "apply_patch",
    "code_interpreter",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
];

/// The parameters of a tool without a schema: one text.
const CUSTOM_PARAMETERS: &str = concat!(
    r#"{"type":"object","properties":{"input":{"type":"string","#,
    r#""description":"The freeform text payload for this tool."}},"#,
    r#""required":["input"],"additionalProperties":false}"#,
);

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
            for item in Members::list(list)? {
                chat.is_continued = convert_item(item, &mut chat.messages)?;
            }
        }
    }
    chat.tools = fields.raw("tools").map(tools).transpose()?.flatten();
    chat.tool_choice = ToolChoice::of(fields);
    chat.reasoning_effort = effort(fields)?;
    Ok(chat)
}

/// Adds an item to the chat. True for a message that goes on if it is the last one.
fn convert_item(mut item: Members<'_>, chat: &mut Vec<Value>) -> Conversion<bool> {
    let (kind, role) = (item.text("type")?, item.text("role")?);
    let goes_on = match item.text("status")?.as_deref() {
        None | Some("completed") => false,
        Some("in_progress" | "incomplete") => true,
        Some(_) => return Err(OpaqueReason::UnknownItem),
    };
    item.text("id")?;
    let is_message = match (kind.as_deref(), role.as_deref()) {
        (Some("message") | None, Some("assistant")) => {
            let text = assistant_text(&mut item, kind.is_some())?;
            set_or_push(chat, "content", text.into());
            true
        }
        (Some("message") | None, Some(role @ ("user" | "system" | "developer"))) => {
            let content = item.raw("content").ok_or(OpaqueReason::UnknownItem)?;
            let content = input_content(content)?;
            chat.push(json!({ "role": role, "content": content }));
            true
        }
        (Some("reasoning"), None) => {
            let text = reasoning_text(&mut item)?;
            set_or_push(chat, "reasoning", text.into());
            true
        }
        (Some("function_call"), None) => {
            let name = item.required_text("name")?;
            let name = match item.text("namespace")?.filter(|name| !name.is_empty()) {
                Some(namespace) => in_namespace(&namespace, &name),
                None => name,
            };
            let arguments = item.required_text("arguments")?;
            push_call(&item.required_text("call_id")?, &name, &arguments, chat);
            false
        }
        (Some("custom_tool_call"), None) => {
            let input = item.text("input")?.unwrap_or_default();
            let arguments = json!({ "input": input }).to_string();
            item.text("namespace")?;
            let (id, name) = (item.required_text("call_id")?, item.required_text("name")?);
            push_call(&id, &name, &arguments, chat);
            false
        }
        (Some("function_call_output" | "custom_tool_call_output"), None) => {
            let output = item.raw("output").ok_or(OpaqueReason::UnknownItem)?;
            let (content, id) = (input_content(output)?, item.required_text("call_id")?);
            chat.push(json!({ "role": "tool", "content": content, "tool_call_id": id }));
            false
        }
        _ => return Err(OpaqueReason::UnknownItem),
    };
    item.end()?;
    Ok(is_message && goes_on)
}

/// The engine takes the first part only.
fn assistant_text(item: &mut Members<'_>, is_typed: bool) -> Conversion<String> {
    if item
        .text("phase")?
        .is_some_and(|phase| !["commentary", "final_answer"].contains(&phase.as_str()))
    {
        return Err(OpaqueReason::UnknownItem);
    }
    let content = item.raw("content").ok_or(OpaqueReason::UnknownItem)?;
    let list = match TextOr::read(content)? {
        TextOr::Text(text) => return Ok(text),
        TextOr::List(list) if is_typed => list,
        TextOr::List(_) => return Err(OpaqueReason::UnknownItem),
    };
    let mut texts = Vec::new();
    for mut part in Members::list(list)? {
        if part.text("type")?.as_deref() != Some("output_text") {
            return Err(OpaqueReason::UnknownItem);
        }
        texts.push(part.required_text("text")?);
        part.ignore(&["annotations", "logprobs"]);
        part.end()?;
    }
    texts.into_iter().next().ok_or(OpaqueReason::UnknownItem)
}

/// The first text of the content, else of the summary.
fn reasoning_text(item: &mut Members<'_>) -> Conversion<String> {
    if item
        .text("encrypted_content")?
        .is_some_and(|text| !text.is_empty())
    {
        return Err(OpaqueReason::UnknownItem);
    }
    let mut texts = Vec::new();
    for name in ["content", "summary"] {
        let Some(list) = item.raw(name) else {
            continue;
        };
        for mut part in Members::list(list)? {
            part.ignore(&["type"]);
            texts.push(part.required_text("text")?);
            part.end()?;
        }
    }
    Ok(texts.into_iter().next().unwrap_or_default())
}

fn push_call(id: &str, name: &str, arguments: &str, chat: &mut Vec<Value>) {
    let function = json!({ "name": name, "arguments": arguments });
    let call = json!({ "id": id, "function": function, "type": "function" });
    match last_of_assistant(chat) {
        Some(last) => match last.get_mut("tool_calls").and_then(Value::as_array_mut) {
            Some(calls) => calls.push(call),
            None => last["tool_calls"] = json!([call]),
        },
        None => chat.push(json!({ "role": "assistant", "tool_calls": [call] })),
    }
}

/// The name under which the engine shows a function of a namespace.
fn in_namespace(namespace: &str, name: &str) -> String {
    format!("{namespace}__{name}")
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
    let part = |mut part: Members<'_>| match part.text("type")?.as_deref() {
        Some("input_text") => {
            let text = part.required_text("text")?;
            part.end()?;
            Ok(json!({ "type": "input_text", "text": text }))
        }
        Some("input_image") => Err(OpaqueReason::Images),
        Some("input_file" | "input_audio") => Err(OpaqueReason::OtherMedia),
        _ => Err(OpaqueReason::UnknownItem),
    };
    Members::list(list)?.into_iter().map(part).collect()
}

/// The functions, also those of namespaces. A tool with a text for input becomes a function.
/// An empty list counts as none; one that is empty without the dropped tools stays a list.
fn tools(raw: &RawValue) -> Conversion<Option<Vec<ChatTool>>> {
    let given = Members::list(raw)?;
    if given.is_empty() {
        return Ok(None);
    }
    let mut tools = Vec::new();
    for mut tool in given {
        match tool.text("type")?.as_deref() {
            Some("function") => tools.push(function(tool, None)?),
            Some("custom") => tools.push(custom(tool)?),
            Some("namespace") => {
                let namespace = tool.required_text("name")?;
                for mut tool in Members::list(tool.raw("tools").ok_or(OpaqueReason::UnknownItem)?)?
                {
                    match tool.text("type")?.as_deref() {
                        Some("function") => tools.push(function(tool, Some(&namespace))?),
                        Some("custom") => {}
                        _ => return Err(OpaqueReason::UnknownItem),
                    }
                }
                tool.ignore(&["description"]);
                tool.end()?;
            }
            Some(kind) if DROPPED_TOOLS.contains(&kind) => {}
            _ => return Err(OpaqueReason::UnknownItem),
        }
    }
    Ok(Some(tools))
}

fn function(mut tool: Members<'_>, namespace: Option<&str>) -> Conversion<ChatTool> {
    let name = tool.required_text("name")?;
    let function = ChatFunction {
        name: namespace.map_or_else(|| name.clone(), |space| in_namespace(space, &name)),
        description: tool.text("description")?,
        parameters: tool.raw("parameters").map(ToOwned::to_owned),
        strict: tool.flag("strict")?,
        defer_loading: tool.flag("defer_loading")?,
    };
    tool.end()?;
    Ok(ChatTool::new(function))
}

fn custom(mut tool: Members<'_>) -> Conversion<ChatTool> {
    if let Some(format) = tool.raw("format") {
        let mut format = Members::read(format)?;
        if format.text("type")?.as_deref() != Some("text") {
            return Err(OpaqueReason::UnknownItem);
        }
        format.end()?;
    }
    let function = ChatFunction {
        name: tool.required_text("name")?,
        description: tool.text("description")?,
        parameters: Some(RawValue::from_string(CUSTOM_PARAMETERS.to_owned()).map_err(unknown)?),
        strict: None,
        defer_loading: None,
    };
    tool.end()?;
    Ok(ChatTool::new(function))
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
