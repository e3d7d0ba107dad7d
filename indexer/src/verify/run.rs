//! Polls until everything was compared or the time is over.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout_at};
use uuid::Uuid;
use warmroute_plane::PlaneError;
use warmroute_proto::hash::local_hashes;
use warmroute_proto::query::{IndexAnswer, SourceState};
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::view::ViewPage;
use warmroute_proto::{DpRank, Seed, Source, WorkerId};

use super::Comparison;
use super::engine::{EngineClient, PROBE_BLOCKS, probe_tokens};
use crate::doctor::collect::PlaneReader;
use crate::doctor::{Code, Report};

/// Time between polls, in which heartbeats are read.
const ROUND: Duration = Duration::from_millis(200);

/// Polls between two lists of an engine, each of which is its whole cache.
const LIST_EVERY: u32 = 5;

/// Time within which shim and indexers notice a restarted engine.
const RESTART_SEEN: Duration = Duration::from_secs(3);

/// Deadline for an index to credit what its engine just cached.
const CREDIT_DEADLINE: Duration = Duration::from_secs(10);
const CREDIT_PAUSE: Duration = Duration::from_millis(50);

/// Options of a comparison.
#[derive(Clone, Copy, Debug)]
pub struct VerifyOptions {
    /// Time limit of polling.
    pub within: Duration,
    /// Sends requests to engines.
    pub probe: bool,
}

/// Compares all indexers with each other, with the shims, and with engines that list their blocks.
/// An error means that there was nothing to compare.
pub async fn run(
    look: &PlaneReader,
    options: VerifyOptions,
    server: String,
) -> Result<Report, PlaneError> {
    let registry = look.registry().await?;
    let ids: Vec<String> = registry.indexers.keys().cloned().collect();
    if ids.is_empty() {
        return Err(PlaneError::Unavailable("no indexer is registered".into()));
    }
    let mut engines = engines(&registry.workers);
    let mut comparison = Comparison::new(ids.iter().cloned());
    comparison.expect(registry.workers.values().flat_map(sources));
    let mut heartbeats = look.heartbeats().await?;
    let end = Instant::now() + options.within;
    let mut views = BTreeMap::new();
    for round in 0_u32.. {
        if round.is_multiple_of(LIST_EVERY) {
            list(&mut engines, &mut comparison).await;
        }
        views = look.views(ids.iter().cloned()).await;
        comparison.add_views(&views);
        // At least one of each shim.
        let is_enough = round >= LIST_EVERY * 2 && comparison.is_complete();
        if is_enough || Instant::now() >= end {
            break;
        }
        let next = Instant::now() + ROUND;
        while let Ok(Some(message)) = timeout_at(next, heartbeats.next()).await {
            if let Ok(heartbeat) = look.heartbeat(&message) {
                comparison.add_heartbeat(&heartbeat);
            }
        }
    }
    if comparison.is_engine_contradicted() {
        sleep(RESTART_SEEN).await;
        views = look.views(ids.iter().cloned()).await;
        comparison.add_views(&views);
    }
    if let Ok(now) = look.registry().await {
        comparison.excuse(
            |worker| now.workers.contains_key(worker),
            |id| now.indexers.contains_key(id),
        );
    }
    for (id, view) in &views {
        if let Err(why) = view {
            comparison.find(Code::IndexerSilent, format!("{id}: {why}"));
        }
    }
    if options.probe {
        probe(look, &registry.workers, &views, &mut comparison).await;
    }
    Ok(comparison.report(look.namespace().to_string(), server))
}

fn sources(entry: &WorkerEntry) -> impl Iterator<Item = Source> {
    let worker = entry.worker.clone();
    (0..entry.ranks).map(move |rank| Source {
        worker: worker.clone(),
        dp_rank: DpRank(rank),
    })
}

/// Those that may list their blocks.
fn engines(workers: &BTreeMap<WorkerId, WorkerEntry>) -> BTreeMap<WorkerId, EngineClient> {
    let engine = |(id, entry): (&WorkerId, &WorkerEntry)| {
        let engine = EngineClient::new(entry).ok()?;
        Some((id.clone(), engine))
    };
    workers.iter().filter_map(engine).collect()
}

/// Engines that do not list their blocks are not asked again.
async fn list(engines: &mut BTreeMap<WorkerId, EngineClient>, comparison: &mut Comparison) {
    let asks = engines.iter().map(|(worker, engine)| async move {
        let ranks = engine.list().await;
        (worker.clone(), ranks)
    });
    for (worker, ranks) in join_all(asks).await {
        match ranks {
            Some(ranks) => comparison.add_list(&worker, ranks),
            None => drop(engines.remove(&worker)),
        }
    }
}

/// Every source that some replica credits.
async fn probe(
    look: &PlaneReader,
    workers: &BTreeMap<WorkerId, WorkerEntry>,
    views: &BTreeMap<String, Result<ViewPage, String>>,
    comparison: &mut Comparison,
) {
    for (id, view) in views {
        let Ok(view) = view else {
            continue;
        };
        let exact = view
            .sources
            .iter()
            .filter(|one| one.states.gpu == SourceState::Exact);
        for source in exact.map(|one| &one.source) {
            let Some(entry) = workers.get(&source.worker) else {
                continue;
            };
            match probe_one(look, id, entry, source.dp_rank).await {
                Ok(None) => {}
                Ok(Some((code, what))) => {
                    comparison.find(code, format!("{source} by indexer {id}: {what}"));
                }
                Err(why) => comparison.find(Code::ProbeSilent, format!("{source}: {why}")),
            }
        }
    }
}

/// What is wrong, if anything is.
async fn probe_one(
    look: &PlaneReader,
    id: &str,
    entry: &WorkerEntry,
    dp_rank: DpRank,
) -> anyhow::Result<Option<(Code, String)>> {
    let block_size = entry.block_size;
    let block_size = block_size.ok_or_else(|| anyhow::anyhow!("its block size is not known"))?;
    let source = Source {
        worker: entry.worker.clone(),
        dp_rank,
    };
    let tokens = probe_tokens(block_size, Uuid::new_v4().as_u64_pair().0);
    let engine = EngineClient::new(entry)?;
    engine.cached(entry, dp_rank, &tokens).await?;
    let blocks = local_hashes(&tokens, block_size, Seed::new(None, None));
    let end = Instant::now() + CREDIT_DEADLINE;
    let mut credited = 0;
    while credited < PROBE_BLOCKS && Instant::now() < end {
        credited = match look.query(id, blocks.clone()).await? {
            IndexAnswer::Runs { sources, .. } => {
                let mut sources = sources.into_iter().filter(|answer| answer.source == source);
                sources.next().map_or(0, |answer| answer.run.gpu as usize)
            }
            IndexAnswer::Behind { .. } => 0,
        };
        sleep(CREDIT_PAUSE).await;
    }
    if credited < PROBE_BLOCKS {
        let what = format!("{credited} of {PROBE_BLOCKS} blocks are credited");
        return Ok(Some((Code::ProbeUncredited, what)));
    }
    let wanted = (credited * block_size.tokens()) as u64;
    let cached = engine.cached(entry, dp_rank, &tokens).await?;
    let what = format!("{wanted} tokens are credited, {cached} were cached");
    Ok((cached < wanted).then_some((Code::ProbeShort, what)))
}
