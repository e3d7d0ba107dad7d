//! The accept loop: serves connections of HTTP/1.1 and HTTP/2, with or without TLS, with an axum
//! router.
//!
//! `axum::serve` lacks three things: a time limit for request heads, which also ends idle
//! connections; a bound on open connections; and a shutdown in two phases that breaks no request,
//! so that connections in the system's backlog are served, and new connections may send their first
//! request. With TLS, ALPN decides the protocol; without, a client that speaks HTTP/2 is known by its
//! preface (`protocol`).
//!
//! At the bound the connection that is idle longest is closed for a new one, or one that waits for
//! its client to send more of a body or to take more of an answer. While all other
//! connections have a request in flight, further ones get answers to probes only, and 503 otherwise;
//! beyond `PROBE_CONNECTIONS_MAX` probes in flight they are closed. A connection counts from its
//! beginning: a TLS handshake is part of it, and such a connection is idle.

mod files;
mod idle;
mod protocol;
mod seldom;
mod stream;
mod untaken;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderValue, Request, Response, StatusCode, Version, header};
use axum::routing::MethodRouter;
use bytes::Bytes;
use hyper::body::Incoming;
use hyper::service::{Service as _, service_fn};
use hyper_util::service::TowerToHyperService;
use prometheus::{IntCounter, IntGauge};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use files::{ConnectionFile, ConnectionFiles};
use idle::{ArrivingBody, ConnectionActivity, IdleConnections, InFlightBody, ObservedStream};
use protocol::{Protocol, StreamExecutor};
use seldom::Seldom;
use stream::ClientStream;

use crate::connection_threads::ConnectionThreads;
use crate::tls::{ServerTls, agreed_on_http2};

/// A request head that takes longer is an attack or a broken client. Also ends idle connections.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// A TLS handshake is two flights and some milliseconds of work.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// A longer request head is refused with 431. The read that completes it may add as much again, so
/// that no head is longer than twice this. Bearer tokens and traces fit many times.
const HEAD_BYTES_MAX: usize = 64 << 10;

const HEADERS_MAX: usize = 128;

/// Bytes in a socket's send buffer that are not sent yet, from which on nothing is written to it.
/// The kernel would take megabytes for a client that does not read. What is on its way to a client
/// is not bounded by it. A blocked write goes on when half of it is sent, so the write timeout ends a
/// client that takes less within it.
const UNSENT_MAX: u32 = 32 << 10;

/// Delay after a failed accept, mostly for lack of file descriptors, so that connections can close.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Time from a connection's beginning in which its first request may arrive: a shutdown does not
/// close a younger connection as idle.
const FIRST_REQUEST: Duration = Duration::from_secs(1);

/// Liveness probes. The first name is the documented one.
pub(crate) const HEALTH_PATHS: [&str; 3] = ["/health", "/healthz", "/liveness"];

/// Readiness probes.
pub(crate) const READY_PATHS: [&str; 2] = ["/readyz", "/readiness"];

/// Time in which a client of HTTP/2 takes notice that its connection ends. It may have sent further
/// requests before.
const LATE_STREAMS: Duration = Duration::from_secs(5);

/// Connections beyond the bound that get answers to probes: kubelet, balancers and operators open
/// few at a time.
const PROBE_CONNECTIONS_MAX: usize = 16;

/// The answer to other requests on such a connection, in the form of OpenAI's errors.
const FULL: &str = concat!(
    r#"{"error":{"message":"All connections of this server are in use.","#,
    r#""type":"service_unavailable_error","param":null,"code":"connections_full"}}"#,
);

/// The answer to a request on a connection that its port's certificates have outlived.
const OUTDATED: &str = concat!(
    r#"{"error":{"message":"The server has other certificates: open a new connection.","#,
    r#""type":"invalid_request_error","param":null,"code":"connection_outdated"}}"#,
);

/// The answer to a request that two parties may take to be for two servers: RFC 9112, section 3.2.
const TWO_HOSTS: &str = concat!(
    r#"{"error":{"message":"A request must have one Host header only.","#,
    r#""type":"invalid_request_error","param":null,"code":"repeated_host"}}"#,
);

/// The answer to a request whose end two parties may see in two places: RFC 9112, section 6.1.
const TWO_ENCODINGS: &str = concat!(
    r#"{"error":{"message":"A request must have one Transfer-Encoding header only.","#,
    r#""type":"invalid_request_error","param":null,"code":"repeated_transfer_encoding"}}"#,
);

/// The client's address; an extension of every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddress(pub SocketAddr);

/// Whether the path is one of a probe.
#[must_use]
pub fn is_probe(path: &str) -> bool {
    HEALTH_PATHS.contains(&path) || READY_PATHS.contains(&path)
}

/// Routes of the two probes, under all their names.
pub fn probes<S>(health: MethodRouter<S>, ready: MethodRouter<S>) -> Router<S>
where
    S: Clone + Send + Sync + 'static,
{
    let add = |router: Router<S>, paths: &[&str], answer: &MethodRouter<S>| {
        let routes = paths.iter().map(|path| (*path, answer.clone()));
        routes.fold(router, |router, (path, answer)| router.route(path, answer))
    };
    let router = add(Router::new(), &HEALTH_PATHS, &health);
    add(router, &READY_PATHS, &ready)
}

/// The two phases of a shutdown.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    /// Accept no connections, finish open requests.
    pub stop: CancellationToken,
    /// Cut open connections.
    pub force: CancellationToken,
}

/// A listening socket and its router.
pub struct Server {
    pub listener: TcpListener,
    pub router: Router,
    pub connections_max: usize,
    /// Shared with the connections to engines.
    pub files: ConnectionFiles,
    pub connections: ConnectionMetrics,
    pub clients: ClientRules,
}

/// What a server counts of its connections.
#[derive(Clone, Debug)]
pub struct ConnectionMetrics {
    pub open: IntGauge,
    /// Closed while idle or waiting for the client, because a new connection needed their place.
    pub evicted: IntCounter,
}

impl ConnectionMetrics {
    /// Metrics that are not shown.
    pub fn hidden() -> prometheus::Result<Self> {
        Ok(Self {
            open: IntGauge::new("open", "open")?,
            evicted: IntCounter::new("evicted", "evicted")?,
        })
    }
}

/// What clients may do.
#[derive(Clone)]
pub struct ClientRules {
    pub http2: Http2,
    pub windows: Http2Windows,
    /// Asked once for each connection.
    pub half_closed: Arc<dyn Fn() -> HalfClosed + Send + Sync>,
    /// Asked once for each connection; `None`: without TLS.
    pub tls: Arc<dyn Fn() -> Option<ServerTls> + Send + Sync>,
    /// Time after which a connection is closed, and a stream of HTTP/2 reset, whose client takes
    /// nothing of its answer.
    pub write_timeout: Option<Duration>,
    /// A connection of HTTP/2 without a request for so long gets GOAWAY. After twice the time it is
    /// cut.
    pub unused_max: Duration,
}

impl Default for ClientRules {
    fn default() -> Self {
        Self {
            http2: Http2::Refused,
            windows: Http2Windows::default(),
            half_closed: Arc::new(|| HalfClosed::Abort),
            tls: Arc::new(|| None),
            write_timeout: None,
            unused_max: Duration::from_secs(60),
        }
    }
}

/// Whether HTTP/2 without TLS is spoken to clients that begin with its preface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Http2 {
    Offered,
    Refused,
}

/// Bytes that a client of HTTP/2 may send ahead of their reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Http2Windows {
    pub stream: u32,
    /// For all streams of the connection: at a small one, a stream that is not read holds up others.
    pub connection: u32,
}

impl Default for Http2Windows {
    fn default() -> Self {
        Self {
            stream: 512 << 10,
            connection: 512 << 10,
        }
    }
}

/// What becomes of the request of a client that ended its sending side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HalfClosed {
    /// The client counts as gone.
    #[default]
    Abort,
    /// The client gets its answer. One that is gone is noticed when a write to it fails.
    Serve,
}

/// The requests that a connection may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionRole {
    Regular,
    /// Beyond the bound.
    ProbesOnly,
    /// No request is served: its port has other certificates.
    Outdated,
}

impl ConnectionRole {
    fn refuses<B>(self, request: &Request<B>) -> bool {
        match self {
            Self::Regular => false,
            Self::ProbesOnly => !is_probe(request.uri().path()),
            Self::Outdated => true,
        }
    }

    fn outdated_for(self, time: Duration) -> Self {
        if time > LATE_STREAMS {
            Self::Outdated
        } else {
            self
        }
    }
}

/// A bounded number of connections of one role.
struct ConnectionSlots {
    role: ConnectionRole,
    permits: Arc<Semaphore>,
    idle: Arc<IdleConnections>,
}

/// The right of one connection to be open.
struct ConnectionSlot {
    role: ConnectionRole,
    permit: OwnedSemaphorePermit,
    idle: Arc<IdleConnections>,
}

impl ConnectionSlots {
    fn new(role: ConnectionRole, connections_max: usize) -> Self {
        Self {
            role,
            permits: Arc::new(Semaphore::new(connections_max)),
            idle: Arc::default(),
        }
    }

    fn try_take(&self) -> Option<ConnectionSlot> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        Some(self.slot(permit))
    }

    /// Waits for a slot, which an evicted connection frees soon.
    async fn take(&self) -> Option<ConnectionSlot> {
        let permit = Arc::clone(&self.permits).acquire_owned().await.ok()?;
        Some(self.slot(permit))
    }

    fn slot(&self, permit: OwnedSemaphorePermit) -> ConnectionSlot {
        ConnectionSlot {
            role: self.role,
            permit,
            idle: Arc::clone(&self.idle),
        }
    }
}

impl Server {
    /// Serves until `shutdown.stop`. Connections live on in `tasks`.
    pub async fn run(self, shutdown: Shutdown, tasks: TaskTracker) {
        self.run_on(ConnectionThreads::default(), shutdown, tasks)
            .await;
    }

    /// Like [`Self::run`], with connections on these threads.
    pub async fn run_on(self, threads: ConnectionThreads, shutdown: Shutdown, tasks: TaskTracker) {
        let Self {
            listener,
            router,
            connections_max,
            files,
            connections,
            clients,
        } = self;
        let regular = ConnectionSlots {
            idle: Arc::clone(files.idle()),
            ..ConnectionSlots::new(ConnectionRole::Regular, connections_max)
        };
        let probes = ConnectionSlots::new(ConnectionRole::ProbesOnly, PROBE_CONNECTIONS_MAX);
        let begin = |stream, slot| {
            let open = OpenConnection::new(slot, files.count(), connections.open.clone());
            let served = ServedConnection {
                open,
                router: router.clone(),
                shutdown: shutdown.clone(),
                clients: clients.clone(),
                tasks: tasks.clone(),
            };
            threads.spawn(&tasks, stream, |stream| served.run(stream));
        };
        loop {
            let accepted = tokio::select! {
                () = shutdown.stop.cancelled() => break,
                accepted = accept(&listener, &regular, &probes, &files, &connections.evicted) => accepted,
            };
            match accepted {
                Some((stream, slot)) => begin(stream, slot),
                None => tokio::time::sleep(ACCEPT_PAUSE).await,
            }
        }
        for stream in backlog(listener) {
            // Beyond the bounds they are refused.
            match regular.try_take().filter(|_| files.make_room()) {
                Some(slot) => begin(stream, slot),
                None => return,
            }
        }
    }
}

/// The connections in the system's backlog, which closing the socket would break. Read from the
/// system directly, because the runtime may not have their event yet.
fn backlog(listener: TcpListener) -> impl Iterator<Item = TcpStream> {
    let listener = listener.into_std().ok();
    let accepted = move || {
        let (stream, _) = listener.as_ref()?.accept().ok()?;
        stream.set_nonblocking(true).ok()?;
        TcpStream::from_std(stream).ok()
    };
    std::iter::from_fn(accepted)
}

/// An accepted connection with its slot; `None` if accepting failed.
async fn accept(
    listener: &TcpListener,
    regular: &ConnectionSlots,
    probes: &ConnectionSlots,
    files: &ConnectionFiles,
    evicted: &IntCounter,
) -> Option<(TcpStream, ConnectionSlot)> {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "connection not accepted");
                return None;
            }
        };
        let slot = match regular.try_take() {
            Some(slot) if files.make_room() => slot,
            None if regular.idle.evict() => {
                evicted.inc();
                regular.take().await?
            }
            Some(_) | None => match probes.try_take() {
                Some(slot) => slot,
                None if probes.idle.evict() => {
                    evicted.inc();
                    probes.take().await?
                }
                // Each of them has a probe in flight: waiting would stop accepting.
                None => continue,
            },
        };
        return Some((stream, slot));
    }
}

/// Counts a connection as open while it lives.
struct OpenConnection {
    role: ConnectionRole,
    activity: Arc<ConnectionActivity>,
    _permit: OwnedSemaphorePermit,
    _file: ConnectionFile,
    gauge: IntGauge,
}

impl OpenConnection {
    fn new(slot: ConnectionSlot, file: ConnectionFile, gauge: IntGauge) -> Self {
        gauge.inc();
        Self {
            role: slot.role,
            activity: ConnectionActivity::new(slot.idle),
            _permit: slot.permit,
            _file: file,
            gauge,
        }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.activity.close();
        self.gauge.dec();
    }
}

fn set_options(stream: &TcpStream) -> io::Result<()> {
    // Small writes of tokens must not wait for each other.
    stream.set_nodelay(true)?;
    #[cfg(target_os = "linux")]
    if let Err(error) = socket2::SockRef::from(stream).set_tcp_notsent_lowat(UNSENT_MAX) {
        tracing::debug!(%error, "unsent bytes of a connection are not bounded");
    }
    Ok(())
}

/// A connection and what serves it.
struct ServedConnection {
    open: OpenConnection,
    router: Router,
    shutdown: Shutdown,
    clients: ClientRules,
    tasks: TaskTracker,
}

/// A connection whose protocol is known.
struct BegunConnection {
    protocol: Protocol,
    /// By which the client was let in.
    tls: Option<ServerTls>,
    /// Bytes that were read already.
    read: Bytes,
    stream: ClientStream,
}

impl ServedConnection {
    async fn run(self, stream: TcpStream) {
        if let Err(error) = set_options(&stream) {
            tracing::debug!(%error, "connection closed immediately");
            return;
        }
        let first_request = Instant::now() + FIRST_REQUEST;
        let stopped = async {
            self.shutdown.stop.cancelled().await;
            sleep_until(first_request).await;
        };
        tokio::pin!(stopped);
        let peer = stream.peer_addr().ok().map(PeerAddress);
        let begun = tokio::select! {
            biased;
            begun = self.begin(stream) => begun,
            () = &mut stopped => return,
            () = self.ended(Protocol::Http1) => return,
        };
        match begun {
            Ok(begun) => self.serve(begun, peer, stopped).await,
            Err(error) => {
                tracing::debug!(?peer, %error, "connection broke before its first request");
            }
        }
    }

    /// Serves a connection's requests until `stopped`, or until [`ConnectionEnd::by_tls`].
    async fn serve(
        &self,
        begun: BegunConnection,
        peer: Option<PeerAddress>,
        stopped: Pin<&mut impl Future<Output = ()>>,
    ) {
        let (protocol, tls) = (begun.protocol, begun.tls);
        let stream = ObservedStream {
            begun: begun.read,
            stream: begun.stream,
            activity: Arc::clone(&self.open.activity),
            write_timeout: self.clients.write_timeout,
            write_deadline: None,
        };
        let router = TowerToHyperService::new(self.router.clone());
        let (activity, role) = (Arc::clone(&self.open.activity), self.open.role);
        let tls_in_force = Arc::clone(&self.clients.tls);
        let outdated = CancellationToken::new();
        let ends = outdated.clone();
        let outdated_since = OnceLock::new();
        let service = service_fn(move |mut request: Request<Incoming>| {
            if let Some(peer) = peer {
                request.extensions_mut().insert(peer);
            }
            let end = ConnectionEnd::by_tls(protocol, tls.as_ref(), tls_in_force().as_ref());
            // HTTP/2 has no header by which a client learns it.
            let (role, end) = match (protocol, end) {
                (Protocol::Http2, ConnectionEnd::Closed) => {
                    ends.cancel();
                    let now = Instant::now();
                    let since = *outdated_since.get_or_init(|| now);
                    (role.outdated_for(now - since), ConnectionEnd::Open)
                }
                (Protocol::Http1 | Protocol::Http2, end) => (role, end),
            };
            // A client would send its requests on this connection for as long as it is open.
            if protocol == Protocol::Http2 && role.refuses(&request) {
                ends.cancel();
            }
            let served = serve_request(&activity, role, &router, request);
            async move { served.await.map(|response| end.signed(response)) }
        });
        let finished = self.finished(protocol, stopped, &outdated);
        tokio::pin!(finished);
        match protocol {
            Protocol::Http1 => {
                let half_closed = (self.clients.half_closed)();
                let connection = protocol::http1(stream, half_closed, service);
                self.drive(
                    protocol,
                    connection,
                    |open| open.graceful_shutdown(),
                    finished,
                )
                .await;
            }
            Protocol::Http2 => {
                let streams = StreamExecutor {
                    tasks: self.tasks.clone(),
                    write_timeout: self.clients.write_timeout,
                    activity: Arc::clone(&self.open.activity),
                };
                let connection = protocol::http2(stream, streams, self.clients.windows, service);
                self.drive(
                    protocol,
                    connection,
                    |open| open.graceful_shutdown(),
                    finished,
                )
                .await;
            }
        }
    }

    /// Finds out what the client speaks, within a bounded time.
    async fn begin(&self, mut stream: TcpStream) -> io::Result<BegunConnection> {
        let (protocol, read) = match ((self.clients.tls)(), self.clients.http2) {
            (Some(tls), _) => {
                let mut accepted = timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)).await??;
                let (protocol, read) = if agreed_on_http2(&accepted) {
                    // Until the preface has arrived, hyper has no time limit and cannot shut down.
                    timeout(HEAD_TIMEOUT, protocol::detect(&mut accepted)).await??
                } else {
                    (Protocol::Http1, Bytes::new())
                };
                return Ok(BegunConnection {
                    protocol,
                    tls: Some(tls),
                    read,
                    stream: ClientStream::Tls(Box::new(accepted)),
                });
            }
            (None, Http2::Refused) => (Protocol::Http1, Bytes::new()),
            (None, Http2::Offered) => {
                timeout(HEAD_TIMEOUT, protocol::detect(&mut stream)).await??
            }
        };
        Ok(BegunConnection {
            protocol,
            tls: None,
            read,
            stream: ClientStream::Plain(stream),
        })
    }

    /// The connection is to end after its requests in flight.
    async fn finished(
        &self,
        protocol: Protocol,
        stopped: Pin<&mut impl Future<Output = ()>>,
        outdated: &CancellationToken,
    ) {
        tokio::select! {
            () = stopped => {}
            () = outdated.cancelled() => {}
            () = self.is_unused(protocol, self.clients.unused_max) => {}
        }
    }

    /// The connection is to be cut.
    async fn ended(&self, protocol: Protocol) {
        tokio::select! {
            () = self.shutdown.force.cancelled() => {}
            () = self.open.activity.evicted() => {}
            // The client does not take what is left of its answers.
            () = self.is_unused(protocol, 2 * self.clients.unused_max) => {}
        }
    }

    /// Returns when a connection of HTTP/2 is idle for so long. Others end by the time limit of their
    /// next head.
    async fn is_unused(&self, protocol: Protocol, time: Duration) {
        match protocol {
            Protocol::Http1 => std::future::pending().await,
            Protocol::Http2 => self.open.activity.idle_for(time).await,
        }
    }

    /// Serves a connection to its end. `finish` ends it after its requests in flight.
    async fn drive<C>(
        &self,
        protocol: Protocol,
        connection: C,
        finish: impl Fn(Pin<&mut C>),
        stopped: Pin<&mut impl Future<Output = ()>>,
    ) where
        C: Future<Output = hyper::Result<()>>,
    {
        tokio::pin!(connection);
        let ended = self.ended(protocol);
        tokio::pin!(ended);
        let (mut stopped, mut ended) = (Seldom::new(stopped), Seldom::new(ended));
        let mut stopping = false;
        loop {
            tokio::select! {
                biased;
                ended = &mut connection => {
                    if let Err(error) = ended {
                        tracing::trace!(%error, "connection broke");
                    }
                    return;
                }
                () = &mut stopped, if !stopping => {
                    stopping = true;
                    finish(connection.as_mut());
                }
                () = &mut ended => return,
            }
        }
    }
}

/// What follows the answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionEnd {
    Open,
    Closed,
}

impl ConnectionEnd {
    /// A connection ends with its next answer when its port's certificates are replaced. One of
    /// HTTP/2 ends only if other clients are let in: some clients lose all streams in flight by
    /// GOAWAY, so that it goes on until it is unused.
    fn by_tls(protocol: Protocol, begun: Option<&ServerTls>, in_force: Option<&ServerTls>) -> Self {
        let Some(begun) = begun else {
            return Self::Open;
        };
        let goes_on = in_force.is_some_and(|in_force| match protocol {
            Protocol::Http1 => in_force == begun,
            Protocol::Http2 => in_force.admits_as(begun),
        });
        if goes_on { Self::Open } else { Self::Closed }
    }

    fn signed<B>(self, mut response: Response<B>) -> Response<B> {
        if self == Self::Closed {
            let close = HeaderValue::from_static("close");
            response.headers_mut().insert(header::CONNECTION, close);
        }
        response
    }
}

fn serve_request(
    activity: &Arc<ConnectionActivity>,
    role: ConnectionRole,
    router: &TowerToHyperService<Router>,
    request: Request<Incoming>,
) -> impl Future<Output = Result<Response<InFlightBody>, Infallible>> + Send + 'static + use<> {
    let in_flight = activity.begin();
    let protocol = match request.version() {
        Version::HTTP_2 => Protocol::Http2,
        _ => Protocol::Http1,
    };
    let is_twice = |name| request.headers().get_all(name).iter().nth(1).is_some();
    let served = match role {
        _ if is_twice(header::HOST) => Err(refusal(StatusCode::BAD_REQUEST, TWO_HOSTS)),
        _ if is_twice(header::TRANSFER_ENCODING) => {
            Err(refusal(StatusCode::BAD_REQUEST, TWO_ENCODINGS))
        }
        ConnectionRole::Outdated => Err(refusal(StatusCode::MISDIRECTED_REQUEST, OUTDATED)),
        ConnectionRole::ProbesOnly if role.refuses(&request) => Err(full()),
        ConnectionRole::Regular | ConnectionRole::ProbesOnly => {
            let watched = |body| ArrivingBody::new(body, Arc::clone(activity));
            Ok(router.call(request.map(watched)))
        }
    };
    async move {
        let mut response = match served {
            Ok(served) => served.await?,
            Err(refusal) => refusal,
        };
        if protocol == Protocol::Http2 {
            // RFC 9113, section 8.2.2, forbids it.
            response.headers_mut().remove(header::CONNECTION);
        }
        untaken::handed_over();
        Ok(response.map(|body| InFlightBody::new(body, in_flight, protocol)))
    }
}

/// The answer where only probes are served.
fn full() -> Response<Body> {
    let mut response = refusal(StatusCode::SERVICE_UNAVAILABLE, FULL);
    let soon = HeaderValue::from_static("1");
    response.headers_mut().insert(header::RETRY_AFTER, soon);
    response
}

/// An answer that ends the connection.
fn refusal(status: StatusCode, body: &'static str) -> Response<Body> {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    for (name, value) in [
        (header::CONTENT_TYPE, "application/json"),
        (header::CONNECTION, "close"),
    ] {
        let value = HeaderValue::from_static(value);
        response.headers_mut().insert(name, value);
    }
    response
}

#[cfg(test)]
mod tests;
