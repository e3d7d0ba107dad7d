//! Connecting, and what has to be there before anything else: the streams as `init` makes them.
//!
//! `connect` tries once and says why it failed, instead of the client's `retry_on_initial_connect`,
//! which hides a wrong password behind silence; whoever wants to wait for a server calls again. From
//! then on the client reconnects for ever.

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::stream::{Config, Info};
use async_nats::{Client, ConnectError, ConnectErrorKind, ConnectOptions, ServerAddr};
use xxhash_rust::xxh3::xxh3_64;

use super::config::{InitConfig, NatsAuth, NatsConfig, NatsError, SetupDifference};
use super::core::{ApiError, Core, Fault};
use super::layout::{self, Layout, Sizes};
use super::link::Link;
use crate::PlaneError;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// A connection that died silently is found after three of these.
const PING: Duration = Duration::from_secs(2);

const RECONNECT_DELAY_MAX: Duration = Duration::from_secs(1);

pub(super) async fn connect(config: NatsConfig) -> Result<Arc<Core>, NatsError> {
    let core = connect_to_any(config).await?;
    let differences = server_differences(&core);
    if !differences.is_empty() {
        return Err(NatsError::Mismatch(differences));
    }
    Ok(core)
}

/// The same, whatever the server is able to do.
pub(super) async fn connect_to_any(config: NatsConfig) -> Result<Arc<Core>, NatsError> {
    let layout = Layout::new(&config.namespace);
    let link = Arc::new(Link::new());
    let client = open(&config, &link).await?;
    let core = Core::start(client, Arc::clone(&link), layout, config.queue_max).await;
    core.map_err(|error| failed(&error, &link))
}

pub(super) fn server_differences(core: &Core) -> Vec<SetupDifference> {
    let version = core.client.server_info().version;
    layout::server_differences(&version, core.client.max_payload())
}

async fn open(config: &NatsConfig, link: &Arc<Link>) -> Result<Client, NatsError> {
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

/// At once, then twice as long each time.
fn reconnect_delay(attempts: usize) -> Duration {
    let doublings = u32::try_from(attempts.saturating_sub(1).min(10)).unwrap_or(10);
    let delay = Duration::from_millis(10) * 2_u32.pow(doublings);
    if attempts <= 1 {
        Duration::ZERO
    } else {
        delay.min(RECONNECT_DELAY_MAX)
    }
}

/// Refuses what is not as it must be.
pub(super) async fn verify(core: &Core, sizes: Sizes<'_>) -> Result<(), NatsError> {
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

/// Creates what is missing, changes nothing that is there, and verifies all of it.
pub(super) async fn init(core: &Core, init: &InitConfig) -> Result<(), NatsError> {
    let differences: Vec<SetupDifference> = layout::init_differences(init);
    if !differences.is_empty() {
        return Err(NatsError::Mismatch(differences));
    }
    // Inboxes are random.
    let nonce = xxh3_64(core.client.new_inbox().as_bytes());
    for wanted in core.layout.wanted(init, nonce) {
        if find(core, &wanted.name).await?.is_none() {
            create(core, &wanted).await?;
        }
    }
    verify(core, Sizes::Of(init)).await
}

pub(super) async fn find(core: &Core, stream: &str) -> Result<Option<Info>, NatsError> {
    match core.stream_info(stream).await {
        Ok(info) => Ok(Some(info)),
        Err(ApiError::Server(fault)) if fault.is_stream_missing() => Ok(None),
        Err(error) => Err(failed(&error.into(), &core.link)),
    }
}

async fn create(core: &Core, wanted: &Config) -> Result<(), NatsError> {
    let body = serde_json::to_value(wanted)
        .map_err(|error| NatsError::Invalid(format!("{}: {error}", wanted.name)))?;
    let api = format!("STREAM.CREATE.{}", wanted.name);
    match core.api::<Info>(&api, &body).await {
        Ok(_) => Ok(()),
        // Somebody else was faster: `verify` says whether it is what we want.
        Err(ApiError::Server(fault)) if fault.is_name_in_use() => Ok(()),
        Err(ApiError::Server(fault)) if fault.is_passing() => {
            Err(NatsError::Unreachable(fault.description))
        }
        Err(ApiError::Server(Fault {
            err_code,
            description,
        })) => {
            let stream = &wanted.name;
            let why = format!("{stream}: {description} ({err_code})");
            Err(NatsError::Refused(why))
        }
        Err(ApiError::Plane(error)) => Err(failed(&error, &core.link)),
    }
}

/// A question that the server does not permit is never answered; its complaint comes beside it.
pub(super) fn failed(error: &PlaneError, link: &Link) -> NatsError {
    let complaint = link.last_server_error();
    if complaint.is_empty() {
        NatsError::Unreachable(error.to_string())
    } else {
        NatsError::Refused(complaint)
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
    fn a_cluster_without_a_leader_is_asked_again() {
        let fault = |err_code| Fault {
            err_code,
            description: String::new(),
        };
        // As nats-server 2.15 numbers them: not available now; no such stream; no more streams allowed.
        assert!(fault(10008).is_passing());
        assert!([10059, 10027].iter().all(|&code| !fault(code).is_passing()));
    }
}
