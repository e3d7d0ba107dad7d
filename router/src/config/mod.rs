//! What the process was asked to be: flags and environment in, one validated [`Config`] out.
//!
//! `TryFrom<Args>` checks everything once; afterwards nobody sees a string of the operator's or
//! reads the environment. What cannot work refuses to start and says why.

mod args;
mod env;
mod worker;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use warmroute_proto::{BlockSize, Namespace, Tiers, WorkerId};

use crate::route::Knobs;

pub use args::Args;
pub use env::unknown_names;
pub use worker::{SpecError, WorkerSpec};

/// A valid configuration.
#[derive(Clone, Debug)]
pub struct Config {
    pub public: SocketAddr,
    pub admin: SocketAddr,
    pub namespace: Namespace,
    pub workers: Vec<WorkerSpec>,
    pub tokenizer: Option<PathBuf>,
    /// What the operator asserts; otherwise the engines say it.
    pub block_size: Option<BlockSize>,
    pub knobs: Knobs,
    pub limits: Limits,
    pub health_interval: Duration,
    pub logs: Logs,
}

/// What bounds the process.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub body_bytes: usize,
    pub buffered_bytes: usize,
    pub connections: usize,
    pub connect_timeout: Duration,
    pub drain_timeout: Duration,
}

#[derive(Clone, Debug)]
pub struct Logs {
    pub filter: String,
    pub json: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("--nats-url: the distributed plane is not built in yet; leave it out to run embedded")]
    Distributed,
    #[error("--{flag} {value:?} is no IP address or localhost")]
    Host { flag: &'static str, value: String },
    #[error("--port and --admin-port are both {0} on the same address")]
    PortClash(u16),
    #[error("--namespace is empty")]
    EmptyNamespace,
    #[error("--worker: two workers are named {0}; give one another id=")]
    DuplicateWorker(WorkerId),
    #[error("--worker: two workers have the URL {0}")]
    DuplicateUrl(String),
    #[error("--worker: two workers have the endpoint {0}")]
    DuplicateEndpoint(String),
    #[error("--{flag} {value} is not a finite number of at least 0")]
    Negative { flag: &'static str, value: f64 },
    #[error("--{flag} {value} is not between 0 and 1")]
    Credit { flag: &'static str, value: f64 },
    #[error("--block-size {0} is not between 1 and {BLOCK_TOKENS_MAX}")]
    BlockSize(u32),
    #[error("--tokenizer {0:?} does not exist")]
    Tokenizer(PathBuf),
    #[error("--{flag} {value} is not between {min} and {max}")]
    Range {
        flag: &'static str,
        value: u64,
        min: u64,
        max: u64,
    },
    #[error("--max-buffered-bytes {buffered} is less than --max-body-bytes {body}")]
    Buffered { buffered: u64, body: u64 },
    #[error("--log {0:?} is no log filter")]
    LogFilter(String),
}

/// Hybrid models have blocks of a few thousand tokens; beyond this it is a typing error.
const BLOCK_TOKENS_MAX: u32 = 65_536;

impl TryFrom<Args> for Config {
    type Error = ConfigError;

    fn try_from(args: Args) -> Result<Self, ConfigError> {
        let Args {
            listen,
            fleet,
            choice,
            limits,
            logs,
        } = args;
        if fleet.nats_url.is_some() {
            return Err(ConfigError::Distributed);
        }
        let public = address("host", &listen.host, listen.port)?;
        let admin = address("admin-host", &listen.admin_host, listen.admin_port)?;
        if clash(public, admin) {
            return Err(ConfigError::PortClash(public.port()));
        }
        if fleet.namespace.is_empty() {
            return Err(ConfigError::EmptyNamespace);
        }
        let workers: Vec<WorkerSpec> = fleet.workers.into_iter().flat_map(|list| list.0).collect();
        distinct(&workers)?;
        if let Some(path) = fleet.tokenizer.as_ref().filter(|path| !path.exists()) {
            return Err(ConfigError::Tokenizer(path.clone()));
        }
        Ok(Self {
            public,
            admin,
            namespace: Namespace::from(fleet.namespace),
            workers,
            tokenizer: fleet.tokenizer,
            block_size: fleet.block_size.map(block_size).transpose()?,
            knobs: knobs(choice)?,
            limits: Limits::try_from(limits)?,
            health_interval: millis("health-interval-ms", fleet.health_interval_ms, 10, 60_000)?,
            logs: Logs::try_from(logs)?,
        })
    }
}

fn knobs(args: args::ChoiceArgs) -> Result<Knobs, ConfigError> {
    if args.max_active_requests == Some(0) {
        return Err(ConfigError::Range {
            flag: "max-active-requests",
            value: 0,
            min: 1,
            max: u32::MAX.into(),
        });
    }
    Ok(Knobs {
        policy: args.policy,
        overlap_score_weight: weight("overlap-score-weight", args.overlap_score_weight)?,
        temperature: weight("router-temperature", args.router_temperature)?,
        tier_weights: Tiers {
            gpu: 1.0,
            cpu: credit("cpu-overlap-credit", args.cpu_overlap_credit)?,
            disk: credit("disk-overlap-credit", args.disk_overlap_credit)?,
        },
        active_max: args.max_active_requests,
    })
}

impl TryFrom<args::LimitArgs> for Limits {
    type Error = ConfigError;

    fn try_from(args: args::LimitArgs) -> Result<Self, ConfigError> {
        let body = range("max-body-bytes", args.max_body_bytes, 1024, 4 << 30)?;
        let buffered = range("max-buffered-bytes", args.max_buffered_bytes, 1024, 1 << 40)?;
        if buffered < body {
            return Err(ConfigError::Buffered { buffered, body });
        }
        let connections = range("max-connections", args.max_connections.into(), 1, 1 << 20)?;
        let drain = range("drain-timeout-secs", args.drain_timeout_secs, 0, 86_400)?;
        Ok(Self {
            body_bytes: as_usize(body),
            buffered_bytes: as_usize(buffered),
            connections: as_usize(connections),
            connect_timeout: millis("connect-timeout-ms", args.connect_timeout_ms, 1, 60_000)?,
            drain_timeout: Duration::from_secs(drain),
        })
    }
}

impl TryFrom<args::LogArgs> for Logs {
    type Error = ConfigError;

    fn try_from(args: args::LogArgs) -> Result<Self, ConfigError> {
        match tracing_subscriber::EnvFilter::try_new(&args.log) {
            Ok(_) => Ok(Self {
                filter: args.log,
                json: args.log_json,
            }),
            Err(_) => Err(ConfigError::LogFilter(args.log)),
        }
    }
}

fn address(flag: &'static str, host: &str, port: u16) -> Result<SocketAddr, ConfigError> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let ip = match bare {
        "localhost" => Ok(IpAddr::from([127, 0, 0, 1])),
        bare => bare.parse(),
    };
    ip.map(|ip| SocketAddr::new(ip, port))
        .map_err(|_| ConfigError::Host {
            flag,
            value: host.to_owned(),
        })
}

/// Would the second socket find the first one on its port?
fn clash(one: SocketAddr, other: SocketAddr) -> bool {
    let any = |address: SocketAddr| {
        address.ip().is_unspecified() || address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED)
    };
    let same_host = one.ip() == other.ip() || any(one) || any(other);
    one.port() != 0 && one.port() == other.port() && same_host
}

/// Two shims for one source fight; two workers on one URL count its load twice.
fn distinct(workers: &[WorkerSpec]) -> Result<(), ConfigError> {
    let (mut ids, mut urls, mut endpoints) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for worker in workers {
        if !ids.insert(&worker.id) {
            return Err(ConfigError::DuplicateWorker(worker.id.clone()));
        }
        if !urls.insert(&worker.url) {
            return Err(ConfigError::DuplicateUrl(worker.url.clone()));
        }
        for endpoint in worker.kv.iter().chain(&worker.replay) {
            if !endpoints.insert(endpoint) {
                return Err(ConfigError::DuplicateEndpoint(endpoint.clone()));
            }
        }
    }
    Ok(())
}

fn block_size(tokens: u32) -> Result<BlockSize, ConfigError> {
    BlockSize::new(tokens)
        .filter(|_| tokens <= BLOCK_TOKENS_MAX)
        .ok_or(ConfigError::BlockSize(tokens))
}

fn weight(flag: &'static str, value: f64) -> Result<f64, ConfigError> {
    if value.is_finite() && value >= 0.0 {
        return Ok(value);
    }
    Err(ConfigError::Negative { flag, value })
}

fn credit(flag: &'static str, value: f64) -> Result<f64, ConfigError> {
    if (0.0..=1.0).contains(&value) {
        return Ok(value);
    }
    Err(ConfigError::Credit { flag, value })
}

const fn range(flag: &'static str, value: u64, min: u64, max: u64) -> Result<u64, ConfigError> {
    if value < min || value > max {
        return Err(ConfigError::Range {
            flag,
            value,
            min,
            max,
        });
    }
    Ok(value)
}

fn millis(flag: &'static str, value: u64, min: u64, max: u64) -> Result<Duration, ConfigError> {
    range(flag, value, min, max).map(Duration::from_millis)
}

/// Every bound above fits, even where a `usize` has 32 bits, but for values that it cannot address.
fn as_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}
