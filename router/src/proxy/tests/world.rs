//! A proxy and small engines, each on its own socket.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use bytes::{Bytes, BytesMut};
use futures_util::stream;
use http_body_util::BodyExt as _;
use prometheus::IntCounter;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixListener};
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;
use warmroute_process::server::{ClientRules, ConnectionFiles, Server, Shutdown};
use warmroute_proto::load::LoadMessage;
use warmroute_proto::registry::{WorkerEntry, WorkerRole};
use warmroute_proto::{BlockSize, DpRank, RouterId, Source, codec};

use super::*;
use crate::call_report::CallSinks;
use crate::config::Limits;
use crate::engine_clients::SocketRule;
use crate::fleet::health::Observation;
use crate::route::moves::MOVE_WINDOW_MAX;
use crate::route::{Knobs, Prompt, RouteRequest, SourceLoad};
use crate::settings::Settings;
use crate::tenants::LimitSharing;
use crate::testing::{ROUTER, core, plane, subjects, worker_entry};

/// More than any body here but the one that is too large.
const BODY_MAX: usize = 1 << 20;

/// Tests see decisions in headers.
const EXPLAIN: &str = "[admin]\nexplain_headers = \"all\"\n";

/// A wait that takes longer fails.
const PATIENCE: Duration = Duration::from_secs(60);

const PEER: RouterId = RouterId([2; 16]);

/// Waits, for a bounded time.
pub(super) async fn in_time<T>(what: &str, wait: impl Future<Output = T>) -> T {
    match timeout(PATIENCE, wait).await {
        Ok(waited) => waited,
        Err(_) => panic!("{what}: not within {PATIENCE:?}"),
    }
}

/// Keeps a paused clock from advancing: it does only while all tasks wait.
pub(super) struct Frozen(AbortHandle);

impl Frozen {
    pub(super) fn new() -> Self {
        #[expect(clippy::disallowed_methods, reason = "the clock that is not paused")]
        let since = std::time::Instant::now();
        let busy = async move {
            while since.elapsed() < PATIENCE {
                tokio::task::yield_now().await;
            }
        };
        Self(TaskTracker::new().spawn(busy).abort_handle())
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.0.abort();
    }
}

pub(super) fn body(tokens: u32) -> Value {
    json!({"model": "m", "prompt": (0..tokens).collect::<Vec<u32>>()})
}

pub(super) fn streaming() -> Value {
    json!({"model": "m", "prompt": [1, 2, 3], "stream": true})
}

pub(super) async fn assert_error(response: reqwest::Response, code: &str) {
    let json: Value = response.json().await.unwrap();
    assert_eq!(json["error"]["code"], code, "{json}");
}

/// A request that an engine got.
#[derive(Clone)]
pub(super) struct Seen {
    pub path: String,
    pub headers: HeaderMap,
    pub body: String,
}

/// An event of the engine's stream.
pub(super) fn event(number: usize) -> String {
    format!("data: {{\"n\":{number}}}\n\n")
}

/// An engine whose every step is released by the test.
pub(super) struct Engine {
    pub(super) url: String,
    ranks: u32,
    /// Reserves an address.
    kept: Option<TcpSocket>,
    inner: Arc<Inner>,
}

struct Inner {
    seen: Mutex<Vec<Seen>>,
    status: Mutex<StatusCode>,
    asked: watch::Sender<usize>,
    /// Streams that were dropped before their end.
    abandoned: watch::Sender<usize>,
    streams: Mutex<VecDeque<mpsc::Sender<std::io::Result<Bytes>>>>,
    events: Mutex<usize>,
    /// Ids of `/v1/responses`.
    stored: Mutex<Vec<String>>,
    rendering: Mutex<RenderRoutes>,
    prefills: Prefills,
}

/// How an engine answers prefill legs.
struct Prefills {
    /// `kv_transfer_params` of the next answers; `None`: their number.
    params: Mutex<Option<String>>,
    is_open: watch::Sender<bool>,
}

/// How an engine's render routes answer.
#[derive(Clone, Default)]
enum RenderRoutes {
    #[default]
    AsOthers,
    Never,
    With(StatusCode, String),
}

impl Engine {
    pub(super) async fn start() -> Self {
        let inner = Arc::new(Inner {
            seen: Mutex::default(),
            status: Mutex::new(StatusCode::OK),
            asked: watch::Sender::new(0),
            abandoned: watch::Sender::new(0),
            streams: Mutex::default(),
            events: Mutex::default(),
            stored: Mutex::default(),
            rendering: Mutex::default(),
            prefills: Prefills {
                params: Mutex::default(),
                is_open: watch::Sender::new(true),
            },
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let router = Router::new()
            .fallback(answer)
            .with_state(Arc::clone(&inner));
        let server = async move { axum::serve(listener, router).await.unwrap() };
        drop(TaskTracker::new().spawn(server));
        Self {
            url,
            ranks: 1,
            kept: None,
            inner,
        }
    }

    /// At a Unix socket in this directory.
    pub(super) async fn at_socket(dir: &Path) -> Self {
        let mut engine = Self::start().await;
        let path = dir.join("engine.sock");
        engine.url = format!("unix:{}", path.display());
        let listener = UnixListener::bind(path).unwrap();
        let router = Router::new()
            .fallback(answer)
            .with_state(Arc::clone(&engine.inner));
        let server = async move { axum::serve(listener, router).await.unwrap() };
        drop(TaskTracker::new().spawn(server));
        engine
    }

    /// An address that no connection is tried to.
    pub(super) async fn unreachable() -> Self {
        let mut engine = Self::start().await;
        engine.url = "http://255.255.255.255:1".to_owned();
        engine
    }

    pub(super) const fn with_ranks(mut self, ranks: u32) -> Self {
        self.ranks = ranks;
        self
    }

    /// An address where no process listens.
    pub(super) async fn dead() -> Self {
        let mut engine = Self::start().await;
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        engine.url = format!("http://{}", socket.local_addr().unwrap());
        engine.kept = Some(socket);
        engine
    }

    /// Reads each request to its end and closes the connection.
    pub(super) async fn mute() -> Self {
        let mut engine = Self::start().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        engine.url = format!("http://{}", listener.local_addr().unwrap());
        let inner = Arc::clone(&engine.inner);
        let serve = async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                read_request(&mut stream).await;
                inner.asked.send_modify(|asked| *asked += 1);
            }
        };
        drop(TaskTracker::new().spawn(serve));
        engine
    }

    /// Answers each connection's first request, and closes the connection at the second one.
    pub(super) async fn closing_at_reuse() -> Self {
        let mut engine = Self::start().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        engine.url = format!("http://{}", listener.local_addr().unwrap());
        let inner = Arc::clone(&engine.inner);
        let serve = async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let inner = Arc::clone(&inner);
                let answer = async move {
                    read_request(&mut stream).await;
                    inner.asked.send_modify(|asked| *asked += 1);
                    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
                    stream.write_all(answer).await.unwrap();
                    read_request(&mut stream).await;
                };
                drop(TaskTracker::new().spawn(answer));
            }
        };
        drop(TaskTracker::new().spawn(serve));
        engine
    }

    /// Answers each connection's first request. Reads the second one to its end, and no process
    /// listens or answers any more.
    pub(super) async fn crashing_at_reuse() -> Self {
        let mut engine = Self::start().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        engine.url = format!("http://{}", listener.local_addr().unwrap());
        let inner = Arc::clone(&engine.inner);
        let serve = async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            read_request(&mut stream).await;
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
            stream.write_all(answer).await.unwrap();
            read_request(&mut stream).await;
            inner.asked.send_modify(|asked| *asked += 1);
            drop(listener);
        };
        drop(TaskTracker::new().spawn(serve));
        engine
    }

    /// Leaves an idle connection to the engine in the client's pool.
    pub(super) async fn connect(&self, client: &EngineClient) {
        let (headers, body) = (HeaderMap::new(), Bytes::from_static(b"{}"));
        let request = client.request(Method::POST, &self.url, "/", headers, body);
        let answer = client.send(request.unwrap(), || None).await.unwrap();
        answer.into_body().collect().await.unwrap();
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }

    /// Answers with `Content-Length` and chunks.
    pub(super) async fn with_two_lengths() -> Self {
        let mut engine = Self::start().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        engine.url = format!("http://{}", listener.local_addr().unwrap());
        let serve = async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                read_request(&mut stream).await;
                let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\
                    transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
                stream.write_all(answer).await.unwrap();
            }
        };
        drop(TaskTracker::new().spawn(serve));
        engine
    }

    /// Sends the head of an error and a part of its body.
    pub(super) async fn hanging_in_an_error() -> Self {
        Self::scripted(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 70\r\n\r\n{").await
    }

    /// Answers no request, and keeps its connection open.
    pub(super) async fn hung() -> Self {
        Self::scripted(b"").await
    }

    /// Answers each request with these bytes and keeps the connection open.
    pub(super) async fn scripted(answer: &'static [u8]) -> Self {
        let mut engine = Self::start().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        engine.url = format!("http://{}", listener.local_addr().unwrap());
        let inner = Arc::clone(&engine.inner);
        let serve = async move {
            let mut open = Vec::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                read_request(&mut stream).await;
                inner.asked.send_modify(|asked| *asked += 1);
                stream.write_all(answer).await.unwrap();
                open.push(stream);
            }
        };
        drop(TaskTracker::new().spawn(serve));
        engine
    }

    /// Answers each request with these bytes and closes the connection.
    pub(super) async fn closing_after(answer: &'static [u8]) -> Self {
        let mut engine = Self::start().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        engine.url = format!("http://{}", listener.local_addr().unwrap());
        let serve = async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                read_request(&mut stream).await;
                // The router may refuse the answer before its end.
                drop(stream.write_all(answer).await);
                drop(stream.shutdown().await);
            }
        };
        drop(TaskTracker::new().spawn(serve));
        engine
    }

    /// Answers with a line that does not end. Also returns the number of its bytes so far.
    pub(super) async fn endless() -> (Self, watch::Receiver<usize>) {
        let mut engine = Self::start().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        engine.url = format!("http://{}", listener.local_addr().unwrap());
        let (written, bytes) = watch::channel(0);
        let serve = async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            read_request(&mut stream).await;
            let head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: ";
            stream.write_all(head).await.unwrap();
            let piece = vec![b'x'; 64 << 10];
            while stream.write_all(&piece).await.is_ok() {
                written.send_modify(|sum| *sum += piece.len());
            }
        };
        drop(TaskTracker::new().spawn(serve));
        (engine, bytes)
    }

    pub(super) fn answer_with(&self, status: StatusCode) {
        *self.inner.status.lock().unwrap() = status;
    }

    pub(super) fn transfer_with(&self, params: &str) {
        *self.inner.prefills.params.lock().unwrap() = Some(params.to_owned());
    }

    /// Whether prefill legs are answered.
    pub(super) fn answer_prefills(&self, is_open: bool) {
        self.inner.prefills.is_open.send_replace(is_open);
    }

    pub(super) fn render_with(&self, status: StatusCode, answer: String) {
        *self.inner.rendering.lock().unwrap() = RenderRoutes::With(status, answer);
    }

    pub(super) fn render_never(&self) {
        *self.inner.rendering.lock().unwrap() = RenderRoutes::Never;
    }

    pub(super) fn stores(&self, id: &str) {
        self.inner.stored.lock().unwrap().push(id.to_owned());
    }

    pub(super) fn last(&self) -> Seen {
        self.inner.seen.lock().unwrap().last().unwrap().clone()
    }

    /// The headers of each request so far.
    pub(super) fn inner_headers(&self) -> Vec<HeaderMap> {
        let seen = self.inner.seen.lock().unwrap();
        seen.iter().map(|seen| seen.headers.clone()).collect()
    }

    /// The body of each request so far.
    pub(super) fn bodies(&self) -> Vec<String> {
        let seen = self.inner.seen.lock().unwrap();
        seen.iter().map(|seen| seen.body.clone()).collect()
    }

    pub(super) fn asked(&self) -> usize {
        *self.inner.asked.borrow()
    }

    pub(super) async fn until_asked(&self) {
        let mut asked = self.inner.asked.subscribe();
        let asked = asked.wait_for(|&asked| asked > 0);
        in_time("the engine is asked", asked).await.unwrap();
    }

    pub(super) async fn until_abandoned(&self) {
        let mut abandoned = self.inner.abandoned.subscribe();
        let abandoned = abandoned.wait_for(|&count| count > 0);
        let abandoned = in_time("the engine's work is aborted", abandoned);
        abandoned.await.unwrap();
    }

    /// Sends the next event of the open stream, and waits until the client has it.
    pub(super) async fn release_event(&self, response: &mut reqwest::Response) -> String {
        let number = {
            let mut events = self.inner.events.lock().unwrap();
            *events += 1;
            *events - 1
        };
        self.release(&event(number), response).await
    }

    /// Sends an event, and waits until the client has it.
    pub(super) async fn release(&self, event: &str, response: &mut reqwest::Response) -> String {
        self.send(event).await;
        let chunk = in_time("the client has the event", response.chunk());
        let chunk = chunk.await.unwrap().unwrap();
        String::from_utf8(chunk.to_vec()).unwrap()
    }

    /// Sends an event on the open stream.
    pub(super) async fn send(&self, event: &str) {
        let event = Bytes::from(event.to_owned());
        self.stream().send(Ok(event)).await.unwrap();
    }

    pub(super) fn end_stream(&self) {
        self.inner.streams.lock().unwrap().clear();
    }

    pub(super) fn break_stream(&self) {
        let error = std::io::Error::other("broken on purpose");
        self.stream().try_send(Err(error)).unwrap();
    }

    fn stream(&self) -> mpsc::Sender<std::io::Result<Bytes>> {
        self.inner.streams.lock().unwrap().back().unwrap().clone()
    }
}

/// Reads a request whose body is a JSON object without another one inside.
async fn read_request(stream: &mut TcpStream) {
    let mut request = BytesMut::new();
    while !request.ends_with(b"}") && stream.read_buf(&mut request).await.unwrap() > 0 {}
}

/// Counted as abandoned unless disarmed.
struct Abandoned(Option<Arc<Inner>>);

impl Drop for Abandoned {
    fn drop(&mut self) {
        if let Some(inner) = &self.0 {
            inner.abandoned.send_modify(|count| *count += 1);
        }
    }
}

async fn answer(State(inner): State<Arc<Inner>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    let text = String::from_utf8(body.to_vec()).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap_or_default();
    if let Some(id) = json["store_as"].as_str() {
        inner.stored.lock().unwrap().push(id.to_owned());
    }
    let asked_id = parts.uri.path().strip_prefix("/v1/responses/");
    let asked_id = asked_id.map(|rest| rest.trim_end_matches("/cancel").to_owned());
    let has_id = |id: &String| inner.stored.lock().unwrap().contains(id);
    let is_missing = asked_id.is_some_and(|id| !has_id(&id));
    let renders = parts.uri.path().ends_with("/render");
    inner.seen.lock().unwrap().push(Seen {
        path: parts.uri.path_and_query().unwrap().to_string(),
        headers: parts.headers,
        body: text,
    });
    let mut abandoned = Abandoned(Some(Arc::clone(&inner)));
    inner.asked.send_modify(|asked| *asked += 1);
    let rendering = match renders {
        true => inner.rendering.lock().unwrap().clone(),
        false => RenderRoutes::AsOthers,
    };
    if json["hold"] == true || matches!(rendering, RenderRoutes::Never) {
        std::future::pending::<()>().await;
    }
    if let RenderRoutes::With(status, answer) = rendering {
        abandoned.0 = None;
        return (status, answer).into_response();
    }
    let status = match is_missing {
        true => StatusCode::NOT_FOUND,
        false => *inner.status.lock().unwrap(),
    };
    if status != StatusCode::OK {
        abandoned.0 = None;
        // Read where the status is that of a redirection.
        let location = (header::LOCATION, "/elsewhere");
        return (status, [location], "the engine's body").into_response();
    }
    if json["kv_transfer_params"]["do_remote_decode"] == true {
        let mut is_open = inner.prefills.is_open.subscribe();
        is_open.wait_for(|is_open| *is_open).await.unwrap();
        abandoned.0 = None;
        let params = inner.prefills.params.lock().unwrap().clone();
        let number = *inner.asked.borrow();
        let params = params.unwrap_or_else(|| format!("{{\"remote\" : \"{number}\"}}"));
        let answer = format!("{{\"choices\":[],\"kv_transfer_params\":{params}}}");
        return ([(header::CONTENT_TYPE, "application/json")], answer).into_response();
    }
    if json["stream"] == true {
        return events(&inner, abandoned, json["ready"].as_u64());
    }
    abandoned.0 = None;
    let tokens = json["prompt"].as_array().map_or(0, Vec::len);
    let usage = json!({
        "prompt_tokens": tokens,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": tokens / 16 * 16},
    });
    let id = &json["store_as"];
    let json = json!({"id": id, "object": "text_completion", "usage": usage});
    // As an engine that is a router itself explains.
    let explained = HeaderName::from_static("x-warmroute-overlap-blocks");
    ([(explained, "7")], axum::Json(json)).into_response()
}

/// `ready`: the stream has that many events, which are there already.
fn events(inner: &Arc<Inner>, abandoned: Abandoned, ready: Option<u64>) -> Response {
    let (sender, receiver) = mpsc::channel(8);
    match ready {
        None => inner.streams.lock().unwrap().push_back(sender),
        Some(ready) => {
            for number in 0..usize::try_from(ready).unwrap() {
                sender.try_send(Ok(Bytes::from(event(number)))).unwrap();
            }
        }
    }
    let parts = stream::unfold((receiver, abandoned), |(mut receiver, mut left)| async {
        match receiver.recv().await {
            Some(event) => Some((event, (receiver, left))),
            None => {
                drop(left.0.take());
                None
            }
        }
    });
    Response::builder()
        .header("content-type", "text/event-stream")
        .body(Body::from_stream(parts))
        .unwrap()
}

/// A proxy.
pub(super) struct World {
    pub app: Arc<App>,
    pub url: String,
    pub shutdown: Shutdown,
    pub connections: TaskTracker,
    /// Those of connections to engines.
    pub files: ConnectionFiles,
    pub(super) client: reqwest::Client,
    _rechecks: crate::audit::Rechecks,
}

impl World {
    pub(super) async fn with(engines: &[&Engine]) -> Self {
        Self::in_turn(engines, None).await
    }

    pub(super) async fn with_active_max(engines: &[&Engine], active_max: u32) -> Self {
        Self::in_turn(engines, Some(active_max)).await
    }

    /// Round robin: a test knows which engine is first.
    async fn in_turn(engines: &[&Engine], active_max: Option<u32>) -> Self {
        let knobs = Knobs {
            policy: Policy::RoundRobin,
            active_max,
            ..Knobs::default()
        };
        Self::start(engines, knobs).await
    }

    /// With another router, so that requests may be moved.
    pub(super) async fn with_a_peer(engines: &[&Engine]) -> Self {
        let world = Self::start(engines, Knobs::default()).await;
        world.app.core.core().set_delay(PEER, Some(MOVE_WINDOW_MAX));
        world
    }

    /// Workers w0 and on with the role prefill, then those with the role decode. Every prompt is
    /// split.
    pub(super) async fn with_roles(
        prefill: &[&Engine],
        decode: &[&Engine],
        active_max: Option<u32>,
    ) -> Self {
        let world = Self::in_turn(&[], active_max).await;
        world.set("pd_uncached_threshold = 0");
        let roles = prefill.iter().map(|engine| (engine, WorkerRole::Prefill));
        let roles = roles.chain(decode.iter().map(|engine| (engine, WorkerRole::Decode)));
        for (number, (engine, role)) in roles.enumerate() {
            let entry = WorkerEntry {
                role,
                ..entry(number, engine)
            };
            let (worker, url) = (entry.worker.clone(), entry.url.clone());
            world.app.fleet.register(entry);
            let fleet = &world.app.fleet;
            fleet.observe(&worker, &url, Observation::ProbePassed);
        }
        world
    }

    async fn start(engines: &[&Engine], knobs: Knobs) -> Self {
        let metrics = Arc::new(Metrics::new().unwrap());
        let core = SharedCore::new(core(ROUTER, knobs));
        let index = IndexClient::new(plane(), subjects());
        let journal = Arc::new(Journal::default());
        let (auditor, rechecks) = Auditor::new(
            Arc::clone(&core),
            Arc::clone(&journal),
            Arc::clone(&metrics),
            index.clone(),
        );
        let (shutdown, connections) = (Shutdown::default(), TaskTracker::new());
        let limits = limits();
        let bodies = BodyBudget::new(
            &limits,
            metrics.buffered_bytes().clone(),
            connections.clone(),
            shutdown.force.clone(),
        );
        let fleet = Fleet::new(Arc::clone(&core), None);
        for (number, engine) in (0..).zip(engines) {
            register(&fleet, number, engine);
        }
        let settings = LiveSettings::new(Settings::parse(EXPLAIN).unwrap());
        let (sinks, spans) = CallSinks::traced(&metrics, &settings);
        TaskTracker::new().spawn(spans.run(shutdown.force.clone()));
        let admission = Admission::new(Arc::clone(&core), limits.buffered_bytes, &metrics);
        let places = Arc::clone(&admission).run(fleet.changes(), shutdown.force.clone());
        TaskTracker::new().spawn(places);
        let files = ConnectionFiles::new(64, IntCounter::new("evicted", "evicted").unwrap());
        let app = Arc::new(App {
            admission,
            core,
            fleet,
            index,
            auditor,
            journal,
            bodies,
            engines: engine_client(&settings, &metrics, &files),
            held: HeldRequests::new(metrics.waiting().clone()),
            retries: RetryBudget::default(),
            stored: StoredResponses::default(),
            tenants: Arc::new(Tenants::new(Arc::clone(&settings), LimitSharing::Alone)),
            metrics,
            tokenizers: Arc::default(),
            policy: Policy::Kv,
            settings,
            sinks,
            prompts: PromptPool::start().unwrap(),
            planned: AtomicU64::new(0),
            ready: Arc::default(),
        });
        app.ready.registry_read();
        app.ready.drains_read();
        app.ready.workers_settled();
        app.ready.load_known();
        app.ready.limits_shared();
        let url = serve(&app, &shutdown, &connections).await;
        Self {
            app,
            url,
            shutdown,
            connections,
            files,
            client: client(),
            _rechecks: rechecks,
        }
    }

    /// Applies a settings file.
    pub(super) fn set(&self, toml: &str) {
        let explain = match toml.contains("explain_headers") {
            true => "",
            false => EXPLAIN,
        };
        let settings = Settings::parse(&format!("{toml}\n{explain}"));
        self.app.settings.replace(settings.unwrap());
    }

    /// Registers a further engine.
    pub(super) fn add(&self, number: usize, engine: &Engine) {
        self.add_serving(number, engine, "m");
    }

    /// Registers a further engine of this model, or of none yet.
    pub(super) fn add_serving(&self, number: usize, engine: &Engine, model: &str) {
        let mut entry = entry(number, engine);
        entry.models = vec![model.to_owned()];
        entry.models.retain(|model| !model.is_empty());
        let (worker, url) = (entry.worker.clone(), entry.url.clone());
        self.app.fleet.register(entry);
        self.app
            .fleet
            .observe(&worker, &url, Observation::ProbePassed);
    }

    /// Registers a further engine whose model has a known length.
    pub(super) fn add_bounded(&self, number: usize, engine: &Engine) {
        let entry = WorkerEntry {
            max_model_len: Some(1000),
            ..entry(number, engine)
        };
        let (worker, url) = (entry.worker.clone(), entry.url.clone());
        let fleet = &self.app.fleet;
        fleet.register(entry);
        fleet.observe(&worker, &url, Observation::ProbePassed);
    }

    /// Registers a further engine by this name.
    pub(super) fn add_named(&self, name: &str, engine: &Engine) {
        let entry = WorkerEntry {
            worker: name.into(),
            ..entry(0, engine)
        };
        let (worker, url) = (entry.worker.clone(), entry.url.clone());
        self.app.fleet.register(entry);
        self.app
            .fleet
            .observe(&worker, &url, Observation::ProbePassed);
    }

    /// The engine's probe failed so often that it is not used.
    pub(super) fn set_down(&self, number: usize, engine: &Engine) {
        let worker = format!("w{number}").as_str().into();
        let fleet = &self.app.fleet;
        fleet.observe(&worker, &engine.url, Observation::ConnectRefused);
    }

    pub(super) fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.client.request(method, format!("{}{path}", self.url))
    }

    /// The peer sends a request to a worker, and its message arrives.
    pub(super) fn peer_sends(&self, worker: &str, tokens: u32) {
        let mut peer = core(PEER, Knobs::default());
        let members = self.app.fleet.snapshot().into_iter();
        let entries: Vec<WorkerEntry> = members.map(|member| member.entry).collect();
        peer.set_workers(&entries);
        let others = entries
            .iter()
            .filter(|entry| entry.worker.as_str() != worker);
        let exclude: Vec<Source> = others
            .map(|entry| Source {
                worker: entry.worker.clone(),
                dp_rank: DpRank(0),
            })
            .collect();
        let ask = RouteRequest {
            model: "m",
            prompt: &Prompt::opaque(tokens, BlockSize::new(16).unwrap()),
            exclude: &exclude,
            leg: crate::route::Leg::Whole,
        };
        let now = Instant::now().into_std();
        let admitted = peer.admit(&ask, None, now).unwrap();
        assert_eq!(admitted.decision.source.worker.as_str(), worker);
        let message: LoadMessage = codec::decode(&admitted.message).unwrap();
        self.app.core.apply_remote(&message, now);
    }

    /// The peer is gone, with its load.
    pub(super) fn peer_goes(&self) {
        let mut core = self.app.core.core();
        core.forget(PEER, Instant::now().into_std());
    }

    pub(super) fn post(&self, path: &str, json: &Value) -> reqwest::RequestBuilder {
        self.client.post(format!("{}{path}", self.url)).json(json)
    }

    pub(super) async fn send(&self, path: &str, json: &Value) -> reqwest::Response {
        self.post(path, json).send().await.unwrap()
    }

    pub(super) async fn raw(&self, path: &str, text: &str) -> reqwest::Response {
        let url = format!("{}{path}", self.url);
        let request = self.client.post(url).body(text.to_owned());
        request.send().await.unwrap()
    }

    pub(super) async fn get(&self, path: &str) -> reqwest::Response {
        let url = format!("{}{path}", self.url);
        self.client.get(url).send().await.unwrap()
    }

    pub(super) fn loads(&self) -> Vec<SourceLoad> {
        self.app.core.core().loads()
    }

    pub(super) async fn until(&self, holds: impl Fn(&[SourceLoad]) -> bool) {
        let held = async {
            while !holds(&self.loads()) {
                tokio::task::yield_now().await;
            }
        };
        in_time("the expected load", held).await;
    }

    /// Waits until no slot is open and no body is held.
    pub(super) async fn until_quiet(&self) {
        let idle = |load: &SourceLoad| {
            (
                load.active_requests,
                load.prefill_tokens,
                load.decode_blocks,
            ) == (0, 0, 0)
        };
        self.until(|loads| loads.iter().all(idle)).await;
        let empty = async {
            while self.app.metrics.buffered_bytes().get() > 0 {
                tokio::task::yield_now().await;
            }
        };
        in_time("no body is held", empty).await;
    }

    pub(super) fn newest_decision(&self) -> Vec<Value> {
        let names = |ids: &_| self.app.core.core().sources(ids);
        self.app.journal.newest(1, names)
    }

    /// The value of a series, 0 where there is none.
    pub(super) fn metric(&self, series: &str) -> u64 {
        let catalog = self.app.fleet.catalog();
        self.app.metrics.value_of(series, &catalog.series)
    }
}

/// The clients' HTTP client. Does not follow redirections.
fn client() -> reqwest::Client {
    let tls = warmroute_process::tls::EngineTls::system().unwrap();
    tls.client().timeout(PATIENCE).build().unwrap()
}

const fn limits() -> Limits {
    Limits {
        body_bytes: BODY_MAX,
        buffered_bytes: 8 * BODY_MAX,
        connections: 64,
    }
}

fn entry(number: usize, engine: &Engine) -> WorkerEntry {
    WorkerEntry {
        url: engine.url.clone(),
        ranks: engine.ranks,
        ..worker_entry(&format!("w{number}"), 16)
    }
}

fn register(fleet: &Fleet, number: usize, engine: &Engine) {
    let entry = entry(number, engine);
    let worker = entry.worker.clone();
    fleet.register(entry);
    fleet.observe(&worker, &engine.url, Observation::ProbePassed);
}

fn engine_client(
    settings: &Arc<LiveSettings>,
    metrics: &Arc<Metrics>,
    connections: &ConnectionFiles,
) -> EngineClient {
    let metrics = Arc::clone(metrics);
    let files = EngineFiles {
        connections: connections.clone(),
        ..64.into()
    };
    EngineClient::new(settings, metrics, files, SocketRule::Allowed, 0).unwrap()
}

async fn serve(app: &Arc<App>, shutdown: &Shutdown, connections: &TaskTracker) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = Server {
        listener,
        router: router(Arc::clone(app)),
        connections_max: limits().connections,
        files: ConnectionFiles::default(),
        connections: app.metrics.connections().clone(),
        clients: ClientRules::default(),
    };
    drop(TaskTracker::new().spawn(server.run(shutdown.clone(), connections.clone())));
    url
}
