//! Text to token ids, exactly as the engine does it: a Hugging Face tokenizer and the model's chat
//! templates. Pure and synchronous; encoding is CPU work that a shell may put on a blocking pool.
//!
//! [`Tokenizer`] is loaded once and shared. [`Tokenizer::encode_chat`] renders and encodes,
//! [`parity`] asks whether the engine agrees. Nothing here refuses a request: where the engine's
//! text cannot be reproduced there is an error that means "route by load".
//! Deliberately absent: decoding, counting for limits, and templates that clients send.

mod content_format;
mod messages;
pub mod parity;
mod python;
mod segments;
mod special;
mod template;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use crate::openai::{ChatParts, SpecialTokens};

pub use crate::files::FileError;
pub use content_format::ContentFormat;
pub use python::CivilTime;
pub use segments::CacheStats;
pub use template::{ChatTemplates, RenderError, TemplateError};

use crate::files::{self, Templates};
use segments::Segments;

/// Why a tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("tokenizer.json: {0}")]
    Tokenizer(String),
    #[error(transparent)]
    Template(#[from] TemplateError),
}

/// The tokenizer failed on a text, for example for lack of an unknown token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot encode the text: {0}")]
pub struct EncodeError(pub(crate) String);

/// Why there are no token ids for a chat.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChatError {
    #[error(transparent)]
    Render(#[from] RenderError),
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

/// A model's tokenizer and its chat templates.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    segments: Option<Segments>,
    templates: Option<ChatTemplates>,
}

impl Tokenizer {
    /// Loads a directory with `tokenizer.json` and its neighbours, or a bare `tokenizer.json`.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        let files = files::read(path)?;
        let failed = |error: tokenizers::Error| LoadError::Tokenizer(error.to_string());
        let mut inner = tokenizers::Tokenizer::from_bytes(&files.tokenizer).map_err(failed)?;
        // The engine truncates and pads for itself, after encoding.
        inner.with_truncation(None).map_err(failed)?;
        inner.with_padding(None);
        special::register(&mut inner, &files.config).map_err(failed)?;
        let tokens = special::named(&files.config);
        let templates = match files.templates {
            Templates::None => None,
            Templates::Single(source) => Some(ChatTemplates::single(source, tokens)?),
            Templates::Named(sources) => Some(ChatTemplates::named(sources, tokens)?),
        };
        let segments = Segments::new(&inner, &files.tokenizer);
        Ok(Self {
            inner,
            segments,
            templates,
        })
    }

    /// The same tokenizer with other templates.
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

    /// Token ids of a text as the engine's completion route makes them.
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, EncodeError> {
        let Some(segments) = &self.segments else {
            return encode_plain(&self.inner, text, special == SpecialTokens::Add);
        };
        let ids = segments.encode(&self.inner, text)?;
        Ok(match special {
            SpecialTokens::Add => segments.surround(ids),
            SpecialTokens::Omit => ids,
        })
    }

    /// The text that the model's template makes of a chat. `now` is for templates with a date.
    pub fn render_chat(&self, chat: &ChatParts<'_>, now: CivilTime) -> Result<String, RenderError> {
        self.templates
            .as_ref()
            .ok_or(RenderError::NoTemplate)?
            .render(chat, now)
    }

    /// Token ids of a chat as the engine's chat route makes them.
    pub fn encode_chat(&self, chat: &ChatParts<'_>, now: CivilTime) -> Result<Vec<u32>, ChatError> {
        let text = self.render_chat(chat, now)?;
        Ok(self.encode(&text, chat.special_tokens)?)
    }

    /// How the cache of encoded pieces does; nothing if this tokenizer cannot be cached exactly.
    pub fn cache_stats(&self) -> Option<CacheStats> {
        self.segments.as_ref().map(Segments::stats)
    }
}

/// Encodes a text as a whole. The regex engine panics when one match takes it more than ten million
/// steps (a run of blanks of that length does); such a text fails in the engine as well.
pub(crate) fn encode_plain(
    tokenizer: &tokenizers::Tokenizer,
    text: &str,
    special: bool,
) -> Result<Vec<u32>, EncodeError> {
    let encode = || tokenizer.encode_fast(text, special);
    match catch_unwind(AssertUnwindSafe(encode)) {
        Ok(Ok(encoding)) => Ok(encoding.get_ids().to_vec()),
        Ok(Err(error)) => Err(EncodeError(error.to_string())),
        Err(_) => Err(EncodeError(
            "the text is beyond the regex engine's limits".to_owned(),
        )),
    }
}

/// Named special tokens, as templates see them.
type SpecialTokenMap = BTreeMap<String, String>;

#[cfg(test)]
mod tests;
