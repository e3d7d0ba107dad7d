//! The ZMQ side of the fake engine. Publishing writes to the sockets directly: an engine on its own
//! machine would take no processor time from the measured parts.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use anyhow::Context as _;

/// vLLM's default.
const BUFFER_STEPS: usize = 10_000;
/// High-water mark of each subscriber, equal to vLLM's.
const HWM: i32 = 100_000;
/// Bound of the wait for a replay request.
const POLL_MS: i64 = 5;
/// Replaces the sequence number after the last batch of a replay.
const END_OF_REPLAY: [u8; 8] = [0xFF; 8];

/// Batches by sequence number.
type Kept = Mutex<VecDeque<(u64, Arc<[u8]>)>>;

/// All ranks' sockets: one PUB socket each, and one thread for all replays.
pub(crate) struct Publishers {
    ranks: Vec<Rank>,
    stop: Arc<AtomicBool>,
    replays: Option<JoinHandle<()>>,
}

struct Rank {
    live: Mutex<zmq::Socket>,
    kept: Arc<Kept>,
}

impl Publishers {
    /// A rank's port is rank 0's port plus its number.
    pub(crate) fn start(
        host: IpAddr,
        ports: impl Iterator<Item = (u16, u16)>,
    ) -> anyhow::Result<Self> {
        let context = zmq::Context::new();
        let mut ranks = Vec::new();
        let mut replays = Vec::new();
        for (live_port, replay_port) in ports {
            let live = context.socket(zmq::PUB)?;
            live.set_sndhwm(HWM)?;
            bind(&live, host, live_port)?;
            let replay = context.socket(zmq::ROUTER)?;
            bind(&replay, host, replay_port)?;
            let kept = Arc::<Kept>::default();
            replays.push((replay, Arc::clone(&kept)));
            ranks.push(Rank {
                live: Mutex::new(live),
                kept,
            });
        }
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("replays".to_owned());
        let replays = thread.spawn(move || serve(&replays, &stopped))?;
        Ok(Self {
            ranks,
            stop,
            replays: Some(replays),
        })
    }

    pub(crate) const fn ranks(&self) -> usize {
        self.ranks.len()
    }

    pub(crate) fn publish(&self, rank: usize, seq: u64, payload: &[u8]) -> anyhow::Result<()> {
        let rank = self.ranks.get(rank).context("a rank")?;
        let mut kept = lock(&rank.kept);
        kept.push_back((seq, payload.into()));
        if kept.len() > BUFFER_STEPS {
            kept.pop_front();
        }
        drop(kept);
        let frames = [&b""[..], &seq.to_be_bytes(), payload];
        Ok(lock(&rank.live).send_multipart(frames, 0)?)
    }
}

impl Drop for Publishers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(replays) = self.replays.take() {
            drop(replays.join());
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn bind(socket: &zmq::Socket, host: IpAddr, port: u16) -> zmq::Result<()> {
    socket.set_linger(0)?;
    socket.bind(&format!("tcp://{}", SocketAddr::new(host, port)))
}

fn serve(ranks: &[(zmq::Socket, Arc<Kept>)], stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        let mut asked: Vec<_> = ranks
            .iter()
            .map(|(replay, _)| replay.as_poll_item(zmq::POLLIN))
            .collect();
        if zmq::poll(&mut asked, POLL_MS).is_err() {
            continue;
        }
        for (replay, kept) in ranks {
            while let Ok(request) = replay.recv_multipart(zmq::DONTWAIT) {
                // The client retries.
                drop(answer(replay, kept, &request));
            }
        }
    }
}

/// All kept batches from a sequence number on.
fn answer(replay: &zmq::Socket, kept: &Kept, request: &[Vec<u8>]) -> anyhow::Result<()> {
    let [peer, empty, from] = request else {
        anyhow::bail!("not a question for a replay");
    };
    let from = u64::from_be_bytes(from.as_slice().try_into()?);
    let all = lock(kept);
    let wanted = all.iter().filter(|(seq, _)| *seq >= from);
    let wanted: Vec<_> = wanted.cloned().collect();
    drop(all);
    for (seq, payload) in wanted {
        let frames = [peer, &empty[..], b"", &seq.to_be_bytes(), &payload];
        replay.send_multipart(frames, 0)?;
    }
    Ok(replay.send_multipart([peer, &empty[..], b"", &END_OF_REPLAY, b""], 0)?)
}
