//! `warmroute-router`: flags in, exit code out.

use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory as _, FromArgMatches as _};
use tokio::runtime::Runtime;
use warmroute_process::args::given;
use warmroute_process::{announce, build, completions, env, logs, print};
use warmroute_router::check::check;
use warmroute_router::config::{Config, KeyCommand, RouterArgs, RouterCommand, TraceCommand};
use warmroute_router::fit::fit;
use warmroute_router::run::{Addresses, run};
use warmroute_router::simulate::simulate;
use warmroute_router::{key_command, trace_files, tune_command};

/// Time for blocking calls, such as writes, to end after all tasks.
const BLOCKING_END: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    warmroute_process::main(start)
}

fn start() -> anyhow::Result<()> {
    env::check(&RouterArgs::command())?;
    let matches = RouterArgs::command().try_get_matches();
    let matches = matches.unwrap_or_else(|error| explained(error).exit());
    if completions::printed(&matches, RouterArgs::command())? {
        return Ok(());
    }
    let args = RouterArgs::from_arg_matches(&matches)?;
    if let Some(command) = &args.command {
        return run_command(command);
    }
    let is_check = args.check;
    let config = Config::try_from(args)?;
    logs::install(&config.logs)?;
    if is_check {
        return print(format_args!("{}", check(&config)?));
    }
    tracing::info!(
        version = build::version(),
        "starting: {}",
        given(&RouterArgs::command())
    );
    let requests = runtime("requests", config.threads.plane)?;
    let background = runtime("background", config.threads.background)?;
    let result = requests.block_on(run(config, background.handle(), announce_addresses));
    // A write into a full pipe never ends.
    let ended = tokio::time::Instant::now();
    background.shutdown_timeout(BLOCKING_END);
    requests.shutdown_timeout(BLOCKING_END.saturating_sub(ended.elapsed()));
    result
}

fn runtime(name: &str, threads: NonZeroUsize) -> anyhow::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .thread_name(name)
        .worker_threads(threads.get())
        .enable_all()
        .build()
        .with_context(|| format!("starting the runtime {name}"))
}

/// Adds the setting that replaces a removed flag.
fn explained(mut error: clap::Error) -> clap::Error {
    let setting = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(flag)) => env::setting_of_flag(flag),
        _ => None,
    };
    if let Some(key) = setting {
        let tip = format!("set {key} in the file of --config");
        let tips = ContextValue::StyledStrs(vec![tip.into()]);
        error.insert(ContextKind::Suggested, tips);
    }
    error
}

#[expect(
    clippy::disallowed_methods,
    reason = "virtual time needs an origin; only differences to it are used"
)]
fn run_command(command: &RouterCommand) -> anyhow::Result<()> {
    let epoch = Instant::now();
    match command {
        RouterCommand::Simulate(args) => {
            let mut args = args.clone();
            args.replay = trace_files::with_profile(&args.replay)?;
            let source = &args.replay.source;
            let trace = trace_files::load(&source.trace, &source.models)?;
            print(format_args!("{}", simulate(&args, &trace, epoch)?))?;
        }
        RouterCommand::Tune(args) => {
            print(format_args!("{}", tune_command::tune(args, epoch)?))?;
        }
        RouterCommand::Trace(TraceCommand::Convert(args)) => {
            let trace = trace_files::load(&args.from, &args.models)?;
            trace_files::write_whole(&args.to, trace.mooncake_lines())?;
        }
        RouterCommand::Trace(TraceCommand::Fit(args)) => {
            let recording = trace_files::load_recording(&args.from)?;
            let (profile, report) = fit(&recording, args, epoch)?;
            trace_files::write_whole(&args.to, profile.lines()?)?;
            print(format_args!("{report}"))?;
        }
        RouterCommand::Key(KeyCommand::New(args)) => {
            print(format_args!("{}", key_command::new_key(args)?))?;
        }
    }
    Ok(())
}

fn announce_addresses(addresses: Addresses) {
    let (port, admin_port) = (addresses.public.port(), addresses.admin.port());
    let Addresses {
        public,
        admin,
        picker,
    } = addresses;
    let picker = picker.map(tracing::field::display);
    tracing::info!(%public, %admin, picker, "listening");
    announce(format_args!(
        "{{\"port\":{port},\"admin_port\":{admin_port}}}"
    ));
}
