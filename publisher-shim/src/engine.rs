//! One engine as the shim reaches it: its HTTP and the event sockets of its ranks.
//!
//! [`EngineLink`] and [`EngineFeed`] are the seam between the shim's tasks and the engine. [`VllmEngine`]
//! is the product's; the simulation has its own.

mod http;
mod zmq_feed;

use std::collections::BTreeMap;

use reqwest::StatusCode;
use warmroute_proto::registry::Lora;
use warmroute_proto::{BlockSize, DpRank, EngineHealth, EngineSeq};

use crate::config::Endpoints;
use crate::source::ReplayId;
use http::EngineHttp;
pub use http::{EngineKey, EngineKeyError};
pub use zmq_feed::ZmqFeed;

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

    fn info(&self) -> impl Future<Output = Result<EngineInfo, InfoError>> + Send;
}

/// The event sockets of one rank.
pub trait EngineFeed: Send + 'static {
    /// Closes the sockets and opens others.
    fn reconnect(&mut self, endpoints: Endpoints);

    /// Requests every batch from `from` on. Abandons an earlier request.
    fn request_replay(&mut self, id: ReplayId, from: EngineSeq) -> Result<(), ReplayNotSent>;

    /// Waits for events. After [`BURST_MAX`] of them there may be more. Cancel-safe.
    fn receive(&mut self, events: &mut Vec<EngineEvent>) -> impl Future<Output = ()> + Send;
}

/// What the engine reports about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineInfo {
    pub models: Vec<String>,
    pub loras: Vec<Lora>,
    pub max_model_len: Option<u32>,
    pub block_size: Option<BlockSize>,
    pub blocks: Option<u64>,
    pub version: Option<String>,
    /// By rank, if the engine reports them.
    pub endpoints: BTreeMap<DpRank, Endpoints>,
}

/// Why the engine's facts are unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InfoError {
    #[error("status {0}: it asks for a key, or for another one (warmroute-shim --engine-key-file)")]
    Key(StatusCode),
    #[error("status {0}")]
    Status(StatusCode),
    #[error("no whole answer in time")]
    Silence,
    #[error("something unreadable")]
    Unreadable,
}

/// A vLLM server: HTTP, and ZMQ sockets that one libzmq thread serves.
pub struct VllmEngine {
    http: EngineHttp,
    zmq: zmq::Context,
}

impl VllmEngine {
    pub fn new(url: &str, key: Option<&EngineKey>) -> reqwest::Result<Self> {
        Ok(Self {
            http: EngineHttp::new(url, key)?,
            zmq: zmq::Context::new(),
        })
    }
}

impl EngineLink for VllmEngine {
    type Feed = ZmqFeed;

    fn feed(&self, rank: DpRank, endpoints: Endpoints) -> ZmqFeed {
        ZmqFeed::new(self.zmq.clone(), rank.to_string(), endpoints)
    }

    async fn health(&self) -> EngineHealth {
        self.http.health().await
    }

    async fn info(&self) -> Result<EngineInfo, InfoError> {
        self.http.info().await
    }
}
