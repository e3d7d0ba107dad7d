//! `warmroute-shim`: flags in, exit code out.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use prometheus::IntCounter;
use warmroute_process::signals::Signals;
use warmroute_process::tasks::Tasks;
use warmroute_process::{announce, env, host, listen, logs, nats};
use warmroute_shim::args::{Args, Config};
use warmroute_shim::{Service, http};

fn main() -> ExitCode {
    warmroute_process::main(start)
}

fn start() -> anyhow::Result<()> {
    env::check(&Args::command())?;
    let config = Config::try_from(Args::parse())?;
    logs::install(&config.logs)?;
    tracing::info!(?config, "effective configuration");
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("starting the runtime")?
        .block_on(run(config))
}

async fn run(config: Config) -> anyhow::Result<()> {
    let signals = Signals::listen().context("listening for signals")?;
    let listener = listen::bind(config.listen).await?;
    let port = listener.local_addr().context("the address")?.port();
    let failures = IntCounter::new("tasks_failed", "Tasks that ended early")?;
    let tasks = Tasks::new(failures);
    let nats = nats::join(&config.nats, "warmroute-shim", &tasks).await?;
    let service = Service::new(config.shim, nats.plane())?;
    let handle = service.handle();
    let stop = tasks.stop.clone();
    tasks.spawn("shim", async move {
        if let Err(error) = service.run(stop).await {
            tracing::error!(%error, "the shim failed");
        }
    });
    announce(format_args!("{{\"port\":{port}}}"));
    host::run(listener, http::router(handle), signals, tasks).await
}
