//! The HTTP side: routes, and what they share.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Query, Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio_util::task::TaskTracker;
use warmroute_chat::openai::PromptRoute;

use crate::answer::Shape;
use crate::args::{Args, EngineForm};
use crate::error::Error;
use crate::fault::{AnswerFault, FaultKind};
use crate::generate::{
    chat_completions, completions, count_tokens, embeddings, messages, parse, render_chat,
    render_message, render_response, responses,
};
use crate::load::LoadRate;
use crate::loras::{self, Loras};
use crate::rank::Rank;
use crate::stored::{self, StoredAnswers};
use crate::text::{Text, special_tokens};
use crate::transfer::Transfers;
use crate::{debug, metrics, sglang, trtllm};

/// The largest body that is read.
const BODY_BYTES_MAX: usize = 256 << 20;
/// The version of vLLM whose behaviour is imitated.
const VLLM_VERSION: &str = "0.32.0";

pub(crate) struct Server {
    pub(crate) args: Args,
    pub(crate) model: String,
    pub(crate) loras: Loras,
    pub(crate) ranks: Vec<Arc<Rank>>,
    pub(crate) text: Text,
    pub(crate) max_model_len: usize,
    pub(crate) started_unix: u64,
    /// Status of `/health`.
    pub(crate) health: AtomicU16,
    /// Whether `/metrics` is served.
    pub(crate) has_metrics: AtomicBool,
    /// What generating routes do wrong.
    pub(crate) answer_fault: Mutex<AnswerFault>,
    pub(crate) requests: AtomicU64,
    /// Requests of generating routes, those that failed included.
    pub(crate) received: AtomicU64,
    /// Text completions whose prompt came as token ids.
    pub(crate) id_prompts: AtomicU64,
    /// Renderings of prompts with images.
    pub(crate) image_renders: AtomicU64,
    /// Rate of the load that the engine generates itself.
    pub(crate) rate: LoadRate,
    pub(crate) calls: CallCounts,
    pub(crate) stored: StoredAnswers,
    pub(crate) transfers: Arc<Transfers>,
    /// Answers in the background.
    pub(crate) tasks: TaskTracker,
}

/// Requests by route, method and class of status, and sleep-mode operations, as `/metrics` shows
/// them.
#[derive(Default)]
pub(crate) struct CallCounts {
    requests: Mutex<BTreeMap<(String, String, String), u64>>,
    sleep_operations: Mutex<BTreeMap<&'static str, u64>>,
}

impl CallCounts {
    pub(crate) fn requests(&self) -> BTreeMap<(String, String, String), u64> {
        let requests = self.requests.lock();
        requests.unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn sleep_operations(&self) -> BTreeMap<&'static str, u64> {
        let operations = self.sleep_operations.lock();
        operations.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn slept(&self, operation: &'static str) {
        let operations = self.sleep_operations.lock();
        let mut operations = operations.unwrap_or_else(PoisonError::into_inner);
        *operations.entry(operation).or_default() += 1;
    }
}

impl Server {
    /// The adapter of a model name. `None` for the base model.
    pub(crate) fn adapter<'a>(&self, model: &'a str) -> Result<Option<&'a str>, Error> {
        if model == self.model {
            Ok(None)
        } else if self.loras.is_loaded(model) {
            Ok(Some(model))
        } else {
            Err(Error::unknown_model(model))
        }
    }

    /// The fault of a request with this body.
    pub(crate) fn fault_of(&self, body: &Value) -> FaultKind {
        self.lock_fault().of(body)
    }

    pub(crate) fn set_answer_fault(&self, change: impl FnOnce(&mut AnswerFault)) {
        change(&mut self.lock_fault());
    }

    fn lock_fault(&self) -> MutexGuard<'_, AnswerFault> {
        let fault = self.answer_fault.lock();
        fault.unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn next_request_id(&self, shape: Shape) -> String {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        match shape {
            Shape::Completion => format!("cmpl-{number:08x}"),
            Shape::Chat => format!("chatcmpl-{number:08x}"),
            Shape::Response => format!("resp_{number:08x}"),
            Shape::Message => format!("msg_{number:08x}"),
        }
    }
}

pub(crate) fn routes(server: Arc<Server>) -> Router {
    let of_form = match server.args.form {
        EngineForm::Vllm if server.args.no_render => vllm_routes(),
        EngineForm::Vllm => vllm_routes().merge(render_routes()),
        EngineForm::Sglang => sglang::routes(),
        EngineForm::Trtllm => trtllm::routes(),
    };
    Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/responses", post(responses))
        .route("/v1/responses/{id}", get(stored::retrieve))
        .route("/v1/responses/{id}/cancel", post(stored::cancel))
        .route("/v1/messages", post(messages))
        .route("/v1/messages/count_tokens", post(count_tokens))
        .route("/v1/embeddings", post(embeddings))
        .route("/v1/models", get(models))
        .route("/v1/load_lora_adapter", post(loras::load))
        .route("/v1/unload_lora_adapter", post(loras::unload))
        .route("/health", get(health))
        .route("/debug/blocks", get(debug::blocks))
        .route("/debug/counters", get(debug::counters))
        .route("/debug/fault", post(debug::fault))
        .route("/debug/history", get(debug::history))
        .route("/debug/load", post(debug::load))
        .merge(of_form)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .route_layer(from_fn_with_state(Arc::clone(&server), count_call))
        .with_state(server)
}

fn vllm_routes() -> Router<Arc<Server>> {
    Router::new()
        .route("/load", get(load))
        .route("/tokenize", post(tokenize))
        .route("/version", get(version))
        .route("/metrics", get(metrics::metrics))
        .route("/kv_event_sources", get(kv_event_sources))
        .route("/reset_prefix_cache", post(reset_prefix_cache))
        .route("/sleep", post(sleep))
        .route("/wake_up", post(wake_up))
        .route("/is_sleeping", get(is_sleeping))
}

fn render_routes() -> Router<Arc<Server>> {
    Router::new()
        .route("/v1/chat/completions/render", post(render_chat))
        .route("/v1/responses/render", post(render_response))
        .route("/v1/messages/render", post(render_message))
}

/// Counts a request after its answer, as vLLM does, which leaves these routes out.
async fn count_call(State(server): State<Arc<Server>>, request: Request, next: Next) -> Response {
    const UNCOUNTED: [&str; 4] = ["/metrics", "/health", "/load", "/version"];
    // An answer's id stays in its route, which vLLM replaces.
    let (route, method) = (
        request.uri().path().to_owned(),
        request.method().to_string(),
    );
    let answer = next.run(request).await;
    if !UNCOUNTED.contains(&&*route) {
        let class = format!("{}xx", answer.status().as_u16() / 100);
        let requests = server.calls.requests.lock();
        let mut requests = requests.unwrap_or_else(PoisonError::into_inner);
        *requests.entry((route, method, class)).or_default() += 1;
    }
    answer
}

pub(crate) async fn health(State(server): State<Arc<Server>>) -> StatusCode {
    let status = server.health.load(Ordering::Relaxed);
    StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

pub(crate) async fn version() -> Json<Value> {
    Json(json!({"version": VLLM_VERSION}))
}

async fn load(State(server): State<Arc<Server>>) -> Json<Value> {
    let active: usize = server.ranks.iter().map(|rank| rank.counters().1).sum();
    Json(json!({"server_load": active}))
}

async fn models(State(server): State<Arc<Server>>) -> Json<Value> {
    let card = |name: &str, parent: Option<&str>, max_model_len: Option<usize>| {
        json!({
            "id": name, "object": "model", "created": server.started_unix, "owned_by": "vllm",
            "root": name, "parent": parent, "max_model_len": max_model_len, "permission": [],
        })
    };
    let mut data = vec![card(&server.model, None, Some(server.max_model_len))];
    for lora in server.loras.loaded() {
        data.push(card(&lora, Some(&server.model), None));
    }
    Json(json!({"object": "list", "data": data}))
}

pub(crate) async fn tokenize(
    State(server): State<Arc<Server>>,
    body: Bytes,
) -> Result<Json<Value>, Error> {
    let value = parse(&body)?;
    if let Some(model) = value["model"].as_str() {
        server.adapter(model)?;
    }
    if server.args.form == EngineForm::Sglang {
        sglang::check_tokenize(&value)?;
    }
    let tokens = if value.get("messages").is_some() {
        server
            .text
            .encode_chat(PromptRoute::ChatCompletions, &value)
            .map_err(Error::bad_request)?
            .tokens
    } else {
        let prompt = value["prompt"].as_str();
        let prompt = prompt.ok_or_else(|| Error::bad_request("prompt must be text"))?;
        let special = special_tokens(&value);
        let tokens = server.text.encode(prompt, special);
        tokens.map_err(Error::bad_request)?
    };
    Ok(Json(json!({
        "count": tokens.len(), "max_model_len": server.max_model_len, "tokens": tokens,
        "token_strs": null,
    })))
}

/// vLLM's form: by rank, ports as bound, a wildcard as host.
async fn kv_event_sources(State(server): State<Arc<Server>>) -> Json<Value> {
    let endpoint = |port: u16| format!("tcp://*:{port}");
    let events = &server.args.events;
    let mut sources = Map::new();
    for rank in &server.ranks {
        let source = json!({
            "enable_kv_cache_events": !events.no_events, "publisher": "zmq",
            "endpoint": endpoint(rank.publisher.kv_port),
            "replay_endpoint": rank.publisher.replay_port.map(endpoint),
            "buffer_steps": events.buffer_steps, "hwm": 100_000, "max_queue_size": 100_000,
            "topic": events.topic,
        });
        sources.insert(rank.number.to_string(), source);
    }
    Json(Value::Object(sources))
}

async fn reset_prefix_cache(State(server): State<Arc<Server>>) -> Response {
    // Asks every rank, even after a refusal.
    let mut success = true;
    for rank in &server.ranks {
        success &= rank.reset_prefix_cache();
    }
    Json(json!({"success": success})).into_response()
}

#[derive(Deserialize)]
struct SleepLevel {
    level: Option<u8>,
}

/// Aborts all requests and, from level 1 on, clears the caches.
async fn sleep(
    State(server): State<Arc<Server>>,
    Query(SleepLevel { level }): Query<SleepLevel>,
) -> Json<Value> {
    let level = level.unwrap_or(1);
    for rank in &server.ranks {
        rank.sleep();
        if level > 0 {
            rank.reset_prefix_cache();
        }
    }
    server.calls.slept("sleep");
    Json(json!({"status": "sleeping", "level": level}))
}

async fn wake_up(State(server): State<Arc<Server>>) -> Json<Value> {
    server.ranks.iter().for_each(|rank| rank.wake_up());
    server.calls.slept("wake");
    Json(json!({"status": "awake"}))
}

async fn is_sleeping(State(server): State<Arc<Server>>) -> Json<Value> {
    let is_sleeping = server.ranks.iter().any(|rank| rank.is_asleep());
    Json(json!({"is_sleeping": is_sleeping}))
}
