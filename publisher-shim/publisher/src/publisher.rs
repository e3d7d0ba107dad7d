//! The sockets of one rank: PUB for live batches, ROUTER for replays of the last ones.
//!
//! A call never waits for a reader: a batch that a slow subscriber misses is in the replay. Calls of
//! several threads are ordered by one lock, under which a batch gets its number and is sent.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::SystemTime;

use crate::payload::{CacheChange, PAYLOAD_BYTES_MAX};

/// Batches that a replay reaches back, as vLLM has by default.
const KEPT_BATCHES_MAX: usize = 10_000;
/// Their bytes. A batch is one event.
const KEPT_BYTES_MAX: usize = 64 << 20;
/// Batches that wait for one subscriber; further ones are left to the replay.
const QUEUED_MAX: i32 = 100_000;
/// Two whole replays with their ends.
const REPLAY_QUEUED_MAX: i32 = 20_002;
/// How late a publisher that is dropped ends.
const POLL_MS: i64 = 50;
/// Replaces the number after the last batch of a replay.
const END_OF_REPLAY: u64 = u64::MAX;
const TOPIC: &[u8] = b"";

/// One rank's addresses and constants.
#[derive(Clone, Copy, Debug)]
pub struct PublisherOptions<'a> {
    /// Is bound, such as `tcp://*:5557`.
    pub events_endpoint: &'a str,
    /// Likewise. Without one, readers cannot prove that they saw every event.
    pub replay_endpoint: Option<&'a str>,
    pub dp_rank: u32,
    /// Tokens in a block.
    pub block_size: NonZeroU32,
}

/// Why nothing was published. After `Socket`, the batch is in the replay.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    #[error("the tokens are not those of whole blocks")]
    Length,
    #[error("the event is longer than readers accept")]
    TooLarge,
    #[error("the event cannot be encoded")]
    Encode(#[from] rmp_serde::encode::Error),
    #[error("a socket cannot be bound or used")]
    Socket(#[from] zmq::Error),
    #[error("no thread can be started")]
    Thread(#[from] std::io::Error),
}

/// Publishes the changes of one rank's cache.
pub struct Publisher {
    shared: Arc<Shared>,
    replays: Option<JoinHandle<()>>,
    dp_rank: u32,
    block_size: NonZeroU32,
}

struct Shared {
    batches: Mutex<Batches>,
    stop: AtomicBool,
}

struct Batches {
    live: zmq::Socket,
    next: u64,
    kept: VecDeque<(u64, Arc<[u8]>)>,
    kept_bytes: usize,
}

impl Publisher {
    pub fn new(options: PublisherOptions<'_>) -> Result<Self, PublishError> {
        let context = zmq::Context::new();
        let live = bound(&context, zmq::PUB, QUEUED_MAX, options.events_endpoint)?;
        let shared = Arc::new(Shared {
            batches: Mutex::new(Batches {
                live,
                next: 0,
                kept: VecDeque::new(),
                kept_bytes: 0,
            }),
            stop: AtomicBool::new(false),
        });
        let replays = match options.replay_endpoint {
            Some(endpoint) => {
                let socket = bound(&context, zmq::ROUTER, REPLAY_QUEUED_MAX, endpoint)?;
                let shared = Arc::clone(&shared);
                let thread = thread::Builder::new().name("warmroute-replay".to_owned());
                Some(thread.spawn(move || shared.answer_replays(&socket))?)
            }
            None => None,
        };
        Ok(Self {
            shared,
            replays,
            dp_rank: options.dp_rank,
            block_size: options.block_size,
        })
    }

    /// Publishes one change as a batch of its own.
    pub fn publish(&self, change: CacheChange<'_>) -> Result<(), PublishError> {
        let size = self.block_size.get();
        match change {
            CacheChange::Stored(run) => {
                let expected = run.hashes.len().checked_mul(size as usize);
                if run.hashes.is_empty() || expected != Some(run.tokens.len()) {
                    return Err(PublishError::Length);
                }
            }
            CacheChange::Removed([]) => return Err(PublishError::Length),
            CacheChange::Removed(_) | CacheChange::Cleared => {}
        }
        let payload = change.payload(size, self.dp_rank, unix_seconds())?;
        if payload.len() > PAYLOAD_BYTES_MAX {
            return Err(PublishError::TooLarge);
        }
        Ok(self.shared.lock().send(payload.into())?)
    }
}

#[cfg(test)]
impl Publisher {
    /// How many batches there were, and the last one.
    pub(crate) fn last(&self) -> (u64, Option<Arc<[u8]>>) {
        let batches = self.shared.lock();
        let last = batches.kept.back().map(|(_, payload)| Arc::clone(payload));
        (batches.next, last)
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(replays) = self.replays.take() {
            // A thread that has panicked has ended.
            drop(replays.join());
        }
    }
}

impl Batches {
    /// Numbers, keeps and sends a payload.
    fn send(&mut self, payload: Arc<[u8]>) -> zmq::Result<()> {
        let number = self.next;
        self.next += 1;
        self.kept_bytes += payload.len();
        self.kept.push_back((number, Arc::clone(&payload)));
        while self.kept.len() > KEPT_BATCHES_MAX || self.kept_bytes > KEPT_BYTES_MAX {
            let oldest = self.kept.pop_front();
            self.kept_bytes -= oldest.map_or(0, |(_, payload)| payload.len());
        }
        let frames = [TOPIC, &number.to_be_bytes(), &payload];
        self.live.send_multipart(frames, zmq::DONTWAIT)
    }

    fn kept_from(&self, start: u64) -> Vec<(u64, Arc<[u8]>)> {
        let from = self.kept.partition_point(|(number, _)| *number < start);
        self.kept.range(from..).cloned().collect()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Batches> {
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers requests until the publisher is dropped. Ignores malformed ones.
    fn answer_replays(&self, socket: &zmq::Socket) {
        while !self.stop.load(Ordering::Relaxed) {
            if socket.poll(zmq::POLLIN, POLL_MS) != Ok(1) {
                continue;
            }
            let Ok(request) = socket.recv_multipart(zmq::DONTWAIT) else {
                continue;
            };
            let [identity, empty, start] = request.as_slice() else {
                continue;
            };
            let Ok(start) = <[u8; 8]>::try_from(start.as_slice()) else {
                continue;
            };
            let kept = self.lock().kept_from(u64::from_be_bytes(start));
            let send = |number: u64, payload: &[u8]| {
                let number = number.to_be_bytes();
                let frames = [identity, empty, TOPIC, &number, payload];
                // A reader that misses one asks again.
                let sent = socket.send_multipart(frames, zmq::DONTWAIT);
                sent.unwrap_or_default();
            };
            kept.iter()
                .for_each(|(number, payload)| send(*number, payload));
            send(END_OF_REPLAY, &[]);
        }
    }
}

fn bound(
    context: &zmq::Context,
    kind: zmq::SocketType,
    queued_max: i32,
    endpoint: &str,
) -> zmq::Result<zmq::Socket> {
    let socket = context.socket(kind)?;
    socket.set_linger(0)?;
    socket.set_sndhwm(queued_max)?;
    socket.bind(endpoint)?;
    Ok(socket)
}

#[expect(
    clippy::disallowed_methods,
    reason = "a batch is stamped for display, as vLLM's"
)]
fn unix_seconds() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}
