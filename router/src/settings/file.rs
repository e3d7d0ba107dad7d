//! From the text of a settings file to [`Settings`].

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::http::HeaderValue;
use serde::Deserialize;
use warmroute_process::server::HalfClosed;

/// A file of settings has a few hundred bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Room for the longest prompts in each of a recording's files.
const RECORDING_BYTES_MIN: u64 = 1 << 20;

/// One day, in seconds.
const TIMEOUT_SECS_MAX: u64 = 86_400;

/// One minute, in milliseconds.
const CONNECT_TIMEOUT_MS_MAX: u64 = 60_000;

/// What the file sets. `docs/CONFIGURATION.md` describes each key.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    pub(crate) cors_origins: BTreeSet<WebOrigin>,
    pub(crate) extra_routes: BTreeSet<RoutePath>,
    connect_timeout_ms: ConnectMillis,
    drain_timeout_secs: Seconds,
    engine_wait_timeout_secs: Seconds,
    first_token_timeout_secs: Seconds,
    half_closed_clients: HalfClosedRule,
    max_prompt_bytes: usize,
    recording_dir: PathBuf,
    recording_max_bytes: RecordingBytes,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            cors_origins: BTreeSet::new(),
            extra_routes: BTreeSet::new(),
            connect_timeout_ms: ConnectMillis(1000),
            drain_timeout_secs: Seconds(30),
            engine_wait_timeout_secs: Seconds(0),
            first_token_timeout_secs: Seconds(0),
            half_closed_clients: HalfClosedRule::Abort,
            max_prompt_bytes: 8 << 20,
            recording_dir: PathBuf::new(),
            recording_max_bytes: RecordingBytes(1 << 30),
        }
    }
}

/// Where requests are recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecordingRule {
    pub dir: PathBuf,
    /// Bytes of all files in it.
    pub max_bytes: u64,
}

/// Bytes of a recording's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u64")]
struct RecordingBytes(u64);

impl TryFrom<u64> for RecordingBytes {
    type Error = ValueError;

    fn try_from(bytes: u64) -> Result<Self, ValueError> {
        if bytes < RECORDING_BYTES_MIN {
            return Err(ValueError::RecordingBytes(bytes));
        }
        Ok(Self(bytes))
    }
}

/// [`HalfClosed`] as the file names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum HalfClosedRule {
    Abort,
    Serve,
}

/// An origin of web pages, or `*`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct WebOrigin(String);

/// A path below `/v1/` that is forwarded, or the beginning of such paths if it ends with `/`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct RoutePath(String);

/// From 0 to [`TIMEOUT_SECS_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u64")]
struct Seconds(u64);

/// From 1 to [`CONNECT_TIMEOUT_MS_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u64")]
struct ConnectMillis(u64);

#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("cannot read the settings: {0}")]
    Read(#[from] io::Error),
    #[error("the settings have more than {FILE_BYTES_MAX} bytes")]
    TooLarge,
    #[error("the settings are invalid: {0}")]
    Invalid(#[from] toml::de::Error),
}

/// Why a value is refused. The parser adds the line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ValueError {
    #[error("{0:?} is not an origin such as https://chat.example.org, and not *")]
    Origin(String),
    #[error("{0:?} is not a plain path below /v1/")]
    Route(String),
    #[error("{0} is not between 0 and {TIMEOUT_SECS_MAX}")]
    Seconds(u64),
    #[error("{0} is not between 1 and {CONNECT_TIMEOUT_MS_MAX}")]
    ConnectMillis(u64),
    #[error("{0} is less than {RECORDING_BYTES_MIN}")]
    RecordingBytes(u64),
}

impl Settings {
    pub(super) fn load(path: &Path) -> Result<Self, SettingsError> {
        Self::parse(&read(path)?)
    }

    pub(crate) fn parse(text: &str) -> Result<Self, SettingsError> {
        Ok(toml::from_str(text)?)
    }

    /// Longest time to open a connection to an engine.
    pub(crate) const fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_timeout_ms.0)
    }

    /// Time from SIGTERM to the end of the last request.
    pub(crate) const fn drain_timeout(&self) -> Duration {
        Duration::from_secs(self.drain_timeout_secs.0)
    }

    /// Longest time for which a request waits for a worker; zero: none waits.
    pub(crate) const fn engine_wait_timeout(&self) -> Duration {
        Duration::from_secs(self.engine_wait_timeout_secs.0)
    }

    /// Bytes of the largest prompt that is tokenized.
    pub(crate) const fn max_prompt_bytes(&self) -> usize {
        self.max_prompt_bytes
    }

    /// Where requests are recorded; `None`: nowhere.
    pub(crate) fn recording(&self) -> Option<RecordingRule> {
        let dir = &self.recording_dir;
        (!dir.as_os_str().is_empty()).then(|| RecordingRule {
            dir: dir.clone(),
            max_bytes: self.recording_max_bytes.0,
        })
    }

    /// Longest time from sending a streaming request to the first byte of its answer's body.
    pub(crate) fn first_token_timeout(&self) -> Option<Duration> {
        let secs = self.first_token_timeout_secs.0;
        (secs > 0).then(|| Duration::from_secs(secs))
    }

    pub(crate) const fn half_closed_clients(&self) -> HalfClosed {
        match self.half_closed_clients {
            HalfClosedRule::Abort => HalfClosed::Abort,
            HalfClosedRule::Serve => HalfClosed::Serve,
        }
    }

    pub(crate) fn allows_origin(&self, origin: &HeaderValue) -> bool {
        let named = |allowed: &WebOrigin| allowed.0 == "*" || origin == allowed.0.as_str();
        self.cors_origins.iter().any(named)
    }

    pub(crate) fn adds_route(&self, path: &str) -> bool {
        self.extra_routes
            .iter()
            .any(|route| match route.0.strip_suffix('/') {
                Some(start) => path
                    .strip_prefix(start)
                    .is_some_and(|rest| rest.starts_with('/')),
                None => path == route.0,
            })
    }
}

fn read(path: &Path) -> Result<String, SettingsError> {
    let mut text = String::new();
    let file = File::open(path)?;
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(SettingsError::TooLarge);
    }
    Ok(text)
}

impl TryFrom<String> for WebOrigin {
    type Error = ValueError;

    fn try_from(text: String) -> Result<Self, ValueError> {
        let is_origin = || {
            let (scheme, host) = text.split_once("://")?;
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-.:[]".contains(&byte);
            let is_host = !host.is_empty() && host.bytes().all(plain);
            (["http", "https"].contains(&scheme) && is_host).then_some(())
        };
        if text == "*" || is_origin().is_some() {
            return Ok(Self(text));
        }
        Err(ValueError::Origin(text))
    }
}

impl TryFrom<String> for RoutePath {
    type Error = ValueError;

    fn try_from(text: String) -> Result<Self, ValueError> {
        let path = text.strip_suffix('/').unwrap_or(&text);
        if path.starts_with("/v1/") && is_plain_path(path) {
            return Ok(Self(text));
        }
        Err(ValueError::Route(text))
    }
}

impl TryFrom<u64> for Seconds {
    type Error = ValueError;

    fn try_from(secs: u64) -> Result<Self, ValueError> {
        if secs > TIMEOUT_SECS_MAX {
            return Err(ValueError::Seconds(secs));
        }
        Ok(Self(secs))
    }
}

impl TryFrom<u64> for ConnectMillis {
    type Error = ValueError;

    fn try_from(millis: u64) -> Result<Self, ValueError> {
        if millis == 0 || millis > CONNECT_TIMEOUT_MS_MAX {
            return Err(ValueError::ConnectMillis(millis));
        }
        Ok(Self(millis))
    }
}

/// Whether no HTTP client or server resolves the path to another one: `..`, escapes and backslashes
/// would leave a path's folder.
pub(crate) fn is_plain_path(path: &str) -> bool {
    let is_plain = |segment: &str| {
        let mut bytes = segment.bytes();
        !segment.is_empty()
            && !segment.bytes().all(|byte| byte == b'.')
            && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte))
    };
    path.split('/').skip(1).all(is_plain)
}
