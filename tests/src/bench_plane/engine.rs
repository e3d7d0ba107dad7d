//! A fake engine: vLLM's sockets, a minimum of its HTTP, and synthetic events at any rate.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::Context as _;
use axum::routing::get;
use axum::{Json, Router};
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warmroute_mock_engine::{Encoder, HashMode, Loras};
use warmroute_proto::BlockSize;
use warmroute_router::sim::{CacheEvent, EngineHash, GroupKind, Medium, StoredBlocks};

use crate::publisher::Publishers;

pub(crate) const BLOCK: usize = 16;
/// Without them a shim must assume speculative decoding, and its sources stay `unverified`.
const METRICS: &str = "vllm:cache_config_info{block_size=\"16\"} 1.0\n";
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// First candidate for a row of free ports, one for each rank.
const PORTS: std::ops::Range<u16> = 12_000..31_000;

pub(crate) struct Engine {
    pub(crate) url: String,
    pub(crate) kv_port: u16,
    pub(crate) replay_port: u16,
    publishers: Publishers,
    block_size: BlockSize,
}

impl Engine {
    pub(crate) async fn start(
        ranks: u32,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(SocketAddr::new(HERE, 0)).await?;
        let url = format!("http://{}", listener.local_addr()?);
        let models = || async { Json(json!({"data": [{"id": "model", "parent": null}]})) };
        let routes = Router::new()
            .route("/health", get(|| async {}))
            .route("/v1/models", get(models))
            .route("/metrics", get(|| async { METRICS }));
        let serve =
            axum::serve(listener, routes).with_graceful_shutdown(stop.clone().cancelled_owned());
        tasks.spawn(serve.into_future());
        let (publishers, kv_port) = publishers(ranks)?;
        Ok(Self {
            url,
            kv_port,
            replay_port: replay_port(kv_port),
            publishers,
            block_size: BlockSize::new(u32::try_from(BLOCK)?).context("a block size")?,
        })
    }

    pub(crate) fn ranks(&self) -> usize {
        self.publishers.ranks()
    }

    /// A batch that stores `blocks` new blocks from depth 0 on.
    pub(crate) fn batch(&self, rank: usize, blocks: usize) -> anyhow::Result<(Vec<u32>, Vec<u8>)> {
        let tokens: Vec<u32> = (0..blocks * BLOCK).map(|_| fastrand::u32(..)).collect();
        let stored = StoredBlocks {
            hashes: (0..blocks).map(|_| EngineHash(fastrand::u64(..))).collect(),
            parent: None,
            tokens: tokens.clone(),
            block_size: self.block_size,
            extra_keys: None,
            lookahead: None,
            lora_name: None,
            medium: Medium::Gpu,
            group: 0,
            kind: GroupKind::FullAttention,
        };
        let encoder = Encoder {
            rank: u32::try_from(rank)?,
            hash_mode: HashMode::Int,
            loras: Loras::default(),
            lmcache: false,
        };
        let payload = encoder.encode(0.0, &[CacheEvent::Stored(stored)])?;
        Ok((tokens, payload))
    }

    pub(crate) fn publish(&self, rank: usize, seq: u64, payload: &[u8]) -> anyhow::Result<()> {
        self.publishers.publish(rank, seq, payload)
    }
}

const fn replay_port(kv_port: u16) -> u16 {
    kv_port + 500
}

/// A rank's port is rank 0's port plus its number.
fn publishers(ranks: u32) -> anyhow::Result<(Publishers, u16)> {
    let ranks = u16::try_from(ranks)?;
    for _ in 0..100 {
        let first = fastrand::u16(PORTS);
        let ports = (first..first + ranks).map(|port| (port, replay_port(port)));
        if let Ok(all) = Publishers::start(HERE, ports) {
            return Ok((all, first));
        }
    }
    anyhow::bail!("no {ranks} free ports in a row")
}
