//! Judges the registry: unreadable entries, versions, and generation keys against their use.

use std::collections::{BTreeMap, BTreeSet};

use warmroute_plane::Revision;
use warmroute_proto::registry::{
    DemotionEntry, DrainEntry, DrainState, GenerationEntry, IndexerEntry, RouterDoubts,
    RouterFacts, RouterMisses, RouterRefusals, ShimEntry, SnapshotLease, WorkerEntry, WorkerRole,
};
use warmroute_proto::snapshot::SnapshotPointer;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{
    DpRank, Generation, RouterId, Source, TierState, WorkerId, codec, load::RouterEntry,
};

use super::{Code, Findings, PlaneState, StatusLine};

/// All entries that could be read, and the keys of those that could not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registry {
    pub workers: BTreeMap<WorkerId, WorkerEntry>,
    pub shims: BTreeMap<WorkerId, ShimEntry>,
    pub generations: BTreeMap<Source, Generation>,
    pub indexers: BTreeMap<String, IndexerEntry>,
    pub routers: BTreeMap<RouterId, RouterEntry>,
    /// Sources that routers demoted.
    pub demotions: BTreeMap<RouterId, DemotionEntry>,
    pub pointer: Option<SnapshotPointer>,
    pub writer: Option<SnapshotLease>,
    /// Workers that an operator drained.
    pub drained: BTreeMap<WorkerId, DrainEntry>,
    pub facts: BTreeMap<RouterId, RouterFacts>,
    /// What the server refuses each router.
    pub refusals: BTreeMap<RouterId, Vec<String>>,
    pub doubts: BTreeMap<RouterId, RouterDoubts>,
    /// Workers that a router does not reach, or that are gone without a sign.
    pub misses: BTreeMap<RouterId, RouterMisses>,
    /// Revision of each key: a lease that is renewed has a new one.
    pub revisions: BTreeMap<String, Revision>,
    pub unreadable: BTreeSet<String>,
}

impl Registry {
    /// Adds an entry.
    pub fn put(&mut self, subjects: &Subjects, key: &str, value: &[u8]) {
        if self.known(subjects, key, value).is_none() {
            self.unreadable.insert(key.to_owned());
        }
    }

    fn known(&mut self, subjects: &Subjects, key: &str, value: &[u8]) -> Option<()> {
        if let Some(worker) = subjects.key_worker(key) {
            let entry: WorkerEntry = codec::decode(value).ok()?;
            // An entry under another worker's key is invalid.
            if entry.worker != worker {
                return None;
            }
            self.workers.insert(worker, entry);
        } else if let Some(worker) = subjects.key_shim(key) {
            self.shims.insert(worker, codec::decode(value).ok()?);
        } else if let Some(source) = subjects.key_generation(key) {
            let entry: GenerationEntry = codec::decode(value).ok()?;
            self.generations.insert(source, entry.generation);
        } else if let Some(worker) = subjects.key_drained(key) {
            let entry: DrainEntry = codec::decode(value).ok()?;
            if entry.worker != worker {
                return None;
            }
            if entry.drain == DrainState::Draining {
                self.drained.insert(worker, entry);
            }
        } else if let Some(router) = subjects.key_facts(key) {
            self.facts.insert(router, codec::decode(value).ok()?);
        } else if let Some(router) = subjects.key_refusals(key) {
            let entry: RouterRefusals = codec::decode(value).ok()?;
            self.refusals.insert(router, entry.refused);
        } else if let Some(router) = subjects.key_doubts(key) {
            self.doubts.insert(router, codec::decode(value).ok()?);
        } else if let Some(router) = subjects.key_misses(key) {
            self.misses.insert(router, codec::decode(value).ok()?);
        } else if let Some(id) = subjects.key_indexer(key) {
            self.indexers.insert(id, codec::decode(value).ok()?);
        } else if let Some(router) = subjects.key_router(key) {
            self.routers.insert(router, codec::decode(value).ok()?);
        } else if let Some(router) = subjects.key_demotion(key) {
            self.demotions.insert(router, codec::decode(value).ok()?);
        } else if key == subjects.snapshot_pointer_key() {
            self.pointer = Some(codec::decode(value).ok()?);
        } else if key == subjects.snapshot_lease_key() {
            self.writer = Some(codec::decode(value).ok()?);
        } else {
            return None;
        }
        Some(())
    }

    /// Whether the key was not written between an earlier reading and this one.
    pub(super) fn stands(&self, before: &Self, key: &str) -> bool {
        let earlier = before.revisions.get(key);
        earlier.is_some() && earlier == self.revisions.get(key)
    }

    /// Number of registered processes by version.
    fn versions(&self) -> BTreeMap<&str, u32> {
        let workers = self.workers.values().map(|entry| entry.version.as_str());
        let indexers = self.indexers.values().map(|entry| entry.version.as_str());
        let routers = self.routers.values().map(|entry| entry.version.as_str());
        let mut versions = BTreeMap::new();
        for version in workers.chain(indexers).chain(routers) {
            *versions.entry(version).or_insert(0) += 1;
        }
        versions
    }
}

/// A worker's sources.
pub(super) fn sources(entry: &WorkerEntry) -> impl Iterator<Item = Source> {
    (0..entry.ranks).map(|rank| Source {
        worker: entry.worker.clone(),
        dp_rank: DpRank(rank),
    })
}

pub(super) fn judge(state: &PlaneState, findings: &mut Findings, rest: &mut Vec<StatusLine>) {
    let registry = &state.registry;
    for key in &registry.unreadable {
        findings.add(Code::RegistryUnreadable, key);
    }
    generations(state, findings);
    demotions(registry, findings);
    drained_returned(state, findings);
    let versions = registry.versions();
    if versions.len() > 1 {
        let about = versions
            .iter()
            .map(|(version, count)| format!("{count} × {version}"));
        findings.add(Code::VersionsDiffer, about.collect::<Vec<_>>().join(", "));
    }
    missing(state, findings);
    roles(registry, findings);
    if registry.routers.is_empty() {
        findings.add(Code::NoRouter, "routers");
    }
    let text = format!(
        "{} workers, {} shims, {} indexers, {} routers, {} generation keys",
        registry.workers.len(),
        registry.shims.len(),
        registry.indexers.len(),
        registry.routers.len(),
        registry.generations.len()
    );
    rest.push(("registered", text));
    if !registry.drained.is_empty() {
        let drained: Vec<&str> = registry.drained.keys().map(WorkerId::as_str).collect();
        rest.push(("drained", drained.join(", ")));
    }
}

/// Fewer routers or workers than the operator expects. Those of indexers answer.
fn missing(state: &PlaneState, findings: &mut Findings) {
    let registry = &state.registry;
    for (code, found, expected) in [
        (
            Code::RoutersMissing,
            registry.routers.len(),
            state.expected.routers,
        ),
        (
            Code::WorkersMissing,
            registry.workers.len(),
            state.expected.workers,
        ),
    ] {
        if let Some(expected) = expected.filter(|&expected| found < expected) {
            findings.add(code, format!("{found} of {expected} are registered"));
        }
    }
}

/// Models whose workers lack a role that the others need.
fn roles(registry: &Registry, findings: &mut Findings) {
    let mut models: BTreeMap<&str, Vec<WorkerRole>> = BTreeMap::new();
    for entry in registry.workers.values() {
        for model in &entry.models {
            models.entry(model).or_default().push(entry.role);
        }
    }
    for (model, roles) in models {
        let has = |role| roles.contains(&role);
        if !has(WorkerRole::Both) && !has(WorkerRole::Decode) {
            findings.add(Code::ModelOnlyPrefill, model);
        } else if has(WorkerRole::Decode) && !has(WorkerRole::Prefill) {
            findings.add(Code::ModelOnlyDecode, model);
        }
    }
}

/// Drained workers under whose name another engine runs.
///
/// The shim is another one, and its engine has provably published nothing in its life: what no router
/// uses stays so. An engine that was drained has published what it served, and a restart of its shim
/// alone is no news. An engine whose losses are hidden proves nothing and is not named.
fn drained_returned(state: &PlaneState, findings: &mut Findings) {
    let registry = &state.registry;
    for (worker, entry) in &registry.drained {
        let shim = registry.shims.get(worker).map(|shim| shim.instance);
        let is_another = shim.is_some() && shim != entry.shim;
        let registered = registry.workers.get(worker).filter(|_| is_another);
        let is_new = |source: &Source| {
            let heard = state.heartbeats.get(source);
            heard.is_some_and(|heard| {
                heard.last.states.gpu == TierState::Complete && heard.last.engine_seq.is_none()
            })
        };
        if registered.is_some_and(|entry| sources(entry).all(|source| is_new(&source))) {
            findings.add(Code::DrainedReturned, worker.to_string());
        }
    }
}

/// Lists what routers found wrong with the index by their engines' reports.
fn demotions(registry: &Registry, findings: &mut Findings) {
    for (router, entry) in &registry.demotions {
        for demoted in &entry.sources {
            let (source, generation) = (&demoted.source, demoted.generation);
            let about = format!("{source}: generation {generation}, by router {router}");
            findings.add(Code::SourceDemoted, about);
        }
        let unshown = entry.total as usize - entry.sources.len().min(entry.total as usize);
        if unshown > 0 {
            findings.add(
                Code::SourceDemoted,
                format!("{unshown} more, by router {router}"),
            );
        }
    }
}

/// Checks that no generation in use is above its key, which is written first.
fn generations(state: &PlaneState, findings: &mut Findings) {
    let mut used: BTreeMap<&Source, (Generation, &str)> = BTreeMap::new();
    let mut note = |source, generation, by| {
        let known = used.entry(source).or_insert((generation, by));
        if generation > known.0 {
            *known = (generation, by);
        }
    };
    for (source, record) in &state.last_records {
        note(source, record.generation, "the log's last record");
    }
    for (source, heard) in &state.heartbeats {
        note(source, heard.last.generation, "its shim");
    }
    for (_, view) in state.answers() {
        for source in &view.sources {
            if let Some(generation) = source.generation {
                note(&source.source, generation, "an indexer");
            }
        }
    }
    for (source, (generation, by)) in used {
        // A gone worker needs no key; it writes one before it is used again.
        if !state.registry.workers.contains_key(&source.worker) {
            continue;
        }
        let key = state.registry.generations.get(source);
        if key.is_none_or(|&key| key < generation) {
            let key = key.map_or_else(|| "missing".to_owned(), ToString::to_string);
            let about = format!("{source}: the key is {key}, {by} has {generation}");
            findings.add(Code::GenerationBehind, about);
        }
    }
}

#[cfg(test)]
mod tests {
    use warmroute_proto::Namespace;
    use warmroute_proto::registry::DrainUntil;

    use super::*;

    #[test]
    fn an_entry_under_another_workers_key_is_unreadable() {
        let subjects = Subjects::new(&Namespace::from("t"));
        let own = WorkerId::from("own");
        let entry = WorkerEntry {
            main_attention_only: true,
            ..WorkerEntry::new(own.clone(), "http://h:1")
        };
        let word = DrainEntry {
            worker: own.clone(),
            drain: DrainState::Draining,
            turn: 0,
            set_unix_s: 0,
            shim: None,
            until: DrainUntil::Undone,
        };
        let (entry, word) = (
            codec::encode(&entry).unwrap(),
            codec::encode(&word).unwrap(),
        );
        let mut registry = Registry::default();
        let another = WorkerId::from("another");
        for worker in [&own, &another] {
            registry.put(&subjects, &subjects.worker_key(worker), &entry);
            registry.put(&subjects, &subjects.drain_key(worker), &word);
        }
        assert!(registry.workers.keys().eq([&own]));
        assert!(registry.drained.keys().eq([&own]));
        let unreadable = [subjects.drain_key(&another), subjects.worker_key(&another)];
        assert!(registry.unreadable.iter().eq(&unreadable));
    }
}
