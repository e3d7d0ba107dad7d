//! Who could serve a model: a fold of the registry, health checks and operators' marks.
//!
//! Leases do not matter here: knowledge of a worker may be lost while it is healthy, and then it is
//! chosen by load. A worker that was not checked yet is used only where none is known to be healthy,
//! so that a start does not wait for a dead one.
//!
//! Lists are built when something changes, not per request. What changes with every request (stalled,
//! full, tried already) is looked at by the decision.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use warmroute_proto::registry::{DrainState, RANKS_MAX, WorkerEntry};
use warmroute_proto::{BlockSize, DpRank, Seed, Source, WorkerId};

use super::roster::{Roster, SourceId};

/// What the router's own checks say of a worker's HTTP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    /// Not checked yet.
    #[default]
    Unknown,
    Healthy,
    Unhealthy,
}

/// Why nobody can take a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the model {0:?} does not exist")]
    UnknownModel(String),
    #[error("no worker is registered")]
    NoWorkers,
    #[error("no worker of this model is healthy")]
    AllUnhealthy,
    #[error("all healthy workers of this model are draining")]
    AllDraining,
    #[error("every worker of this model was tried")]
    AllTried,
    #[error("all workers of this model are full")]
    Full { retry_after: Duration },
}

/// A source that can take requests for a model.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub id: SourceId,
    pub source: Source,
    pub url: Arc<str>,
    pub block_size: Option<BlockSize>,
    /// All KV groups are main attention, so that a credited block must be a cached one.
    pub main_attention_only: bool,
}

/// The block sizes of a model's workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockSizes {
    /// No engine told it yet.
    Unknown,
    One(BlockSize),
    /// Prompts are hashed with one size; workers of the others get no credit.
    Mixed,
}

/// A model name as clients use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    pub name: String,
    /// The base model, whose tokenizer it has. Its own name if it is none.
    pub base: String,
    pub kind: ModelKind,
    pub block_sizes: BlockSizes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelKind {
    Base,
    Lora,
}

impl Model {
    /// What its blocks are hashed with.
    #[must_use]
    pub fn seed(&self, cache_salt: Option<&str>) -> Seed {
        match self.kind {
            ModelKind::Base => Seed::new(None, cache_salt),
            ModelKind::Lora => Seed::new(Some(&self.name), cache_salt),
        }
    }
}

/// Everything known of the workers.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    workers: BTreeMap<WorkerId, Worker>,
    models: BTreeMap<String, Served>,
}

#[derive(Clone, Debug)]
pub struct Worker {
    pub entry: WorkerEntry,
    pub health: Health,
    pub drain: DrainState,
}

#[derive(Clone, Debug)]
struct Served {
    model: Model,
    candidates: Result<Vec<Candidate>, Refusal>,
}

impl Fleet {
    /// The registry's content. Of workers that stay the drain is kept, and the health unless their URL
    /// changed.
    pub fn set_workers(&mut self, roster: &mut Roster, entries: &[WorkerEntry]) {
        let mut old = std::mem::take(&mut self.workers);
        for entry in entries {
            let known = old.remove(&entry.worker);
            let drain = known.as_ref().map_or_else(DrainState::default, |w| w.drain);
            let same = known.filter(|known| known.entry.url == entry.url);
            let worker = Worker {
                entry: entry.clone(),
                health: same.map_or_else(Health::default, |w| w.health),
                drain,
            };
            self.workers.insert(entry.worker.clone(), worker);
        }
        self.rebuild(roster);
    }

    /// Says whether anything changed; a worker that is not registered has no health.
    pub fn set_health(&mut self, roster: &mut Roster, worker: &WorkerId, health: Health) -> bool {
        let Some(known) = self.workers.get_mut(worker) else {
            return false;
        };
        let changed = std::mem::replace(&mut known.health, health) != health;
        if changed {
            self.rebuild(roster);
        }
        changed
    }

    /// Says whether anything changed.
    pub fn set_drain(&mut self, roster: &mut Roster, worker: &WorkerId, drain: DrainState) -> bool {
        let Some(known) = self.workers.get_mut(worker) else {
            return false;
        };
        let changed = std::mem::replace(&mut known.drain, drain) != drain;
        if changed {
            self.rebuild(roster);
        }
        changed
    }

    /// All registered workers, in the order of their names.
    pub fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.workers.values()
    }

    #[must_use]
    pub fn contains(&self, worker: &WorkerId) -> bool {
        self.workers.contains_key(worker)
    }

    /// All model names that some worker serves, healthy or not.
    pub fn models(&self) -> impl Iterator<Item = &Model> {
        self.models.values().map(|served| &served.model)
    }

    pub fn model(&self, name: &str) -> Result<&Model, Refusal> {
        self.served(name).map(|served| &served.model)
    }

    pub fn candidates(&self, name: &str) -> Result<&[Candidate], Refusal> {
        match &self.served(name)?.candidates {
            Ok(candidates) => Ok(candidates),
            Err(refusal) => Err(refusal.clone()),
        }
    }

    fn served(&self, name: &str) -> Result<&Served, Refusal> {
        if self.workers.is_empty() {
            return Err(Refusal::NoWorkers);
        }
        self.models
            .get(name)
            .ok_or_else(|| Refusal::UnknownModel(name.to_owned()))
    }

    fn rebuild(&mut self, roster: &mut Roster) {
        let mut names: BTreeMap<&str, Vec<&Worker>> = BTreeMap::new();
        // Base names first: where a name is both, the workers that have it as a base model serve it.
        for worker in self.workers.values() {
            for name in &worker.entry.models {
                names.entry(name).or_default().push(worker);
            }
        }
        let mut adapters: BTreeMap<&str, Vec<&Worker>> = BTreeMap::new();
        for worker in self.workers.values() {
            for lora in &worker.entry.loras {
                if !names.contains_key(lora.name.as_str()) {
                    adapters.entry(&lora.name).or_default().push(worker);
                }
            }
        }
        let bases = names
            .into_iter()
            .map(|(name, workers)| serve(roster, name, ModelKind::Base, &workers));
        let mut models: BTreeMap<String, Served> = bases
            .map(|served| (served.model.name.clone(), served))
            .collect();
        for (name, workers) in adapters {
            let served = serve(roster, name, ModelKind::Lora, &workers);
            models.insert(name.to_owned(), served);
        }
        self.models = models;
    }
}

fn serve(roster: &mut Roster, name: &str, kind: ModelKind, workers: &[&Worker]) -> Served {
    let base = match kind {
        ModelKind::Base => None,
        ModelKind::Lora => workers.iter().find_map(|worker| base_of(worker, name)),
    };
    Served {
        model: Model {
            name: name.to_owned(),
            base: base.unwrap_or(name).to_owned(),
            kind,
            block_sizes: block_sizes(workers),
        },
        candidates: usable(workers).map(|workers| {
            let mut candidates = Vec::new();
            for worker in workers {
                add_ranks(roster, worker, &mut candidates);
            }
            candidates
        }),
    }
}

/// The adapter's parent, or the worker's own first model where the engine does not tell.
fn base_of<'a>(worker: &'a Worker, adapter: &str) -> Option<&'a str> {
    let entry = &worker.entry;
    let lora = entry.loras.iter().find(|lora| lora.name == adapter)?;
    let parent = lora.parent.as_deref();
    parent.or_else(|| entry.models.first().map(String::as_str))
}

fn block_sizes(workers: &[&Worker]) -> BlockSizes {
    let mut known = workers.iter().filter_map(|worker| worker.entry.block_size);
    match known.next() {
        None => BlockSizes::Unknown,
        Some(first) if known.all(|size| size == first) => BlockSizes::One(first),
        Some(_) => BlockSizes::Mixed,
    }
}

/// The workers to choose from: the healthy ones, or if there are none those not checked yet.
fn usable<'a>(workers: &[&'a Worker]) -> Result<Vec<&'a Worker>, Refusal> {
    let with = |health: Health| -> Vec<&'a Worker> {
        let all = workers.iter().copied();
        all.filter(|worker| worker.health == health).collect()
    };
    let serving = |workers: &[&'a Worker]| -> Vec<&'a Worker> {
        let all = workers.iter().copied();
        all.filter(|worker| worker.drain == DrainState::Serving)
            .collect()
    };
    let (healthy, unchecked) = (with(Health::Healthy), with(Health::Unknown));
    for group in [&healthy, &unchecked] {
        let chosen = serving(group);
        if !chosen.is_empty() {
            return Ok(chosen);
        }
    }
    if healthy.is_empty() && unchecked.is_empty() {
        Err(Refusal::AllUnhealthy)
    } else {
        Err(Refusal::AllDraining)
    }
}

fn add_ranks(roster: &mut Roster, worker: &Worker, candidates: &mut Vec<Candidate>) {
    let entry = &worker.entry;
    let url: Arc<str> = entry.url.as_str().into();
    for rank in 0..entry.ranks.min(RANKS_MAX) {
        let source = Source {
            worker: entry.worker.clone(),
            dp_rank: DpRank(rank),
        };
        candidates.push(Candidate {
            id: roster.enrol(&source),
            source,
            url: Arc::clone(&url),
            block_size: entry.block_size,
            main_attention_only: entry.main_attention_only,
        });
    }
}

#[cfg(test)]
mod tests;
