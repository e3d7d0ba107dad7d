//! HTTP client for the engines: no redirects, decompression, proxies or total timeout. A worker's
//! URL says whether TLS is spoken; `engines.ca` is asked at each handshake.
//!
//! An engine may close an idle connection while the next request is written to it. Such a request
//! is sent once more, on a new connection, if a reused connection closed before the answer's head
//! and within [`STALE_MAX`]. An engine that crashes on the request looks alike for so long, so
//! such a request may reach one engine twice; a failure of the second sending is reported as that
//! of the first.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::http::header::HOST;
use axum::http::{HeaderMap, HeaderValue, Method, Request, Response};
use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http_body_util::Full;
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};
use tower::util::MapFutureLayer;
use warmroute_process::connection_threads::current_number;
use warmroute_process::server::ConnectionFiles;
use warmroute_process::tls::EngineTls;

use super::engine_body::EngineBody;
use super::images::ImageRenders;
use crate::engine_clients::{EngineClients, SocketRule};
use crate::engine_connector::{
    AddressError, ConnectionOpening, EngineConnector, engine_uri, names_socket,
};
use crate::engine_error::is_closed;
use crate::engine_keys::EngineKeys;
use crate::metrics::{Metrics, RetryReason};
use crate::settings::LiveSettings;

/// Below the 5 s for which uvicorn, vLLM's HTTP server, keeps an idle connection: the side that
/// writes next should be the one that closes.
const IDLE_MAX: Duration = Duration::from_secs(4);

/// Longest time from sending a request to the end of a connection that the engine had closed.
const STALE_MAX: Duration = Duration::from_millis(100);

/// What a request to a socket has in place of a host.
const SOCKET_HOST: HeaderValue = HeaderValue::from_static("localhost");

type HttpClient = legacy::Client<EngineConnector, Full<Bytes>>;

pub(super) type EngineRequest = Request<Full<Bytes>>;

pub(super) type EngineResponse = Response<EngineBody>;

tokio::task_local! {
    /// The connection of the request that the task sends.
    static CONNECTION: Cell<EngineConnection>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EngineConnection {
    New,
    /// From the pool: no connection was opened for the request, or a pooled one was free first.
    Reused,
}

/// Bytes of an answer that are read ahead of the client. Bounds heads, too.
const READ_BYTES_MAX: usize = 64 << 10;

/// The files that requests may use.
#[derive(Clone)]
pub(crate) struct EngineFiles {
    pub requests_max: usize,
    pub connections: ConnectionFiles,
}

#[cfg(test)]
impl From<usize> for EngineFiles {
    fn from(requests_max: usize) -> Self {
        Self {
            requests_max,
            connections: ConnectionFiles::default(),
        }
    }
}

#[derive(Clone)]
pub(crate) struct EngineClient {
    /// The pool of each thread that serves connections, after that of all other threads: a
    /// connection belongs to the runtime that opened it.
    pools: Arc<[HttpClient]>,
    /// Opens a connection for each request.
    unpooled: HttpClient,
    sockets: SocketRule,
    /// With connections of its own: a connection belongs to the runtime that opened it.
    background: EngineClients,
    tls: EngineTls,
    keys: EngineKeys,
    metrics: Arc<Metrics>,
    /// Bounds the files of requests in flight: clients of HTTP/2 send many on one connection.
    files: Arc<Semaphore>,
    renders: Arc<ImageRenders>,
}

impl EngineClient {
    pub(crate) fn new(
        settings: &Arc<LiveSettings>,
        metrics: Arc<Metrics>,
        files: EngineFiles,
        sockets: SocketRule,
        connection_threads: usize,
    ) -> anyhow::Result<Self> {
        let live = Arc::clone(settings);
        let tls = EngineTls::new(move || live.current().engine_authorities())?;
        let opening = ConnectionOpening {
            files: files.connections,
            on_connected: note_new_connection,
        };
        let connector = EngineConnector::new(&tls, Arc::clone(settings), opening);
        let client = |idle_connections_max| {
            legacy::Client::builder(TokioExecutor::new())
                .timer(TokioTimer::new())
                .pool_timer(TokioTimer::new())
                .http1_max_buf_size(READ_BYTES_MAX)
                .pool_idle_timeout(IDLE_MAX)
                .pool_max_idle_per_host(idle_connections_max)
                .build(connector.clone())
        };
        let pools = (0..=connection_threads).map(|_| client(usize::MAX));
        let (pools, unpooled) = (pools.collect(), client(0));
        let (for_builder, settings) = (tls.clone(), Arc::clone(settings));
        let background = EngineClients::new(sockets, move || {
            for_builder
                .client()
                .retry(reqwest::retry::never())
                .referer(false)
                .tcp_nodelay(true)
                .connector_layer(connect_rules(&settings))
                .pool_idle_timeout(IDLE_MAX)
        })?;
        Ok(Self {
            pools,
            unpooled,
            sockets,
            background,
            tls,
            keys: EngineKeys::default(),
            metrics,
            files: Arc::new(Semaphore::new(
                files.requests_max.min(Semaphore::MAX_PERMITS),
            )),
            renders: Arc::default(),
        })
    }

    /// The right to send a request; `None` while as many are in flight as files may be open.
    pub(super) fn permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.files).try_acquire_owned().ok()
    }

    /// The renderings in progress.
    pub(super) const fn renders(&self) -> &Arc<ImageRenders> {
        &self.renders
    }

    /// For probes and other requests of the background runtime, which handle failures themselves.
    pub(crate) const fn background(&self) -> &EngineClients {
        &self.background
    }

    /// The pool of the current thread.
    fn pool(&self) -> &HttpClient {
        let own = current_number().and_then(|number| self.pools.get(number + 1));
        own.unwrap_or(&self.pools[0])
    }

    /// A request for [`Self::send`].
    pub(super) fn request(
        &self,
        method: Method,
        address: &str,
        path: &str,
        mut headers: HeaderMap,
        body: Bytes,
    ) -> Result<EngineRequest, AddressError> {
        let uri = engine_uri(self.sockets, address, path)?;
        if names_socket(&uri) {
            headers.insert(HOST, SOCKET_HOST);
        }
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = uri;
        *request.headers_mut() = headers;
        Ok(request)
    }

    pub(crate) const fn tls(&self) -> &EngineTls {
        &self.tls
    }

    /// The keys of workers that have one of their own.
    pub(crate) const fn keys(&self) -> &EngineKeys {
        &self.keys
    }

    /// Sends a request and waits for the head of the answer. `again` makes the request once more.
    pub(super) async fn send(
        &self,
        request: EngineRequest,
        again: impl FnOnce() -> Option<EngineRequest>,
    ) -> Result<EngineResponse, legacy::Error> {
        let began = Instant::now();
        let sent = async {
            let response = self.pool().request(request).await;
            (response, CONNECTION.with(Cell::get))
        };
        let response = match CONNECTION
            .scope(Cell::new(EngineConnection::Reused), sent)
            .await
        {
            (Err(error), EngineConnection::Reused)
                if began.elapsed() <= STALE_MAX && is_closed(&error) =>
            {
                let Some(copy) = again() else {
                    return Err(error);
                };
                tracing::debug!(%error, "reused connection failed, sending on a new one");
                self.metrics.retried(RetryReason::StaleConnection);
                let second = self.unpooled.request(copy).await;
                // The engine may have crashed on the first sending: no connection to it now.
                second.map_err(|second| {
                    tracing::debug!(error = %second, "new connection failed too");
                    error
                })
            }
            (response, _) => response,
        };
        response.map(|response| response.map(EngineBody::from))
    }
}

/// Bounds the time of connecting by the settings in force.
fn connect_rules<F, C, E>(
    settings: &Arc<LiveSettings>,
) -> MapFutureLayer<impl Fn(F) -> BoxFuture<'static, Result<C, E>> + Clone + use<F, C, E>>
where
    F: Future<Output = Result<C, E>> + Send + 'static,
    E: From<io::Error>,
{
    let settings = Arc::clone(settings);
    MapFutureLayer::new(move |connecting: F| {
        let time_max = settings.current().connect_timeout();
        let connected = async move {
            match timeout(time_max, connecting).await {
                Ok(connected) => connected,
                Err(elapsed) => Err(io::Error::from(elapsed).into()),
            }
        };
        connected.boxed()
    })
}

/// Runs when a connection is open: in the task of its request, or in another task if the request
/// was sent on a pooled connection first.
fn note_new_connection() {
    let note = |connection: &Cell<EngineConnection>| connection.set(EngineConnection::New);
    CONNECTION.try_with(note).unwrap_or_default();
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use tokio::net::TcpSocket;

    use super::*;
    use crate::settings::Settings;

    /// A listener whose queue is full completes no further connection.
    #[tokio::test(start_paused = true)]
    async fn connecting_ends_at_the_time_limit_in_force() {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = socket.listen(0).unwrap();
        let address = listener.local_addr().unwrap();
        let connect = || TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok();
        let held: Vec<_> = std::iter::from_fn(connect).take(64).collect();
        assert!(held.len() < 64, "the queue has no bound");
        let settings = LiveSettings::new(Settings::default());
        let metrics = Arc::new(Metrics::new().unwrap());
        let client =
            EngineClient::new(&settings, metrics, 8.into(), SocketRule::Allowed, 0).unwrap();
        for millis in [250, 700] {
            let text = format!("connect_timeout_ms = {millis}");
            settings.replace(Settings::parse(&text).unwrap());
            let since = Instant::now();
            let sent = client
                .background()
                .get(&format!("http://{address}"), "/")
                .send();
            let error = sent.await.unwrap_err();
            assert!(error.is_connect() && error.is_timeout(), "{error:?}");
            let waited = since.elapsed().as_millis();
            assert!((millis..millis + 2).contains(&waited), "{waited}");
        }
    }
}
