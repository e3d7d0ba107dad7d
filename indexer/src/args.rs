//! The command line: every knob with its environment name, default, unit and reason to change it.

use std::net::SocketAddr;

use clap::{Parser, Subcommand};
use warmroute_process::args::{LogArgs, LogFilterError, NatsArgs};
use warmroute_process::listen::{self, HostError};
use warmroute_process::logs::Logs;

use crate::IndexerConfig;

/// Folds the log of a fleet's KV cache events into one tree, and answers what each worker holds.
///
/// Every flag can also be given as `WARMROUTE_<FLAG>`. A flag wins over the environment.
#[derive(Clone, Debug, Parser)]
#[command(name = "warmroute-indexer", version, max_term_width = 100)]
pub struct Args {
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Address of the HTTP API.
    #[arg(long, env = "WARMROUTE_HOST", default_value = "0.0.0.0")]
    pub host: String,
    /// TCP port of the HTTP API; 0 lets the system choose.
    #[arg(
        long, env = "WARMROUTE_PORT", default_value = "8090",
        value_parser = |text: &str| listen::port(text, PORT)
    )]
    pub port: u16,
    #[command(flatten)]
    pub nats: NatsArgs,
    #[command(flatten)]
    pub logs: LogArgs,
}

#[derive(Clone, Copy, Debug, Subcommand)]
pub enum Command {
    /// Create the streams and buckets of the namespace, and verify those that are there.
    Init,
}

const PORT: u16 = 8090;

/// A valid configuration.
#[derive(Clone, Debug)]
pub struct Config {
    pub listen: SocketAddr,
    pub nats: NatsArgs,
    pub indexer: IndexerConfig,
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
        Ok(Self {
            listen: listen::address("host", &args.host, args.port)?,
            nats: args.nats,
            indexer: IndexerConfig {
                namespace,
                max_memory_bytes: None,
            },
            logs: args.logs.try_into()?,
        })
    }
}
