//! One engine as the shim reaches it: its HTTP and the event sockets of its ranks.
//!
//! [`EngineLink`] and [`EngineFeed`] are the seam between the shim's tasks and the engine. [`VllmEngine`]
//! is the product's; the simulation has its own.

mod drained_feed;
mod http;
mod sglang;
mod trtllm;
mod zmq_feed;

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::Arc;

use reqwest::StatusCode;
use warmroute_process::engine_args::is_event_route;
use warmroute_process::tls::EngineTls;
use warmroute_proto::registry::Lora;
use warmroute_proto::{BlockSize, DpRank, EngineHealth, EngineSeq};

use crate::config::{Endpoints, ShimConfig};
use crate::source::{FlushResult, ReplayId};
use drained_feed::{DrainedFeed, EventDrain};
use http::EngineHttp;
use zmq_feed::ZmqFeed;

/// Messages of one socket in one read. Other sockets and tasks run in between.
pub const BURST_MAX: usize = 8;

/// The frames of one multipart message.
pub type Frames = Vec<Vec<u8>>;

/// What an engine's event sockets report.
#[derive(Debug)]
pub enum EngineEvent {
    Connected,
    Disconnected,
    Live(Frames),
    Replay(ReplayId, Frames),
}

/// The replay request did not go out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the replay request was not sent")]
pub struct ReplayNotSent;

/// One engine: HTTP and event sockets.
pub trait EngineLink: Send + Sync + 'static {
    type Feed: EngineFeed;

    /// The event feed of one rank. The sockets open at the first read.
    fn feed(&self, rank: DpRank, endpoints: Endpoints) -> Self::Feed;

    fn health(&self) -> impl Future<Output = EngineHealth> + Send;

    /// Why the last health check failed, as far as is known.
    fn fault(&self) -> Option<String> {
        None
    }

    fn info(&self) -> impl Future<Output = Result<EngineInfo, InfoError>> + Send;

    /// Calls so far that can reset the prefix cache; `None` if they are not readable.
    fn reset_calls(&self) -> impl Future<Output = Option<u64>> + Send;

    /// Lets the engine generate one token, unless it sleeps.
    fn flush(&self, request: FlushRequest) -> impl Future<Output = FlushResult> + Send;
}

/// A request for one token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlushRequest {
    pub model: String,
    /// `None` for an engine of one rank.
    pub rank: Option<DpRank>,
}

/// The event sockets of one rank.
pub trait EngineFeed: Send + 'static {
    /// Closes the sockets and opens others.
    fn reconnect(&mut self, endpoints: Endpoints);

    /// Requests every batch from `from` on. Abandons an earlier request.
    fn request_replay(&mut self, id: ReplayId, from: EngineSeq) -> Result<(), ReplayNotSent>;

    /// Waits for events. After [`BURST_MAX`] of them there may be more. Cancel-safe.
    fn receive(&mut self, events: &mut Vec<EngineEvent>) -> impl Future<Output = ()> + Send;

    /// A reader takes the events from all others: only the holder of the worker's lease may read.
    fn is_exclusive(&self) -> bool {
        false
    }

    /// Another process may have read an exclusive feed: nothing of before proves anything.
    fn paused(&mut self) {}
}

/// What the engine reports about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineInfo {
    pub models: Vec<String>,
    pub loras: Vec<Lora>,
    pub max_model_len: Option<u32>,
    pub block_size: Option<BlockSize>,
    pub blocks: Option<BlockCount>,
    /// It decodes speculatively; `None` if its metrics are not known.
    pub speculates: Option<bool>,
    /// It has a KV connector; `None` before a request shows it.
    pub connects: Option<bool>,
    pub version: Option<String>,
    /// `None` while the engine has not answered.
    pub resets: Option<ResetRoutes>,
    /// Calls so far that can reset the prefix cache; `None` if they are not readable.
    pub reset_calls: Option<u64>,
    /// By rank, if the engine reports them; `None` while the engine has not answered.
    pub endpoints: Option<BTreeMap<DpRank, Endpoints>>,
}

impl EngineInfo {
    /// Takes over what this reading did not learn. A busy engine's answer may be late once, which is
    /// no absence.
    pub(crate) fn keep(&mut self, known: &Self) {
        self.speculates = self.speculates.or(known.speculates);
        self.connects = self.connects.or(known.connects);
        self.resets = self.resets.or(known.resets);
        if self.endpoints.is_none() {
            self.endpoints.clone_from(&known.endpoints);
        }
    }

    /// Fails if the engine shows more data-parallel ranks than are configured: the others would get
    /// no request.
    pub(crate) fn check_ranks(self, configured: u32) -> Result<Self, InfoError> {
        let by_metrics = self.blocks.map_or(0, |blocks| blocks.ranks.get());
        let by_sources = self.endpoints.as_ref().map_or(0, BTreeMap::len) as u64;
        match u32::try_from(by_metrics.max(by_sources)).unwrap_or(u32::MAX) {
            found if found > configured => Err(InfoError::Ranks { found, configured }),
            _ => Ok(self),
        }
    }
}

/// Whether the engine's HTTP has routes that reset the prefix cache: vLLM's development mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetRoutes {
    Present,
    Absent,
}

/// KV blocks of all ranks that one engine server reports. vLLM shows no count for each rank, and
/// ranks may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCount {
    /// Sum over the ranks: no rank has more.
    pub sum: u64,
    pub ranks: NonZeroU64,
}

impl BlockCount {
    /// Mean over the ranks, rounded down.
    #[must_use]
    pub const fn per_rank(self) -> u64 {
        self.sum / self.ranks.get()
    }
}

/// Why the engine's facts are unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InfoError {
    #[error("status {0}: it asks for a key, or for another one (warmroute-shim --engine-key-file)")]
    Key(StatusCode),
    #[error("status {0}")]
    Status(StatusCode),
    #[error("no whole answer in time, or the connection broke")]
    Silence,
    #[error("no agreement on TLS: does --engine-ca or engines.ca name its authority?")]
    Tls,
    #[error("something unreadable")]
    Unreadable,
    #[error(
        "{found} data-parallel ranks, and {configured} configured: set ranks={found} of the worker \
         (warmroute-shim --ranks {found}); until then it is not registered"
    )]
    Ranks { found: u32, configured: u32 },
}

/// An engine's server: HTTP, and ZMQ sockets that one libzmq thread serves.
pub struct VllmEngine {
    http: EngineHttp,
    /// Not shared with other engines: its thread waits while it resolves a name.
    zmq: zmq::Context,
    /// The events come by HTTP.
    drain: Option<Arc<EventDrain>>,
}

impl VllmEngine {
    pub fn new(config: &ShimConfig, tls: &EngineTls) -> reqwest::Result<Self> {
        let mut http = EngineHttp::new(&config.worker_url, config.engine_key.clone(), tls)?;
        let route = config.kv_endpoint.as_deref();
        let route = route.filter(|endpoint| is_event_route(endpoint));
        let drain = route.map(|url| {
            let route = http.drain(url);
            EventDrain::new(route, config.ranks, config.block_size)
        });
        Ok(Self {
            http,
            zmq: zmq::Context::new(),
            drain: drain.map(Arc::new),
        })
    }
}

/// The feed of one rank, by the form in which its engine publishes.
pub enum RankFeed {
    Zmq(Box<ZmqFeed>),
    Drained(DrainedFeed),
}

impl EngineFeed for RankFeed {
    fn reconnect(&mut self, endpoints: Endpoints) {
        match self {
            Self::Zmq(feed) => feed.reconnect(endpoints),
            Self::Drained(feed) => feed.reconnect(endpoints),
        }
    }

    fn request_replay(&mut self, id: ReplayId, from: EngineSeq) -> Result<(), ReplayNotSent> {
        match self {
            Self::Zmq(feed) => feed.request_replay(id, from),
            Self::Drained(feed) => feed.request_replay(id, from),
        }
    }

    async fn receive(&mut self, events: &mut Vec<EngineEvent>) {
        match self {
            Self::Zmq(feed) => feed.receive(events).await,
            Self::Drained(feed) => feed.receive(events).await,
        }
    }

    fn is_exclusive(&self) -> bool {
        match self {
            Self::Zmq(feed) => feed.is_exclusive(),
            Self::Drained(feed) => feed.is_exclusive(),
        }
    }

    fn paused(&mut self) {
        match self {
            Self::Zmq(feed) => feed.paused(),
            Self::Drained(feed) => feed.paused(),
        }
    }
}

impl EngineLink for VllmEngine {
    type Feed = RankFeed;

    fn feed(&self, rank: DpRank, endpoints: Endpoints) -> RankFeed {
        match &self.drain {
            Some(drain) => RankFeed::Drained(DrainedFeed::new(Arc::clone(drain), rank)),
            None => {
                let context = self.zmq.clone();
                RankFeed::Zmq(Box::new(ZmqFeed::new(context, rank.to_string(), endpoints)))
            }
        }
    }

    async fn health(&self) -> EngineHealth {
        self.http.health().await
    }

    fn fault(&self) -> Option<String> {
        self.http.fault()
    }

    async fn info(&self) -> Result<EngineInfo, InfoError> {
        self.http.info().await
    }

    async fn reset_calls(&self) -> Option<u64> {
        self.http.reset_calls().await
    }

    async fn flush(&self, request: FlushRequest) -> FlushResult {
        self.http.flush(&request).await
    }
}
