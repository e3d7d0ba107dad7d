//! `warmroute-indexer`: flags in, exit code out.

use std::io::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{CommandFactory as _, FromArgMatches as _};
use prometheus::IntCounter;
use tokio::time::Instant;
use uuid::Uuid;
use warmroute_indexer::args::{
    Command, CredentialsArgs, CredentialsStep, DoctorArgs, IndexerArgs, InitArgs, ProcessConfig,
};
use warmroute_indexer::doctor::collect::PlaneReader;
use warmroute_indexer::doctor::{Report, diagnose, refused_clients, unreachable};
use warmroute_indexer::http::{self, ApiKeys};
use warmroute_indexer::{Replica, Service, SnapshotConfig, unix_ns};
use warmroute_plane::{
    InitConfig, NamespaceSetup, NatsBus, NatsConfig, NatsError, NatsPlane, Plane, PlaneLog,
};
use warmroute_process::access::{BindScope, PortAccess};
use warmroute_process::args::{NatsArgs, given};
use warmroute_process::nats::NatsRole;
use warmroute_process::signals::Signals;
use warmroute_process::tasks::Tasks;
use warmroute_process::tls::EngineTls;
use warmroute_process::{
    announce, build, completions, env, failed, host, listen, logs, nats, print,
};

const NATS_ROLE: NatsRole = NatsRole {
    name: "warmroute-indexer",
    without: "this indexer answers no router and is not ready; requests are routed by load",
};

fn main() -> ExitCode {
    let matches = IndexerArgs::command().get_matches();
    let args = IndexerArgs::from_arg_matches(&matches);
    let command = args.as_ref().ok().and_then(|args| args.command.as_ref());
    let code = command.map_or_else(|| failed(1), Command::failed);
    warmroute_process::main_or(ExitCode::from(code), || {
        match completions::printed(&matches, IndexerArgs::command())? {
            true => Ok(ExitCode::SUCCESS),
            false => start(args?),
        }
    })
}

fn start(args: IndexerArgs) -> anyhow::Result<ExitCode> {
    env::check(&IndexerArgs::command())?;
    let (command, is_check) = (args.command.clone(), args.check);
    if let Some(Command::Credentials(CredentialsArgs { step })) = &command {
        return credentials(step, &args.nats);
    }
    let config = ProcessConfig::try_from(args)?;
    logs::install(&config.logs)?;
    if is_check {
        nats::check(&config.nats)?;
        ApiKeys::load(config.api_key_file).context("reading --api-key-file")?;
        print(format_args!("valid: flags, keys and credentials"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("starting the runtime")?;
    match command {
        Some(Command::Init(sizes)) => runtime.block_on(init(config, sizes)),
        Some(Command::Doctor(how)) => runtime.block_on(doctor(config, how)),
        // The former returned above.
        Some(Command::Credentials(_)) | None => runtime.block_on(run(config)),
    }
}

/// Needs no server.
fn credentials(step: &CredentialsStep, nats: &NatsArgs) -> anyhow::Result<ExitCode> {
    let unix_secs = Duration::from_nanos(unix_ns()).as_secs();
    let printed = warmroute_indexer::credentials::run(step, &nats.namespace, unix_secs)?;
    print(format_args!("{printed}"))?;
    Ok(ExitCode::SUCCESS)
}

/// Prints what is missing or different, then creates what is missing.
async fn init(config: ProcessConfig, sizes: InitArgs) -> anyhow::Result<ExitCode> {
    let log = nats::log(&config.nats)?;
    let nats = nats::config(&config.nats, "warmroute-init")?;
    let namespace = &config.nats.namespace;
    if log == PlaneLog::None {
        print(format_args!(
            "now: namespace {namespace} needs no set-up without a log"
        ))?;
        return Ok(ExitCode::SUCCESS);
    }
    let wait = Duration::from_secs(sizes.wait_secs);
    let started = Instant::now();
    let before = nats::retry_unreachable(wait, async || NatsPlane::connect(nats.clone()).await);
    match before.await {
        Err(NatsError::Mismatch(differences)) => {
            for difference in differences {
                print(format_args!("before: {difference}"))?;
            }
        }
        // Without read permission the creation below fails, too.
        Ok(_) | Err(NatsError::Refused(_)) => {}
        Err(error @ (NatsError::Invalid(_) | NatsError::Unreachable(_))) => {
            return Err(error.into());
        }
    }
    // A cluster may have no leader for a while: a retry verifies what exists already.
    let left = wait.saturating_sub(started.elapsed());
    let sizes = InitConfig::from(sizes);
    nats::retry_unreachable(left, async || NatsPlane::init(nats.clone(), sizes).await).await?;
    print(format_args!("now: namespace {namespace} is set up"))?;
    Ok(ExitCode::SUCCESS)
}

/// Diagnoses a plane that may be in any state.
async fn doctor(config: ProcessConfig, how: DoctorArgs) -> anyhow::Result<ExitCode> {
    let nats = nats::config(&config.nats, "warmroute-doctor")?;
    let wait = Duration::from_secs(how.wait_secs);
    let log = nats::log(&config.nats)?;
    let namespace = &config.indexer.namespace;
    let progress: fn(&str) = if how.json { |_| {} } else { show_progress };
    progress("connecting");
    let inspect = async || inspect(nats.clone(), log).await;
    let (plane, bus, setup) = match nats::retry_unreachable(wait, inspect).await {
        Ok(inspected) => inspected,
        Err(NatsError::Unreachable(why)) => {
            let report = unreachable(namespace.as_str(), &why);
            show(&report, how.json)?;
            return Ok(ExitCode::from(2));
        }
        Err(error) => return Err(error.into()),
    };
    let look = PlaneReader::new(plane, namespace, progress);
    let mut state = look.read(setup).await;
    if how.probe {
        progress("probing the engines");
        let tls = EngineTls::of_file(how.engine_ca.as_deref()).context("--engine-ca")?;
        state.probes = Some(look.probe(&state, &tls).await.context("probing engines")?);
    }
    if let Some(urls) = &how.nats_monitor {
        state.monitors = Some(refused_clients(urls).await);
    }
    state.complaint = bus.last_server_error();
    state.expected = how.expected();
    let report = diagnose(&state);
    show(&report, how.json)?;
    Ok(ExitCode::from(u8::from(report.needs_action())))
}

fn show(report: &Report, json: bool) -> anyhow::Result<()> {
    match json {
        true => print(format_args!("{}", report.json())),
        false => print(format_args!("{report}")),
    }
}

/// Beside the report, which goes to stdout.
fn show_progress(step: &str) {
    // If stderr is closed, there is no reader.
    drop(writeln!(std::io::stderr(), "{step} …"));
}

/// Connects without a check of the set-up.
async fn inspect(
    config: NatsConfig,
    log: PlaneLog,
) -> Result<(Arc<dyn Plane>, NatsBus, NamespaceSetup), NatsError> {
    match log {
        PlaneLog::JetStream => {
            let (plane, setup) = NatsPlane::inspect(config, unix_ns).await?;
            let bus = plane.bus();
            Ok((Arc::new(plane), bus, setup))
        }
        PlaneLog::None => {
            let namespace = config.namespace.clone();
            let bus = NatsBus::connect_to_any(config).await?;
            let setup = bus.setup();
            let plane = nats::core_plane(bus.clone(), namespace).await;
            Ok((Arc::new(plane), bus, setup))
        }
    }
}

async fn run(config: ProcessConfig) -> anyhow::Result<ExitCode> {
    let signals = Signals::listen().context("listening for signals")?;
    let flags = given(&IndexerArgs::command());
    tracing::info!(version = build::version(), "starting: {flags}");
    let keys = ApiKeys::load(config.api_key_file).context("reading --api-key-file")?;
    let listener = listen::bind(config.listen).await?;
    let address = listener.local_addr().context("the address")?;
    let access = PortAccess::new(BindScope::of(address), {
        let keys = keys.clone();
        move || keys.keys()
    });
    access.warn_if_closed("http", "--api-key-file");
    let failures = IntCounter::new("tasks_failed", "Tasks that ended early")?;
    let tasks = Tasks::new(failures);
    let nats = nats::join(&config.nats, NATS_ROLE, &tasks).await?;
    // Begins with what operators look for, and is never reused.
    let id = format!(
        "{}-{:012x}",
        build::host(),
        Uuid::new_v4().as_u64_pair().0 >> 16
    );
    let snapshots = match nats.log() {
        PlaneLog::JetStream => Some(SnapshotConfig {
            writer: id.clone(),
            schedule: config.snapshots,
        }),
        PlaneLog::None => None,
    };
    let mut service = Service::new(config.indexer, nats.plane())
        .context("setting up the metrics")?
        .with_refusals({
            let nats = nats.clone();
            move || nats.refused_permissions()
        })
        .with_metrics(move || nats.metrics_text())
        .registered_as(Replica {
            id,
            url: reached_at(address),
        });
    if let Some(snapshots) = snapshots {
        service = service.with_snapshots(snapshots);
    }
    let handle = service.handle();
    tasks.spawn("api-key", keys.follow(tasks.stop.clone()));
    let stop = tasks.stop.clone();
    tasks.spawn("indexer", async move {
        if let Err(error) = service.run(stop).await {
            tracing::error!(%error, "the indexer failed");
        }
    });
    announce(format_args!("{{\"port\":{}}}", address.port()));
    host::run(
        listener,
        http::routes(&handle).guarded(&access),
        signals,
        tasks,
    )
    .await?;
    Ok(ExitCode::SUCCESS)
}

/// URL of the listening address; `None` if it is unspecified.
fn reached_at(address: SocketAddr) -> Option<String> {
    (!address.ip().is_unspecified()).then(|| format!("http://{address}"))
}
