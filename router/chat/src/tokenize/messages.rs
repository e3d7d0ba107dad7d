//! Messages, tools and template arguments in the form in which vLLM gives them to a template:
//! content as text or parts, arguments of calls as objects, unknown members removed, members in the
//! order of vLLM's types (a template may print a whole object).
//!
//! `Invalid`: the engine refuses it too. `Unsupported`: the engine may render it, the router
//! cannot.

use minijinja::value::{Value, ValueKind};
use serde_json::value::RawValue;

use super::RenderError;
use super::content_format::ContentFormat;
use crate::openai::{ChatApi, outside_strings};

/// Members of a content part that vLLM interprets; text parts keep all others.
const KNOWN_PART_MEMBERS: &[&str] = &[
    "audio_embeds",
    "audio_url",
    "closed",
    "data",
    "file",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "name",
    "prompt_cache_breakpoint",
    "refusal",
    "text",
    "thinking",
    "type",
    "uuid",
    "video_embeds",
    "video_url",
];
/// A client's attribution line that differs in every request. The engine drops it from system
/// texts.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

type Result<T> = std::result::Result<T, RenderError>;
type Members = Vec<(&'static str, Value)>;

/// Raw JSON as template values, as Python reads it.
pub(super) fn read_json(name: &'static str, raw: &RawValue) -> Result<Value> {
    check_numbers(name, raw.get())?;
    serde_json::from_str(raw.get()).map_err(|error| unreadable(name, &error))
}

/// The error for JSON that the engine refuses, or in which only Python reads a number.
pub(super) fn unreadable(name: &'static str, error: &serde_json::Error) -> RenderError {
    if error.to_string().contains("out of range") {
        RenderError::Number(name)
    } else {
        RenderError::Invalid(name)
    }
}

/// The conversation that a template renders.
pub(super) fn conversation(
    raw: &RawValue,
    format: ContentFormat,
    api: ChatApi,
) -> Result<Vec<Value>> {
    check_numbers("messages", raw.get())?;
    let messages: Vec<Value> =
        serde_json::from_str(raw.get()).map_err(|error| unreadable("messages", &error))?;
    if messages.is_empty() {
        return Err(RenderError::Invalid("messages"));
    }
    let read = |message| template_message(message, format, api);
    messages.iter().map(read).collect()
}

/// A member; `None` if it is absent or null.
pub(super) fn member(object: &Value, name: &str) -> Option<Value> {
    object
        .get_attr(name)
        .ok()
        .filter(|value| !value.is_undefined() && !value.is_none())
}

fn text_member(object: &Value, name: &str) -> Option<Value> {
    member(object, name).filter(|value| value.kind() == ValueKind::String)
}

fn object(members: Members) -> Value {
    Value::from_pairs(members)
}

fn template_message(message: &Value, format: ContentFormat, api: ChatApi) -> Result<Value> {
    let role_value = text_member(message, "role").ok_or(RenderError::Invalid("role"))?;
    let role = role_value.as_str().unwrap_or("");
    let mut members: Members = vec![("role", role_value.clone())];
    let content = content(message, role, format)?;
    let content = if role == "tool" {
        tool_content(content)
    } else {
        content
    };
    members.push(("content", content));
    match role {
        "assistant" => {
            if let Some(calls) = member(message, "tool_calls") {
                let calls = tool_calls(&calls, api)?;
                if !calls.is_empty() {
                    members.push(("tool_calls", Value::from(calls)));
                }
            }
            let reasoning =
                member(message, "reasoning").or_else(|| member(message, "reasoning_content"));
            if let Some(reasoning) = reasoning {
                members.push(("reasoning", reasoning.clone()));
                members.push(("reasoning_content", reasoning));
            }
        }
        "tool" => {
            let id = member(message, "tool_call_id");
            members.extend(id.map(|id| ("tool_call_id", id)));
        }
        _ => {}
    }
    for name in ["name", "task"] {
        members.extend(text_member(message, name).map(|value| (name, value)));
    }
    if role == "developer" {
        let tools = member(message, "tools");
        members.push(("tools", tools.unwrap_or_else(|| Value::from(()))));
    }
    Ok(object(members))
}

fn content(message: &Value, role: &str, format: ContentFormat) -> Result<Value> {
    let parts = match member(message, "content") {
        None => Vec::new(),
        Some(content) if content.kind() == ValueKind::String => vec![content],
        Some(content) if content.kind() == ValueKind::Seq => items(&content),
        Some(_) => return Err(RenderError::Invalid("content")),
    };
    let mut read = Vec::with_capacity(parts.len());
    for part in &parts {
        let part = TextPart::read(part)?;
        read.extend(match role {
            "system" => part.and_then(TextPart::without_billing_header),
            _ => part,
        });
    }
    Ok(match format {
        ContentFormat::Parts => Value::from(
            read.into_iter()
                .map(TextPart::into_object)
                .collect::<Vec<_>>(),
        ),
        ContentFormat::Text => {
            // The engine drops an empty text among the parts of a text.
            read.retain(|part| part.text.as_str() != Some(""));
            match &read[..] {
                [only] => only.text.clone(),
                _ => joined(read.iter().map(|part| part.text.clone())),
            }
        }
    })
}

/// Texts joined by newlines.
fn joined(texts: impl Iterator<Item = Value>) -> Value {
    let texts: Vec<Value> = texts.collect();
    let texts: Vec<&str> = texts
        .iter()
        .map(|text| text.as_str().unwrap_or(""))
        .collect();
    Value::from(texts.join("\n"))
}

/// The items of a list or the keys of an object.
fn items(list: &Value) -> Vec<Value> {
    list.try_iter().map(Iterator::collect).unwrap_or_default()
}

/// A text part of a message's content.
struct TextPart {
    text: Value,
    /// A reference to a deferred tool. It keeps its type where parts are kept.
    tool_reference: bool,
    /// Sent as text or as an object of type `text`; only such text loses the billing header.
    plain: bool,
    extra: Vec<(Value, Value)>,
}

impl TextPart {
    /// `None` for a part without text, which the engine skips.
    fn read(part: &Value) -> Result<Option<Self>> {
        if part.kind() == ValueKind::String {
            return Ok(Some(Self {
                text: part.clone(),
                tool_reference: false,
                plain: true,
                extra: Vec::new(),
            }));
        }
        let kind = text_member(part, "type").ok_or(RenderError::Unsupported("content"))?;
        let kind = kind.as_str().unwrap_or("");
        let source = match kind {
            "text" | "input_text" | "output_text" => "text",
            "refusal" => "refusal",
            "thinking" => "thinking",
            "tool_reference" => "name",
            _ => return Err(RenderError::Unsupported("content")),
        };
        if member(part, "uuid").is_some() {
            return Err(RenderError::Unsupported("content"));
        }
        let Some(text) = text_member(part, source) else {
            return match kind {
                "text" | "refusal" => Ok(None),
                _ => Err(RenderError::Invalid("content")),
            };
        };
        let tool_reference = kind == "tool_reference";
        let mut extra = Vec::new();
        for key in items(part) {
            let known = key
                .as_str()
                .is_some_and(|key| KNOWN_PART_MEMBERS.contains(&key));
            if !known && !tool_reference {
                extra.push((key.clone(), part.get_item(&key).unwrap_or_default()));
            }
        }
        Ok(Some(Self {
            text,
            tool_reference,
            plain: kind == "text",
            extra,
        }))
    }

    fn without_billing_header(mut self) -> Option<Self> {
        let text = self.text.as_str().unwrap_or("");
        if !self.plain || !text.starts_with(BILLING_HEADER) {
            return Some(self);
        }
        let rest = text
            .split_once('\n')
            .map(|(_, rest)| rest)
            .filter(|rest| !rest.is_empty())?;
        self.text = Value::from(rest);
        Some(self)
    }

    fn into_object(self) -> Value {
        let (kind, key) = if self.tool_reference {
            ("tool_reference", "name")
        } else {
            ("text", "text")
        };
        let mut members = vec![
            (Value::from("type"), Value::from(kind)),
            (Value::from(key), self.text),
        ];
        members.extend(self.extra);
        Value::from_pairs(members)
    }
}

/// A tool's result: text parts are joined, since most templates expect text.
fn tool_content(content: Value) -> Value {
    if content.kind() != ValueKind::Seq {
        return content;
    }
    let parts = items(&content);
    let is_text = |part| member(part, "type").is_some_and(|kind| kind.as_str() == Some("text"));
    if !parts.iter().all(is_text) {
        return content;
    }
    joined(
        parts
            .iter()
            .map(|part| member(part, "text").unwrap_or_default()),
    )
}

fn tool_calls(calls: &Value, api: ChatApi) -> Result<Vec<Value>> {
    const INVALID: RenderError = RenderError::Invalid("tool_calls");
    if calls.kind() != ValueKind::Seq {
        return Err(INVALID);
    }
    let mut read = Vec::new();
    for call in items(calls) {
        let id = text_member(&call, "id").ok_or(INVALID)?;
        let kind = text_member(&call, "type").filter(|kind| kind.as_str() == Some("function"));
        let function = member(&call, "function").ok_or(INVALID)?;
        let name = text_member(&function, "name").ok_or(INVALID)?;
        let arguments = text_member(&function, "arguments").ok_or(INVALID)?;
        let mut inner = vec![
            (
                Value::from("arguments"),
                parsed_arguments(arguments.as_str().unwrap_or(""))?,
            ),
            (Value::from("name"), name),
        ];
        if api == ChatApi::Responses {
            // Its calls are no requests of the chat route, whose type orders their members.
            inner.reverse();
        }
        inner.extend(others(&function, &["arguments", "name"]));
        let mut outer = vec![
            (Value::from("id"), id),
            (Value::from("function"), Value::from_pairs(inner)),
            (Value::from("type"), kind.ok_or(INVALID)?),
        ];
        outer.extend(others(&call, &["id", "function", "type"]));
        read.push(Value::from_pairs(outer));
    }
    Ok(read)
}

fn others(object: &Value, known: &[&str]) -> Vec<(Value, Value)> {
    items(object)
        .into_iter()
        .filter(|key| key.as_str().is_none_or(|key| !known.contains(&key)))
        .map(|key| (key.clone(), object.get_item(&key).unwrap_or_default()))
        .collect()
}

/// The arguments of a call, sent as JSON text, as an object. Other JSON becomes an empty object.
fn parsed_arguments(text: &str) -> Result<Value> {
    const UNSUPPORTED: RenderError = RenderError::Unsupported("tool_calls");
    let empty = || Value::from_pairs(Vec::<(Value, Value)>::new());
    check_numbers("tool_calls", text)?;
    match serde_json::from_str::<Value>(text) {
        Ok(value) if value.kind() == ValueKind::Map => Ok(value),
        Ok(_) => Ok(empty()),
        Err(error) => {
            // Python accepts a little more than JSON.
            let reason = error.to_string();
            let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
            if has(&["NaN", "Infinity"]) || reason.contains("out of range") {
                Err(RenderError::Number("tool_calls"))
            } else if has(&["\\ud", "\\uD"]) || reason.contains("recursion limit") {
                Err(UNSUPPORTED)
            } else {
                Ok(empty())
            }
        }
    }
}

/// Fails if Python reads a number of the JSON as another one: it reads integers of any size exactly,
/// and `-0` as 0.
pub(super) fn check_numbers(name: &'static str, json: &str) -> Result<()> {
    let is_other = |gap: &[u8]| has_large_integer(gap) || has_negative_zero(gap);
    match outside_strings(json).any(is_other) {
        true => Err(RenderError::Number(name)),
        false => Ok(()),
    }
}

/// Whether an integer has more than 64 bits.
fn has_large_integer(gap: &[u8]) -> bool {
    const DIGITS_MIN: usize = 19;
    let mut runs = gap.split(|byte| !byte.is_ascii_digit());
    if !runs.any(|digits| digits.len() >= DIGITS_MIN) {
        return false;
    }
    let is_part =
        |byte: &u8| byte.is_ascii_digit() || matches!(byte, b'-' | b'+' | b'.' | b'e' | b'E');
    let mut numbers = gap.split(|byte| !is_part(byte));
    numbers.any(|number| {
        let is_float = number.iter().any(|byte| matches!(byte, b'.' | b'e' | b'E'));
        let text = std::str::from_utf8(number).unwrap_or("");
        let fits = text.parse::<i64>().is_ok() || text.parse::<u64>().is_ok();
        number.len() >= DIGITS_MIN && !is_float && !fits
    })
}

/// `-0` that is neither a float nor an exponent.
fn has_negative_zero(gap: &[u8]) -> bool {
    memchr::memchr_iter(b'-', gap).any(|at| {
        let before = at.checked_sub(1).and_then(|at| gap.get(at));
        let is_zero = gap.get(at + 1) == Some(&b'0');
        let is_float = matches!(gap.get(at + 2), Some(b'.' | b'e' | b'E'));
        is_zero && !is_float && !matches!(before, Some(b'e' | b'E'))
    })
}

/// Tools as vLLM's types print them: with defaults, without unknown members.
pub(super) fn tools(raw: &RawValue, api: ChatApi) -> Result<Value> {
    const INVALID: RenderError = RenderError::Invalid("tools");
    let list = read_json("tools", raw)?;
    let is_refused = api == ChatApi::Chat && list.len() == Some(0);
    if list.kind() != ValueKind::Seq || is_refused {
        return Err(INVALID);
    }
    let mut read = Vec::new();
    for tool in items(&list) {
        let kind = member(&tool, "type");
        if kind.is_some_and(|kind| kind.as_str() != Some("function")) {
            return Err(INVALID);
        }
        let function = member(&tool, "function").ok_or(INVALID)?;
        let or_null = |name| member(&function, name).unwrap_or_else(|| Value::from(()));
        let deferred = member(&tool, "defer_loading");
        let mut inner: Members = vec![
            ("name", text_member(&function, "name").ok_or(INVALID)?),
            ("description", or_null("description")),
            ("parameters", or_null("parameters")),
        ];
        inner.extend(member(&function, "strict").map(|strict| ("strict", strict)));
        let inner_deferred = member(&function, "defer_loading").or_else(|| deferred.clone());
        inner.extend(inner_deferred.map(|deferred| ("defer_loading", deferred)));
        let mut outer: Members = vec![
            ("type", Value::from("function")),
            ("function", object(inner)),
        ];
        outer.extend(deferred.map(|deferred| ("defer_loading", deferred)));
        read.push(object(outer));
    }
    Ok(Value::from(read))
}

/// The conversation for a template without a developer role: developer messages become system
/// messages, and all system messages are merged into one at the front.
pub(super) fn without_developer_role(conversation: Vec<Value>) -> Vec<Value> {
    let role = |message: &Value| member(message, "role").and_then(|role| role.to_str());
    if !conversation
        .iter()
        .any(|message| role(message).as_deref() == Some("developer"))
    {
        return conversation;
    }
    let is_system =
        |message: &Value| matches!(role(message).as_deref(), Some("system" | "developer"));
    let (systems, rest): (Vec<Value>, Vec<Value>) =
        conversation.iter().cloned().partition(is_system);
    let first = match (&systems[..], conversation.first()) {
        ([only], Some(first)) if is_system(first) => renamed_to_system(only),
        _ => {
            let texts = systems.iter().map(system_text);
            let texts: Vec<String> = texts.filter(|text| !text.is_empty()).collect();
            object(vec![
                ("role", Value::from("system")),
                ("content", Value::from(texts.join("\n\n"))),
            ])
        }
    };
    std::iter::once(first).chain(rest).collect()
}

fn renamed_to_system(message: &Value) -> Value {
    let mut members = vec![(Value::from("role"), Value::from("system"))];
    members.extend(others(message, &["role", "tools"]));
    Value::from_pairs(members)
}

fn system_text(message: &Value) -> String {
    let Some(content) = member(message, "content") else {
        return String::new();
    };
    if let Some(text) = content.as_str() {
        return text.to_owned();
    }
    let parts = items(&content);
    let texts = parts.iter().filter_map(|part| member(part, "text"));
    let texts: Vec<String> = texts
        .filter_map(|text| text.as_str().map(str::to_owned))
        .collect();
    texts.join("\n")
}
