//! What SGLang shows of itself in `/server_info`. Pure and tolerant: its fields differ by version.

use std::num::NonZeroU64;

use serde::Deserialize;
use warmroute_proto::registry::RANKS_MAX;
use warmroute_proto::{BlockSize, DpRank};

use super::{BlockCount, EngineInfo};
use crate::config::{Endpoints, reachable};

#[derive(Deserialize)]
struct ServerInfo {
    /// Tokens in a block of its cache.
    page_size: BlockSize,
    /// Tokens in the cache of one rank.
    max_total_num_tokens: Option<u64>,
    dp_size: Option<u32>,
    speculative_algorithm: Option<String>,
    version: Option<String>,
    /// Absent before 0.5.18, `None` without `--kv-events-config`.
    kv_events: Option<EventPublisher>,
}

#[derive(Deserialize)]
struct EventPublisher {
    endpoint_host: String,
    endpoint_port_base: u16,
    /// Absent in the first versions that have the others.
    replay_endpoint_port_base: Option<u16>,
    /// A multiple of the page size where the cache is split over ranks of a context group.
    block_size: BlockSize,
    dp_size: u32,
}

impl EngineInfo {
    /// Reads SGLang's facts. Another engine's answer changes nothing.
    pub(super) fn read_server_info(&mut self, body: &[u8], url: &str) {
        let Ok(info) = serde_json::from_slice::<ServerInfo>(body) else {
            return;
        };
        let events = info.kv_events;
        let block_size = events
            .as_ref()
            .map_or(info.page_size, |events| events.block_size);
        let ranks = events
            .as_ref()
            .map(|events| events.dp_size)
            .or(info.dp_size);
        let ranks = ranks.unwrap_or(1).clamp(1, RANKS_MAX);
        self.block_size = Some(block_size);
        self.version = info.version.map(|version| format!("sglang {version}"));
        self.speculates = Some(info.speculative_algorithm.is_some());
        self.blocks = NonZeroU64::new(ranks.into())
            .zip(info.max_total_num_tokens)
            .map(|(ranks, tokens)| BlockCount {
                sum: (tokens / block_size.tokens() as u64).saturating_mul(ranks.get()),
                ranks,
            });
        let Some(events) = events else { return };
        let endpoint = |base: u16, rank: u32| {
            let port = u16::try_from(u32::from(base) + rank).ok()?;
            reachable(&format!("tcp://{}:{port}", events.endpoint_host), url)
        };
        let all = self.endpoints.get_or_insert_default();
        for rank in 0..ranks {
            let endpoints = Endpoints {
                live: endpoint(events.endpoint_port_base, rank),
                replay: events
                    .replay_endpoint_port_base
                    .and_then(|base| endpoint(base, rank)),
            };
            all.insert(DpRank(rank), endpoints);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(body: &Value) -> EngineInfo {
        let mut info = EngineInfo::default();
        info.read_server_info(body.to_string().as_bytes(), "http://h:30000");
        info
    }

    #[test]
    fn its_ranks_blocks_and_endpoints_are_read() {
        let info = read(&json!({
            "model_path": "m", "page_size": 16, "max_total_num_tokens": 1601, "dp_size": 2,
            "speculative_algorithm": null, "version": "0.5.23", "internal_states": [{}],
            "kv_events": {
                "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "",
                "block_size": 32, "dp_size": 2, "replay_endpoint_port_base": 5657,
            },
        }));
        assert_eq!(info.block_size, BlockSize::new(32));
        assert_eq!(
            info.blocks.map(|blocks| (blocks.sum, blocks.per_rank())),
            Some((100, 50))
        );
        assert_eq!(info.version.as_deref(), Some("sglang 0.5.23"));
        assert_eq!(info.speculates, Some(false));
        let endpoints = info.endpoints.unwrap();
        let second = &endpoints[&DpRank(1)];
        assert_eq!(second.live.as_deref(), Some("tcp://h:5558"));
        assert_eq!(second.replay.as_deref(), Some("tcp://h:5658"));
        assert_eq!(endpoints.len(), 2);
    }

    #[test]
    fn what_an_older_version_or_another_engine_leaves_out_stays_unknown() {
        let old = read(&json!({"page_size": 1, "speculative_algorithm": "EAGLE"}));
        assert_eq!(old.block_size, BlockSize::new(1));
        assert_eq!((old.blocks, old.speculates), (None, Some(true)));
        assert_eq!(old.endpoints, None);
        for other in [
            json!({"vllm_config": "…"}),
            json!({"page_size": 0}),
            json!([]),
        ] {
            assert_eq!(read(&other), EngineInfo::default(), "{other}");
        }
        let much = json!({"page_size": 1, "dp_size": u32::MAX, "max_total_num_tokens": u64::MAX});
        assert_eq!(
            read(&much).blocks.map(|blocks| blocks.ranks.get()),
            Some(1024)
        );
    }
}
