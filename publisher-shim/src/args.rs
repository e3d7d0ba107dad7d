//! The command line: each flag with its environment name, default and unit.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr as _;

use clap::builder::{NonEmptyStringValueParser, TypedValueParser as _};
use clap::{Parser, ValueEnum};
use serde::Deserialize;
use warmroute_process::args::{LogArgs, NatsArgs, NoNatsUrl};
use warmroute_process::byte_size::bytes_within;
use warmroute_process::engine_args::{block_size, is_endpoint, is_event_route, is_route_of};
use warmroute_process::{build, completions, listen};
use warmroute_proto::registry::{RANKS_MAX, WorkerRole};
use warmroute_proto::{BlockSize, WorkerId};

use crate::ShimConfig;
use crate::mirror::Assumptions;

/// Runs beside one vLLM server and writes the changes of its KV cache to the log.
///
/// Every flag can also be set as `WARMROUTE_<FLAG>`. A flag takes precedence over the environment.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "warmroute-shim",
    version = build::version(),
    max_term_width = 100,
    subcommands = [completions::command().args(NatsArgs::hidden())],
    subcommand_negates_reqs = true,
    after_help = AFTER_HELP
)]
pub struct Args {
    /// Checks flags, keys and credentials, and exits: 0 if a start would accept them, else 2. Opens
    /// no port.
    #[arg(long)]
    pub check: bool,
    /// The worker's name, unique in the namespace.
    #[arg(
        long, env = "WARMROUTE_WORKER_ID", value_name = "NAME",
        value_parser = NonEmptyStringValueParser::new().map(WorkerId::from)
    )]
    pub worker_id: WorkerId,
    /// The engine's HTTP address as seen by this shim: http://HOST:PORT or https://HOST:PORT.
    #[arg(long, env = "WARMROUTE_WORKER_URL", value_name = "URL")]
    pub worker_url: String,
    /// The engine's HTTP address as seen by routers, if it differs. Required to advertise a loopback
    /// address.
    #[arg(long, env = "WARMROUTE_ADVERTISE_URL", value_name = "URL")]
    pub advertise_url: Option<String>,
    /// File with the engine's API key (vLLM's --api-key). Without it, an engine that requires a key
    /// does not list its models and gets no requests.
    #[arg(long, env = "WARMROUTE_ENGINE_KEY_FILE", value_name = "FILE")]
    pub engine_key_file: Option<PathBuf>,
    /// File with the authorities in PEM that sign the certificate of an https:// engine, instead of
    /// the system's.
    #[arg(long, env = "WARMROUTE_ENGINE_CA", value_name = "FILE")]
    pub engine_ca: Option<PathBuf>,
    /// The event socket of rank 0; rank r is r ports higher. By default the engine reports it. For
    /// TensorRT-LLM: http://H:P/kv_cache_events.
    #[arg(long, env = "WARMROUTE_KV_ENDPOINT", value_name = "tcp://H:P")]
    pub kv_endpoint: Option<String>,
    /// The replay socket, likewise. Without one, lost events cannot be detected.
    #[arg(long, env = "WARMROUTE_KV_REPLAY_ENDPOINT", value_name = "tcp://H:P")]
    pub kv_replay_endpoint: Option<String>,
    /// Data-parallel ranks of the engine.
    #[arg(
        long, env = "WARMROUTE_RANKS", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(RANKS_MAX))
    )]
    pub ranks: u32,
    /// Which part of a request the engine serves: both, prefill or decode.
    #[arg(
        long, env = "WARMROUTE_ROLE", value_name = "ROLE", default_value = "both",
        value_parser = WorkerRole::from_str
    )]
    pub role: WorkerRole,
    /// Directory of checkpoints. Without it, a restarted shim has only the engine's replay buffer.
    #[arg(long, env = "WARMROUTE_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Accept events of this topic only, if several publishers share a socket.
    #[arg(long, env = "WARMROUTE_KV_TOPIC", value_name = "TOPIC")]
    pub kv_topic: Option<String>,
    /// Tokens per block that the engine's events must have. By default learned from them.
    #[arg(long, env = "WARMROUTE_BLOCK_SIZE", value_name = "TOKENS", value_parser = block_size)]
    pub block_size: Option<BlockSize>,
    /// Facts about the engine that its events do not show.
    #[arg(
        long,
        env = "WARMROUTE_ASSUME",
        value_enum,
        value_delimiter = ',',
        value_name = "WHAT,…"
    )]
    pub assume: Vec<Assumed>,
    /// Bytes of records of one rank that may wait for NATS. Above, one image of the cache replaces
    /// them.
    #[arg(
        long, env = "WARMROUTE_OUTBOX_BYTES", value_name = "BYTES", default_value = "64MiB",
        value_parser = |text: &str| bytes_within::<usize>(text, OUTBOX_BYTES_MIN..=u64::MAX)
    )]
    pub outbox_bytes: usize,
    #[command(flatten)]
    pub probes: ProbeArgs,
    #[command(flatten)]
    pub nats: NatsArgs,
    #[command(flatten)]
    pub logs: LogArgs,
}

const AFTER_HELP: &str = "\
Exit codes: 0 after a signal or a successful check; 1 after a failure; 2 for flags that cannot be
parsed, and a check that fails.

Example:
  warmroute-shim --worker-id worker-0 --worker-url http://10.0.0.7:8000 \\
    --nats-url nats://127.0.0.1:4222 --namespace prod --state-dir /var/lib/warmroute";

const PORT: u16 = 8091;

/// A smaller outbox overflows at each short pause of NATS.
const OUTBOX_BYTES_MIN: u64 = 1 << 20;

/// Where the probes are served.
#[derive(Clone, Debug, clap::Args)]
pub struct ProbeArgs {
    /// Address of the probes, metrics and digests.
    #[arg(long, env = "WARMROUTE_HOST", default_value = "0.0.0.0", value_parser = listen::host)]
    pub host: IpAddr,
    /// TCP port of the probes, metrics and digests; 0: the system chooses.
    #[arg(
        long, env = "WARMROUTE_PORT", default_value = "8091",
        value_parser = |text: &str| listen::port(text, PORT)
    )]
    pub port: u16,
}

/// A fact about the engine ([`Assumptions`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Assumed {
    /// No salts, multimodal items or prompt embeddings.
    NoExtraKeys,
    /// No LoRA adapters.
    NoLora,
    /// All KV groups are main attention.
    MainAttentionOnly,
    /// No EAGLE or MTP drafts, and no KV connector beside state-space layers.
    PlainLookup,
    /// Connectors publish what they remove from CPU memory and storage.
    Removals,
}

/// What these facts declare.
#[must_use]
pub fn assumptions(assumed: &[Assumed]) -> Assumptions {
    let is_assumed = |what| assumed.contains(&what);
    Assumptions {
        no_extra_keys: is_assumed(Assumed::NoExtraKeys),
        no_lora: is_assumed(Assumed::NoLora),
        main_attention_only: is_assumed(Assumed::MainAttentionOnly),
        plain_lookup: is_assumed(Assumed::PlainLookup),
        removals: is_assumed(Assumed::Removals),
    }
}

/// A valid configuration.
#[derive(Clone, Debug)]
pub struct Config {
    pub listen: SocketAddr,
    pub nats: NatsArgs,
    pub shim: ShimConfig,
    /// Opened after the logs, so that a failure is logged.
    pub state_dir: Option<PathBuf>,
    /// Read after the logs are set up, so that a failure is logged.
    pub engine_key_file: Option<PathBuf>,
    /// Likewise.
    pub engine_ca: Option<PathBuf>,
    pub logs: LogArgs,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error(transparent)]
    NoNats(#[from] NoNatsUrl),
    #[error(
        "--{flag} {endpoint:?} is not tcp://HOST:PORT or ipc://PATH; only --kv-endpoint may also be \
         http://HOST:PORT/PATH, which has no replay endpoint"
    )]
    Endpoint {
        flag: &'static str,
        endpoint: String,
    },
    #[error("--kv-endpoint {0:?} is not of the server of --worker-url, whose key it would get")]
    OtherServer(String),
    #[error("--{flag} {url:?} is not http://HOST:PORT or https://HOST:PORT")]
    Url { flag: &'static str, url: String },
    #[error("{0} is a loopback address: set --advertise-url to the address that routers use")]
    Loopback(String),
}

impl TryFrom<Args> for Config {
    type Error = ConfigError;

    fn try_from(args: Args) -> Result<Self, ConfigError> {
        args.nats.url()?;
        let worker_url = url("worker-url", &args.worker_url)?;
        let advertise_url = match args.advertise_url {
            Some(advertised) => url("advertise-url", &advertised)?,
            None if is_loopback(&worker_url) => return Err(ConfigError::Loopback(worker_url)),
            None => worker_url.clone(),
        };
        let is_route = args.kv_endpoint.as_deref().is_some_and(is_event_route);
        if let Some(route) = args.kv_endpoint.as_ref().filter(|_| is_route)
            && !is_route_of(route, &worker_url)
        {
            return Err(ConfigError::OtherServer(route.clone()));
        }
        let (kv_endpoint, kv_replay_endpoint) = match args.kv_replay_endpoint {
            None if is_route => (args.kv_endpoint, None),
            replay => (
                endpoint("kv-endpoint", args.kv_endpoint)?,
                endpoint("kv-replay-endpoint", replay)?,
            ),
        };
        Ok(Self {
            listen: SocketAddr::new(args.probes.host, args.probes.port),
            shim: ShimConfig {
                advertise_url,
                kv_endpoint,
                kv_replay_endpoint,
                ranks: args.ranks,
                role: args.role,
                topic: args.kv_topic,
                block_size: args.block_size,
                assume: assumptions(&args.assume),
                outbox_bytes_max: args.outbox_bytes,
                ..ShimConfig::new(args.nats.namespace.clone(), args.worker_id, worker_url)
            },
            nats: args.nats,
            state_dir: args.state_dir,
            engine_key_file: args.engine_key_file,
            engine_ca: args.engine_ca,
            logs: args.logs,
        })
    }
}

fn endpoint(flag: &'static str, endpoint: Option<String>) -> Result<Option<String>, ConfigError> {
    match endpoint {
        Some(endpoint) if !is_endpoint(&endpoint) => Err(ConfigError::Endpoint { flag, endpoint }),
        endpoint => Ok(endpoint),
    }
}

fn url(flag: &'static str, url: &str) -> Result<String, ConfigError> {
    let parsed = reqwest::Url::parse(url).ok();
    let is_plain = |parsed: &reqwest::Url| {
        let spoken = ["http", "https"].contains(&parsed.scheme());
        spoken && parsed.has_host() && parsed.username().is_empty()
    };
    if parsed.as_ref().is_some_and(is_plain) {
        return Ok(url.trim_end_matches('/').to_owned());
    }
    Err(ConfigError::Url {
        flag,
        url: url.to_owned(),
    })
}

fn is_loopback(url: &str) -> bool {
    let parsed = reqwest::Url::parse(url).ok();
    let host = parsed.as_ref().and_then(reqwest::Url::host_str);
    host.is_some_and(|host| {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let ip = bare.parse::<IpAddr>();
        bare == "localhost" || ip.is_ok_and(|ip| ip.is_loopback())
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use warmroute_process::env;

    use super::*;

    const NEEDED: [&str; 5] = [
        "warmroute-shim",
        "--nats-url=nats://n:4222",
        "--worker-id=w",
        "--worker-url=http://engine:8000/",
        "--host=127.0.0.1",
    ];

    fn config(more: &[&str]) -> Result<Config, String> {
        let args = NEEDED.iter().chain(more);
        let args = Args::try_parse_from(args).map_err(|error| error.to_string())?;
        Config::try_from(args).map_err(|error| error.to_string())
    }

    #[test]
    fn every_flag_is_known_to_the_environments_check() {
        env::check(&Args::command()).unwrap();
        let flags = Args::command().get_arguments().count();
        assert!(flags <= 25, "{flags}");
    }

    #[test]
    fn flags_are_converted() {
        let config = config(&[
            "--assume=no-lora,main-attention-only",
            "--block-size=16",
            "--engine-ca=/run/ca",
            "--engine-key-file=/run/key",
            "--kv-endpoint=tcp://engine:5557",
            "--kv-replay-endpoint=tcp://engine:5657",
            "--kv-topic=kv",
            "--outbox-bytes=2000000",
            "--ranks=2",
            "--role=prefill",
            "--state-dir=/var/lib/x",
        ])
        .unwrap();
        assert_eq!(config.shim.worker_url, "http://engine:8000");
        assert_eq!(config.shim.advertise_url, "http://engine:8000");
        assert_eq!(config.shim.block_size, BlockSize::new(16));
        assert!(config.shim.assume.no_lora && config.shim.assume.main_attention_only);
        assert!(!config.shim.assume.no_extra_keys);
        assert_eq!(config.shim.outbox_bytes_max, 2_000_000);
        assert_eq!(config.shim.role, WorkerRole::Prefill);
        assert_eq!(config.state_dir, Some("/var/lib/x".into()));
        assert_eq!(config.engine_key_file, Some("/run/key".into()));
        assert_eq!(config.engine_ca, Some("/run/ca".into()));
    }

    #[test]
    fn a_loopback_url_is_advertised_only_on_request() {
        for loopback in ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"] {
            let worker = format!("--worker-url={loopback}");
            let args = ["warmroute-shim", "--nats-url=n", "--worker-id=w", &worker];
            let refused = Config::try_from(Args::parse_from(args)).unwrap_err();
            assert!(matches!(refused, ConfigError::Loopback(_)), "{refused}");
            let advertise = format!("--advertise-url={loopback}");
            let given = Config::try_from(Args::parse_from(args.iter().chain([&&*advertise])));
            assert_eq!(given.unwrap().shim.advertise_url, loopback);
        }
    }

    #[test]
    fn invalid_values_are_refused_with_the_flags_name() {
        for (flag, name) in [
            ("--worker-url=ftp://h", "--worker-url"),
            ("--advertise-url=h:1", "--advertise-url"),
            ("--kv-endpoint=h:1", "--kv-endpoint"),
            ("--kv-endpoint=http://h:1", "--kv-endpoint"),
            ("--kv-endpoint=http://other:8000/events", "--worker-url"),
            ("--kv-replay-endpoint=http://h:1/x", "--kv-replay-endpoint"),
            ("--kv-replay-endpoint=tcp://*:1", "--kv-replay-endpoint"),
            ("--ranks=0", "--ranks"),
            ("--role=judge", "--role"),
            ("--block-size=0", "--block-size"),
            ("--outbox-bytes=1", "--outbox-bytes"),
            ("--assume=luck", "--assume"),
            ("--worker-id=", "--worker-id"),
            ("--namespace=", "--namespace"),
        ] {
            let mut args: Vec<&str> = NEEDED.to_vec();
            args.retain(|given| given.split('=').next() != flag.split('=').next());
            args.push(flag);
            let refused = Args::try_parse_from(args)
                .map_err(|error| error.to_string())
                .and_then(|args| Config::try_from(args).map_err(|error| error.to_string()));
            let refused = refused.map(|_| ()).unwrap_err();
            assert!(refused.contains(name), "{flag}: {refused}");
        }
    }
}
