//! `warmroute-router`: flags in, exit code out.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use warmroute_process::{announce, env, logs};
use warmroute_router::config::{Args, Command, Config};
use warmroute_router::run::{Addresses, run};
use warmroute_router::simulate;

fn main() -> ExitCode {
    warmroute_process::main(start)
}

fn start() -> anyhow::Result<()> {
    env::check(&Args::command())?;
    let args = Args::parse();
    if let Some(Command::Simulate(args)) = &args.command {
        return simulate::run(args);
    }
    let config = Config::try_from(args)?;
    logs::install(&config.logs)?;
    tracing::info!(?config, "effective configuration");
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("starting the runtime")?
        .block_on(run(config, tell))
}

fn tell(addresses: Addresses) {
    let (port, admin_port) = (addresses.public.port(), addresses.admin.port());
    tracing::info!(public = %addresses.public, admin = %addresses.admin, "listening");
    announce(format_args!(
        "{{\"port\":{port},\"admin_port\":{admin_port}}}"
    ));
}
