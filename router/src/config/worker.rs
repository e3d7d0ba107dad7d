//! One worker of an embedded router, as `--worker`, a file or the API names it:
//! `URL[,kv=tcp://H:P][,replay=tcp://H:P][,id=NAME][,ranks=N][,role=ROLE][,key_file=FILE]
//! [,assume=WHAT]…`.

use std::num::NonZeroU32;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use clap::ValueEnum as _;
use serde::{Deserialize, Deserializer};
use warmroute_process::engine_args::{is_endpoint, is_event_route, is_route_of};
use warmroute_process::tls::socket_of;
use warmroute_proto::WorkerId;
use warmroute_proto::registry::{RANKS_MAX, UnknownRole, WorkerRole};
use warmroute_shim::args::Assumed;
use warmroute_shim::{EngineKey, EngineKeyError};

/// Longest name, in bytes: a name is part of keys, subjects and metric labels.
const ID_BYTES_MAX: usize = 256;

/// A vLLM server as the operator specifies it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "WorkerFields")]
pub struct WorkerSpec {
    pub id: WorkerId,
    /// `http[s]://host:port[/path]`, without a trailing slash.
    pub url: String,
    /// Where the engine publishes its KV events (rank 0; rank r adds r to the port). `None`:
    /// queried from the engine's `/kv_event_sources`. TensorRT-LLM has a route of its HTTP.
    pub kv: Option<String>,
    /// Where the engine replays its KV events.
    pub replay: Option<String>,
    pub ranks: NonZeroU32,
    pub role: WorkerRole,
    /// Facts about the engine that its events do not show.
    pub assume: Vec<Assumed>,
    pub key_file: Option<PathBuf>,
    /// The engine's API key: the content of `key_file`, or the text that the API got.
    pub key: Option<EngineKey>,
}

/// Why a worker's key is not known.
#[derive(Debug, thiserror::Error)]
#[error("worker {worker}: key_file {path:?}: {error}")]
pub struct WorkerKeyError {
    worker: WorkerId,
    path: PathBuf,
    error: EngineKeyError,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkerSpecError {
    #[error("the worker URL {0:?} is not http://HOST:PORT, https://HOST:PORT or unix:/PATH")]
    Url(String),
    #[error("the worker URL {0:?} has no port: add the engine's, vLLM's is :8000, or :80")]
    Port(String),
    #[error("{0:?} is none of kv=, replay=, id=, ranks=, role=, key_file=, assume=")]
    Key(String),
    #[error("assume={0:?} is no fact that can be declared")]
    Assume(String),
    #[error("{0}= is given twice")]
    Twice(&'static str),
    #[error(
        "{key}={value:?} is not tcp://HOST:PORT, ipc://PATH or, for kv=, http://HOST:PORT/PATH"
    )]
    Endpoint { key: &'static str, value: String },
    #[error("kv={0:?} is not of the worker's server, whose key it would get")]
    OtherServer(String),
    #[error("ranks={0:?} is not a number from 1 to {RANKS_MAX}")]
    Ranks(String),
    #[error("role= {0}")]
    Role(#[from] UnknownRole),
    #[error("id= has not between 1 and {ID_BYTES_MAX} bytes")]
    Id,
    #[error("replay= needs the socket of kv=")]
    ReplayWithoutKv,
    #[error("key and key_file exclude each other")]
    TwoKeys,
}

/// A worker in JSON or TOML, with the keys of `--worker`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct WorkerFields {
    url: String,
    kv: Option<String>,
    replay: Option<String>,
    id: Option<String>,
    ranks: Option<u32>,
    role: Option<WorkerRole>,
    assume: Vec<Assumed>,
    key_file: Option<PathBuf>,
    /// For the API only.
    #[serde(deserialize_with = "secret")]
    key: Option<EngineKey>,
}

/// A key. An error does not quote it.
fn secret<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<EngineKey>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    let key = text.map(|text| EngineKey::parse(&text)).transpose();
    key.map_err(|error| serde::de::Error::custom(format_args!("key: {error}")))
}

impl TryFrom<WorkerFields> for WorkerSpec {
    type Error = WorkerSpecError;

    fn try_from(fields: WorkerFields) -> Result<Self, WorkerSpecError> {
        let Some(url) = worker_url(&fields.url) else {
            return Err(WorkerSpecError::Url(fields.url));
        };
        if lacks_port(&fields.url) {
            return Err(WorkerSpecError::Port(fields.url));
        }
        let id = match fields.id {
            Some(id) if id.is_empty() || id.len() > ID_BYTES_MAX => {
                return Err(WorkerSpecError::Id);
            }
            Some(id) => WorkerId::from(id.as_str()),
            None => default_id(&url),
        };
        let is_route = fields.kv.as_deref().is_some_and(is_event_route);
        let kv = match fields.kv {
            Some(kv) if is_route && !is_route_of(&kv, &url) => {
                return Err(WorkerSpecError::OtherServer(kv));
            }
            Some(kv) if !is_route => Some(endpoint("kv", kv)?),
            kv => kv,
        };
        let replay = fields.replay.map(|replay| endpoint("replay", replay));
        let replay = replay.transpose()?;
        if replay.is_some() && (kv.is_none() || is_route) {
            return Err(WorkerSpecError::ReplayWithoutKv);
        }
        if fields.key.is_some() && fields.key_file.is_some() {
            return Err(WorkerSpecError::TwoKeys);
        }
        let ranks = fields.ranks.unwrap_or(1);
        let in_range = NonZeroU32::new(ranks).filter(|ranks| ranks.get() <= RANKS_MAX);
        Ok(Self {
            id,
            url,
            kv,
            replay,
            ranks: in_range.ok_or_else(|| WorkerSpecError::Ranks(ranks.to_string()))?,
            role: fields.role.unwrap_or_default(),
            assume: fields.assume,
            key_file: fields.key_file,
            key: fields.key,
        })
    }
}

impl WorkerSpec {
    /// Reads the file of its key, whose path is relative to `dir`.
    pub(crate) fn read_key(&mut self, dir: &Path) -> Result<(), WorkerKeyError> {
        let Some(path) = self.key_file.as_ref().map(|path| dir.join(path)) else {
            return Ok(());
        };
        let key = EngineKey::read(&path).map_err(|error| WorkerKeyError {
            worker: self.id.clone(),
            path,
            error,
        })?;
        self.key = Some(key);
        Ok(())
    }
}

impl FromStr for WorkerSpec {
    type Err = WorkerSpecError;

    fn from_str(text: &str) -> Result<Self, WorkerSpecError> {
        let mut parts = text.split(',').map(str::trim);
        let mut fields = WorkerFields {
            url: parts.next().unwrap_or_default().to_owned(),
            ..WorkerFields::default()
        };
        for part in parts {
            let (key, value) = part
                .split_once('=')
                .ok_or_else(|| WorkerSpecError::Key(part.to_owned()))?;
            match key {
                "kv" => set(&mut fields.kv, "kv", value.to_owned())?,
                "replay" => set(&mut fields.replay, "replay", value.to_owned())?,
                "id" => set(&mut fields.id, "id", value.to_owned())?,
                "key_file" => set(&mut fields.key_file, "key_file", PathBuf::from(value))?,
                "ranks" => {
                    let ranks = value.parse();
                    let ranks = ranks.map_err(|_| WorkerSpecError::Ranks(value.to_owned()))?;
                    set(&mut fields.ranks, "ranks", ranks)?;
                }
                "role" => set(&mut fields.role, "role", value.parse()?)?,
                "assume" => {
                    let assumed = Assumed::from_str(value, false);
                    let unknown = |_| WorkerSpecError::Assume(value.to_owned());
                    fields.assume.push(assumed.map_err(unknown)?);
                }
                _ => return Err(WorkerSpecError::Key(part.to_owned())),
            }
        }
        fields.try_into()
    }
}

/// The name of a worker without `id=` is its address.
fn default_id(url: &str) -> WorkerId {
    let address = url.split_once("://").map_or(url, |(_, address)| address);
    WorkerId::from(address)
}

fn set<T>(slot: &mut Option<T>, key: &'static str, value: T) -> Result<(), WorkerSpecError> {
    match slot.replace(value) {
        Some(_) => Err(WorkerSpecError::Twice(key)),
        None => Ok(()),
    }
}

/// A forgotten port would be 80, where no engine listens by default. For https it is 443, where a
/// proxy does.
fn lacks_port(text: &str) -> bool {
    let address = text.strip_prefix("http://").unwrap_or(":");
    let authority = address.split('/').next().unwrap_or_default();
    !authority
        .rsplit(']')
        .next()
        .unwrap_or_default()
        .contains(':')
}

fn worker_url(text: &str) -> Option<String> {
    if let Some(path) = socket_of(text) {
        return socket_url(path);
    }
    let url = reqwest::Url::parse(text).ok()?;
    let plain = ["http", "https"].contains(&url.scheme())
        && url.host_str().is_some_and(|host| !host.is_empty())
        && url.username().is_empty()
        && url.password().is_none()
        && url.query().is_none()
        && url.fragment().is_none();
    plain.then(|| url.as_str().trim_end_matches('/').to_owned())
}

/// One form for each path: two workers must not be one engine.
fn socket_url(path: &Path) -> Option<String> {
    let plain = |part: &Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    let path: PathBuf = path
        .components()
        .all(|part| plain(&part))
        .then(|| path.components().collect())?;
    Some(format!("unix:{}", path.to_str()?))
}

fn endpoint(key: &'static str, value: String) -> Result<String, WorkerSpecError> {
    if is_endpoint(&value) {
        Ok(value)
    } else {
        Err(WorkerSpecError::Endpoint { key, value })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<WorkerSpec, WorkerSpecError> {
        text.parse()
    }

    #[test]
    fn a_full_entry() {
        let spec = parse(
            "http://10.0.0.1:8000/,kv=tcp://10.0.0.1:5557,replay=tcp://10.0.0.1:5657,id=a,ranks=2",
        )
        .unwrap();
        assert_eq!(spec.url, "http://10.0.0.1:8000");
        assert_eq!(spec.id.as_str(), "a");
        assert_eq!(spec.kv.as_deref(), Some("tcp://10.0.0.1:5557"));
        assert_eq!(spec.replay.as_deref(), Some("tcp://10.0.0.1:5657"));
        assert_eq!(spec.ranks.get(), 2);
        assert_eq!(spec.assume, []);
        assert_eq!(spec.role, WorkerRole::Both);
        let spec = parse("http://h:1,role=prefill").unwrap();
        assert_eq!(spec.role, WorkerRole::Prefill);
        let table = "url = \"http://h:1\"\nrole = \"decode\"";
        let spec: WorkerSpec = toml::from_str(table).unwrap();
        assert_eq!(spec.role, WorkerRole::Decode);
        let text = "https://h:1/,key_file=/run/key,assume=no-lora,assume=plain-lookup";
        let spec = parse(text).unwrap();
        assert_eq!(spec.url, "https://h:1");
        assert_eq!(spec.assume, [Assumed::NoLora, Assumed::PlainLookup]);
        assert_eq!(spec.key_file, Some("/run/key".into()));
        let spec = parse("http://h:1,kv=http://h:1/kv_cache_events").unwrap();
        assert_eq!(spec.kv.as_deref(), Some("http://h:1/kv_cache_events"));
        let other = "http://other:1/kv_cache_events";
        assert_eq!(
            parse(&format!("http://h:1,kv={other}")).unwrap_err(),
            WorkerSpecError::OtherServer(other.to_owned())
        );
        parse("unix:/run/x,kv=http://localhost/kv_cache_events").unwrap();
        let table = "url = \"http://h:1\"\nassume = [\"plain-lookup\"]";
        let spec: WorkerSpec = toml::from_str(table).unwrap();
        assert_eq!(spec.assume, [Assumed::PlainLookup]);
    }

    #[test]
    fn a_socket_is_an_address() {
        let spec = parse("unix:/run/vllm.sock,kv=ipc:///run/kv").unwrap();
        assert_eq!(spec.url, "unix:/run/vllm.sock");
        assert_eq!(spec.id.as_str(), "unix:/run/vllm.sock");
        for same in ["unix:///run/vllm.sock", "unix:/run//./vllm.sock"] {
            assert_eq!(parse(same).unwrap().url, spec.url);
        }
        let long = format!("unix:/{}", "x".repeat(107));
        let parent = "unix:/run/x/../vllm.sock";
        for bad in ["unix:", "unix:run/vllm.sock", "unix://h/run", parent, &long] {
            assert_eq!(parse(bad), Err(WorkerSpecError::Url(bad.into())));
        }
    }

    #[test]
    fn the_address_is_the_default_name() {
        let spec = parse("http://h:1").unwrap();
        assert_eq!(spec.id.as_str(), "h:1");
        assert_eq!(spec.kv, None);
        assert_eq!(spec.ranks.get(), 1);
    }

    #[test]
    fn invalid_specifications_are_refused() {
        for (text, error) in [
            ("", WorkerSpecError::Url(String::new())),
            ("ftp://h:1", WorkerSpecError::Url("ftp://h:1".into())),
            ("h:8000", WorkerSpecError::Url("h:8000".into())),
            (
                "http://u:p@h:1",
                WorkerSpecError::Url("http://u:p@h:1".into()),
            ),
            ("http://h:1,ranks=0", WorkerSpecError::Ranks("0".into())),
            (
                "http://h:1,ranks=9999",
                WorkerSpecError::Ranks("9999".into()),
            ),
            ("http://h:1,id=", WorkerSpecError::Id),
            ("http://h:1,id=a,id=b", WorkerSpecError::Twice("id")),
            ("http://h:1,port=1", WorkerSpecError::Key("port=1".into())),
            (
                "http://h:1,role=x",
                WorkerRole::from_str("x").unwrap_err().into(),
            ),
            ("http://h:1,assume=x", WorkerSpecError::Assume("x".into())),
            ("http://h:1,kv", WorkerSpecError::Key("kv".into())),
            (
                "http://h:1,kv=tcp://*:5557",
                WorkerSpecError::Endpoint {
                    key: "kv",
                    value: "tcp://*:5557".into(),
                },
            ),
            (
                "http://h:1,replay=tcp://h:2",
                WorkerSpecError::ReplayWithoutKv,
            ),
            (
                "http://h:1,kv=http://h:1/events,replay=tcp://h:2",
                WorkerSpecError::ReplayWithoutKv,
            ),
        ] {
            assert_eq!(parse(text), Err(error), "{text}");
        }
    }
}
