//! The metrics of one or several shims in one process, computed from their sources at each scrape.
//! Label sets are closed.

use std::fmt::Write as _;

use warmroute_proto::{EngineHealth, Tier};

use crate::service::Handle;
use crate::source::{CheckpointStatus, GenerationReason, SourceStatus};

type Value = fn(&SourceStatus) -> f64;

/// Name without the prefix, help, type, value.
const SERIES: [(&str, &str, &str, Value); 38] = [
    ("generation", "Generation in use.", "gauge", |s| {
        number(s.generation.map_or(0, |g| g.0))
    }),
    (
        "blocks",
        "Held pairs as of the last acknowledged record.",
        "gauge",
        |s| number(s.acknowledged.map_or(0, |point| point.after.count)),
    ),
    ("prefixes", "Prefixes kept by the mirror.", "gauge", |s| {
        size(s.prefixes)
    }),
    ("orphans", "Blocks whose parent is unknown.", "gauge", |s| {
        size(s.orphans)
    }),
    (
        "outbox_bytes",
        "Bytes that wait for the log.",
        "gauge",
        |s| size(s.waiting_bytes),
    ),
    ("connected", "The live socket is connected.", "gauge", |s| {
        flag(s.is_connected)
    }),
    ("unverified", "`unverified` at best.", "gauge", |s| {
        flag(s.unverified.is_some())
    }),
    (
        "proof_age_seconds",
        "Age of the proof; -1 without one.",
        "gauge",
        |s| s.proof_age.map_or(-1.0, |age| age.as_secs_f64()),
    ),
    ("batches_total", "Engine batches applied.", "counter", |s| {
        number(s.counters.batches)
    }),
    ("duplicates_total", "Live duplicates.", "counter", |s| {
        number(s.counters.duplicates)
    }),
    ("gaps_total", "Gaps in live sequences.", "counter", |s| {
        number(s.counters.gaps)
    }),
    (
        "gaps_unfilled_total",
        "Gaps that no replay filled.",
        "counter",
        |s| number(s.counters.gaps_unfilled),
    ),
    (
        "restarts_total",
        "Restarts of the engine.",
        "counter",
        |s| number(s.counters.restarts),
    ),
    ("replays_total", "Replays requested.", "counter", |s| {
        number(s.counters.replays)
    }),
    (
        "replays_unanswered_total",
        "Replays without an answer.",
        "counter",
        |s| number(s.counters.replays_unanswered),
    ),
    (
        "payloads_malformed_total",
        "Payloads that did not decode.",
        "counter",
        |s| number(s.counters.payloads_malformed),
    ),
    (
        "foreign_batches_total",
        "Batches of other topics or ranks.",
        "counter",
        |s| number(s.counters.other_topic + s.counters.other_rank),
    ),
    (
        "events_not_understood_total",
        "Events not understood.",
        "counter",
        |s| number(s.mirror.events_not_understood + s.mirror.stores_not_understood),
    ),
    (
        "stores_not_indexable_total",
        "Blocks that cannot be indexed.",
        "counter",
        |s| number(s.mirror.stores_not_indexable),
    ),
    (
        "removals_unknown_total",
        "Removals of unknown blocks.",
        "counter",
        |s| number(s.mirror.removals_unknown),
    ),
    (
        "orphans_dropped_total",
        "Blocks without a parent that exceeded the bound.",
        "counter",
        |s| number(s.mirror.orphans_dropped),
    ),
    (
        "events_elsewhere_total",
        "Events of memory that is not indexed.",
        "counter",
        |s| number(s.mirror.events_untracked),
    ),
    ("clears_total", "Resets of the cache.", "counter", |s| {
        number(s.mirror.clears)
    }),
    (
        "held_dropped_total",
        "Live batches dropped during a replay.",
        "counter",
        |s| number(s.counters.buffered_dropped),
    ),
    ("generations_total", "Generations begun.", "counter", |s| {
        number(s.counters.generations)
    }),
    (
        "appends_failed_total",
        "Appends sent again.",
        "counter",
        |s| number(s.counters.appends_failed),
    ),
    (
        "last_number",
        "Number of the last acknowledged record; -1 without one.",
        "gauge",
        |s| s.acknowledged.map_or(-1.0, |point| number(point.number.0)),
    ),
    (
        "engine_seq",
        "Last engine batch applied; -1 without one.",
        "gauge",
        |s| s.engine_seq.map_or(-1.0, |seq| number(seq.0)),
    ),
    (
        "event_age_seconds",
        "Since the last engine batch was applied; -1 without one.",
        "gauge",
        |s| s.event_age.map_or(-1.0, |age| age.as_secs_f64()),
    ),
    (
        "pauses_total",
        "Pauses of publishing: the log or the lease was unavailable.",
        "counter",
        |s| number(s.counters.pauses),
    ),
    (
        "tails_unexpected_total",
        "Checks of the log's end that did not find the last record.",
        "counter",
        |s| number(s.counters.tails_unexpected),
    ),
    (
        "generations_refused_total",
        "Requests for a generation above an implausible one.",
        "counter",
        |s| number(s.counters.generations_refused),
    ),
    (
        "resets_pending_total",
        "Rises of the engine's count of cache resets.",
        "counter",
        |s| number(s.counters.resets_pending),
    ),
    (
        "checkpoint_age_seconds",
        "Age of the state in the last checkpoint; -1 without one.",
        "gauge",
        |s| checkpoint(s).age.map_or(-1.0, |age| age.as_secs_f64()),
    ),
    (
        "checkpoint_bytes",
        "Size of the last checkpoint.",
        "gauge",
        |s| size(checkpoint(s).bytes),
    ),
    (
        "checkpoints_total",
        "Checkpoints written.",
        "counter",
        |s| number(checkpoint(s).written),
    ),
    (
        "checkpoints_failed_total",
        "Checkpoints that could not be written.",
        "counter",
        |s| number(checkpoint(s).failed),
    ),
    (
        "checkpoints_refused_total",
        "Checkpoints refused at start.",
        "counter",
        |s| number(checkpoint(s).refused),
    ),
];

fn checkpoint(status: &SourceStatus) -> CheckpointStatus {
    status.checkpoint.unwrap_or_default()
}

/// Adds the metrics of the shim itself.
pub fn add_shim(text: &mut String, handle: &Handle) {
    let gauges = [
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
    ];
    for (name, help, is_so) in gauges {
        head(text, name, help, "gauge");
        line(text, &format!("{name} {}", flag(is_so)));
    }
    let name = "messages_unreadable_total";
    head(
        text,
        name,
        "Messages and registry entries that could not be decoded.",
        "counter",
    );
    line(text, &format!("{name} {}", handle.unread()));
}

/// Renders Prometheus' text format: each metric once, with a series for each source.
#[must_use]
pub fn text(sources: &[SourceStatus]) -> String {
    let mut text = String::new();
    for (name, help, kind, value) in SERIES {
        head(&mut text, name, help, kind);
        for source in sources {
            let labels = labels(source);
            line(&mut text, &format!("{name}{{{labels}}} {}", value(source)));
        }
    }
    head(
        &mut text,
        "resyncs_total",
        "Generations begun, by reason.",
        "counter",
    );
    for source in sources {
        let labels = labels(source);
        for reason in GenerationReason::ALL {
            let (word, count) = (reason.label(), source.counters.reasons.of(reason));
            line(
                &mut text,
                &format!("resyncs_total{{{labels},reason=\"{word}\"}} {count}"),
            );
        }
    }
    head(
        &mut text,
        "state",
        "State by tier: 0 complete to 4 catching up.",
        "gauge",
    );
    for source in sources {
        let labels = labels(source);
        for tier in Tier::ALL {
            let state = *source.states.get(tier) as u8;
            line(
                &mut text,
                &format!("state{{{labels},tier=\"{tier}\"}} {state}"),
            );
        }
    }
    text
}

fn labels(source: &SourceStatus) -> String {
    let worker = source.source.worker.as_str();
    let worker = worker
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n");
    format!("worker=\"{worker}\",dp_rank=\"{}\"", source.source.dp_rank)
}

fn head(text: &mut String, name: &str, help: &str, kind: &str) {
    for (field, value) in [("HELP", help), ("TYPE", kind)] {
        if writeln!(text, "# {field} warmroute_shim_{name} {value}").is_err() {
            return;
        }
    }
}

fn line(text: &mut String, sample: &str) {
    text.push_str("warmroute_shim_");
    text.push_str(sample);
    text.push('\n');
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
        assert_eq!(text(&[]).lines().count(), described.len());
    }
}
