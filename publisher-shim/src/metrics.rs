//! The metrics of one or several shims in one process, computed from their sources at each scrape.
//! Label sets are closed.

use std::fmt::Display;

use warmroute_process::metrics::MetricKind::{self, Counter, Gauge};
use warmroute_process::metrics::{MetricLabels, MetricsText};
use warmroute_proto::{EngineHealth, Tier};

use crate::service::Handle;
use crate::source::{CheckpointStatus, GenerationReason, SourceStatus};

type Value = fn(&SourceStatus) -> f64;

const PREFIX: &str = "warmroute_shim_";

/// Name without the prefix, help, kind, value.
const SERIES: [(&str, &str, MetricKind, Value); 38] = [
    ("generation", "Generation in use.", Gauge, |s| {
        number(s.generation.map_or(0, |g| g.0))
    }),
    (
        "blocks",
        "Held pairs as of the last acknowledged record.",
        Gauge,
        |s| number(s.acknowledged.map_or(0, |point| point.after.count)),
    ),
    ("prefixes", "Prefixes kept by the mirror.", Gauge, |s| {
        size(s.prefixes)
    }),
    ("orphans", "Blocks whose parent is unknown.", Gauge, |s| {
        size(s.orphans)
    }),
    ("outbox_bytes", "Bytes that wait for the log.", Gauge, |s| {
        size(s.waiting_bytes)
    }),
    ("connected", "The live socket is connected.", Gauge, |s| {
        flag(s.is_connected)
    }),
    ("unverified", "`unverified` at best.", Gauge, |s| {
        flag(s.unverified.is_some())
    }),
    (
        "proof_age_seconds",
        "Age of the proof; -1 without one.",
        Gauge,
        |s| s.proof_age.map_or(-1.0, |age| age.as_secs_f64()),
    ),
    ("batches_total", "Engine batches applied.", Counter, |s| {
        number(s.counters.batches)
    }),
    ("duplicates_total", "Live duplicates.", Counter, |s| {
        number(s.counters.duplicates)
    }),
    ("gaps_total", "Gaps in live sequences.", Counter, |s| {
        number(s.counters.gaps)
    }),
    (
        "gaps_unfilled_total",
        "Gaps that no replay filled.",
        Counter,
        |s| number(s.counters.gaps_unfilled),
    ),
    ("restarts_total", "Restarts of the engine.", Counter, |s| {
        number(s.counters.restarts)
    }),
    ("replays_total", "Replays requested.", Counter, |s| {
        number(s.counters.replays)
    }),
    (
        "replays_unanswered_total",
        "Replays without an answer.",
        Counter,
        |s| number(s.counters.replays_unanswered),
    ),
    (
        "payloads_malformed_total",
        "Payloads that did not decode.",
        Counter,
        |s| number(s.counters.payloads_malformed),
    ),
    (
        "foreign_batches_total",
        "Batches of other topics or ranks.",
        Counter,
        |s| number(s.counters.other_topic + s.counters.other_rank),
    ),
    (
        "events_not_understood_total",
        "Events not understood.",
        Counter,
        |s| number(s.mirror.events_not_understood + s.mirror.stores_not_understood),
    ),
    (
        "stores_not_indexable_total",
        "Blocks that cannot be indexed.",
        Counter,
        |s| number(s.mirror.stores_not_indexable),
    ),
    (
        "removals_unknown_total",
        "Removals of unknown blocks.",
        Counter,
        |s| number(s.mirror.removals_unknown),
    ),
    (
        "orphans_dropped_total",
        "Blocks without a parent that exceeded the bound.",
        Counter,
        |s| number(s.mirror.orphans_dropped),
    ),
    (
        "events_elsewhere_total",
        "Events of memory that is not indexed.",
        Counter,
        |s| number(s.mirror.events_untracked),
    ),
    ("clears_total", "Resets of the cache.", Counter, |s| {
        number(s.mirror.clears)
    }),
    (
        "held_dropped_total",
        "Live batches dropped during a replay.",
        Counter,
        |s| number(s.counters.buffered_dropped),
    ),
    ("generations_total", "Generations begun.", Counter, |s| {
        number(s.counters.generations)
    }),
    (
        "appends_failed_total",
        "Appends sent again.",
        Counter,
        |s| number(s.counters.appends_failed),
    ),
    (
        "last_number",
        "Number of the last acknowledged record; -1 without one.",
        Gauge,
        |s| s.acknowledged.map_or(-1.0, |point| number(point.number.0)),
    ),
    (
        "engine_seq",
        "Last engine batch applied; -1 without one.",
        Gauge,
        |s| s.engine_seq.map_or(-1.0, |seq| number(seq.0)),
    ),
    (
        "event_age_seconds",
        "Since the last engine batch was applied; -1 without one.",
        Gauge,
        |s| s.event_age.map_or(-1.0, |age| age.as_secs_f64()),
    ),
    (
        "pauses_total",
        "Pauses of publishing: the log or the lease was unavailable.",
        Counter,
        |s| number(s.counters.pauses),
    ),
    (
        "tails_unexpected_total",
        "Checks of the log's end that did not find the last record.",
        Counter,
        |s| number(s.counters.tails_unexpected),
    ),
    (
        "generations_refused_total",
        "Requests for a generation above an implausible one.",
        Counter,
        |s| number(s.counters.generations_refused),
    ),
    (
        "resets_pending_total",
        "Rises of the engine's count of cache resets.",
        Counter,
        |s| number(s.counters.resets_pending),
    ),
    (
        "checkpoint_age_seconds",
        "Age of the state in the last checkpoint; -1 without one.",
        Gauge,
        |s| checkpoint(s).age.map_or(-1.0, |age| age.as_secs_f64()),
    ),
    (
        "checkpoint_bytes",
        "Size of the last checkpoint.",
        Gauge,
        |s| size(checkpoint(s).bytes),
    ),
    ("checkpoints_total", "Checkpoints written.", Counter, |s| {
        number(checkpoint(s).written)
    }),
    (
        "checkpoints_failed_total",
        "Checkpoints that could not be written.",
        Counter,
        |s| number(checkpoint(s).failed),
    ),
    (
        "checkpoints_refused_total",
        "Checkpoints refused at start.",
        Counter,
        |s| number(checkpoint(s).refused),
    ),
];

fn checkpoint(status: &SourceStatus) -> CheckpointStatus {
    status.checkpoint.unwrap_or_default()
}

/// The metrics of the shim itself.
#[must_use]
pub fn shim_text(handle: &Handle) -> String {
    let mut text = MetricsText::new(PREFIX);
    for (name, help, is_so) in [
        (
            "leads",
            "This shim holds the worker's lease.",
            handle.leads(),
        ),
        ("ready", "`/readyz` is 200.", handle.is_ready()),
        (
            "engine_healthy",
            "The engine's HTTP answers.",
            handle.health() == EngineHealth::Healthy,
        ),
    ] {
        text.gauge(name, help, flag(is_so));
    }
    text.counter(
        "messages_unreadable_total",
        "Messages and registry entries that could not be decoded.",
        handle.unread(),
    );
    text.into_string()
}

/// The metrics of sources: each metric once, with a series for each source.
#[must_use]
pub fn text(sources: &[SourceStatus]) -> String {
    let mut text = MetricsText::new(PREFIX);
    for (name, help, kind, value) in SERIES {
        let series = sources
            .iter()
            .map(|source| (labels(source, &[]), value(source)));
        text.family(kind, name, help, series);
    }
    let resyncs = sources.iter().flat_map(|source| {
        GenerationReason::ALL.map(|reason| {
            let labels = labels(source, &[("reason", &reason.label())]);
            (labels, source.counters.reasons.of(reason))
        })
    });
    let help = "Generations begun, by reason.";
    text.family(Counter, "resyncs_total", help, resyncs);
    let states = sources.iter().flat_map(|source| {
        Tier::ALL.map(|tier| {
            let labels = labels(source, &[("tier", &tier)]);
            (labels, *source.states.get(tier) as u8)
        })
    });
    let help = "State by tier: 0 complete to 4 catching up.";
    text.family(Gauge, "state", help, states);
    text.into_string()
}

fn labels(source: &SourceStatus, more: &[(&str, &dyn Display)]) -> MetricLabels {
    let source = &source.source;
    let worker: [(&str, &dyn Display); 2] =
        [("worker", &source.worker), ("dp_rank", &source.dp_rank)];
    MetricLabels::new(&[&worker, more].concat())
}

#[expect(clippy::cast_precision_loss, reason = "Prometheus' values are floats")]
const fn number(count: u64) -> f64 {
    count as f64
}

const fn size(count: usize) -> f64 {
    number(count as u64)
}

const fn flag(is_so: bool) -> f64 {
    if is_so { 1.0 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use warmroute_proto::{DpRank, Source, WorkerId};

    use super::*;
    use crate::source::{SourceConfig, SourceCore};

    fn status(worker: &str, rank: u32) -> SourceStatus {
        let source = Source {
            worker: WorkerId::from(worker),
            dp_rank: DpRank(rank),
        };
        let now = tokio::time::Instant::now().into_std();
        let mut core = SourceCore::new(SourceConfig::new(source, true));
        core.connected(now);
        core.status(now)
    }

    #[test]
    fn several_shims_are_one_page() {
        let mut sources = [status("a", 0), status("a", 1), status("b \"\\", 0)];
        sources[2].proof_age = Some(Duration::from_millis(1500));
        sources[2].counters.gaps = 7;
        let page = text(&sources);
        let mut described = BTreeSet::new();
        let mut series = BTreeSet::new();
        let mut current = "";
        for line in page.lines() {
            if let Some(comment) = line.strip_prefix("# ") {
                assert!(described.insert(comment), "described twice: {line}");
                current = comment.split(' ').nth(1).unwrap();
                continue;
            }
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().is_ok(), "{line}");
            assert_eq!(name.split('{').next(), Some(current), "out of its group");
            assert!(series.insert(name), "a duplicate series: {line}");
        }
        assert_eq!(described.len(), 2 * (SERIES.len() + 2));
        assert_eq!(
            series.len(),
            sources.len() * (SERIES.len() + Tier::ALL.len() + GenerationReason::ALL.len())
        );
        for line in [
            r#"warmroute_shim_connected{worker="a",dp_rank="1"} 1"#,
            r#"warmroute_shim_proof_age_seconds{worker="a",dp_rank="0"} -1"#,
            r#"warmroute_shim_proof_age_seconds{worker="b \"\\",dp_rank="0"} 1.5"#,
            r#"warmroute_shim_gaps_total{worker="b \"\\",dp_rank="0"} 7"#,
        ] {
            assert!(page.contains(&format!("{line}\n")), "{line}\n{page}");
        }
        assert_eq!(text(&[]), "");
    }
}
