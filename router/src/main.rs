//! `warmroute-router`: flags in, exit code out.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use warmroute_router::config::{Args, Config, unknown_names};
use warmroute_router::run::{Addresses, run};
use warmroute_router::telemetry;

fn main() -> ExitCode {
    match start() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // For an operator: what is wrong, without a backtrace. Nobody is left to tell where
            // stderr is closed.
            drop(writeln!(std::io::stderr(), "error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn start() -> anyhow::Result<()> {
    let present = std::env::vars_os().map(|(name, value)| {
        (
            name.to_string_lossy().into(),
            value.to_string_lossy().into(),
        )
    });
    let unknown = unknown_names(present);
    anyhow::ensure!(
        unknown.is_empty(),
        "unknown environment variables: {}",
        unknown.join(", ")
    );
    let config = Config::try_from(Args::parse())?;
    telemetry::install(&config.logs)?;
    tracing::info!(?config, "effective configuration");
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("starting the runtime")?
        .block_on(run(config, announce))
}

/// One JSON line with the ports, for whoever let the system choose them.
fn announce(addresses: Addresses) {
    let (port, admin_port) = (addresses.public.port(), addresses.admin.port());
    tracing::info!(public = %addresses.public, admin = %addresses.admin, "listening");
    let mut stdout = std::io::stdout().lock();
    let line = writeln!(stdout, "{{\"port\":{port},\"admin_port\":{admin_port}}}");
    if let Err(error) = line.and_then(|()| stdout.flush()) {
        tracing::warn!(%error, "the ports cannot be told on stdout");
    }
}
