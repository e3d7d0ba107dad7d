//! Clients that the servers of NATS refuse, by their monitoring ports (`--nats-monitor`).
//!
//! A process whose credentials are refused reaches nothing of the plane. If no router knew its worker
//! before, only its own log and its server know of it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use serde::Deserialize;
use warmroute_plane::unix_ns_of_rfc3339;
use warmroute_process::tls::EngineTls;

use super::{Code, Findings, PlaneState, StatusLine};

const DEADLINE: Duration = Duration::from_secs(5);

/// A refused process tries again each second, one that ends is started again within this time.
const RECENT_NS: u64 = 60_000_000_000;

/// The last closed connections of a server, the newest first: several hundred processes' of a minute.
const CLOSED: &str = "/connz?state=closed&auth=1&sort=stop&limit=4096";

/// Most clients that are shown.
const SHOWN_MAX: usize = 64;

/// A client whose connections a server closed for its credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedClient {
    /// The name that the client gave itself: its user, or its role and a random number.
    pub name: String,
    pub ip: String,
    pub user: Option<String>,
    /// The server's reason.
    pub reason: String,
    /// Connections within the last minute.
    pub times: u64,
}

/// An answer of a server's `/connz`.
#[derive(Debug, Deserialize)]
struct ClosedConnections {
    now: String,
    connections: Vec<ClosedConnection>,
}

#[derive(Debug, Deserialize)]
struct ClosedConnection {
    #[serde(default)]
    name: String,
    #[serde(default)]
    ip: String,
    #[serde(default)]
    authorized_user: Option<String>,
    stop: String,
    #[serde(default)]
    reason: String,
}

/// Asks the monitoring ports at these URLs, separated by commas.
pub async fn refused_clients(urls: &str) -> anyhow::Result<Vec<RefusedClient>> {
    let http = EngineTls::system()?.client().timeout(DEADLINE).build()?;
    let mut refused = Vec::new();
    for url in urls.split(',').map(|url| url.trim().trim_end_matches('/')) {
        let answer = http.get(format!("{url}{CLOSED}")).send().await;
        let answer = answer.and_then(reqwest::Response::error_for_status);
        let answer = answer.with_context(|| format!("{url} does not answer"))?;
        let body = answer.bytes().await?;
        let found = refused_in(&body).with_context(|| format!("{url} is no monitoring port"))?;
        refused.extend(found);
    }
    Ok(refused)
}

/// The refused clients of one answer.
fn refused_in(body: &[u8]) -> anyhow::Result<Vec<RefusedClient>> {
    let closed: ClosedConnections = serde_json::from_slice(body)?;
    let now = unix_ns_of_rfc3339(&closed.now).context("its time is none")?;
    let mut refused: BTreeMap<(String, String, String), RefusedClient> = BTreeMap::new();
    for one in closed.connections {
        let stop = unix_ns_of_rfc3339(&one.stop).unwrap_or(0);
        if !is_refusal(&one.reason) || now.saturating_sub(stop) > RECENT_NS {
            continue;
        }
        let key = (one.name.clone(), one.ip.clone(), one.reason.clone());
        let known = refused.entry(key).or_insert(RefusedClient {
            name: one.name,
            ip: one.ip,
            user: one.authorized_user,
            reason: one.reason,
            times: 0,
        });
        known.times += 1;
    }
    Ok(refused.into_values().collect())
}

/// The server's words for credentials that are wrong, expired or revoked.
fn is_refusal(reason: &str) -> bool {
    reason.contains("Authentication") || reason.contains("Revoked")
}

pub(super) fn judge(state: &PlaneState, findings: &mut Findings, rest: &mut Vec<StatusLine>) {
    let Some(refused) = &state.refused else {
        return;
    };
    for one in refused.iter().take(SHOWN_MAX) {
        let user = match &one.user {
            Some(user) if *user != one.name => format!(", user {user}"),
            Some(_) | None => String::new(),
        };
        let about = format!(
            "{} at {}{user}: {}, {} times within a minute",
            one.name, one.ip, one.reason, one.times
        );
        findings.add(Code::CredentialsRefused, about);
    }
    rest.push(("refused", format!("{} clients of NATS", refused.len())));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_recent_refusals_count() {
        let closed = |name: &str, stop: &str, reason: &str| {
            json!({
                "name": name, "ip": "10.0.0.7", "stop": stop, "reason": reason,
                "authorized_user": name, "rtt": "1ms",
            })
        };
        let (recent, old) = ("2026-11-25T14:03:04.2Z", "2026-11-25T14:01:04.2Z");
        let answer = json!({
            "now": "2026-11-25T14:03:05.399932752Z",
            "connections": [
                closed("shim-9", recent, "Authentication Failure"),
                closed("shim-9", recent, "Authentication Failure"),
                closed("shim-8", recent, "Credentials Revoked"),
                closed("shim-7", old, "Authentication Failure"),
                closed("shim-6", recent, "Client Closed"),
            ],
        });
        let found = refused_in(answer.to_string().as_bytes()).unwrap();
        let found: Vec<_> = found.iter().map(|one| (&*one.name, one.times)).collect();
        assert_eq!(found, [("shim-8", 1), ("shim-9", 2)]);
        assert!(refused_in(b"{}").is_err());
    }
}
