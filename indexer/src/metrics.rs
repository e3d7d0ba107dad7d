//! The indexer's metrics: registered once, in a registry of their own, labels closed.

use prometheus::{
    Encoder, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};
use warmroute_proto::query::SourceState;
use warmroute_proto::registry::ResyncReason;

use crate::fold::{HeartbeatVerdict, Verdict};

const STATES: [SourceState; 6] = [
    SourceState::Exact,
    SourceState::Partial,
    SourceState::Unverified,
    SourceState::Stale,
    SourceState::CatchingUp,
    SourceState::Unknown,
];

/// What became of a query.
#[derive(Clone, Copy, Debug)]
pub(crate) enum QueryOutcome {
    Answered,
    Behind,
    Malformed,
    Failed,
}

impl QueryOutcome {
    const ALL: [Self; 4] = [Self::Answered, Self::Behind, Self::Malformed, Self::Failed];

    const fn word(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::Behind => "behind",
            Self::Malformed => "malformed",
            Self::Failed => "failed",
        }
    }
}

/// What is read off the fold when somebody asks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Levels {
    pub(crate) states: Vec<SourceState>,
    pub(crate) nodes: usize,
    pub(crate) bytes: usize,
    pub(crate) position: u64,
    pub(crate) lag: u64,
    pub(crate) jumps: u64,
}

pub(crate) struct Metrics {
    registry: Registry,
    records: IntCounterVec,
    heartbeats: IntCounterVec,
    queries: IntCounterVec,
    resyncs: IntCounterVec,
    bad_entries: IntCounter,
    reconnects: IntCounter,
    sources: IntGaugeVec,
    tree_blocks: IntGauge,
    tree_bytes: IntGauge,
    position: IntGauge,
    lag: IntGauge,
    jumps: IntGauge,
}

impl Metrics {
    pub(crate) fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let of = Family(&registry);
        let metrics = Self {
            records: of.counters("records_total", "Log messages by verdict.", "verdict")?,
            heartbeats: of.counters("heartbeats_total", "Heartbeats by verdict.", "verdict")?,
            queries: of.counters("queries_total", "Queries by outcome.", "outcome")?,
            resyncs: of.counters("resyncs_total", "New generations asked for.", "reason")?,
            bad_entries: of.counter("bad_registry_entries_total", "Unreadable worker entries.")?,
            reconnects: of.counter("reconnects_total", "Times the log was taken up again.")?,
            sources: of.gauges("sources", "Sources by state.", "state")?,
            tree_blocks: of.gauge("tree_blocks", "Distinct prefixes in the tree.")?,
            tree_bytes: of.gauge("tree_bytes", "Estimated memory of the tree.")?,
            position: of.gauge("log_position", "Everything up to here is in.")?,
            lag: of.gauge(
                "log_lag_messages",
                "Messages between the position and the end.",
            )?,
            jumps: of.gauge(
                "log_jumps",
                "Times the log went on elsewhere than it ended.",
            )?,
            registry,
        };
        metrics.touch();
        Ok(metrics)
    }

    /// Every series is there from the start, so that a rate over its first event is right.
    fn touch(&self) {
        for verdict in Verdict::ALL {
            self.records.with_label_values(&[verdict.word()]);
        }
        for verdict in HeartbeatVerdict::ALL {
            self.heartbeats.with_label_values(&[verdict.word()]);
        }
        for outcome in QueryOutcome::ALL {
            self.queries.with_label_values(&[outcome.word()]);
        }
        for reason in [
            ResyncReason::Gap,
            ResyncReason::Mismatch,
            ResyncReason::Fenced,
            ResyncReason::LogLost,
        ] {
            self.resyncs.with_label_values(&[reason.word()]);
        }
    }

    pub(crate) fn record(&self, verdict: Verdict) {
        self.records.with_label_values(&[verdict.word()]).inc();
    }

    pub(crate) fn heartbeat(&self, verdict: HeartbeatVerdict) {
        self.heartbeats.with_label_values(&[verdict.word()]).inc();
    }

    pub(crate) fn query(&self, outcome: QueryOutcome) {
        self.queries.with_label_values(&[outcome.word()]).inc();
    }

    pub(crate) fn resync(&self, reason: ResyncReason) {
        self.resyncs.with_label_values(&[reason.word()]).inc();
    }

    pub(crate) fn bad_entry(&self) {
        self.bad_entries.inc();
    }

    pub(crate) fn reconnect(&self) {
        self.reconnects.inc();
    }

    /// Everything in Prometheus' text format, with these levels.
    pub(crate) fn text(&self, levels: &Levels) -> Result<Vec<u8>, prometheus::Error> {
        for state in STATES {
            let count = levels.states.iter().filter(|&&of| of == state).count();
            self.sources
                .with_label_values(&[state.word()])
                .set(gauge(count));
        }
        self.tree_blocks.set(gauge(levels.nodes));
        self.tree_bytes.set(gauge(levels.bytes));
        self.position.set(gauge(levels.position));
        self.lag.set(gauge(levels.lag));
        self.jumps.set(gauge(levels.jumps));
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }
}

fn gauge(value: impl TryInto<i64>) -> i64 {
    value.try_into().unwrap_or(i64::MAX)
}

/// Makes and registers series of one name space.
struct Family<'a>(&'a Registry);

impl Family<'_> {
    fn options(name: &str, help: &str) -> Opts {
        Opts::new(format!("warmroute_indexer_{name}"), help)
    }

    fn counters(
        &self,
        name: &str,
        help: &str,
        label: &str,
    ) -> Result<IntCounterVec, prometheus::Error> {
        let counters = IntCounterVec::new(Self::options(name, help), &[label])?;
        self.0.register(Box::new(counters.clone()))?;
        Ok(counters)
    }

    fn gauges(
        &self,
        name: &str,
        help: &str,
        label: &str,
    ) -> Result<IntGaugeVec, prometheus::Error> {
        let gauges = IntGaugeVec::new(Self::options(name, help), &[label])?;
        self.0.register(Box::new(gauges.clone()))?;
        Ok(gauges)
    }

    fn counter(&self, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
        let counter = IntCounter::with_opts(Self::options(name, help))?;
        self.0.register(Box::new(counter.clone()))?;
        Ok(counter)
    }

    fn gauge(&self, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
        let gauge = IntGauge::with_opts(Self::options(name, help))?;
        self.0.register(Box::new(gauge.clone()))?;
        Ok(gauge)
    }
}
