//! A shim's configuration, validated by its caller, and the endpoints of its ranks.

use std::sync::Arc;

use warmroute_process::engine_args::is_event_route;
use warmroute_process::tls::EngineTls;
use warmroute_proto::registry::WorkerRole;
use warmroute_proto::{BlockSize, DpRank, Namespace, WorkerId};

use crate::engine_key::EngineKeySource;
use crate::mirror::Assumptions;
use crate::state_dir::CheckpointStore;

/// One shim's configuration: one vLLM server with all its ranks.
#[derive(Clone, Debug)]
pub struct ShimConfig {
    pub namespace: Namespace,
    pub worker: WorkerId,
    /// The engine's HTTP address as seen by the shim, without a trailing slash.
    pub worker_url: String,
    /// The engine's HTTP address as seen by routers.
    pub advertise_url: String,
    /// Sent with every request to the engine.
    pub engine_key: EngineKeySource,
    /// TLS of an `https://` URL. `None`: with the system's authorities.
    pub engine_tls: Option<EngineTls>,
    /// The live endpoint of rank 0; rank r is r ports higher. Or the HTTP route of all ranks' events.
    /// `None`: the engine reports it.
    pub kv_endpoint: Option<String>,
    /// The replay endpoint, likewise.
    pub kv_replay_endpoint: Option<String>,
    pub ranks: u32,
    pub role: WorkerRole,
    /// Live messages of other topics are dropped.
    pub topic: Option<String>,
    /// The block size that events must have. `None`: the size that events report.
    pub block_size: Option<BlockSize>,
    pub assume: Assumptions,
    /// Bytes of records of one rank that may wait for the log. Above, a new generation replaces them.
    pub outbox_bytes_max: usize,
    /// Bytes of live batches of one rank that may wait for a replay's end.
    pub buffer_bytes_max: usize,
    /// Checkpoint storage. Without it a restarted shim knows only what the engine replays.
    pub checkpoints: Option<Arc<dyn CheckpointStore>>,
}

/// The default bound of a rank's outbox: minutes of a busy engine.
pub const OUTBOX_BYTES_MAX: usize = 64 << 20;

/// The default bound of live batches that wait for a replay.
const BUFFER_BYTES_MAX: usize = 64 << 20;

impl ShimConfig {
    /// One rank; the engine reports everything else.
    #[must_use]
    pub fn new(namespace: Namespace, worker: WorkerId, worker_url: String) -> Self {
        Self {
            namespace,
            worker,
            advertise_url: worker_url.clone(),
            worker_url,
            engine_key: EngineKeySource::default(),
            engine_tls: None,
            kv_endpoint: None,
            kv_replay_endpoint: None,
            ranks: 1,
            role: WorkerRole::Both,
            topic: None,
            block_size: None,
            assume: Assumptions::default(),
            outbox_bytes_max: OUTBOX_BYTES_MAX,
            buffer_bytes_max: BUFFER_BYTES_MAX,
            checkpoints: None,
        }
    }
}

/// The addresses of one rank's sockets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Endpoints {
    pub live: Option<String>,
    pub replay: Option<String>,
}

impl Endpoints {
    /// The events come from a route that hands out each of them once.
    pub(crate) fn is_route(&self) -> bool {
        self.live.as_deref().is_some_and(is_event_route)
    }
}

/// A rank's endpoint as vLLM derives it from rank 0's: its port plus the rank.
pub(crate) fn endpoint_of_rank(template: &str, rank: DpRank) -> Option<String> {
    if rank.0 == 0 || is_event_route(template) {
        return Some(template.to_owned());
    }
    let (host, port) = template.strip_prefix("tcp://")?.rsplit_once(':')?;
    let port = u32::from(port.parse::<u16>().ok()?) + rank.0;
    let port = u16::try_from(port).ok()?;
    Some(format!("tcp://{host}:{port}"))
}

/// The address for peers of an endpoint that the engine binds: a wildcard host becomes the engine's
/// own.
pub(crate) fn reachable(endpoint: &str, worker_url: &str) -> Option<String> {
    let Some(rest) = endpoint.strip_prefix("tcp://") else {
        return Some(endpoint.to_owned());
    };
    let (host, port) = rest.rsplit_once(':')?;
    match host {
        "*" | "0.0.0.0" | "[::]" | "::" => {
            Some(format!("tcp://{}:{port}", host_of_url(worker_url)?))
        }
        _ => Some(endpoint.to_owned()),
    }
}

fn host_of_url(url: &str) -> Option<&str> {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split(['/', '?']).next()?;
    let authority = authority.rsplit('@').next()?;
    if authority.starts_with('[') {
        return authority.split_inclusive(']').next();
    }
    authority.split(':').next().filter(|host| !host.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_adds_to_the_port() {
        let of = |template, rank| endpoint_of_rank(template, DpRank(rank));
        assert_eq!(of("tcp://h:5557", 0).as_deref(), Some("tcp://h:5557"));
        assert_eq!(of("tcp://h:5557", 3).as_deref(), Some("tcp://h:5560"));
        assert_eq!(of("tcp://[::1]:7", 1).as_deref(), Some("tcp://[::1]:8"));
        assert_eq!(of("tcp://h:65535", 1), None);
        assert_eq!(of("ipc:///x", 1), None);
        assert_eq!(of("http://h:1/x", 1).as_deref(), Some("http://h:1/x"));
    }

    #[test]
    fn a_wildcard_host_becomes_the_engines() {
        let of = |endpoint, url| reachable(endpoint, url);
        assert_eq!(
            of("tcp://*:5557", "http://engine:8000/v1").as_deref(),
            Some("tcp://engine:5557")
        );
        assert_eq!(
            of("tcp://0.0.0.0:1", "http://u:p@[::1]:8000").as_deref(),
            Some("tcp://[::1]:1")
        );
        assert_eq!(of("tcp://a:1", "http://b").as_deref(), Some("tcp://a:1"));
        assert_eq!(of("ipc:///x", "http://b").as_deref(), Some("ipc:///x"));
    }
}
