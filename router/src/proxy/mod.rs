//! The public port: its routes ([`routes`]) and what a request on them goes through.
//!
//! A request's body is read whole ([`body`]), planned ([`plan`]), looked up in the index, forwarded
//! to a worker ([`forward`]), and the answer is passed on as it comes ([`stream`]). Decisions are
//! made by pure code elsewhere; this module waits, sends and copies bytes.

mod attempt;
mod body;
mod call;
mod engine_client;
mod forward;
mod generate;
mod headers;
mod models;
mod passthrough;
mod plan;
mod prompt_jobs;
mod prompt_pool;
mod respond;
mod routes;
mod stored;
mod stream;
mod waiting;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

pub(crate) use body::BodyBudget;
pub(crate) use engine_client::EngineClient;
pub(crate) use prompt_pool::PromptPool;
pub(crate) use routes::router;
pub(crate) use stored::StoredResponses;
pub(crate) use waiting::HeldRequests;

use crate::audit::Auditor;
use crate::fleet::Fleet;
use crate::index_client::IndexClient;
use crate::journal::Journal;
use crate::metrics::Metrics;
use crate::ready::Ready;
use crate::recorder::Recorder;
use crate::route::Policy;
use crate::settings::LiveSettings;
use crate::shared_core::SharedCore;
use crate::tokenize::Tokenizer;

/// Everything that a request needs.
pub(crate) struct App {
    pub core: Arc<SharedCore>,
    pub fleet: Arc<Fleet>,
    pub index: IndexClient,
    pub auditor: Auditor,
    pub journal: Arc<Journal>,
    pub metrics: Arc<Metrics>,
    pub bodies: BodyBudget,
    pub engines: EngineClient,
    pub tokenizer: Option<Arc<Tokenizer>>,
    pub policy: Policy,
    pub settings: Arc<LiveSettings>,
    /// Threads for large prompts.
    pub prompts: PromptPool,
    /// Prompts so far.
    pub planned: AtomicU64,
    pub recorder: Recorder,
    pub ready: Arc<Ready>,
    pub held: HeldRequests,
    pub stored: StoredResponses,
}
