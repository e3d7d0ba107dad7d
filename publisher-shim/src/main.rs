//! `warmroute-shim`: flags in, exit code out.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use clap::{CommandFactory as _, FromArgMatches as _};
use prometheus::IntCounter;
use warmroute_process::args::given;
use warmroute_process::followed_file::FollowedFile;
use warmroute_process::nats::NatsRole;
use warmroute_process::signals::Signals;
use warmroute_process::tasks::Tasks;
use warmroute_process::tls::EngineTls;
use warmroute_process::{announce, build, completions, env, host, listen, logs, nats, print};
use warmroute_shim::args::{Args, Config};
use warmroute_shim::{
    CheckpointStore, EngineKey, EngineKeyError, EngineKeySource, Service, StateDir, http,
};

const NATS_ROLE: NatsRole = NatsRole {
    name: "warmroute-shim",
    without: "cache events wait here, this shim is not ready, and after 5 s routers give its worker \
              no credit; requests are served",
};

fn main() -> ExitCode {
    warmroute_process::main(start)
}

fn start() -> anyhow::Result<()> {
    env::check(&Args::command())?;
    let matches = Args::command().get_matches();
    if completions::printed(&matches, Args::command())? {
        return Ok(());
    }
    let args = Args::from_arg_matches(&matches)?;
    let is_check = args.check;
    let config = Config::try_from(args)?;
    logs::install(&config.logs)?;
    if is_check {
        return check(config);
    }
    tracing::info!(
        version = build::version(),
        "starting: {}",
        given(&Args::command())
    );
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("starting the runtime")?
        .block_on(run(config))
}

/// Reads the files that a start reads.
fn check(config: Config) -> anyhow::Result<()> {
    nats::check(&config.nats)?;
    engine_key(config.engine_key_file)?;
    EngineTls::of_file(config.engine_ca.as_deref()).context("--engine-ca")?;
    print(format_args!("valid: flags, keys and credentials"))
}

async fn run(mut config: Config) -> anyhow::Result<()> {
    let mut signals = Signals::listen().context("listening for signals")?;
    let engine_key = engine_key(config.engine_key_file)?;
    if let Some(file) = engine_key.clone() {
        config.shim.engine_key = EngineKeySource::new(move || Some(file.current()));
    }
    let tls = EngineTls::of_file(config.engine_ca.as_deref()).context("--engine-ca")?;
    config.shim.engine_tls = Some(tls);
    if let Some(dir) = &config.state_dir {
        let opened = tokio::select! {
            opened = StateDir::open_when_free(dir, &config.shim.worker) => opened,
            signal = signals.received() => {
                tracing::info!(signal, "ending");
                return Ok(());
            }
        };
        let usable = StateDir::if_usable(opened).context("--state-dir")?;
        config.shim.checkpoints = usable.map(|dir| Arc::new(dir) as Arc<dyn CheckpointStore>);
    }
    let listener = listen::bind(config.listen).await?;
    let port = listener.local_addr().context("the address")?.port();
    let failures = IntCounter::new("tasks_failed", "Tasks that ended early")?;
    let tasks = Tasks::new(failures);
    let nats = nats::join(&config.nats, NATS_ROLE, &tasks).await?;
    let service = Service::new(config.shim, nats.plane())?;
    let handle = service.handle();
    if let Some(file) = engine_key {
        tasks.spawn("the engine's key", file.follow(tasks.stop.clone()));
    }
    let stop = tasks.stop.clone();
    tasks.spawn("shim", async move {
        if let Err(error) = service.run(stop).await {
            tracing::error!(%error, "the shim failed");
        }
    });
    announce(format_args!("{{\"port\":{port}}}"));
    host::run(listener, http::router(handle, Some(nats)), signals, tasks).await
}

fn engine_key(
    path: Option<PathBuf>,
) -> anyhow::Result<Option<FollowedFile<EngineKey, EngineKeyError>>> {
    let load = |path: PathBuf| {
        let file = FollowedFile::load("--engine-key-file", path.clone(), EngineKey::read);
        file.with_context(|| format!("--engine-key-file {}", path.display()))
    };
    path.map(load).transpose()
}
