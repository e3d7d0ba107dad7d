//! Sources that can serve a model: a fold of the registry, health checks and drains.
//!
//! Leases do not matter here: a healthy worker without knowledge is routed by load. A worker that
//! was not checked yet is used only if none is healthy, so that a start does not wait for a dead
//! worker.
//!
//! Candidate lists are rebuilt on changes, not per request. The decision itself checks what changes
//! per request: stalled, full, tried.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use warmroute_proto::registry::{DrainState, RANKS_MAX, WorkerEntry, WorkerRole};
use warmroute_proto::{BlockCut, DpRank, Seed, Source, WorkerId};

use super::source_table::{SourceId, SourceTable};

/// vLLM's default.
const ASSUMED_BLOCK_TOKENS: u32 = 16;

/// Result of the router's health checks of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    /// Not checked yet.
    #[default]
    Unknown,
    Healthy,
    /// It failed requests, and has answered none since: for requests that another worker can answer
    /// where it fails.
    OnTrial,
    Unhealthy,
}

/// Why no source can take a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteRefusal {
    #[error("the model {0:?} does not exist")]
    UnknownModel(String),
    #[error("no worker is registered")]
    NoWorkers,
    #[error("no worker of this model is healthy")]
    AllUnhealthy,
    #[error("all healthy workers of this model are draining")]
    AllDraining,
    #[error("all workers of this model have the role prefill, and none can answer")]
    OnlyPrefill,
    #[error("no worker of this model has the role prefill")]
    NoPrefill,
    #[error("every worker of this model was tried")]
    AllTried,
    #[error("all workers of this model are full")]
    Full { retry_after: Duration },
}

/// The part of a request that a source is chosen for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Leg {
    /// All of it: sources with any role but prefill.
    #[default]
    Whole,
    /// Its prompt: sources with the role prefill.
    Prefill,
    /// Its answer, to a prompt whose blocks come from a prefill source: sources with the role decode;
    /// where none is usable, those that serve whole requests.
    Decode,
}

impl Leg {
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// A source that can take requests for a model.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub id: SourceId,
    pub source: Source,
    pub url: Arc<str>,
    pub cut: Option<BlockCut>,
    /// All KV groups are main attention: a credited block must be cached.
    pub main_attention_only: bool,
    pub role: WorkerRole,
    /// [`Health::OnTrial`].
    pub on_trial: bool,
}

/// A model name as clients use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedModel {
    pub name: String,
    /// The base model, which determines the tokenizer; its own name for a base model.
    pub base: String,
    pub kind: ModelKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelKind {
    Base,
    Lora,
}

impl ServedModel {
    /// Hash seed of its blocks.
    #[must_use]
    pub fn seed(&self, cache_salt: Option<&str>) -> Seed {
        match self.kind {
            ModelKind::Base => Seed::new(None, cache_salt),
            ModelKind::Lora => Seed::new(Some(&self.name), cache_salt),
        }
    }
}

/// All registered workers and the models that they serve.
#[derive(Clone, Debug, Default)]
pub struct WorkerDirectory {
    workers: BTreeMap<WorkerId, WorkerStatus>,
    models: BTreeMap<String, ModelCandidates>,
}

#[derive(Clone, Debug)]
pub struct WorkerStatus {
    pub entry: WorkerEntry,
    pub health: Health,
    pub drain: DrainState,
}

#[derive(Clone, Debug)]
struct ModelCandidates {
    model: ServedModel,
    whole: LegCandidates,
    prefill: LegCandidates,
    decode: LegCandidates,
}

type LegCandidates = Result<Vec<Candidate>, RouteRefusal>;

impl WorkerDirectory {
    /// Replaces the registered workers. A worker that stays keeps its drain, and its health unless
    /// its URL changed.
    pub fn set_workers(&mut self, table: &mut SourceTable, entries: &[WorkerEntry]) {
        let mut old = std::mem::take(&mut self.workers);
        for entry in entries {
            let known = old.remove(&entry.worker);
            let drain = known.as_ref().map_or_else(DrainState::default, |w| w.drain);
            let same = known.filter(|known| known.entry.url == entry.url);
            let worker = WorkerStatus {
                entry: entry.clone(),
                health: same.map_or_else(Health::default, |w| w.health),
                drain,
            };
            self.workers.insert(entry.worker.clone(), worker);
        }
        self.rebuild(table);
    }

    /// Returns whether this changed something. Unregistered workers have no health.
    pub fn set_health(
        &mut self,
        table: &mut SourceTable,
        worker: &WorkerId,
        health: Health,
    ) -> bool {
        let Some(known) = self.workers.get_mut(worker) else {
            return false;
        };
        let changed = std::mem::replace(&mut known.health, health) != health;
        if changed {
            self.rebuild(table);
        }
        changed
    }

    /// Returns whether this changed something.
    pub fn set_drain(
        &mut self,
        table: &mut SourceTable,
        worker: &WorkerId,
        drain: DrainState,
    ) -> bool {
        let Some(known) = self.workers.get_mut(worker) else {
            return false;
        };
        let changed = std::mem::replace(&mut known.drain, drain) != drain;
        if changed {
            self.rebuild(table);
        }
        changed
    }

    /// All registered workers, in the order of their names.
    pub fn workers(&self) -> impl Iterator<Item = &WorkerStatus> {
        self.workers.values()
    }

    /// Tokens in a block of the worker; the engines' default if it is not known.
    #[must_use]
    pub fn block_tokens(&self, worker: &WorkerId) -> u32 {
        let known = self.workers.get(worker);
        let size = known.and_then(|known| known.entry.block_size);
        size.map_or(ASSUMED_BLOCK_TOKENS, |size| {
            u32::try_from(size.tokens()).unwrap_or(u32::MAX)
        })
    }

    /// KV blocks of each rank of the worker, if they are known.
    #[must_use]
    pub fn blocks_per_rank(&self, worker: &WorkerId) -> Option<u64> {
        self.workers.get(worker)?.entry.blocks_per_rank
    }

    #[must_use]
    pub fn contains(&self, worker: &WorkerId) -> bool {
        self.workers.contains_key(worker)
    }

    /// All served models, healthy or not.
    pub fn models(&self) -> impl Iterator<Item = &ServedModel> {
        self.models.values().map(|served| &served.model)
    }

    pub fn model(&self, name: &str) -> Result<&ServedModel, RouteRefusal> {
        self.served(name).map(|served| &served.model)
    }

    pub fn candidates(&self, name: &str, leg: Leg) -> Result<&[Candidate], RouteRefusal> {
        let served = self.served(name)?;
        let candidates = match leg {
            Leg::Whole => &served.whole,
            Leg::Prefill => &served.prefill,
            Leg::Decode => &served.decode,
        };
        match candidates {
            Ok(candidates) => Ok(candidates),
            Err(refusal) => Err(refusal.clone()),
        }
    }

    fn served(&self, name: &str) -> Result<&ModelCandidates, RouteRefusal> {
        if self.workers.is_empty() {
            return Err(RouteRefusal::NoWorkers);
        }
        self.models
            .get(name)
            .ok_or_else(|| RouteRefusal::UnknownModel(name.to_owned()))
    }

    fn rebuild(&mut self, table: &mut SourceTable) {
        let mut names: BTreeMap<&str, Vec<&WorkerStatus>> = BTreeMap::new();
        // A name that is both a base model and an adapter is a base model.
        for worker in self.workers.values() {
            for name in &worker.entry.models {
                names.entry(name).or_default().push(worker);
            }
        }
        let mut adapters: BTreeMap<&str, Vec<&WorkerStatus>> = BTreeMap::new();
        for worker in self.workers.values() {
            for lora in &worker.entry.loras {
                if !names.contains_key(lora.name.as_str()) {
                    adapters.entry(&lora.name).or_default().push(worker);
                }
            }
        }
        let bases = names
            .into_iter()
            .map(|(name, workers)| serve(table, name, ModelKind::Base, &workers));
        let mut models: BTreeMap<String, ModelCandidates> = bases
            .map(|served| (served.model.name.clone(), served))
            .collect();
        for (name, workers) in adapters {
            let served = serve(table, name, ModelKind::Lora, &workers);
            models.insert(name.to_owned(), served);
        }
        self.models = models;
    }
}

fn serve(
    table: &mut SourceTable,
    name: &str,
    kind: ModelKind,
    workers: &[&WorkerStatus],
) -> ModelCandidates {
    let base = match kind {
        ModelKind::Base => None,
        ModelKind::Lora => workers.iter().find_map(|worker| base_of(worker, name)),
    };
    ModelCandidates {
        model: ServedModel {
            name: name.to_owned(),
            base: base.unwrap_or(name).to_owned(),
            kind,
        },
        whole: leg_candidates(table, workers, Leg::Whole),
        prefill: leg_candidates(table, workers, Leg::Prefill),
        decode: leg_candidates(table, workers, Leg::Decode),
    }
}

fn leg_candidates(
    table: &mut SourceTable,
    workers: &[&WorkerStatus],
    leg: Leg,
) -> Result<Vec<Candidate>, RouteRefusal> {
    let with = |roles: &[WorkerRole]| -> Vec<&WorkerStatus> {
        let all = workers.iter().copied();
        all.filter(|worker| roles.contains(&worker.entry.role))
            .collect()
    };
    let prefill = with(&[WorkerRole::Prefill]);
    let answering = with(&[WorkerRole::Both, WorkerRole::Decode]);
    let chosen = match leg {
        Leg::Whole if answering.is_empty() => return Err(RouteRefusal::OnlyPrefill),
        Leg::Whole => usable(&answering)?,
        Leg::Prefill | Leg::Decode if prefill.is_empty() => return Err(RouteRefusal::NoPrefill),
        Leg::Prefill => usable(&prefill)?,
        Leg::Decode => usable(&with(&[WorkerRole::Decode])).or_else(|_| usable(&answering))?,
    };
    let mut candidates = Vec::new();
    for worker in chosen {
        add_ranks(table, worker, &mut candidates);
    }
    Ok(candidates)
}

/// The adapter's parent, or the worker's first model if the engine does not report one.
fn base_of<'a>(worker: &'a WorkerStatus, adapter: &str) -> Option<&'a str> {
    let entry = &worker.entry;
    let lora = entry.loras.iter().find(|lora| lora.name == adapter)?;
    let parent = lora.parent.as_deref();
    parent.or_else(|| entry.models.first().map(String::as_str))
}

/// The healthy workers, or the unchecked ones if none is healthy.
fn usable<'a>(workers: &[&'a WorkerStatus]) -> Result<Vec<&'a WorkerStatus>, RouteRefusal> {
    let with = |healths: &[Health]| -> Vec<&'a WorkerStatus> {
        let all = workers.iter().copied();
        all.filter(|worker| healths.contains(&worker.health))
            .collect()
    };
    let serving = |workers: &[&'a WorkerStatus]| -> Vec<&'a WorkerStatus> {
        let all = workers.iter().copied();
        all.filter(|worker| worker.drain == DrainState::Serving)
            .collect()
    };
    let healthy = with(&[Health::Healthy, Health::OnTrial]);
    let unchecked = with(&[Health::Unknown]);
    for group in [&healthy, &unchecked] {
        let chosen = serving(group);
        if !chosen.is_empty() {
            return Ok(chosen);
        }
    }
    if healthy.is_empty() && unchecked.is_empty() {
        Err(RouteRefusal::AllUnhealthy)
    } else {
        Err(RouteRefusal::AllDraining)
    }
}

fn add_ranks(table: &mut SourceTable, worker: &WorkerStatus, candidates: &mut Vec<Candidate>) {
    let entry = &worker.entry;
    let url: Arc<str> = entry.url.as_str().into();
    for rank in 0..entry.ranks.min(RANKS_MAX) {
        let source = Source {
            worker: entry.worker.clone(),
            dp_rank: DpRank(rank),
        };
        candidates.push(Candidate {
            id: table.intern(&source),
            source,
            url: Arc::clone(&url),
            cut: entry.block_cut(),
            main_attention_only: entry.main_attention_only,
            role: entry.role,
            on_trial: worker.health == Health::OnTrial,
        });
    }
}

#[cfg(test)]
mod tests;
