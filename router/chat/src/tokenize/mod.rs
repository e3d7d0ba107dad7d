//! Text to token ids, exactly as the engine computes them: a Hugging Face tokenizer and the model's
//! chat templates. Pure and synchronous; encoding is CPU work for a blocking pool.
//!
//! [`Tokenizer`] is loaded once and shared. [`Tokenizer::encode_chat`] renders and encodes,
//! [`parity`] compares the ids with an engine's. No error here refuses a request: it means that the
//! engine's text cannot be reproduced, and the request is routed by load.
//! Absent: decoding, counting for limits, and templates sent by clients.

mod content_format;
mod messages;
pub mod parity;
mod pieces;
mod python;
mod special;
mod template;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use crate::model_files::{self, TemplateSources};
use crate::openai::{ChatParts, SpecialTokens};

pub use crate::model_files::ModelFileError;
pub use content_format::ContentFormat;
pub use pieces::PieceCacheStats;
pub use python::CivilTime;
pub use template::{ChatTemplates, RenderError, TemplateError};

use pieces::PieceEncoder;

/// A tokenizer cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerLoadError {
    #[error(transparent)]
    File(#[from] ModelFileError),
    #[error("tokenizer.json: {0}")]
    Tokenizer(String),
    #[error(transparent)]
    Template(#[from] TemplateError),
}

/// The tokenizer failed on a text, for example because it has no unknown token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot encode the text: {0}")]
pub struct TextEncodeError(String);

/// A chat has no token ids here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChatEncodeError {
    #[error(transparent)]
    Render(#[from] RenderError),
    #[error(transparent)]
    Encode(#[from] TextEncodeError),
}

/// A model's tokenizer and its chat templates.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    pieces: Option<PieceEncoder>,
    templates: Option<ChatTemplates>,
}

impl Tokenizer {
    /// Loads a directory with `tokenizer.json` and its configuration, or a bare `tokenizer.json`.
    pub fn load(path: &Path) -> Result<Self, TokenizerLoadError> {
        let files = model_files::read(path)?;
        let failed = |error: tokenizers::Error| TokenizerLoadError::Tokenizer(error.to_string());
        let mut inner = tokenizers::Tokenizer::from_bytes(&files.tokenizer).map_err(failed)?;
        // The engine truncates and pads after encoding, by its own rules.
        inner.with_truncation(None).map_err(failed)?;
        inner.with_padding(None);
        special::register(&mut inner, &files.config).map_err(failed)?;
        let tokens = special::named(&files.config);
        let templates = match files.templates {
            TemplateSources::None => None,
            TemplateSources::Single(source) => Some(ChatTemplates::single(source, tokens)?),
            TemplateSources::Named(sources) => Some(ChatTemplates::named(sources, tokens)?),
        };
        let pieces = PieceEncoder::new(&inner, &files.tokenizer);
        Ok(Self {
            inner,
            pieces,
            templates,
        })
    }

    /// This tokenizer with other templates.
    #[must_use]
    pub fn with_templates(self, templates: ChatTemplates) -> Self {
        Self {
            templates: Some(templates),
            ..self
        }
    }

    pub fn has_chat_template(&self) -> bool {
        self.templates.is_some()
    }

    /// Token ids of a text as the engine's completion route computes them.
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, TextEncodeError> {
        match &self.pieces {
            Some(pieces) => pieces.encode(&self.inner, text, special),
            None => encode_whole(&self.inner, text, special),
        }
    }

    /// The text that the model's template renders for a chat. `now` is for templates with a date.
    pub fn render_chat(&self, chat: &ChatParts<'_>, now: CivilTime) -> Result<String, RenderError> {
        self.templates
            .as_ref()
            .ok_or(RenderError::NoTemplate)?
            .render(chat, now)
    }

    /// Token ids of a chat as the engine's chat route computes them.
    pub fn encode_chat(
        &self,
        chat: &ChatParts<'_>,
        now: CivilTime,
    ) -> Result<Vec<u32>, ChatEncodeError> {
        let text = self.render_chat(chat, now)?;
        Ok(self.encode(&text, chat.special_tokens)?)
    }

    /// Counts of the piece cache; `None` if this tokenizer cannot be cached exactly.
    pub fn cache_stats(&self) -> Option<PieceCacheStats> {
        self.pieces.as_ref().map(PieceEncoder::stats)
    }
}

/// Encodes a text as a whole. The regex engine panics when one match takes it more than ten million
/// steps (a run of blanks of that length does); the engine fails on such a text as well.
fn encode_whole(
    tokenizer: &tokenizers::Tokenizer,
    text: &str,
    special: SpecialTokens,
) -> Result<Vec<u32>, TextEncodeError> {
    let encode = || tokenizer.encode_fast(text, special == SpecialTokens::Add);
    match catch_unwind(AssertUnwindSafe(encode)) {
        Ok(Ok(encoding)) => Ok(encoding.get_ids().to_vec()),
        Ok(Err(error)) => Err(TextEncodeError(error.to_string())),
        Err(_) => Err(TextEncodeError(
            "the text exceeds the regex engine's limits".to_owned(),
        )),
    }
}

/// Texts of special tokens by the names that templates use.
type SpecialTokenMap = BTreeMap<String, String>;

#[cfg(test)]
mod tests;
