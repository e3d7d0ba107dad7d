//! Which `WARMROUTE_*` names of the environment nobody knows: a typing error must not pass for a
//! default.

use std::collections::BTreeSet;

use clap::CommandFactory as _;

use super::Args;

const PREFIX: &str = "WARMROUTE_";

/// Flags of our other binaries, which may share an environment (a pod, a compose file) with us.
const ELSEWHERE: &[&str] = &[
    "ADVERTISE_URL",
    "CONFIG",
    "INIT",
    "ITL_MS",
    "KV_ENDPOINT",
    "KV_PORT",
    "KV_REPLAY_ENDPOINT",
    "MAX_MEMORY",
    "MODEL",
    "NUM_BLOCKS",
    "PREFILL_TOKENS_PER_SEC",
    "RANKS",
    "REPLAY_PORT",
    "REPLICAS",
    "STATE_DIR",
    "WORKER_ID",
    "WORKER_URL",
];

/// The names among `present` (name, value) that start like ours and that no binary of ours reads.
pub fn unknown_names(present: impl IntoIterator<Item = (String, String)>) -> Vec<String> {
    let command = Args::command();
    let own: BTreeSet<&str> = command
        .get_arguments()
        .filter_map(|flag| flag.get_env()?.to_str())
        .collect();
    let mut unknown: Vec<String> = present
        .into_iter()
        .filter(|(name, _)| !own.contains(name.as_str()))
        .filter(|(name, value)| {
            name.strip_prefix(PREFIX)
                .is_some_and(|rest| !ELSEWHERE.contains(&rest) && !is_service_link(name, value))
        })
        .map(|(name, _)| name)
        .collect();
    unknown.sort();
    unknown
}

/// Kubernetes tells each pod of each service `<S>_SERVICE_HOST`, `<S>_SERVICE_PORT[_<NAME>]`,
/// `<S>_PORT` and `<S>_PORT_<N>_<TCP|UDP|SCTP>[_<PROTO|PORT|ADDR>]`. A misspelt port of ours looks
/// like the fourth, but for its value: theirs is a URL.
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
