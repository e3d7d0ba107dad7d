//! `warmroute-indexer verify`: checks that all who fold a source hold equal blocks.
//!
//! The pure [`Comparison`] takes digests of indexers and shims by source and number, and lists of
//! engines by batch, and finds contradictions. Digests of one generation and number are equal, so a
//! busy fleet can be compared while it runs: with enough polls all are seen at one number. [`run`]
//! polls; [`engine`] queries engines.

pub mod engine;
mod run;

use std::collections::{BTreeMap, BTreeSet};

use warmroute_proto::view::{PAGE_SOURCES_MAX, ViewPage};
use warmroute_proto::{
    Digest, EngineSeq, Generation, Heartbeat, LogPosition, RecordNumber, Source, WorkerId,
};

pub use run::{VerifyOptions, run};

use crate::doctor::{Code, Findings, Report};
use engine::EngineRankList;

/// Numbers kept per source for comparison: some seconds of a busy one.
const POINTS_MAX: usize = 256;

/// A number of a generation.
type NumberedPoint = (Generation, RecordNumber);

/// Origin of a digest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum DigestOrigin {
    Shim,
    Indexer(String),
}

impl DigestOrigin {
    fn label(&self) -> String {
        match self {
            Self::Shim => "its shim".to_owned(),
            Self::Indexer(id) => format!("indexer {id}"),
        }
    }
}

/// Digests of one source.
#[derive(Debug, Default)]
struct SourceDigests {
    points: BTreeMap<NumberedPoint, BTreeMap<DigestOrigin, Digest>>,
    /// Origins compared with another one at least once.
    met: BTreeSet<DigestOrigin>,
    /// The highest reported generation.
    generation: Option<Generation>,
    /// Index digests by engine batch, in that generation.
    by_batch: BTreeMap<EngineSeq, (DigestOrigin, Digest)>,
    is_met_by_engine: bool,
    /// Contradictions between engine and index in that generation.
    contradictions: BTreeSet<String>,
}

static NOTHING: SourceDigests = SourceDigests {
    points: BTreeMap::new(),
    met: BTreeSet::new(),
    generation: None,
    by_batch: BTreeMap::new(),
    is_met_by_engine: false,
    contradictions: BTreeSet::new(),
};

/// Compares digests of all origins.
#[derive(Debug, Default)]
pub struct Comparison {
    indexers: BTreeSet<String>,
    /// Sources for which shim and every replica must report.
    expected: BTreeSet<Source>,
    sources: BTreeMap<Source, SourceDigests>,
    /// The last block list of each engine that provides one.
    listed: BTreeMap<WorkerId, Vec<EngineRankList>>,
    /// Position at which all replicas were compared.
    position: Option<LogPosition>,
    compared: u64,
    findings: Findings,
}

impl Comparison {
    #[must_use]
    pub fn new(indexers: impl IntoIterator<Item = String>) -> Self {
        Self {
            indexers: indexers.into_iter().collect(),
            ..Self::default()
        }
    }

    /// Sets the sources for which shim and every replica must be compared. Others are optional.
    pub fn expect(&mut self, sources: impl IntoIterator<Item = Source>) {
        self.expected = sources.into_iter().collect();
    }

    /// Drops workers and replicas that deregistered in between.
    pub fn excuse(
        &mut self,
        is_here: impl Fn(&WorkerId) -> bool,
        is_replica: impl Fn(&str) -> bool,
    ) {
        self.expected.retain(|source| is_here(&source.worker));
        self.indexers.retain(|id| is_replica(id));
    }

    /// Adds a heartbeat.
    pub fn add_heartbeat(&mut self, heartbeat: &Heartbeat) {
        self.began(&heartbeat.source, heartbeat.generation);
        if let Some(number) = heartbeat.number {
            let point = (heartbeat.generation, number);
            self.add_digest(
                &heartbeat.source,
                point,
                DigestOrigin::Shim,
                heartbeat.after,
            );
        }
    }

    /// Adds views of replicas, taken at about one time.
    pub fn add_views(&mut self, views: &BTreeMap<String, Result<ViewPage, String>>) {
        for (id, view) in views {
            let Ok(view) = view else {
                continue;
            };
            for source in &view.sources {
                if let Some(generation) = source.generation {
                    self.began(&source.source, generation);
                }
                let Some(digest) = source.digest else {
                    continue;
                };
                let origin = DigestOrigin::Indexer(id.clone());
                if let Some(point) = source.generation.zip(source.number) {
                    self.add_digest(&source.source, point, origin.clone(), digest);
                }
                // Only an exact view is comparable with an engine's list.
                let is_exact = source.states.gpu == warmroute_proto::query::SourceState::Exact;
                if let Some(seq) = source.engine_seq.filter(|_| is_exact)
                    && let Some(source_digests) = self.sources.get_mut(&source.source)
                    && source_digests.generation == source.generation
                {
                    source_digests.by_batch.insert(seq, (origin, digest));
                    bound(&mut source_digests.by_batch);
                }
            }
        }
        self.at_one_position(views);
        let listed = std::mem::take(&mut self.listed);
        for (worker, ranks) in &listed {
            self.list(worker, ranks);
        }
        self.listed = listed;
    }

    /// A new generation discards digests by batch: a restarted engine counts batches from zero.
    fn began(&mut self, source: &Source, generation: Generation) {
        let source_digests = self.sources.entry(source.clone()).or_default();
        if source_digests
            .generation
            .is_some_and(|known| known < generation)
        {
            source_digests.by_batch.clear();
            source_digests.contradictions.clear();
            source_digests.is_met_by_engine = false;
            if let Some(ranks) = self.listed.get_mut(&source.worker) {
                ranks.retain(|rank| rank.dp_rank != source.dp_rank);
            }
        }
        source_digests.generation = source_digests.generation.max(Some(generation));
    }

    /// Adds an engine's list, for comparison with views before and after it.
    pub fn add_list(&mut self, worker: &WorkerId, ranks: Vec<EngineRankList>) {
        self.list(worker, &ranks);
        self.listed.insert(worker.clone(), ranks);
    }

    /// The engine's list holds from its last change to its last batch: so does an index as of any
    /// batch in between.
    fn list(&mut self, worker: &WorkerId, ranks: &[EngineRankList]) {
        for rank in ranks {
            let source = Source {
                worker: worker.clone(),
                dp_rank: rank.dp_rank,
            };
            let Some(source_digests) = self.sources.get_mut(&source) else {
                continue;
            };
            let (Some(first), Some(last)) = (rank.changed, rank.last) else {
                continue;
            };
            if first > last {
                continue;
            }
            for (seq, (origin, digest)) in source_digests.by_batch.range(first..=last) {
                source_digests.is_met_by_engine = true;
                self.compared += 1;
                if *digest != rank.digest {
                    let about = format!(
                        "{source} at batch {seq}: {} at the engine, {} at {}",
                        digest_text(rank.digest),
                        digest_text(*digest),
                        origin.label()
                    );
                    source_digests.contradictions.insert(about);
                }
            }
        }
    }

    fn add_digest(
        &mut self,
        source: &Source,
        point: NumberedPoint,
        origin: DigestOrigin,
        digest: Digest,
    ) {
        let source_digests = self.sources.entry(source.clone()).or_default();
        let at = source_digests.points.entry(point).or_default();
        for (other, theirs) in at.iter().filter(|(other, _)| **other != origin) {
            self.compared += 1;
            source_digests.met.extend([origin.clone(), other.clone()]);
            if *theirs != digest {
                let code = match (&origin, other) {
                    (DigestOrigin::Indexer(_), DigestOrigin::Indexer(_)) => Code::IndexersDiffer,
                    (DigestOrigin::Shim, _) | (_, DigestOrigin::Shim) => Code::MirrorDiffers,
                };
                let mut words = [(&origin, digest), (other, *theirs)];
                words.sort_by_key(|(origin, _)| *origin);
                let words = words.map(|(origin, digest)| {
                    format!("{} at {}", digest_text(digest), origin.label())
                });
                let (generation, number) = point;
                let about = format!(
                    "{source} at generation {generation}, number {number}: {}",
                    words.join(", ")
                );
                self.findings.add(code, about);
            }
        }
        at.insert(origin, digest);
        bound(&mut source_digests.points);
    }

    /// At equal positions of one log, all replicas have equal numbers of all sources.
    fn at_one_position(&mut self, views: &BTreeMap<String, Result<ViewPage, String>>) {
        let all: Vec<(&String, &ViewPage)> = views
            .iter()
            .filter_map(|(id, view)| Some((id, view.as_ref().ok()?)))
            .collect();
        let Some(((first_id, first), rest)) = all.split_first() else {
            return;
        };
        let place = |view: &ViewPage| (view.log, view.position);
        let page = PAGE_SOURCES_MAX as usize;
        let whole = all.iter().all(|(_, view)| view.sources.len() <= page);
        if rest.is_empty() || !whole || rest.iter().any(|(_, view)| place(view) != place(first)) {
            return;
        }
        self.position = Some(first.position);
        let points = |view: &ViewPage| -> BTreeMap<Source, NumberedPoint> {
            let folded = view.sources.iter().filter(|source| source.digest.is_some());
            folded
                .filter_map(|one| Some((one.source.clone(), one.generation.zip(one.number)?)))
                .collect()
        };
        let mine = points(first);
        for (id, view) in rest {
            for (source, theirs) in points(view) {
                let Some(own) = mine.get(&source).filter(|own| **own != theirs) else {
                    continue;
                };
                let about = format!(
                    "{source} at position {}: number {} of generation {} at indexer {first_id}, {} of {} at \
                     indexer {id}",
                    first.position, own.1, own.0, theirs.1, theirs.0
                );
                self.findings.add(Code::IndexersDiffer, about);
            }
        }
    }

    /// Returns true if every origin of every source was compared.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        let is_placed = self.indexers.len() < 2 || self.position.is_some();
        self.compared > 0 && is_placed && self.left().next().is_none()
    }

    /// Returns true if an engine contradicts an index. A restarted engine is resolved by a new
    /// generation.
    #[must_use]
    pub fn is_engine_contradicted(&self) -> bool {
        let mut source_digests = self.sources.values();
        source_digests.any(|source_digests| !source_digests.contradictions.is_empty())
    }

    /// Sources with origins that were not compared, and those origins.
    fn left(&self) -> impl Iterator<Item = (&Source, Vec<String>)> {
        let unreported = self.expected.iter();
        let unreported = unreported.filter(|source| !self.sources.contains_key(source));
        let all = self.sources.iter();
        let all = all.chain(unreported.map(|source| (source, &NOTHING)));
        all.filter_map(|(source, source_digests)| {
            let mut origins: BTreeSet<DigestOrigin> = source_digests
                .points
                .values()
                .flat_map(BTreeMap::keys)
                .cloned()
                .collect();
            if self.expected.contains(source) {
                origins.extend(self.indexers.iter().cloned().map(DigestOrigin::Indexer));
                origins.insert(DigestOrigin::Shim);
            }
            let unmet = origins
                .iter()
                .filter(|origin| !source_digests.met.contains(origin));
            let mut unmet: Vec<String> = unmet.map(DigestOrigin::label).collect();
            let engine = self.listed.get(&source.worker).into_iter().flatten();
            let is_listed = engine
                .into_iter()
                .any(|rank| rank.dp_rank == source.dp_rank);
            // A source that is exact nowhere is not comparable.
            if is_listed && !source_digests.by_batch.is_empty() && !source_digests.is_met_by_engine
            {
                unmet.push("its engine".to_owned());
            }
            (!unmet.is_empty()).then_some((source, unmet))
        })
    }

    pub(crate) fn find(&mut self, code: Code, about: String) {
        self.findings.add(code, about);
    }

    /// The report.
    #[must_use]
    pub fn report(mut self, namespace: String, server: String) -> Report {
        let left: Vec<String> = self
            .left()
            .map(|(source, unmet)| format!("{source}: {}", unmet.join(", ")))
            .collect();
        if left.is_empty() && self.compared == 0 {
            self.findings
                .add(Code::NotCompared, "nothing: no source was reported");
        }
        for about in left {
            self.findings.add(Code::NotCompared, about);
        }
        for about in self
            .sources
            .values()
            .flat_map(|source_digests| &source_digests.contradictions)
        {
            self.findings.add(Code::EngineDiffers, about);
        }
        let engines = self
            .sources
            .values()
            .filter(|source_digests| source_digests.is_met_by_engine);
        let position = self.position.map_or_else(
            || "never met at one".to_owned(),
            |position| format!("all at {position}"),
        );
        let rest = vec![
            ("indexers", self.indexers.len().to_string()),
            ("sources", self.sources.len().to_string()),
            ("positions", position),
            ("compared", format!("{} times", self.compared)),
            ("engines", format!("{} sources' own lists", engines.count())),
        ];
        Report {
            namespace,
            server,
            findings: self.findings.worst_first(),
            rest,
        }
    }
}

/// Drops the lowest entries.
fn bound<K: Ord, V>(known: &mut BTreeMap<K, V>) {
    while known.len() > POINTS_MAX {
        known.pop_first();
    }
}

fn digest_text(digest: Digest) -> String {
    format!("{} pairs {}", digest.count, digest.hex())
}

#[cfg(test)]
mod tests;
