//! Gauges read from the fold and the process at each scrape.

use std::time::{Duration, Instant};

use warmroute_index::view;
use warmroute_process::metrics::MetricOf::{Age, Counter, Gauge, Gauges, Known, Number};
use warmroute_process::metrics::{MetricKind, MetricLabels, MetricRow, MetricsText};
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

#[rustfmt::skip]
const SOURCE_COUNTS: [MetricRow<Levels>; 3] = [
    ("sources", "Sources by state.", Gauges("state", by_state)),
    ("sources_not_shown",
     "Sources without series of their own: exact ones, where there are more than 1,000.",
     Gauge(|s| (s.sources.len() - shown(&s.sources).len()) as u64)),
    ("sources_left", "Sources whose worker left: of each a fence remains, for a day at most.",
     Gauge(|s| s.left as u64)),
];

#[rustfmt::skip]
const SOURCES: [MetricRow<SourceStatus>; 9] = [
    ("source_state_age_seconds", "Since it is in its state.", Age(|s| Some(s.state_age))),
    ("source_proof_age_seconds",
     "Since a record or heartbeat proved the source; absent if none did.", Age(|s| s.proof_age)),
    ("source_record_age_seconds",
     "Since its last record; absent if none came while it was followed.", Age(|s| s.record_age)),
    ("source_heartbeat_way_seconds",
     "How long its last heartbeat was on its way, by the log's clock.", Age(|s| s.heartbeat_delay)),
    ("source_generation", "Its fence.", Known(|s| s.generation.map(|generation| generation.0))),
    ("source_generations_lately", "Generations that began within the last ten minutes.",
     Gauge(|s| s.generations_lately.into())),
    ("source_number", "Its last record.", Known(|s| s.number.map(|number| number.0))),
    ("source_engine_seq", "The engine's batch that it is as of.",
     Known(|s| s.engine_seq.map(|seq| seq.0))),
    ("source_blocks", "Pairs that it holds.", Known(|s| s.digest.map(|digest| digest.count))),
];

#[rustfmt::skip]
const PROCESS: [MetricRow<Levels>; 14] = [
    ("tree_blocks", "Distinct prefixes in the tree.", Gauge(|s| s.nodes as u64)),
    ("tree_bytes", "Estimated memory of the tree.", Gauge(|s| s.bytes as u64)),
    ("log_position", "Everything up to here is in.", Gauge(|s| s.position)),
    ("log_lag_messages", "Messages between the position and the log's end.", Gauge(|s| s.lag)),
    ("log_lag_seconds",
     "Since the log was in up to its end, as it is looked up twice a second; -1 if that is longer \
      ago than 8 s.",
     Number(|s| s.lag_age.map_or(-1.0, |age| age.as_secs_f64()))),
    ("log_jumps", "Times the log went on elsewhere than it ended.", Gauge(|s| s.jumps)),
    ("memory_estimated_bytes", "Estimated memory of all that is folded; the bound is on this.",
     Gauge(|s| s.memory.estimated as u64)),
    ("memory_bound_bytes", "As --max-memory says.", Known(|s| s.memory.bound.map(|n| n as u64))),
    ("resident_bytes", "Memory of the process.", Known(|_| resident_bytes())),
    ("sources_set_aside", "Sources that are not folded for want of memory.",
     Gauge(|s| unknown_for(s, UnknownReason::Memory))),
    ("sources_shim_gone",
     "Sources whose shim's lease ended: unknown, and no fault of the index.",
     Gauge(|s| unknown_for(s, UnknownReason::ShimGone))),
    ("set_asides_total", "Times a source was set aside for want of memory.",
     Counter(|s| s.memory.set_asides)),
    ("returns_total", "Times a source that was set aside was asked for again.",
     Counter(|s| s.memory.returns)),
    ("sources_forgotten_total", "Sources that were gone for so long that their fence went, too.",
     Counter(|s| s.memory.forgotten)),
];

fn by_state(levels: &Levels) -> Vec<(&'static str, u64)> {
    let count = |state| {
        let sources = levels.sources.iter();
        let of = sources.filter(|(_, status)| state_label(status) == state);
        (state, of.count() as u64)
    };
    STATES.map(count).to_vec()
}

fn unknown_for(levels: &Levels, reason: UnknownReason) -> u64 {
    let sources = levels.sources.iter();
    let of = sources.filter(|(_, status)| status.reason == Some(reason));
    of.count() as u64
}

/// A series with value 1 for each source's label; no series for sources without one.
fn words(
    label: &str,
    shown: &[&SourceLevel],
    of: impl Fn(&SourceStatus) -> Option<&'static str>,
) -> Vec<(MetricLabels, u64)> {
    let series = shown.iter().filter_map(|(source, status)| {
        let Source { worker, dp_rank } = source;
        let word = of(status)?;
        let labels = [
            ("dp_rank", dp_rank as _),
            (label, &word as _),
            ("worker", worker as _),
        ];
        Some((MetricLabels::new(&labels), 1))
    });
    series.collect()
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
    let mut text = MetricsText::new("warmroute_indexer_");
    text.rows(&SOURCE_COUNTS, levels);
    let shown = shown(&levels.sources);
    let states = words("state", &shown, |of| Some(of.states.gpu.label()));
    let help = "1 for the state that the source is in.";
    text.family(MetricKind::Gauge, "source_state", help, states);
    let doubts = words("doubt", &shown, |of| of.fault.map(SourceFault::label));
    let help = "1 for what this replica found wrong with the source.";
    text.family(MetricKind::Gauge, "source_doubt", help, doubts);
    let labelled = shown.iter().map(|(Source { worker, dp_rank }, status)| {
        let labels = MetricLabels::new(&[("dp_rank", dp_rank), ("worker", worker)]);
        (labels, status)
    });
    text.rows_of(&SOURCES, labelled);
    text.rows(&PROCESS, levels);
    text.into_string()
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
