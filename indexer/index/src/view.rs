//! Plain views of the fold for HTTP and the plane, each made under one read lock.

use std::time::{Duration, Instant};

use serde::Serialize;
use warmroute_proto::query::{SourceState, unknown_label};
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::view::{self, DigestView, PAGE_SOURCES_MAX, SourceDigest, ViewPageRequest};
use warmroute_proto::{EngineHealth, Source, WorkerId};

use crate::fold::{Fold, SourceStatus};
use crate::tree::SourceNodes;

/// Bytes at which a page of a view ends: half of what NATS accepts by default.
const PAGE_BYTES_MAX: usize = 512 << 10;

/// Encoded bytes of a source in a view, without its worker's name.
const SOURCE_BYTES: usize = 150;

/// A worker's registry entry and its sources.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WorkerView {
    pub instance_id: WorkerId,
    /// Null if the registry never listed it.
    pub entry: Option<WorkerEntry>,
    /// Its registration is present.
    pub registered: bool,
    pub sources: Vec<SourceView>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SourceView {
    #[serde(flatten)]
    pub digest: SourceDigest,
    pub tiers: TierWords,
    pub proof_age_ms: Option<u64>,
    pub engine_health: EngineHealth,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TierWords {
    pub gpu: SourceState,
    pub cpu: SourceState,
    pub disk: SourceState,
}

/// A source with all that it holds, of one moment.
pub struct SourceCut {
    pub digest: SourceDigest,
    /// `None` while the source is not folded.
    pub nodes: Option<SourceNodes>,
}

pub fn digest(fold: &Fold, now: Instant) -> DigestView {
    DigestView {
        position: fold.log().map(|_| fold.position()),
        sources: fold
            .statuses(now)
            .map(|(source, status)| source_digest(source, &status))
            .collect(),
    }
}

pub fn workers(fold: &Fold, now: Instant) -> Vec<WorkerView> {
    let mut views: Vec<WorkerView> = fold
        .workers()
        .map(|worker| WorkerView {
            instance_id: worker.entry.worker.clone(),
            entry: Some(worker.entry.clone()),
            registered: worker.gone_since.is_none(),
            sources: Vec::new(),
        })
        .collect();
    for (source, status) in fold.statuses(now) {
        let found = views.binary_search_by(|view| view.instance_id.cmp(&source.worker));
        let at = found.unwrap_or_else(|at| {
            let view = WorkerView {
                instance_id: source.worker.clone(),
                entry: None,
                registered: false,
                sources: Vec::new(),
            };
            views.insert(at, view);
            at
        });
        if let Some(view) = views.get_mut(at) {
            view.sources.push(source_view(source, &status));
        }
    }
    views
}

pub fn cut(fold: &Fold, source: &Source, now: Instant) -> Option<SourceCut> {
    let status = fold.status(source, now)?;
    Some(SourceCut {
        digest: source_digest(source, &status),
        nodes: fold.nodes_of(source),
    })
}

/// A page of the fold's view. The process fills in version, readiness, clock and snapshot interval.
pub fn page(fold: &Fold, ask: &ViewPageRequest, now: Instant) -> view::ViewPage {
    let sources_max = ask.sources_max.clamp(1, PAGE_SOURCES_MAX) as usize;
    let behind = |source: &Source| ask.after.as_ref().is_none_or(|after| source > after);
    let mut wanted = fold
        .statuses(now)
        .filter(|(source, _)| behind(source))
        .map(|(source, status)| full_view(source, &status));
    let (mut sources, mut bytes) = (Vec::new(), 0);
    while sources.len() < sources_max && bytes < PAGE_BYTES_MAX {
        let Some(next) = wanted.next() else {
            break;
        };
        bytes += SOURCE_BYTES + next.source.worker.as_str().len();
        sources.push(next);
    }
    view::ViewPage {
        version: String::new(),
        ready: false,
        log: fold.log(),
        position: fold.position(),
        lag_messages: fold.lag(),
        lag_ms: fold.lag_age(now).map(milliseconds),
        unix_ns: 0,
        snapshot_every_secs: None,
        sources,
        more: wanted.next().is_some(),
    }
}

fn full_view(source: &Source, status: &SourceStatus) -> view::SourceView {
    view::SourceView {
        source: source.clone(),
        generation: status.generation,
        number: status.number,
        engine_seq: status.engine_seq,
        states: status.states,
        reason: status.reason,
        doubt: status.fault,
        state_age_ms: milliseconds(status.state_age),
        proof_age_ms: status.proof_age.map(milliseconds),
        digest: status.digest,
        health: status.health,
        begun_lately: status.generations_lately,
    }
}

fn milliseconds(age: Duration) -> u64 {
    u64::try_from(age.as_millis()).unwrap_or(u64::MAX)
}

fn source_digest(source: &Source, status: &SourceStatus) -> SourceDigest {
    SourceDigest {
        worker: source.worker.clone(),
        dp_rank: source.dp_rank,
        state: status.states.gpu,
        reason: unknown_label(status.states.gpu, status.reason),
        generation: status.generation,
        number: status.number,
        engine_seq: status.engine_seq,
        blocks: status.digest.map(|digest| digest.count),
        digest: status.digest.map(|digest| digest.hex()),
    }
}

fn source_view(source: &Source, status: &SourceStatus) -> SourceView {
    let age = status.proof_age;
    SourceView {
        digest: source_digest(source, status),
        tiers: TierWords {
            gpu: status.states.gpu,
            cpu: status.states.cpu,
            disk: status.states.disk,
        },
        proof_age_ms: age.map(milliseconds),
        engine_health: status.health,
    }
}
