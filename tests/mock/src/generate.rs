//! Completions, chats, responses and messages: from a body to running generations.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue};
use axum::response::{IntoResponse as _, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use warmroute_chat::openai::PromptRoute;
use warmroute_sim::sim::EngineRequest;

use crate::answer::{Answer, Shape};
use crate::error::Error;
use crate::images::{self, EncodedPrompt};
use crate::rank::Rank;
use crate::server::Server;
use crate::text::special_tokens;

/// Response header: the rank that served the request.
pub(crate) const RANK_SERVED: &str = "x-mock-dp-rank";
const RANK_WANTED: &str = "x-data-parallel-rank";
/// Output length of requests without one. Real engines continue until the model stops.
const MAX_TOKENS_DEFAULT: usize = 16;

/// Fields that both endpoints share. Unknown fields are ignored, as in vLLM.
#[derive(Deserialize)]
struct Body {
    model: Option<String>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    max_output_tokens: Option<usize>,
    n: Option<u32>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    cache_salt: Option<String>,
    return_token_ids: Option<bool>,
    /// Whether `/v1/responses` keeps its answer; yes by default.
    store: Option<bool>,
    background: Option<bool>,
}

#[derive(Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

pub(crate) async fn completions(
    State(server): State<Arc<Server>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, Error> {
    let value = parse(&body)?;
    let prompts = tokenized(&server, &value, "prompt")?;
    let prompts = prompts.into_iter().map(EncodedPrompt::from).collect();
    if value["prompt"][0].is_u64() {
        server.id_prompts.fetch_add(1, Ordering::Relaxed);
    }
    generate(&server, &headers, &value, prompts, Shape::Completion).await
}

pub(crate) async fn chat_completions(
    State(server): State<Arc<Server>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, Error> {
    answer_chat(&server, &headers, &parse(&body)?, Shape::Chat).await
}

pub(crate) async fn responses(
    State(server): State<Arc<Server>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, Error> {
    let value = parse(&body)?;
    if let Some(previous) = value["previous_response_id"].as_str() {
        server.stored.get(previous)?;
    }
    answer_chat(&server, &headers, &value, Shape::Response).await
}

pub(crate) async fn messages(
    State(server): State<Arc<Server>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, Error> {
    answer_chat(&server, &headers, &parse(&body)?, Shape::Message).await
}

async fn answer_chat(
    server: &Arc<Server>,
    headers: &HeaderMap,
    value: &Value,
    shape: Shape,
) -> Result<Response, Error> {
    let prompt = encode(server, shape, value)?;
    generate(server, headers, value, vec![prompt], shape).await
}

pub(crate) async fn render_chat(
    State(server): State<Arc<Server>>,
    body: Bytes,
) -> Result<Json<Value>, Error> {
    render(&server, &body, Shape::Chat)
}

pub(crate) async fn render_response(
    State(server): State<Arc<Server>>,
    body: Bytes,
) -> Result<Json<Value>, Error> {
    render(&server, &body, Shape::Response)
}

pub(crate) async fn render_message(
    State(server): State<Arc<Server>>,
    body: Bytes,
) -> Result<Json<Value>, Error> {
    render(&server, &body, Shape::Message)
}

fn render(server: &Server, body: &[u8], shape: Shape) -> Result<Json<Value>, Error> {
    let value = parse(body)?;
    server.adapter(value["model"].as_str().unwrap_or(&server.model))?;
    let prompt = encode(server, shape, &value)?;
    if !prompt.items.is_empty() {
        server.image_renders.fetch_add(1, Ordering::Relaxed);
    }
    Ok(Json(json!({
        "token_ids": prompt.tokens, "cache_salt": value["cache_salt"],
        "features": images::features(&prompt.items, &value["mm_payload"]),
    })))
}

fn encode(server: &Server, shape: Shape, body: &Value) -> Result<EncodedPrompt, Error> {
    let route = match shape {
        Shape::Response => PromptRoute::Responses,
        Shape::Message => PromptRoute::Messages,
        Shape::Chat | Shape::Completion => PromptRoute::ChatCompletions,
    };
    let mut body = body.clone();
    if let Some(fields) = body.as_object_mut() {
        // An earlier answer adds nothing to a prompt here.
        fields.remove("previous_response_id");
        fields.remove("background");
    }
    let tokens = server.text.encode_chat(route, &body);
    tokens.map_err(Error::bad_request)
}

pub(crate) async fn count_tokens(
    State(server): State<Arc<Server>>,
    body: Bytes,
) -> Result<Json<Value>, Error> {
    let tokens = encode(&server, Shape::Message, &parse(&body)?)?;
    Ok(Json(json!({"input_tokens": tokens.tokens.len()})))
}

/// Vectors of two numbers: the count of tokens and the last of them.
pub(crate) async fn embeddings(
    State(server): State<Arc<Server>>,
    body: Bytes,
) -> Result<Json<Value>, Error> {
    let value = parse(&body)?;
    let model = value["model"].as_str().unwrap_or(&server.model);
    server.adapter(model)?;
    let inputs = tokenized(&server, &value, "input")?;
    let data = inputs.iter().enumerate().map(|(index, tokens)| {
        let vector = [
            tokens.len() as u64,
            tokens.last().copied().unwrap_or(0).into(),
        ];
        json!({"index": index, "object": "embedding", "embedding": vector})
    });
    let tokens: usize = inputs.iter().map(Vec::len).sum();
    Ok(Json(json!({
        "id": format!("embd-{tokens:08x}"), "object": "list", "created": server.started_unix,
        "model": model, "data": data.collect::<Vec<Value>>(),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    })))
}

/// The texts or tokens of a field.
fn tokenized(server: &Server, value: &Value, field: &str) -> Result<Vec<Vec<u32>>, Error> {
    let prompt = Prompt::deserialize(&value[field])
        .map_err(|_| Error::bad_request(format!("{field} must be text, tokens, or a list")))?;
    let special = special_tokens(value);
    let encode = |text: &String| {
        let tokens = server.text.encode(text, special);
        tokens.map_err(Error::bad_request)
    };
    match prompt {
        Prompt::Text(text) => Ok(vec![encode(&text)?]),
        Prompt::Tokens(tokens) => Ok(vec![tokens]),
        Prompt::Texts(texts) => texts.iter().map(encode).collect(),
        Prompt::TokenLists(lists) => Ok(lists),
    }
}

/// The function that a client demands: a named one, or any.
fn called(value: &Value) -> Option<String> {
    let name = |tool: &Value| {
        let function = &tool["function"]["name"];
        let name = tool["name"].as_str().or_else(|| function.as_str());
        name.map(str::to_owned)
    };
    let choice = &value["tool_choice"];
    if choice == "required" || choice["type"] == "any" {
        name(&value["tools"][0])
    } else {
        name(choice)
    }
}

pub(crate) fn parse(body: &[u8]) -> Result<Value, Error> {
    serde_json::from_slice(body).map_err(|error| Error::bad_request(error.to_string()))
}

async fn generate(
    server: &Arc<Server>,
    headers: &HeaderMap,
    value: &Value,
    prompts: Vec<EncodedPrompt>,
    shape: Shape,
) -> Result<Response, Error> {
    let body = Body::deserialize(value).map_err(|error| Error::bad_request(error.to_string()))?;
    if body.n.is_some_and(|n| n != 1) {
        return Err(Error::bad_request("only n = 1 is supported"));
    }
    server.received.fetch_add(1, Ordering::Relaxed);
    let is_stream = body.stream.unwrap_or(false);
    let fault = server.fault_of(value);
    if let Some(refusal) = fault.refusal(is_stream) {
        return Ok(refusal);
    }
    server.transfers.admit(headers, value).await?;
    let model = body.model.as_deref().unwrap_or(&server.model);
    let lora_name = server.adapter(model)?;
    let rank = choose_rank(server, headers)?;
    let max_tokens = body
        .max_completion_tokens
        .or(body.max_output_tokens)
        .or(body.max_tokens)
        .unwrap_or(MAX_TOKENS_DEFAULT);
    let request = |prompt: EncodedPrompt| EngineRequest {
        prompt: prompt.tokens,
        max_tokens,
        lora_name: lora_name.map(Arc::from),
        lora_path: server.loras.other_path(model).into(),
        cache_salt: body.cache_salt.as_deref().map(Arc::from),
        items: prompt.items,
    };
    let return_token_ids = body.return_token_ids.unwrap_or(false);
    let prompt_token_ids = return_token_ids.then(|| {
        let tokens = prompts.iter().map(|prompt| prompt.tokens.clone());
        tokens.collect()
    });
    // A refused prompt drops, and so aborts, the generations before it.
    let generations = prompts
        .into_iter()
        .map(|prompt| rank.submit(request(prompt)))
        .collect::<Result<Vec<_>, _>>()?;
    let options = body.stream_options.unwrap_or_default();
    let answer = Answer {
        shape,
        id: server.next_request_id(shape),
        model: model.to_owned(),
        created: server.started_unix,
        include_usage: options.include_usage.unwrap_or(false),
        prompt_token_ids,
        called: called(value),
        stored: shape == Shape::Response && body.store.unwrap_or(true),
        server: Arc::clone(server),
    };
    let mut response = if is_stream {
        answer.stream(generations, fault)
    } else if shape == Shape::Response && body.background.unwrap_or(false) {
        Json(answer.in_background(generations)).into_response()
    } else {
        let tokens = generations.iter().map(|one| one.prompt_tokens).sum();
        let mut whole = answer.whole(generations).await?;
        if let Some(params) = server.transfers.offer(headers, tokens) {
            whole["kv_transfer_params"] = params;
        }
        Json(whole).into_response()
    };
    let served = HeaderValue::from(rank.number);
    response.headers_mut().insert(RANK_SERVED, served);
    Ok(response)
}

/// The rank that the client names, else the rank with the fewest requests.
fn choose_rank<'a>(server: &'a Server, headers: &HeaderMap) -> Result<&'a Arc<Rank>, Error> {
    let Some(wanted) = headers.get(RANK_WANTED) else {
        let busy = |rank: &&Arc<Rank>| {
            let load = rank.load();
            load.running + load.waiting
        };
        return server
            .ranks
            .iter()
            .min_by_key(busy)
            .ok_or_else(Error::stopped);
    };
    let number = wanted
        .to_str()
        .ok()
        .and_then(|text| text.parse::<usize>().ok());
    number
        .and_then(|number| server.ranks.get(number))
        .ok_or_else(|| {
            let ranks = server.ranks.len();
            Error::bad_request(format!("{RANK_WANTED} must be a number below {ranks}"))
        })
}
