//! What a process says about its NATS: where, who, which namespace. Nothing here opens a socket.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use warmroute_proto::Namespace;
use warmroute_proto::subject::encode_name;

/// How to reach the plane of one namespace.
#[derive(Clone, Debug)]
pub struct NatsConfig {
    /// One server or several, separated by commas: `nats://host:4222` or `tls://host:4222`.
    pub url: String,
    pub namespace: Namespace,
    /// Shown by the server's monitoring.
    pub name: String,
    pub auth: NatsAuth,
    pub tls: NatsTls,
    /// Answers come in under `<inbox>.>`, the one subject space that a user's permissions have to open
    /// for subscribing beside what it listens to.
    pub inbox: String,
    /// Messages that wait for one subscription; beyond, the newest are dropped and counted.
    pub queue_max: usize,
}

impl NatsConfig {
    /// No credentials, an inbox named after the process.
    #[must_use]
    pub fn new(url: impl Into<String>, namespace: Namespace, name: impl Into<String>) -> Self {
        let name = name.into();
        Self {
            url: url.into(),
            namespace,
            inbox: format!("_INBOX.{}", encode_name(&name)),
            name,
            auth: NatsAuth::None,
            tls: NatsTls::default(),
            queue_max: 8192,
        }
    }
}

/// Who we are to the server.
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

/// Secrets stay out of logs.
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
    /// Without it TLS is used where the URL or the server asks for it.
    pub required: bool,
    /// Instead of the system's certificate authorities.
    pub authority: Option<PathBuf>,
    /// Our certificate and its key, where the server wants to see one.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// Sizes that `init` gives to what it creates.
#[derive(Clone, Copy, Debug)]
pub struct InitConfig {
    /// Copies of every stream: 1 on one node, 3 in a cluster.
    pub replicas: usize,
    /// The log's bytes on each node; beyond, the oldest records go. One of less than four times what all
    /// sources' images take could lose an image before its readers have it: of a fleet at work one can tell.
    pub max_bytes: u64,
    /// Records older than this go.
    pub max_age: Duration,
    /// All snapshots together, on each node. When it is full no new one is taken.
    pub snapshots_max_bytes: u64,
    /// Snapshots older than this go, and with them what a writer left behind when it died. An indexer
    /// has to write a new one sooner than that.
    pub snapshots_max_age: Duration,
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
        }
    }
}

/// Why there is no plane.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NatsError {
    /// Can never work: fix the flags.
    #[error("cannot work: {0}")]
    Invalid(String),
    /// Nobody answers there yet: try again.
    #[error("no server within reach: {0}")]
    Unreachable(String),
    /// The server does not let us in, or not to what we need.
    #[error("refused by the server: {0}")]
    Refused(String),
    /// What is there is not what we need. Only `init` creates it, and nothing repairs it silently.
    #[error("the server is not set up for this namespace: {}", join(.0))]
    Mismatch(Vec<SetupDifference>),
}

/// One thing that is not as it must be.
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
