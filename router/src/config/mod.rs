//! From flags and environment to one validated [`Config`].
//!
//! `TryFrom<RouterArgs>` validates once and converts to domain types. An impossible configuration
//! refuses to start with an error that names the flag.

mod args;
mod threads;
mod worker;
mod worker_set;

#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use warmroute_process::args::{LogArgs, NatsArgs};
use warmroute_proto::{BlockSize, Namespace};

use crate::route::Knobs;
use crate::route::args::ChoiceArgsError;
use crate::settings::{SettingsError, SettingsFile, WorkerRule};
use crate::tokenizers::{HubCache, LocateError};

pub use args::{ConvertArgs, KeyCommand, NewKeyArgs, RouterArgs, RouterCommand, TraceCommand};
pub use threads::ThreadCounts;
pub use worker::{WorkerKeyError, WorkerSpec, WorkerSpecError};
pub use worker_set::WorkerSetError;
pub(crate) use worker_set::check as check_workers;

/// A valid configuration.
#[derive(Clone, Debug)]
pub struct Config {
    pub public: SocketAddr,
    pub admin: SocketAddr,
    pub namespace: Namespace,
    /// `None`: embedded.
    pub nats: Option<NatsArgs>,
    /// Those of `--worker`.
    pub workers: Vec<WorkerSpec>,
    pub tokenizer: Option<PathBuf>,
    /// Checkpoints of the embedded shims.
    pub state_dir: Option<PathBuf>,
    /// The operator's. `None`: the engines report it.
    pub block_size: Option<BlockSize>,
    pub knobs: Knobs,
    pub limits: Limits,
    pub health_interval: Duration,
    pub threads: ThreadCounts,
    /// `--config`.
    pub settings: Option<SettingsFile>,
    pub logs: LogArgs,
}

/// Bounds of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub body_bytes: usize,
    pub buffered_bytes: usize,
    pub connections: usize,
}

#[derive(Debug, thiserror::Error)]
pub enum RouterConfigError {
    #[error(
        "--worker and --nats-url exclude each other: with NATS each worker's shim registers it"
    )]
    WorkersTwice,
    #[error("--state-dir has no effect with --nats-url: give it to each worker's shim")]
    StateDir,
    #[error("--init, --nats-creds and --nats-tls have no effect without --nats-url")]
    NoNats,
    #[error("--port and --admin-port are both {0} on the same address")]
    PortClash(u16),
    #[error("--worker: {0}")]
    Workers(#[from] WorkerSetError),
    #[error("--worker: {0}")]
    WorkerKey(#[from] WorkerKeyError),
    #[error(transparent)]
    Choice(#[from] ChoiceArgsError),
    #[error("--tokenizer: {0}")]
    Tokenizer(#[from] LocateError),
    #[error("--max-buffered-bytes {buffered} is less than --max-body-bytes {body}")]
    Buffered { buffered: usize, body: usize },
    #[error("--config {path:?}: {error}")]
    Settings {
        path: PathBuf,
        error: Box<SettingsError>,
    },
}

impl TryFrom<RouterArgs> for Config {
    type Error = RouterConfigError;

    fn try_from(args: RouterArgs) -> Result<Self, RouterConfigError> {
        let RouterArgs {
            command: _,
            check: _,
            config,
            listen,
            fleet,
            nats,
            choice,
            limits,
            logs,
        } = args;
        let public = SocketAddr::new(listen.host, listen.port);
        let admin = SocketAddr::new(listen.admin_host, listen.admin_port);
        if clash(public, admin) {
            return Err(RouterConfigError::PortClash(public.port()));
        }
        let namespace = nats.namespace.clone();
        let mut workers: Vec<WorkerSpec> =
            fleet.workers.into_iter().flat_map(|list| list.0).collect();
        for worker in &mut workers {
            worker.read_key(Path::new(""))?;
        }
        worker_set::check(&workers)?;
        let has_nats_flags = nats.init || nats.nats_creds.is_some() || nats.nats_tls.is_some();
        let nats = match (nats.nats_url.is_some(), has_nats_flags) {
            (true, _) if !workers.is_empty() => return Err(RouterConfigError::WorkersTwice),
            (true, _) if fleet.state_dir.is_some() => return Err(RouterConfigError::StateDir),
            (true, _) => Some(nats),
            (false, true) => return Err(RouterConfigError::NoNats),
            (false, false) => None,
        };
        let rule = match &nats {
            Some(_) => WorkerRule::Registered,
            None => WorkerRule::Embedded(workers.clone()),
        };
        let settings = config.map(|path| settings(path, &rule)).transpose()?;
        let mut knobs = Knobs::try_from(choice)?;
        if let Some(file) = &settings {
            knobs.prefix_load_percent = file.settings.prefix_hash_load_percent();
        }
        let find = |named: String| HubCache::from_env().find(&named);
        let tokenizer = fleet.tokenizer.map(find).transpose()?;
        Ok(Self {
            public,
            admin,
            namespace,
            nats,
            workers,
            tokenizer,
            state_dir: fleet.state_dir,
            block_size: fleet.block_size,
            knobs,
            limits: Limits::try_from(limits)?,
            health_interval: Duration::from_millis(fleet.health_interval_ms),
            threads: thread_counts(settings.as_ref()),
            settings,
            logs,
        })
    }
}

impl TryFrom<args::LimitArgs> for Limits {
    type Error = RouterConfigError;

    fn try_from(args: args::LimitArgs) -> Result<Self, RouterConfigError> {
        let (body, buffered) = (args.max_body_bytes, args.max_buffered_bytes);
        if buffered < body {
            return Err(RouterConfigError::Buffered { buffered, body });
        }
        Ok(Self {
            body_bytes: body,
            buffered_bytes: buffered,
            connections: args.max_connections,
        })
    }
}

/// Whether the second socket cannot be bound besides the first.
fn clash(one: SocketAddr, other: SocketAddr) -> bool {
    let any = one.ip().is_unspecified() || other.ip().is_unspecified();
    let same_host = one.ip() == other.ip() || any;
    one.port() != 0 && one.port() == other.port() && same_host
}

fn thread_counts(settings: Option<&SettingsFile>) -> ThreadCounts {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let request_threads = settings.and_then(|file| file.settings.request_threads());
    ThreadCounts::new(processors, request_threads)
}

fn settings(path: PathBuf, rule: &WorkerRule) -> Result<SettingsFile, RouterConfigError> {
    SettingsFile::load(&path, rule).map_err(|error| RouterConfigError::Settings {
        path,
        error: Box::new(error),
    })
}
