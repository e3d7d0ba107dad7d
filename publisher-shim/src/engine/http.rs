//! The engine's HTTP: its health, what it serves, and the addresses of its event sockets.
//!
//! Every answer is optional: engines differ by version and set-up. Parsing is pure and tolerant.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use reqwest::header::AUTHORIZATION;
use reqwest::{Method, RequestBuilder, StatusCode};
use serde::Deserialize;
use serde_json::json;
use warmroute_process::engine_answer::bounded_body;
use warmroute_process::metrics_page::samples;
use warmroute_process::open_files;
use warmroute_process::tls::{self, EngineTls};
use warmroute_proto::registry::Lora;
use warmroute_proto::{BlockSize, DpRank, EngineHealth};

use super::{BlockCount, EngineInfo, FlushRequest, InfoError, ResetRoutes};
use crate::config::{Endpoints, reachable};
use crate::engine_key::EngineKeySource;
use crate::source::FlushResult;

const DEADLINE: Duration = Duration::from_secs(2);
/// SGLang answers after a second at the earliest, and later while a long prefill runs.
const HEALTH_DEADLINE: Duration = Duration::from_secs(5);
/// A busy engine queues the request; its other batches then show that nothing is pending.
const FLUSH_DEADLINE: Duration = Duration::from_secs(10);
const RESET_ROUTE: &str = "/reset_prefix_cache";
/// Routes whose calls can reset the prefix cache.
const RESET_ROUTES: [&str; 4] = [RESET_ROUTE, "/sleep", "/release_kv_cache_memory", "/pause"];
const RANK_HEADER: &str = "X-data-parallel-rank";
/// More than any `/metrics` or model list.
const BODY_BYTES_MAX: usize = 8 << 20;
/// Bound of an answer with cache events, which has 60 bytes for a token.
const EVENTS_BYTES_MAX: usize = 128 << 20;
const EVENTS_DEADLINE: Duration = Duration::from_secs(10);

/// Why a read brought nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ReadError {
    #[error("status {0}")]
    Status(StatusCode),
    #[error("no whole answer in time, or a longer one than is read")]
    Broken,
    #[error("an answer that is no list of numbered events")]
    Unreadable,
}

#[derive(Clone)]
pub(super) struct EngineHttp {
    http: reqwest::Client,
    url: String,
    key: EngineKeySource,
    /// Why the last health check failed.
    fault: Arc<Mutex<Option<String>>>,
    has_metrics: bool,
}

/// Where an engine's HTTP hands out its cache events.
pub(super) struct EventRoute {
    http: reqwest::Client,
    url: String,
    key: EngineKeySource,
}

impl EventRoute {
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Takes the events that no earlier read took.
    pub(super) fn read(&self) -> impl Future<Output = Result<Vec<u8>, ReadError>> + use<> {
        let request = self.http.post(&self.url).timeout(EVENTS_DEADLINE);
        let request = with_key(request, &self.key);
        async {
            let answer = request.send().await.map_err(|_| ReadError::Broken)?;
            if !answer.status().is_success() {
                return Err(ReadError::Status(answer.status()));
            }
            let body = bounded_body(answer, EVENTS_BYTES_MAX).await;
            body.map_err(|_| ReadError::Broken)
        }
    }
}

/// Why a request failed: its innermost cause.
fn failure(error: &reqwest::Error) -> String {
    if let Some(why) = tls::failure_of(error) {
        return format!("{why}: {}", InfoError::Tls);
    }
    if error.is_timeout() {
        return "no answer in time".to_owned();
    }
    let mut cause: &dyn Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

fn with_key(request: RequestBuilder, key: &EngineKeySource) -> RequestBuilder {
    match key.current() {
        Some(key) => request.header(AUTHORIZATION, key.header()),
        None => request,
    }
}

impl EngineHttp {
    pub(super) fn new(url: &str, key: EngineKeySource, tls: &EngineTls) -> reqwest::Result<Self> {
        let client = tls.client().timeout(DEADLINE);
        let (client, url) = match tls::socket_of(url) {
            Some(socket) => (client.unix_socket(socket), tls::SOCKET_URL),
            None => (client, url),
        };
        Ok(Self {
            http: client.build()?,
            url: url.trim_end_matches('/').to_owned(),
            key,
            fault: Arc::default(),
            has_metrics: true,
        })
    }

    /// The route of the engine's events. Its metrics are not read any more: TensorRT-LLM hands out
    /// each of them once, too.
    pub(super) fn drain(&mut self, url: &str) -> EventRoute {
        self.has_metrics = false;
        EventRoute {
            http: self.http.clone(),
            url: url.to_owned(),
            key: self.key.clone(),
        }
    }

    /// A request with the key. vLLM guards `/v1` only; a proxy in front of it may guard every path.
    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.url));
        with_key(request, &self.key)
    }

    /// `Unknown`: this process may open no further file, and keeps what it knew.
    pub(super) async fn health(&self) -> EngineHealth {
        let request = self.request(Method::GET, "/health");
        let answer = request.timeout(HEALTH_DEADLINE).send().await;
        let fault = match answer {
            Ok(answer) if answer.status().is_success() => None,
            Ok(answer) => Some(format!("GET /health: status {}", answer.status())),
            Err(error) if open_files::are_cause_of(&error) => return EngineHealth::Unknown,
            Err(error) => Some(failure(&error)),
        };
        let health = match fault {
            None => EngineHealth::Healthy,
            Some(_) => EngineHealth::Unhealthy,
        };
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
        health
    }

    pub(super) fn fault(&self) -> Option<String> {
        let fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        fault.clone()
    }

    /// Reads all facts. Only the model list is required.
    pub(super) async fn info(&self) -> Result<EngineInfo, InfoError> {
        let mut info = EngineInfo::default();
        let models = self.get("/v1/models").await?;
        info.read_models(&models).ok_or(InfoError::Unreadable)?;
        if self.has_metrics
            && let Ok(metrics) = self.get("/metrics").await
        {
            let metrics = String::from_utf8_lossy(&metrics);
            info.read_metrics(&metrics);
            info.reset_calls = Some(reset_calls(&metrics));
        }
        // Its method is POST: a GET changes nothing.
        info.resets = match self.get(RESET_ROUTE).await {
            Err(InfoError::Status(StatusCode::METHOD_NOT_ALLOWED)) => Some(ResetRoutes::Present),
            Err(InfoError::Status(StatusCode::NOT_FOUND)) => Some(ResetRoutes::Absent),
            Ok(_) | Err(_) => None,
        };
        match self.get("/kv_event_sources").await {
            Ok(sources) => info.read_sources(&sources, &self.url),
            Err(InfoError::Status(StatusCode::NOT_FOUND)) => {
                info.endpoints = Some(BTreeMap::new());
            }
            Err(_) => {}
        }
        if let Ok(version) = self.get("/version").await {
            info.version = serde_json::from_slice::<Version>(&version)
                .ok()
                .map(|version| version.version);
        }
        let has_endpoints = info
            .endpoints
            .as_ref()
            .is_some_and(|known| !known.is_empty());
        if info.block_size.is_none() && !has_endpoints {
            self.ask_sglang(&mut info).await;
        }
        Ok(info)
    }

    /// The second route is the first one's name in older versions.
    async fn ask_sglang(&self, info: &mut EngineInfo) {
        for path in ["/server_info", "/get_server_info"] {
            match self.get(path).await {
                Ok(body) => return info.read_server_info(&body, &self.url),
                Err(InfoError::Status(StatusCode::NOT_FOUND)) => {}
                Err(_) => {
                    info.endpoints = None;
                    return;
                }
            }
        }
    }

    pub(super) async fn reset_calls(&self) -> Option<u64> {
        let metrics = self.get("/metrics").await.ok()?;
        Some(reset_calls(&String::from_utf8_lossy(&metrics)))
    }

    /// Requests one token for a prompt of one, which fills no block. Old engines crash if they compute
    /// while they sleep.
    pub(super) async fn flush(&self, request: &FlushRequest) -> FlushResult {
        let asleep = self.get("/is_sleeping").await;
        let asleep = asleep.map(|body| serde_json::from_slice::<Asleep>(&body));
        match asleep {
            Ok(Ok(Asleep { is_sleeping: false })) | Err(InfoError::Status(_)) => {}
            Ok(_) | Err(_) => return FlushResult::Failed,
        }
        let body = json!({
            "model": request.model, "prompt": [1], "max_tokens": 1, "temperature": 0, "stream": false,
        });
        let mut post = self.request(Method::POST, "/v1/completions");
        if let Some(rank) = request.rank {
            post = post.header(RANK_HEADER, rank.to_string());
        }
        match post.timeout(FLUSH_DEADLINE).json(&body).send().await {
            Ok(answer) if answer.status().is_success() => FlushResult::Answered,
            Ok(_) | Err(_) => FlushResult::Failed,
        }
    }

    async fn get(&self, path: &str) -> Result<Vec<u8>, InfoError> {
        let mut answer = self.request(Method::GET, path).send().await;
        // A connection of the pool may have ended since; the next one is most likely new.
        if answer.as_ref().is_err_and(is_broken) {
            answer = self.request(Method::GET, path).send().await;
        }
        let answer = answer.map_err(|error| match tls::failure_of(&error) {
            Some(why) => {
                tracing::debug!(url = self.url, why, "TLS with the engine failed");
                InfoError::Tls
            }
            None => InfoError::Silence,
        })?;
        match answer.status() {
            status if status.is_success() => {}
            status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
                return Err(InfoError::Key(status));
            }
            status => return Err(InfoError::Status(status)),
        }
        let body = bounded_body(answer, BODY_BYTES_MAX).await;
        body.map_err(|_| InfoError::Silence)
    }
}

/// The connection ended before the head of an answer.
fn is_broken(error: &reqwest::Error) -> bool {
    error.is_request() && !error.is_connect() && !error.is_timeout()
}

#[derive(Deserialize)]
struct Asleep {
    is_sleeping: bool,
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

    /// Reads `vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="8192",…} 1.0`: a line
    /// for each rank, each with the sum of the blocks of all ranks.
    fn read_metrics(&mut self, text: &str) {
        let configs = || samples(text, "vllm:cache_config_info");
        let Some(config) = configs().next() else {
            return;
        };
        let block_size = config.label("block_size");
        self.block_size = block_size.and_then(|size| BlockSize::new(size.parse().ok()?));
        let engines: BTreeSet<_> = configs().map(|config| config.label("engine")).collect();
        let blocks = config.label("num_gpu_blocks");
        let blocks = blocks.and_then(|blocks| blocks.parse().ok());
        let ranks = NonZeroU64::new(engines.len() as u64);
        self.blocks = blocks
            .zip(ranks)
            .map(|(sum, ranks)| BlockCount { sum, ranks });
        self.connects = has_connector(text);
        let mut lines = text.lines();
        self.speculates = Some(lines.any(|line| line.starts_with("vllm:spec_decode_")));
    }

    fn read_sources(&mut self, body: &[u8], url: &str) {
        let Ok(sources) = serde_json::from_slice::<BTreeMap<String, EventSource>>(body) else {
            return;
        };
        let endpoints = self.endpoints.get_or_insert_default();
        for (rank, source) in sources {
            let Ok(rank) = rank.parse().map(DpRank) else {
                continue;
            };
            if !source.enable_kv_cache_events {
                continue;
            }
            let at = |endpoint: Option<String>| reachable(&endpoint?, url);
            let of_rank = Endpoints {
                live: at(source.endpoint),
                replay: at(source.replay_endpoint),
            };
            endpoints.insert(rank, of_rank);
        }
    }
}

/// Whether the engine asks a KV connector for what its own cache lacks. `None` before its first
/// request with blocks, and of versions whose metrics do not show it.
fn has_connector(metrics: &str) -> Option<bool> {
    let count = |name| {
        let counts = samples(metrics, name).map(|sample| sample.value);
        counts.reduce(|sum, count| sum + count)
    };
    let external = count("vllm:external_prefix_cache_queries_total")?;
    let own = count("vllm:prefix_cache_queries_total")?;
    (external > 0.0 || own > 0.0).then_some(external > 0.0)
}

/// Calls so far that can reset the prefix cache, also those that failed. A call of newer versions
/// may be counted twice; only a rise is of interest.
fn reset_calls(metrics: &str) -> u64 {
    let resets = samples(metrics, "http_requests_total").filter(|sample| {
        let is_route = |route| RESET_ROUTES.contains(&route);
        sample.label("method") == Some("POST") && sample.label("handler").is_some_and(is_route)
    });
    let sleeps = samples(metrics, "vllm:sleep_mode_operation_duration_seconds_count");
    let calls = resets.chain(sleeps).map(|sample| sample.value);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "counts of calls"
    )]
    let sum = calls.sum::<f64>() as u64;
    sum
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Mutex;

    use axum::body::Body;
    use axum::http::{HeaderMap, Uri};
    use axum::response::IntoResponse as _;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;
    use crate::engine_key::EngineKey;

    #[tokio::test]
    async fn each_request_has_the_key_in_force() {
        let keys = Arc::new(Mutex::new(EngineKey::parse("old").unwrap()));
        let read = Arc::clone(&keys);
        let source = EngineKeySource::new(move || Some(read.lock().unwrap().clone()));
        let expected = Arc::clone(&keys);
        let health = async move |headers: HeaderMap| match headers.get(AUTHORIZATION)
            == Some(expected.lock().unwrap().header())
        {
            true => StatusCode::OK,
            false => StatusCode::UNAUTHORIZED,
        };
        let routes = axum::Router::new().route("/health", get(health));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = async move { axum::serve(listener, routes).await };
        drop(tokio_util::task::TaskTracker::new().spawn(server));
        let tls = EngineTls::system().unwrap();
        let engine = EngineHttp::new(&url, source, &tls).unwrap();
        assert_eq!(engine.health().await, EngineHealth::Healthy);
        *keys.lock().unwrap() = EngineKey::parse("new").unwrap();
        assert_eq!(engine.health().await, EngineHealth::Healthy);
        let none = EngineHttp::new(&url, EngineKeySource::default(), &tls).unwrap();
        assert_eq!(none.health().await, EngineHealth::Unhealthy);
    }

    /// Answers each connection's first request, and ends the connection at the second one.
    async fn ends_at_reuse(listener: TcpListener) {
        const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 26\r\n\r\n";
        while let Ok((mut stream, _)) = listener.accept().await {
            let answer = async move {
                let mut head = [0; 1024];
                let asked = stream.read(&mut head).await?;
                assert!(asked > 0 && asked < head.len());
                stream.write_all(ANSWER).await?;
                stream.write_all(&[b'x'; 26]).await?;
                stream.read(&mut head).await
            };
            drop(tokio_util::task::TaskTracker::new().spawn(answer));
        }
    }

    #[tokio::test]
    async fn a_connection_that_ends_at_reuse_is_no_silence() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        drop(tokio_util::task::TaskTracker::new().spawn(ends_at_reuse(listener)));
        let tls = EngineTls::system().unwrap();
        let engine = EngineHttp::new(&url, EngineKeySource::default(), &tls).unwrap();
        for _ in 0..4 {
            assert_eq!(
                engine.get("/v1/models").await.map(|body| body.len()),
                Ok(26)
            );
        }
    }

    /// An engine that answers as one that is late: its connection ends within the answer.
    async fn engine_with(pages: Arc<Mutex<BTreeMap<&'static str, Page>>>) -> EngineHttp {
        let answer = async move |uri: Uri| {
            let page = pages.lock().unwrap().get(uri.path()).copied();
            match page {
                Some(Page::Text(text)) => text.into_response(),
                Some(Page::Status(status)) => status.into_response(),
                Some(Page::Broken) => {
                    let broken =
                        futures_util::stream::iter([Err::<Vec<u8>, _>(io::Error::other(""))]);
                    Body::from_stream(broken).into_response()
                }
                None => StatusCode::NOT_FOUND.into_response(),
            }
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let routes = axum::Router::new().fallback(answer);
        let server = async move { axum::serve(listener, routes).await };
        drop(tokio_util::task::TaskTracker::new().spawn(server));
        let tls = EngineTls::system().unwrap();
        EngineHttp::new(&url, EngineKeySource::default(), &tls).unwrap()
    }

    #[derive(Clone, Copy)]
    enum Page {
        Text(&'static str),
        Status(StatusCode),
        Broken,
    }

    #[tokio::test]
    async fn an_answer_that_does_not_come_clears_nothing() {
        let sources = r#"{"0":{"enable_kv_cache_events":true,"endpoint":"tcp://*:1",
            "replay_endpoint":"tcp://*:2"}}"#;
        let metrics = "vllm:cache_config_info{block_size=\"16\"} 1.0\n";
        let all = BTreeMap::from([
            ("/v1/models", Page::Text(r#"{"data":[{"id":"m"}]}"#)),
            ("/metrics", Page::Text(metrics)),
            ("/kv_event_sources", Page::Text(sources)),
            (RESET_ROUTE, Page::Status(StatusCode::METHOD_NOT_ALLOWED)),
        ]);
        let pages = Arc::new(Mutex::new(all));
        let engine = engine_with(Arc::clone(&pages)).await;
        let before = engine.info().await.unwrap();
        assert_eq!(before.resets, Some(ResetRoutes::Present));
        assert_eq!(before.endpoints.as_ref().map(BTreeMap::len), Some(1));
        let then = async |path, page| {
            let page = pages.lock().unwrap().insert(path, page);
            let mut info = engine.info().await.unwrap();
            info.keep(&before);
            pages.lock().unwrap().insert(path, page.unwrap());
            info
        };
        let busy = Page::Status(StatusCode::SERVICE_UNAVAILABLE);
        for path in ["/kv_event_sources", RESET_ROUTE] {
            for page in [Page::Broken, busy] {
                assert_eq!(then(path, page).await, before, "{path}");
            }
        }
        let gone = Page::Status(StatusCode::NOT_FOUND);
        let no_sources = then("/kv_event_sources", gone).await;
        assert_eq!(no_sources.endpoints, Some(BTreeMap::new()));
        let no_route = then(RESET_ROUTE, gone).await;
        assert_eq!(no_route.resets, Some(ResetRoutes::Absent));
    }

    #[test]
    fn models_and_adapters_are_separated() {
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
    fn metrics_give_block_size_and_count() {
        let mut info = EngineInfo::default();
        info.read_metrics(
            "# HELP x\nvllm:cache_config_info{block_size=\"32\",hash_block_size=\"8\",\
             num_cpu_blocks=\"None\",num_gpu_blocks=\"65\"} 1.0\n",
        );
        assert_eq!(info.block_size, BlockSize::new(32));
        assert_eq!(info.blocks.map(BlockCount::per_rank), Some(65));
        assert_eq!(info.speculates, Some(false));
        let mut speculating = EngineInfo::default();
        speculating.read_metrics(
            "vllm:spec_decode_num_drafts_total{engine=\"0\"} 0.0\n\
             vllm:cache_config_info{block_size=\"32\"} 1.0\n",
        );
        assert_eq!(speculating.speculates, Some(true));
        let mut other_order = EngineInfo::default();
        other_order.read_metrics("vllm:cache_config_info{a=\"1\",block_size=\"16\"} 1.0");
        assert_eq!(other_order.block_size, BlockSize::new(16));
        assert_eq!(other_order.blocks, None);
    }

    #[test]
    fn a_connector_is_known_from_the_first_request_on() {
        let read = |external: &str, own: u32| {
            let mut info = EngineInfo::default();
            info.read_metrics(&format!(
                "vllm:cache_config_info{{block_size=\"16\"}} 1.0\n\
                 vllm:prefix_cache_queries_total{{engine=\"0\"}} {own}\n{external}"
            ));
            info.connects
        };
        let external = |count: u32| {
            format!("vllm:external_prefix_cache_queries_total{{engine=\"0\"}} {count}\n")
        };
        assert_eq!(read(&external(0), 0), None);
        assert_eq!(read(&external(0), 50), Some(false));
        assert_eq!(read(&external(20), 50), Some(true));
        assert_eq!(read("", 50), None);
    }

    #[test]
    fn more_ranks_than_are_configured_are_an_error() {
        let mut info = EngineInfo::default();
        info.read_metrics(
            "vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"64\"} 1.0\n\
             vllm:cache_config_info{block_size=\"16\",engine=\"1\",num_gpu_blocks=\"64\"} 1.0\n",
        );
        let refused = info.clone().check_ranks(1).unwrap_err();
        assert_eq!(
            refused,
            InfoError::Ranks {
                found: 2,
                configured: 1
            }
        );
        assert!(refused.to_string().contains("ranks=2"), "{refused}");
        assert!(info.check_ranks(2).is_ok());
        let mut info = EngineInfo::default();
        let sources =
            br#"{"0":{"enable_kv_cache_events":true},"1":{"enable_kv_cache_events":true}}"#;
        info.read_sources(sources, "http://h:1");
        assert!(info.clone().check_ranks(1).is_err());
        assert!(EngineInfo::default().check_ranks(1).is_ok());
    }

    #[test]
    fn blocks_are_summed_over_ranks_by_the_engine() {
        let line = |engine| {
            format!("vllm:cache_config_info{{engine=\"{engine}\",num_gpu_blocks=\"130\"}} 1.0\n")
        };
        let mut info = EngineInfo::default();
        info.read_metrics(&(line(0) + &line(1)));
        let blocks = info.blocks.unwrap();
        assert_eq!((blocks.sum, blocks.per_rank()), (130, 65));
    }

    #[test]
    fn calls_that_reset_the_cache_are_counted() {
        let metrics = r#"# TYPE http_requests_total counter
http_requests_total{handler="/reset_prefix_cache",method="POST",status="2xx"} 2.0
http_requests_total{handler="/reset_prefix_cache",method="POST",status="5xx"} 1.0
http_requests_total{handler="/reset_prefix_cache",method="GET",status="4xx"} 9.0
http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 9.0
http_request_duration_seconds_count{handler="/reset_prefix_cache",method="POST"} 9.0
vllm:sleep_mode_operation_duration_seconds_sum{operation="sleep"} 9.0
vllm:sleep_mode_operation_duration_seconds_count{operation="sleep"} 4.0
"#;
        assert_eq!(reset_calls(metrics), 7);
        assert_eq!(reset_calls(""), 0);
    }

    #[test]
    fn wildcard_hosts_become_the_engines_host() {
        let mut info = EngineInfo::default();
        let body = br#"{"0":{"enable_kv_cache_events":true,"endpoint":"tcp://*:15550",
            "replay_endpoint":"tcp://*:15560","topic":"kv-events"},
            "1":{"enable_kv_cache_events":false},"x":{}}"#;
        info.read_sources(body, "http://h:8000");
        let all = info.endpoints.unwrap();
        let endpoints = &all[&DpRank(0)];
        assert_eq!(endpoints.live.as_deref(), Some("tcp://h:15550"));
        assert_eq!(endpoints.replay.as_deref(), Some("tcp://h:15560"));
        assert_eq!(all.len(), 1);
    }
}
