//! The metrics of one or several shims in one process, computed from their sources at each scrape.
//! Label sets are closed.

use std::time::Duration;

use warmroute_process::metrics::MetricOf::{Counter, Counters, Flag, Gauge, Gauges, Number};
use warmroute_process::metrics::{MetricLabels, MetricRow, MetricsText};
use warmroute_proto::{EngineHealth, Source, Tier, TierState};

use crate::service::Handle;
use crate::source::{CheckpointStatus, GenerationReason, SourceStatus};

const PREFIX: &str = "warmroute_shim_";

#[rustfmt::skip]
const SOURCES: [MetricRow<SourceStatus>; 40] = [
    ("generation", "Generation in use.", Gauge(|s| s.generation.map_or(0, |g| g.0))),
    ("blocks", "Held pairs as of the last acknowledged record.",
     Gauge(|s| s.acknowledged.map_or(0, |point| point.after.count))),
    ("prefixes", "Prefixes kept by the mirror.", Gauge(|s| s.prefixes as u64)),
    ("orphans", "Blocks whose parent is unknown.", Gauge(|s| s.orphans as u64)),
    ("outbox_bytes", "Bytes that wait for the log.", Gauge(|s| s.waiting_bytes as u64)),
    ("connected", "The live socket is connected.", Flag(|s| s.is_connected)),
    ("unverified", "`unverified` at best.", Flag(|s| s.unverified.is_some())),
    ("proof_age_seconds", "Age of the proof; -1 without one.", Number(|s| seconds(s.proof_age))),
    ("batches_total", "Engine batches applied.", Counter(|s| s.counters.batches)),
    ("duplicates_total", "Live duplicates.", Counter(|s| s.counters.duplicates)),
    ("gaps_total", "Gaps in live sequences.", Counter(|s| s.counters.gaps)),
    ("gaps_unfilled_total", "Gaps that no replay filled.", Counter(|s| s.counters.gaps_unfilled)),
    ("restarts_total", "Restarts of the engine.", Counter(|s| s.counters.restarts)),
    ("replays_total", "Replays requested.", Counter(|s| s.counters.replays)),
    ("replays_unanswered_total", "Replays without an answer.",
     Counter(|s| s.counters.replays_unanswered)),
    ("payloads_malformed_total", "Payloads that did not decode.",
     Counter(|s| s.counters.payloads_malformed)),
    ("foreign_batches_total", "Batches of other topics or ranks.",
     Counter(|s| s.counters.other_topic + s.counters.other_rank)),
    ("events_not_understood_total", "Events not understood.",
     Counter(|s| s.mirror.events_not_understood + s.mirror.stores_not_understood)),
    ("stores_not_indexable_total", "Blocks that cannot be indexed.",
     Counter(|s| s.mirror.stores_not_indexable)),
    ("removals_unknown_total", "Removals of unknown blocks.",
     Counter(|s| s.mirror.removals_unknown)),
    ("orphans_dropped_total", "Blocks without a parent that exceeded the bound.",
     Counter(|s| s.mirror.orphans_dropped)),
    ("events_elsewhere_total", "Events of memory that is not indexed.",
     Counter(|s| s.mirror.events_untracked)),
    ("clears_total", "Resets of the cache.", Counter(|s| s.mirror.clears)),
    ("held_dropped_total", "Live batches dropped during a replay.",
     Counter(|s| s.counters.buffered_dropped)),
    ("generations_total", "Generations begun.", Counter(|s| s.counters.generations)),
    ("appends_failed_total", "Appends sent again.", Counter(|s| s.counters.appends_failed)),
    ("last_number", "Number of the last acknowledged record; -1 without one.",
     Number(|s| s.acknowledged.map_or(-1.0, |point| number(point.number.0)))),
    ("engine_seq", "Last engine batch applied; -1 without one.",
     Number(|s| s.engine_seq.map_or(-1.0, |seq| number(seq.0)))),
    ("event_age_seconds", "Since the last engine batch was applied; -1 without one.",
     Number(|s| seconds(s.event_age))),
    ("pauses_total", "Pauses of publishing: the log or the lease was unavailable.",
     Counter(|s| s.counters.pauses)),
    ("tails_unexpected_total", "Checks of the log's end that did not find the last record.",
     Counter(|s| s.counters.tails_unexpected)),
    ("generations_refused_total", "Requests for a generation above an implausible one.",
     Counter(|s| s.counters.generations_refused)),
    ("resets_pending_total", "Rises of the engine's count of cache resets.",
     Counter(|s| s.counters.resets_pending)),
    ("checkpoint_age_seconds", "Age of the state in the last checkpoint; -1 without one.",
     Number(|s| seconds(checkpoint(s).age))),
    ("checkpoint_bytes", "Size of the last checkpoint.", Gauge(|s| checkpoint(s).bytes as u64)),
    ("checkpoints_total", "Checkpoints written.", Counter(|s| checkpoint(s).written)),
    ("checkpoints_failed_total", "Checkpoints that could not be written.",
     Counter(|s| checkpoint(s).failed)),
    ("checkpoints_refused_total", "Checkpoints refused at start.",
     Counter(|s| checkpoint(s).refused)),
    ("resyncs_total", "Generations begun, by reason.", Counters("reason", reasons)),
    ("state", "State by tier that exists: 0 complete to 4 catching up.", Gauges("tier", states)),
];

#[rustfmt::skip]
const SHIM: [MetricRow<Handle>; 4] = [
    ("leads", "This shim holds the worker's lease.", Flag(Handle::leads)),
    ("ready", "`/readyz` is 200.", Flag(Handle::is_ready)),
    ("engine_healthy", "The engine's HTTP answers.", Flag(|s| s.health() == EngineHealth::Healthy)),
    ("messages_unreadable_total", "Messages and registry entries that could not be decoded.",
     Counter(Handle::unread)),
];

fn checkpoint(status: &SourceStatus) -> CheckpointStatus {
    status.checkpoint.unwrap_or_default()
}

fn reasons(status: &SourceStatus) -> Vec<(&'static str, u64)> {
    let of = |reason: GenerationReason| (reason.label(), status.counters.reasons.of(reason));
    GenerationReason::ALL.map(of).to_vec()
}

fn states(status: &SourceStatus) -> Vec<(&'static str, u64)> {
    let states = Tier::ALL.map(|tier| (tier.label(), *status.states.get(tier)));
    let exist = states
        .iter()
        .filter(|(_, state)| *state != TierState::Absent);
    exist.map(|(tier, state)| (*tier, *state as u64)).collect()
}

/// An age; -1 without one.
fn seconds(age: Option<Duration>) -> f64 {
    age.map_or(-1.0, |age| age.as_secs_f64())
}

#[expect(clippy::cast_precision_loss, reason = "Prometheus' values are floats")]
const fn number(count: u64) -> f64 {
    count as f64
}

/// The metrics of the shim itself.
#[must_use]
pub fn shim_text(handle: &Handle) -> String {
    let mut text = MetricsText::new(PREFIX);
    text.rows(&SHIM, handle);
    text.into_string()
}

/// The metrics of sources: each metric once, with a series for each source.
#[must_use]
pub fn text(sources: &[SourceStatus]) -> String {
    let mut text = MetricsText::new(PREFIX);
    let labelled = sources.iter().map(|status| {
        let Source { worker, dp_rank } = &status.source;
        let labels = MetricLabels::new(&[("worker", worker), ("dp_rank", dp_rank)]);
        (labels, status)
    });
    text.rows_of(&SOURCES, labelled);
    text.into_string()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use warmroute_proto::{DpRank, WorkerId};

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
        assert_eq!(described.len(), 2 * SOURCES.len());
        assert_eq!(
            series.len(),
            sources.len() * (SOURCES.len() - 2 + Tier::ALL.len() + GenerationReason::ALL.len())
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
