//! What a scrape copies from the router's state: series that exist only as long as their worker,
//! and counts that the decision core and the sync core keep themselves.

use std::fmt::{Display, Write as _};

use warmroute_proto::registry::DemotedSource;

use crate::route::{self, SourceLoad};
use crate::sync;
use crate::tokenize::{ComparisonCounts, EncoderKind, SegmentCacheStats};

/// The state that a scrape shows.
pub(crate) struct Scraped<'a> {
    pub loads: &'a [SourceLoad],
    pub workers: &'a [WorkerStatus],
    pub core: &'a route::CoreCounts,
    pub demoted: &'a [DemotedSource],
    /// `None` while the replica does not run.
    pub sync: Option<&'a sync::ReplicaStatus>,
    /// `None` without a tokenizer.
    pub tokenizer: Option<TokenizerStatus>,
    pub leaving: bool,
}

/// The encoder in use and the cache of segments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenizerStatus {
    pub encoder: EncoderKind,
    pub comparisons: ComparisonCounts,
    pub cache: SegmentCacheStats,
}

/// One worker's state.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WorkerStatus {
    pub worker: String,
    pub healthy: bool,
    /// Drained by an operator.
    pub draining: bool,
    /// Each check by its name, with whether the worker passed.
    pub checks: Vec<(&'static str, bool)>,
    /// By rank, where known: observed over predicted time to first token.
    pub ttft_ratios: Vec<(u32, f64)>,
}

/// Text in Prometheus's exposition format.
#[derive(Default)]
pub(super) struct Page {
    pub text: String,
}

#[derive(Clone, Copy)]
enum Kind {
    Counter,
    Gauge,
}

/// The labels of one series, braces included.
struct Labels(String);

impl Labels {
    fn new(pairs: &[(&str, &dyn Display)]) -> Self {
        let pairs = pairs.iter().map(|(name, value)| {
            let value = value.to_string().replace('\\', "\\\\");
            let value = value.replace('"', "\\\"").replace('\n', "\\n");
            format!("{name}=\"{value}\"")
        });
        Self(format!("{{{}}}", pairs.collect::<Vec<_>>().join(",")))
    }

    fn worker(status: &WorkerStatus) -> Self {
        Self::new(&[("worker", &status.worker)])
    }

    fn source(worker: &dyn Display, rank: u32) -> Self {
        Self::new(&[("dp_rank", &rank), ("worker", worker)])
    }
}

impl Page {
    pub(super) fn write(&mut self, scraped: &Scraped<'_>) {
        let leaving = u64::from(scraped.leaving);
        self.gauge("draining", "1 while the router reports not-ready", leaving);
        self.loads(scraped.loads);
        self.workers(scraped.workers);
        self.core(scraped.core);
        self.audit(scraped.core, scraped.demoted);
        if let Some(sync) = scraped.sync {
            self.sync(sync);
        }
        if let Some(tokenizer) = scraped.tokenizer {
            self.tokenizer(tokenizer);
        }
    }

    fn tokenizer(&mut self, status: TokenizerStatus) {
        let TokenizerStatus {
            encoder,
            comparisons,
            cache,
        } = status;
        self.counters(
            "encoder_comparisons_total",
            "Texts encoded by both encoders, by result",
            "result",
            &[
                ("equal", comparisons.equal),
                ("different", comparisons.different),
            ],
        );
        self.gauge(
            "reference_encoder",
            "1 while prompts are encoded by the slower reference",
            u8::from(encoder == EncoderKind::Reference),
        );
        self.counters(
            "token_cache_bytes_total",
            "Prompt bytes looked up in the cache of token ids",
            "result",
            &[("hit", cache.hit_bytes), ("miss", cache.miss_bytes)],
        );
        self.gauge(
            "token_cache_kept_bytes",
            "Bytes that the cache of token ids takes",
            cache.kept_bytes,
        );
    }

    fn loads(&mut self, loads: &[SourceLoad]) {
        let mut gauges = |name, help, value: fn(&SourceLoad) -> u64| {
            let row = |load| (source_of(load), value(load));
            self.family(Kind::Gauge, name, help, loads.iter().map(row));
        };
        gauges("slots_active", "Requests on a source", |load| {
            load.active_requests.into()
        });
        gauges(
            "slots_prefill_tokens",
            "Prompt tokens that a source has still to prefill",
            |load| load.prefill_tokens,
        );
        gauges(
            "slots_decode_blocks",
            "Distinct blocks active on a source",
            |load| load.decode_blocks,
        );
    }

    fn workers(&mut self, workers: &[WorkerStatus]) {
        let mut gauges = |name, help, value: fn(&WorkerStatus) -> bool| {
            let row = |status| (Labels::worker(status), u8::from(value(status)));
            self.family(Kind::Gauge, name, help, workers.iter().map(row));
        };
        gauges(
            "worker_healthy",
            "1 while the router's own checks pass",
            |status| status.healthy,
        );
        gauges(
            "worker_draining",
            "1 while an operator has drained the worker",
            |status| status.draining,
        );
        let checks = workers.iter().flat_map(|status| {
            status.checks.iter().map(|(check, passed)| {
                let labels = Labels::new(&[("check", check), ("worker", &status.worker)]);
                (labels, u8::from(*passed))
            })
        });
        self.family(
            Kind::Gauge,
            "worker_check_passed",
            "1 where a worker passed the check at its registration",
            checks,
        );
        let ratios = workers.iter().flat_map(|status| {
            let ratios = status.ttft_ratios.iter();
            ratios.map(|(rank, ratio)| (Labels::source(&status.worker, *rank), *ratio))
        });
        self.family(
            Kind::Gauge,
            "source_ttft_ratio",
            "Time to first token over what the median source would have needed, averaged",
            ratios,
        );
    }

    fn core(&mut self, counts: &route::CoreCounts) {
        let route::CoreCounts {
            freed,
            moves,
            ignored,
            ..
        } = *counts;
        self.gauge("slots_open", "Open slots of all routers", counts.open_slots);
        self.counter(
            "slots_opened_total",
            "Slots that this router opened, one for each attempt",
            counts.opened,
        );
        self.counters(
            "slots_freed_total",
            "Slots that this router freed",
            "end",
            &[
                ("completed", freed.completed),
                ("failed", freed.failed),
                ("aborted", freed.aborted),
            ],
        );
        self.counters(
            "moves_total",
            "Requests whose choice another router's crossed; `unwatched` for want of room",
            "outcome",
            &[
                ("moved", moves.moved),
                ("stayed", moves.stayed),
                ("late", moves.late),
                ("unwatched", moves.unwatched),
            ],
        );
        self.counters(
            "slot_changes_ignored_total",
            "Slot changes that contradict the slots",
            "reason",
            &[
                ("opened_twice", ignored.opened_twice),
                ("unknown_slot", ignored.unknown_slot),
                ("prefilled_twice", ignored.prefilled_twice),
                ("old_incarnation", ignored.old_incarnation),
            ],
        );
        self.counter(
            "source_stalls_total",
            "Sources found without first tokens",
            counts.stalls,
        );
        self.counter(
            "index_lagging_total",
            "Index answers about a source that were older than known",
            counts.view.lagging,
        );
    }

    fn audit(&mut self, counts: &route::CoreCounts, demoted: &[DemotedSource]) {
        self.counters(
            "audit_rechecks_total",
            "Index credit that an engine did not find, by what the index then said of the block",
            "result",
            &[
                ("cleared", counts.audit.cleared),
                ("unproven", counts.audit.unproven),
                ("strike", counts.audit.strikes),
            ],
        );
        self.counter(
            "source_reinstatements_total",
            "Demotions that ended because the engine agreed with the index again",
            counts.audit.reinstated,
        );
        self.gauge(
            "reported_prefixes",
            "Prefixes that engines reported as cached, where the index is not complete",
            counts.reported_prefixes,
        );
        let row =
            |one: &DemotedSource| (Labels::source(&one.source.worker, one.source.dp_rank.0), 1);
        self.family(
            Kind::Gauge,
            "source_demoted",
            "1 while the index's credit of a source is ignored, because its engine contradicted it",
            demoted.iter().map(row),
        );
    }

    fn sync(&mut self, snapshot: &sync::ReplicaStatus) {
        let counts = &snapshot.counts;
        self.gauge("sync_peers", "Other routers that live", snapshot.peers);
        self.gauge(
            "sync_divergence_requests",
            "Largest difference between a view and its router's last heartbeat",
            snapshot.divergence,
        );
        let incarnation = snapshot.incarnation.map_or(0, |incarnation| incarnation.0);
        self.gauge("sync_incarnation", "This router's incarnation", incarnation);
        self.sync_traffic(counts);
        self.sync_repairs(counts);
    }

    fn sync_traffic(&mut self, counts: &sync::ReplicaCounts) {
        let traffic = counts.traffic;
        for (name, help, received, sent) in [
            (
                "sync_messages_total",
                "Load messages",
                traffic.messages_in,
                traffic.messages_out,
            ),
            (
                "sync_frames_total",
                "Broadcasts of load messages",
                traffic.frames_in,
                traffic.frames_out,
            ),
            (
                "sync_bytes_total",
                "Bytes of broadcasts",
                traffic.bytes_in,
                traffic.bytes_out,
            ),
        ] {
            self.counters(name, help, "direction", &[("in", received), ("out", sent)]);
        }
        self.counters(
            "sync_asks_total",
            "Requests for missing messages or slots; echoes, which measure the round trip",
            "kind",
            &[
                ("asked", traffic.asks_out),
                ("failed", traffic.asks_failed),
                ("served", traffic.asks_in),
                ("echo_asked", traffic.echoes_out),
                ("echo_served", traffic.echoes_in),
            ],
        );
        let verdicts = counts.verdicts;
        self.counters(
            "sync_verdicts_total",
            "Other routers' messages by what became of them",
            "verdict",
            &[
                ("applied", verdicts.applied),
                ("duplicate", verdicts.duplicate),
                ("old", verdicts.old),
                ("ahead", verdicts.ahead),
                ("violation", verdicts.violation),
                ("malformed", verdicts.malformed),
            ],
        );
    }

    fn sync_repairs(&mut self, counts: &sync::ReplicaCounts) {
        let (mended, refused) = (counts.mended, counts.refused);
        self.counter(
            "sync_gaps_total",
            "Times that messages were missing",
            mended.gaps,
        );
        self.counter(
            "sync_digest_mismatches_total",
            "Heartbeats whose digest differed from the view at the same number",
            mended.mismatches,
        );
        self.counter(
            "sync_deaf_total",
            "Times that this router did not receive its own heartbeats",
            counts.deafs,
        );
        self.counters(
            "sync_repairs_total",
            "Repairs of views",
            "kind",
            &[
                ("numbers", mended.by_numbers),
                ("state", mended.by_state),
                ("wrong_state", mended.states_wrong),
                ("cut_taken", mended.cuts),
            ],
        );
        self.counters(
            "sync_refused_total",
            "What exceeded a bound",
            "what",
            &[
                ("peer", refused.peers),
                ("waiting", refused.waiting),
                ("state", refused.states),
                ("ask", refused.asks),
                ("unsent", refused.unsent),
            ],
        );
        self.counters(
            "sync_releases_total",
            "Routers whose slots were freed together",
            "reason",
            &[("silence", counts.deaths), ("goodbye", counts.goodbyes)],
        );
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        let series = [(Labels(String::new()), value)];
        self.family(Kind::Counter, name, help, series);
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        let series = [(Labels(String::new()), value)];
        self.family(Kind::Gauge, name, help, series);
    }

    fn counters(&mut self, name: &str, help: &str, label: &str, values: &[(&str, u64)]) {
        let series = values
            .iter()
            .map(|(text, value)| (Labels::new(&[(label, text)]), value));
        self.family(Kind::Counter, name, help, series);
    }

    /// One family. Without series it has no head either.
    #[expect(
        clippy::let_underscore_must_use,
        reason = "writing to a String cannot fail"
    )]
    fn family<V: Display>(
        &mut self,
        kind: Kind,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (Labels, V)>,
    ) {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        };
        let name = format!("{}_{name}", super::NAMESPACE);
        let mut head = Some(format!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
        for (Labels(labels), value) in series {
            self.text.push_str(&head.take().unwrap_or_default());
            let _ = writeln!(self.text, "{name}{labels} {value}");
        }
    }
}

fn source_of(load: &SourceLoad) -> Labels {
    Labels::source(&load.worker, load.dp_rank.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_values_are_escaped() {
        let Labels(labels) = Labels::new(&[("worker", &"a\"b\\c\nd")]);
        assert_eq!(labels, "{worker=\"a\\\"b\\\\c\\nd\"}");
    }
}
