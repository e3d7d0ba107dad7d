//! `warmroute-indexer`: flags in, exit code out.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use prometheus::IntCounter;
use warmroute_indexer::args::{Args, Command, Config};
use warmroute_indexer::{Service, http};
use warmroute_process::signals::Signals;
use warmroute_process::tasks::Tasks;
use warmroute_process::{announce, env, host, listen, logs, nats};
use warmroute_proto::bus::{InitConfig, NatsPlane};

fn main() -> ExitCode {
    warmroute_process::main(start)
}

fn start() -> anyhow::Result<()> {
    env::check(&Args::command())?;
    let args = Args::parse();
    let command = args.command;
    let config = Config::try_from(args)?;
    logs::install(&config.logs)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("starting the runtime")?;
    match command {
        Some(Command::Init) => runtime.block_on(init(config)),
        None => runtime.block_on(run(config)),
    }
}

async fn init(config: Config) -> anyhow::Result<()> {
    let nats = nats::config(&config.nats, "warmroute-init")?;
    NatsPlane::init(nats, InitConfig::default()).await?;
    tracing::info!("the namespace is set up");
    Ok(())
}

async fn run(config: Config) -> anyhow::Result<()> {
    let signals = Signals::listen().context("listening for signals")?;
    let listener = listen::bind(config.listen).await?;
    let port = listener.local_addr().context("the address")?.port();
    let failures = IntCounter::new("tasks_failed", "Tasks that ended early")?;
    let tasks = Tasks::new(failures);
    let nats = nats::join(&config.nats, "warmroute-indexer", &tasks).await?;
    let service = Service::new(config.indexer, nats.plane()).context("setting up the metrics")?;
    let handle = service.handle();
    let stop = tasks.stop.clone();
    tasks.spawn("indexer", async move {
        if let Err(error) = service.run(stop).await {
            tracing::error!(%error, "the indexer failed");
        }
    });
    announce(format_args!("{{\"port\":{port}}}"));
    host::run(listener, http::router(handle), signals, tasks).await
}
