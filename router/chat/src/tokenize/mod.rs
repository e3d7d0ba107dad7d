//! Text to token ids, exactly as the engine computes them: a Hugging Face tokenizer and the model's
//! chat templates. Pure and synchronous; encoding is CPU work for a blocking pool.
//!
//! [`Tokenizer`] is loaded once and shared. [`Tokenizer::encode_chat`] renders and encodes,
//! [`parity`] compares the ids with an engine's. No error here refuses a request: it means that the
//! engine's text cannot be reproduced, and the request is routed by load.
//! Absent: decoding, counting for limits, and templates sent by clients.

mod added;
mod bpe;
mod compare;
mod content_format;
mod kwargs;
mod messages;
pub mod parity;
mod python;
mod segment_cache;
mod special;
mod template;
mod text_task;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde_json::Value;

use crate::model_files::TemplateSources;
use crate::openai::{ChatParts, SpecialTokens};

pub use crate::convert::ConversionError;
pub use crate::model_files::{ModelFileError, ModelFiles, ModelSource, TemplateRules, UnusedTools};
pub use compare::{ComparisonCounts, ReferenceComparison};
pub use content_format::ContentFormat;
pub use python::CivilTime;
pub use segment_cache::{CacheScope, SegmentCacheStats};
pub use template::{
    ChatTemplates, IsCancelled, RenderBound, RenderError, RenderLimits, TemplateError,
};
pub use text_task::{TaskState, TextTask};

pub(crate) use bpe::byte_level_alphabet;
pub(crate) use special::special_names;

use added::AddedTokens;
use bpe::BpeEncoder;
use segment_cache::SegmentCache;

/// Largest text for the reference.
const REFERENCE_BYTES_MAX: usize = 1 << 20;

/// Memory for each byte of a text while the reference encodes it (`examples/prompt_bench.rs`).
const REFERENCE_MEMORY_OF_BYTE: usize = 160;

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

/// A text has no token ids here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextEncodeError {
    /// For example because the model has no unknown token.
    #[error("cannot encode the text: {0}")]
    Failed(String),
    #[error("a word of the text is longer than {max} bytes", max = bpe::WORD_BYTES_MAX)]
    LongWord,
    #[error("a part of the text is too long to be normalized or split into words")]
    LongPart,
    #[error("the text is longer than {REFERENCE_BYTES_MAX} bytes")]
    LongText,
    #[error("the text has more tokens than the model takes")]
    TooManyTokens,
}

/// A chat has no token ids here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChatEncodeError {
    #[error(transparent)]
    Render(#[from] RenderError),
    #[error(transparent)]
    Encode(#[from] TextEncodeError),
}

/// The encoder that makes the token ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncoderKind {
    Own,
    /// The library that engines use, for models that the own encoder does not know, and after a
    /// difference between the two.
    Reference,
}

/// A model's tokenizer and its chat templates.
#[derive(Debug)]
pub struct Tokenizer {
    reference: tokenizers::Tokenizer,
    /// `None`: texts are encoded as a whole, by the reference.
    splitting: Option<Splitting>,
    own: Option<BpeEncoder>,
    own_differs: AtomicBool,
    compared_equal: AtomicU64,
    compared_different: AtomicU64,
    cache: SegmentCache,
    /// The error says why there are none.
    templates: Result<ChatTemplates, RenderError>,
    /// The class or type by which transformers may have other rules.
    rules_of: Option<String>,
}

/// What makes the ids of a text from those of its pieces.
#[derive(Debug)]
struct Splitting {
    added: AddedTokens,
    /// Ids that the post-processor puts before and after a text.
    before: Vec<u32>,
    after: Vec<u32>,
    /// Whether the reference encodes a piece alike wherever it lies.
    reference_is_local: bool,
}

impl Tokenizer {
    /// Loads a directory with a tokenizer's file and its configuration, or a bare `tokenizer.json`.
    pub fn load(path: &Path) -> Result<Self, TokenizerLoadError> {
        let source = ModelSource {
            path: path.to_owned(),
            ..ModelSource::default()
        };
        Self::of_files(source.read()?)
    }

    /// A tokenizer of a model's files as they were read.
    pub fn of_files(files: ModelFiles) -> Result<Self, TokenizerLoadError> {
        let tokens = special::named(&files.config);
        let templates = match files.templates {
            TemplateSources::None => Err(RenderError::NoTemplate),
            TemplateSources::OwnRenderer(name) => Err(RenderError::OwnRenderer(name)),
            TemplateSources::Single(source) => Ok(ChatTemplates::single(source, tokens)?),
            TemplateSources::Named(sources) => Ok(ChatTemplates::named(sources, tokens)?),
        };
        let failed = |error: tokenizers::Error| TokenizerLoadError::Tokenizer(error.to_string());
        let mut reference = tokenizers::Tokenizer::from_bytes(&files.tokenizer).map_err(failed)?;
        special::register(&mut reference, &files.config).map_err(failed)?;
        Ok(Self {
            templates: templates.map(|templates| templates.with_rules(files.rules)),
            rules_of: files.rules_of,
            ..Self::of_reference(reference, &files.tokenizer).map_err(failed)?
        })
    }

    /// A tokenizer without templates, from its definition and the reference that reads it.
    fn of_reference(
        mut reference: tokenizers::Tokenizer,
        definition: &[u8],
    ) -> tokenizers::Result<Self> {
        // The engine truncates and pads after encoding, by its own rules.
        reference.with_truncation(None)?;
        reference.with_padding(None);
        let definition: Value = serde_json::from_slice(definition)?;
        let splitting = Splitting::new(&reference, &definition);
        let keeps_tokens = |own: &BpeEncoder| {
            let added = reference.get_added_tokens_decoder();
            let mut added = added.into_values();
            added.all(|token| !token.normalized || own.keeps(&token.content))
        };
        let own = splitting
            .as_ref()
            .and_then(|_| BpeEncoder::new(&definition));
        Ok(Self {
            own: own.filter(keeps_tokens),
            splitting,
            reference,
            own_differs: AtomicBool::new(false),
            compared_equal: AtomicU64::new(0),
            compared_different: AtomicU64::new(0),
            cache: SegmentCache::new(),
            templates: Err(RenderError::NoTemplate),
            rules_of: None,
        })
    }

    /// This tokenizer with other templates.
    #[must_use]
    pub fn with_templates(self, templates: ChatTemplates) -> Self {
        Self {
            templates: Ok(templates),
            ..self
        }
    }

    /// Why an engine may have other token ids although its files are the same.
    pub fn other_rules(&self) -> Option<String> {
        let name = self.rules_of.as_ref()?;
        Some(format!(
            "transformers may build the rules of {name} itself, whatever tokenizer.json says"
        ))
    }

    pub fn encoder(&self) -> EncoderKind {
        if self.own.is_some() && !self.own_differs.load(Ordering::Relaxed) {
            EncoderKind::Own
        } else {
            EncoderKind::Reference
        }
    }

    /// Bytes of the longest token; `None` if that is not known.
    pub fn token_bytes_max(&self) -> Option<usize> {
        self.own.as_ref().map(BpeEncoder::token_bytes_max)
    }

    /// Memory of the largest step in which a text of so many bytes is encoded, beside the text and its
    /// ids.
    pub fn step_memory(&self, text_bytes: usize) -> usize {
        match self.encoder() {
            EncoderKind::Own => 0,
            EncoderKind::Reference => {
                text_bytes.min(REFERENCE_BYTES_MAX) * REFERENCE_MEMORY_OF_BYTE
            }
        }
    }

    /// Token ids of a text as the engine's completion route computes them.
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, TextEncodeError> {
        let mut task = self.task(text, special);
        while task.step(self, usize::MAX)? == TaskState::More {}
        Ok(task.into_ids())
    }

    /// An encoding in steps.
    pub fn task<T: AsRef<str>>(&self, text: T, special: SpecialTokens) -> TextTask<T> {
        TextTask::new(self, text, special)
    }

    /// The model's templates.
    pub fn templates(&self) -> Result<&ChatTemplates, RenderError> {
        self.templates.as_ref().map_err(Clone::clone)
    }

    /// The text that the model's template renders for a chat. `now` is for templates with a date.
    pub fn render_chat(&self, chat: &ChatParts<'_>, now: CivilTime) -> Result<String, RenderError> {
        self.templates()?.render(chat, now)
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

    /// Bounds the cache of token ids.
    pub fn set_cache_bytes_max(&self, bytes: usize) {
        self.cache.set_bytes_max(bytes);
    }

    pub fn cache_stats(&self) -> SegmentCacheStats {
        self.cache.stats()
    }

    fn splitting(&self, encoder: EncoderKind) -> Option<&Splitting> {
        let splitting = self.splitting.as_ref();
        splitting.filter(|s| encoder == EncoderKind::Own || s.reference_is_local)
    }

    /// Appends the ids of a piece between two added tokens.
    fn append_by_reference(
        &self,
        piece: &str,
        scope: CacheScope,
        ids: &mut Vec<u32>,
    ) -> Result<(), TextEncodeError> {
        const VARIANT: u64 = 2;
        let key = self.cache.key(piece, scope, VARIANT);
        if self
            .cache
            .append(key, ids, |kept| kept == piece.as_bytes())
            .is_none()
        {
            let encoded = self.encode_by_reference(piece, SpecialTokens::Omit)?;
            self.cache.put(key, piece, &encoded);
            ids.extend_from_slice(&encoded);
        }
        Ok(())
    }

    fn encode_by_reference(
        &self,
        text: &str,
        special: SpecialTokens,
    ) -> Result<Vec<u32>, TextEncodeError> {
        if text.len() > REFERENCE_BYTES_MAX {
            return Err(TextEncodeError::LongText);
        }
        encode_whole(&self.reference, text, special)
    }
}

impl Splitting {
    fn new(reference: &tokenizers::Tokenizer, definition: &Value) -> Option<Self> {
        let dropout = &definition["model"]["dropout"];
        if !dropout.is_null() && dropout.as_f64() != Some(0.0) {
            return None;
        }
        let (before, after) = surrounding_ids(reference)?;
        Some(Self {
            added: AddedTokens::new(reference)?,
            before,
            after,
            reference_is_local: !depends_on_position(&definition["pre_tokenizer"]),
        })
    }
}

/// Whether a metaspace is put before the first piece only.
fn depends_on_position(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer {
        Value::Object(map) => {
            map.get("prepend_scheme")
                .is_some_and(|scheme| scheme == "first")
                || map.values().any(depends_on_position)
        }
        Value::Array(list) => list.iter().any(depends_on_position),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

/// The ids before and after those of a text when special tokens are added.
fn surrounding_ids(tokenizer: &tokenizers::Tokenizer) -> Option<(Vec<u32>, Vec<u32>)> {
    const PROBE: &str = "probe text";
    let plain = encode_whole(tokenizer, PROBE, SpecialTokens::Omit).ok()?;
    let whole = encode_whole(tokenizer, PROBE, SpecialTokens::Add).ok()?;
    let at = whole
        .windows(plain.len().max(1))
        .position(|window| window == plain)?;
    Some((whole[..at].to_vec(), whole[at + plain.len()..].to_vec()))
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
        Ok(Err(error)) => Err(TextEncodeError::Failed(error.to_string())),
        Err(_) => {
            let reason = "the text exceeds the regex engine's limits";
            Err(TextEncodeError::Failed(reason.to_owned()))
        }
    }
}

/// Texts of special tokens by the names that templates use.
type SpecialTokenMap = BTreeMap<String, String>;

#[cfg(test)]
mod tests;
