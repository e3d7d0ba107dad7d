//! The engine's HTTP: is it alive, what does it serve, where are its event sockets.
//!
//! Every answer is optional: engines differ by version and set-up. Parsing is pure and tolerant.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use warmroute_proto::registry::Lora;
use warmroute_proto::{BlockSize, DpRank, EngineHealth};

use crate::config::{Endpoints, reachable};

const DEADLINE: Duration = Duration::from_secs(2);
/// More than any `/metrics` or model list.
const BODY_BYTES_MAX: usize = 8 << 20;

/// What the engine tells about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EngineInfo {
    pub(crate) models: Vec<String>,
    pub(crate) loras: Vec<Lora>,
    pub(crate) max_model_len: Option<u32>,
    pub(crate) block_size: Option<BlockSize>,
    pub(crate) blocks: Option<u64>,
    pub(crate) version: Option<String>,
    /// By rank, where the engine tells them.
    pub(crate) endpoints: BTreeMap<DpRank, Endpoints>,
}

#[derive(Clone)]
pub(crate) struct EngineClient {
    http: reqwest::Client,
    url: String,
}

impl EngineClient {
    pub(crate) fn new(url: &str) -> reqwest::Result<Self> {
        let http = reqwest::Client::builder()
            .timeout(DEADLINE)
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .build()?;
        Ok(Self {
            http,
            url: url.trim_end_matches('/').to_owned(),
        })
    }

    pub(crate) async fn health(&self) -> EngineHealth {
        match self.http.get(format!("{}/health", self.url)).send().await {
            Ok(answer) if answer.status().is_success() => EngineHealth::Healthy,
            Ok(_) | Err(_) => EngineHealth::Unhealthy,
        }
    }

    /// Everything; `None` if the engine does not even list its models.
    pub(crate) async fn info(&self) -> Option<EngineInfo> {
        let mut info = EngineInfo::default();
        info.read_models(&self.get("/v1/models").await?)?;
        if let Some(metrics) = self.get("/metrics").await {
            info.read_metrics(&String::from_utf8_lossy(&metrics));
        }
        if let Some(sources) = self.get("/kv_event_sources").await {
            info.read_sources(&sources, &self.url);
        }
        if let Some(version) = self.get("/version").await {
            info.version = serde_json::from_slice::<Version>(&version)
                .ok()
                .map(|version| version.version);
        }
        Some(info)
    }

    async fn get(&self, path: &str) -> Option<Vec<u8>> {
        let answer = self.http.get(format!("{}{path}", self.url)).send().await;
        let mut answer = answer.ok()?.error_for_status().ok()?;
        let mut body = Vec::new();
        while let Some(chunk) = answer.chunk().await.ok()? {
            if body.len() + chunk.len() > BODY_BYTES_MAX {
                return None;
            }
            body.extend_from_slice(&chunk);
        }
        Some(body)
    }
}

#[derive(Deserialize)]
struct Version {
    version: String,
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
    #[serde(default)]
    parent: Option<String>,
    #[serde(default)]
    max_model_len: Option<u32>,
}

#[derive(Deserialize)]
struct EventSource {
    #[serde(default)]
    enable_kv_cache_events: bool,
    #[serde(default)]
    endpoint: Option<String>,
    #[serde(default)]
    replay_endpoint: Option<String>,
}

impl EngineInfo {
    fn read_models(&mut self, body: &[u8]) -> Option<()> {
        let models: Models = serde_json::from_slice(body).ok()?;
        for model in models.data {
            self.max_model_len = self.max_model_len.or(model.max_model_len);
            match model.parent {
                Some(parent) => self.loras.push(Lora {
                    name: model.id,
                    parent: Some(parent),
                }),
                None => self.models.push(model.id),
            }
        }
        Some(())
    }

    /// `vllm:cache_config_info{block_size="16",num_gpu_blocks="4096",…} 1.0`
    fn read_metrics(&mut self, text: &str) {
        let Some(line) = text
            .lines()
            .find(|line| line.starts_with("vllm:cache_config_info{"))
        else {
            return;
        };
        let label = |name: &str| {
            let (_, rest) = line.split_once(&format!("{name}=\""))?;
            rest.split_once('"').map(|(value, _)| value)
        };
        self.block_size = label("{block_size")
            .or_else(|| label(",block_size"))
            .and_then(|value| BlockSize::new(value.parse().ok()?));
        self.blocks = label("num_gpu_blocks").and_then(|value| value.parse().ok());
    }

    fn read_sources(&mut self, body: &[u8], url: &str) {
        let Ok(sources) = serde_json::from_slice::<BTreeMap<String, EventSource>>(body) else {
            return;
        };
        for (rank, source) in sources {
            let Ok(rank) = rank.parse().map(DpRank) else {
                continue;
            };
            if !source.enable_kv_cache_events {
                continue;
            }
            let at = |endpoint: Option<String>| reachable(&endpoint?, url);
            let endpoints = Endpoints {
                live: at(source.endpoint),
                replay: at(source.replay_endpoint),
            };
            self.endpoints.insert(rank, endpoints);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_and_adapters_are_told_apart() {
        let mut info = EngineInfo::default();
        let body = br#"{"object":"list","data":[
            {"id":"base","max_model_len":4096,"parent":null},{"id":"l1","parent":"base"}]}"#;
        info.read_models(body).unwrap();
        assert_eq!(info.models, ["base"]);
        assert_eq!(info.loras[0].parent.as_deref(), Some("base"));
        assert_eq!(info.max_model_len, Some(4096));
        assert!(info.read_models(b"{").is_none());
    }

    #[test]
    fn metrics_tell_block_size_and_number() {
        let mut info = EngineInfo::default();
        info.read_metrics(
            "# HELP x\nvllm:cache_config_info{block_size=\"32\",hash_block_size=\"8\",\
             num_cpu_blocks=\"None\",num_gpu_blocks=\"65\"} 1.0\n",
        );
        assert_eq!(info.block_size, BlockSize::new(32));
        assert_eq!(info.blocks, Some(65));
        let mut other_order = EngineInfo::default();
        other_order.read_metrics("vllm:cache_config_info{a=\"1\",block_size=\"16\"} 1.0");
        assert_eq!(other_order.block_size, BlockSize::new(16));
        assert_eq!(other_order.blocks, None);
    }

    #[test]
    fn event_sources_are_reached_at_the_engines_host() {
        let mut info = EngineInfo::default();
        let body = br#"{"0":{"enable_kv_cache_events":true,"endpoint":"tcp://*:15550",
            "replay_endpoint":"tcp://*:15560","topic":"kv-events"},
            "1":{"enable_kv_cache_events":false},"x":{}}"#;
        info.read_sources(body, "http://h:8000");
        let endpoints = &info.endpoints[&DpRank(0)];
        assert_eq!(endpoints.live.as_deref(), Some("tcp://h:15550"));
        assert_eq!(endpoints.replay.as_deref(), Some("tcp://h:15560"));
        assert_eq!(info.endpoints.len(), 1);
    }
}
