//! OpenAI requests as the router reads them: [`openai`] parses bodies and streams, [`tokenize`]
//! renders chats and encodes text exactly as the engine does.
//!
//! Synchronous, without a runtime, a clock or a network. `model_files` is the one module that reads
//! files.
#![forbid(unsafe_code)]

mod convert;
mod model_files;
pub mod openai;
pub mod tokenize;
