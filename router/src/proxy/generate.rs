//! Chat and text completions: from the body to the chosen engine's answer.

use std::sync::Arc;

use axum::extract::Request;
use axum::http::request::Parts;
use axum::response::Response;
use bytes::Bytes;
use tokio::time::Instant;
use warmroute_proto::query::IndexAnswer;
use warmroute_proto::{Tiers, WorkerId};

use super::App;
use super::call::Call;
use super::forward::{EngineAnswer, ForwardedRequest, Routing};
use super::headers;
use super::plan::{Plan, PlanInputs, plan};
use super::respond::{AnswerReaders, respond};
use super::stream::OnUsage;
use super::waiting::WorkerWait;
use crate::audit::AuditCase;
use crate::clock::civil_now;
use crate::error::ProxyError;
use crate::metrics::{DecisionStep, RouteLabel};
use crate::openai;
use crate::route::Prompt;

/// Bodies above are parsed on another thread; below, the hand-over takes about as long as the
/// parsing.
const INLINE_BYTES_MAX: usize = 16 << 10;

pub(super) async fn generate(app: &App, route: openai::PromptRoute, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let label = match route {
        openai::PromptRoute::ChatCompletions => RouteLabel::Chat,
        openai::PromptRoute::Completions => RouteLabel::Completions,
    };
    let call = Call::new(label, &parts.headers, &app.metrics);
    // Held until the answer begins, and with it the body's share of the budget.
    let body = match app.bodies.read(&parts.headers, body).await {
        Ok(body) => body,
        Err(error) => return call.refuse(&error),
    };
    match serve(app, &call, route, parts, body.bytes.clone()).await {
        Ok((answer, on_usage)) => {
            let readers = AnswerReaders {
                on_usage,
                on_beginning: None,
            };
            respond(app, call, answer, readers)
        }
        Err(error) => call.refuse(&error),
    }
}

async fn serve(
    app: &App,
    call: &Call,
    route: openai::PromptRoute,
    parts: Parts,
    body: Bytes,
) -> Result<(EngineAnswer, Option<OnUsage>), ProxyError> {
    let complete = Instant::now();
    let mut wait = WorkerWait::default();
    let plan = loop {
        match app.plan(route, body.clone()).await {
            Ok(plan) => break plan,
            Err(error) if wait.before_retry(app, &error).await => {}
            Err(error) => return Err(error),
        }
    };
    let Plan {
        model,
        prompt,
        streaming,
        single,
        unhashed,
        mismatched,
        rewritten,
    } = plan;
    let index = match unhashed {
        None => {
            let answer = app.query_index(&prompt).await;
            answer.map(|answer| without_credit(answer, &mismatched))
        }
        Some(reason) => {
            app.metrics.unhashed(reason);
            None
        }
    };
    let request = ForwardedRequest {
        method: parts.method,
        path: headers::path(&parts.uri),
        headers: headers::to_engine(parts.headers, call.request_id()),
        body: rewritten.unwrap_or(body),
    };
    let routing = Routing {
        model,
        prompt: Arc::new(prompt),
        index,
        streaming,
        movable: true,
        exclude: Vec::new(),
    };
    app.metrics.decided(complete.elapsed());
    let mut answer = app.forward(call, &request, &routing, &mut wait).await?;
    let request_id = call.request_id().to_str().unwrap_or("-");
    let placement = &mut answer.placement;
    let moved_from = placement.moved_from.take();
    let decision = &mut placement.decision;
    let entry = app
        .journal
        .record(request_id, &routing.model, decision, moved_from);
    let on_usage = single.then(|| -> OnUsage {
        let case = AuditCase {
            prompt: routing.prompt,
            decision: decision.clone(),
            entry,
        };
        let auditor = app.auditor.clone();
        Box::new(move |usage| auditor.reported(case, usage))
    });
    Ok((answer, on_usage))
}

/// The answer without the caches of `mismatched` workers: their blocks have other tokens.
fn without_credit(mut answer: IndexAnswer, mismatched: &[WorkerId]) -> IndexAnswer {
    if let IndexAnswer::Runs { sources, .. } = &mut answer {
        for source in sources {
            if mismatched.contains(&source.source.worker) {
                source.run = Tiers::default();
            }
        }
    }
    answer
}

impl App {
    async fn plan(&self, route: openai::PromptRoute, body: Bytes) -> Result<Plan, ProxyError> {
        let inputs = PlanInputs {
            catalog: self.fleet.catalog(),
            tokenizer: self.tokenizer.clone(),
            policy: self.policy,
            now: civil_now(),
        };
        let started = Instant::now();
        let planned = if body.len() <= INLINE_BYTES_MAX {
            plan(route, &body, &inputs)
        } else {
            let permit = Arc::clone(&self.parsers).acquire_owned().await;
            let permit = permit.map_err(|_| ProxyError::Internal("parsing has ended"))?;
            let parse = move || {
                let planned = plan(route, &body, &inputs);
                drop(permit);
                planned
            };
            tokio::task::spawn_blocking(parse)
                .await
                .map_err(|_| ProxyError::Internal("parsing the request failed"))?
        };
        self.metrics.step(DecisionStep::Read, started.elapsed());
        planned
    }

    async fn query_index(&self, prompt: &Prompt) -> Option<IndexAnswer> {
        let started = Instant::now();
        let answer = self.index.ask(prompt.hit_blocks()).await;
        self.metrics.step(DecisionStep::Index, started.elapsed());
        answer
            .inspect_err(|error| {
                self.metrics.index_failed();
                tracing::debug!(%error, "index did not answer");
            })
            .ok()
    }
}
