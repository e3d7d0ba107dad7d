//! What is read off the fold, the process and the connection when somebody asks.

use std::time::Duration;

use prometheus::proto::MetricFamily;
use prometheus::{Gauge, GaugeVec, IntCounter, IntGauge, IntGaugeVec, Registry};
use warmroute_proto::Source;
use warmroute_proto::bus::NatsStats;
use warmroute_proto::query::SourceState;

use super::{gauge, options};

const STATES: [SourceState; 6] = [
    SourceState::Exact,
    SourceState::Partial,
    SourceState::Unverified,
    SourceState::Stale,
    SourceState::CatchingUp,
    SourceState::Unknown,
];

#[derive(Clone, Debug, Default)]
pub(crate) struct Levels {
    pub(crate) sources: Vec<SourceLevel>,
    pub(crate) nodes: usize,
    pub(crate) bytes: usize,
    pub(crate) memory: Memory,
    pub(crate) position: u64,
    pub(crate) lag: u64,
    pub(crate) lag_age: Option<Duration>,
    pub(crate) jumps: u64,
}

/// What is kept, and what the bound on it did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Memory {
    pub(crate) estimated: usize,
    pub(crate) bound: Option<usize>,
    pub(crate) set_asides: u64,
    pub(crate) returns: u64,
    pub(crate) forgotten: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct SourceLevel {
    pub(crate) source: Source,
    /// Of the GPU tier.
    pub(crate) state: SourceState,
    /// Not folded, for want of memory.
    pub(crate) is_set_aside: bool,
    pub(crate) generation: Option<u64>,
    pub(crate) number: Option<u64>,
    pub(crate) blocks: Option<u64>,
    pub(crate) proof_age: Option<Duration>,
}

/// A registry of one scrape.
struct Scrape(Registry);

impl Scrape {
    fn gauge(
        &self,
        name: &str,
        help: &str,
        value: impl TryInto<i64>,
    ) -> Result<(), prometheus::Error> {
        let level = IntGauge::with_opts(options(name, help))?;
        level.set(gauge(value));
        self.0.register(Box::new(level))
    }

    fn seconds(&self, name: &str, help: &str, value: f64) -> Result<(), prometheus::Error> {
        let level = Gauge::with_opts(options(name, help))?;
        level.set(value);
        self.0.register(Box::new(level))
    }

    fn counter(&self, name: &str, help: &str, value: u64) -> Result<(), prometheus::Error> {
        let count = IntCounter::with_opts(options(name, help))?;
        count.inc_by(value);
        self.0.register(Box::new(count))
    }

    fn per_source(
        &self,
        name: &str,
        help: &str,
        levels: &Levels,
        of: impl Fn(&SourceLevel) -> Option<u64>,
    ) -> Result<(), prometheus::Error> {
        let gauges = IntGaugeVec::new(options(name, help), &["worker", "dp_rank"])?;
        for level in &levels.sources {
            if let Some(value) = of(level) {
                let [worker, rank] = labels(&level.source);
                gauges.with_label_values(&[worker, rank]).set(gauge(value));
            }
        }
        self.0.register(Box::new(gauges))
    }

    fn states(&self, levels: &Levels) -> Result<(), prometheus::Error> {
        let counts = IntGaugeVec::new(options("sources", "Sources by state."), &["state"])?;
        for state in STATES {
            let of = levels.sources.iter().filter(|level| level.state == state);
            counts
                .with_label_values(&[state.word()])
                .set(gauge(of.count()));
        }
        self.0.register(Box::new(counts))?;
        let help = "1 for the state that the source is in.";
        let names = &["worker", "dp_rank", "state"];
        let states = IntGaugeVec::new(options("source_state", help), names)?;
        for level in &levels.sources {
            let [worker, rank] = labels(&level.source);
            let state = level.state.word().to_owned();
            states.with_label_values(&[worker, rank, state]).set(1);
        }
        self.0.register(Box::new(states))
    }

    fn proofs(&self, levels: &Levels) -> Result<(), prometheus::Error> {
        let help = "Since a record or heartbeat proved the source; absent if none did.";
        let options = options("source_proof_age_seconds", help);
        let ages = GaugeVec::new(options, &["worker", "dp_rank"])?;
        for level in &levels.sources {
            if let Some(age) = level.proof_age {
                let [worker, rank] = labels(&level.source);
                ages.with_label_values(&[worker, rank])
                    .set(age.as_secs_f64());
            }
        }
        self.0.register(Box::new(ages))
    }

    fn memory(&self, levels: &Levels) -> Result<(), prometheus::Error> {
        let memory = &levels.memory;
        let help = "Estimated memory of all that is folded; the bound is on this.";
        self.gauge("memory_estimated_bytes", help, memory.estimated)?;
        if let Some(bound) = memory.bound {
            self.gauge("memory_bound_bytes", "As --max-memory says.", bound)?;
        }
        if let Some(bytes) = resident_bytes() {
            self.gauge("resident_bytes", "Memory of the process.", bytes)?;
        }
        let aside = levels.sources.iter().filter(|level| level.is_set_aside);
        let help = "Sources that are not folded for want of memory.";
        self.gauge("sources_set_aside", help, aside.count())?;
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
            self.counter(name, help, value)?;
        }
        Ok(())
    }

    fn nats(&self, stats: &NatsStats) -> Result<(), prometheus::Error> {
        for (name, help, value) in [
            ("connects", "Connections made.", stats.connects),
            ("disconnects", "Connections lost.", stats.disconnects),
            (
                "slow_consumers",
                "Messages that a full queue dropped.",
                stats.slow_consumers,
            ),
            (
                "server_errors",
                "Complaints of the server.",
                stats.server_errors,
            ),
            (
                "client_errors",
                "Errors of the client.",
                stats.client_errors,
            ),
            (
                "answers_late",
                "Answers that did not come in time.",
                stats.answers_late,
            ),
            (
                "answers_cut_off",
                "Answers that a disconnect took along.",
                stats.answers_cut_off,
            ),
            (
                "tails_reopened",
                "Consumers of the log.",
                stats.tails_reopened,
            ),
            (
                "watches_reopened",
                "Watches of the registry.",
                stats.watches_reopened,
            ),
            (
                "snapshots_torn",
                "Snapshots whose chunks were missing.",
                stats.snapshots_torn,
            ),
            ("in_messages", "Messages received.", stats.in_messages),
            ("out_messages", "Messages sent.", stats.out_messages),
            ("in_bytes", "Bytes received.", stats.in_bytes),
            ("out_bytes", "Bytes sent.", stats.out_bytes),
        ] {
            self.counter(&format!("nats_{name}_total"), help, value)?;
        }
        Ok(())
    }
}

fn labels(source: &Source) -> [String; 2] {
    [source.worker.to_string(), source.dp_rank.to_string()]
}

pub(super) fn gather(
    levels: &Levels,
    nats: Option<&NatsStats>,
) -> Result<Vec<MetricFamily>, prometheus::Error> {
    let scrape = Scrape(Registry::new());
    scrape.states(levels)?;
    scrape.proofs(levels)?;
    scrape.per_source("source_generation", "Its fence.", levels, |of| {
        of.generation
    })?;
    scrape.per_source("source_number", "Its last record.", levels, |of| of.number)?;
    scrape.per_source("source_blocks", "Pairs that it holds.", levels, |of| {
        of.blocks
    })?;
    scrape.gauge(
        "tree_blocks",
        "Distinct prefixes in the tree.",
        levels.nodes,
    )?;
    scrape.gauge("tree_bytes", "Estimated memory of the tree.", levels.bytes)?;
    scrape.gauge(
        "log_position",
        "Everything up to here is in.",
        levels.position,
    )?;
    let help = "Messages between the position and the log's end.";
    scrape.gauge("log_lag_messages", help, levels.lag)?;
    let help = "Since the log was in up to its end, as it is looked up twice a second; -1 if that is \
                longer ago than 8 s.";
    let lag = levels.lag_age.map_or(-1.0, |age| age.as_secs_f64());
    scrape.seconds("log_lag_seconds", help, lag)?;
    let help = "Times the log went on elsewhere than it ended.";
    scrape.gauge("log_jumps", help, levels.jumps)?;
    scrape.memory(levels)?;
    if let Some(stats) = nats {
        scrape.nats(stats)?;
    }
    Ok(scrape.0.gather())
}

/// Where the system tells it.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kibibytes << 10)
}
