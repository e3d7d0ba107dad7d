//! An engine behind TLS: decrypts, notes the heads of requests, and passes the bytes on.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use warmroute_process::tls::{ServerTls, ServerTlsFiles};

use super::certificates::PemPair;

const METHODS: [&[u8]; 3] = [b"GET ", b"POST ", b"DELETE "];

pub(super) struct TlsGate {
    port: u16,
    heads: Arc<Mutex<Vec<String>>>,
    cut: watch::Sender<()>,
    closes_at_reuse: Arc<AtomicBool>,
    _accepting: AbortOnDropHandle<()>,
}

impl TlsGate {
    /// `engine`: its URL without TLS.
    pub(super) async fn start(pair: &PemPair, dir: &Path, engine: &str) -> Self {
        let [certificate, key] = pair.write(dir, "engine");
        let tls = ServerTls::load(&ServerTlsFiles {
            certificate,
            key,
            client_ca: None,
        });
        let tls = tls.unwrap();
        let engine = engine.trim_start_matches("http://").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let heads = Arc::<Mutex<Vec<String>>>::default();
        let noted = Arc::clone(&heads);
        let (cut, seen) = watch::channel(());
        let closes_at_reuse = Arc::<AtomicBool>::default();
        let closes = Arc::clone(&closes_at_reuse);
        let accept = async move {
            // Aborting the task closes its connections.
            let links = TaskTracker::new();
            loop {
                if let Ok((client, _)) = listener.accept().await {
                    let (tls, engine, heads) = (tls.clone(), engine.clone(), Arc::clone(&noted));
                    let (mut cut, closes) = (seen.clone(), Arc::clone(&closes));
                    cut.mark_unchanged();
                    links.spawn(async move {
                        tokio::select! {
                            changed = cut.changed() => changed.ok(),
                            ended = link(client, &tls, &engine, &heads, &closes) => ended,
                        }
                    });
                }
            }
        };
        Self {
            port,
            heads,
            cut,
            closes_at_reuse,
            _accepting: AbortOnDropHandle::new(TaskTracker::new().spawn(accept)),
        }
    }

    pub(super) fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// Closes all connections.
    pub(super) fn cut(&self) {
        self.cut.send_replace(());
    }

    /// From now on a connection that had a `POST` ends at its next one, without a word of TLS.
    pub(super) fn close_at_reuse(&self) {
        self.closes_at_reuse.store(true, Ordering::Relaxed);
    }

    /// The beginnings of all requests so far.
    pub(super) fn requests(&self) -> Vec<String> {
        let heads = self.heads.lock().unwrap_or_else(PoisonError::into_inner);
        heads.clone()
    }
}

/// A client sends the head of a request in one piece.
async fn link(
    client: TcpStream,
    tls: &ServerTls,
    engine: &str,
    heads: &Mutex<Vec<String>>,
    closes_at_reuse: &AtomicBool,
) -> Option<()> {
    let client = tls.accept(client).await.ok()?;
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let engine = TcpStream::connect(engine).await.ok()?;
    engine.set_nodelay(true).ok()?;
    let (mut from_engine, mut to_engine) = engine.into_split();
    let upwards = async {
        let mut bytes = vec![0; 64 << 10];
        let mut is_used = false;
        loop {
            let read = from_client.read(&mut bytes).await.ok()?;
            let sent = bytes.get(..read).filter(|sent| !sent.is_empty())?;
            if METHODS.iter().any(|method| sent.starts_with(method)) {
                let head = String::from_utf8_lossy(sent).into_owned();
                heads
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(head);
            }
            if sent.starts_with(b"POST ") {
                if is_used && closes_at_reuse.load(Ordering::Relaxed) {
                    return None;
                }
                is_used = true;
            }
            to_engine.write_all(sent).await.ok()?;
        }
    };
    tokio::select! {
        ended = upwards => ended,
        copied = tokio::io::copy(&mut from_engine, &mut to_client) => copied.ok().map(|_| ()),
    }
}
