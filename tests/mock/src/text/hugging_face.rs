//! A Hugging Face tokenizer directory: `tokenizer.json` and a chat template.
//!
//! Uses the router's request reader (requests, templates, token ids), which has its own vectors of
//! real engine answers.

use std::path::Path;

use anyhow::{Context as _, anyhow};
use serde_json::{Value, json};
use warmroute_chat::openai::{self, OpaqueReason, PromptRoute, PromptSource, SpecialTokens};
use warmroute_chat::tokenize::{CivilTime, Tokenizer};

use crate::rank::unix_seconds;

/// Enough different tokens for outputs to differ.
const VOCABULARY_MAX: usize = 512;

pub(crate) struct HuggingFace {
    reader: Tokenizer,
    /// Token ids to text, which the router never does.
    decoder: tokenizers::Tokenizer,
}

impl HuggingFace {
    pub(crate) fn load(directory: &Path) -> anyhow::Result<Self> {
        let reader = Tokenizer::load(directory)
            .with_context(|| format!("reading the tokenizer in {}", directory.display()))?;
        let file = directory.join("tokenizer.json");
        let decoder = tokenizers::Tokenizer::from_file(&file)
            .map_err(|error| anyhow!("reading {}: {error}", file.display()))?;
        Ok(Self { reader, decoder })
    }

    /// Tokens that stand for letters.
    pub(crate) fn vocabulary(&self) -> Vec<u32> {
        let size = u32::try_from(self.decoder.get_vocab_size(false)).unwrap_or(u32::MAX);
        let readable = |&token: &u32| {
            let text = self.decode(token);
            let letters = text.trim();
            !letters.is_empty() && letters.bytes().all(|byte| byte.is_ascii_alphabetic())
        };
        (0..size).filter(readable).take(VOCABULARY_MAX).collect()
    }

    pub(crate) fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, String> {
        let tokens = self.reader.encode(text, special);
        tokens.map_err(|error| error.to_string())
    }

    pub(crate) fn decode(&self, token: u32) -> String {
        self.decoder.decode(&[token], true).unwrap_or_default()
    }

    /// A body of one of these routes, or of `/tokenize`, where the model's name may be missing.
    pub(crate) fn render_chat(
        &self,
        route: PromptRoute,
        mut request: Value,
    ) -> Result<(String, SpecialTokens), String> {
        let fields = request.as_object_mut().ok_or("the body is no object")?;
        fields.insert("model".to_owned(), json!("any"));
        let body = request.to_string();
        let parsed = openai::parse(route, body.as_bytes());
        let parsed = parsed.map_err(|error| error.to_string())?;
        let refused = parsed.info.opaque.map(OpaqueReason::as_str);
        match (&parsed.prompt, refused) {
            (PromptSource::Chat(parts), None) => {
                #[expect(clippy::cast_possible_truncation, reason = "whole seconds are wanted")]
                let now = CivilTime::from_unix(unix_seconds() as i64);
                let text = self.reader.render_chat(parts, now);
                let text = text.map_err(|error| error.to_string())?;
                Ok((text, parts.special_tokens))
            }
            (PromptSource::Chat(_), Some(reason)) => Err(format!("not supported: {reason}")),
            (PromptSource::Completion(_), _) => Err("this is no chat".to_owned()),
        }
    }
}
