//! Chat and text completions: from the body to the chosen engine's answer.

use std::sync::Arc;

use axum::extract::Request;
use axum::http::request::Parts;
use axum::response::Response;
use bytes::Bytes;
use tokio::time::Instant;
use warmroute_proto::query::IndexAnswer;

use super::App;
use super::call::Call;
use super::forward::{Answered, Outgoing, Wish};
use super::headers;
use super::plan::{Grounds, Plan, plan};
use super::respond::respond;
use super::stream::OnUsage;
use crate::audit::Case;
use crate::clock::civil_now;
use crate::error::ApiError;
use crate::metrics::{DecisionStep, RouteLabel};
use crate::openai;
use crate::route::Policy;

/// Below, reading a body takes about as long as handing it to another thread and back.
const INLINE_BYTES: usize = 16 << 10;

pub(super) async fn generate(app: &App, route: openai::PromptRoute, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let label = match route {
        openai::PromptRoute::ChatCompletions => RouteLabel::Chat,
        openai::PromptRoute::Completions => RouteLabel::Completions,
    };
    let call = Call::new(label, &parts.headers, Arc::clone(&app.metrics));
    let buffered = match app.budget.read(&parts.headers, body).await {
        Ok(buffered) => buffered,
        Err(error) => return call.refuse(&error),
    };
    let asked = Asked {
        route,
        body: buffered.bytes.clone(),
        since: Instant::now(),
    };
    match serve(app, &call, asked, parts).await {
        Ok((answered, on_usage)) => respond(app, call, answered, on_usage),
        Err(error) => call.refuse(&error),
    }
}

/// A whole request, before it is understood.
struct Asked {
    route: openai::PromptRoute,
    body: Bytes,
    /// When the body was whole.
    since: Instant,
}

async fn serve(
    app: &App,
    call: &Call,
    asked: Asked,
    parts: Parts,
) -> Result<(Answered, Option<OnUsage>), ApiError> {
    let plan = app.plan(asked.route, asked.body.clone()).await?;
    let Plan {
        model,
        prompt,
        streaming,
        single,
        unhashed,
        rewritten,
    } = plan;
    let prompt = Arc::new(prompt);
    let index = match unhashed {
        None => app.ask_index(&prompt).await,
        Some(why) => {
            app.metrics.unhashed(why);
            None
        }
    };
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let outgoing = Outgoing {
        method: parts.method.clone(),
        path: path.to_owned(),
        headers: headers::towards_engine(parts.headers, call.request_id()),
        body: rewritten.unwrap_or(asked.body),
    };
    let wish = Wish {
        model,
        prompt,
        index,
        streaming,
        movable: true,
    };
    app.metrics.decided(asked.since.elapsed());
    let mut answered = app.forward(call, &outgoing, &wish).await?;
    let request_id = call.request_id().to_str().unwrap_or("-");
    let decision = &mut answered.decision;
    let left = answered.left.take();
    let entry = app
        .journal
        .record((request_id, &wish.model), decision, left);
    let case = single.then(|| Case {
        prompt: wish.prompt,
        decision: answered.decision.clone(),
        entry,
    });
    let on_usage = case.map(|case| -> OnUsage {
        let auditor = Arc::clone(&app.auditor);
        Box::new(move |usage| auditor.reported(case, usage))
    });
    Ok((answered, on_usage))
}

impl App {
    /// Understands a body: short ones at once, long ones where they do not keep others waiting.
    async fn plan(&self, route: openai::PromptRoute, body: Bytes) -> Result<Plan, ApiError> {
        let grounds = Grounds {
            catalog: self.fleet.catalog(),
            tokenizer: self.tokenizer.clone(),
            now: civil_now(),
        };
        let started = Instant::now();
        let planned = if body.len() <= INLINE_BYTES {
            plan(route, &body, &grounds)
        } else {
            let permit = Arc::clone(&self.readers)
                .acquire_owned()
                .await
                .map_err(|_| ApiError::Internal("the readers are gone"))?;
            let read = move || {
                let planned = plan(route, &body, &grounds);
                drop(permit);
                planned
            };
            tokio::task::spawn_blocking(read)
                .await
                .map_err(|_| ApiError::Internal("reading the request failed"))?
        };
        self.metrics.step(DecisionStep::Read, started.elapsed());
        planned
    }

    async fn ask_index(&self, prompt: &crate::route::Prompt) -> Option<IndexAnswer> {
        match self.policy {
            Policy::Kv | Policy::KvOnce => {}
            Policy::RoundRobin | Policy::LeastLoad | Policy::Random => return None,
        }
        let started = Instant::now();
        let answer = self.index.ask(prompt.blocks()).await;
        self.metrics.step(DecisionStep::Index, started.elapsed());
        answer
            .inspect_err(|error| {
                self.metrics.index_failed();
                tracing::debug!(%error, "the index did not answer");
            })
            .ok()
    }
}
