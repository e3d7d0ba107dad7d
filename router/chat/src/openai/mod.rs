//! OpenAI's request and response forms, as far as routing needs them. Pure.
//!
//! A request is read in place: the body's bytes stay what the client sent, and what goes to the
//! engine is those bytes (one engine option excepted, see [`ParsedRequest::forward_body`]). The
//! parser refuses only what no engine can accept. A field that it does not understand makes the
//! prompt [`Opaque`]: such a request is routed by load and the engine judges it.
//! What it does not do: validate sampling parameters, know models, or build responses.

mod chat;
mod completion;
mod error;
pub(crate) mod fields;
mod request;
mod rewrite;
mod sse;
mod usage;

pub use chat::{ChatParts, Generation};
pub use completion::{CompletionParts, Prompts};
pub use error::{ApiError, ErrorType};
pub use request::{Limits, Opaque, ParsedRequest, Prompt, RequestInfo, Route, parse};
pub use sse::{Event, SseSplitter, StreamWatch};
pub use usage::Usage;

/// Whether the tokenizer's post-processor may add special tokens (such as BOS) to a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    Add,
    Omit,
}
