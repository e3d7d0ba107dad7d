//! Cost of the plane: from an engine's event to an indexer's answer over a real nats-server, with
//! the bare server's figures from the same run.
//!
//!     cargo run --release -p warmroute-tests --bin warmroute-bench-plane [-- --secs 5]
//!
//! One process runs a fake engine (with real ZMQ), a shim and an indexer, each with its own NATS
//! connection. Prints JSON lines, then a table for docs/PERF.md. Asserts nothing.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "figures are what this is for")]

mod engine;
mod fleet;
mod measure;
mod publisher;
mod restart;
mod server;
mod stage;
mod transport;
mod visible;

use anyhow::Context as _;
use clap::{Parser, ValueEnum};

use tokio_util::task::TaskTracker;

use measure::Figure;
use stage::Stage;

/// Measures the plane over a real nats-server.
#[derive(Parser)]
#[command(name = "warmroute-bench-plane")]
struct Args {
    /// Length of each measurement at a fixed rate.
    #[arg(long, default_value_t = 5)]
    secs: u64,
    /// Data-parallel ranks of the fake engine, which share the rate.
    #[arg(long, default_value_t = 8)]
    ranks: u32,
    /// Blocks, in millions, of the throughput measurement.
    #[arg(long, default_value_t = 4)]
    million_blocks: u64,
    /// Measure only this part.
    #[arg(long)]
    only: Option<Part>,
    /// Threads that compute beside the queries of `misses`.
    #[arg(long, default_value_t = 10)]
    busy_threads: usize,
    /// Measure only the restart of a killed indexer with this many entries. Needs
    /// warmroute-indexer-under-test beside this binary.
    #[arg(long)]
    restart_million_entries: Option<u64>,
    /// Be the clients of an attack.
    #[arg(long, hide = true, requires = "base")]
    attack: Option<fleet::Attack>,
    /// The URL that they attack.
    #[arg(long, hide = true)]
    base: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The bare server, then event to visible, at fixed rates.
    Delays,
    Queries,
    Throughput,
    /// Answers of large fleets.
    Fleets,
    /// Queries beside clients that load an indexer's port.
    Attacks,
    /// Queries without an answer in time on a busy machine.
    Misses,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let measured = TaskTracker::new().spawn(measure(Args::parse()));
    // A spawned task avoids wake-ups across threads.
    measured.await?
}

async fn measure(args: Args) -> anyhow::Result<()> {
    if let (Some(attack), Some(base)) = (args.attack, &args.base) {
        fleet::attack(attack, base).await;
        return Ok(());
    }
    let server = server::start().await;
    if let Some(millions) = args.restart_million_entries {
        let restart = restart::restart(&server, millions * 1_000_000).await?;
        println!("{}", serde_json::to_string(&restart)?);
        return Ok(());
    }
    let measures = |part| args.only.is_none_or(|only| only == part);
    let mut figures = Vec::new();
    if measures(Part::Delays) {
        for rate in [1_000, 10_000] {
            let alone = transport::log_delay(&server, rate, args.secs).await;
            figures.extend(alone.context("the transport alone")?);
            let stage = Stage::start(&server, args.ranks).await?;
            figures.extend(visible::delays(&stage, rate, args.secs).await?);
            stage.end().await;
        }
    }
    if measures(Part::Queries) {
        figures.extend(transport::echo_delay(&server).await?);
        let stage = Stage::start(&server, args.ranks).await?;
        figures.extend(visible::query_delays(&stage).await?);
        stage.end().await;
    }
    if measures(Part::Throughput) {
        let stage = Stage::start(&server, args.ranks).await?;
        figures.push(visible::throughput(&stage, args.million_blocks).await?);
        stage.end().await;
    }
    if measures(Part::Fleets) {
        figures.extend(fleet::sizes(&server).await?);
    }
    if measures(Part::Attacks) {
        figures.extend(fleet::attacks(&server).await?);
    }
    if measures(Part::Misses) {
        figures.extend(fleet::misses(&server, args.busy_threads).await?);
    }
    for figure in &figures {
        println!("{}", serde_json::to_string(figure)?);
    }
    println!("\n| what | rate | p50 | p99 | records |\n|---|---|---|---|---|");
    figures
        .iter()
        .map(Figure::row)
        .for_each(|row| println!("{row}"));
    Ok(())
}
