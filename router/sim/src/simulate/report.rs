//! Runs a simulation and formats its report.

use std::fmt::Write as _;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use serde::Serialize;

use super::args::{SimulateArgs, SimulationPlan};
use super::arrivals::Arrivals;
use super::capacity;
use super::outcome::Figures;
use super::world;
use crate::trace::Trace;

/// Parameters and figures of one run.
#[derive(Clone, Debug, Serialize)]
struct SimulationReport<'a> {
    policy: &'a str,
    workers: usize,
    load: f64,
    /// In requests a second, or open sessions.
    capacity: f64,
    rate: f64,
    routers: usize,
    /// `None` if off.
    sync_ms: Option<f64>,
    balance: String,
    overlap_score_weight: f64,
    router_temperature: f64,
    profile: String,
    seed: u64,
    draw: u64,
    #[serde(flatten)]
    figures: Figures,
}

/// Replays a trace. Returns the report. `epoch` is the start of virtual time; only differences to
/// it are used.
pub fn simulate(args: &SimulateArgs, trace: &Trace, epoch: Instant) -> anyhow::Result<String> {
    let plan = SimulationPlan::try_from(args)?;
    let capacity = match plan.capacity {
        Some(capacity) => capacity,
        None => capacity::measure(trace, &plan, epoch)?,
    };
    let rate = capacity * plan.load;
    let pace = capacity::pace(trace, &plan.setup, rate);
    let arrivals = Arrivals::new(trace, plan.stretch, pace);
    let outcome = world::run(trace, arrivals, &plan.setup, epoch)?;
    ensure!(
        outcome.open_slots == 0,
        "{} slots are open after the last answer",
        outcome.open_slots
    );
    let knobs = &plan.setup.replicas.knobs;
    let report = SimulationReport {
        policy: knobs.policy.label(),
        workers: plan.setup.workers,
        load: plan.load,
        capacity,
        rate,
        routers: plan.setup.replicas.routers,
        sync_ms: args.replay.routers.sync_ms.millis(),
        balance: args.replay.balance_word(),
        overlap_score_weight: knobs.overlap_score_weight,
        router_temperature: knobs.temperature,
        profile: args.replay.profile_name(),
        seed: args.seed,
        draw: args.draw,
        figures: outcome.figures(plan.bounds),
    };
    if args.json {
        serde_json::to_string(&report).context("writing the report")
    } else {
        table(&report)
    }
}

/// Formats the report with one figure per line.
fn table(report: &SimulationReport<'_>) -> anyhow::Result<String> {
    let value = serde_json::to_value(report).context("writing the report")?;
    let mut table = String::new();
    for (name, value) in value.as_object().into_iter().flatten() {
        match (value.as_f64(), value.as_str()) {
            (Some(number), _) if !value.is_u64() => writeln!(table, "{name:<28} {number:.4}"),
            (_, Some(word)) => writeln!(table, "{name:<28} {word}"),
            (_, None) => writeln!(table, "{name:<28} {value}"),
        }
        .context("writing the report")?;
    }
    Ok(table.trim_end().to_owned())
}
