//! Reports a namespace's streams without refusing or changing them.

use std::time::Duration;

use async_nats::datetime::parse_rfc3339;
use async_nats::jetstream::stream::Info;
use serde::Deserialize;
use serde_json::Value;

use super::config::{InitConfig, SetupDifference};
use super::core::{JetStreamError, NatsCore};
use super::layout::{self, Sizes};
use super::setup;
use crate::PlaneLog;

/// The set-up of a namespace, see [`super::NatsPlane::inspect`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceSetup {
    pub log: PlaneLog,
    pub server_version: String,
    /// `None` if the server does not report its time.
    pub clock: Option<ClockOffset>,
    /// Differences that prevent processes from starting.
    pub differences: Vec<SetupDifference>,
    /// Sizes that differ from those of `init`.
    pub resized: Vec<SetupDifference>,
    /// The streams that exist.
    pub streams: Vec<StreamUsage>,
    /// Streams whose set-up could not be read, and why.
    pub unread: Vec<String>,
}

/// Offset of the server's clock to this machine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockOffset {
    /// Positive if the server's clock is ahead.
    pub ahead_ms: i64,
    /// Error bound: half of the request's round trip.
    pub within_ms: u64,
}

/// A stream's purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamRole {
    Log,
    Registry,
    Snapshots,
}

/// A stream's bounds and use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamUsage {
    pub role: StreamRole,
    pub name: String,
    pub messages: u64,
    pub bytes: u64,
    /// `None` without a bound.
    pub bytes_max: Option<u64>,
    pub age_max: Option<Duration>,
    /// When the oldest message was stored; `None` without messages.
    pub oldest_unix_ns: Option<u64>,
    /// Time since the newest message was stored; `None` without messages.
    pub written_ago: Option<Duration>,
    pub replicas: usize,
    /// Servers whose copy is missing or behind.
    pub copies_away: Vec<String>,
}

pub(super) async fn inspect(core: &NatsCore, unix_ns: fn() -> u64) -> NamespaceSetup {
    let mut setup = NamespaceSetup {
        server_version: core.client.server_info().version,
        clock: clock(core, unix_ns).await,
        differences: setup::server_differences(core),
        ..NamespaceSetup::default()
    };
    let roles = [StreamRole::Log, StreamRole::Registry, StreamRole::Snapshots];
    let wanted = core.layout.wanted(&InitConfig::default(), 0);
    for (role, wanted) in roles.into_iter().zip(wanted) {
        let info = match setup::find(core, &wanted.name).await {
            Ok(Some(info)) => info,
            Ok(None) => {
                setup.differences.push(layout::missing(&wanted.name));
                continue;
            }
            Err(error) => {
                setup.unread.push(format!("{}: {error}", wanted.name));
                continue;
            }
        };
        let differences = layout::stream_differences(&info.config, &wanted, Sizes::Bounded);
        setup.differences.extend(differences);
        setup.resized.extend(layout::resized(&info.config));
        let ahead_ms = setup.clock.map_or(0, |clock| clock.ahead_ms);
        let now = unix_ns().saturating_add_signed(ahead_ms.saturating_mul(1_000_000));
        setup.streams.push(used(role, &info, now));
    }
    setup
}

/// `now`: the server's clock.
fn used(role: StreamRole, info: &Info, now: u64) -> StreamUsage {
    let (config, state) = (&info.config, &info.state);
    let oldest = u64::try_from(state.first_timestamp.unix_timestamp_nanos()).ok();
    let newest = u64::try_from(state.last_timestamp.unix_timestamp_nanos()).ok();
    let newest = newest.filter(|_| state.messages > 0);
    let copies = info.cluster.iter().flat_map(|cluster| &cluster.replicas);
    StreamUsage {
        role,
        name: config.name.clone(),
        messages: state.messages,
        bytes: state.bytes,
        bytes_max: u64::try_from(config.max_bytes).ok().filter(|&max| max > 0),
        age_max: Some(config.max_age).filter(|age| !age.is_zero()),
        oldest_unix_ns: oldest.filter(|_| state.messages > 0),
        written_ago: newest.map(|newest| Duration::from_nanos(now.saturating_sub(newest))),
        replicas: config.num_replicas,
        copies_away: copies
            .filter(|copy| copy.offline || !copy.current)
            .map(|copy| copy.name.clone())
            .collect(),
    }
}

/// The time in an answer of the JetStream API.
#[derive(Deserialize)]
struct ServerTime {
    ts: String,
}

async fn clock(core: &NatsCore, unix_ns: fn() -> u64) -> Option<ClockOffset> {
    let asked = unix_ns();
    let api = format!("STREAM.INFO.{}", core.layout.log());
    let time: Result<ServerTime, JetStreamError> = core.api(&api, &Value::Null).await;
    let answered = unix_ns();
    let time = parse_rfc3339(&time.ok()?.ts).ok()?;
    offset(asked, time.unix_timestamp_nanos(), answered)
}

/// Nanoseconds since the Unix epoch of a time that a server reports.
#[must_use]
pub fn unix_ns_of_rfc3339(time: &str) -> Option<u64> {
    let time = parse_rfc3339(time).ok()?;
    u64::try_from(time.unix_timestamp_nanos()).ok()
}

fn offset(asked: u64, server: i128, answered: u64) -> Option<ClockOffset> {
    const MS: i128 = 1_000_000;
    let half = i128::from(answered.saturating_sub(asked)) / 2;
    Some(ClockOffset {
        ahead_ms: i64::try_from((server - i128::from(asked) - half) / MS).ok()?,
        within_ms: u64::try_from(half / MS + 1).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_compared_at_the_middle_of_the_round_trip() {
        const MS: u64 = 1_000_000;
        let check = |asked: u64, server: u64, answered: u64, ahead_ms: i64, within_ms: u64| {
            let found = offset(asked * MS, i128::from(server * MS), answered * MS);
            let wanted = ClockOffset {
                ahead_ms,
                within_ms,
            };
            assert_eq!(found, Some(wanted));
        };
        check(1000, 1010, 1020, 0, 11);
        check(1000, 6010, 1020, 5000, 11);
        check(9000, 1000, 9000, -8000, 1);
    }
}
