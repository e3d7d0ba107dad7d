//! The accept loop: TCP connections in, HTTP/1.1 served by an axum router.
//!
//! Our own instead of `axum::serve`, for three things it has no knob for: a limit on the time a
//! client takes for its request head (also the time an idle connection is kept), a bound on open
//! connections, and a shutdown in two phases that breaks no request: who was connected by the system
//! before the socket closed is served, and a young connection gets to say what it came for. HTTP/2 is
//! not offered: telling the two apart reads a preface without a time limit.

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

/// A request head that is not whole within this is refused with 431; the read that completes it may bring as
/// much again, so that none is longer than twice this. Bearer tokens and traces fit many times.
const HEAD_BYTES_MAX: usize = 64 << 10;

const HEADERS_MAX: usize = 128;

/// After a failed accept (out of file descriptors, mostly) others need time to close.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What a connection gets, from its beginning on, until its first request is here. One that a shutdown
/// finds younger is not closed as idle before: its client is writing.
const FIRST_REQUEST: Duration = Duration::from_secs(1);

/// Asked whether the process lives. The first is the name that is written about.
const HEALTH_PATHS: [&str; 3] = ["/health", "/healthz", "/liveness"];

/// Asked whether it is to be given work.
const READY_PATHS: [&str; 2] = ["/readyz", "/readiness"];

/// The two probes, under each name by which somebody's tools ask.
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
        let Self {
            listener,
            router,
            connections_max,
            connections,
        } = self;
        let permits = Arc::new(Semaphore::new(connections_max));
        let begin = |stream, permit| {
            let open = Open::new(permit, connections.clone());
            tasks.spawn(serve(stream, router.clone(), shutdown.clone(), open));
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
        for stream in last(listener) {
            // More than may be open are refused, as they will be from now on.
            match Arc::clone(&permits).try_acquire_owned() {
                Ok(permit) => begin(stream, permit),
                Err(_) => return,
            }
        }
    }
}

/// The connections that the system completed and nobody accepted yet: to close their socket now would
/// break them off. Asks the system itself, because the runtime may not have heard of them.
fn last(listener: TcpListener) -> impl Iterator<Item = TcpStream> {
    let listener = listener.into_std().ok();
    let accepted = move || {
        let (stream, _) = listener.as_ref()?.accept().ok()?;
        stream.set_nonblocking(true).ok()?;
        TcpStream::from_std(stream).ok()
    };
    std::iter::from_fn(accepted)
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
                    tracing::trace!(%error, "a connection broke off");
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
mod tests {
    use std::net::SocketAddr;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::time::timeout;

    use super::*;

    /// Whatever is waited for; only a defect takes so long.
    const PATIENCE: Duration = Duration::from_secs(30);

    async fn serve(connections_max: usize) -> (SocketAddr, IntGauge, Shutdown) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (connections, shutdown) = (IntGauge::new("n", "n").unwrap(), Shutdown::default());
        let server = Server {
            listener,
            router: Router::new().route("/", get(|| async { "served" })),
            connections_max,
            connections: connections.clone(),
        };
        let tasks = TaskTracker::new();
        tasks.spawn(server.run(shutdown.clone(), tasks.clone()));
        (address, connections, shutdown)
    }

    /// `headers` and no more of them: a head of so many.
    async fn ask(stream: &mut TcpStream, headers: &[(String, String)]) -> String {
        let mut head = "GET / HTTP/1.1\r\n".to_owned();
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        // A server that has read enough may have closed before it was sent all.
        drop(stream.write_all(head.as_bytes()).await);
        let mut answer = vec![0; 1024];
        let read = timeout(PATIENCE, stream.read(&mut answer)).await;
        let read = read.expect("an answer").unwrap_or(0);
        String::from_utf8_lossy(&answer[..read]).into_owned()
    }

    fn status(answer: &str) -> Option<u16> {
        answer.split(' ').nth(1)?.parse().ok()
    }

    #[tokio::test]
    async fn heads_of_too_many_headers_or_bytes_are_refused() {
        let (address, _, shutdown) = serve(8).await;
        let header = |number: usize, bytes: usize| (format!("h{number}"), "v".repeat(bytes));
        let many = |count: usize| (0..count).map(|number| header(number, 1)).collect();
        let long = |bytes: usize| vec![header(0, bytes)];
        let heads: [Vec<(String, String)>; 4] = [
            many(HEADERS_MAX),
            many(HEADERS_MAX + 1),
            long(HEAD_BYTES_MAX / 2),
            long(2 * HEAD_BYTES_MAX),
        ];
        let mut found = Vec::new();
        for headers in heads {
            let mut stream = TcpStream::connect(address).await.unwrap();
            found.push(status(&ask(&mut stream, &headers).await));
        }
        assert_eq!(found, [200, 431, 200, 431].map(Some));
        shutdown.force.cancel();
        shutdown.stop.cancel();
    }

    #[tokio::test]
    async fn who_comes_when_all_places_are_taken_waits_until_one_is_free() {
        let (address, connections, shutdown) = serve(1).await;
        let mut first = TcpStream::connect(address).await.unwrap();
        assert_eq!(status(&ask(&mut first, &[]).await), Some(200));
        let mut second = TcpStream::connect(address).await.unwrap();
        second.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        // The first is served again and again meanwhile, and the second is not.
        for _ in 0..50 {
            assert_eq!(status(&ask(&mut first, &[]).await), Some(200));
            assert_eq!(connections.get(), 1);
            let mut none = [0; 1];
            let looked = timeout(Duration::from_millis(1), second.read(&mut none)).await;
            assert!(looked.is_err(), "the second is served: {looked:?}");
        }
        drop(first);
        let mut answer = [0; 1024];
        let read = timeout(PATIENCE, second.read(&mut answer)).await;
        let read = read.expect("its turn").unwrap();
        let answer = String::from_utf8_lossy(&answer[..read]);
        assert_eq!(status(&answer), Some(200), "{answer}");
        shutdown.force.cancel();
        shutdown.stop.cancel();
    }
}
