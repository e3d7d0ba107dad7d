//! A proxy to the nats-server that loses, duplicates and delays routers' load messages. Each router
//! has its own faults; other messages pass unchanged.
//!
//! NATS is a line protocol. Only the server's deliveries matter here: `MSG <subject> <sid> [reply]
//! <bytes>` and `HMSG <subject> <sid> [reply] <header bytes> <bytes>`, each followed by its bytes
//! and an end of line (docs.nats.io, "Client Protocol").

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use tokio::io::{
    AsyncBufReadExt as _, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

/// Rates: 30 % lost, 10 % duplicated, 10 % delivered after the next one.
const LOST: u8 = 30;
const DOUBLED: u8 = LOST + 10;
const LATE: u8 = DOUBLED + 10;

/// Buffered lines; more wait at the server.
const UNDER_WAY_MAX: usize = 1 << 16;

/// Stops when dropped.
pub(crate) struct Lossy {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    _stop: DropGuard,
}

struct Shared {
    /// Subject prefix of the affected deliveries.
    prefix: String,
    far: Duration,
    is_lossy: AtomicBool,
    lost: AtomicU64,
    doubled: AtomicU64,
    late: AtomicU64,
}

impl Lossy {
    /// Starts without losses. `far` is the added delay from the server.
    pub(crate) async fn start(server: String, prefix: String, far: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let shared = Arc::new(Shared {
            prefix,
            far,
            is_lossy: AtomicBool::new(false),
            lost: AtomicU64::new(0),
            doubled: AtomicU64::new(0),
            late: AtomicU64::new(0),
        });
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let accepting = accept(
            listener,
            server,
            Arc::clone(&shared),
            tasks.clone(),
            stop.clone(),
        );
        tasks.spawn(stop.clone().run_until_cancelled_owned(accepting));
        Self {
            address,
            shared,
            _stop: stop.drop_guard(),
        }
    }

    pub(crate) fn lose(&self, lose: bool) {
        self.shared.is_lossy.store(lose, Ordering::SeqCst);
    }

    /// Lost, duplicated and delayed deliveries so far.
    pub(crate) fn counts(&self) -> [u64; 3] {
        let Shared {
            lost,
            doubled,
            late,
            ..
        } = &*self.shared;
        [lost, doubled, late].map(|count| count.load(Ordering::SeqCst))
    }
}

async fn accept(
    listener: TcpListener,
    server: String,
    shared: Arc<Shared>,
    tasks: TaskTracker,
    stop: CancellationToken,
) {
    while let Ok((client, _)) = listener.accept().await {
        let (server, shared) = (server.clone(), Arc::clone(&shared));
        let both_ways = async move {
            let server = TcpStream::connect(server).await?;
            client.set_nodelay(true)?;
            server.set_nodelay(true)?;
            let (mut from_client, to_client) = client.into_split();
            let (from_server, mut to_server) = server.into_split();
            let (to, under_way) = mpsc::channel(UNDER_WAY_MAX);
            // When one side closes, so does the other.
            tokio::select! {
                ended = tokio::io::copy(&mut from_client, &mut to_server) => ended.map(drop),
                ended = deliver(BufReader::new(from_server), to, &shared) => ended,
                ended = arrive(under_way, to_client, shared.far) => ended,
            }
        };
        tasks.spawn(stop.clone().run_until_cancelled_owned(both_ways));
    }
}

async fn deliver(
    mut from: BufReader<impl tokio::io::AsyncRead + Unpin>,
    to: mpsc::Sender<(Instant, Vec<u8>)>,
    shared: &Shared,
) -> io::Result<()> {
    let mut rng = Rng::new();
    // A delivery that waits until another one has passed it.
    let mut held: Option<Vec<u8>> = None;
    let mut frame = Vec::new();
    loop {
        frame.clear();
        if from.read_until(b'\n', &mut frame).await? == 0 {
            return Ok(());
        }
        let is_at_risk = match delivery(&frame) {
            None => false,
            Some((subject, bytes)) => {
                let is_at_risk = subject.starts_with(shared.prefix.as_bytes());
                let line = frame.len();
                frame.resize(line + bytes + b"\r\n".len(), 0);
                from.read_exact(&mut frame[line..]).await?;
                is_at_risk
            }
        };
        let draw = if is_at_risk && shared.is_lossy.load(Ordering::SeqCst) {
            rng.u8(0..100)
        } else {
            u8::MAX
        };
        let count = |counter: &AtomicU64| _ = counter.fetch_add(1, Ordering::SeqCst);
        match draw {
            0..LOST => {
                count(&shared.lost);
                continue;
            }
            LOST..DOUBLED => {
                count(&shared.doubled);
                send(&to, frame.clone()).await?;
            }
            DOUBLED..LATE if held.is_none() => {
                count(&shared.late);
                held = Some(std::mem::take(&mut frame));
                continue;
            }
            _ => {}
        }
        send(&to, std::mem::take(&mut frame)).await?;
        if is_at_risk && let Some(late) = held.take() {
            send(&to, late).await?;
        }
    }
}

async fn send(to: &mpsc::Sender<(Instant, Vec<u8>)>, bytes: Vec<u8>) -> io::Result<()> {
    let sent = to.send((Instant::now(), bytes)).await;
    sent.map_err(|_| io::ErrorKind::BrokenPipe.into())
}

/// Forwards in order, each line after a delay.
async fn arrive(
    mut under_way: mpsc::Receiver<(Instant, Vec<u8>)>,
    mut to: impl AsyncWrite + Unpin,
    far: Duration,
) -> io::Result<()> {
    while let Some((sent, bytes)) = under_way.recv().await {
        if !far.is_zero() {
            sleep_until(sent + far).await;
        }
        to.write_all(&bytes).await?;
    }
    Ok(())
}

/// Subject of a delivery and the number of bytes after its line; `None` for other lines.
fn delivery(line: &[u8]) -> Option<(&[u8], usize)> {
    let mut words = line.trim_ascii_end().split(|&byte| byte == b' ');
    let (verb, subject) = (words.next()?, words.next()?);
    if verb != b"MSG" && verb != b"HMSG" {
        return None;
    }
    let bytes = std::str::from_utf8(words.next_back()?).ok()?;
    Some((subject, bytes.parse().ok()?))
}
