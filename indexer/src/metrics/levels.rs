//! Gauges read from the fold and the process at each scrape.

use std::fmt::Display;
use std::time::{Duration, Instant};

use warmroute_index::view;
use warmroute_process::metrics::{MetricKind, MetricLabels, MetricsText};
use warmroute_proto::Source;
use warmroute_proto::query::{NO_EVENTS, SourceState, UnknownReason, is_without_events};
use warmroute_proto::view::SourceFault;

use crate::fair_lock::FairReader;
use crate::fold::{Fold, SourceStatus};

const STATES: [&str; 7] = [
    SourceState::Exact.label(),
    SourceState::Partial.label(),
    SourceState::Unverified.label(),
    SourceState::Stale.label(),
    SourceState::CatchingUp.label(),
    SourceState::Unknown.label(),
    NO_EVENTS,
];

const fn state_label(status: &SourceStatus) -> &'static str {
    if is_without_events(status.states.gpu, status.reason) {
        NO_EVENTS
    } else {
        status.states.gpu.label()
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Levels {
    /// Those whose worker has not left.
    pub(crate) sources: Vec<SourceLevel>,
    pub(crate) left: usize,
    pub(crate) nodes: usize,
    pub(crate) bytes: usize,
    pub(crate) memory: MemoryLevels,
    pub(crate) position: u64,
    pub(crate) lag: u64,
    pub(crate) lag_age: Option<Duration>,
    pub(crate) jumps: u64,
}

/// Memory of the fold, and effects of its bound.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MemoryLevels {
    pub(crate) estimated: usize,
    pub(crate) bound: Option<usize>,
    pub(crate) set_asides: u64,
    pub(crate) returns: u64,
    pub(crate) forgotten: u64,
}

type SourceLevel = (Source, SourceStatus);

/// Maximum sources with series of their own, eleven each. Above it only sources that are not exact
/// have series, the worst first. The counts by state include all sources.
const SOURCES_SHOWN_MAX: usize = 1000;

/// The sources that have series of their own, in order.
fn shown(sources: &[SourceLevel]) -> Vec<&SourceLevel> {
    let mut shown: Vec<&SourceLevel> = sources.iter().collect();
    if shown.len() > SOURCES_SHOWN_MAX {
        shown.retain(|(_, status)| status.states.gpu != SourceState::Exact);
        shown.sort_by_key(|(_, status)| std::cmp::Reverse(status.states.gpu));
        shown.truncate(SOURCES_SHOWN_MAX);
        shown.sort_by_key(|(source, _)| source);
    }
    shown
}

/// The text of one scrape.
struct Scrape(MetricsText);

impl Scrape {
    fn per_source<V: Display>(
        &mut self,
        name: &str,
        help: &str,
        shown: &[&SourceLevel],
        of: impl Fn(&SourceStatus) -> Option<V>,
    ) {
        let series = shown.iter().filter_map(|(source, status)| {
            let labels =
                MetricLabels::new(&[("dp_rank", &source.dp_rank), ("worker", &source.worker)]);
            Some((labels, of(status)?))
        });
        self.0.family(MetricKind::Gauge, name, help, series);
    }

    fn ages(
        &mut self,
        name: &str,
        help: &str,
        shown: &[&SourceLevel],
        of: impl Fn(&SourceStatus) -> Option<Duration>,
    ) {
        self.per_source(name, help, shown, |status| {
            of(status).map(|age| age.as_secs_f64())
        });
    }

    /// A series with value 1 for each source's label; no series for sources without one.
    fn words(
        &mut self,
        (name, help, label): (&str, &str, &str),
        shown: &[&SourceLevel],
        of: impl Fn(&SourceStatus) -> Option<&'static str>,
    ) {
        let series = shown.iter().filter_map(|(source, status)| {
            let labels = MetricLabels::new(&[
                ("dp_rank", &source.dp_rank),
                (label, &of(status)?),
                ("worker", &source.worker),
            ]);
            Some((labels, 1))
        });
        self.0.family(MetricKind::Gauge, name, help, series);
    }

    fn states(&mut self, levels: &Levels) {
        let series = STATES.map(|state| {
            let sources = levels.sources.iter();
            let of = sources.filter(|(_, status)| state_label(status) == state);
            (MetricLabels::new(&[("state", &state)]), of.count())
        });
        let help = "Sources by state.";
        self.0.family(MetricKind::Gauge, "sources", help, series);
    }

    fn sources(&mut self, levels: &Levels) {
        let shown = &*shown(&levels.sources);
        let help =
            "Sources without series of their own: exact ones, where there are more than 1,000.";
        let hidden = levels.sources.len() - shown.len();
        self.0.gauge("sources_not_shown", help, hidden);
        let help = "Sources whose worker left: of each a fence remains, for a day at most.";
        self.0.gauge("sources_left", help, levels.left);
        let help = "1 for the state that the source is in.";
        self.words(("source_state", help, "state"), shown, |of| {
            Some(of.states.gpu.label())
        });
        let help = "1 for what this replica found wrong with the source.";
        self.words(("source_doubt", help, "doubt"), shown, |of| {
            of.fault.map(SourceFault::label)
        });
        let help = "Since it is in its state.";
        self.ages("source_state_age_seconds", help, shown, |of| {
            Some(of.state_age)
        });
        let help = "Since a record or heartbeat proved the source; absent if none did.";
        self.ages("source_proof_age_seconds", help, shown, |of| of.proof_age);
        let help = "Since its last record; absent if none came while it was followed.";
        self.ages("source_record_age_seconds", help, shown, |of| of.record_age);
        let help = "How long its last heartbeat was on its way, by the log's clock.";
        self.ages("source_heartbeat_way_seconds", help, shown, |of| {
            of.heartbeat_delay
        });
        self.per_source("source_generation", "Its fence.", shown, |of| {
            of.generation.map(|generation| generation.0)
        });
        let help = "Generations that began within the last ten minutes.";
        self.per_source("source_generations_lately", help, shown, |of| {
            Some(of.generations_lately)
        });
        self.per_source("source_number", "Its last record.", shown, |of| {
            of.number.map(|number| number.0)
        });
        let help = "The engine's batch that it is as of.";
        self.per_source("source_engine_seq", help, shown, |of| {
            of.engine_seq.map(|seq| seq.0)
        });
        self.per_source("source_blocks", "Pairs that it holds.", shown, |of| {
            of.digest.map(|digest| digest.count)
        });
    }

    fn memory(&mut self, levels: &Levels) {
        let memory = &levels.memory;
        let help = "Estimated memory of all that is folded; the bound is on this.";
        self.0
            .gauge("memory_estimated_bytes", help, memory.estimated);
        if let Some(bound) = memory.bound {
            self.0
                .gauge("memory_bound_bytes", "As --max-memory says.", bound);
        }
        if let Some(bytes) = resident_bytes() {
            self.0
                .gauge("resident_bytes", "Memory of the process.", bytes);
        }
        let sources = levels.sources.iter();
        let aside = sources.filter(|(_, of)| of.reason == Some(UnknownReason::Memory));
        let help = "Sources that are not folded for want of memory.";
        self.0.gauge("sources_set_aside", help, aside.count());
        let sources = levels.sources.iter();
        let gone = sources.filter(|(_, of)| of.reason == Some(UnknownReason::ShimGone));
        let help = "Sources whose shim's lease ended: unknown, and no fault of the index.";
        self.0.gauge("sources_shim_gone", help, gone.count());
        for (name, help, value) in [
            (
                "set_asides_total",
                "Times a source was set aside for want of memory.",
                memory.set_asides,
            ),
            (
                "returns_total",
                "Times a source that was set aside was asked for again.",
                memory.returns,
            ),
            (
                "sources_forgotten_total",
                "Sources that were gone for so long that their fence went, too.",
                memory.forgotten,
            ),
        ] {
            self.0.counter(name, help, value);
        }
    }
}

/// The levels of the fold.
pub(crate) fn levels(fold: &FairReader<Fold>, now: Instant) -> Levels {
    let all = view::statuses(fold, now);
    let (left, sources): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|(_, status)| status.has_left());
    let fold = fold.read();
    Levels {
        sources,
        left: left.len(),
        nodes: fold.tree().nodes(),
        bytes: fold.tree().bytes(),
        memory: MemoryLevels {
            estimated: fold.bytes(),
            bound: fold.bytes_max(),
            set_asides: fold.set_aside_and_returned().0,
            returns: fold.set_aside_and_returned().1,
            forgotten: fold.forgotten(),
        },
        position: fold.position().0,
        lag: fold.lag(),
        lag_age: fold.lag_age(now),
        jumps: fold.jumps(),
    }
}

pub(super) fn text(levels: &Levels) -> String {
    let mut scrape = Scrape(MetricsText::new("warmroute_indexer_"));
    scrape.states(levels);
    scrape.sources(levels);
    scrape.0.gauge(
        "tree_blocks",
        "Distinct prefixes in the tree.",
        levels.nodes,
    );
    scrape
        .0
        .gauge("tree_bytes", "Estimated memory of the tree.", levels.bytes);
    scrape.0.gauge(
        "log_position",
        "Everything up to here is in.",
        levels.position,
    );
    let help = "Messages between the position and the log's end.";
    scrape.0.gauge("log_lag_messages", help, levels.lag);
    let help = "Since the log was in up to its end, as it is looked up twice a second; -1 if that \
                is longer ago than 8 s.";
    let lag = levels.lag_age.map_or(-1.0, |age| age.as_secs_f64());
    scrape.0.gauge("log_lag_seconds", help, lag);
    let help = "Times the log went on elsewhere than it ended.";
    scrape.0.gauge("log_jumps", help, levels.jumps);
    scrape.memory(levels);
    scrape.0.into_string()
}

/// Resident memory of the process, where the system reports it.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kibibytes << 10)
}

#[cfg(test)]
mod tests {
    use warmroute_proto::{
        Digest, DpRank, EngineHealth, EngineSeq, Generation, RecordNumber, Tiers, WorkerId,
    };

    use super::*;

    fn level(rank: u32, state: SourceState) -> SourceLevel {
        let source = Source {
            worker: WorkerId::from("w"),
            dp_rank: DpRank(rank),
        };
        let status = SourceStatus {
            generation: Some(Generation(1)),
            number: Some(RecordNumber(2)),
            engine_seq: Some(EngineSeq(4)),
            states: Tiers::all(state),
            reason: None,
            proof_age: Some(Duration::from_secs(1)),
            digest: Some(Digest::default()),
            health: EngineHealth::Healthy,
            fault: Some(SourceFault::Gap),
            state_age: Duration::from_secs(1),
            generations_lately: 1,
            record_age: Some(Duration::from_secs(1)),
            heartbeat_delay: Some(Duration::from_millis(1)),
            gone_for: None,
        };
        (source, status)
    }

    /// All series, the value of `sources_not_shown` and the sum of those of `sources`.
    fn series(sources: Vec<SourceLevel>) -> (usize, u64, u64) {
        let text = text(&Levels {
            sources,
            ..Levels::default()
        });
        let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let sum = |name: &str| {
            let of = lines.iter().filter_map(|line| line.strip_prefix(name));
            of.map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap())
                .sum()
        };
        let hidden = sum("warmroute_indexer_sources_not_shown");
        (lines.len(), hidden, sum("warmroute_indexer_sources{"))
    }

    #[test]
    fn ten_thousand_sources_have_no_more_series_than_a_thousand() {
        let exact = |count| (0..count).map(|rank| level(rank, SourceState::Exact));
        let (few, hidden, _) = series(exact(1).collect());
        let (thousand, _, _) = series(exact(1000).collect());
        assert_eq!((thousand - few) / 999, 11, "series a source");
        assert_eq!(hidden, 0);
        let stale = |count| (0..count).map(|rank| level(rank, SourceState::Stale));
        let (many, hidden, counted) = series(stale(10_000).collect());
        assert_eq!(many, thousand);
        assert_eq!(hidden, 9000);
        assert_eq!(counted, 10_000);
    }

    #[test]
    fn the_worst_of_many_sources_are_shown() {
        let mut sources: Vec<_> = (0..2000)
            .map(|rank| level(rank, SourceState::Exact))
            .collect();
        sources[1500].1.states.gpu = SourceState::Unknown;
        sources[3].1.states.gpu = SourceState::Partial;
        let ranks = |sources: &[SourceLevel]| -> Vec<u32> {
            let shown = shown(sources);
            shown.iter().map(|(source, _)| source.dp_rank.0).collect()
        };
        assert_eq!(ranks(&sources), [3, 1500]);
        sources.truncate(1000);
        assert_eq!(ranks(&sources).len(), 1000);
    }
}
