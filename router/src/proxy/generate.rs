//! Requests whose prompts are read: from the body to the chosen engine's answer.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::extract::Request;
use axum::http::HeaderMap;
use axum::http::request::Parts;
use axum::response::Response;
use futures_util::future::join_all;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout};
use warmroute_process::access::keys::KeyId;
use warmroute_process::blocking;
use warmroute_proto::WorkerId;

use super::App;
use super::body::BufferedBody;
use super::call::Call;
use super::forward::{EngineAnswer, ForwardedRequest, Routing};
use super::plan::{
    AnswerModels, Plan, PlanInputs, PromptWork, SLOW_TEMPLATE, TextSample, TextSampling, plan,
};
use super::prompt_jobs::{CompareJob, PlanJob, Rendering};
use super::queueing::QueueHints;
use super::respond::{AnswerReaders, OnBeginning, respond};
use super::resume::ResumableAnswer;
use super::stored::AnswerOwner;
use super::stream::OnUsage;
use super::waiting::WorkerWait;
use super::{headers, passthrough};
use crate::answer_end::AnswerRule;
use crate::audit::AuditCase;
use crate::clock::civil_now;
use crate::error::ProxyError;
use crate::fleet::RequestCase;
use crate::journal::EntryNumber;
use crate::metrics::{CancelPhase, DecisionStep, RouteLabel};
use crate::openai;
use crate::route::{Decision, IndexReply, Leg, Prompt};
use crate::settings::ResumeRule;
use crate::spans::TraceStep;
use crate::tokenize::EncoderKind;

/// Bodies above are prepared on another thread; below, that takes less than a millisecond.
pub(super) const INLINE_BYTES_MAX: usize = 16 << 10;

/// Likewise, with the slower reference encoder.
const INLINE_REFERENCE_BYTES_MAX: usize = 1 << 10;

/// One in so many prompts is encoded by the reference too.
const COMPARED_ONE_IN: u64 = 1024;

pub(super) async fn generate(
    app: &Arc<App>,
    route: openai::PromptRoute,
    request: Request,
) -> Response {
    let (parts, body) = request.into_parts();
    let label = match parts.uri.path() {
        "/v1/chat/completions" => RouteLabel::Chat,
        "/v1/completions" => RouteLabel::Completions,
        "/v1/embeddings" => RouteLabel::Embeddings,
        _ => RouteLabel::Other,
    };
    let call = Call::new(label, &parts, &app.sinks);
    let body = match app.read_body(&call, &parts, body).await {
        Ok(body) => body,
        Err(error) => return app.refuse(call, &error),
    };
    generate_from(app, route, call, parts, body).await
}

/// `body` is held until the answer begins, and with it its share of the budget.
async fn generate_from(
    app: &Arc<App>,
    route: openai::PromptRoute,
    mut call: Call,
    parts: Parts,
    mut body: BufferedBody,
) -> Response {
    call.report.step(TraceStep::ReadBody, call.report.started);
    match serve(app, &mut call, route, parts, &mut body).await {
        Ok((answer, readers)) => respond(app, call, answer, readers),
        Err(error) => app.refuse(call, &error),
    }
}

/// A path that an operator added: the route follows from its end, or from the body.
pub(super) async fn generate_added(app: &Arc<App>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let call = Call::new(RouteLabel::Other, &parts, &app.sinks);
    let body = match app.read_body(&call, &parts, body).await {
        Ok(body) => body,
        Err(error) => return app.refuse(call, &error),
    };
    let route = if body.bytes.len() <= INLINE_BYTES_MAX {
        openai::added_route(parts.uri.path(), &body.bytes)
    } else {
        let (path, body) = (parts.uri.path().to_owned(), body.clone());
        let read = blocking::run(move || openai::added_route(&path, &body.bytes));
        read.await.unwrap_or_default()
    };
    match route {
        Some(route) => generate_from(app, route, call, parts, body).await,
        None => passthrough::pass_read(app, call, parts, body).await,
    }
}

/// An answer that goes on with another one is asked of the worker that has it. An engine may lack the
/// routes that not all models have.
fn rule_of(route: openai::PromptRoute, path: &str, owner: Option<&WorkerId>) -> AnswerRule {
    use openai::PromptRoute::{ChatCompletions, Completions, Messages, Responses};
    let is_common = [ChatCompletions, Completions, Messages, Responses].contains(&route);
    if is_common && path == route.path() && owner.is_none() {
        AnswerRule::Generated
    } else {
        AnswerRule::Other
    }
}

async fn serve(
    app: &Arc<App>,
    call: &mut Call,
    route: openai::PromptRoute,
    parts: Parts,
    body: &mut BufferedBody,
) -> Result<(EngineAnswer, AnswerReaders), ProxyError> {
    let complete = Instant::now();
    let hints = QueueHints::read(&parts.headers, call);
    let mut wait = WorkerWait::new(hints);
    let Plan {
        model,
        series,
        prompt,
        streaming,
        single,
        unhashed,
        images: _,
        rewritten,
        previous,
        sample,
        resume,
    } = planned(app, call, &mut wait, route, &parts.headers, body).await?;
    if let Some(rewritten) = rewritten {
        app.bodies.replace(body, rewritten)?;
    }
    call.report.series = Some(series);
    call.report.prompt(&prompt);
    if let Some(sample) = sample {
        app.compare_encoders(sample);
    }
    let asked = Instant::now();
    let index = app.query_planned(&prompt, unhashed).await;
    if unhashed.is_none() {
        call.report.step(TraceStep::QueryIndex, asked);
    }
    let owner = app.previous_worker(call, &parts.headers, previous).await?;
    let session = headers::session(&parts.headers).or_else(|| prompt.session());
    let prompt = Arc::new(prompt.with_session(session));
    let request = ForwardedRequest {
        method: parts.method,
        path: headers::path(&parts.uri),
        headers: call.to_engine(parts.headers),
        body: body.charged(),
    };
    let mut routing = Routing {
        legs: app.legs(call, route, parts.uri.path(), &model),
        excluded: app.excluded(owner.as_ref(), &request.headers, &model),
        model,
        prompt,
        index,
        streaming,
        holds_head: resume.is_some(),
        head_max: None,
        movable: is_movable(parts.uri.path()),
        rule: rule_of(route, parts.uri.path(), owner.as_ref()),
        case: RequestCase::default(),
        cancel: Some(CancelPhase::BeforeHead),
        hints,
    };
    app.decided(call, complete.elapsed());
    call.report.record = app.sinks.recorder.open(&routing.prompt);
    let mut answer = app.forward(call, &request, &mut routing, &mut wait).await?;
    let moved_from = answer.placement.moved_from.take();
    let decision = &mut answer.placement.decision;
    let id = call.id_and_tenant();
    let entry = app.journal.record(id, &routing.model, decision, moved_from);
    // A decode leg's usage counts transferred tokens as cached.
    let reads_usage = single && routing.legs.leg() == Leg::Whole;
    let resumable = |terms| Box::new(ResumableAnswer::new(app, terms, request.headers, hints));
    let readers = AnswerReaders {
        resumable: resume.map(resumable),
        on_usage: reads_usage.then(|| app.usage_reader(routing.prompt, decision.clone(), entry)),
        on_beginning: app.learn_answer(call, route, &decision.source.worker),
    };
    Ok((answer, readers))
}

/// The request's plan, after a wait where no worker serves its model yet, or a search for the answer
/// that it continues where only that names a model.
async fn planned(
    app: &App,
    call: &mut Call,
    wait: &mut WorkerWait,
    route: openai::PromptRoute,
    headers: &HeaderMap,
    body: &BufferedBody,
) -> Result<Plan, ProxyError> {
    let mut is_searched = false;
    let mut plan = loop {
        let began = Instant::now();
        match app.plan(call, route, body).await {
            Ok(plan) => {
                call.report.step(TraceStep::Tokenize, began);
                break plan;
            }
            Err(ProxyError::ModelOfAnswer(id)) if !is_searched => {
                is_searched = true;
                // The next attempt knows the answer's worker, if one has it.
                app.previous_worker(call, headers, Some(id)).await?;
            }
            Err(error) => {
                // A tenant takes no waiting place for a model that it may not use.
                if let ProxyError::UnknownModel(model) = &error {
                    call.check_model(model)?;
                }
                if !wait.before_retry(app, call, &error).await {
                    return Err(error);
                }
            }
        }
    };
    call.check_model(&plan.model)?;
    call.admit_prompt(plan.prompt.tokens())?;
    // Answers of embeddings report no cached tokens, and may be long.
    plan.single &= !is_pooling(route);
    app.render_images(call, headers, body, &mut plan).await;
    Ok(plan)
}

/// An abort may leave a response half stored. Its effects on other routes are not known.
fn is_movable(path: &str) -> bool {
    ["/v1/chat/completions", "/v1/completions", "/v1/messages"].contains(&path)
}

const fn is_pooling(route: openai::PromptRoute) -> bool {
    use openai::PromptRoute::{Embed, Embeddings, Pooling};
    matches!(route, Embeddings | Pooling | Embed)
}

impl App {
    /// Counts the time that a decision took.
    fn decided(&self, call: &mut Call, after: Duration) {
        self.metrics.decided(after);
        call.report.decided(after);
    }

    /// Keeps which worker has an answer to `/v1/responses`; `None` for other routes.
    fn learn_answer(
        &self,
        call: &Call,
        route: openai::PromptRoute,
        worker: &WorkerId,
    ) -> Option<OnBeginning> {
        if route != openai::PromptRoute::Responses {
            return None;
        }
        let stored = self.stored.clone();
        let owner = AnswerOwner {
            worker: worker.clone(),
            tenant: call.tenant_name().cloned(),
        };
        Some(Box::new(move |beginning| stored.learn(owner, beginning)))
    }

    /// The router's own error answer, which counts for the model if it is known.
    pub(super) fn refuse(&self, mut call: Call, error: &ProxyError) -> Response {
        call.report.without_model(|| self.fleet.catalog());
        call.refuse(error)
    }

    pub(super) fn usage_reader(
        &self,
        prompt: Arc<Prompt>,
        decision: Decision,
        entry: EntryNumber,
    ) -> OnUsage {
        let case = AuditCase {
            prompt,
            decision,
            entry,
        };
        let auditor = self.auditor.clone();
        Box::new(move |usage| auditor.reported(case, usage))
    }

    /// Finds the model of the worker that has an answer of this tenant.
    fn answer_models(&self, tenant: Option<&KeyId>) -> AnswerModels {
        let (stored, fleet) = (self.stored.clone(), Arc::clone(&self.fleet));
        let tenant = tenant.cloned();
        Arc::new(move |id| {
            let worker = stored.worker_for(id, tenant.as_ref()).ok()??;
            fleet.model_of(&worker)
        })
    }

    pub(super) async fn plan(
        &self,
        call: &Call,
        route: openai::PromptRoute,
        body: &BufferedBody,
    ) -> Result<Plan, ProxyError> {
        let tenant = call.tenant();
        let (tokenizers, settings) = (self.tokenizers.current(), self.settings.current());
        let number = self.planned.fetch_add(1, Ordering::Relaxed);
        let inputs = PlanInputs {
            catalog: self.fleet.catalog(),
            tokenizers: Arc::clone(&tokenizers),
            policy: self.policy,
            is_recorded: self.sinks.recorder.runs(),
            answer_models: self.answer_models(tenant.map(|tenant| tenant.name())),
            tenant: tenant.cloned(),
            now: civil_now(),
            work: PromptWork::Tokenize,
            prompt_bytes_max: settings.max_prompt_bytes(),
            sampling: if number.is_multiple_of(COMPARED_ONE_IN) {
                TextSampling::Keep
            } else {
                TextSampling::Discard
            },
            resume: match call.gateway() {
                // The gateway's streams are its own.
                Some(_) => ResumeRule::Off,
                None => settings.resume_streams,
            },
            completion_prompts: settings.completion_prompts,
            multimodal: settings.multimodal,
        };
        // By the slowest encoder: the body's model is not known yet.
        let inline_max = match tokenizers.encoder() {
            EncoderKind::Reference => INLINE_REFERENCE_BYTES_MAX,
            EncoderKind::Own => INLINE_BYTES_MAX,
        };
        let started = Instant::now();
        let small = (body.bytes.len() <= inline_max).then(|| plan(route, &body.bytes, &inputs));
        let planned = match small {
            Some(Ok(plan)) if plan.unhashed == Some(SLOW_TEMPLATE) => {
                let rendering = Rendering::Long;
                self.plan_in_pool(route, body, inputs, rendering).await
            }
            Some(planned) => planned,
            None => {
                let rendering = Rendering::Usual;
                self.plan_in_pool(route, body, inputs, rendering).await
            }
        };
        self.metrics.step(DecisionStep::Read, started.elapsed());
        planned
    }

    /// The plan by a prompt thread. One that takes too long is made without the prompt's tokens, so
    /// that slow work on prompts delays no request for longer.
    async fn plan_in_pool(
        &self,
        route: openai::PromptRoute,
        body: &BufferedBody,
        inputs: PlanInputs,
        rendering: Rendering,
    ) -> Result<Plan, ProxyError> {
        let without_tokens = PlanInputs {
            work: PromptWork::Skip,
            ..inputs.clone()
        };
        let budget = self.bodies.clone();
        let (job, planned) = PlanJob::new(route, body.clone(), inputs, budget, rendering);
        self.prompts.submit(Box::new(job));
        let planned = match timeout(self.settings.current().prompt_timeout(), planned).await {
            Ok(planned) => planned.ok(),
            Err(_) => {
                let turn = self.prompts.late_turn().await;
                let body = body.clone();
                // A client that has gone does not end it, so it holds its turn itself.
                let plan = spawn_blocking(move || {
                    let planned = plan(route, &body.bytes, &without_tokens);
                    drop(turn);
                    planned
                });
                plan.await.ok()
            }
        };
        let ended = ProxyError::Internal("preparing the prompt failed");
        planned.unwrap_or(Err(ended))
    }

    /// Compares the two encoders in the background.
    fn compare_encoders(&self, sample: TextSample) {
        self.prompts.submit(Box::new(CompareJob::new(sample)));
    }

    /// The index's answer for a prompt, unless it has no blocks for this reason.
    pub(super) async fn query_planned(
        &self,
        prompt: &Prompt,
        unhashed: Option<&'static str>,
    ) -> Option<IndexReply> {
        match unhashed {
            None if self.policy.reads_index() => self.query_index(prompt).await,
            // Hashed for the recording only.
            None => None,
            Some(reason) => {
                self.metrics.unhashed(reason);
                None
            }
        }
    }

    pub(super) async fn query_index(&self, prompt: &Prompt) -> Option<IndexReply> {
        let started = Instant::now();
        let ask = async |cut: &Prompt| {
            let answer = self.index.ask(cut.hit_blocks()).await;
            let answer = answer.inspect_err(|error| {
                self.metrics.index_failed();
                tracing::debug!(%error, "index did not answer");
            });
            answer.ok()
        };
        let has_one_cut = prompt.cuts().nth(1).is_none();
        let reply = if has_one_cut {
            ask(prompt).await
        } else {
            let cuts = prompt.cuts();
            let queries = cuts.map(async |cut| Some((cut.block_cut(), ask(cut).await?)));
            let answers: Vec<_> = join_all(queries).await.into_iter().flatten().collect();
            (!answers.is_empty()).then_some(IndexReply::Cuts(answers))
        };
        self.metrics.step(DecisionStep::Index, started.elapsed());
        reply
    }
}
