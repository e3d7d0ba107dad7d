//! What the process was asked to be: flags and environment in, one validated [`Config`] out.
//!
//! `TryFrom<Args>` checks everything once; afterwards nobody sees a string of the operator's or
//! reads the environment. What cannot work refuses to start and says why.

mod args;
mod worker;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use warmroute_process::args::{LogFilterError, NatsArgs};
use warmroute_process::listen::{HostError, address};
use warmroute_process::logs::Logs;
use warmroute_proto::{BlockSize, Namespace, WorkerId};

use crate::route::Knobs;
use crate::route::args::ChoiceArgsError;

pub use args::{Args, Command};
pub use worker::{SpecError, WorkerSpec};

/// A valid configuration.
#[derive(Clone, Debug)]
pub struct Config {
    pub public: SocketAddr,
    pub admin: SocketAddr,
    pub namespace: Namespace,
    /// None: embedded.
    pub nats: Option<NatsArgs>,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub body_bytes: usize,
    pub buffered_bytes: usize,
    pub connections: usize,
    pub connect_timeout: Duration,
    pub drain_timeout: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error(
        "--worker and --nats-url exclude each other: with NATS each worker's shim registers it"
    )]
    WorkersTwice,
    #[error("--init, --nats-creds and --nats-tls say nothing without --nats-url")]
    NoNats,
    #[error(transparent)]
    Host(#[from] HostError),
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
    #[error(transparent)]
    Choice(#[from] ChoiceArgsError),
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
    #[error(transparent)]
    LogFilter(#[from] LogFilterError),
}

/// Hybrid models have blocks of a few thousand tokens; beyond this it is a typing error.
const BLOCK_TOKENS_MAX: u32 = 65_536;

impl TryFrom<Args> for Config {
    type Error = ConfigError;

    fn try_from(args: Args) -> Result<Self, ConfigError> {
        // Another command than serving has been told by then.
        let Args {
            command: _,
            listen,
            fleet,
            nats,
            choice,
            limits,
            logs,
        } = args;
        let public = address("host", &listen.host, listen.port)?;
        let admin = address("admin-host", &listen.admin_host, listen.admin_port)?;
        if clash(public, admin) {
            return Err(ConfigError::PortClash(public.port()));
        }
        let namespace = nats.namespace().ok_or(ConfigError::EmptyNamespace)?;
        let workers: Vec<WorkerSpec> = fleet.workers.into_iter().flat_map(|list| list.0).collect();
        distinct(&workers)?;
        let says_nats = nats.init || nats.nats_creds.is_some() || nats.nats_tls.is_some();
        let nats = match (nats.nats_url.is_some(), says_nats) {
            (true, _) if !workers.is_empty() => return Err(ConfigError::WorkersTwice),
            (true, _) => Some(nats),
            (false, true) => return Err(ConfigError::NoNats),
            (false, false) => None,
        };
        if let Some(path) = fleet.tokenizer.as_ref().filter(|path| !path.exists()) {
            return Err(ConfigError::Tokenizer(path.clone()));
        }
        Ok(Self {
            public,
            admin,
            namespace,
            nats,
            workers,
            tokenizer: fleet.tokenizer,
            block_size: fleet.block_size.map(block_size).transpose()?,
            knobs: choice.try_into()?,
            limits: Limits::try_from(limits)?,
            health_interval: millis("health-interval-ms", fleet.health_interval_ms, 10, 60_000)?,
            logs: Logs::try_from(logs)?,
        })
    }
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
