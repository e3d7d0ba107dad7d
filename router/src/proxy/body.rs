//! Request bodies: read whole (they are hashed, and sent again after a failure), each up to a
//! limit, all together up to a budget, and in bounded time.
//!
//! A refused body is read on and discarded in the background for a while: a client that writes all
//! before it reads would otherwise see a closed connection instead of the answer.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use axum::http::{HeaderMap, header};
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use prometheus::IntGauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Limits;
use crate::error::ProxyError;

/// Longest time between two pieces of a body.
const PIECE_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest time for which a refused body is discarded.
const DISCARD_MAX: Duration = Duration::from_secs(30);

/// Bodies discarded at the same time. Connections of further ones are closed.
const DISCARDS_MAX: usize = 64;

/// Largest first allocation, whatever `Content-Length` claims.
const FIRST_RESERVE: usize = 1 << 20;

/// The budget for the bytes of all request bodies.
#[derive(Clone)]
pub(crate) struct BodyBudget {
    bytes: Arc<Semaphore>,
    body_max: usize,
    held: IntGauge,
    discards: Arc<Semaphore>,
    tasks: TaskTracker,
    force: CancellationToken,
}

/// A whole body and its share of the budget.
#[derive(Debug)]
pub(crate) struct BufferedBody {
    pub bytes: Bytes,
    _share: BudgetShare,
}

/// Bytes of the budget, returned when dropped.
#[derive(Debug)]
pub(crate) struct BudgetShare {
    permit: Option<OwnedSemaphorePermit>,
    held: IntGauge,
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
        Self {
            bytes: Arc::new(Semaphore::new(total)),
            body_max: limits.body_bytes,
            held,
            discards: Arc::new(Semaphore::new(DISCARDS_MAX)),
            tasks,
            force,
        }
    }

    /// Reads the whole body.
    pub(crate) async fn read(
        &self,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<BufferedBody, ProxyError> {
        let mut pieces = body.into_data_stream();
        let read = match content_length(headers) {
            Some(length) if length > self.body_max as u64 => Err(self.too_large()),
            length => self.collect(&mut pieces, length).await,
        };
        if read.is_err() && !headers.contains_key(header::EXPECT) {
            self.discard(pieces);
        }
        read
    }

    async fn collect(
        &self,
        pieces: &mut BodyDataStream,
        length: Option<u64>,
    ) -> Result<BufferedBody, ProxyError> {
        let mut share = self.share();
        let first = self.next(pieces).await?.unwrap_or_default();
        self.take(&mut share, first.len())?;
        // The usual case: the whole body comes in one piece, which is used without a copy.
        if length == Some(first.len() as u64) {
            let (bytes, _share) = (first, share);
            return Ok(BufferedBody { bytes, _share });
        }
        let claimed = length.map_or(0, |length| usize::try_from(length).unwrap_or(usize::MAX));
        let mut buffer = BytesMut::with_capacity(claimed.clamp(first.len(), FIRST_RESERVE));
        buffer.extend_from_slice(&first);
        drop(first);
        while let Some(piece) = self.next(pieces).await? {
            if buffer.len() + piece.len() > self.body_max {
                return Err(self.too_large());
            }
            self.take(&mut share, piece.len())?;
            buffer.extend_from_slice(&piece);
        }
        let (bytes, _share) = (buffer.freeze(), share);
        Ok(BufferedBody { bytes, _share })
    }

    async fn next(&self, pieces: &mut BodyDataStream) -> Result<Option<Bytes>, ProxyError> {
        match timeout(PIECE_TIMEOUT, pieces.next()).await {
            Ok(None) => Ok(None),
            Ok(Some(Ok(piece))) if piece.len() > self.body_max => Err(self.too_large()),
            Ok(Some(Ok(piece))) => Ok(Some(piece)),
            Ok(Some(Err(error))) => Err(ProxyError::Malformed(format!(
                "The request body broke off: {error}"
            ))),
            Err(_) => Err(ProxyError::BodyTimeout),
        }
    }

    fn share(&self) -> BudgetShare {
        BudgetShare {
            permit: None,
            held: self.held.clone(),
        }
    }

    /// More bytes for a body. Does not wait: two bodies that hold bytes would wait for each other.
    fn take(&self, share: &mut BudgetShare, bytes: usize) -> Result<(), ProxyError> {
        let count = u32::try_from(bytes).map_err(|_| ProxyError::BuffersFull)?;
        let more = Arc::clone(&self.bytes)
            .try_acquire_many_owned(count)
            .map_err(|_| ProxyError::BuffersFull)?;
        share.held.add(i64::from(count));
        match &mut share.permit {
            Some(permit) => permit.merge(more),
            None => share.permit = Some(more),
        }
        Ok(())
    }

    const fn too_large(&self) -> ProxyError {
        ProxyError::TooLarge { max: self.body_max }
    }

    fn discard(&self, mut pieces: BodyDataStream) {
        let Ok(permit) = Arc::clone(&self.discards).try_acquire_owned() else {
            return;
        };
        let force = self.force.clone();
        self.tasks.spawn(async move {
            let all = async { while let Some(Ok(_)) = pieces.next().await {} };
            tokio::select! {
                ended = timeout(DISCARD_MAX, all) => drop(ended),
                () = force.cancelled() => {}
            }
            drop(permit);
        });
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        if let Some(permit) = &self.permit {
            let bytes = i64::try_from(permit.num_permits()).unwrap_or(i64::MAX);
            self.held.sub(bytes);
        }
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
mod tests {
    use futures_util::stream;

    use super::*;

    fn budget(buffered_bytes: usize, body_bytes: usize) -> BodyBudget {
        let held = IntGauge::new("held", "held").unwrap();
        let limits = Limits {
            body_bytes,
            buffered_bytes,
            connections: 1,
            connect_timeout: Duration::ZERO,
            drain_timeout: Duration::ZERO,
        };
        BodyBudget::new(&limits, held, TaskTracker::new(), CancellationToken::new())
    }

    fn pieces(count: usize, bytes: usize) -> Body {
        let piece = Bytes::from(vec![b'x'; bytes]);
        let pieces = (0..count).map(move |_| Ok::<_, std::io::Error>(piece.clone()));
        Body::from_stream(stream::iter(pieces))
    }

    fn length(bytes: u64) -> HeaderMap {
        HeaderMap::from_iter([(header::CONTENT_LENGTH, bytes.into())])
    }

    #[tokio::test]
    async fn a_body_in_pieces_is_joined_and_returns_its_bytes() {
        let budget = budget(100, 50);
        let read = budget.read(&HeaderMap::new(), pieces(5, 10)).await.unwrap();
        assert_eq!(read.bytes.len(), 50);
        assert_eq!(budget.held.get(), 50);
        drop(read);
        assert_eq!(budget.held.get(), 0);
        assert_eq!(budget.bytes.available_permits(), 100);
    }

    #[tokio::test]
    async fn a_claim_beyond_the_limit_is_refused_before_a_byte_is_read() {
        let budget = budget(100, 50);
        let error = budget.read(&length(51), pieces(0, 0)).await.unwrap_err();
        assert_eq!(error, ProxyError::TooLarge { max: 50 });
    }

    #[tokio::test]
    async fn a_body_without_a_length_is_refused_where_it_passes_the_limit() {
        let budget = budget(1000, 50);
        let endless = pieces(1_000_000, 10);
        let error = budget.read(&HeaderMap::new(), endless).await.unwrap_err();
        assert_eq!(error, ProxyError::TooLarge { max: 50 });
        assert_eq!(budget.held.get(), 0);
    }

    #[tokio::test]
    async fn bodies_together_are_bounded() {
        let budget = budget(60, 50);
        let first = budget.read(&length(40), pieces(1, 40)).await.unwrap();
        let refused = budget.read(&length(40), pieces(1, 40)).await.unwrap_err();
        assert_eq!(refused, ProxyError::BuffersFull);
        drop(first);
        assert!(budget.read(&length(40), pieces(1, 40)).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_stalls_is_given_up() {
        let budget = budget(100, 50);
        let stalled = Body::from_stream(stream::pending::<std::io::Result<Bytes>>());
        let error = budget.read(&length(10), stalled).await.unwrap_err();
        assert_eq!(error, ProxyError::BodyTimeout);
    }
}
