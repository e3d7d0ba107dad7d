//! Chat and text completions: from the body to the chosen engine's answer.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::Request;
use axum::http::request::Parts;
use axum::response::Response;
use tokio::time::Instant;

use super::App;
use super::body::BufferedBody;
use super::call::Call;
use super::forward::{EngineAnswer, ForwardedRequest, Routing};
use super::headers;
use super::plan::{Plan, PlanInputs, TextSample, TextSampling, plan};
use super::prompt_jobs::{CompareJob, PlanJob};
use super::respond::{AnswerReaders, respond};
use super::stream::OnUsage;
use super::waiting::WorkerWait;
use crate::audit::AuditCase;
use crate::clock::civil_now;
use crate::error::ProxyError;
use crate::journal::EntryNumber;
use crate::metrics::{DecisionStep, RouteLabel};
use crate::openai;
use crate::recorder::OpenRecord;
use crate::route::{Decision, IndexReply, Prompt};
use crate::tokenize::EncoderKind;

/// Bodies above are prepared on another thread; below, that takes less than a millisecond.
const INLINE_BYTES_MAX: usize = 16 << 10;

/// Likewise, with the slower reference encoder.
const INLINE_REFERENCE_BYTES_MAX: usize = 1 << 10;

/// One in so many prompts is encoded by the reference too.
const COMPARED_ONE_IN: u64 = 1024;

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
    match serve(app, &call, route, parts, &body).await {
        Ok((answer, readers)) => respond(app, call, answer, readers),
        Err(error) => call.refuse(&error),
    }
}

async fn serve(
    app: &App,
    call: &Call,
    route: openai::PromptRoute,
    parts: Parts,
    body: &BufferedBody,
) -> Result<(EngineAnswer, AnswerReaders), ProxyError> {
    let complete = Instant::now();
    let mut wait = WorkerWait::default();
    let plan = loop {
        match app.plan(route, body).await {
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
        rewritten,
        sample,
    } = plan;
    if let Some(sample) = sample {
        app.compare_encoders(sample);
    }
    let index = match unhashed {
        None => app.query_index(&prompt).await,
        Some(reason) => {
            app.metrics.unhashed(reason);
            None
        }
    };
    let request = ForwardedRequest {
        method: parts.method,
        path: headers::path(&parts.uri),
        headers: headers::to_engine(parts.headers, call.request_id()),
        body: rewritten.unwrap_or_else(|| body.bytes.clone()),
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
    let (mut answer, record) = app
        .forward_recorded(call, &request, &routing, &mut wait)
        .await?;
    let request_id = call.request_id().to_str().unwrap_or("-");
    let placement = &mut answer.placement;
    let moved_from = placement.moved_from.take();
    let decision = &mut placement.decision;
    let entry = app
        .journal
        .record(request_id, &routing.model, decision, moved_from);
    let readers = AnswerReaders {
        on_usage: single.then(|| app.usage_reader(routing.prompt, decision.clone(), entry)),
        record,
        on_beginning: None,
    };
    Ok((answer, readers))
}

impl App {
    /// The answer of the best worker, and the request's record, if it is recorded.
    async fn forward_recorded(
        &self,
        call: &Call,
        request: &ForwardedRequest,
        routing: &Routing,
        wait: &mut WorkerWait,
    ) -> Result<(EngineAnswer, Option<Box<OpenRecord>>), ProxyError> {
        let recorder = &self.recorder;
        let mut record = recorder.open(call.started(), &routing.model, &routing.prompt);
        let answer = self.forward(call, request, routing, wait).await;
        if let Some(record) = &mut record {
            match &answer {
                Ok(answer) => record.placed(&answer.placement.decision),
                Err(error) => record.unanswered(error),
            }
        }
        Ok((answer?, record))
    }

    fn usage_reader(&self, prompt: Arc<Prompt>, decision: Decision, entry: EntryNumber) -> OnUsage {
        let case = AuditCase {
            prompt,
            decision,
            entry,
        };
        let auditor = self.auditor.clone();
        Box::new(move |usage| auditor.reported(case, usage))
    }

    async fn plan(
        &self,
        route: openai::PromptRoute,
        body: &BufferedBody,
    ) -> Result<Plan, ProxyError> {
        let number = self.planned.fetch_add(1, Ordering::Relaxed);
        let inputs = PlanInputs {
            catalog: self.fleet.catalog(),
            tokenizer: self.tokenizer.clone(),
            policy: self.policy,
            now: civil_now(),
            prompt_bytes_max: self.settings.current().max_prompt_bytes(),
            sampling: if number.is_multiple_of(COMPARED_ONE_IN) {
                TextSampling::Keep
            } else {
                TextSampling::Discard
            },
        };
        let encoder = self.tokenizer.as_ref().map(|tokenizer| tokenizer.encoder());
        let inline_max = match encoder {
            Some(EncoderKind::Reference) => INLINE_REFERENCE_BYTES_MAX,
            Some(EncoderKind::Own) | None => INLINE_BYTES_MAX,
        };
        let started = Instant::now();
        let planned = if body.bytes.len() <= inline_max {
            plan(route, &body.bytes, &inputs)
        } else {
            let (job, planned) = PlanJob::new(route, body.clone(), inputs, self.bodies.clone());
            self.prompts.submit(Box::new(job));
            let ended = ProxyError::Internal("preparing the prompt failed");
            planned.await.unwrap_or(Err(ended))
        };
        self.metrics.step(DecisionStep::Read, started.elapsed());
        planned
    }

    /// Compares the two encoders in the background.
    fn compare_encoders(&self, sample: TextSample) {
        if let Some(tokenizer) = &self.tokenizer {
            let job = CompareJob::new(sample, Arc::clone(tokenizer));
            self.prompts.submit(Box::new(job));
        }
    }

    async fn query_index(&self, prompt: &Prompt) -> Option<IndexReply> {
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
