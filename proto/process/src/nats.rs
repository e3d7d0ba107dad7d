//! Connects to the plane on NATS, as the flags configure it.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use nkeys::KeyPair;
use tokio::time::{Instant, sleep};
use uuid::Uuid;
use warmroute_plane::{
    Connection, CorePlane, CorePlaneConfig, InitConfig, NatsAuth, NatsBus, NatsConfig, NatsError,
    NatsPlane, NatsStats, NatsTls, Plane, PlaneLog,
};
use warmroute_proto::Namespace;

use crate::args::{NatsArgs, TlsSpec, redacted};
use crate::joining::{Joined, JoiningPlane};
use crate::metrics::MetricsText;
use crate::tasks::Tasks;

/// Delay before an unreachable server is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// Time for reading the registry of a plane without a log server, after which a process goes on.
const JOIN_MAX: Duration = Duration::from_secs(5);

/// A plane whose server may not be reached yet.
#[derive(Clone)]
pub struct Nats {
    joining: Arc<JoiningPlane>,
    log: PlaneLog,
}

impl Nats {
    /// The plane. Unavailable until the server is reached for the first time.
    #[must_use]
    pub fn plane(&self) -> Arc<dyn Plane> {
        Arc::clone(&self.joining) as Arc<dyn Plane>
    }

    /// The connection's metrics in Prometheus's text format, with equal names in every binary.
    #[must_use]
    pub fn metrics_text(&self) -> String {
        let connection = *self.joining.connection().borrow();
        let stats = self.joining.bus().map(NatsBus::stats);
        metrics_text(connection, &stats.unwrap_or_default())
    }

    /// See [`NatsBus::refused_permissions`].
    #[must_use]
    pub fn refused_permissions(&self) -> Vec<String> {
        let bus = self.joining.bus();
        bus.map_or_else(Vec::new, NatsBus::refused_permissions)
    }

    /// See [`NatsBus::last_server_error`].
    #[must_use]
    pub fn last_server_error(&self) -> Option<String> {
        self.joining.bus().and_then(NatsBus::last_server_error)
    }

    /// Where the log is.
    #[must_use]
    pub const fn log(&self) -> PlaneLog {
        self.log
    }
}

fn metrics_text(connection: Connection, stats: &NatsStats) -> String {
    let mut text = MetricsText::new("warmroute_nats_");
    let up = u64::from(connection == Connection::Up);
    text.gauge("up", "The server is reachable.", up);
    for (name, help, value) in counters(stats) {
        text.counter(name, help, value);
    }
    text.into_string()
}

/// Name, help and value of each counter. The lag of a tail is reported by its reader.
#[rustfmt::skip]
const fn counters(stats: &NatsStats) -> [(&'static str, &'static str, u64); 17] {
    [
        ("connects_total", "Connections made.", stats.connects),
        ("disconnects_total", "Connections lost.", stats.disconnects),
        ("slow_consumers_total", "Messages that a full queue dropped.", stats.slow_consumers),
        ("lame_ducks_total", "Servers that announced their end.", stats.lame_ducks),
        ("closed_total", "Times the client gave up.", stats.closed),
        ("server_errors_total", "Errors of the server; the log has them.", stats.server_errors),
        ("client_errors_total", "Errors of the client.", stats.client_errors),
        ("answers_late_total", "Answers that timed out.", stats.answers_late),
        ("forced_reconnects_total", "Reconnects for lost subscriptions.", stats.forced_reconnects),
        ("answers_cut_off_total", "Answers cut off by a disconnect.", stats.answers_cut_off),
        ("tails_reopened_total", "Log consumers, the first ones too.", stats.tails_reopened),
        ("watches_reopened_total", "Registry consumers, as above.", stats.watches_reopened),
        ("snapshots_torn_total", "Reads of torn or damaged snapshots.", stats.snapshots_torn),
        ("in_messages_total", "Messages received.", stats.in_messages),
        ("out_messages_total", "Messages sent.", stats.out_messages),
        ("in_bytes_total", "Bytes received.", stats.in_bytes),
        ("out_bytes_total", "Bytes sent.", stats.out_bytes),
    ]
}

/// Joins the plane. If no server is reachable, a task keeps trying, and the process starts anyway.
/// A server that is not set up, or denies access, is an error; found later, it ends the task and
/// with it the process, so that the reason is at the end of the log.
pub async fn join(args: &NatsArgs, role: NatsRole, tasks: &Tasks) -> anyhow::Result<Nats> {
    let server = Server {
        config: config(args, role.name)?,
        role,
        log: log(args)?,
        init: args.init,
    };
    let joining = Arc::new(JoiningPlane::new());
    let nats = Nats {
        joining: Arc::clone(&joining),
        log: server.log,
    };
    match server.connect().await {
        Ok(joined) => joining.reached(joined),
        Err(NatsError::Unreachable(why)) => {
            tracing::warn!(
                url = redacted(&server.config.url),
                why,
                consequence = role.without,
                "no NATS server is reachable yet, trying again"
            );
        }
        Err(error) => return Err(error).with_context(|| redacted(&server.config.url)),
    }
    let stop = tasks.stop.clone();
    tasks.spawn("nats", async move {
        tokio::select! {
            () = stop.cancelled() => {}
            error = server.keep_joined(&joining) => {
                tracing::error!(%error, "plane cannot be joined");
            }
        }
    });
    Ok(nats)
}

/// A process on NATS.
#[derive(Clone, Copy, Debug)]
pub struct NatsRole {
    /// Part of the connection's name.
    pub name: &'static str,
    /// What the process does without a server, for the log.
    pub without: &'static str,
}

/// How the plane is joined.
struct Server {
    role: NatsRole,
    config: NatsConfig,
    log: PlaneLog,
    init: bool,
}

impl NatsRole {
    /// Logs a change, once: other parts of the process do not.
    fn report(self, connection: Connection) {
        match connection {
            Connection::Down => {
                tracing::warn!(consequence = self.without, "NATS is out of reach");
            }
            Connection::Up => tracing::info!("NATS is in reach again"),
        }
    }
}

impl Server {
    /// Joins the plane, then forwards its connection's state. Returns the error that ends it.
    async fn keep_joined(&self, joining: &JoiningPlane) -> NatsError {
        while joining.bus().is_none() {
            match self.connect().await {
                Ok(joined) => joining.reached(joined),
                Err(NatsError::Unreachable(why)) => {
                    tracing::debug!(why, "no NATS server is reachable yet");
                    sleep(RETRY).await;
                }
                Err(error) => return error,
            }
        }
        let log = match self.log {
            PlaneLog::JetStream => "jetstream",
            PlaneLog::None => "none",
        };
        tracing::info!(url = redacted(&self.config.url), log, "plane joined");
        let report = |connection| self.role.report(connection);
        joining.forward_connection(report).await;
        NatsError::Unreachable("the client gave up".to_owned())
    }

    async fn connect(&self) -> Result<Joined, NatsError> {
        let config = self.config.clone();
        match self.log {
            PlaneLog::JetStream => {
                let plane = match NatsPlane::connect(config.clone()).await {
                    Err(NatsError::Mismatch(_)) if self.init => {
                        NatsPlane::init(config, InitConfig::default()).await?
                    }
                    connected => connected?,
                };
                let bus = plane.bus();
                let plane = Box::new(plane);
                Ok(Joined { plane, bus })
            }
            PlaneLog::None => {
                let bus = NatsBus::connect(config.clone()).await?;
                let plane = core_plane(bus.clone(), config.namespace).await;
                let plane = Box::new(plane);
                Ok(Joined { plane, bus })
            }
        }
    }
}

/// A plane without a log server. It may still have to join the other processes.
pub async fn core_plane(bus: NatsBus, namespace: Namespace) -> CorePlane<NatsBus> {
    let config = CorePlaneConfig {
        namespace,
        id: Uuid::new_v4().as_u64_pair().0,
        unix_ns: unix_ns(),
        log_bytes_max: CorePlaneConfig::LOG_BYTES_MAX,
    };
    let plane = CorePlane::start(bus, config);
    if !plane.joined(JOIN_MAX).await {
        tracing::warn!("the registry is not read yet");
    }
    plane
}

#[expect(
    clippy::disallowed_methods,
    reason = "where the common clock of a plane begins; decisions compare it with itself"
)]
fn unix_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(u64::MAX))
}

/// Repeats an attempt for up to `wait` while no server is reachable. Returns other errors
/// immediately.
pub async fn retry_unreachable<T>(
    wait: Duration,
    attempt: impl AsyncFn() -> Result<T, NatsError>,
) -> Result<T, NatsError> {
    let deadline = Instant::now() + wait;
    loop {
        match attempt().await {
            Err(NatsError::Unreachable(why)) if Instant::now() < deadline => {
                tracing::debug!(why, "no NATS server is reachable yet");
                let left = deadline.saturating_duration_since(Instant::now());
                sleep(RETRY.min(left)).await;
            }
            attempted => return attempted,
        }
    }
}

/// The client's configuration. `role` names the process in the server's monitoring.
pub fn config(args: &NatsArgs, role: &str) -> anyhow::Result<NatsConfig> {
    let (url, _) = url_and_log(args)?;
    let auth = match &args.nats_creds {
        Some(file) => credentials(file)?,
        None => url_auth(&url),
    };
    let mut config = named(&url, args.namespace.clone(), role, auth)?;
    if let Some(tls) = args.nats_tls.clone() {
        config.tls = NatsTls {
            required: true,
            authority: tls.authority,
            identity: tls.identity,
        };
    }
    Ok(config)
}

/// Whether a connection can be configured: its URL, credentials and files. Connects to nothing.
pub fn check(args: &NatsArgs) -> anyhow::Result<()> {
    config(args, "check")?;
    log(args)?;
    let tls = args.nats_tls.iter();
    for file in tls.flat_map(TlsSpec::files) {
        let read = fs::read(file).with_context(|| format!("--nats-tls {}", file.display()))?;
        anyhow::ensure!(!read.is_empty(), "--nats-tls {} is empty", file.display());
    }
    Ok(())
}

/// Where the log is, by the end of `--nats-url`: `?log=none`.
pub fn log(args: &NatsArgs) -> anyhow::Result<PlaneLog> {
    url_and_log(args).map(|(_, log)| log)
}

fn url_and_log(args: &NatsArgs) -> anyhow::Result<(String, PlaneLog)> {
    let url = args.url()?;
    // A password may contain a question mark.
    let (servers, options) = match url.rsplit_once('?') {
        Some((servers, options)) if !options.contains('@') => (servers, Some(options)),
        Some(_) | None => (url, None),
    };
    let log = match options {
        None | Some("log=jetstream") => PlaneLog::JetStream,
        Some("log=none") => PlaneLog::None,
        Some(other) => bail!("--nats-url ends in ?{other}: ?log=none and ?log=jetstream exist"),
    };
    Ok((servers.to_owned(), log))
}

/// A user's permissions name its inbox before its processes exist: the inbox has the name of the
/// user, or the public key of its seed or .creds file. A token has no user and no permissions.
fn named(
    url: &str,
    namespace: Namespace,
    role: &str,
    auth: NatsAuth,
) -> anyhow::Result<NatsConfig> {
    let own = || format!("{role}-{:08x}", Uuid::new_v4().as_fields().0);
    let (name, inbox) = match &auth {
        NatsAuth::UserPassword { user, .. } => (user.clone(), None),
        NatsAuth::NkeySeed(seed) => (own(), Some(public_key(seed)?)),
        NatsAuth::Credentials(text) => {
            let seed = text.split_whitespace().find(|word| is_seed(word));
            let seed = seed.context("--nats-creds: the .creds file has no user seed")?;
            (own(), Some(public_key(seed)?))
        }
        NatsAuth::None | NatsAuth::Token(_) => (own(), None),
    };
    let mut config = NatsConfig::new(url, namespace, name);
    config.auth = auth;
    if let Some(key) = inbox {
        config.inbox = format!("_INBOX.{key}");
    }
    Ok(config)
}

/// The public key of a user's seed: `U…`.
fn public_key(seed: &str) -> anyhow::Result<String> {
    let pair = KeyPair::from_seed(seed).context("--nats-creds: the seed is malformed")?;
    Ok(pair.public_key())
}

fn is_seed(word: &str) -> bool {
    word.starts_with("SU") && word.len() == NKEY_SEED_CHARS
}

/// The credentials in the first URL, verbatim: the client does not read them.
fn url_auth(urls: &str) -> NatsAuth {
    let first = urls.split(',').next().unwrap_or_default();
    let rest = first.split_once("://").map_or(first, |(_, rest)| rest);
    match rest.rsplit_once('@').map(|(auth, _)| auth) {
        None | Some("") => NatsAuth::None,
        Some(auth) => user_or_token(auth),
    }
}

fn user_or_token(text: &str) -> NatsAuth {
    match text.split_once(':') {
        Some((user, password)) => NatsAuth::UserPassword {
            user: user.to_owned(),
            password: password.to_owned(),
        },
        None => NatsAuth::Token(text.to_owned()),
    }
}

/// The credentials in a file, whose format shows their kind.
fn credentials(file: &Path) -> anyhow::Result<NatsAuth> {
    let path = file.display();
    let text = fs::read_to_string(file).with_context(|| format!("--nats-creds {path}"))?;
    if text.contains("-----BEGIN ") {
        return Ok(NatsAuth::Credentials(text));
    }
    let line = text.trim();
    if line.is_empty() || line.contains(char::is_whitespace) {
        bail!("--nats-creds {path} is neither a .creds file, a seed, USER:PASSWORD nor a token");
    }
    if is_seed(line) {
        return Ok(NatsAuth::NkeySeed(line.to_owned()));
    }
    Ok(user_or_token(line))
}

/// Base32 of prefix, type, 32 bytes of seed and a checksum.
const NKEY_SEED_CHARS: usize = 58;

#[cfg(test)]
mod tests;
