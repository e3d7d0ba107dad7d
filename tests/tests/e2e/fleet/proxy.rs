//! A TCP link that passes, holds or refuses bytes.

use std::io;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Open,
    /// Connections stay open and carry nothing, like dropped packets.
    Silent,
    /// Connections close, and new ones too, like a host that is down.
    Refused,
}

pub(crate) struct Proxy {
    port: u16,
    way: watch::Sender<Way>,
    _accepting: AbortOnDropHandle<()>,
}

impl Proxy {
    /// Connects to the server of a `nats://` address.
    pub(crate) async fn start(url: &str) -> Self {
        let server = url.trim_start_matches("nats://").to_owned();
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let (way, seen) = watch::channel(Way::Open);
        let tasks = TaskTracker::new();
        let accept = async move {
            // Aborting the task closes its connections.
            let links = TaskTracker::new();
            loop {
                if let Ok((client, _)) = listener.accept().await {
                    let (server, way) = (server.clone(), seen.clone());
                    links.spawn(async move { link(client, &server, way).await.unwrap_or(()) });
                }
            }
        };
        Self {
            port,
            way,
            _accepting: AbortOnDropHandle::new(tasks.spawn(accept)),
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    pub(crate) fn set(&self, way: Way) {
        self.way.send_replace(way);
    }
}

async fn link(client: TcpStream, server: &str, way: watch::Receiver<Way>) -> io::Result<()> {
    if !is_open(&mut way.clone()).await {
        return Ok(());
    }
    let server = TcpStream::connect(server).await?;
    for side in [&client, &server] {
        side.set_nodelay(true)?;
    }
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    // When one side ends, so does the other.
    tokio::select! {
        ended = pump(from_client, to_server, way.clone()) => ended,
        ended = pump(from_server, to_client, way) => ended,
    }
}

async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut way: watch::Receiver<Way>,
) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let read = tokio::select! {
            read = from.read(&mut buffer) => read?,
            _ = refused(way.clone()) => return Ok(()),
        };
        if read == 0 || !is_open(&mut way).await {
            return Ok(());
        }
        to.write_all(&buffer[..read]).await?;
    }
}

async fn refused(mut way: watch::Receiver<Way>) {
    // Without its sender the link is closed.
    drop(way.wait_for(|way| *way == Way::Refused).await.map(|_| ()));
}

/// Waits while it is silent. Returns false if it is refused.
async fn is_open(way: &mut watch::Receiver<Way>) -> bool {
    let decided = way.wait_for(|way| *way != Way::Silent).await;
    decided.is_ok_and(|way| *way == Way::Open)
}
