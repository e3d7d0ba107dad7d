//! The accept loop: serves HTTP/1.1 connections with an axum router.
//!
//! `axum::serve` lacks three things: a time limit for request heads, which also ends idle
//! connections; a bound on open connections; and a shutdown in two phases that breaks no request,
//! so that connections in the system's backlog are served, and new connections may send their first
//! request. HTTP/2 is not offered: its detection reads a preface without a time limit.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::MethodRouter;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use prometheus::IntGauge;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A request head that takes longer is an attack or a broken client. Also ends idle connections.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// A longer request head is refused with 431. The read that completes it may add as much again, so
/// that no head is longer than twice this. Bearer tokens and traces fit many times.
const HEAD_BYTES_MAX: usize = 64 << 10;

const HEADERS_MAX: usize = 128;

/// Delay after a failed accept, mostly for lack of file descriptors, so that connections can close.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Time from a connection's beginning in which its first request may arrive: a shutdown does not
/// close a younger connection as idle.
const FIRST_REQUEST: Duration = Duration::from_secs(1);

/// Liveness probes. The first name is the documented one.
const HEALTH_PATHS: [&str; 3] = ["/health", "/healthz", "/liveness"];

/// Readiness probes.
const READY_PATHS: [&str; 2] = ["/readyz", "/readiness"];

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
    pub connections: IntGauge,
}

impl Server {
    /// Serves until `shutdown.stop`. Connections live on in `tasks`.
    pub async fn run(self, shutdown: Shutdown, tasks: TaskTracker) {
        let Self {
            listener,
            router,
            connections_max,
            connections,
        } = self;
        let permits = Arc::new(Semaphore::new(connections_max));
        let begin = |stream, permit| {
            let open = OpenConnection::new(permit, connections.clone());
            tasks.spawn(serve_connection(
                stream,
                router.clone(),
                shutdown.clone(),
                open,
            ));
        };
        loop {
            let accepted = tokio::select! {
                () = shutdown.stop.cancelled() => break,
                accepted = accept(&listener, &permits) => accepted,
            };
            match accepted {
                Some((stream, permit)) => begin(stream, permit),
                None => tokio::time::sleep(ACCEPT_PAUSE).await,
            }
        }
        for stream in backlog(listener) {
            // Beyond the bound they are refused.
            match Arc::clone(&permits).try_acquire_owned() {
                Ok(permit) => begin(stream, permit),
                Err(_) => return,
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

/// An accepted connection with its permit; `None` if accepting failed.
async fn accept(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
) -> Option<(TcpStream, OwnedSemaphorePermit)> {
    let permit = Arc::clone(permits).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => Some((stream, permit)),
        Err(error) => {
            tracing::warn!(%error, "connection not accepted");
            None
        }
    }
}

/// Counts a connection as open while it lives.
struct OpenConnection {
    _permit: OwnedSemaphorePermit,
    gauge: IntGauge,
}

impl OpenConnection {
    fn new(permit: OwnedSemaphorePermit, gauge: IntGauge) -> Self {
        gauge.inc();
        Self {
            _permit: permit,
            gauge,
        }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.gauge.dec();
    }
}

async fn serve_connection(
    stream: TcpStream,
    router: Router,
    shutdown: Shutdown,
    open: OpenConnection,
) {
    // Small writes of tokens must not wait for each other.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "connection closed immediately");
        return;
    }
    let service = TowerToHyperService::new(router);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), service);
    let first_request = Instant::now() + FIRST_REQUEST;
    let stopped = async {
        shutdown.stop.cancelled().await;
        sleep_until(first_request).await;
    };
    tokio::pin!(connection, stopped);
    let mut stopping = false;
    loop {
        tokio::select! {
            ended = &mut connection => {
                if let Err(error) = ended {
                    tracing::trace!(%error, "connection broke");
                }
                break;
            }
            () = &mut stopped, if !stopping => {
                stopping = true;
                connection.as_mut().graceful_shutdown();
            }
            () = shutdown.force.cancelled() => break,
        }
    }
    drop(open);
}

#[cfg(test)]
mod tests;
