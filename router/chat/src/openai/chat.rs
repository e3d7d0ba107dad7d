//! `/v1/chat/completions`: the parts that make the prompt.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::SpecialTokens;
use super::error::ApiError;
use super::fields::{Fields, Skipped, Text, body_error};
use super::request::{Notes, Opaque};

pub(crate) const FIELDS: &[&str] = &[
    "model",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "user",
    "cache_salt",
    "prompt_logprobs",
    "echo",
    "truncate_prompt_tokens",
    "kv_transfer_params",
    "vllm_xargs",
];

/// How a rendered chat ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generation {
    /// With the header of the answer that is to come.
    Prompt,
    /// After the last message.
    Nothing,
    /// Inside the last message, which the model continues.
    ContinueFinal,
    /// Both of the above were asked for, which the engine refuses.
    Contradiction,
}

/// What a chat template is given. Raw JSON stays raw until a template needs it.
#[derive(Debug)]
pub struct ChatParts<'a> {
    pub messages: &'a RawValue,
    pub tools: Option<&'a RawValue>,
    pub documents: Option<&'a RawValue>,
    /// A template, or the name of one, sent with the request.
    pub template: Option<Cow<'a, str>>,
    pub template_kwargs: Option<&'a RawValue>,
    pub reasoning_effort: Option<Cow<'a, str>>,
    pub generation: Generation,
    pub special_tokens: SpecialTokens,
}

impl<'a> ChatParts<'a> {
    /// A chat with defaults for everything but messages and tools.
    pub fn new(messages: &'a RawValue, tools: Option<&'a RawValue>) -> Self {
        Self {
            messages,
            tools,
            documents: None,
            template: None,
            template_kwargs: None,
            reasoning_effort: None,
            generation: Generation::Prompt,
            special_tokens: SpecialTokens::Omit,
        }
    }
}

pub(crate) fn read<'a>(fields: &Fields<'a>, notes: &mut Notes) -> Result<ChatParts<'a>, ApiError> {
    let messages = fields.raw("messages").ok_or_else(|| {
        ApiError::invalid("messages", "You must provide a messages parameter.")
            .with_code("missing_messages")
    })?;
    let scan: MessageScan = serde_json::from_str(messages.get()).map_err(|error| ApiError {
        param: Some("messages"),
        ..body_error(&error)
    })?;
    if scan.media {
        notes.opaque(Opaque::Multimodal);
    }
    let tools = checked(fields, "tools")?;
    let documents = checked(fields, "documents")?;
    let template_kwargs = checked(fields, "chat_template_kwargs")?;
    let add = notes.flag(fields, "add_generation_prompt");
    let continued = notes
        .flag(fields, "continue_final_message")
        .unwrap_or(false);
    let generation = match (add, continued) {
        (None | Some(true), false) => Generation::Prompt,
        (Some(false), false) => Generation::Nothing,
        (Some(false), true) => Generation::ContinueFinal,
        (None | Some(true), true) => Generation::Contradiction,
    };
    let special = notes.flag(fields, "add_special_tokens").unwrap_or(false);
    Ok(ChatParts {
        messages,
        tools,
        documents,
        template: fields.text("chat_template")?,
        template_kwargs,
        reasoning_effort: fields.text("reasoning_effort")?,
        generation,
        special_tokens: if special {
            SpecialTokens::Add
        } else {
            SpecialTokens::Omit
        },
    })
}

/// A raw field whose depth is within the parser's limit.
fn checked<'a>(fields: &Fields<'a>, name: &'static str) -> Result<Option<&'a RawValue>, ApiError> {
    let Some(raw) = fields.raw(name) else {
        return Ok(None);
    };
    match serde_json::from_str::<Skipped>(raw.get()) {
        Ok(_) => Ok(Some(raw)),
        Err(error) => Err(ApiError {
            param: Some(name),
            ..body_error(&error)
        }),
    }
}

/// One pass over `messages`, without copies: is it an array of objects, is it shallow enough, and
/// does any content part carry something else than text?
#[derive(Default)]
struct MessageScan {
    media: bool,
}

impl<'de> Deserialize<'de> for MessageScan {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Self::default())
    }
}

impl<'de> Visitor<'de> for MessageScan {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of messages")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<Self, A::Error> {
        while let Some(message) = seq.next_element::<MessageShape>()? {
            self.media |= message.0;
        }
        Ok(self)
    }
}

struct MessageShape(bool);

impl<'de> Deserialize<'de> for MessageShape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Self(false))
    }
}

impl<'de> Visitor<'de> for MessageShape {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a message object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        while let Some(key) = map.next_key::<Text<'de>>()? {
            if key.0 == "content" {
                self.0 |= map.next_value::<ContentShape>()?.0;
            } else {
                map.next_value::<Skipped>()?;
            }
        }
        Ok(self)
    }
}

/// Content: text, or parts of which some may be media.
struct ContentShape(bool);

impl<'de> Deserialize<'de> for ContentShape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self(false))
    }
}

impl<'de> Visitor<'de> for ContentShape {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text or content parts")
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<Self, A::Error> {
        while let Some(part) = seq.next_element::<PartShape>()? {
            self.0 |= part.0;
        }
        Ok(self)
    }
}

/// A part: true if its type is not one of text, or a media key stands in it.
struct PartShape(bool);

const TEXT_TYPES: &[&str] = &[
    "text",
    "input_text",
    "output_text",
    "refusal",
    "thinking",
    "tool_reference",
];
const MEDIA_KEYS: &[&str] = &[
    "image_url",
    "image_pil",
    "image_embeds",
    "input_image",
    "audio_url",
    "audio_embeds",
    "input_audio",
    "video_url",
    "video_embeds",
    "prompt_embeds",
];

impl<'de> Deserialize<'de> for PartShape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self(false))
    }
}

impl<'de> Visitor<'de> for PartShape {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a content part")
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        while let Some(key) = map.next_key::<Text<'de>>()? {
            if key.0 == "type" {
                let kind = map.next_value::<PartType<'de>>()?;
                self.0 |= kind
                    .0
                    .is_some_and(|kind| !TEXT_TYPES.contains(&kind.as_ref()));
            } else {
                self.0 |= MEDIA_KEYS.contains(&key.0.as_ref());
                map.next_value::<Skipped>()?;
            }
        }
        Ok(self)
    }
}

#[derive(serde::Deserialize)]
struct PartType<'a>(#[serde(borrow)] Option<Cow<'a, str>>);
