//! Clients that the servers of NATS refuse, by their monitoring ports (`--nats-monitor`).
//!
//! A process whose credentials are refused reaches nothing of the plane. If no router knew its worker
//! before, only its own log and its server know of it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use reqwest::{Client, Url};
use serde::Deserialize;
use warmroute_plane::unix_ns_of_rfc3339;
use warmroute_process::args::redacted;
use warmroute_process::engine_answer::bounded_body;
use warmroute_process::tls::EngineTls;

use super::{Code, Findings, PlaneState, StatusLine};

const DEADLINE: Duration = Duration::from_secs(5);

/// A refused process tries again each second, one that ends is started again within this time.
const RECENT_NS: u64 = 60_000_000_000;

/// The last closed connections of a server, the newest first: several hundred processes' of a minute.
const CLOSED: &str = "/connz?state=closed&auth=1&sort=stop&limit=4096";

/// Most bytes of an answer: its clients name themselves, in some thousand bytes each.
const ANSWER_MAX: usize = 64 << 20;

/// Most clients that are shown, and characters of each text.
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

/// What the monitoring ports of the servers answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MonitorAnswers {
    pub refused: Vec<RefusedClient>,
    /// URLs that gave no answer, without credentials, and why.
    pub unread: Vec<String>,
}

/// Asks the monitoring ports at these URLs, separated by commas.
pub async fn refused_clients(urls: &str) -> MonitorAnswers {
    let mut answers = MonitorAnswers::default();
    for url in urls.split(',').map(str::trim) {
        match refused_at(url).await {
            Ok(found) => answers.refused.extend(found),
            Err(error) => answers.unread.push(format!("{}: {error:#}", redacted(url))),
        }
    }
    answers
}

async fn refused_at(url: &str) -> anyhow::Result<Vec<RefusedClient>> {
    let port = Url::parse(url).ok();
    let is_http = port.is_some_and(|url| matches!(url.scheme(), "http" | "https"));
    ensure!(is_http, "it is no http:// or https:// URL");
    let asked = format!("{}{CLOSED}", url.trim_end_matches('/'));
    let http = EngineTls::system()?.client().timeout(DEADLINE).build()?;
    let body = answer(&http, asked).await?;
    refused_in(&body).context("it is no monitoring port")
}

async fn answer(http: &Client, asked: String) -> anyhow::Result<Vec<u8>> {
    // Errors of the client would show the URL with its credentials.
    let bare = reqwest::Error::without_url;
    let answer = http.get(asked).send().await.map_err(bare);
    let answer = answer?.error_for_status().map_err(bare)?;
    Ok(bounded_body(answer, ANSWER_MAX).await?)
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
    let Some(answers) = &state.monitors else {
        return;
    };
    let MonitorAnswers { refused, unread } = answers;
    for url in unread {
        findings.add(Code::MonitorUnread, url);
    }
    for one in refused.iter().take(SHOWN_MAX) {
        let user = match &one.user {
            Some(user) if *user != one.name => format!(", user {}", shown(user)),
            Some(_) | None => String::new(),
        };
        let [name, ip, reason] = [&one.name, &one.ip, &one.reason].map(|text| shown(text));
        let about = format!(
            "{name} at {ip}{user}: {reason}, {} times within a minute",
            one.times
        );
        findings.add(Code::CredentialsRefused, about);
    }
    rest.push(("refused", format!("{} clients of NATS", refused.len())));
}

/// A text of a client that the server does not know: its beginning, without control characters.
fn shown(text: &str) -> String {
    let beginning = text.chars().take(SHOWN_MAX);
    beginning.flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn urls_that_cannot_be_asked_are_named_without_their_passwords() {
        for (url, why) in [
            ("http://me:secret@127.0.0.1:9", "error"),
            (
                "nats://me:secret@127.0.0.1:4222",
                "no http:// or https:// URL",
            ),
            ("http://me:secret@", "no http:// or https:// URL"),
        ] {
            let answers = refused_clients(url).await;
            let [error] = &answers.unread[..] else {
                panic!("{answers:?}");
            };
            assert!(error.contains(why), "{error}");
            assert!(
                error.contains("http://…@") || error.contains("nats://…@"),
                "{error}"
            );
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[tokio::test]
    async fn an_answer_without_end_is_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let endless = async {
            let (mut client, _) = listener.accept().await.unwrap();
            client.read_u8().await.unwrap();
            client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
            while client.write_all(&[b' '; 1 << 16]).await.is_ok() {}
        };
        let (asked, ()) = tokio::join!(refused_clients(&url), endless);
        let error = &asked.unread[0];
        assert!(error.contains("more than"), "{error}");
    }

    /// A client that the server refuses chooses its name.
    #[test]
    fn names_of_clients_are_shown_without_control_characters() {
        let name = format!("\u{1b}[2J\n{}", "x".repeat(4000));
        let refused = RefusedClient {
            name: name.clone(),
            ip: "10.0.0.7".to_owned(),
            user: Some(format!("{name}y")),
            reason: "Authentication Failure".to_owned(),
            times: 1,
        };
        let state = PlaneState {
            monitors: Some(MonitorAnswers {
                refused: vec![refused],
                unread: Vec::new(),
            }),
            ..PlaneState::default()
        };
        let mut findings = Findings::default();
        judge(&state, &mut findings, &mut Vec::new());
        let found = findings.worst_first();
        let about = &found[0].about[0];
        assert!(!about.contains(char::is_control), "{about:?}");
        assert!(about.len() < 300, "{about}");
    }

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
