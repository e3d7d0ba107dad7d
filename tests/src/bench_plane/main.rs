//! What the plane costs: from an engine's event to an indexer's answer over a real nats-server, with the
//! same server's own figures in the same run.
//!
//!     cargo run --release -p warmroute-tests --bin warmroute-bench-plane [-- --secs 5]
//!
//! One process has a fake engine (ZMQ as a real one), a shim and an indexer, each with a connection of its
//! own; everything between them goes through NATS. JSON lines on stdout, a table for docs/PERF.md behind
//! them. Nothing is asserted: a figure is no test.
#![expect(clippy::print_stdout, reason = "figures are what this is for")]

mod engine;
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

/// Measures the plane; see the module's documentation.
#[derive(Parser)]
#[command(name = "warmroute-bench-plane")]
struct Args {
    /// Length of each measurement at a fixed rate.
    #[arg(long, default_value_t = 5)]
    secs: u64,
    /// Data-parallel ranks of the fake engine: so many sources share the rate.
    #[arg(long, default_value_t = 8)]
    ranks: u32,
    /// Blocks, in millions, of the throughput measurement.
    #[arg(long, default_value_t = 4)]
    million_blocks: u64,
    /// Measure only this.
    #[arg(long)]
    only: Option<Part>,
    /// Measure only this: how long a killed indexer with so many entries takes until it is ready again.
    /// It needs warmroute-indexer-under-test, built beside this binary.
    #[arg(long)]
    restart_million_entries: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The server alone, and event → visible, at fixed rates.
    Delays,
    Queries,
    Throughput,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let measured = TaskTracker::new().spawn(measure(Args::parse()));
    // What waits on this thread itself would be woken across threads.
    measured.await?
}

async fn measure(args: Args) -> anyhow::Result<()> {
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
