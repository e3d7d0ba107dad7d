//! The command line: each knob with its environment name, default, unit and a reason to change it.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use clap::{Args as Group, Parser, Subcommand};
use warmroute_process::args::{LogArgs, NatsArgs};
use warmroute_process::byte_size::bytes_within;
use warmroute_process::engine_args::block_size;
use warmroute_process::listen::{host, port};
use warmroute_process::{build, completions};
use warmroute_proto::BlockSize;

use super::worker::WorkerSpec;
use crate::fit::FitArgs;
use crate::route::args::ChoiceArgs;
use crate::simulate::SimulateArgs;
use crate::tune::TuneArgs;

/// An OpenAI-compatible router for vLLM servers that knows what each has cached and how busy it is.
///
/// Every flag can also be given as `WARMROUTE_<FLAG>`. A flag wins over the environment.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "warmroute-router",
    version = build::version(),
    max_term_width = 100,
    args_conflicts_with_subcommands = true,
    subcommands = [completions::command()],
    // No command connects to NATS or writes logs.
    mut_args = |flag| flag.global(false),
    after_help = AFTER_HELP
)]
pub struct RouterArgs {
    /// Without a command the router serves.
    #[command(subcommand)]
    pub command: Option<RouterCommand>,
    /// TOML file of further settings, read again on SIGHUP and when it changes.
    #[arg(long, env = "WARMROUTE_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Checks flags, settings, keys, certificates and tokenizers, and exits: 0 if a start would
    /// accept them, else 2. Opens no port.
    #[arg(long)]
    pub check: bool,
    #[command(flatten)]
    pub listen: ListenArgs,
    #[command(flatten)]
    pub fleet: FleetArgs,
    /// Without a URL all parts run inside this process.
    #[command(flatten)]
    pub nats: NatsArgs,
    #[command(flatten)]
    pub choice: ChoiceArgs,
    #[command(flatten)]
    pub limits: LimitArgs,
    #[command(flatten)]
    pub logs: LogArgs,
}

#[derive(Clone, Debug, Subcommand)]
pub enum RouterCommand {
    Simulate(Box<SimulateArgs>),
    Tune(Box<TuneArgs>),
    /// Work with traces of requests.
    #[command(subcommand)]
    Trace(TraceCommand),
    /// Work with keys.
    #[command(subcommand)]
    Key(KeyCommand),
}

#[derive(Clone, Debug, Subcommand)]
pub enum KeyCommand {
    /// Print a new key of 256 random bits, and the lines with its SHA-256 for the settings file.
    New(NewKeyArgs),
}

#[derive(Clone, Debug, Group)]
pub struct NewKeyArgs {
    /// A key for this tenant's clients. Without it, a key for operators of the admin port.
    #[arg(long, value_name = "NAME")]
    pub tenant: Option<String>,
}

#[derive(Clone, Debug, Subcommand)]
pub enum TraceCommand {
    /// Write a trace in Mooncake's form: a JSON object a line, an id for 512 tokens.
    Convert(ConvertArgs),
    /// Fit a profile of the engines to a recording, and show recorded and simulated times.
    Fit(FitArgs),
}

#[derive(Clone, Debug, Group)]
pub struct ConvertArgs {
    /// A recording's directory, one of its files, or a trace in Mooncake's form.
    #[arg(value_name = "IN")]
    pub from: PathBuf,
    /// The file to write. An existing one is replaced when the trace is complete.
    #[arg(value_name = "OUT")]
    pub to: PathBuf,
    /// Take only a recording's requests for this model. Repeatable.
    #[arg(long = "model", value_name = "NAME")]
    pub models: Vec<String>,
}

#[derive(Clone, Debug, Group)]
#[command(next_help_heading = "Listening")]
pub struct ListenArgs {
    /// Address for clients. 127.0.0.1 if only this machine may reach the router.
    #[arg(long, env = "WARMROUTE_HOST", default_value = "0.0.0.0", value_parser = host)]
    pub host: IpAddr,
    /// TCP port for clients; 0 lets the system choose.
    #[arg(
        long, env = "WARMROUTE_PORT", default_value = "8080",
        value_parser = |text: &str| port(text, PUBLIC_PORT)
    )]
    pub port: u16,
    /// Address of the admin port. It shows routing decisions: restrict access to operators.
    #[arg(long, env = "WARMROUTE_ADMIN_HOST", default_value = "127.0.0.1", value_parser = host)]
    pub admin_host: IpAddr,
    /// TCP port for metrics, workers, slots and digests; 0 lets the system choose.
    #[arg(
        long, env = "WARMROUTE_ADMIN_PORT", default_value = "29000",
        value_parser = |text: &str| port(text, ADMIN_PORT)
    )]
    pub admin_port: u16,
}

#[derive(Clone, Debug, Group)]
#[command(next_help_heading = "Fleet")]
pub struct FleetArgs {
    /// A vLLM server: URL[,kv=tcp://H:P][,replay=tcp://H:P][,id=NAME][,ranks=N][,role=ROLE]
    /// [,key_file=FILE][,assume=WHAT]. Repeatable; in the environment separated by spaces or `;`.
    /// Omitted endpoints are queried from the engine.
    #[arg(long = "worker", env = "WARMROUTE_WORKER", value_name = "SPEC")]
    pub workers: Vec<WorkerList>,
    /// Tokenizer of models that the settings name none for: a tokenizer.json, the directory that
    /// holds it and its chat template, or a Hugging Face id in the local cache. Without one,
    /// prompts in text are routed by load only.
    #[arg(long, env = "WARMROUTE_TOKENIZER", value_name = "DIR_OR_ID")]
    pub tokenizer: Option<String>,
    /// Tokens per KV block of engines that report none. Each other worker is credited in blocks of
    /// its own size, up to 4 sizes a model; one that differs from this one is logged.
    #[arg(long, env = "WARMROUTE_BLOCK_SIZE", value_name = "TOKENS", value_parser = block_size)]
    pub block_size: Option<BlockSize>,
    /// Directory for checkpoints of the workers' caches, so that a restarted router knows what its
    /// engines cached before, hits included. Without NATS only; else each shim has its own.
    #[arg(long, env = "WARMROUTE_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Milliseconds between two health probes of a worker. Shorter detects a failure sooner.
    #[arg(
        long, env = "WARMROUTE_HEALTH_INTERVAL_MS", default_value_t = 1000,
        value_parser = clap::value_parser!(u64).range(10..=60_000)
    )]
    pub health_interval_ms: u64,
}

#[derive(Clone, Debug, Group)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Largest request body in bytes; above, 413. Raise it for large images in chat messages.
    #[arg(
        long, env = "WARMROUTE_MAX_BODY_BYTES", value_name = "BYTES", default_value = "64MiB",
        value_parser = |text: &str| bytes_within::<usize>(text, 1024..=4 << 30)
    )]
    pub max_body_bytes: usize,
    /// Bytes of all request bodies and of the memory that their prompts take; above, 503. Bounds
    /// the router's memory.
    #[arg(
        long, env = "WARMROUTE_MAX_BUFFERED_BYTES", value_name = "BYTES",
        default_value = "512MiB",
        value_parser = |text: &str| bytes_within::<usize>(text, 1024..=1 << 40)
    )]
    pub max_buffered_bytes: usize,
    /// Concurrent client connections. Above, the one idle longest is closed.
    #[arg(
        long, env = "WARMROUTE_MAX_CONNECTIONS", default_value_t = 8192,
        value_parser = RangedU64ValueParser::<usize>::new().range(1..=1 << 20)
    )]
    pub max_connections: usize,
}

/// One `--worker` flag, or the whole of `WARMROUTE_WORKER`: one or more workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerList(pub Vec<WorkerSpec>);

impl std::str::FromStr for WorkerList {
    type Err = super::worker::WorkerSpecError;

    fn from_str(list: &str) -> Result<Self, Self::Err> {
        list.split([';', ' ', '\t', '\n'])
            .filter(|spec| !spec.is_empty())
            .map(str::parse)
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

const AFTER_HELP: &str = "\
Exit codes: 0 after a signal, a command or a successful check; 1 after a failure; 2 for flags that
cannot be parsed, and a check that fails.

Example:
  warmroute-router --worker http://127.0.0.1:8000 --tokenizer Qwen/Qwen3-0.6B";

const PUBLIC_PORT: u16 = 8080;
const ADMIN_PORT: u16 = 29000;
