//! The form of an SGLang server (0.5.23), where it differs from vLLM's: routes, metrics and events.
//! Written from its sources; `publisher-shim/mirror/testdata` has what its publisher really sends.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Map, Value, json};
use warmroute_sim::sim::{CacheEvent, ExtraKey, StoredBlocks};

use crate::error::Error;
use crate::server::{Server, health, tokenize};

const SGLANG_VERSION: &str = "0.5.23";

pub(crate) fn routes() -> Router<Arc<Server>> {
    Router::new()
        .route("/health_generate", get(health))
        .route("/tokenize", post(tokenize))
        .route("/server_info", get(server_info))
        .route("/flush_cache", post(flush_cache))
        .route("/metrics", get(metrics))
}

/// The first port of ranks with ports in a row, as SGLang has them.
async fn server_info(State(server): State<Arc<Server>>) -> Json<Value> {
    let (engine, ranks) = (&server.args.engine, server.ranks.len());
    let publisher = &server.ranks[0].publisher;
    let mut events = json!({
        "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": publisher.kv_port,
        "topic": server.args.events.topic, "block_size": engine.block_size, "dp_size": ranks,
    });
    if let Some(port) = publisher.replay_port {
        events["replay_endpoint_port_base"] = port.into();
    }
    Json(json!({
        "model_path": server.model, "page_size": engine.block_size, "dp_size": ranks,
        "max_total_num_tokens": engine.num_blocks * engine.block_size,
        "speculative_algorithm": null, "version": SGLANG_VERSION,
        "kv_events": (!server.args.events.no_events).then_some(events),
    }))
}

async fn flush_cache(State(server): State<Arc<Server>>) -> Response {
    // Asks every rank, even after a refusal.
    let flushed: Vec<bool> = server.ranks.iter().map(|rank| rank.flush_cache()).collect();
    match flushed.contains(&false) {
        true => (StatusCode::BAD_REQUEST, "Flush cache failed.\n").into_response(),
        false => "Cache flushed.\n".into_response(),
    }
}

/// What `/tokenize` refuses, although chats may have both.
pub(crate) fn check_tokenize(request: &Value) -> Result<(), Error> {
    let is_continued = request["continue_final_message"] == true;
    match is_continued && request["add_generation_prompt"] == false {
        true => Err(Error::bad_request(
            "continue_final_message needs add_generation_prompt to open the assistant turn.",
        )),
        false => Ok(()),
    }
}

/// One series a rank, as with `--enable-metrics`.
async fn metrics(State(server): State<Arc<Server>>) -> String {
    let mut page = String::new();
    for rank in &server.ranks {
        let load = rank.load();
        let used = load.used_blocks * 1000 / load.usable_blocks.max(1);
        let values = [
            ("num_running_reqs", load.running.to_string()),
            ("num_queue_reqs", load.waiting.to_string()),
            ("token_usage", format!("{}.{:03}", used / 1000, used % 1000)),
        ];
        for (name, value) in values {
            let labels = format!(
                "model_name=\"{}\",dp_rank=\"{}\"",
                server.model, rank.number
            );
            // Writing to a string cannot fail.
            writeln!(page, "sglang:{name}{{{labels}}} {value}").unwrap_or_default();
        }
    }
    page
}

/// A payload: hashes are signed, there are no groups, and fields without a value are left out.
pub(crate) fn payload(
    rank: u32,
    unix_seconds: f64,
    events: &[CacheEvent],
) -> Result<Vec<u8>, rmp_serde::encode::Error> {
    let events: Vec<Value> = events.iter().map(event).collect();
    rmp_serde::to_vec_named(&(unix_seconds, events, rank))
}

fn event(event: &CacheEvent) -> Value {
    match event {
        CacheEvent::Stored(stored) => Value::Object(stored_fields(stored)),
        CacheEvent::Removed { hash, medium, .. } => json!({
            "type": "BlockRemoved", "block_hashes": [hash.0.cast_signed()],
            "medium": medium.name(),
        }),
        CacheEvent::Cleared => json!({"type": "AllBlocksCleared"}),
    }
}

fn stored_fields(stored: &StoredBlocks) -> Map<String, Value> {
    let hashes = stored.hashes.iter().map(|hash| hash.0.cast_signed());
    let parent = stored.parent.map(|hash| hash.0.cast_signed());
    let mut fields = Map::new();
    let mut add = |key: &str, value: Value| fields.insert(key.to_owned(), value);
    add("type", "BlockStored".into());
    add("block_hashes", hashes.collect());
    add("parent_block_hash", parent.into());
    add("token_ids", stored.tokens.clone().into());
    add("block_size", stored.block_size.tokens().into());
    add("lora_id", Value::Null);
    add("medium", stored.medium.name().into());
    // SGLang repeats it behind the first block, where nothing depends on it.
    let keys = stored.extra_keys.iter().flatten().flatten();
    for key in keys {
        if let ExtraKey::Salt(salt) = key {
            add("cache_salt", salt.to_string().into());
        }
    }
    if let Some(name) = &stored.lora_name {
        add("lora_name", name.to_string().into());
    }
    fields
}
