//! Configuration and errors of a connection to NATS. Nothing here opens a socket.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use warmroute_proto::Namespace;
use warmroute_proto::subject::encode_name;

pub(super) const INBOX: &str = "_INBOX.";

/// How to reach the plane of one namespace.
#[derive(Clone, Debug)]
pub struct NatsConfig {
    /// One server or several, separated by commas: `nats://host:4222` or `tls://host:4222`.
    pub url: String,
    pub namespace: Namespace,
    /// Name of the connection in the server's monitoring.
    pub name: String,
    pub auth: NatsAuth,
    pub tls: NatsTls,
    /// Answers arrive under `<inbox>.>`. A user needs permission to subscribe there, beside the
    /// subjects that it uses.
    pub inbox: String,
    /// Bound on the messages that wait for one subscription; further ones are dropped and counted.
    pub queue_max: usize,
    /// Between two checks of the streams and the server's limits, which an operator's tool may change.
    pub setup_check: Duration,
}

impl NatsConfig {
    /// A configuration without credentials, and with an inbox named after the process.
    #[must_use]
    pub fn new(url: impl Into<String>, namespace: Namespace, name: impl Into<String>) -> Self {
        let name = name.into();
        Self {
            url: url.into(),
            namespace,
            inbox: format!("{INBOX}{}", encode_name(&name)),
            name,
            auth: NatsAuth::None,
            tls: NatsTls::default(),
            queue_max: 8192,
            // Seldom enough for thousands of processes, which ask for three streams each.
            setup_check: Duration::from_secs(60),
        }
    }

    /// The user's name or public key, which its inbox has.
    pub(super) fn user(&self) -> &str {
        self.inbox.strip_prefix(INBOX).unwrap_or(&self.inbox)
    }
}

/// Credentials.
#[derive(Clone)]
pub enum NatsAuth {
    None,
    UserPassword {
        user: String,
        password: String,
    },
    Token(String),
    /// A seed, `SU…`.
    NkeySeed(String),
    /// The text of a credentials file: a JWT and its seed.
    Credentials(String),
}

/// Shows no secrets.
impl fmt::Debug for NatsAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::UserPassword { .. } => "user and password",
            Self::Token(_) => "token",
            Self::NkeySeed(_) => "nkey",
            Self::Credentials(_) => "credentials",
        })
    }
}

#[derive(Clone, Debug, Default)]
pub struct NatsTls {
    /// If false, TLS is used where the URL or the server requires it.
    pub required: bool,
    /// Replaces the system's certificate authorities.
    pub authority: Option<PathBuf>,
    /// Client certificate and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// Sizes of the streams that `init` creates.
#[derive(Clone, Copy, Debug)]
pub struct InitConfig {
    /// Copies of every stream: 1 on one node, 3 in a cluster.
    pub replicas: usize,
    /// The log's bytes on each node; beyond, the oldest records are dropped. A log of less than
    /// four times the images of all sources could drop an image before it is read.
    pub max_bytes: u64,
    /// Records older than this are dropped.
    pub max_age: Duration,
    /// Bytes of all snapshots on each node. A full store accepts no new one.
    pub snapshots_max_bytes: u64,
    /// Snapshots older than this are dropped, and so are the remains of writers that died. Indexers
    /// must write a new one within this time.
    pub snapshots_max_age: Duration,
    pub existing: ExistingStreams,
}

/// What `init` does with streams that exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExistingStreams {
    /// Verifies them.
    #[default]
    Keep,
    /// Raises their bounds first, where the wanted ones are higher.
    Enlarge,
}

impl Default for InitConfig {
    fn default() -> Self {
        const GIB: u64 = 1 << 30;
        const DAY: Duration = Duration::from_secs(24 * 60 * 60);
        Self {
            replicas: 1,
            max_bytes: 2 * GIB,
            max_age: DAY,
            snapshots_max_bytes: 4 * GIB,
            snapshots_max_age: 7 * DAY,
            existing: ExistingStreams::Keep,
        }
    }
}

/// Why a plane cannot be joined.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NatsError {
    /// The configuration can never work.
    #[error("invalid configuration: {0}")]
    Invalid(String),
    /// No server answers: try again.
    #[error("no server is reachable: {0}")]
    Unreachable(String),
    /// The server denies the login or a permission.
    #[error("refused by the server: {0}")]
    Refused(String),
    /// The set-up is wrong. Only `init` creates it, and nothing repairs it silently.
    #[error("the server is not set up for this namespace: {}", join(.0))]
    Mismatch(Vec<SetupDifference>),
}

/// One field of the set-up that differs from what is required.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetupDifference {
    /// The server, or a stream by its name.
    pub of: String,
    pub field: &'static str,
    pub is: String,
    pub must_be: String,
}

impl fmt::Display for SetupDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            of,
            field,
            is,
            must_be,
        } = self;
        write!(f, "{of}: {field} is {is}, must be {must_be}")
    }
}

fn join(differences: &[SetupDifference]) -> String {
    let lines: Vec<String> = differences.iter().map(ToString::to_string).collect();
    lines.join("; ")
}
