//! From the text of a settings file to [`Settings`].

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read as _};
use std::num::NonZeroUsize;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderValue;
use serde::Deserialize;
use warmroute_process::access::PortKeys;
use warmroute_process::server::HalfClosed;
use warmroute_process::tls::TlsError;
use warmroute_proto::WorkerId;

use super::WorkerRule;
use super::engines::EngineSettings;
use super::keys::{AdminSettings, ExplainRule, InvalidSettings};
use super::models::ModelTable;
use super::pairs::UncachedThreshold;
use super::picker::EndpointPickerSettings;
use super::tenants::TenantRules;
use super::tls::PortTls;
use super::traces::TracingSettings;

use crate::clock::unix_time;
use crate::config::{WorkerKeyError, WorkerSetError, WorkerSpec};
use crate::route::PairThreshold;

/// A file of settings has a few hundred bytes, one of 1,024 workers some hundred KiB.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Room for the longest prompts in each of a recording's files.
const RECORDING_BYTES_MIN: u64 = 1 << 20;

/// One day.
const TIMEOUT_SECS_MAX: u32 = 86_400;

/// One minute.
const TIMEOUT_MS_MAX: u32 = 60_000;

/// A bound below the mean load leaves requests without a worker.
const LOAD_PERCENT_MIN: u32 = 100;

/// Far more than any machine has processors.
const THREADS_MAX: u32 = 1024;

/// What the file sets. `docs/REFERENCE.md` describes each key.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    pub(super) admin: AdminSettings,
    access_log: PathBuf,
    pub(crate) cors_origins: BTreeSet<WebOrigin>,
    pub(crate) extra_routes: BTreeSet<RoutePath>,
    pub(crate) completion_prompts: CompletionPrompts,
    connect_timeout_ms: Ranged<1, TIMEOUT_MS_MAX>,
    drain_timeout_secs: Seconds,
    pub(crate) endpoint_picker: EndpointPickerSettings,
    engine_wait_timeout_secs: Seconds,
    first_token_timeout_secs: Seconds,
    half_closed_clients: HalfClosedRule,
    max_prompt_bytes: usize,
    max_tokenizer_bytes: u64,
    pub(crate) models: ModelTable,
    models_dir: PathBuf,
    pub(crate) multimodal: MultimodalRule,
    pd_uncached_threshold: UncachedThreshold,
    prefix_hash_load_percent: Ranged<LOAD_PERCENT_MIN, { u32::MAX }>,
    prompt_timeout_ms: Ranged<1, TIMEOUT_MS_MAX>,
    recording_dir: PathBuf,
    recording_max_bytes: RecordingBytes,
    /// 0: as many as the machine's processors suggest.
    request_threads: Ranged<0, THREADS_MAX>,
    pub(crate) resume_streams: ResumeRule,
    pub(crate) tenant_hint: TenantHint,
    pub(super) tls: PortTls,
    tracing: TracingSettings,
    pub(crate) worker_hint: WorkerHint,
    pub(crate) workers: Vec<WorkerSpec>,
    pub(super) workers_file: PathBuf,
    #[serde(deserialize_with = "super::tenants::tenants")]
    pub(crate) tenants: Arc<[TenantRules]>,
    pub(super) engines: EngineSettings,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            admin: AdminSettings::default(),
            access_log: PathBuf::new(),
            cors_origins: BTreeSet::new(),
            extra_routes: BTreeSet::new(),
            completion_prompts: CompletionPrompts::Text,
            connect_timeout_ms: Ranged(1000),
            drain_timeout_secs: Ranged(30),
            endpoint_picker: EndpointPickerSettings::default(),
            engine_wait_timeout_secs: Ranged(0),
            first_token_timeout_secs: Ranged(0),
            half_closed_clients: HalfClosedRule::Abort,
            max_prompt_bytes: 8 << 20,
            max_tokenizer_bytes: 1 << 30,
            models: ModelTable::default(),
            models_dir: PathBuf::new(),
            multimodal: MultimodalRule::Load,
            pd_uncached_threshold: UncachedThreshold::default(),
            prefix_hash_load_percent: Ranged(125),
            prompt_timeout_ms: Ranged(5000),
            recording_dir: PathBuf::new(),
            recording_max_bytes: RecordingBytes(1 << 30),
            request_threads: Ranged(0),
            resume_streams: ResumeRule::Off,
            tenant_hint: TenantHint::Ignore,
            tls: PortTls::default(),
            tracing: TracingSettings::default(),
            worker_hint: WorkerHint::Ignore,
            workers: Vec::new(),
            workers_file: PathBuf::new(),
            tenants: [].into(),
            engines: EngineSettings::default(),
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

/// What engines get as the prompt of a text completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum CompletionPrompts {
    /// The client's text.
    #[default]
    Text,
    /// The router's token ids, where all workers are known to have the same.
    TokenIds,
}

/// What is known of prompts with images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum MultimodalRule {
    /// Their bytes: they are routed by load, and by what was sent before.
    #[default]
    Load,
    /// Their blocks, as an engine renders them.
    Render,
}

/// Streams that are resumed on another worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ResumeRule {
    #[default]
    Off,
    /// Text completions.
    Completions,
    /// Also chats: the engines run no parser on answers without tools.
    All,
}

/// What becomes of the worker and rank that a client names in `x-dynamo-…` headers or in vLLM's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum WorkerHint {
    #[default]
    Ignore,
    /// They get the request while they can take it.
    Follow,
}

/// What becomes of the tenant that a client names in `x-tenant-id`, where the router has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum TenantHint {
    #[default]
    Ignore,
    /// It divides the engines' caches.
    CacheSalt,
}

/// An origin of web pages, or `*`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct WebOrigin(String);

/// A path that is forwarded, or the beginning of such paths if it ends with `/`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct RoutePath(String);

/// A whole number from `MIN` to `MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u32")]
pub(super) struct Ranged<const MIN: u32, const MAX: u32>(pub(super) u32);

pub(super) type Seconds = Ranged<0, TIMEOUT_SECS_MAX>;

#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("cannot read the settings: {0}")]
    Read(#[from] io::Error),
    #[error("the settings are a pipe, which cannot be read again")]
    Pipe,
    #[error("the settings have more than {FILE_BYTES_MAX} bytes")]
    TooLarge,
    #[error(transparent)]
    Invalid(#[from] InvalidSettings),
    #[error("workers_file {path:?}: {error}")]
    WorkersFile { path: PathBuf, error: Box<Self> },
    #[error("workers: {0}")]
    Workers(#[from] WorkerSetError),
    #[error("workers have no effect with --nats-url: each worker's shim registers it")]
    WorkersRegistered,
    #[error("all tenants, or a port's TLS or client_ca are gone: send SIGHUP to open the port")]
    OpensPort,
    #[error("engines.authorization = \"replace\" needs key_file")]
    NoEngineKey,
    #[error("engines.key_file {path:?}: {error}")]
    EngineKey { path: PathBuf, error: Box<Self> },
    #[error("engines.key_file {0:?} has no key on its first line")]
    BadEngineKey(PathBuf),
    #[error("engines.ca: {0}")]
    EngineCa(Box<TlsError>),
    #[error("{0}: certificate and key belong together, and client_ca needs both")]
    HalfTls(&'static str),
    #[error("{table}: {error}")]
    Tls {
        table: &'static str,
        error: Box<TlsError>,
    },
    #[error("worker {0}: write its key into a file of its own, and name it by key_file")]
    WorkerKey(WorkerId),
    #[error(transparent)]
    WorkerKeyFile(#[from] WorkerKeyError),
}

/// Why a value is refused. The parser adds the line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ValueError {
    #[error("{0:?} is not an origin such as https://chat.example.org, and not *")]
    Origin(String),
    #[error("{0:?} is not a plain path")]
    Route(String),
    #[error("{value} is not between {min} and {max}")]
    Range { value: u32, min: u32, max: u32 },
    #[error("{0:?} is not http://HOST:PORT")]
    OtlpEndpoint(String),
    #[error("{0} is less than {RECORDING_BYTES_MIN}")]
    RecordingBytes(u64),
    #[error("template arguments must be values of JSON")]
    TemplateKwargs,
}

impl Seconds {
    pub(super) const fn duration(self) -> Duration {
        Duration::from_secs(self.0 as u64)
    }
}

impl Settings {
    /// Reads the file, and the one of its workers.
    pub(super) fn load(path: &Path, rule: &WorkerRule) -> Result<Self, SettingsError> {
        let mut settings = Self::parse(&read(path)?)?;
        settings.add_workers_file(path)?;
        settings.read_worker_keys(path)?;
        settings.read_engine_files(path)?;
        settings.read_certificates(path)?;
        rule.check(&settings.workers)?;
        Ok(settings)
    }

    pub(crate) fn parse(text: &str) -> Result<Self, SettingsError> {
        Ok(toml::from_str(text).map_err(InvalidSettings::from)?)
    }

    /// Logs what is accepted and serves no client: tenants without a key, expired certificates.
    pub(super) fn warn_of_what_serves_no_client(&self) {
        let without = self.tenants.iter().filter(|tenant| tenant.keys.is_empty());
        let names: Vec<&str> = without.map(|tenant| tenant.name.as_str()).collect();
        if !names.is_empty() {
            tracing::warn!(
                tenants = names.join(", "),
                "tenants have no key, and admit no client"
            );
        }
        let now = i64::try_from(unix_time().as_secs()).unwrap_or(i64::MAX);
        for port in self.ports_with_expired_certificates(now) {
            tracing::warn!(
                port,
                "the certificate of this port has expired: clients refuse it"
            );
        }
    }

    /// Bound of the policy `prefix-hash`.
    pub(crate) const fn prefix_hash_load_percent(&self) -> u32 {
        self.prefix_hash_load_percent.0
    }

    /// Threads of the runtime that serves requests. `None`: as many as the processors suggest.
    pub(crate) const fn request_threads(&self) -> Option<NonZeroUsize> {
        NonZeroUsize::new(self.request_threads.0 as usize)
    }

    /// Without what belongs to one machine or is applied at the start only: ports, keys, paths,
    /// output and the router's own parameters. Routers of one fleet have the rest in common.
    pub(crate) fn shared(&self) -> Self {
        let mut tenants: Vec<_> = self.tenants.iter().map(TenantRules::without_keys).collect();
        tenants.sort_by(|one, other| one.name.as_str().cmp(other.name.as_str()));
        Self {
            cors_origins: self.cors_origins.clone(),
            extra_routes: self.extra_routes.clone(),
            completion_prompts: self.completion_prompts,
            connect_timeout_ms: self.connect_timeout_ms,
            engine_wait_timeout_secs: self.engine_wait_timeout_secs,
            first_token_timeout_secs: self.first_token_timeout_secs,
            half_closed_clients: self.half_closed_clients,
            max_prompt_bytes: self.max_prompt_bytes,
            models: self.models.without_paths(),
            multimodal: self.multimodal,
            pd_uncached_threshold: self.pd_uncached_threshold,
            prompt_timeout_ms: self.prompt_timeout_ms,
            resume_streams: self.resume_streams,
            tenant_hint: self.tenant_hint,
            worker_hint: self.worker_hint,
            tenants: tenants.into(),
            engines: self.engines.without_files(),
            ..Self::default()
        }
    }

    /// The keys of the admin port.
    pub(crate) fn admin_keys(&self) -> PortKeys {
        let asks_for_keys = self.is_admin_port_locked() || !self.admin.keys.is_empty();
        asks_for_keys.then(|| Arc::clone(&self.admin.keys))
    }

    /// Locks the admin port if it asks for keys under `before` and would not under these.
    pub(super) fn lock_admin_port_of(&mut self, before: &Self) {
        self.admin.is_locked = self.admin.keys.is_empty() && before.admin_keys().is_some();
    }

    /// Whether the admin port has lost its last key, and so admits no client.
    pub(super) fn is_admin_port_locked(&self) -> bool {
        self.admin.is_locked
    }

    /// Whether a port that asks for TLS or client certificates under `before`, or the public port
    /// for keys, does not do so under these.
    pub(super) fn opens_a_port_of(&self, before: &Self) -> bool {
        let public = self.tenants.is_empty() && !before.tenants.is_empty();
        let tls = self.tls.opens(&before.tls) || self.admin.tls.opens(&before.admin.tls);
        public || tls
    }

    /// The file of the access log, `-` for standard output; `None`: no log.
    pub(crate) fn access_log(&self) -> Option<PathBuf> {
        let path = &self.access_log;
        (!path.as_os_str().is_empty()).then(|| path.clone())
    }

    pub(crate) const fn tracing(&self) -> &TracingSettings {
        &self.tracing
    }

    pub(crate) const fn explain_headers(&self) -> ExplainRule {
        self.admin.explain_headers
    }

    /// Longest time to open a connection to an engine.
    pub(crate) const fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_timeout_ms.0 as u64)
    }

    /// Time from SIGTERM to the end of the last request.
    pub(crate) const fn drain_timeout(&self) -> Duration {
        self.drain_timeout_secs.duration()
    }

    /// Longest time for which a request waits for a worker; zero: none waits.
    pub(crate) const fn engine_wait_timeout(&self) -> Duration {
        self.engine_wait_timeout_secs.duration()
    }

    /// When requests are split between two workers.
    pub(crate) const fn pair_threshold(&self) -> PairThreshold {
        self.pd_uncached_threshold.0
    }

    /// Bytes of the largest prompt that is tokenized.
    pub(crate) const fn max_prompt_bytes(&self) -> usize {
        self.max_prompt_bytes
    }

    /// Longest time to prepare a prompt; then the request is routed by load.
    pub(crate) const fn prompt_timeout(&self) -> Duration {
        Duration::from_millis(self.prompt_timeout_ms.0 as u64)
    }

    /// Bytes of all tokenizers that are loaded, each as a `tokenizer.json`.
    pub(crate) const fn max_tokenizer_bytes(&self) -> u64 {
        self.max_tokenizer_bytes
    }

    /// Directory of models, by name; `None`: there is none.
    pub(crate) fn models_dir(&self) -> Option<&Path> {
        let dir = &self.models_dir;
        (!dir.as_os_str().is_empty()).then_some(dir)
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
        let timeout = self.first_token_timeout_secs.duration();
        (!timeout.is_zero()).then_some(timeout)
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

pub(super) fn read(path: &Path) -> Result<String, SettingsError> {
    let mut text = String::new();
    // Opening it would wait for a writer, and no change or signal would be noticed.
    if std::fs::metadata(path)?.file_type().is_fifo() {
        return Err(SettingsError::Pipe);
    }
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
        if path.starts_with('/') && is_plain_path(path) {
            return Ok(Self(text));
        }
        Err(ValueError::Route(text))
    }
}

impl<const MIN: u32, const MAX: u32> TryFrom<u32> for Ranged<MIN, MAX> {
    type Error = ValueError;

    fn try_from(value: u32) -> Result<Self, ValueError> {
        if (MIN..=MAX).contains(&value) {
            return Ok(Self(value));
        }
        Err(ValueError::Range {
            value,
            min: MIN,
            max: MAX,
        })
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
