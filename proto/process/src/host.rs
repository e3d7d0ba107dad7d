//! The life cycle of a process: serves HTTP until a signal or the early end of a task.

use anyhow::{Context as _, ensure};
use axum::Router;
use tokio::net::TcpListener;
use tokio::time::{Duration, timeout};
use tokio_util::task::TaskTracker;

use crate::server::{ClientRules, ConnectionFiles, ConnectionMetrics, Server, Shutdown};
use crate::signals::Signals;
use crate::tasks::Tasks;

/// Operators, scrapers and probes; routers use the plane.
const CONNECTIONS_MAX: usize = 1024;

/// Operators and scrapers read what they request.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Time for tasks to end, and after them for open HTTP answers.
const END: Duration = Duration::from_secs(4);
const CONNECTIONS_END: Duration = Duration::from_secs(1);

/// Serves until a signal or the early end of a task, then stops the tasks.
pub async fn run(
    listener: TcpListener,
    router: Router,
    mut signals: Signals,
    tasks: Tasks,
) -> anyhow::Result<()> {
    let shutdown = Shutdown::default();
    let connections = TaskTracker::new();
    let server = Server {
        listener,
        router,
        connections_max: CONNECTIONS_MAX,
        files: ConnectionFiles::default(),
        connections: ConnectionMetrics::hidden().context("counting connections")?,
        clients: ClientRules {
            write_timeout: Some(WRITE_TIMEOUT),
            ..ClientRules::default()
        },
    };
    let (server_shutdown, stop) = (shutdown.clone(), tasks.stop.clone());
    let open = connections.clone();
    tasks.spawn("http", async move {
        server.run(server_shutdown, open).await;
        stop.cancelled().await;
    });
    tokio::select! {
        signal = signals.received() => tracing::info!(signal, "ending"),
        () = tasks.down.cancelled() => {}
    }
    let failed = tasks.down.is_cancelled();
    shutdown.stop.cancel();
    if timeout(END, tasks.end()).await.is_err() {
        tracing::error!("some tasks do not end in time");
    }
    connections.close();
    if timeout(CONNECTIONS_END, connections.wait()).await.is_err() {
        shutdown.force.cancel();
        connections.wait().await;
    }
    ensure!(!failed, "a task ended early");
    Ok(())
}
