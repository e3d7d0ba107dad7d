//! OpenAI's request and response forms, as far as routing needs them. Pure.
//!
//! A request is read in place, and the engine receives the client's bytes (except for one option,
//! see [`ParsedRequest::rewritten`]). The parser refuses only what no engine accepts. A field
//! that it cannot read makes the prompt [`OpaqueReason`]: the request is routed by load, and the
//! engine judges the field.
//! Absent: validation of sampling parameters, knowledge of models, building of responses.

mod chat;
mod completion;
mod converted;
mod embed;
mod error;
mod fields;
mod form;
mod impose;
mod legs;
mod pooling;
mod prompt_slot;
mod rendered;
mod request;
mod resume;
mod rewrite;
mod sse;
mod token_ids;
mod usage;

pub use chat::{ChatApi, ChatEnding, ChatParts, ThinkingRequest, ToolChoice};
pub use completion::{CompletionParts, PromptList};
pub use error::{ErrorType, OpenAiError};
pub use form::{UnreadableForm, form_field, is_form, require_form};
pub use impose::{ImposedFields, OutputBound, PriorityRule, RefusedField, SaltFn, impose};
pub use legs::{UnsplitBody, decode_body, prefill_body};
pub use prompt_slot::PromptSlot;
pub use rendered::{RenderedPrompt, UnusableRendering, render_body, render_path};
pub use request::{
    OpaqueReason, ParsedRequest, PromptRoute, PromptSource, RequestInfo, added_route, parse,
    parse_admitted,
};
pub use resume::{ResumableStream, ResumeTerms, StreamBytes, with_token_ids};
pub use rewrite::without_python_numbers;
pub use sse::{SseEvent, SseSplitter, StreamObserver, is_error};
pub use usage::TokenUsage;

pub(crate) use chat::outside_strings;

/// Whether the tokenizer's post-processor may add special tokens (such as BOS) to a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    Add,
    Omit,
}

impl SpecialTokens {
    fn from_flag(add: Option<bool>, default: Self) -> Self {
        match add {
            Some(true) => Self::Add,
            Some(false) => Self::Omit,
            None => default,
        }
    }
}
