//! The command line.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};
use warmroute_plane::{ExistingStreams, InitConfig};
use warmroute_process::args::{LogArgs, NatsArgs, NoNatsUrl};
use warmroute_process::byte_size::bytes;
use warmroute_process::{build, completions, listen};

use crate::IndexerConfig;
use crate::doctor::Expected;
use crate::snapshot::Schedule;

/// Folds the log of a fleet's KV cache events into one tree, and answers what each worker holds.
///
/// Every flag can also be given as `WARMROUTE_<FLAG>`. A flag wins over the environment.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "warmroute-indexer",
    version = build::version(),
    max_term_width = 100,
    subcommands = [completions::command().args(NatsArgs::hidden())],
    after_help = AFTER_HELP
)]
pub struct IndexerArgs {
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Checks flags, keys and credentials, and exits: 0 if a start would accept them, else 2. Opens
    /// no port.
    #[arg(long)]
    pub check: bool,
    /// Address of the HTTP API.
    #[arg(long, env = "WARMROUTE_HOST", default_value = "0.0.0.0", value_parser = listen::host)]
    pub host: IpAddr,
    /// TCP port of the HTTP API; 0 lets the system choose.
    #[arg(
        long, env = "WARMROUTE_PORT", default_value = "8090",
        value_parser = |text: &str| listen::port(text, PORT)
    )]
    pub port: u16,
    /// File with a key of 16 to 256 characters, or sha256: and the SHA-256 of one, on each line.
    /// `/query`, `/query_by_hash`, `/workers` and `/dump` then need one of the keys as a bearer token;
    /// without it, they are served only if --host is a loopback address.
    #[arg(long, env = "WARMROUTE_API_KEY_FILE", value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Bound on the memory of the index, as 6GiB or 500MB; the process takes up to 64 MiB more.
    /// Beyond it, sources are set aside, the largest first, and answered as unknown; such a replica
    /// writes no snapshots. Without it: as much as the fleet's blocks take, about 55 bytes each
    /// with a snapshot.
    #[arg(long, env = "WARMROUTE_MAX_MEMORY", value_name = "BYTES", value_parser = bytes::<usize>)]
    pub max_memory: Option<usize>,
    /// Bytes of log after which a snapshot is written. Less makes restarts faster and writes more.
    #[arg(
        long, env = "WARMROUTE_SNAPSHOT_EVERY_BYTES", value_name = "BYTES",
        default_value = "128MiB", value_parser = bytes::<u64>
    )]
    pub snapshot_every_bytes: u64,
    /// Seconds after which a snapshot is written if there are new records; at most a day, so
    /// that the store never deletes the last one by age.
    #[arg(
        long, env = "WARMROUTE_SNAPSHOT_EVERY_SECS", value_name = "SECS", default_value_t = 600,
        value_parser = clap::value_parser!(u64).range(1..=86_400)
    )]
    pub snapshot_every_secs: u64,
    #[command(flatten)]
    pub nats: NatsArgs,
    #[command(flatten)]
    pub logs: LogArgs,
}

#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Creates the streams and buckets of the namespace, and verifies existing ones. Changes
    /// nothing that exists: if it differs, prints the differences with exit code 1.
    Init(InitArgs),
    /// Reads the whole plane, changes nothing, and prints one page: findings, worst first, each with
    /// cause, effect and what to run, and the status of the rest. Exit code 0: healthy; 1: action
    /// needed; 2: no server could be reached.
    Doctor(DoctorArgs),
    /// Keys and credentials for nats-servers in operator mode, where a signature adds a worker. Works
    /// offline.
    #[command(args = NatsArgs::hidden())]
    Credentials(CredentialsArgs),
}

impl Command {
    /// Exit code if the command fails.
    #[must_use]
    pub const fn failed(&self) -> u8 {
        match self {
            Self::Init(_) | Self::Credentials(_) => 1,
            Self::Doctor(_) => 2,
        }
    }
}

#[derive(Clone, Debug, clap::Args)]
pub struct CredentialsArgs {
    #[command(subcommand)]
    pub step: CredentialsStep,
}

/// The flags have no names in the environment, which the services read.
#[derive(Clone, Debug, Subcommand)]
pub enum CredentialsStep {
    /// Creates the keys of an operator, its accounts and each role of the namespace, and what the
    /// servers include.
    Init(OperatorArgs),
    /// Prints the credentials file of a new user.
    Sign(SignArgs),
    /// Revokes a user in what the servers include; they follow when they reload it.
    Revoke(RevokeArgs),
}

#[derive(Clone, Debug, clap::Args)]
pub struct OperatorArgs {
    /// Directory to create.
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
}

#[derive(Clone, Debug, clap::Args)]
pub struct SignArgs {
    /// File with the signing key of a role, and its account: DIR/shim.nk, for example.
    #[arg(long, value_name = "FILE")]
    pub key: PathBuf,
    /// Name of the user; of a shim, its --worker-id.
    #[arg(long, value_name = "NAME")]
    pub name: String,
    /// Seconds after which servers refuse the credentials. Without it they never expire.
    #[arg(long, value_name = "SECS", value_parser = clap::value_parser!(u64).range(1..))]
    pub valid_secs: Option<u64>,
}

#[derive(Clone, Debug, clap::Args)]
pub struct RevokeArgs {
    /// Directory of `credentials init`.
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
    /// Public key of the user, U…, as its credentials file and its processes' warnings have it.
    #[arg(long, value_name = "KEY")]
    pub user: String,
}

#[derive(Clone, Debug, clap::Args)]
pub struct DoctorArgs {
    /// One JSON object instead of a page.
    #[arg(long, env = "WARMROUTE_JSON")]
    pub json: bool,
    /// Expected number of indexers; fewer are a finding. Without it, an indexer that is gone for 6
    /// s leaves no trace.
    #[arg(long, env = "WARMROUTE_EXPECT_INDEXERS", value_name = "N")]
    pub expect_indexers: Option<usize>,
    /// Expected number of routers; fewer are a finding.
    #[arg(long, env = "WARMROUTE_EXPECT_ROUTERS", value_name = "N")]
    pub expect_routers: Option<usize>,
    /// Expected number of workers; fewer are a finding.
    #[arg(long, env = "WARMROUTE_EXPECT_WORKERS", value_name = "N")]
    pub expect_workers: Option<usize>,
    /// Sends each rank of each exact source two requests of four blocks and a token with max_tokens
    /// 1, for each indexer, and compares the engine's cached tokens with the index's credit.
    #[arg(long, env = "WARMROUTE_PROBE")]
    pub probe: bool,
    /// With --probe: file with the authorities in PEM of https:// engines, instead of the system's.
    #[arg(long, env = "WARMROUTE_ENGINE_CA", value_name = "FILE")]
    pub engine_ca: Option<PathBuf>,
    /// URLs of the NATS servers' monitoring ports, separated by commas, such as
    /// http://127.0.0.1:8222: finds processes whose credentials are refused, which leave no other
    /// trace.
    #[arg(long, env = "WARMROUTE_NATS_MONITOR", value_name = "URLS")]
    pub nats_monitor: Option<String>,
    /// Seconds to wait for an unreachable NATS server.
    #[arg(
        long, env = "WARMROUTE_WAIT_SECS", value_name = "SECS", default_value_t = 5,
        value_parser = clap::value_parser!(u64).range(..=3600)
    )]
    pub wait_secs: u64,
}

impl DoctorArgs {
    #[must_use]
    pub const fn expected(&self) -> Expected {
        Expected {
            indexers: self.expect_indexers,
            routers: self.expect_routers,
            workers: self.expect_workers,
        }
    }
}

/// Sizes of what `init` creates, and how long it tries.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct InitArgs {
    /// Replicas of every stream: 1 on one NATS node, 3 in a cluster.
    #[arg(long, env = "WARMROUTE_REPLICAS", default_value_t = 1)]
    pub replicas: usize,
    /// Bytes of the log on each node; beyond, the oldest records are dropped. At least four times
    /// all workers' blocks at 16 bytes each. Snapshots get twice as much. The server reserves both.
    #[arg(
        long, env = "WARMROUTE_MAX_BYTES", value_name = "BYTES", default_value = "2GiB",
        value_parser = bytes::<u64>
    )]
    pub max_bytes: u64,
    /// Seconds after which the log drops records.
    #[arg(
        long, env = "WARMROUTE_MAX_AGE_SECS", value_name = "SECS", default_value_t = 86_400,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub max_age_secs: u64,
    /// Raise the bounds of streams that exist, where these ones are higher. Without it they are only
    /// verified. Needs the permission STREAM.UPDATE.
    #[arg(long, env = "WARMROUTE_RESIZE")]
    pub resize: bool,
    /// Seconds to wait for an unreachable NATS server.
    #[arg(
        long, env = "WARMROUTE_WAIT_SECS", value_name = "SECS", default_value_t = 30,
        value_parser = clap::value_parser!(u64).range(..=3600)
    )]
    pub wait_secs: u64,
}

/// Snapshots grow with what the log's bound grows with, the workers' blocks.
const SNAPSHOTS_BYTES_MIN: u64 = 64 << 20;

impl From<InitArgs> for InitConfig {
    fn from(init: InitArgs) -> Self {
        Self {
            replicas: init.replicas,
            max_bytes: init.max_bytes,
            max_age: Duration::from_secs(init.max_age_secs),
            snapshots_max_bytes: init.max_bytes.saturating_mul(2).max(SNAPSHOTS_BYTES_MIN),
            existing: match init.resize {
                true => ExistingStreams::Enlarge,
                false => ExistingStreams::Keep,
            },
            ..Self::default()
        }
    }
}

const AFTER_HELP: &str = "\
Exit codes: 0 after a signal, a command or a successful check; 1 after a failure, and for a doctor
that finds what needs action; 2 for flags that cannot be parsed, a check that fails, and a doctor
that reaches no server.

Example:
  warmroute-indexer --nats-url nats://127.0.0.1:4222 --namespace prod";

const PORT: u16 = 8090;

/// A valid configuration.
#[derive(Clone, Debug)]
pub struct ProcessConfig {
    pub listen: SocketAddr,
    pub api_key_file: Option<PathBuf>,
    pub nats: NatsArgs,
    pub indexer: IndexerConfig,
    pub snapshots: Schedule,
    pub logs: LogArgs,
}

impl TryFrom<IndexerArgs> for ProcessConfig {
    type Error = NoNatsUrl;

    fn try_from(args: IndexerArgs) -> Result<Self, NoNatsUrl> {
        args.nats.url()?;
        Ok(Self {
            listen: SocketAddr::new(args.host, args.port),
            api_key_file: args.api_key_file,
            indexer: IndexerConfig {
                namespace: args.nats.namespace.clone(),
                max_memory_bytes: args.max_memory,
            },
            nats: args.nats,
            snapshots: Schedule {
                bytes: args.snapshot_every_bytes,
                every: Duration::from_secs(args.snapshot_every_secs),
            },
            logs: args.logs,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(flags: &[&str]) -> Result<ProcessConfig, NoNatsUrl> {
        let program = ["warmroute-indexer"].iter().chain(flags);
        IndexerArgs::parse_from(program).try_into()
    }

    #[test]
    fn flags_become_a_configuration() {
        let all = [
            "--nats-url",
            "nats://n:4222",
            "--max-memory",
            "1GB",
            "--host",
            "[::1]",
        ];
        let config = config(&all).unwrap();
        assert_eq!(config.indexer.max_memory_bytes, Some(1_000_000_000));
        assert_eq!(config.listen.to_string(), "[::1]:8090");
        assert_eq!(config.snapshots.bytes, 128 << 20);
        assert_eq!(config.snapshots.every, Duration::from_secs(600));
    }

    #[test]
    fn what_cannot_work_is_refused() {
        assert!(matches!(config(&[]), Err(NoNatsUrl)));
        for flag in ["--namespace=", "--snapshot-every-secs=86401", "--host=h"] {
            assert!(
                IndexerArgs::try_parse_from(["warmroute-indexer", flag]).is_err(),
                "{flag}"
            );
        }
    }

    #[test]
    fn init_has_the_sizes_that_were_asked_for() {
        let flags = [
            "warmroute-indexer",
            "init",
            "--replicas",
            "3",
            "--max-bytes",
            "1GiB",
        ];
        let Some(Command::Init(init)) = IndexerArgs::parse_from(flags).command else {
            panic!("init");
        };
        let config = InitConfig::from(init);
        assert_eq!((config.replicas, config.max_bytes), (3, 1 << 30));
        assert_eq!(config.snapshots_max_bytes, 2 << 30);
        assert_eq!(config.max_age, Duration::from_secs(86_400));
    }
}
