//! The accept loop: TCP connections in, HTTP/1.1 served by an axum router.
//!
//! Our own instead of `axum::serve`, for three things it has no knob for: a limit on the time a
//! client takes for its request head (also the time an idle connection is kept), a bound on open
//! connections, and a shutdown in two phases. HTTP/2 is not offered: telling the two apart reads a
//! preface without a time limit.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use prometheus::IntGauge;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A request head that takes longer is an attack or a broken client. Also ends idle connections.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// A request head beyond this is refused with 431. Bearer tokens and traces fit many times.
const HEAD_BYTES_MAX: usize = 64 << 10;

const HEADERS_MAX: usize = 128;

/// After a failed accept (out of file descriptors, mostly) others need time to close.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How a server ends: first nothing new, then nothing at all.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    /// Accept nothing, finish what is open.
    pub stop: CancellationToken,
    /// Cut what is open.
    pub force: CancellationToken,
}

/// One listening socket and what it serves.
pub struct Server {
    pub listener: TcpListener,
    pub router: Router,
    pub connections_max: usize,
    pub connections: IntGauge,
}

impl Server {
    /// Serves until `shutdown.stop`. Connections live on in `tasks`.
    pub async fn run(self, shutdown: Shutdown, tasks: TaskTracker) {
        let permits = Arc::new(Semaphore::new(self.connections_max));
        loop {
            let accepted = tokio::select! {
                () = shutdown.stop.cancelled() => return,
                accepted = accept(&self.listener, &permits) => accepted,
            };
            let Some((stream, permit)) = accepted else {
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            let open = Open::new(permit, self.connections.clone());
            let connection = serve(stream, self.router.clone(), shutdown.clone(), open);
            tasks.spawn(connection);
        }
    }
}

/// An accepted connection with its place among those allowed; `None` if accepting failed.
async fn accept(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
) -> Option<(TcpStream, OwnedSemaphorePermit)> {
    let permit = Arc::clone(permits).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => Some((stream, permit)),
        Err(error) => {
            tracing::warn!(%error, "accepting a connection failed");
            None
        }
    }
}

/// A connection counts as open as long as this lives.
struct Open {
    _permit: OwnedSemaphorePermit,
    gauge: IntGauge,
}

impl Open {
    fn new(permit: OwnedSemaphorePermit, gauge: IntGauge) -> Self {
        gauge.inc();
        Self {
            _permit: permit,
            gauge,
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.gauge.dec();
    }
}

async fn serve(stream: TcpStream, router: Router, shutdown: Shutdown, open: Open) {
    // Tokens are small and must not wait for each other.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection was gone at once");
        return;
    }
    let service = TowerToHyperService::new(router);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let mut stopping = false;
    loop {
        tokio::select! {
            ended = &mut connection => {
                if let Err(error) = ended {
                    tracing::trace!(%error, "a connection broke off");
                }
                break;
            }
            () = shutdown.stop.cancelled(), if !stopping => {
                stopping = true;
                connection.as_mut().graceful_shutdown();
            }
            () = shutdown.force.cancelled() => break,
        }
    }
    drop(open);
}
