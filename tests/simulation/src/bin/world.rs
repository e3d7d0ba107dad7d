//! Many seeds of the simulated world, or the trace of one seed.

use std::io::Write as _;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use tokio::time::Instant;
use warmroute_simulation::world::{Losses, Outcome, Plan, Report, WorldPlane, run};

/// Runs seeds of the simulated world, prints those that fail and a summary.
#[derive(Parser)]
struct Args {
    /// Seeds to run: `100` is 0..100, `100..200` goes on from there.
    #[arg(long, value_parser = range, default_value = "1000")]
    seeds: Range<u64>,
    /// Print the trace of one seed instead.
    #[arg(long)]
    trace: Option<u64>,
    /// The plane: with a log server, or core NATS.
    #[arg(long, value_enum, default_value = "log")]
    plane: WorldPlane,
    /// Threads; as many as there are processors by default.
    #[arg(long)]
    threads: Option<usize>,
}

fn range(text: &str) -> Result<Range<u64>, std::num::ParseIntError> {
    match text.split_once("..") {
        Some((from, to)) => Ok(from.parse()?..to.parse()?),
        None => Ok(0..text.parse()?),
    }
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    let mut out = std::io::stdout().lock();
    if let Some(seed) = args.trace {
        let outcome = run(&Plan {
            is_traced: true,
            plane: args.plane,
            ..Plan::of(seed)
        });
        for line in &outcome.trace {
            writeln!(out, "{line}")?;
        }
        writeln!(out, "{:?}\n{:?}", outcome.report, outcome.broken)?;
        return Ok(code(outcome.broken.is_none()));
    }
    let processors = std::thread::available_parallelism().context("processors")?;
    let threads = args.threads.unwrap_or_else(|| processors.get());
    let start = Instant::now();
    let next = AtomicU64::new(args.seeds.start);
    let (sender, results) = std::sync::mpsc::sync_channel::<(u64, Outcome)>(64);
    let mut failed = 0_u64;
    let mut healed = Vec::new();
    std::thread::scope(|scope| -> std::io::Result<()> {
        for _ in 0..threads {
            let (sender, next, end) = (sender.clone(), &next, args.seeds.end);
            scope.spawn(move || {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end || sender.send((seed, outcome(seed, args.plane))).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        let mut done = 0_u64;
        for (seed, outcome) in results {
            done += 1;
            healed.extend(outcome.report.healed_after);
            if let Some(why) = outcome.broken {
                failed += 1;
                writeln!(out, "seed {seed}: {why}")?;
            }
            if done.is_multiple_of(1000) {
                let seconds = start.elapsed().as_secs_f64();
                writeln!(out, "{done} seeds, {failed} failed, {seconds:.0} s")?;
                out.flush()?;
            }
        }
        Ok(())
    })?;
    healed.sort_unstable();
    let at = |part: usize| -> Duration {
        let index = (healed.len() * part / 1000).min(healed.len().saturating_sub(1));
        healed.get(index).copied().unwrap_or_default()
    };
    let Range { start: from, end } = args.seeds;
    let seconds = start.elapsed().as_secs_f64();
    writeln!(out, "seeds {from}..{end}: {failed} failed, {seconds:.1} s")?;
    let (p50, p99, max) = (at(500), at(990), at(1000));
    writeln!(
        out,
        "healed after {p50:.1?} p50, {p99:.1?} p99, {max:.1?} at most"
    )?;
    Ok(code(failed == 0))
}

/// A panic of a core, a count below zero for one, is a fault of its seed.
fn outcome(seed: u64, plane: WorldPlane) -> Outcome {
    let plan = Plan {
        plane,
        ..Plan::of(seed)
    };
    let run = std::panic::catch_unwind(|| run(&plan));
    run.unwrap_or_else(|_| Outcome {
        losses: Losses::default(),
        report: Report::default(),
        broken: Some("panicked".to_owned()),
        trace: Vec::new(),
    })
}

fn code(is_good: bool) -> ExitCode {
    if is_good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
