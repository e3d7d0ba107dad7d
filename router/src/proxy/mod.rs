//! The public port: its routes ([`routes`]) and what a request on them goes through.
//!
//! A request's body is read whole ([`body`]), planned ([`plan`]), looked up in the index, forwarded
//! to a worker ([`forward`]), and the answer is passed on as it comes ([`stream`]). Decisions are
//! made by pure code elsewhere; this module waits, sends and copies bytes.

mod attempt;
mod body;
mod call;
mod early_bytes;
mod engine_body;
mod engine_client;
mod explanation;
mod forward;
pub(crate) mod gateway;
mod generate;
mod headers;
mod images;
mod legs;
mod models;
mod passthrough;
mod peer_hints;
mod plan;
mod prompt_jobs;
mod prompt_pool;
mod queueing;
mod respond;
mod resume;
mod routes;
mod silence;
mod stored;
mod stream;
mod waiting;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use axum::body::Body;
use axum::http::request::Parts;
use warmroute_process::blocking;

pub(crate) use body::{BodyBudget, BudgetShare};
pub(crate) use engine_body::{BodyPiece, GatewayBody};
pub(crate) use engine_client::{EngineClient, EngineFiles};
pub(crate) use prompt_pool::PromptPool;
pub(crate) use routes::router;
pub(crate) use stored::StoredResponses;
pub(crate) use waiting::HeldRequests;

use crate::admission::Admission;
use crate::audit::Auditor;
use crate::call_report::CallSinks;
use crate::error::ProxyError;
use crate::fleet::Fleet;
use crate::index_client::IndexClient;
use crate::indexer_pool::IndexFault;
use crate::journal::Journal;
use crate::metrics::Metrics;
use crate::openai::OpenAiError;
use crate::ready::Ready;
use crate::retry_budget::RetryBudget;
use crate::route::Policy;
use crate::settings::LiveSettings;
use crate::shared_core::SharedCore;
use crate::tenants::{TenantVisit, Tenants};
use crate::tokenizers::Tokenizers;
use body::{BufferedBody, head_bytes};
use call::Call;
use generate::INLINE_BYTES_MAX;
use peer_hints::TenantName;

/// Everything that a request needs.
pub(crate) struct App {
    pub core: Arc<SharedCore>,
    pub fleet: Arc<Fleet>,
    pub index: IndexClient,
    pub auditor: Auditor,
    pub journal: Arc<Journal>,
    pub metrics: Arc<Metrics>,
    pub sinks: Arc<CallSinks>,
    pub bodies: BodyBudget,
    pub engines: EngineClient,
    pub tokenizers: Arc<Tokenizers>,
    pub policy: Policy,
    pub settings: Arc<LiveSettings>,
    /// Threads for large prompts.
    pub prompts: PromptPool,
    /// Prompts so far.
    pub planned: AtomicU64,
    pub ready: Arc<Ready>,
    pub held: HeldRequests,
    pub retries: RetryBudget,
    pub admission: Arc<Admission>,
    pub stored: StoredResponses,
    pub tenants: Arc<Tenants>,
}

impl App {
    /// Why prompts that need the index are routed without it, as far as is known.
    pub(crate) fn index_fault(&self) -> Option<IndexFault> {
        let is_read = self.policy.reads_index();
        is_read.then(|| self.index.fault()).flatten()
    }
}

/// What changes a request's body.
enum BodyRule {
    Tenant(Arc<TenantVisit>),
    Hint(TenantName),
}

impl BodyRule {
    fn adds_members(&self) -> bool {
        match self {
            Self::Tenant(visit) => visit.adds_members(),
            Self::Hint(_) => true,
        }
    }

    /// The body for the engine; `None` if it is the client's.
    fn imposed(&self, path: &str, body: &[u8]) -> Result<Option<Vec<u8>>, OpenAiError> {
        match self {
            Self::Tenant(visit) => visit.imposed(path, body),
            Self::Hint(tenant) => tenant.imposed(path, body),
        }
    }
}

impl App {
    /// Reads a request's body, and applies its tenant's rules to it.
    async fn read_body(
        &self,
        call: &Call,
        head: &Parts,
        body: Body,
    ) -> Result<BufferedBody, ProxyError> {
        let mut body = self
            .bodies
            .read(&head.headers, head_bytes(head), body)
            .await?;
        let path = head.uri.path();
        let ruled = |visit: &&Arc<TenantVisit>| visit.changes_body(&head.method, path);
        let rule = match call.tenant() {
            Some(_) => call.tenant().filter(ruled).cloned().map(BodyRule::Tenant),
            None => head.extensions.get().cloned().map(BodyRule::Hint),
        };
        let Some(rule) = rule else {
            return Ok(body);
        };
        let imposed = if body.bytes.len() <= INLINE_BYTES_MAX {
            rule.imposed(path, &body.bytes)
        } else {
            // The client's bytes are kept until the copy is whole.
            let copied = if rule.adds_members() {
                body.bytes.len()
            } else {
                0
            };
            let copy = self.bodies.charge(copied);
            let copy = copy.ok_or(ProxyError::BuffersFull)?;
            let (path, body) = (path.to_owned(), body.clone());
            let imposed = blocking::run(move || {
                let imposed = rule.imposed(&path, &body.bytes);
                drop((body, copy));
                imposed
            });
            let imposed = imposed.await;
            imposed.map_err(|_| ProxyError::Internal("reading the body failed"))?
        };
        if let Some(imposed) = imposed? {
            self.bodies.replace(&mut body, imposed.into())?;
        }
        Ok(body)
    }
}
