//! Connects, and verifies or creates the streams of a namespace.
//!
//! `connect` tries once and reports why it failed: the client's `retry_on_initial_connect` would
//! hide a wrong password. After the first connection the client reconnects forever.

use std::sync::{Arc, Weak};
use std::time::Duration;

use async_nats::jetstream::stream::{Config, Info};
use async_nats::{Client, ConnectError, ConnectErrorKind, ConnectOptions, ServerAddr};
use tokio::time::{Instant, sleep};
use xxhash_rust::xxh3::xxh3_64;

use super::config::{
    ExistingStreams, InitConfig, NatsAuth, NatsConfig, NatsError, SetupDifference,
};
use super::core::{JetStreamError, NatsCore, RoundTrip, ServerFault};
use super::layout::{self, Layout, Sizes};
use super::link::NatsLink;
use crate::PlaneError;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// A connection that died silently is detected after three of these.
const PING: Duration = Duration::from_secs(2);

/// Between two equal warnings of the set-up.
const WARN_EVERY: Duration = Duration::from_secs(3600);

const RECONNECT_DELAY_MAX: Duration = Duration::from_secs(1);

pub(super) async fn connect(
    config: NatsConfig,
    round_trip: RoundTrip,
) -> Result<Arc<NatsCore>, NatsError> {
    let core = connect_to_any(config, round_trip).await?;
    let differences = server_differences(&core);
    if !differences.is_empty() {
        return Err(NatsError::Mismatch(differences));
    }
    Ok(core)
}

/// Connects without a check of the server's version and limits.
pub(super) async fn connect_to_any(
    config: NatsConfig,
    round_trip: RoundTrip,
) -> Result<Arc<NatsCore>, NatsError> {
    let layout = Layout::new(&config.namespace);
    let link = Arc::new(NatsLink::new(config.user()));
    let client = open(&config, &link).await?;
    let core = Arc::clone(&link);
    let core = NatsCore::start(client, core, layout, round_trip, config.queue_max).await;
    core.map_err(|error| failed(&error, &link))
}

pub(super) fn server_differences(core: &NatsCore) -> Vec<SetupDifference> {
    let version = core.client.server_info().version;
    layout::server_differences(&version, core.client.max_payload())
}

async fn open(config: &NatsConfig, link: &Arc<NatsLink>) -> Result<Client, NatsError> {
    let invalid = |error: std::io::Error| NatsError::Invalid(format!("{}: {error}", config.url));
    let servers: Vec<ServerAddr> = config
        .url
        .split(',')
        .map(|url| url.trim().parse().map_err(invalid))
        .collect::<Result<_, _>>()?;
    let observer = Arc::clone(link);
    let mut options = ConnectOptions::new()
        .name(&config.name)
        .custom_inbox_prefix(&config.inbox)
        .subscription_capacity(config.queue_max.max(1))
        .connection_timeout(CONNECT_TIMEOUT)
        .ping_interval(PING)
        .max_reconnects(None)
        .reconnect_delay_callback(reconnect_delay)
        .event_callback(move |event| {
            observer.observe(event);
            std::future::ready(())
        });
    options = match config.auth.clone() {
        NatsAuth::None => options,
        NatsAuth::UserPassword { user, password } => options.user_and_password(user, password),
        NatsAuth::Token(token) => options.token(token),
        NatsAuth::NkeySeed(seed) => options.nkey(seed),
        NatsAuth::Credentials(text) => options
            .credentials(&text)
            .map_err(|error| NatsError::Invalid(format!("credentials: {error}")))?,
    };
    options = options.require_tls(config.tls.required);
    if let Some(authority) = config.tls.authority.clone() {
        options = options.add_root_certificates(authority);
    }
    if let Some((certificate, key)) = config.tls.identity.clone() {
        options = options.add_client_certificate(certificate, key);
    }
    options.connect(servers).await.map_err(refused)
}

fn refused(error: ConnectError) -> NatsError {
    match error.kind() {
        ConnectErrorKind::ServerParse => NatsError::Invalid(error.to_string()),
        ConnectErrorKind::Authentication
        | ConnectErrorKind::AuthorizationViolation
        | ConnectErrorKind::Tls => NatsError::Refused(error.to_string()),
        ConnectErrorKind::Dns
        | ConnectErrorKind::TimedOut
        | ConnectErrorKind::Io
        | ConnectErrorKind::MaxReconnects => NatsError::Unreachable(error.to_string()),
    }
}

/// None for the first attempt, then doubling.
fn reconnect_delay(attempts: usize) -> Duration {
    let doublings = u32::try_from(attempts.saturating_sub(1).min(10)).unwrap_or(10);
    let delay = Duration::from_millis(10) * 2_u32.pow(doublings);
    if attempts <= 1 {
        Duration::ZERO
    } else {
        delay.min(RECONNECT_DELAY_MAX)
    }
}

/// Compares the set-up with what is required.
pub(super) async fn verify(core: &NatsCore, sizes: Sizes<'_>) -> Result<(), NatsError> {
    let any = InitConfig::default();
    let wanted = match sizes {
        Sizes::Bounded => &any,
        Sizes::Of(init) => init,
    };
    let mut differences = Vec::new();
    for wanted in core.layout.wanted(wanted, 0) {
        match find(core, &wanted.name).await? {
            Some(info) => {
                differences.extend(layout::stream_differences(&info.config, &wanted, sizes));
            }
            None => differences.push(layout::missing(&wanted.name)),
        }
    }
    if differences.is_empty() {
        return Ok(());
    }
    Err(NatsError::Mismatch(differences))
}

/// Checks the set-up while the plane is in use, as at the start: an operator's tool may change it.
pub(super) fn keep_checked(core: &Arc<NatsCore>, every: Duration) {
    let checks = check_now_and_then(Arc::downgrade(core), every);
    core.spawn(core.stop.clone().run_until_cancelled_owned(checks));
}

async fn check_now_and_then(core: Weak<NatsCore>, every: Duration) {
    let mut known = SetupWarnings::default();
    loop {
        sleep(every).await;
        let Some(core) = core.upgrade() else {
            return;
        };
        let mut differences = server_differences(&core);
        match verify(&core, Sizes::Bounded).await {
            Ok(()) => {}
            Err(NatsError::Mismatch(of_streams)) => differences.extend(of_streams),
            // Nothing is known without an answer.
            Err(_) => continue,
        }
        if known.are_due(&differences, Instant::now()) {
            for difference in &differences {
                tracing::warn!(
                    %difference,
                    "the NATS set-up was changed and is not as required: set it back, or run `init`"
                );
            }
            if differences.is_empty() {
                tracing::info!("the NATS set-up is as required again");
            }
        }
    }
}

/// The differences that were logged last.
#[derive(Debug, Default)]
struct SetupWarnings {
    logged: Vec<SetupDifference>,
    at: Option<Instant>,
}

impl SetupWarnings {
    /// Whether to log these: they are others than before, or those of an hour ago.
    fn are_due(&mut self, differences: &[SetupDifference], now: Instant) -> bool {
        let is_old = self.at.is_some_and(|at| now >= at + WARN_EVERY);
        let is_due = self.logged != differences || is_old && !differences.is_empty();
        if is_due {
            self.logged = differences.to_vec();
            self.at = Some(now);
        }
        is_due
    }
}

/// Creates missing streams, enlarges existing ones if asked to, and verifies all.
pub(super) async fn init(core: &NatsCore, init: &InitConfig) -> Result<(), NatsError> {
    let differences: Vec<SetupDifference> = layout::init_differences(init);
    if !differences.is_empty() {
        return Err(NatsError::Mismatch(differences));
    }
    // Inboxes are random.
    let nonce = xxh3_64(core.client.new_inbox().as_bytes());
    for wanted in core.layout.wanted(init, nonce) {
        match find(core, &wanted.name).await? {
            None => put(core, "CREATE", &wanted).await?,
            Some(is) if init.existing == ExistingStreams::Enlarge => {
                if let Some(enlarged) = layout::enlarged(&is.config, &wanted) {
                    put(core, "UPDATE", &enlarged).await?;
                }
            }
            Some(_) => {}
        }
    }
    verify(core, Sizes::Of(init)).await
}

pub(super) async fn find(core: &NatsCore, stream: &str) -> Result<Option<Info>, NatsError> {
    match core.stream_info(stream).await {
        Ok(info) => Ok(Some(info)),
        Err(JetStreamError::Server(fault)) if fault.is_stream_missing() => Ok(None),
        Err(error) => Err(failed(&error.into(), &core.link)),
    }
}

async fn put(core: &NatsCore, operation: &str, wanted: &Config) -> Result<(), NatsError> {
    let body = serde_json::to_value(wanted)
        .map_err(|error| NatsError::Invalid(format!("{}: {error}", wanted.name)))?;
    let api = format!("STREAM.{operation}.{}", wanted.name);
    match core.api::<Info>(&api, &body).await {
        Ok(_) => Ok(()),
        // Another process created it: `verify` compares it.
        Err(JetStreamError::Server(fault)) if fault.is_name_in_use() => Ok(()),
        Err(JetStreamError::Server(fault)) if fault.is_transient() => {
            Err(NatsError::Unreachable(fault.description))
        }
        Err(JetStreamError::Server(fault)) => {
            let (stream, bytes) = (&wanted.name, wanted.max_bytes);
            let advice = match fault.is_without_room() {
                true => format!(
                    ": it reserves {bytes} bytes of the server's max_file_store, by default three \
                     quarters of the free disk at its start; raise that, or lower --max-bytes"
                ),
                false => String::new(),
            };
            let ServerFault {
                err_code,
                description,
            } = fault;
            let why = format!("{stream}: {description} ({err_code}){advice}");
            Err(NatsError::Refused(why))
        }
        Err(JetStreamError::Plane(error)) => Err(failed(&error, &core.link)),
    }
}

/// A request without permission is never answered; the server reports the error separately.
pub(super) fn failed(error: &PlaneError, link: &NatsLink) -> NatsError {
    let server_error = link.last_server_error();
    if server_error.is_empty() {
        NatsError::Unreachable(error.to_string())
    } else {
        NatsError::Refused(server_error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reconnects_come_soon_and_go_on() {
        let delays: Vec<u128> = [0, 1, 2, 3, 7, 8, 9, 1_000_000]
            .map(|attempts| reconnect_delay(attempts).as_millis())
            .into();
        assert_eq!(delays, [0, 0, 20, 40, 640, 1000, 1000, 1000]);
    }

    #[test]
    fn a_changed_set_up_is_warned_of_once_an_hour_and_its_end_is_logged() {
        let mut warnings = SetupWarnings::default();
        let start = Instant::now();
        let after = |secs| start + Duration::from_secs(secs);
        let changed = [layout::missing("wr_prod")];
        assert!(!warnings.are_due(&[], after(60)));
        assert!(warnings.are_due(&changed, after(120)));
        assert!(!warnings.are_due(&changed, after(180)));
        assert!(warnings.are_due(&changed, after(3720)));
        assert!(!warnings.are_due(&changed, after(3780)));
        assert!(warnings.are_due(&[], after(3840)));
        assert!(!warnings.are_due(&[], after(9000)));
    }

    #[test]
    fn a_cluster_without_a_leader_is_asked_again() {
        let fault = |err_code| ServerFault {
            err_code,
            description: String::new(),
        };
        // As nats-server 2.15 numbers them: not available now; no such stream; no more streams
        // allowed.
        assert!(fault(10008).is_transient());
        assert!(
            [10059, 10027]
                .iter()
                .all(|&code| !fault(code).is_transient())
        );
    }
}
