//! Refuses unknown `WARMROUTE_*` names in the environment: a misspelt name must not silently leave
//! a default in place.

use std::collections::BTreeSet;

use clap::Command;

/// The prefix of all names.
pub const PREFIX: &str = "WARMROUTE_";

/// The flags of all binaries, without [`PREFIX`]. Binaries may share an environment (a pod, a
/// compose file), so that a name which another binary reads is valid. Tests compare the binaries'
/// flags with this list, both ways.
pub const OURS: &[&str] = &[
    "ADMIN_HOST",
    "ADMIN_PORT",
    "ADVERTISE_URL",
    "API_KEY_FILE",
    "ASSUME",
    "BLOCK_SIZE",
    "CONFIG",
    "ENGINE_CA",
    "ENGINE_KEY_FILE",
    "EXPECT_INDEXERS",
    "EXPECT_ROUTERS",
    "EXPECT_WORKERS",
    "HEALTH_INTERVAL_MS",
    "HOST",
    "INIT",
    "JSON",
    "KV_ENDPOINT",
    "KV_REPLAY_ENDPOINT",
    "KV_TOPIC",
    "LOG",
    "LOG_JSON",
    "MAX_ACTIVE_REQUESTS",
    "MAX_AGE_SECS",
    "MAX_BODY_BYTES",
    "MAX_BUFFERED_BYTES",
    "MAX_BYTES",
    "MAX_CONNECTIONS",
    "MAX_MEMORY",
    "NAMESPACE",
    "NATS_CREDS",
    "NATS_MONITOR",
    "NATS_TLS",
    "NATS_URL",
    "OUTBOX_BYTES",
    "OVERLAP_SCORE_WEIGHT",
    "POLICY",
    "PORT",
    "PROBE",
    "RANKS",
    "REPLICAS",
    "RESIZE",
    "ROLE",
    "ROUTER_TEMPERATURE",
    "SNAPSHOT_EVERY_BYTES",
    "SNAPSHOT_EVERY_SECS",
    "STATE_DIR",
    "TIER_CREDITS",
    "TOKENIZER",
    "WAIT_SECS",
    "WORKER",
    "WORKER_ID",
    "WORKER_URL",
];

/// Names of removed flags, without [`PREFIX`]. In lower case each is a key of the router's settings
/// file.
const SETTINGS: &[&str] = &["CONNECT_TIMEOUT_MS", "DRAIN_TIMEOUT_SECS"];

/// Names in the environment with [`PREFIX`] that no binary reads.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown environment variables: {}", described(.0))]
pub struct UnknownNames(pub Vec<String>);

/// Checks the process's environment.
pub fn check(command: &Command) -> Result<(), UnknownNames> {
    let present = std::env::vars_os().map(|(name, value)| {
        (
            name.to_string_lossy().into(),
            value.to_string_lossy().into(),
        )
    });
    let unknown = unknown_names(command, present);
    if unknown.is_empty() {
        return Ok(());
    }
    Err(UnknownNames(unknown))
}

/// The key of the router's settings file that replaces a removed flag, `--like-this`.
#[must_use]
pub fn setting_of_flag(flag: &str) -> Option<String> {
    let name = flag.strip_prefix("--")?.replace('-', "_").to_uppercase();
    setting(&name)
}

fn setting(name: &str) -> Option<String> {
    SETTINGS.contains(&name).then(|| name.to_lowercase())
}

fn described(names: &[String]) -> String {
    let replaced = |name: &String| match name.strip_prefix(PREFIX).and_then(setting) {
        Some(key) => format!("{name} (replaced by {key} in the router's settings file)"),
        None => name.clone(),
    };
    names.iter().map(replaced).collect::<Vec<_>>().join(", ")
}

/// Whether a binary reads this name.
#[must_use]
pub fn is_ours(name: &str) -> bool {
    name.strip_prefix(PREFIX)
        .is_some_and(|rest| OURS.contains(&rest))
}

/// The names among `present` (name, value) with [`PREFIX`] that no binary reads.
pub fn unknown_names(
    command: &Command,
    present: impl IntoIterator<Item = (String, String)>,
) -> Vec<String> {
    let own: BTreeSet<&str> = command
        .get_arguments()
        .filter_map(|flag| flag.get_env()?.to_str())
        .collect();
    let mut unknown: Vec<String> = present
        .into_iter()
        .filter(|(name, _)| !own.contains(name.as_str()))
        .filter(|(name, value)| {
            name.starts_with(PREFIX) && !is_ours(name) && !is_service_link(name, value)
        })
        .map(|(name, _)| name)
        .collect();
    unknown.sort();
    unknown
}

/// Kubernetes sets in each pod for each service `<S>_SERVICE_HOST`, `<S>_SERVICE_PORT[_<NAME>]`,
/// `<S>_PORT` and `<S>_PORT_<N>_<TCP|UDP|SCTP>[_<PROTO|PORT|ADDR>]`. A misspelt port of ours looks
/// like the third, but its value is not a URL.
fn is_service_link(name: &str, value: &str) -> bool {
    let is_number = || value.parse::<u16>().is_ok();
    if name.ends_with("_SERVICE_HOST") {
        return true;
    }
    if name.ends_with("_SERVICE_PORT") || name.contains("_SERVICE_PORT_") {
        return is_number();
    }
    if name.ends_with("_PORT") && value.contains("://") {
        return true;
    }
    name.match_indices("_PORT_").any(|(at, marker)| {
        let rest = &name[at + marker.len()..];
        let mut parts = rest.split('_');
        let port = parts.next().is_some_and(|port| port.parse::<u16>().is_ok());
        let protocol = matches!(parts.next(), Some("TCP" | "UDP" | "SCTP"));
        let detail = matches!(parts.next(), None | Some("PROTO" | "PORT" | "ADDR"));
        port && protocol && detail && parts.next().is_none()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_names_of_the_environment_are_found() {
        let link = "tcp://10.0.0.1:8080";
        let present = [
            ("PATH", "/bin"),
            ("WARMROUTE_PORT", link),
            ("WARMROUTE_ROUTER_TEMPERATUR", "1"),
            ("WARMROUTE_WORKER_ID", "w"),
            ("WARMROUTE_ROUTER_SERVICE_HOST", "10.0.0.1"),
            ("WARMROUTE_ROUTER_SERVICE_PORT_HTTP", "8080"),
            ("WARMROUTE_ROUTER_PORT", link),
            ("WARMROUTE_ROUTER_PORT_8080_TCP", link),
            ("WARMROUTE_ROUTER_PORT_8080_TCP_ADDR", "10.0.0.1"),
            ("WARMROUTE_BLOCKSIZE", "16"),
            ("WARMROUTE_ADMN_PORT", "29001"),
        ];
        assert_eq!(
            unknown_names(
                &Command::new("none"),
                present.map(|(name, value)| (name.to_owned(), value.to_owned()))
            ),
            [
                "WARMROUTE_ADMN_PORT",
                "WARMROUTE_BLOCKSIZE",
                "WARMROUTE_ROUTER_TEMPERATUR"
            ]
        );
    }

    #[test]
    fn a_removed_name_is_refused_with_the_setting_that_replaces_it() {
        let name = "WARMROUTE_DRAIN_TIMEOUT_SECS".to_owned();
        let unknown = unknown_names(&Command::new("none"), [(name, "30".to_owned())]);
        let message = UnknownNames(unknown).to_string();
        assert!(
            message.contains("SECS (replaced by drain_timeout_secs"),
            "{message}"
        );
    }
}
