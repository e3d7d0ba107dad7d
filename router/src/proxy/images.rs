//! Prompts with images: an engine renders them, so that their blocks can be named.
//!
//! Only an engine knows the tokens of an image and the name of its content, which are a part of its
//! blocks' keys. Its render route answers with both. A rendering fetches and processes each image
//! once more, without the engine's cache of processed images. So it is bounded in time, in bytes
//! and in number, there is no second attempt, and it is off by default. A failure costs the credit
//! only. A client that goes away drops the future, which closes the connection to the engine.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::{HeaderMap, Method, StatusCode};
use bytes::Bytes;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use tokio::time::{Instant, timeout};
use warmroute_process::blocking;
use warmroute_proto::hash::local_hashes_with_items;
use warmroute_proto::{BlockCut, Seed, WorkerId};

use super::App;
use super::body::BufferedBody;
use super::call::Call;
use super::headers;
use super::plan::{NO_BLOCK_SIZE, NO_MEMORY, Plan, TRUNCATED, Unhashed};
use crate::engine_error::lacks_files;
use crate::metrics::{DecisionStep, RenderFailure};
use crate::openai::{
    PromptRoute, RenderedPrompt, RequestInfo, UnusableRendering, render_body, render_path,
};
use crate::route::{CacheReads, Prompt, PromptForm};
use crate::spans::TraceStep;

/// Longest rendering. The request waits for it.
const RENDER_TIME_MAX: Duration = Duration::from_secs(2);

/// Largest answer: half a million token ids. An engine that sends processed images exceeds it.
const ANSWER_BYTES_MAX: usize = 4 << 20;

/// Renderings at a time.
const RENDERS_MAX: usize = 32;

/// Renderings at a time at one worker, whose API server also serves requests.
const WORKER_RENDERS_MAX: usize = 4;

/// A worker whose rendering failed by its own fault gets no other one for so long.
const PAUSE: Duration = Duration::from_secs(10);

/// A prompt with images, as far as it is known without its tokens.
pub(super) struct ImagePrompt {
    pub route: PromptRoute,
    pub info: RequestInfo,
    /// The model that the engines' checks are of.
    pub base: String,
    pub is_adapter: bool,
    pub cuts: Vec<BlockCut>,
    pub form: Option<Arc<PromptForm>>,
    pub model_max: Option<usize>,
    pub reads: CacheReads,
    pub mismatched: Vec<WorkerId>,
}

impl ImagePrompt {
    /// The prompt with its blocks. `model`: its name, the adapter's if it is one.
    pub(super) fn hashed(
        &self,
        model: &str,
        rendered: &RenderedPrompt,
    ) -> Result<Prompt, Unhashed> {
        let RenderedPrompt { tokens, images } = rendered;
        if !self.info.keeps_whole(tokens.len(), self.model_max) {
            return Err(TRUNCATED);
        }
        let adapter = self.is_adapter.then_some(model);
        let seed = Seed::new(adapter, self.info.cache_salt.as_deref());
        let count = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let cut = |cut: &BlockCut| {
            let blocks = local_hashes_with_items(tokens, *cut, seed, images);
            Prompt::of_blocks(count, *cut, seed, blocks)
        };
        let (first, others) = self.cuts.split_first().ok_or(NO_BLOCK_SIZE)?;
        let prompt = cut(first).with_other_cuts(others.iter().map(cut).collect());
        Ok(prompt
            .with_form(self.form.clone())
            .with_reads(self.reads)
            .with_mismatched(self.mismatched.clone()))
    }
}

/// The renderings in progress.
#[derive(Debug, Default)]
pub(super) struct ImageRenders(Mutex<RenderTable>);

#[derive(Debug, Default)]
struct RenderTable {
    in_flight: usize,
    /// Those with renderings in progress or a pause.
    workers: BTreeMap<WorkerId, WorkerRenders>,
    /// Equal workers take turns.
    turn: usize,
}

#[derive(Debug, Default)]
struct WorkerRenders {
    in_flight: usize,
    paused_until: Option<Instant>,
}

impl WorkerRenders {
    fn is_paused(&self, now: Instant) -> bool {
        self.paused_until.is_some_and(|until| now < until)
    }
}

/// A rendering's place at a worker, until it is dropped.
struct RenderPlace {
    renders: Arc<ImageRenders>,
    worker: WorkerId,
    url: String,
}

impl ImageRenders {
    /// Takes a place at the worker with the fewest renderings.
    fn begin(
        self: &Arc<Self>,
        mut workers: Vec<(WorkerId, String)>,
        now: Instant,
    ) -> Result<RenderPlace, RenderFailure> {
        if workers.is_empty() {
            return Err(RenderFailure::NotOffered);
        }
        let mut table = self.table();
        table
            .workers
            .retain(|_, renders| renders.in_flight > 0 || renders.is_paused(now));
        workers.retain(|(worker, _)| {
            let known = table.workers.get(worker);
            known.is_none_or(|renders| !renders.is_paused(now))
        });
        if workers.is_empty() {
            return Err(RenderFailure::Paused);
        }
        table.turn = (table.turn + 1) % workers.len();
        workers.rotate_left(table.turn);
        let in_flight = |worker: &WorkerId| {
            let known = table.workers.get(worker);
            known.map_or(0, |renders| renders.in_flight)
        };
        let fewest = workers
            .into_iter()
            .min_by_key(|(worker, _)| in_flight(worker));
        let (worker, url) = fewest.ok_or(RenderFailure::NotOffered)?;
        if table.in_flight >= RENDERS_MAX || in_flight(&worker) >= WORKER_RENDERS_MAX {
            return Err(RenderFailure::Busy);
        }
        table.in_flight += 1;
        table.workers.entry(worker.clone()).or_default().in_flight += 1;
        drop(table);
        Ok(RenderPlace {
            renders: Arc::clone(self),
            worker,
            url,
        })
    }

    fn table(&self) -> MutexGuard<'_, RenderTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RenderPlace {
    /// The worker gets no rendering for a while.
    fn pause(&self, now: Instant) {
        let mut table = self.renders.table();
        if let Some(renders) = table.workers.get_mut(&self.worker) {
            renders.paused_until = Some(now + PAUSE);
        }
    }
}

impl Drop for RenderPlace {
    fn drop(&mut self) {
        let mut table = self.renders.table();
        table.in_flight -= 1;
        if let Some(renders) = table.workers.get_mut(&self.worker) {
            renders.in_flight -= 1;
        }
    }
}

impl App {
    /// Gives a prompt with images its blocks, if an engine renders it. The request goes on without.
    pub(super) async fn render_images(
        &self,
        call: &mut Call,
        headers: &HeaderMap,
        body: &BufferedBody,
        plan: &mut Plan,
    ) {
        let Some(images) = plan.images.take() else {
            return;
        };
        let began = Instant::now();
        let body = plan.rewritten.clone().unwrap_or_else(|| body.bytes.clone());
        let mut headers = call.to_engine(headers.clone());
        headers.remove(headers::ENGINE_RANK);
        match self.rendered(&plan.model, images, headers, body).await {
            Ok(prompt) => {
                plan.prompt = prompt.with_session(plan.prompt.session());
                plan.unhashed = None;
            }
            Err(why) => plan.unhashed = Some(why),
        }
        self.metrics.step(DecisionStep::Render, began.elapsed());
        call.report.step(TraceStep::RenderImages, began);
    }

    async fn rendered(
        &self,
        model: &str,
        images: ImagePrompt,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Prompt, Unhashed> {
        if images.cuts.is_empty() {
            return Err(NO_BLOCK_SIZE);
        }
        let mut workers = self.fleet.renderers(model, &images.base, images.route);
        workers.retain(|(worker, _)| !images.mismatched.contains(worker));
        let place = self.engines.renders().begin(workers, Instant::now());
        let place = place.map_err(RenderFailure::label)?;
        let memory = self.bodies.charge_spare(body.len() + ANSWER_BYTES_MAX);
        let memory = memory.ok_or(NO_MEMORY)?;
        let asked = self.ask_to_render(&place, images.route, headers, &body);
        let answer = timeout(RENDER_TIME_MAX, asked).await;
        let answer = answer.unwrap_or(Err(RenderFailure::Timeout));
        let answer = answer.inspect_err(|failure| {
            let worker = &place.worker;
            tracing::debug!(%worker, failure = failure.label(), "images not rendered");
            if failure.is_the_engines() {
                place.pause(Instant::now());
            }
        });
        let answer = answer.map_err(RenderFailure::label)?;
        let model = model.to_owned();
        let hashed = blocking::run(move || {
            let rendered = RenderedPrompt::read(&answer).map_err(|unusable| match unusable {
                UnusableRendering::OtherMedia => RenderFailure::OtherMedia.label(),
                UnusableRendering::Form | UnusableRendering::Places => {
                    RenderFailure::Unusable.label()
                }
            });
            let prompt = rendered.and_then(|rendered| images.hashed(&model, &rendered));
            drop((answer, memory));
            prompt
        });
        hashed.await.unwrap_or(Err(RenderFailure::Unusable.label()))
    }

    /// The engine's answer to the request on its render route.
    async fn ask_to_render(
        &self,
        place: &RenderPlace,
        route: PromptRoute,
        mut headers: HeaderMap,
        body: &[u8],
    ) -> Result<Bytes, RenderFailure> {
        let path = render_path(route).ok_or(RenderFailure::NotOffered)?;
        let body = render_body(body).ok_or(RenderFailure::Refused)?;
        let _permit = self.engines.permit().ok_or(RenderFailure::Busy)?;
        let RenderPlace { worker, url, .. } = place;
        // The request itself has this id.
        headers.remove(headers::REQUEST_ID);
        self.engines.keys().authorize(worker, url, &mut headers);
        let body = Bytes::from(body);
        let request = || {
            let (headers, body) = (headers.clone(), body.clone());
            let built = self.engines.request(Method::POST, url, path, headers, body);
            built.ok()
        };
        let first = request().ok_or(RenderFailure::Failed)?;
        let sent = self.engines.send(first, request).await;
        let response = sent.map_err(|error| match lacks_files(&error) {
            true => RenderFailure::Busy,
            false => RenderFailure::Failed,
        })?;
        match response.status() {
            StatusCode::OK => {}
            // Possibly for this client's key only.
            StatusCode::TOO_MANY_REQUESTS => return Err(RenderFailure::Busy),
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => {
                return Err(RenderFailure::Failed);
            }
            // vLLM's answer where it cannot fetch an image.
            StatusCode::INTERNAL_SERVER_ERROR => return Err(RenderFailure::Refused),
            status if status.is_client_error() => return Err(RenderFailure::Refused),
            _ => return Err(RenderFailure::Failed),
        }
        match Limited::new(response.into_body(), ANSWER_BYTES_MAX)
            .collect()
            .await
        {
            Ok(whole) => Ok(whole.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => Err(RenderFailure::TooLarge),
            Err(_) => Err(RenderFailure::Failed),
        }
    }
}

#[cfg(test)]
mod tests;
