//! Request heads and bodies, and the memory of prompt work, which share one budget. Bodies are read whole
//! (they are hashed, and sent again after a failure), each up to a limit and in bounded time. Encoded
//! ones are decoded within the limits of others: an engine may decode none, or read other bytes.
//!
//! A refused body is read on and discarded in the background for a while: a client that writes all
//! before it reads would otherwise see a closed connection instead of the answer.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use prometheus::IntGauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warmroute_process::blocking;

use crate::config::Limits;
use crate::error::ProxyError;
use encoding::Encoding;

pub(crate) mod encoding;

/// Longest time between two pieces of a body.
const PIECE_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest time for a whole body. The largest body by default, 64 MiB, takes 107 s at 5 Mbit/s.
const BODY_TIME_MAX: Duration = Duration::from_secs(120);

/// A body up to this size may use the reserve, and need not keep the minimum rate. A chat of 10,000
/// tokens fits.
const SMALL_BYTES_MAX: usize = 64 << 10;

/// A larger body must bring [`PACE_BYTES_MIN`] in each such window: 32 KiB/s, below any uplink that
/// sends large prompts. A body that stops after many bytes holds them for one window.
const PACE_WINDOW: Duration = Duration::from_secs(10);

const PACE_BYTES_MIN: usize = 10 * (32 << 10);

/// Share of the budget that is reserved for small bodies: of 512 MiB, 64 MiB or 1,000 such bodies.
const RESERVE_DIVISOR: usize = 8;
/// One part in so many of the rest is left to what requests cannot do without.
const SPARE_DIVISOR: usize = 4;

/// Longest time for which a refused body is discarded.
const DISCARD_MAX: Duration = Duration::from_secs(30);

/// Bodies discarded at the same time. Connections of further ones are closed.
const DISCARDS_MAX: usize = 64;

/// Largest first allocation, whatever `Content-Length` claims.
const FIRST_RESERVE: usize = 1 << 20;

/// Bodies are decoded on one processor in so many, at least on one: a small body may become the
/// largest one, and costs as much processor time. A decoder takes 10 MiB at most.
const DECODERS_DIVISOR: usize = 4;

/// Memory of one header besides its bytes.
const HEADER_ENTRY: usize = 100;

/// The budget for the bytes of all requests, charged as they arrive, and of prompt work.
#[derive(Clone)]
pub(crate) struct BodyBudget(Arc<BudgetState>);

struct BudgetState {
    common: Arc<Semaphore>,
    common_bytes: usize,
    /// For small bodies while the common part is used up.
    reserve: Arc<Semaphore>,
    body_max: usize,
    held: IntGauge,
    discards: Arc<Semaphore>,
    decoders: Arc<Semaphore>,
    tasks: TaskTracker,
    force: CancellationToken,
}

/// A whole body and its share of the budget, which has the request's head too.
#[derive(Clone, Debug)]
pub(crate) struct BufferedBody {
    pub bytes: Bytes,
    share: Arc<BudgetShare>,
    /// For bytes that were added to the client's.
    added: Option<Arc<BudgetShare>>,
}

/// Bytes of the budget, returned when dropped.
#[derive(Debug)]
pub(crate) struct BudgetShare {
    common: Option<OwnedSemaphorePermit>,
    reserved: Option<OwnedSemaphorePermit>,
    /// Bytes of the request's head among them.
    head: usize,
    size: BodySize,
    held: IntGauge,
}

/// The size of a body by its `Content-Length` and its bytes so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodySize {
    Small,
    Large,
}

/// The arrival of one body.
struct BodyPace {
    body_end: Instant,
    window_end: Instant,
    window_bytes: usize,
}

impl BufferedBody {
    /// A body of this router's own.
    pub(super) fn new(bytes: Vec<u8>, share: BudgetShare) -> Self {
        Self::of(bytes.into(), share)
    }

    /// The bytes, which have their share of the budget until the last copy is dropped.
    pub(super) fn charged(&self) -> Bytes {
        Bytes::from_owner(self.clone())
    }

    fn of(bytes: Bytes, share: BudgetShare) -> Self {
        Self {
            bytes,
            share: Arc::new(share),
            added: None,
        }
    }
}

impl AsRef<[u8]> for BufferedBody {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl BodyBudget {
    /// `tasks` tracks the reading of discarded bodies, which ends at `force`.
    pub(crate) fn new(
        limits: &Limits,
        held: IntGauge,
        tasks: TaskTracker,
        force: CancellationToken,
    ) -> Self {
        let total = limits.buffered_bytes.min(Semaphore::MAX_PERMITS);
        // The largest body fits into the common part.
        let spare = total.saturating_sub(limits.body_bytes);
        let reserve = (total / RESERVE_DIVISOR).min(spare);
        let processors = available_parallelism().map_or(1, NonZeroUsize::get);
        let decoders = processors.div_ceil(DECODERS_DIVISOR);
        Self(Arc::new(BudgetState {
            common: Arc::new(Semaphore::new(total - reserve)),
            common_bytes: total - reserve,
            reserve: Arc::new(Semaphore::new(reserve)),
            body_max: limits.body_bytes,
            held,
            discards: Arc::new(Semaphore::new(DISCARDS_MAX)),
            decoders: Arc::new(Semaphore::new(decoders)),
            tasks,
            force,
        }))
    }

    /// Bytes of the largest body.
    pub(crate) fn body_max(&self) -> usize {
        self.0.body_max
    }

    /// Reads the whole body of a request whose head has `head` bytes, and decodes it.
    pub(crate) async fn read(
        &self,
        headers: &HeaderMap,
        head: usize,
        body: Body,
    ) -> Result<BufferedBody, ProxyError> {
        let mut pieces = body.into_data_stream();
        let encoding = Encoding::of(headers);
        let read = match content_length(headers) {
            _ if encoding.is_err() => Err(ProxyError::BodyEncoded),
            Some(length) if length > self.0.body_max as u64 => Err(self.too_large()),
            length => self.collect(&mut pieces, head, length).await,
        };
        match &read {
            // Such a client may never end its body.
            Ok(_) | Err(ProxyError::BodyTimeout) => {}
            Err(_) if headers.contains_key(header::EXPECT) => {}
            Err(_) => self.discard(pieces),
        }
        match (read?, encoding?) {
            (body, Some(encoding)) if !body.bytes.is_empty() => self.decode(body, encoding).await,
            (body, _) => Ok(body),
        }
    }

    /// Decodes a body, when it is its turn, on a thread that may block.
    async fn decode(
        &self,
        encoded: BufferedBody,
        encoding: Encoding,
    ) -> Result<BufferedBody, ProxyError> {
        let failed = || ProxyError::Internal("decoding the body failed");
        let turn = Arc::clone(&self.0.decoders).acquire_owned().await;
        let turn = turn.map_err(|_| failed())?;
        let budget = self.clone();
        let decoded = blocking::run(move || {
            let decoded = budget.decoded(&encoded, encoding);
            drop((encoded, turn));
            decoded
        });
        decoded.await.map_err(|_| failed())?
    }

    /// Charges each decoded piece before it is kept: no body takes more than a plain one.
    fn decoded(
        &self,
        encoded: &BufferedBody,
        encoding: Encoding,
    ) -> Result<BufferedBody, ProxyError> {
        let mut share = self.share(0);
        share.head = encoded.share.head;
        self.take(&mut share, encoded.share.head)?;
        let mut bytes = Vec::new();
        encoding.decode(&encoded.bytes, &mut |piece| {
            if bytes.len() + piece.len() > self.0.body_max {
                return Err(self.too_large());
            }
            self.take(&mut share, piece.len())?;
            bytes.extend_from_slice(piece);
            Ok(())
        })?;
        Ok(BufferedBody::of(bytes.into(), share))
    }

    /// Ends a request whose body is not wanted.
    pub(crate) fn skip(&self, headers: &HeaderMap, body: Body) {
        if !headers.contains_key(header::EXPECT) {
            self.discard(body.into_data_stream());
        }
    }

    async fn collect(
        &self,
        pieces: &mut BodyDataStream,
        head: usize,
        length: Option<u64>,
    ) -> Result<BufferedBody, ProxyError> {
        let claimed = length.map_or(0, |length| usize::try_from(length).unwrap_or(usize::MAX));
        let mut share = self.share(claimed);
        share.head = head;
        self.take(&mut share, head)?;
        let mut pace = BodyPace::new(Instant::now());
        let first = self.next(pieces, &mut pace, &share).await?;
        let first = first.unwrap_or_default();
        self.take(&mut share, first.len())?;
        // The usual case: the whole body comes in one piece, which is used without a copy.
        if length == Some(first.len() as u64) {
            return Ok(BufferedBody::of(first, share));
        }
        let mut buffer = BytesMut::with_capacity(claimed.min(FIRST_RESERVE).max(first.len()));
        buffer.extend_from_slice(&first);
        drop(first);
        while let Some(piece) = self.next(pieces, &mut pace, &share).await? {
            if buffer.len() + piece.len() > self.0.body_max {
                return Err(self.too_large());
            }
            self.take(&mut share, piece.len())?;
            buffer.extend_from_slice(&piece);
        }
        Ok(BufferedBody::of(buffer.freeze(), share))
    }

    async fn next(
        &self,
        pieces: &mut BodyDataStream,
        pace: &mut BodyPace,
        share: &BudgetShare,
    ) -> Result<Option<Bytes>, ProxyError> {
        let piece_end = Instant::now() + PIECE_TIMEOUT;
        loop {
            let deadline = piece_end.min(pace.body_end).min(pace.window_end);
            let piece = match timeout_at(deadline, pieces.next()).await {
                Ok(None) => return Ok(None),
                Ok(Some(Ok(piece))) if piece.len() > self.0.body_max => {
                    return Err(self.too_large());
                }
                Ok(Some(Ok(piece))) => Some(piece),
                Ok(Some(Err(error))) => {
                    let why = format!("The request body broke off: {error}");
                    return Err(ProxyError::Malformed(why));
                }
                Err(_) => None,
            };
            let now = Instant::now();
            let bytes = piece.as_ref().map_or(0, Bytes::len);
            let in_time = pace.keeps(share.body_bytes(), bytes, now);
            match piece {
                _ if !in_time => return Err(ProxyError::BodyTimeout),
                None if now >= piece_end => return Err(ProxyError::BodyTimeout),
                None => {}
                Some(piece) => return Ok(Some(piece)),
            }
        }
    }

    fn share(&self, claimed: usize) -> BudgetShare {
        let size = if claimed > SMALL_BYTES_MAX {
            BodySize::Large
        } else {
            BodySize::Small
        };
        BudgetShare {
            common: None,
            reserved: None,
            head: 0,
            size,
            held: self.0.held.clone(),
        }
    }

    /// Bytes for work on a large prompt; `None` if the budget lacks them.
    pub(crate) fn charge(&self, bytes: usize) -> Option<BudgetShare> {
        let mut share = self.share(usize::MAX);
        self.take(&mut share, bytes).ok()?;
        Some(share)
    }

    /// More bytes for a share, which is made where there is none, for what a request can do without.
    /// Returns whether there is room.
    pub(super) fn grow_spare(&self, share: &mut Option<BudgetShare>, bytes: usize) -> bool {
        let share = share.get_or_insert_with(|| self.share(usize::MAX));
        self.has_spare(bytes) && self.take(share, bytes).is_ok()
    }

    #[cfg(test)]
    pub(super) fn free_bytes(&self) -> usize {
        self.0.common.available_permits()
    }

    /// Bytes for what a request can do without; `None` unless they leave a quarter of the budget.
    pub(super) fn charge_spare(&self, bytes: usize) -> Option<BudgetShare> {
        self.has_spare(bytes).then(|| self.charge(bytes)).flatten()
    }

    fn has_spare(&self, bytes: usize) -> bool {
        let left = self.0.common.available_permits().checked_sub(bytes);
        left.is_some_and(|left| left >= self.0.common_bytes / SPARE_DIVISOR)
    }

    /// Puts other bytes in a body's place, and charges what they are longer.
    pub(super) fn replace(&self, body: &mut BufferedBody, bytes: Bytes) -> Result<(), ProxyError> {
        let more = bytes.len().saturating_sub(body.share.body_bytes());
        let share = self.charge(more).ok_or(ProxyError::BuffersFull)?;
        body.added = Some(Arc::new(share));
        body.bytes = bytes;
        Ok(())
    }

    /// More bytes for a body. Does not wait: two bodies that hold bytes would wait for each other.
    fn take(&self, share: &mut BudgetShare, bytes: usize) -> Result<(), ProxyError> {
        if share.body_bytes() + bytes > SMALL_BYTES_MAX {
            share.size = BodySize::Large;
        }
        match share.size {
            BodySize::Large => {
                let reserved = share.reserved.as_ref().map_or(0, |p| p.num_permits());
                let more = acquire(&self.0.common, reserved + bytes)?;
                merge(&mut share.common, more);
                share.reserved = None;
            }
            BodySize::Small => match acquire(&self.0.common, bytes) {
                Ok(more) => merge(&mut share.common, more),
                Err(_) => merge(&mut share.reserved, acquire(&self.0.reserve, bytes)?),
            },
        }
        share.held.add(i64::try_from(bytes).unwrap_or(i64::MAX));
        Ok(())
    }

    fn too_large(&self) -> ProxyError {
        ProxyError::TooLarge {
            max: self.0.body_max,
        }
    }

    fn discard(&self, mut pieces: BodyDataStream) {
        let Ok(permit) = Arc::clone(&self.0.discards).try_acquire_owned() else {
            return;
        };
        let force = self.0.force.clone();
        self.0.tasks.spawn(async move {
            let all = async { while let Some(Ok(_)) = pieces.next().await {} };
            tokio::select! {
                ended = timeout(DISCARD_MAX, all) => drop(ended),
                () = force.cancelled() => {}
            }
            drop(permit);
        });
    }
}

impl BudgetShare {
    fn body_bytes(&self) -> usize {
        self.held_bytes().saturating_sub(self.head)
    }

    fn held_bytes(&self) -> usize {
        let permits = [&self.common, &self.reserved].into_iter().flatten();
        permits.map(OwnedSemaphorePermit::num_permits).sum()
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        let bytes = i64::try_from(self.held_bytes()).unwrap_or(i64::MAX);
        self.held.sub(bytes);
    }
}

impl BodyPace {
    fn new(now: Instant) -> Self {
        Self {
            body_end: now + BODY_TIME_MAX,
            window_end: now + PACE_WINDOW,
            window_bytes: 0,
        }
    }

    /// Counts bytes of a body that held `held` before. Returns whether the body is in time.
    fn keeps(&mut self, held: usize, bytes: usize, now: Instant) -> bool {
        self.window_bytes += bytes;
        let is_slow = now >= self.window_end && self.window_bytes < PACE_BYTES_MIN;
        // The first window begins when the body becomes large.
        let is_small = held <= SMALL_BYTES_MAX;
        if is_small || now >= self.window_end {
            self.window_end = now + PACE_WINDOW;
            self.window_bytes = 0;
        }
        now < self.body_end && (is_small || !is_slow)
    }
}

/// Memory of a request's head: its bytes, and an entry of the map for each header.
pub(super) fn head_bytes(head: &Parts) -> usize {
    let path = head
        .uri
        .path_and_query()
        .map_or(0, |path| path.as_str().len());
    let headers = head.headers.iter();
    headers.fold(path, |bytes, (name, value)| {
        bytes + name.as_str().len() + value.len() + HEADER_ENTRY
    })
}

fn acquire(from: &Arc<Semaphore>, bytes: usize) -> Result<OwnedSemaphorePermit, ProxyError> {
    let count = u32::try_from(bytes).map_err(|_| ProxyError::BuffersFull)?;
    let permit = Arc::clone(from).try_acquire_many_owned(count);
    permit.map_err(|_| ProxyError::BuffersFull)
}

fn merge(permit: &mut Option<OwnedSemaphorePermit>, more: OwnedSemaphorePermit) {
    match permit {
        Some(permit) => permit.merge(more),
        None => *permit = Some(more),
    }
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers
        .get(header::CONTENT_LENGTH)?
        .to_str()
        .ok()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests;
