//! Text to tokens and back.
//!
//! Without tokenizer files a token is a byte of UTF-8, nothing is added to a prompt, and a chat is
//! rendered as `ChatML` with the tools as JSON in front, so that the mock engine runs alone.

use std::path::Path;

use anyhow::bail;
use serde_json::Value;

/// How the mock engine reads and writes text.
pub(super) struct Text;

impl Text {
    /// With the tokenizer of a directory, or without any.
    pub(super) fn load(directory: Option<&Path>) -> anyhow::Result<Self> {
        match directory {
            None => Ok(Self),
            Some(directory) => bail!("no tokenizer can be read from {}", directory.display()),
        }
    }

    /// The tokens that the engine may generate: printable ones.
    pub(super) fn vocabulary(&self) -> Vec<u32> {
        let letters = (b'a'..=b'z').chain([b' ', b' ', b' ', b'.']);
        letters.map(u32::from).collect()
    }

    pub(super) fn encode(&self, text: &str, _add_special_tokens: bool) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    pub(super) fn encode_chat(&self, request: &Value) -> Result<Vec<u32>, String> {
        let rendered = chat_ml(request)?;
        Ok(self.encode(&rendered, false))
    }

    pub(super) fn decode(&self, token: u32) -> String {
        let byte = u8::try_from(token).ok().filter(u8::is_ascii);
        byte.map_or(char::REPLACEMENT_CHARACTER, char::from).into()
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
    for message in messages {
        let role = message["role"].as_str().ok_or("a message needs a role")?;
        let content = content_text(&message["content"])?;
        rendered.push_str(&format!("<|im_start|>{role}\n{content}<|im_end|>\n"));
    }
    if request["add_generation_prompt"].as_bool().unwrap_or(true) {
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
