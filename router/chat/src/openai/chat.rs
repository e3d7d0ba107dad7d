//! `/v1/chat/completions`: the parts that make the prompt.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Unexpected, Visitor};
use serde_json::value::RawValue;

use super::SpecialTokens;
use super::error::OpenAiError;
use super::fields::{BodyFields, JsonText, SkippedValue, body_error};
use super::request::{FirstOpaque, OpaqueReason};

pub(super) const FIELDS: &[&str] = &[
    "model",
    "messages",
    "tools",
    "tool_choice",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "stream",
    "cache_salt",
    "user",
    "prompt_logprobs",
    "echo",
    "truncate_prompt_tokens",
    "n",
    "best_of",
    "use_beam_search",
    "kv_transfer_params",
    "vllm_xargs",
];

/// How a rendered chat ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChatEnding {
    /// With the header of the next answer.
    GenerationPrompt,
    /// After the last message.
    LastMessage,
    /// Inside the last message, which the model continues.
    InsideLastMessage,
    /// The request asks for both a generation prompt and a continuation; the engine refuses it.
    Contradiction,
}

/// What a request says about thinking, besides the effort.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThinkingRequest {
    #[default]
    Default,
    /// The engine chooses the effort that disables it.
    Disabled,
}

/// Whether the model may call tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// `tool_choice` is `none`. An engine may leave the tools out of the prompt.
    None,
    #[default]
    Other,
}

/// The API whose engine code makes the template's input of a body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChatApi {
    /// Chat completions, and what is converted to their requests.
    #[default]
    Chat,
    Messages,
    Responses,
}

/// The input of a chat template. Raw JSON stays raw until a template needs it.
#[derive(Debug)]
pub struct ChatParts<'a> {
    pub api: ChatApi,
    pub messages: Cow<'a, RawValue>,
    /// The messages for a template that accepts system messages at the front only, where they
    /// differ.
    pub system_first: Option<Box<RawValue>>,
    pub tools: Option<Cow<'a, RawValue>>,
    pub tool_choice: ToolChoice,
    pub documents: Option<&'a RawValue>,
    /// A template, or the name of one, sent with the request.
    pub template: Option<Cow<'a, str>>,
    pub template_kwargs: Option<&'a RawValue>,
    pub reasoning_effort: Option<Cow<'a, str>>,
    pub thinking: ThinkingRequest,
    pub ending: ChatEnding,
    pub special_tokens: SpecialTokens,
}

impl ChatParts<'_> {
    /// The JSON that a template renders.
    fn inputs(&self) -> impl Iterator<Item = &RawValue> {
        let optional = [self.tools.as_deref(), self.documents, self.template_kwargs];
        std::iter::once(&*self.messages).chain(optional.into_iter().flatten())
    }

    /// Bytes of the JSON that a template renders.
    pub fn bytes(&self) -> usize {
        self.inputs().map(|raw| raw.get().len()).sum()
    }

    /// Values and keys in that JSON, at most: each takes memory when it is rendered.
    pub fn values_max(&self) -> usize {
        self.inputs().map(|raw| values_max(raw.get())).sum()
    }
}

impl ToolChoice {
    pub(super) fn of(fields: &BodyFields<'_>) -> Self {
        match fields.raw("tool_choice") {
            Some(raw) if raw.get() == "\"none\"" => Self::None,
            Some(_) | None => Self::Other,
        }
    }
}

/// JSON values that may be read without a look at their number.
pub(super) const VALUES_ALLOWED: usize = 1 << 16;

/// A value that is read takes up to 24 times as many bytes as text that is copied.
const VALUE_BYTES_MIN: usize = 24;

/// Whether JSON has too many values for its size to be read as a whole.
pub(super) fn is_dense(json: &str) -> bool {
    let values = values_max(json);
    values > VALUES_ALLOWED && values.saturating_mul(VALUE_BYTES_MIN) > json.len()
}

pub(super) fn values_max(json: &str) -> usize {
    let begins_value = |byte: &&u8| matches!(byte, b',' | b':' | b'[' | b'{');
    let values = outside_strings(json).map(|bytes| bytes.iter().filter(begins_value).count());
    1 + values.sum::<usize>()
}

/// Whether a list has objects only, and these have texts only: neither media nor deep values. The
/// JSON must be valid but for surrogates in its texts. False says nothing.
fn has_texts_only(json: &str) -> bool {
    let mut depth = 0;
    let mut gaps = outside_strings(json).peekable();
    while let Some(gap) = gaps.next() {
        for byte in gap {
            match (byte, depth) {
                (b'[', 0) | (b'{', 1) => depth += 1,
                (b'}', 2) | (b']', 1) => depth -= 1,
                (b',' | b':' | b' ' | b'\n' | b'\r' | b'\t', _) => {}
                _ => return false,
            }
        }
        // Members of the objects only.
        if gaps.peek().is_some() && depth != 2 {
            return false;
        }
    }
    !may_have_surrogates(json)
}

/// Whether a text may have half of a pair of surrogates, which is no character.
fn may_have_surrogates(json: &str) -> bool {
    let json = json.as_bytes();
    let mut escapes = memchr::memmem::find_iter(json, br"\u");
    escapes.any(|at| matches!(json.get(at + 2), Some(b'd' | b'D')))
}

/// The bytes before, between and behind the strings of JSON. Inlined, with what it calls: reading a
/// large prompt took a tenth longer without.
#[inline]
pub(crate) fn outside_strings(json: &str) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(json.as_bytes());
    std::iter::from_fn(move || {
        let bytes = rest.take()?;
        let Some(quote) = memchr::memchr(b'"', bytes) else {
            return Some(bytes);
        };
        rest = Some(after_string(&bytes[quote + 1..]));
        Some(&bytes[..quote])
    })
}

/// What follows the quotation mark that ends a string: one behind an even number of backslashes.
#[inline]
fn after_string(string: &[u8]) -> &[u8] {
    let is_end = |at: &usize| {
        let before = string[..*at].iter().rev();
        before.take_while(|byte| **byte == b'\\').count() % 2 == 0
    };
    let end = memchr::memchr_iter(b'"', string).find(is_end);
    end.map_or(&[], |at| &string[at + 1..])
}

pub(super) fn read<'a>(
    fields: &BodyFields<'a>,
    opaque: &mut FirstOpaque,
) -> Result<ChatParts<'a>, OpenAiError> {
    let messages = fields.raw("messages").ok_or_else(|| {
        OpenAiError::invalid("messages", "You must provide a messages parameter.")
            .with_code("missing_messages")
    })?;
    let media = if has_texts_only(messages.get()) {
        MediaFound::None
    } else {
        let mut json = serde_json::Deserializer::from_str(messages.get());
        let found = MediaScan::Messages.deserialize(&mut json);
        in_range(found, "messages", opaque)?.unwrap_or(MediaFound::None)
    };
    match media {
        MediaFound::None => {}
        MediaFound::Images => opaque.set(OpaqueReason::Images),
        MediaFound::Other => opaque.set(OpaqueReason::OtherMedia),
    }
    let tools = checked(fields, "tools", opaque)?;
    let documents = checked(fields, "documents", opaque)?;
    let template_kwargs = checked(fields, "chat_template_kwargs", opaque)?;
    let add = opaque.flag(fields, "add_generation_prompt").unwrap_or(true);
    let continued = opaque.flag(fields, "continue_final_message");
    let ending = match (add, continued.unwrap_or(false)) {
        (true, false) => ChatEnding::GenerationPrompt,
        (false, false) => ChatEnding::LastMessage,
        (false, true) => ChatEnding::InsideLastMessage,
        (true, true) => ChatEnding::Contradiction,
    };
    let add_special = opaque.flag(fields, "add_special_tokens");
    Ok(ChatParts {
        api: ChatApi::Chat,
        messages: Cow::Borrowed(messages),
        system_first: None,
        tools: tools.map(Cow::Borrowed),
        tool_choice: ToolChoice::of(fields),
        documents,
        template: fields.text("chat_template")?,
        template_kwargs,
        reasoning_effort: fields.text("reasoning_effort")?,
        thinking: ThinkingRequest::Default,
        ending,
        special_tokens: SpecialTokens::from_flag(add_special, SpecialTokens::Omit),
    })
}

/// A raw field whose depth is within the parser's limit.
fn checked<'a>(
    fields: &BodyFields<'a>,
    name: &'static str,
    opaque: &mut FirstOpaque,
) -> Result<Option<&'a RawValue>, OpenAiError> {
    let raw = fields.raw(name);
    if let Some(raw) = raw {
        in_range(
            serde_json::from_str::<SkippedValue>(raw.get()),
            name,
            opaque,
        )?;
    }
    Ok(raw)
}

/// What was read; `None` and an opaque prompt for a number beyond a float, which Python reads.
fn in_range<T>(
    read: serde_json::Result<T>,
    name: &'static str,
    opaque: &mut FirstOpaque,
) -> Result<Option<T>, OpenAiError> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.to_string().contains("out of range") => {
            opaque.set(OpaqueReason::Number);
            Ok(None)
        }
        Err(error) => Err(body_error(&error).with_param(name)),
    }
}

/// The media in content parts; the greatest counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum MediaFound {
    None,
    Images,
    Other,
}

/// One pass over `messages` without copies, at one of four levels. The result is what media content
/// parts carry. It fails unless the messages are an array of objects of bounded depth.
#[derive(Clone, Copy)]
enum MediaScan {
    Messages,
    Message,
    /// Text or a list of parts.
    Content,
    Part,
}

const TEXT_TYPES: &[&str] = &[
    "text",
    "input_text",
    "output_text",
    "refusal",
    "thinking",
    "tool_reference",
];
/// Types of parts, and their keys. An engine takes a part without a type by its key.
const IMAGE_TYPES: &[&str] = &["image_url", "input_image"];
const OTHER_MEDIA_KEYS: &[&str] = &[
    "image_pil",
    "image_embeds",
    "audio_url",
    "audio_embeds",
    "input_audio",
    "video_url",
    "video_embeds",
    "prompt_embeds",
];

impl MediaFound {
    /// By a part's type. An unknown one may be media.
    fn of_type(kind: &str) -> Self {
        if TEXT_TYPES.contains(&kind) {
            Self::None
        } else if IMAGE_TYPES.contains(&kind) {
            Self::Images
        } else {
            Self::Other
        }
    }

    /// By a part's key. An unknown one says nothing.
    fn of_key(key: &str) -> Self {
        if IMAGE_TYPES.contains(&key) {
            Self::Images
        } else if OTHER_MEDIA_KEYS.contains(&key) {
            Self::Other
        } else {
            Self::None
        }
    }
}

impl<'de> DeserializeSeed<'de> for MediaScan {
    type Value = MediaFound;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<MediaFound, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MediaScan {
    type Value = MediaFound;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Messages => "an array of messages",
            Self::Message => "a message object",
            Self::Content => "text or content parts",
            Self::Part => "a content part",
        })
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<MediaFound, E> {
        match self {
            Self::Content | Self::Part => Ok(MediaFound::None),
            Self::Messages | Self::Message => Err(E::invalid_type(Unexpected::Str(text), &self)),
        }
    }

    fn visit_unit<E: Error>(self) -> Result<MediaFound, E> {
        match self {
            Self::Content => Ok(MediaFound::None),
            Self::Messages | Self::Message | Self::Part => {
                Err(E::invalid_type(Unexpected::Unit, &self))
            }
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<MediaFound, A::Error> {
        let element = match self {
            Self::Messages => Self::Message,
            Self::Content => Self::Part,
            Self::Message | Self::Part => {
                return Err(A::Error::invalid_type(Unexpected::Seq, &self));
            }
        };
        let mut media = MediaFound::None;
        while let Some(found) = seq.next_element_seed(element)? {
            media = media.max(found);
        }
        Ok(media)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<MediaFound, A::Error> {
        if matches!(self, Self::Messages | Self::Content) {
            return Err(A::Error::invalid_type(Unexpected::Map, &self));
        }
        let is_part = matches!(self, Self::Part);
        let mut media = MediaFound::None;
        while let Some(key) = map.next_key::<JsonText<'de>>()? {
            let found = match key.0.as_ref() {
                "content" if !is_part => map.next_value_seed(Self::Content)?,
                "type" if is_part => {
                    let kind = map.next_value::<Option<JsonText<'de>>>()?;
                    kind.map_or(MediaFound::None, |kind| MediaFound::of_type(&kind.0))
                }
                key => {
                    map.next_value::<SkippedValue>()?;
                    if is_part {
                        MediaFound::of_key(key)
                    } else {
                        MediaFound::None
                    }
                }
            };
            media = media.max(found);
        }
        Ok(media)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// Byte by byte.
    fn values_counted(json: &str) -> usize {
        let (mut in_string, mut escaped, mut values) = (false, false, 1);
        for byte in json.bytes() {
            if in_string {
                in_string = escaped || byte != b'"';
                escaped = !escaped && byte == b'\\';
            } else {
                in_string = byte == b'"';
                values += usize::from(matches!(byte, b',' | b':' | b'[' | b'{'));
            }
        }
        values
    }

    fn scanned(json: &str) -> Option<MediaFound> {
        let mut json = serde_json::Deserializer::from_str(json);
        MediaScan::Messages.deserialize(&mut json).ok()
    }

    /// A member's name and value, or what may be there instead.
    fn member() -> impl Strategy<Value = String> {
        let name = prop::sample::select(&["content", "role", "type", "image_url", "\\\""]);
        let text = r#""([\]\[{},:a]|\\\\|\\"|\\u00e9|\\ud83d|\\uDE00){0,6}""#;
        let other = prop::sample::select(&["null", "1", "true", "[]", "{}", r#"[{"text":"a"}]"#]);
        let value = prop_oneof![8 => text, 1 => other.prop_map(str::to_owned)];
        (name, value).prop_map(|(name, value)| format!("\"{name}\" : {value}"))
    }

    #[test]
    fn values_are_counted_outside_strings() {
        assert_eq!(values_max(r#"{"a,[":[1,{"b":"\"{,"}]}"#), 7);
        assert_eq!(values_max(""), 1);
        assert_eq!(values_max(r#""a\"#), 1);
    }

    proptest! {
        #[test]
        fn lists_of_texts_have_no_media(
            messages in prop::collection::vec(prop::collection::vec(member(), 0..4), 0..4),
            other in prop::sample::select(&["", "", "", ", \"a\"", ", null", ", []"]),
        ) {
            let messages: Vec<String> =
                messages.iter().map(|members| format!("{{{}}}", members.join(","))).collect();
            let json = format!("[ {}{other}\n]", messages.join(" ,"));
            prop_assume!(serde_json::from_str::<&RawValue>(&json).is_ok());
            let is_flat = serde_json::from_str::<Vec<HashMap<String, String>>>(&json).is_ok();
            let found = has_texts_only(&json);
            prop_assert!(!found || scanned(&json) == Some(MediaFound::None), "{}", json);
            prop_assert_eq!(found, is_flat && !may_have_surrogates(&json), "{}", json);
        }

        #[test]
        fn any_text_has_the_values_that_its_bytes_show(json in r#"[\[{,:"a\\ ]{0,40}"#) {
            prop_assert_eq!(values_max(&json), values_counted(&json));
        }
    }
}
