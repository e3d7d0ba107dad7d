//! The indexer's metrics, registered once, with closed label sets. Series of single sources are
//! built at each scrape, so that they end with their source.

mod levels;

use std::marker::PhantomData;
use std::time::Duration;

use prometheus::{
    Encoder, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
    TextEncoder, core::Collector,
};
use warmroute_proto::label_enum;
use warmroute_proto::registry::ResyncReason;

use crate::fold::{HeartbeatVerdict, RecordVerdict};
use crate::same_log::LogMatch;

pub(crate) use levels::{Levels, levels};

/// Values of a metric label: a closed set.
pub(crate) trait Label: Copy + 'static {
    const LABELS: &'static [Self];

    fn text(self) -> &'static str;
}

macro_rules! label {
    ($name:ty, $all:expr) => {
        impl Label for $name {
            const LABELS: &'static [Self] = $all;

            fn text(self) -> &'static str {
                self.label()
            }
        }
    };
}

label!(QueryOutcome, &Self::ALL);
label!(SnapshotOutcome, &Self::ALL);
label!(Skipped, &Self::ALL);
label!(RestoreCause, &Self::ALL);
label!(RecordVerdict, &Self::ALL);
label!(HeartbeatVerdict, &Self::ALL);
label!(
    LogMatch,
    &[Self::AnotherLog, Self::LostEnd, Self::OtherRecord]
);
label!(
    ResyncReason,
    &[Self::Gap, Self::Mismatch, Self::Fenced, Self::LogLost]
);

label_enum! {
    /// Outcome of a query.
    pub(crate) enum QueryOutcome {
        Answered = "answered",
        Behind = "behind",
        Malformed = "malformed",
        /// Larger than a message of the plane may be.
        TooLarge = "too_large",
        /// Refused: too many waited.
        Overload = "overload",
        Failed = "failed",
    }
}
label_enum! {
    /// Outcome of a due snapshot.
    pub(crate) enum SnapshotOutcome {
        Written = "written",
        NotDue = "not_due",
        Busy = "busy",
        Superseded = "superseded",
        SetAside = "set_aside",
        Mismatch = "mismatch",
        Failed = "failed",
    }
}
label_enum! {
    /// Why a snapshot was not loaded.
    pub(crate) enum Skipped {
        Corrupt = "corrupt",
        Torn = "torn",
        AnotherLog = "another_log",
        Trimmed = "trimmed",
        RecordDiffers = "record_differs",
        Memory = "memory",
    }
}
label_enum! {
    /// Why a snapshot was loaded.
    pub(crate) enum RestoreCause {
        Start = "start",
        FellOff = "fell_off",
        Mismatch = "mismatch",
    }
}

/// Counters by a label. All series exist from the start, so that a rate over the first event is
/// right.
pub(crate) struct LabelledCounters<L> {
    counters: IntCounterVec,
    label: PhantomData<L>,
}

impl<L: Label> LabelledCounters<L> {
    pub(crate) fn inc(&self, label: L) {
        self.counters.with_label_values(&[label.text()]).inc();
    }
}

pub(crate) struct Metrics {
    registry: Registry,
    pub(crate) records: LabelledCounters<RecordVerdict>,
    pub(crate) heartbeats: LabelledCounters<HeartbeatVerdict>,
    pub(crate) queries: LabelledCounters<QueryOutcome>,
    pub(crate) resyncs: LabelledCounters<ResyncReason>,
    pub(crate) bad_entries: IntCounter,
    pub(crate) reconnects: IntCounter,
    pub(crate) looks_failed: IntCounter,
    pub(crate) logs_broken: LabelledCounters<LogMatch>,
    visible: Histogram,
    pub(crate) snapshots: SnapshotMetrics,
}

pub(crate) struct SnapshotMetrics {
    pub(crate) outcomes: LabelledCounters<SnapshotOutcome>,
    pub(crate) skipped: LabelledCounters<Skipped>,
    pub(crate) restores: LabelledCounters<RestoreCause>,
    age: IntGauge,
    bytes: IntGauge,
    locked: Histogram,
    duration: Histogram,
}

impl Metrics {
    pub(crate) fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let of = Family(&registry);
        Ok(Self {
            records: of.counters("records_total", "Log messages by verdict.", "verdict")?,
            heartbeats: of.counters("heartbeats_total", "Heartbeats by verdict.", "verdict")?,
            queries: of.counters("queries_total", "Queries by outcome.", "outcome")?,
            resyncs: of.counters("resyncs_total", "New generations asked for.", "reason")?,
            bad_entries: of.counter(
                "bad_registry_entries_total",
                "Unreadable entries of workers, and snapshot pointers.",
            )?,
            reconnects: of.counter("reconnects_total", "Times the log was taken up again.")?,
            looks_failed: of.counter(
                "log_checks_failed_total",
                "Times the log's identity and end could not be asked for.",
            )?,
            logs_broken: of.counters(
                "logs_broken_total",
                "Times the log was not the one that was read, by what differed.",
                "fit",
            )?,
            visible: of.seconds(
                "event_to_visible_seconds",
                "From when the log took a record to when answers have it. The first is the NATS \
                 server's clock, the second this machine's: their difference is in it.",
            )?,
            snapshots: SnapshotMetrics::new(&of)?,
            registry,
        })
    }

    /// Records stored at these times, in nanoseconds since the Unix epoch, are visible now. A clock
    /// behind the server's counts as zero.
    pub(crate) fn visible(&self, stored_unix_ns: impl Iterator<Item = u64>) {
        let now = unix_ns();
        for stored in stored_unix_ns {
            let age = Duration::from_nanos(now.saturating_sub(stored));
            self.visible.observe(age.as_secs_f64());
        }
    }

    pub(crate) fn snapshot_written(&self, bytes: u64, locked: Duration, took: Duration) {
        self.snapshots.bytes.set(gauge(bytes));
        self.snapshots.locked.observe(locked.as_secs_f64());
        self.snapshots.duration.observe(took.as_secs_f64());
    }

    pub(crate) fn snapshot_age(&self, age: Option<Duration>) {
        let age = age.map_or(-1, |age| gauge(age.as_secs()));
        self.snapshots.age.set(age);
    }

    /// All metrics in Prometheus' text format.
    pub(crate) fn text(&self, levels: &Levels) -> Result<Vec<u8>, prometheus::Error> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        text.extend_from_slice(levels::text(levels).as_bytes());
        Ok(text)
    }
}

impl SnapshotMetrics {
    fn new(of: &Family<'_>) -> Result<Self, prometheus::Error> {
        let age = of.gauge(
            "snapshot_age_seconds",
            "Since the newest snapshot was written or found; -1 if there is none.",
        )?;
        age.set(-1);
        Ok(Self {
            outcomes: of.counters("snapshots_total", "Snapshots that were due.", "outcome")?,
            skipped: of.counters(
                "snapshots_skipped_total",
                "Snapshots that were not loaded, by why.",
                "reason",
            )?,
            restores: of.counters("restores_total", "Snapshots that were loaded.", "cause")?,
            age,
            bytes: of.gauge("snapshot_bytes", "Of the last one written here.")?,
            locked: of.seconds(
                "snapshot_lock_seconds",
                "How long the log waited while a snapshot was cut. Queries did not.",
            )?,
            duration: of.seconds("snapshot_duration_seconds", "From the cut to the pointer.")?,
        })
    }
}

/// Local clock in nanoseconds since the Unix epoch. For display only.
#[expect(
    clippy::disallowed_methods,
    reason = "shows the log's times, which are wall clock, and decides nothing"
)]
#[must_use]
pub fn unix_ns() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(u64::MAX))
}

fn gauge(value: impl TryInto<i64>) -> i64 {
    value.try_into().unwrap_or(i64::MAX)
}

fn options(name: &str, help: &str) -> Opts {
    Opts::new(format!("warmroute_indexer_{name}"), help)
}

/// Creates and registers the series of a registry.
struct Family<'a>(&'a Registry);

impl Family<'_> {
    fn register<C: Collector + Clone + 'static>(&self, series: C) -> Result<C, prometheus::Error> {
        self.0.register(Box::new(series.clone()))?;
        Ok(series)
    }

    fn counters<L: Label>(
        &self,
        name: &str,
        help: &str,
        label: &str,
    ) -> Result<LabelledCounters<L>, prometheus::Error> {
        let counters = self.register(IntCounterVec::new(options(name, help), &[label])?)?;
        for value in L::LABELS {
            counters.with_label_values(&[value.text()]);
        }
        Ok(LabelledCounters {
            counters,
            label: PhantomData,
        })
    }

    fn counter(&self, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
        self.register(IntCounter::with_opts(options(name, help))?)
    }

    fn gauge(&self, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
        self.register(IntGauge::with_opts(options(name, help))?)
    }

    /// A histogram from 0.1 ms to 26 s.
    fn seconds(&self, name: &str, help: &str) -> Result<Histogram, prometheus::Error> {
        let buckets = prometheus::exponential_buckets(0.0001, 2.0, 19)?;
        let options = HistogramOpts::from(options(name, help)).buckets(buckets);
        self.register(Histogram::with_opts(options)?)
    }
}
