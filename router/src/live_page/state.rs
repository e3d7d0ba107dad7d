//! The `state` event: what the page shows of one moment. Pure; the fields' names are the page's.

use serde::Serialize;
use serde_json::Value;
use warmroute_proto::query::SourceState;
use warmroute_proto::registry::DrainState;
use warmroute_proto::view::SourceView;
use warmroute_proto::{RouterId, Source, Tiers, WorkerId};

use super::history::HistoryPoint;
use super::indexers::LiveIndexer;
use crate::admission::QueueStatus;
use crate::fleet::FleetWorker;
use crate::route::SourceFigures;
use crate::sync::{ReplicaStatus, RouterView};

/// One moment of a router and of what it knows.
#[derive(Debug, Serialize)]
pub(super) struct LiveState {
    pub router: LiveRouter,
    pub point: HistoryPoint,
    /// What keeps the router from routing, in words.
    pub faults: Vec<String>,
    pub workers: Vec<LiveWorker>,
    /// As `/admin/decisions` has them, newest first.
    pub decisions: Vec<Value>,
    /// `None` while no replica runs.
    pub routers: Option<LiveReplication>,
    pub indexers: Vec<LiveIndexer>,
}

/// The router of this page.
#[derive(Debug, Serialize)]
pub(super) struct LiveRouter {
    pub id: String,
    /// Its pod or machine.
    pub host: &'static str,
    pub version: &'static str,
    /// `serving`, `draining` or `ending`.
    pub phase: &'static str,
    /// Requests that wait for a worker.
    pub waiting_requests: i64,
    /// Requests that wait while all workers of their model are full.
    pub queued_requests: usize,
    pub queues: Vec<LiveQueue>,
    pub connections: i64,
}

/// One model's queue.
#[derive(Debug, Serialize)]
pub(super) struct LiveQueue {
    pub model: String,
    pub requests: usize,
    pub oldest_ms: Option<f64>,
    /// Requests that leave it.
    pub leaving_per_sec: Option<f64>,
}

impl From<QueueStatus> for LiveQueue {
    fn from(status: QueueStatus) -> Self {
        Self {
            model: status.model,
            requests: status.size.requests,
            oldest_ms: status.oldest.map(|oldest| oldest.as_secs_f64() * 1e3),
            leaving_per_sec: status.leaving_per_sec,
        }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct LiveWorker {
    pub worker: WorkerId,
    pub url: String,
    pub models: Vec<String>,
    pub health: &'static str,
    /// The registry has it.
    pub registered: bool,
    pub drain: &'static str,
    pub role: &'static str,
    pub breaker: &'static str,
    /// Checks at its registration that failed: no credit for its cache.
    pub failed_checks: Vec<&'static str>,
    pub blocks_per_rank: Option<u64>,
    pub ranks: Vec<LiveRank>,
}

/// One source.
#[derive(Debug, Serialize)]
pub(super) struct LiveRank {
    pub rank: u32,
    /// `None` if the index does not know the source.
    pub tiers: Option<Tiers<SourceState>>,
    /// Its engine publishes no events, as far as the shim sees.
    pub is_without_events: bool,
    /// Pairs of block and tier that the index holds.
    pub cached_blocks: Option<u64>,
    pub active_requests: u32,
    /// Requests of its engine from elsewhere.
    pub foreign_requests: u32,
    pub prefill_tokens: u64,
    pub decode_blocks: u64,
    pub ttft_ms: Option<f64>,
    pub ttft_ratio: Option<f64>,
    pub is_stalled: bool,
    pub is_demoted: bool,
}

/// The other routers.
#[derive(Debug, Serialize)]
pub(super) struct LiveReplication {
    /// This router does not receive its own broadcasts.
    pub is_isolated: bool,
    pub peers: Vec<LivePeer>,
}

#[derive(Debug, Serialize)]
pub(super) struct LivePeer {
    pub router: String,
    /// `following`, `lacking` or `dead`.
    pub standing: crate::sync::ViewStatus,
    pub active_requests: u64,
    /// Requests by which the view differed from its last heartbeat.
    pub divergence: u64,
    /// Whether the last digests at one number were equal; `None` before the first comparison.
    pub is_equal: Option<bool>,
    pub silent_ms: u64,
}

/// What one source's row is made of.
pub(super) struct RankParts<'a> {
    pub source: &'a Source,
    pub figures: SourceFigures,
    pub view: Option<&'a SourceView>,
    pub is_demoted: bool,
}

impl LiveWorker {
    pub(super) fn new(worker: FleetWorker, drain: DrainState, ranks: Vec<LiveRank>) -> Self {
        let named = worker.checks.named();
        let failed = named.into_iter().filter(|(_, check)| check.is_failure());
        Self {
            health: worker.health.label(),
            breaker: worker.breaker.label(),
            registered: worker.registered,
            drain: drain.label(),
            role: worker.entry.role.label(),
            failed_checks: failed.map(|(name, _)| name).collect(),
            worker: worker.entry.worker,
            url: worker.entry.url,
            models: worker.entry.models,
            blocks_per_rank: worker.entry.blocks_per_rank,
            ranks,
        }
    }
}

impl From<RankParts<'_>> for LiveRank {
    fn from(parts: RankParts<'_>) -> Self {
        let (figures, view) = (parts.figures, parts.view);
        Self {
            rank: parts.source.dp_rank.0,
            tiers: view.map(|view| view.states),
            is_without_events: view.is_some_and(SourceView::is_without_events),
            cached_blocks: view.and_then(|view| Some(view.digest?.count)),
            active_requests: figures.active_requests,
            foreign_requests: figures.foreign_requests,
            prefill_tokens: figures.prefill_tokens,
            decode_blocks: figures.decode_blocks,
            ttft_ms: figures.ttft.map(|ttft| ttft.as_secs_f64() * 1e3),
            ttft_ratio: figures.ttft_ratio,
            is_stalled: figures.is_stalled,
            is_demoted: parts.is_demoted,
        }
    }
}

impl LiveReplication {
    /// The status lists this router first.
    pub(super) fn of(status: &ReplicaStatus, own: RouterId) -> Self {
        let peers = status.replicas.iter().filter(|view| view.router != own);
        Self {
            is_isolated: status.is_deaf,
            peers: peers.map(LivePeer::of).collect(),
        }
    }
}

impl LivePeer {
    fn of(view: &RouterView) -> Self {
        Self {
            router: view.router.to_string(),
            standing: view.standing,
            active_requests: view.digest.active_requests,
            divergence: view.divergence,
            is_equal: view
                .compared
                .map(|compared| compared.theirs == compared.ours),
            silent_ms: view.silent_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use warmroute_proto::{Digest, DpRank, EngineHealth};

    use super::*;

    fn view(source: &Source) -> SourceView {
        SourceView {
            source: source.clone(),
            generation: None,
            number: None,
            engine_seq: None,
            states: Tiers {
                gpu: SourceState::Exact,
                cpu: SourceState::CatchingUp,
                disk: SourceState::Unknown,
            },
            reason: None,
            doubt: None,
            state_age_ms: 0,
            proof_age_ms: None,
            digest: Some(Digest { count: 7, sum: 1 }),
            health: EngineHealth::Healthy,
            begun_lately: 0,
        }
    }

    #[test]
    fn a_rank_shows_load_and_the_indexs_view_with_units_in_names() {
        let source = Source {
            worker: "<b>w</b>".into(),
            dp_rank: DpRank(3),
        };
        let view = view(&source);
        let mut parts = RankParts {
            source: &source,
            figures: SourceFigures {
                active_requests: 2,
                foreign_requests: 5,
                prefill_tokens: 300,
                decode_blocks: 40,
                ttft: Some(std::time::Duration::from_millis(50)),
                ttft_ratio: None,
                is_stalled: true,
            },
            view: Some(&view),
            is_demoted: false,
        };
        let rank = |parts| serde_json::to_value(LiveRank::from(parts)).unwrap();
        let shown = rank(RankParts { ..parts });
        let expected = json!({
            "rank": 3,
            "tiers": { "gpu": "exact", "cpu": "catching_up", "disk": "unknown" },
            "is_without_events": false,
            "cached_blocks": 7,
            "active_requests": 2,
            "foreign_requests": 5,
            "prefill_tokens": 300,
            "decode_blocks": 40,
            "ttft_ms": 50.0,
            "ttft_ratio": null,
            "is_stalled": true,
            "is_demoted": false,
        });
        assert_eq!(shown, expected);
        let silent = SourceView {
            states: Tiers::all(SourceState::Unknown),
            ..view.clone()
        };
        let shown = rank(RankParts {
            view: Some(&silent),
            ..parts
        });
        assert_eq!(shown["is_without_events"], true);
        (parts.view, parts.figures.ttft) = (None, None);
        let unknown = rank(parts);
        for field in ["tiers", "cached_blocks", "ttft_ms"] {
            assert_eq!(unknown[field], Value::Null, "{field}");
        }
    }
}
