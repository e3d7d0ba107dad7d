//! Do all who fold one source hold the same? `warmroute-indexer verify`.
//!
//! [`Comparison`] is pure: it takes what indexers and shims say of a source at a number, and what engines
//! list as of a batch, and finds who contradicts whom. Equal number of one generation means equal digest,
//! so that a fleet at work can be compared without being stopped: whoever asks often enough meets all at
//! one number. [`run`] asks; [`engine`] knows what engines can be asked.

pub mod engine;
mod run;

use std::collections::{BTreeMap, BTreeSet};

use warmroute_proto::view::{PAGE_SOURCES_MAX, ViewPage};
use warmroute_proto::{
    Digest, EngineSeq, Generation, Heartbeat, LogPosition, RecordNumber, Source, WorkerId,
};

pub use run::{How, run};

use crate::doctor::{Code, Findings, Report};
use engine::Listed;

/// Numbers of a source that are remembered to be met by others: some seconds of a busy one.
const POINTS_MAX: usize = 256;

/// A number of a generation.
type Point = (Generation, RecordNumber);

/// Whose word it is. Engines and shims have one word for a source, indexers one each.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Teller {
    Shim,
    Indexer(String),
}

impl Teller {
    fn label(&self) -> String {
        match self {
            Self::Shim => "its shim".to_owned(),
            Self::Indexer(id) => format!("indexer {id}"),
        }
    }
}

/// What is known of one source.
#[derive(Debug, Default)]
struct Told {
    points: BTreeMap<Point, BTreeMap<Teller, Digest>>,
    /// Whoever was compared with somebody else at least once.
    met: BTreeSet<Teller>,
    /// The highest that was told.
    generation: Option<Generation>,
    /// What an index holds as of an engine's batch, in that generation.
    by_batch: BTreeMap<EngineSeq, (Teller, Digest)>,
    is_met_by_engine: bool,
    /// Where its engine contradicts an index in that generation.
    contradictions: BTreeSet<String>,
}

static NOTHING: Told = Told {
    points: BTreeMap::new(),
    met: BTreeSet::new(),
    generation: None,
    by_batch: BTreeMap::new(),
    is_met_by_engine: false,
    contradictions: BTreeSet::new(),
};

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Comparison {
    indexers: BTreeSet<String>,
    /// Those of which the shim and every replica owe a word.
    expected: BTreeSet<Source>,
    sources: BTreeMap<Source, Told>,
    /// The last list of each engine that lists its blocks.
    listed: BTreeMap<WorkerId, Vec<Listed>>,
    /// Where all replicas were met at one position of one log.
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

    /// Says of which sources the shim and every replica have to be met. Nobody else has to be met but those
    /// who say something.
    pub fn expect(&mut self, sources: impl IntoIterator<Item = Source>) {
        self.expected = sources.into_iter().collect();
    }

    /// Who left meanwhile owes nothing.
    pub fn excuse(
        &mut self,
        is_here: impl Fn(&WorkerId) -> bool,
        is_replica: impl Fn(&str) -> bool,
    ) {
        self.expected.retain(|source| is_here(&source.worker));
        self.indexers.retain(|id| is_replica(id));
    }

    /// Takes what a shim says of its source.
    pub fn heard(&mut self, heartbeat: &Heartbeat) {
        self.began(&heartbeat.source, heartbeat.generation);
        if let Some(number) = heartbeat.number {
            let point = (heartbeat.generation, number);
            self.told(&heartbeat.source, point, Teller::Shim, heartbeat.after);
        }
    }

    /// Takes the views that replicas gave at about one time.
    pub fn viewed(&mut self, views: &BTreeMap<String, Result<ViewPage, String>>) {
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
                let teller = Teller::Indexer(id.clone());
                if let Some(point) = source.generation.zip(source.number) {
                    self.told(&source.source, point, teller.clone(), digest);
                }
                // Only of a complete view is an engine's list all that it can be.
                let is_exact = source.states.gpu == warmroute_proto::query::SourceState::Exact;
                if let Some(seq) = source.engine_seq.filter(|_| is_exact)
                    && let Some(told) = self.sources.get_mut(&source.source)
                    && told.generation == source.generation
                {
                    told.by_batch.insert(seq, (teller, digest));
                    bound(&mut told.by_batch);
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

    /// With a new generation an engine may count its batches anew: what was said of earlier ones is of
    /// another life.
    fn began(&mut self, source: &Source, generation: Generation) {
        let told = self.sources.entry(source.clone()).or_default();
        if told.generation.is_some_and(|known| known < generation) {
            told.by_batch.clear();
            told.contradictions.clear();
            told.is_met_by_engine = false;
            if let Some(ranks) = self.listed.get_mut(&source.worker) {
                ranks.retain(|rank| rank.dp_rank != source.dp_rank);
            }
        }
        told.generation = told.generation.max(Some(generation));
    }

    /// Takes what an engine lists, to be met by views before and after it.
    pub fn listed(&mut self, worker: &WorkerId, ranks: Vec<Listed>) {
        self.list(worker, &ranks);
        self.listed.insert(worker.clone(), ranks);
    }

    /// The engine held this from its last change to its last batch: an index as of any batch between
    /// the two has to hold it too.
    fn list(&mut self, worker: &WorkerId, ranks: &[Listed]) {
        for rank in ranks {
            let source = Source {
                worker: worker.clone(),
                dp_rank: rank.dp_rank,
            };
            let Some(told) = self.sources.get_mut(&source) else {
                continue;
            };
            let (Some(first), Some(last)) = (rank.changed, rank.last) else {
                continue;
            };
            if first > last {
                continue;
            }
            for (seq, (teller, digest)) in told.by_batch.range(first..=last) {
                told.is_met_by_engine = true;
                self.compared += 1;
                if *digest != rank.digest {
                    let about = format!(
                        "{source} at batch {seq}: {} at the engine, {} at {}",
                        said(rank.digest),
                        said(*digest),
                        teller.label()
                    );
                    told.contradictions.insert(about);
                }
            }
        }
    }

    fn told(&mut self, source: &Source, point: Point, teller: Teller, digest: Digest) {
        let told = self.sources.entry(source.clone()).or_default();
        let at = told.points.entry(point).or_default();
        for (other, theirs) in at.iter().filter(|(other, _)| **other != teller) {
            self.compared += 1;
            told.met.extend([teller.clone(), other.clone()]);
            if *theirs != digest {
                let code = match (&teller, other) {
                    (Teller::Indexer(_), Teller::Indexer(_)) => Code::IndexersDiffer,
                    (Teller::Shim, _) | (_, Teller::Shim) => Code::MirrorDiffers,
                };
                let mut words = [(&teller, digest), (other, *theirs)];
                words.sort_by_key(|(teller, _)| *teller);
                let words =
                    words.map(|(teller, digest)| format!("{} at {}", said(digest), teller.label()));
                let (generation, number) = point;
                let about = format!(
                    "{source} at generation {generation}, number {number}: {}",
                    words.join(", ")
                );
                self.findings.add(code, about);
            }
        }
        at.insert(teller, digest);
        bound(&mut told.points);
    }

    /// At one position of one log everybody knows the same sources at the same numbers.
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
        let points = |view: &ViewPage| -> BTreeMap<Source, Point> {
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

    /// Was everybody met for every source, and anybody at all?
    #[must_use]
    pub fn is_complete(&self) -> bool {
        let is_placed = self.indexers.len() < 2 || self.position.is_some();
        self.compared > 0 && is_placed && self.left().next().is_none()
    }

    /// Does an engine contradict an index? If it was restarted just now, a new generation will tell.
    #[must_use]
    pub fn is_engine_contradicted(&self) -> bool {
        let mut told = self.sources.values();
        told.any(|told| !told.contradictions.is_empty())
    }

    /// The sources of which somebody's word was not compared, with whose.
    fn left(&self) -> impl Iterator<Item = (&Source, Vec<String>)> {
        let unheard = self.expected.iter();
        let unheard = unheard.filter(|source| !self.sources.contains_key(source));
        let all = self.sources.iter();
        let all = all.chain(unheard.map(|source| (source, &NOTHING)));
        all.filter_map(|(source, told)| {
            let mut tellers: BTreeSet<Teller> = told
                .points
                .values()
                .flat_map(BTreeMap::keys)
                .cloned()
                .collect();
            if self.expected.contains(source) {
                tellers.extend(self.indexers.iter().cloned().map(Teller::Indexer));
                tellers.insert(Teller::Shim);
            }
            let unmet = tellers.iter().filter(|teller| !told.met.contains(teller));
            let mut unmet: Vec<String> = unmet.map(Teller::label).collect();
            let engine = self.listed.get(&source.worker).into_iter().flatten();
            let is_listed = engine
                .into_iter()
                .any(|rank| rank.dp_rank == source.dp_rank);
            // What is not exact anywhere is not all that the engine has.
            if is_listed && !told.by_batch.is_empty() && !told.is_met_by_engine {
                unmet.push("its engine".to_owned());
            }
            (!unmet.is_empty()).then_some((source, unmet))
        })
    }

    pub(crate) fn find(&mut self, code: Code, about: String) {
        self.findings.add(code, about);
    }

    /// What was found.
    #[must_use]
    pub fn report(mut self, namespace: String, server: String) -> Report {
        let left: Vec<String> = self
            .left()
            .map(|(source, unmet)| format!("{source}: {}", unmet.join(", ")))
            .collect();
        if left.is_empty() && self.compared == 0 {
            self.findings
                .add(Code::NotCompared, "nothing: nobody told of any source");
        }
        for about in left {
            self.findings.add(Code::NotCompared, about);
        }
        for about in self.sources.values().flat_map(|told| &told.contradictions) {
            self.findings.add(Code::EngineDiffers, about);
        }
        let engines = self.sources.values().filter(|told| told.is_met_by_engine);
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

/// Lets the lowest go.
fn bound<K: Ord, V>(known: &mut BTreeMap<K, V>) {
    while known.len() > POINTS_MAX {
        known.pop_first();
    }
}

fn said(digest: Digest) -> String {
    format!("{} pairs {}", digest.count, digest.hex())
}

#[cfg(test)]
mod tests;
