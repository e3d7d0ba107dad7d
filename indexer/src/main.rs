//! `warmroute-indexer`: flags in, exit code out.

use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use prometheus::IntCounter;
use uuid::Uuid;
use warmroute_indexer::args::{Args, Command, Config, Init};
use warmroute_indexer::{Replica, Service, SnapshotConfig, http};
use warmroute_process::signals::Signals;
use warmroute_process::tasks::Tasks;
use warmroute_process::{announce, env, host, listen, logs, nats};
use warmroute_proto::bus::{NatsError, NatsPlane};

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
        Some(Command::Init(sizes)) => runtime.block_on(init(config, sizes)),
        None => runtime.block_on(run(config)),
    }
}

/// Tells what is missing or different, then creates what is missing.
async fn init(config: Config, sizes: Init) -> anyhow::Result<()> {
    let nats = nats::config(&config.nats, "warmroute-init")?;
    let namespace = &config.nats.namespace;
    if let Err(NatsError::Mismatch(differences)) = NatsPlane::connect(nats.clone()).await {
        for difference in differences {
            announce(format_args!("before: {difference}"));
        }
    }
    NatsPlane::init(nats, sizes.into()).await?;
    announce(format_args!("now: namespace {namespace} is set up"));
    Ok(())
}

async fn run(config: Config) -> anyhow::Result<()> {
    let signals = Signals::listen().context("listening for signals")?;
    tracing::info!(?config, "starting");
    let listener = listen::bind(config.listen).await?;
    let address = listener.local_addr().context("the address")?;
    let failures = IntCounter::new("tasks_failed", "Tasks that ended early")?;
    let tasks = Tasks::new(failures);
    let nats = nats::join(&config.nats, "warmroute-indexer", &tasks).await?;
    let id = format!("{:016x}", Uuid::new_v4().as_u64_pair().0);
    let service = Service::new(config.indexer, nats.plane())
        .context("setting up the metrics")?
        .with_nats_stats(move || nats.stats())
        .with_snapshots(SnapshotConfig {
            writer: id.clone(),
            schedule: config.snapshots,
        })
        .registered_as(Replica {
            id,
            url: reached_at(address),
        });
    let handle = service.handle();
    let stop = tasks.stop.clone();
    tasks.spawn("indexer", async move {
        if let Err(error) = service.run(stop).await {
            tracing::error!(%error, "the indexer failed");
        }
    });
    announce(format_args!("{{\"port\":{}}}", address.port()));
    host::run(listener, http::router(handle), signals, tasks).await
}

/// An address on which it listens is one where it is reached, unless it is all of them.
fn reached_at(address: SocketAddr) -> Option<String> {
    (!address.ip().is_unspecified()).then(|| format!("http://{address}"))
}
