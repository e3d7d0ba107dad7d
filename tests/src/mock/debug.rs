//! What only a mock engine can tell: what it truly holds, who came and went; and faults on demand.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Value, json};
use warmroute_router::sim::{Held, Medium};

use super::error::Error;
use super::generate::parse;
use super::server::Server;

/// Faults are for every rank unless one is named; what is not given stays as it is.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fault {
    rank: Option<usize>,
    /// So many further batches are not sent live, but kept for replays.
    drop_batches: Option<u64>,
    /// Requests are taken, but nothing is computed.
    hang: Option<bool>,
    /// The status that `/health` answers, for the whole server.
    health: Option<u16>,
}

/// Per rank what is held, between two steps: as of the last published batch, but for a reset, which
/// the engine tells with its next one. Hashes are text: they need 64 bits.
pub(super) async fn blocks(State(server): State<Arc<Server>>) -> Result<Json<Value>, Error> {
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

pub(super) async fn counters(State(server): State<Arc<Server>>) -> Json<Value> {
    let ranks = server.ranks.iter().map(|rank| {
        let (counters, active) = rank.counters();
        json!({
            "dp_rank": rank.number,
            "started": counters.started,
            "finished": counters.finished,
            "aborted": counters.aborted,
            "active": active,
        })
    });
    Json(json!({"ranks": ranks.collect::<Vec<Value>>()}))
}

pub(super) async fn fault(
    State(server): State<Arc<Server>>,
    body: Bytes,
) -> Result<Json<Value>, Error> {
    let fault =
        Fault::deserialize(parse(&body)?).map_err(|error| Error::bad_request(error.to_string()))?;
    if let Some(health) = fault.health {
        server.health.store(health, Ordering::Relaxed);
    }
    let named = |number| fault.rank.is_none_or(|rank| rank == number);
    for (number, rank) in server.ranks.iter().enumerate() {
        if named(number) {
            rank.set_faults(|faults| {
                faults.drop_batches = fault.drop_batches.unwrap_or(faults.drop_batches);
                faults.hang = fault.hang.unwrap_or(faults.hang);
            });
        }
    }
    Ok(Json(json!({"ok": true})))
}

fn block(held: &Held) -> Value {
    let tier = match held.medium {
        Medium::Gpu => "gpu",
        Medium::Cpu => "cpu",
    };
    json!({
        "prefix_hash": held.prefix.0.to_string(), "tier": tier, "references": held.copies,
    })
}
