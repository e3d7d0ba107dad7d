//! The way to the plane on NATS, from the flags.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use nkeys::KeyPair;
use tokio::time::{Instant, sleep};
use uuid::Uuid;
use warmroute_plane::{
    Connection, InitConfig, NatsAuth, NatsConfig, NatsError, NatsPlane, NatsStats, NatsTls, Plane,
};
use warmroute_proto::Namespace;

use crate::args::NatsArgs;
use crate::joining::Joining;
use crate::tasks::Tasks;

/// Until a server that was not within reach is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// A plane, perhaps not within reach yet.
#[derive(Clone)]
pub struct Nats {
    joining: Arc<Joining>,
}

impl Nats {
    /// Unavailable until the server is reached for the first time.
    #[must_use]
    pub fn plane(&self) -> Arc<dyn Plane> {
        Arc::clone(&self.joining) as Arc<dyn Plane>
    }

    /// What the connection went through since the start, and whether the server is within reach, in
    /// Prometheus' text format: the same names in every binary.
    #[must_use]
    pub fn metrics_text(&self) -> String {
        let up = *self.joining.connection().borrow() == Connection::Up;
        let stats = self.joining.plane().map(NatsPlane::stats);
        metrics_text(up, &stats.unwrap_or_default())
    }

    /// See [`NatsPlane::last_server_error`].
    #[must_use]
    pub fn last_server_error(&self) -> Option<String> {
        self.joining.plane().and_then(NatsPlane::last_server_error)
    }
}

fn metrics_text(up: bool, stats: &NatsStats) -> String {
    let mut text = String::new();
    let mut add = |name: &str, kind: &str, help: &str, value: u64| {
        #[expect(
            clippy::let_underscore_must_use,
            reason = "writing to a String cannot fail"
        )]
        let _ = write!(
            text,
            "# HELP warmroute_nats_{name} {help}\n# TYPE warmroute_nats_{name} {kind}\n\
             warmroute_nats_{name} {value}\n"
        );
    };
    add("up", "gauge", "The server is within reach.", up.into());
    for (name, help, value) in counters(stats) {
        add(name, "counter", help, value);
    }
    text
}

/// One name a counter; the lag of a tail is its reader's to show.
const fn counters(stats: &NatsStats) -> [(&'static str, &'static str, u64); 16] {
    [
        ("connects_total", "Connections made.", stats.connects),
        ("disconnects_total", "Connections lost.", stats.disconnects),
        (
            "slow_consumers_total",
            "Messages that a full queue dropped.",
            stats.slow_consumers,
        ),
        (
            "lame_ducks_total",
            "Servers that said they would end.",
            stats.lame_ducks,
        ),
        ("closed_total", "Times the client gave up.", stats.closed),
        (
            "server_errors_total",
            "Complaints of the server; the log has their texts.",
            stats.server_errors,
        ),
        (
            "client_errors_total",
            "Errors of the client.",
            stats.client_errors,
        ),
        (
            "answers_late_total",
            "Answers that did not come in time.",
            stats.answers_late,
        ),
        (
            "answers_cut_off_total",
            "Answers that a disconnect took along.",
            stats.answers_cut_off,
        ),
        (
            "tails_reopened_total",
            "Consumers of the log, the first ones too.",
            stats.tails_reopened,
        ),
        (
            "watches_reopened_total",
            "Consumers of the registry, the first ones too.",
            stats.watches_reopened,
        ),
        (
            "snapshots_torn_total",
            "Snapshots met that could not be read: chunks are missing, or what describes them is damaged.",
            stats.snapshots_torn,
        ),
        ("in_messages_total", "Messages received.", stats.in_messages),
        ("out_messages_total", "Messages sent.", stats.out_messages),
        ("in_bytes_total", "Bytes received.", stats.in_bytes),
        ("out_bytes_total", "Bytes sent.", stats.out_bytes),
    ]
}

/// Reaches the plane, or goes on trying beside whoever asks: a server that is away keeps nobody from
/// starting. One that is not set up, or does not let us in, does; where it is found only later it
/// takes the process down, so that the reason stands at the end of the log.
pub async fn join(args: &NatsArgs, role: &str, tasks: &Tasks) -> anyhow::Result<Nats> {
    let config = config(args, role)?;
    let joining = Arc::new(Joining::new());
    let nats = Nats {
        joining: Arc::clone(&joining),
    };
    match connect(&config, args.init).await {
        Ok(plane) => joining.reached(plane),
        Err(NatsError::Unreachable(why)) => {
            tracing::warn!(
                url = shown(&config.url),
                why,
                "no NATS server yet; trying on"
            );
        }
        Err(error) => return Err(error).with_context(|| shown(&config.url)),
    }
    let (init, stop) = (args.init, tasks.stop.clone());
    tasks.spawn("nats", async move {
        tokio::select! {
            () = stop.cancelled() => {}
            error = keep(&joining, &config, init) => {
                tracing::error!(%error, "the plane cannot be joined");
            }
        }
    });
    Ok(nats)
}

/// Joins what is not joined yet, then tells on the connection's states. Ends only for good.
async fn keep(joining: &Joining, config: &NatsConfig, init: bool) -> NatsError {
    while joining.plane().is_none() {
        match connect(config, init).await {
            Ok(plane) => joining.reached(plane),
            Err(NatsError::Unreachable(why)) => {
                tracing::debug!(why, "still no NATS server");
                sleep(RETRY).await;
            }
            Err(error) => return error,
        }
    }
    tracing::info!(url = shown(&config.url), "the plane is within reach");
    joining.follow().await;
    NatsError::Unreachable("the client gave up".to_owned())
}

async fn connect(config: &NatsConfig, init: bool) -> Result<NatsPlane, NatsError> {
    match NatsPlane::connect(config.clone()).await {
        Err(NatsError::Mismatch(_)) if init => {
            NatsPlane::init(config.clone(), InitConfig::default()).await
        }
        connected => connected,
    }
}

/// For commands that end: tries until so much time is over while no server is within reach. What else
/// goes wrong is told at once.
pub async fn within<T>(
    wait: Duration,
    attempt: impl AsyncFn() -> Result<T, NatsError>,
) -> Result<T, NatsError> {
    let deadline = Instant::now() + wait;
    loop {
        match attempt().await {
            Err(NatsError::Unreachable(why)) if Instant::now() < deadline => {
                tracing::debug!(why, "no NATS server yet");
                let left = deadline.saturating_duration_since(Instant::now());
                sleep(RETRY.min(left)).await;
            }
            attempted => return attempted,
        }
    }
}

/// The client's configuration. `role` names the process to the server's monitoring.
pub fn config(args: &NatsArgs, role: &str) -> anyhow::Result<NatsConfig> {
    let Some(url) = args.nats_url.clone() else {
        bail!("--nats-url is missing");
    };
    let Some(namespace) = args.namespace() else {
        bail!("--namespace is empty");
    };
    let auth = match &args.nats_creds {
        Some(file) => credentials(file)?,
        None => url_auth(&url),
    };
    let mut config = named(&url, namespace, role, auth)?;
    if let Some(tls) = args.nats_tls.clone() {
        config.tls = NatsTls {
            required: true,
            authority: tls.authority,
            identity: tls.identity,
        };
    }
    Ok(config)
}

/// A user's permissions open one inbox for it, which has to be known before its processes are: it is named
/// as the user, or as the public key of a seed or .creds file. A token is nobody's, and has no permissions.
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
            let seed = seed.context("--nats-creds: a .creds file without the seed of a user")?;
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

/// `U…`, the user's name where users have keys.
fn public_key(seed: &str) -> anyhow::Result<String> {
    let pair = KeyPair::from_seed(seed).context("--nats-creds: the seed is no seed")?;
    Ok(pair.public_key())
}

fn is_seed(word: &str) -> bool {
    word.starts_with("SU") && word.len() == NKEY_SEED_CHARS
}

/// What the first URL has before its host, verbatim: the client itself does not read it.
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

/// URLs without what lets us in.
pub(crate) fn shown(urls: &str) -> String {
    let bare = |url: &str| match url.rsplit_once('@') {
        Some((before, host)) => {
            let scheme = before.split_once("://").map_or("", |(scheme, _)| scheme);
            format!("{scheme}://…@{host}")
        }
        None => url.to_owned(),
    };
    urls.split(',').map(bare).collect::<Vec<_>>().join(",")
}

/// What a file says: by its shape, as each has one of its own.
fn credentials(file: &Path) -> anyhow::Result<NatsAuth> {
    let shown = file.display();
    let text = fs::read_to_string(file).with_context(|| format!("--nats-creds {shown}"))?;
    if text.contains("-----BEGIN ") {
        return Ok(NatsAuth::Credentials(text));
    }
    let line = text.trim();
    if line.is_empty() || line.contains(char::is_whitespace) {
        bail!("--nats-creds {shown} is neither a .creds file, a seed, USER:PASSWORD nor a token");
    }
    if is_seed(line) {
        return Ok(NatsAuth::NkeySeed(line.to_owned()));
    }
    Ok(user_or_token(line))
}

/// Base32 of prefix, type, 32 bytes of seed and a checksum.
const NKEY_SEED_CHARS: usize = 58;

#[cfg(test)]
mod tests {
    use std::env;

    use super::*;

    fn of(text: &str) -> anyhow::Result<NatsAuth> {
        let file = env::temp_dir().join(format!("wr-creds-{}", Uuid::new_v4()));
        fs::write(&file, text)?;
        let auth = credentials(&file);
        fs::remove_file(&file)?;
        auth
    }

    #[test]
    fn credentials_are_told_by_their_shape() {
        let shape = |text: &str| format!("{:?}", of(text).unwrap());
        assert_eq!(shape("ann:secret\n"), "user and password");
        assert_eq!(shape("t0ken\n"), "token");
        assert_eq!(shape(&format!("SU{}", "A".repeat(56))), "nkey");
        assert_eq!(shape("-----BEGIN NATS USER JWT-----\n…"), "credentials");
        assert!(of("").is_err());
        assert!(of("two words").is_err());
    }

    #[test]
    fn a_user_names_the_process_and_its_inbox() {
        let named = |url: &str| named(url, Namespace::from("ns"), "router", url_auth(url)).unwrap();
        let name = |url: &str| named(url).name;
        assert_eq!(name("nats://ann:secret@h:4222,nats://i:4222"), "ann");
        assert!(name("nats://token@h:4222").starts_with("router-"));
        assert!(name("h:4222").starts_with("router-"));
        assert_ne!(name("h:4222"), name("h:4222"));
        let auth = |url: &str| format!("{:?}", named(url).auth);
        assert_eq!(auth("nats://ann:secret@h:4222"), "user and password");
        assert_eq!(auth("nats://token@h:4222"), "token");
        assert_eq!(auth("nats://h:4222,nats://ann:secret@i:4222"), "none");
    }

    /// RFC 8032's first key, as a user's.
    const SEED: &str = "SUAJ2YNRTXX72WTAXKCEV5ES5QWMIRCJYVUXWMTJDFYDXLADDSXH6YALCA";
    const KEY: &str = "UDLVVGABQKYQVN6VJP7NHSLEA45A5YLS6PNKMIZFV4BBU2HXA5IRUVAL";

    #[test]
    fn a_seed_names_the_inbox_that_permissions_open() {
        let inbox = |auth| named("h:4222", Namespace::from("ns"), "router", auth).map(|c| c.inbox);
        let own = format!("_INBOX.{KEY}");
        assert_eq!(inbox(NatsAuth::NkeySeed(SEED.to_owned())).unwrap(), own);
        let creds = format!(
            "-----BEGIN NATS USER JWT-----\neyJ0.e30.c2ln\n------END NATS USER JWT------\n\n\
             -----BEGIN USER NKEY SEED-----\n{SEED}\n------END USER NKEY SEED------\n"
        );
        assert_eq!(inbox(NatsAuth::Credentials(creds)).unwrap(), own);
        assert!(inbox(NatsAuth::Credentials("no seed".to_owned())).is_err());
        assert!(inbox(NatsAuth::NkeySeed(format!("SU{}", "A".repeat(56)))).is_err());
        let nobody = inbox(NatsAuth::Token("t".to_owned())).unwrap();
        assert!(nobody.starts_with("_INBOX.router-"), "{nobody}");
    }

    #[tokio::test(start_paused = true)]
    async fn commands_wait_for_a_server_that_is_away_and_for_nothing_else() {
        let away = || Err::<(), _>(NatsError::Unreachable(String::new()));
        let begun = Instant::now();
        let waited = within(Duration::from_millis(2500), async || away()).await;
        assert_eq!(waited, away());
        assert_eq!(begun.elapsed(), Duration::from_millis(2500));
        let refused = || Err::<(), _>(NatsError::Refused(String::new()));
        let told = within(Duration::from_secs(60), async || refused()).await;
        assert_eq!(told, refused());
        let tries = std::cell::Cell::new(0);
        let third = async || {
            tries.set(tries.get() + 1);
            if tries.get() < 3 { away() } else { Ok(()) }
        };
        assert_eq!(within(Duration::from_secs(60), third).await, Ok(()));
        assert_eq!(begun.elapsed(), Duration::from_millis(4500));
    }

    #[test]
    fn every_count_is_described_once() {
        let stats = NatsStats {
            disconnects: 7,
            ..NatsStats::default()
        };
        let page = metrics_text(true, &stats);
        assert!(
            page.contains("\nwarmroute_nats_disconnects_total 7\n"),
            "{page}"
        );
        assert!(page.contains("\nwarmroute_nats_up 1\n"), "{page}");
        let helps = page.lines().filter(|line| line.starts_with("# HELP "));
        let names: std::collections::BTreeSet<_> =
            helps.filter_map(|line| line.split(' ').nth(2)).collect();
        assert_eq!(names.len() * 3, page.lines().count());
    }

    #[test]
    fn secrets_of_urls_are_not_shown() {
        assert_eq!(
            shown("nats://ann:secret@h:4222,tls://i:4222"),
            "nats://…@h:4222,tls://i:4222"
        );
    }
}
