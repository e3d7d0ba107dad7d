//! One `--worker`: `URL[,kv=tcp://H:P][,replay=tcp://H:P][,id=NAME][,ranks=N]`.

use std::num::NonZeroU32;
use std::str::FromStr;

use warmroute_process::engine_args::is_endpoint;
use warmroute_proto::WorkerId;
use warmroute_proto::registry::RANKS_MAX;

/// A vLLM server as the operator specifies it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerSpec {
    pub id: WorkerId,
    /// `http://host:port[/path]`, without a trailing slash.
    pub url: String,
    /// Where the engine publishes its KV events (rank 0; rank r adds r to the port). `None`:
    /// queried from the engine's `/kv_event_sources`.
    pub kv: Option<String>,
    /// Where the engine replays its KV events.
    pub replay: Option<String>,
    pub ranks: NonZeroU32,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkerSpecError {
    #[error("the worker URL {0:?} is not http://HOST:PORT")]
    Url(String),
    #[error("{0:?} is none of kv=, replay=, id=, ranks=")]
    Key(String),
    #[error("{0}= is given twice")]
    Twice(&'static str),
    #[error("{key}={value:?} is not tcp://HOST:PORT or ipc://PATH")]
    Endpoint { key: &'static str, value: String },
    #[error("ranks={0:?} is not a number from 1 to {RANKS_MAX}")]
    Ranks(String),
    #[error("id= is empty")]
    EmptyId,
    #[error("replay= needs kv=")]
    ReplayWithoutKv,
}

impl FromStr for WorkerSpec {
    type Err = WorkerSpecError;

    fn from_str(text: &str) -> Result<Self, WorkerSpecError> {
        let mut parts = text.split(',').map(str::trim);
        let given = parts.next().unwrap_or_default();
        let url = worker_url(given).ok_or_else(|| WorkerSpecError::Url(given.to_owned()))?;
        let (mut kv, mut replay, mut id, mut ranks) = (None, None, None, None);
        for part in parts {
            let (key, value) = part
                .split_once('=')
                .ok_or_else(|| WorkerSpecError::Key(part.to_owned()))?;
            match key {
                "kv" => set(&mut kv, "kv", endpoint("kv", value)?)?,
                "replay" => set(&mut replay, "replay", endpoint("replay", value)?)?,
                "id" if value.is_empty() => return Err(WorkerSpecError::EmptyId),
                "id" => set(&mut id, "id", WorkerId::from(value))?,
                "ranks" => set(&mut ranks, "ranks", rank_count(value)?)?,
                _ => return Err(WorkerSpecError::Key(part.to_owned())),
            }
        }
        if replay.is_some() && kv.is_none() {
            return Err(WorkerSpecError::ReplayWithoutKv);
        }
        let id = id.unwrap_or_else(|| default_id(&url));
        Ok(Self {
            id,
            url,
            kv,
            replay,
            ranks: ranks.unwrap_or(NonZeroU32::MIN),
        })
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

fn worker_url(text: &str) -> Option<String> {
    let url = reqwest::Url::parse(text).ok()?;
    let plain = url.scheme() == "http"
        && url.host_str().is_some_and(|host| !host.is_empty())
        && url.username().is_empty()
        && url.password().is_none()
        && url.query().is_none()
        && url.fragment().is_none();
    plain.then(|| url.as_str().trim_end_matches('/').to_owned())
}

fn endpoint(key: &'static str, value: &str) -> Result<String, WorkerSpecError> {
    let value = value.to_owned();
    if is_endpoint(&value) {
        Ok(value)
    } else {
        Err(WorkerSpecError::Endpoint { key, value })
    }
}

fn rank_count(value: &str) -> Result<NonZeroU32, WorkerSpecError> {
    value
        .parse()
        .ok()
        .filter(|ranks: &NonZeroU32| ranks.get() <= RANKS_MAX)
        .ok_or_else(|| WorkerSpecError::Ranks(value.to_owned()))
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
            ("https://h:1", WorkerSpecError::Url("https://h:1".into())),
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
            ("http://h:1,id=", WorkerSpecError::EmptyId),
            ("http://h:1,id=a,id=b", WorkerSpecError::Twice("id")),
            ("http://h:1,port=1", WorkerSpecError::Key("port=1".into())),
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
        ] {
            assert_eq!(parse(text), Err(error), "{text}");
        }
    }
}
