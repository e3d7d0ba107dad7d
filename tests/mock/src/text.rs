//! Text to tokens and back.
//!
//! Without tokenizer files a token is a byte of UTF-8, nothing is added to a prompt, and a chat is
//! rendered as `ChatML` with the tools as JSON in front, so that the mock engine runs alone.

mod hugging_face;

use std::path::Path;

use serde_json::Value;
use warmroute_chat::openai::{PromptRoute, SpecialTokens};

use hugging_face::HuggingFace;

use crate::images::{self, EncodedPrompt};

const MESSAGE_END: &str = "<|im_end|>\n";

/// How the mock engine reads and writes text.
pub(crate) enum Text {
    Bytes,
    HuggingFace(Box<HuggingFace>),
}

impl Text {
    /// With the tokenizer of a directory, or without any.
    pub(crate) fn load(directory: Option<&Path>) -> anyhow::Result<Self> {
        let Some(directory) = directory else {
            return Ok(Self::Bytes);
        };
        let loaded = HuggingFace::load(directory)?;
        Ok(Self::HuggingFace(Box::new(loaded)))
    }

    /// The tokens that the engine may generate: readable ones.
    pub(crate) fn vocabulary(&self) -> Vec<u32> {
        match self {
            Self::Bytes => {
                let letters = (b'a'..=b'z').chain([b' ', b' ', b' ', b'.']);
                letters.map(u32::from).collect()
            }
            Self::HuggingFace(loaded) => loaded.vocabulary(),
        }
    }

    pub(crate) fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, String> {
        match self {
            Self::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Self::HuggingFace(loaded) => loaded.encode(text, special),
        }
    }

    /// A template writes the special tokens itself.
    pub(crate) fn encode_chat(
        &self,
        route: PromptRoute,
        request: &Value,
    ) -> Result<EncodedPrompt, String> {
        let mut request = request.clone();
        let images = images::take(&mut request);
        let (rendered, special) = match self {
            Self::Bytes if route == PromptRoute::ChatCompletions => {
                (chat_ml(&request)?, SpecialTokens::Omit)
            }
            Self::Bytes => return Err("this route needs --tokenizer".to_owned()),
            Self::HuggingFace(loaded) => loaded.render_chat(route, request)?,
        };
        images::encode(self, &rendered, special, images)
    }

    pub(crate) fn decode(&self, token: u32) -> String {
        match self {
            Self::Bytes => {
                let byte = u8::try_from(token).ok().filter(u8::is_ascii);
                byte.map_or(char::REPLACEMENT_CHARACTER, char::from).into()
            }
            Self::HuggingFace(loaded) => loaded.decode(token),
        }
    }
}

/// Whether a text prompt gets special tokens: unless the request sets it otherwise.
pub(crate) fn special_tokens(request: &Value) -> SpecialTokens {
    if request["add_special_tokens"].as_bool().unwrap_or(true) {
        SpecialTokens::Add
    } else {
        SpecialTokens::Omit
    }
}

fn chat_ml(request: &Value) -> Result<String, String> {
    let messages = request["messages"]
        .as_array()
        .filter(|messages| !messages.is_empty())
        .ok_or("messages must be a list with at least one message")?;
    let mut rendered = String::new();
    if let Some(tools) = request["tools"]
        .as_array()
        .filter(|tools| !tools.is_empty())
    {
        for tool in tools {
            rendered.push_str(&format!("<|tool|>{tool}\n"));
        }
    }
    let add_prompt = request["add_generation_prompt"].as_bool().unwrap_or(true);
    let continued = request["continue_final_message"].as_bool().unwrap_or(false);
    if add_prompt && continued {
        return Err("continue_final_message excludes add_generation_prompt".into());
    }
    for message in messages {
        let role = message["role"].as_str().ok_or("a message needs a role")?;
        let content = content_text(&message["content"])?;
        rendered.push_str(&format!("<|im_start|>{role}\n{content}{MESSAGE_END}"));
    }
    if continued {
        rendered.truncate(rendered.len() - MESSAGE_END.len());
    }
    if add_prompt {
        rendered.push_str("<|im_start|>assistant\n");
    }
    Ok(rendered)
}

/// A content is text, a list of parts of which the text ones count, or missing.
fn content_text(content: &Value) -> Result<String, String> {
    match content {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => Ok(parts
            .iter()
            .filter_map(|part| part["text"].as_str())
            .collect()),
        Value::Bool(_) | Value::Number(_) | Value::Object(_) => {
            Err("content must be text or a list of parts".into())
        }
    }
}
