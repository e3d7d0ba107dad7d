//! Debug routes: held blocks, request counters, published history, and faults on demand.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Query, State};
use serde::Deserialize;
use serde_json::{Value, json};
use warmroute_sim::sim::{HeldPrefix, Medium};

use crate::error::Error;
use crate::fault::FaultKind;
use crate::generate::parse;
use crate::rank::StrangeMessage;
use crate::server::Server;

/// Applies to every rank unless one is named. Absent fields keep their value.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fault {
    rank: Option<usize>,
    /// Number of further batches that are kept for replays but not sent live.
    drop_batches: Option<u64>,
    /// Requests are accepted, but nothing is computed.
    hang: Option<bool>,
    /// Factor of the time of every step.
    slowdown: Option<u32>,
    /// Clears the cache. From then on clears are not published, or are again.
    mute_clears: Option<bool>,
    /// Events of the CPU tier are not published, or are again.
    mute_cpu: Option<bool>,
    /// Publishes one message that no known vLLM sends.
    publish: Option<StrangeMessage>,
    /// What generating routes do wrong, on the whole server.
    answer: Option<FaultKind>,
    /// `answer` is for requests whose body contains this text.
    marker: Option<String>,
    /// Status of `/health`, for the whole server.
    health: Option<u16>,
    /// Whether `/metrics` is served, by the whole server.
    metrics: Option<bool>,
}

/// Held blocks of each rank, between two steps: the state after the last published batch, except
/// after a reset, which the engine reports with its next batch. Hashes are text because they need
/// 64 bits.
pub(crate) async fn blocks(State(server): State<Arc<Server>>) -> Result<Json<Value>, Error> {
    let mut ranks = Vec::new();
    for rank in &server.ranks {
        let snapshot = rank.snapshot().await.ok_or_else(Error::stopped)?;
        let blocks: Vec<Value> = snapshot.held.iter().map(block).collect();
        ranks.push(json!({
            "dp_rank": rank.number,
            "last_seq": snapshot.published.last,
            "published_seq_that_changed": snapshot.published.last_change,
            "blocks": blocks,
        }));
    }
    Ok(Json(json!({"ranks": ranks})))
}

pub(crate) async fn counters(State(server): State<Arc<Server>>) -> Json<Value> {
    let ranks = server.ranks.iter().map(|rank| {
        let (counters, active) = rank.counters();
        json!({
            "dp_rank": rank.number,
            "started": counters.started,
            "finished": counters.finished,
            "aborted": counters.aborted,
            "active": active,
            "last_seq": rank.published().last,
            "stored": rank.published().stored,
            "published_seq_that_changed": rank.published().last_change,
        })
    });
    Json(json!({
        "ranks": ranks.collect::<Vec<Value>>(),
        "received": server.received.load(Ordering::Relaxed),
        "id_prompts": server.id_prompts.load(Ordering::Relaxed),
        "transfers": server.transfers.counters(),
        "image_renders": server.image_renders.load(Ordering::Relaxed),
    }))
}

pub(crate) async fn fault(
    State(server): State<Arc<Server>>,
    body: Bytes,
) -> Result<Json<Value>, Error> {
    let fault =
        Fault::deserialize(parse(&body)?).map_err(|error| Error::bad_request(error.to_string()))?;
    if let Some(health) = fault.health {
        server.health.store(health, Ordering::Relaxed);
    }
    if let Some(metrics) = fault.metrics {
        server.has_metrics.store(metrics, Ordering::Relaxed);
    }
    server.set_answer_fault(|answer| {
        answer.kind = fault.answer.unwrap_or(answer.kind);
        answer.marker = fault.marker.or_else(|| answer.marker.take());
    });
    let named = |number| fault.rank.is_none_or(|rank| rank == number);
    for (number, rank) in server.ranks.iter().enumerate() {
        if named(number) {
            rank.set_faults(|faults| {
                faults.drop_batches = fault.drop_batches.unwrap_or(faults.drop_batches);
                faults.hang = fault.hang.unwrap_or(faults.hang);
                faults.slowdown = fault.slowdown.unwrap_or(faults.slowdown);
                faults.mute_clears = fault.mute_clears.unwrap_or(faults.mute_clears);
                faults.mute_cpu = fault.mute_cpu.unwrap_or(faults.mute_cpu);
            });
            if let Some(message) = fault.publish {
                rank.publish_strange(message);
            }
            if fault.mute_clears.is_some() {
                rank.reset_prefix_cache();
            }
        }
    }
    Ok(Json(json!({"ok": true})))
}

#[derive(Deserialize)]
pub(crate) struct Since {
    rank: usize,
    /// The first wanted batch.
    from: u64,
}

/// Batches in one answer: a few megabytes.
const HISTORY_BATCHES: usize = 2_000;

/// The changes of published batches, as `MessagePack` of [`crate::HistoryBatch`]es. Empty at the
/// end.
pub(crate) async fn history(
    State(server): State<Arc<Server>>,
    Query(since): Query<Since>,
) -> Result<Vec<u8>, Error> {
    let rank = server.ranks.get(since.rank);
    let rank = rank.ok_or_else(|| Error::bad_request("no such rank"))?;
    let told = rank.with_history(|history| {
        let batches = history.from(since.from, HISTORY_BATCHES);
        batches.map(|batches| rmp_serde::to_vec(&batches))
    });
    match told {
        Some(Some(Ok(bytes))) => Ok(bytes),
        Some(Some(Err(error))) => Err(Error::bad_request(error.to_string())),
        Some(None) => Err(Error::bad_request("no longer kept")),
        None => Err(Error::bad_request("started without --history")),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Load {
    /// New blocks on every rank; 0 stops the load.
    blocks_per_sec: u32,
}

/// Makes the engine generate its own load.
pub(crate) async fn load(
    State(server): State<Arc<Server>>,
    body: Bytes,
) -> Result<Json<Value>, Error> {
    let load =
        Load::deserialize(parse(&body)?).map_err(|error| Error::bad_request(error.to_string()))?;
    server.rate.set(load.blocks_per_sec);
    Ok(Json(json!({"ok": true})))
}

fn block(held: &HeldPrefix) -> Value {
    let tier = match held.medium {
        Medium::Gpu => "gpu",
        Medium::Cpu => "cpu",
    };
    json!({
        "prefix_hash": held.prefix.0.to_string(), "tier": tier, "references": held.copies,
    })
}
