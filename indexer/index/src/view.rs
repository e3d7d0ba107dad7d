//! Plain views of the fold for HTTP and the plane.
//!
//! A page and a cut are of one moment. What shows all sources is read in short steps, each of
//! one moment, because readers and the writer wait for each other.

use std::time::{Duration, Instant};

use serde::Serialize;
use warmroute_proto::query::{SourceState, unknown_label};
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::view::{
    self, DigestView, PAGE_BYTES_MAX, PAGE_SOURCES_MAX, SourceDigest, ViewPageRequest,
};
use warmroute_proto::{EngineHealth, Source, WorkerId};

use crate::fair_lock::FairReader;
use crate::fold::{Fold, SourceStatus};
use crate::tree::SourceNodes;

/// Sources, or workers, that are read under one lock.
const STEP: usize = 64;

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
    #[serde(skip_serializing_if = "SourceState::is_absent")]
    pub cpu: SourceState,
    #[serde(skip_serializing_if = "SourceState::is_absent")]
    pub disk: SourceState,
}

/// A source with all that it holds, of one moment.
pub struct SourceCut {
    pub digest: SourceDigest,
    /// `None` while the source is not folded.
    pub nodes: Option<SourceNodes>,
}

/// Every source with its status, in order.
pub fn statuses(fold: &FairReader<Fold>, now: Instant) -> Vec<(Source, SourceStatus)> {
    in_steps(|after: Option<&(Source, SourceStatus)>, all| {
        let fold = fold.read();
        let step = fold.statuses_after(after.map(|(source, _)| source), now);
        all.extend(
            step.take(STEP)
                .map(|(source, status)| (source.clone(), status)),
        );
    })
}

/// `step` adds up to [`STEP`] items to those that follow the one that it is given.
fn in_steps<T: Clone>(mut step: impl FnMut(Option<&T>, &mut Vec<T>)) -> Vec<T> {
    let mut all: Vec<T> = Vec::new();
    loop {
        let (before, last) = (all.len(), all.last().cloned());
        step(last.as_ref(), &mut all);
        if all.len() < before + STEP {
            return all;
        }
    }
}

/// Everything up to the position is in; sources may be ahead of it.
pub fn digest(fold: &FairReader<Fold>, now: Instant) -> DigestView {
    loop {
        let (log, position) = {
            let fold = fold.read();
            (fold.log(), fold.position())
        };
        // It went back to a snapshot, or to another log, before a step.
        let mut went_back = false;
        let sources = in_steps(|after: Option<&SourceDigest>, all| {
            let fold = fold.read();
            went_back |= fold.log() != log || fold.position() < position;
            let after = after.map(|last| Source {
                worker: last.worker.clone(),
                dp_rank: last.dp_rank,
            });
            let step = fold.statuses_after(after.as_ref(), now).take(STEP);
            all.extend(step.map(|(source, status)| source_digest(source, &status)));
        });
        if !went_back {
            return DigestView {
                position: log.map(|_| position),
                sources,
            };
        }
    }
}

/// Sources are read before workers: one without an entry had none after it was seen.
pub fn workers(fold: &FairReader<Fold>, now: Instant) -> Vec<WorkerView> {
    let statuses = statuses(fold, now);
    let mut views = in_steps(|after: Option<&WorkerView>, all| {
        let fold = fold.read();
        let step = fold.workers_after(after.map(|view| &view.instance_id));
        all.extend(step.take(STEP).map(|worker| WorkerView {
            instance_id: worker.entry.worker.clone(),
            entry: Some(worker.entry.clone()),
            registered: worker.gone_since.is_none(),
            sources: Vec::new(),
        }));
    });
    let mut unlisted = Vec::new();
    // The ranks of a worker follow each other.
    for ranks in statuses.chunk_by(|(one, _), (next, _)| one.worker == next.worker) {
        let Some((first, _)) = ranks.first() else {
            continue;
        };
        let sources = ranks
            .iter()
            .map(|(source, status)| source_view(source, status));
        let found = views.binary_search_by(|view| view.instance_id.cmp(&first.worker));
        match found.ok().and_then(|at| views.get_mut(at)) {
            Some(view) => view.sources.extend(sources),
            None => unlisted.push(WorkerView {
                instance_id: first.worker.clone(),
                entry: None,
                registered: false,
                sources: sources.collect(),
            }),
        }
    }
    views.append(&mut unlisted);
    views.sort_unstable_by(|one, other| one.instance_id.cmp(&other.instance_id));
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
    let mut wanted = fold
        .statuses_after(ask.after.as_ref(), now)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fair_lock::FairWriter;
    use crate::tests_support::World;

    /// More than one step of each kind, and steps that end with the last one.
    #[test]
    fn steps_show_every_source_and_worker_once() {
        for ranks in [1, STEP / 2, STEP, 2 * STEP, 3 * STEP + 1] {
            let mut world = World::new();
            let names: Vec<String> = (0..ranks).map(|at| format!("w{at:03}")).collect();
            for (at, name) in names.iter().enumerate() {
                world.publish(&format!("{name}/0"), Vec::new());
                if at % 2 == 0 {
                    world.publish(&format!("{name}/1"), Vec::new());
                    world.register(name);
                }
            }
            let (now, fold) = (world.now, FairWriter::new(world.fold).reader());
            let of_one_moment = fold.read();
            let expected = of_one_moment
                .statuses(now)
                .map(|(source, status)| (source.clone(), status));
            let expected: Vec<_> = expected.collect();
            assert_eq!(statuses(&fold, now), expected);
            let shown = workers(&fold, now);
            let ids: Vec<_> = shown.iter().map(|view| view.instance_id.as_str()).collect();
            assert_eq!(ids, names);
            for (at, view) in shown.iter().enumerate() {
                let is_listed = at % 2 == 0;
                assert_eq!(view.entry.is_some(), is_listed);
                assert_eq!(view.registered, is_listed);
                assert_eq!(view.sources.len(), if is_listed { 2 } else { 1 });
            }
        }
    }
}
