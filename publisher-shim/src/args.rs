//! The command line: every knob with its environment name, default, unit and reason to change it.

use std::net::{IpAddr, SocketAddr};

use clap::Parser;
use warmroute_process::args::{LogArgs, LogFilterError, NatsArgs};
use warmroute_process::listen::{self, HostError};
use warmroute_process::logs::Logs;
use warmroute_proto::WorkerId;

use crate::ShimConfig;

/// Stands beside one vLLM server, and writes what its KV cache holds to the log.
///
/// Every flag can also be given as `WARMROUTE_<FLAG>`. A flag wins over the environment.
#[derive(Clone, Debug, Parser)]
#[command(name = "warmroute-shim", version, max_term_width = 100)]
pub struct Args {
    /// The worker's name, one in the namespace. Routers and metrics call it so.
    #[arg(long, env = "WARMROUTE_WORKER_ID", value_name = "NAME")]
    pub worker_id: String,
    /// Where this shim reaches the engine's HTTP: http://HOST:PORT.
    #[arg(long, env = "WARMROUTE_WORKER_URL", value_name = "URL")]
    pub worker_url: String,
    /// Where routers reach it, if that is elsewhere. A loopback URL is advertised only if it is
    /// given here.
    #[arg(long, env = "WARMROUTE_ADVERTISE_URL", value_name = "URL")]
    pub advertise_url: Option<String>,
    /// The engine's event socket, rank 0; rank r is r ports further. Asked of the engine where it is
    /// not given.
    #[arg(long, env = "WARMROUTE_KV_ENDPOINT", value_name = "tcp://H:P")]
    pub kv_endpoint: Option<String>,
    /// The engine's replay socket, likewise. Without one lost events cannot be seen.
    #[arg(long, env = "WARMROUTE_KV_REPLAY_ENDPOINT", value_name = "tcp://H:P")]
    pub kv_replay_endpoint: Option<String>,
    /// Data-parallel ranks of the engine.
    #[arg(long, env = "WARMROUTE_RANKS", default_value_t = 1)]
    pub ranks: u32,
    /// Address of the probes, metrics and digests.
    #[arg(long, env = "WARMROUTE_HOST", default_value = "0.0.0.0")]
    pub host: String,
    /// TCP port of the same; 0 lets the system choose.
    #[arg(
        long, env = "WARMROUTE_PORT", default_value = "8091",
        value_parser = |text: &str| listen::port(text, PORT)
    )]
    pub port: u16,
    #[command(flatten)]
    pub nats: NatsArgs,
    #[command(flatten)]
    pub logs: LogArgs,
}

const PORT: u16 = 8091;

/// A valid configuration.
#[derive(Clone, Debug)]
pub struct Config {
    pub listen: SocketAddr,
    pub nats: NatsArgs,
    pub shim: ShimConfig,
    pub logs: Logs,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error(transparent)]
    Host(#[from] HostError),
    #[error("--nats-url is missing")]
    NoNats,
    #[error("--namespace is empty")]
    EmptyNamespace,
    #[error("--{flag} {url:?} is not http://HOST:PORT")]
    Url { flag: &'static str, url: String },
    #[error("{0} is this machine only: say with --advertise-url where routers reach the engine")]
    Loopback(String),
    #[error(transparent)]
    LogFilter(#[from] LogFilterError),
}

impl TryFrom<Args> for Config {
    type Error = ConfigError;

    fn try_from(args: Args) -> Result<Self, ConfigError> {
        if args.nats.nats_url.is_none() {
            return Err(ConfigError::NoNats);
        }
        let namespace = args.nats.namespace().ok_or(ConfigError::EmptyNamespace)?;
        let worker_url = url("worker-url", &args.worker_url)?;
        let advertise_url = match args.advertise_url {
            Some(advertised) => url("advertise-url", &advertised)?,
            None if is_loopback(&worker_url) => return Err(ConfigError::Loopback(worker_url)),
            None => worker_url.clone(),
        };
        Ok(Self {
            listen: listen::address("host", &args.host, args.port)?,
            nats: args.nats,
            shim: ShimConfig {
                advertise_url,
                kv_endpoint: args.kv_endpoint,
                kv_replay_endpoint: args.kv_replay_endpoint,
                ranks: args.ranks,
                ..ShimConfig::new(namespace, WorkerId::from(args.worker_id), worker_url)
            },
            logs: args.logs.try_into()?,
        })
    }
}

fn url(flag: &'static str, url: &str) -> Result<String, ConfigError> {
    let parsed = reqwest::Url::parse(url).ok();
    let is_plain = |parsed: &reqwest::Url| {
        parsed.scheme() == "http" && parsed.has_host() && parsed.username().is_empty()
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
