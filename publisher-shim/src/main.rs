//! `warmroute-shim`: flags in, exit code out.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use prometheus::IntCounter;
use tokio::time::{Duration, Instant, sleep};
use warmroute_process::signals::{Hangup, Signals};
use warmroute_process::tasks::Tasks;
use warmroute_process::{announce, env, host, listen, logs, nats};
use warmroute_proto::WorkerId;
use warmroute_shim::args::{Args, Config};
use warmroute_shim::{EngineKey, Service, StateDir, StateDirError, http};

/// Time for which a shim waits for its predecessor to release the state directory.
const STATE_DIR_WAIT: Duration = Duration::from_secs(10);

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

async fn run(mut config: Config) -> anyhow::Result<()> {
    let mut signals = Signals::listen(Hangup::Stops).context("listening for signals")?;
    if let Some(file) = &config.engine_key_file {
        let key = EngineKey::read(file);
        let key = key.with_context(|| format!("--engine-key-file {}", file.display()))?;
        config.shim.engine_key = Some(key);
    }
    if let Some(dir) = &config.state_dir {
        let opened = tokio::select! {
            opened = open_state(dir, &config.shim.worker) => opened,
            signal = signals.received() => {
                tracing::info!(signal, "ending");
                return Ok(());
            }
        };
        config.shim.checkpoints = Some(Arc::new(opened.context("--state-dir")?));
    }
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
    host::run(listener, http::router(handle, Some(nats)), signals, tasks).await
}

/// Opens the state directory. Waits for a predecessor that is ending.
async fn open_state(dir: &Path, worker: &WorkerId) -> Result<StateDir, StateDirError> {
    let deadline = Instant::now() + STATE_DIR_WAIT;
    let mut is_logged = false;
    loop {
        match StateDir::open(dir, worker) {
            Err(StateDirError::Held { dir, by }) if Instant::now() < deadline => {
                if !std::mem::replace(&mut is_logged, true) {
                    let dir = dir.display();
                    tracing::warn!(%dir, "waiting: another process{by} keeps this worker's state");
                }
                sleep(Duration::from_millis(200)).await;
            }
            opened => return opened,
        }
    }
}
