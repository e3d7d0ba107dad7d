//! The mock engine: a vLLM server without a model. See `warmroute_mock_engine`.

use std::io::Write as _;

use anyhow::Context as _;
use clap::Parser as _;
use tokio::signal::unix::{SignalKind, signal};
use warmroute_mock_engine::{Args, Mock};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .init();
    // SIGHUP ends no process of Warmroute.
    drop(signal(SignalKind::hangup()).context("listening for SIGHUP")?);
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let mock = Mock::start(Args::parse()).await?;
    announce(&mock)?;
    tokio::select! {
        _ = terminate.recv() => {}
        result = tokio::signal::ctrl_c() => result.context("listening for SIGINT")?,
    }
    mock.stop().await;
    Ok(())
}

/// Prints one JSON line with the bound ports.
fn announce(mock: &Mock) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    serde_json::to_writer(&mut stdout, mock.ports())?;
    writeln!(stdout)?;
    stdout.flush().context("telling the ports")
}
