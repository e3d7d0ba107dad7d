//! Request bodies: read whole (they are hashed, and sent again where a worker fails), but bounded:
//! each by a limit, all together by a budget of bytes, and in time.
//!
//! A body that is refused is read on and thrown away for a while, in the background: a client that
//! writes first and reads later would otherwise see a broken connection instead of the answer.

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

use crate::error::ApiError;

/// Between two pieces of a body; also the longest that a refused one is listened to in silence.
const PIECE_TIMEOUT: Duration = Duration::from_secs(30);

/// A refused body is thrown away for this long at most.
const DISCARD_MAX: Duration = Duration::from_secs(30);

/// Bodies thrown away at once; beyond, the connection is just closed.
const DISCARDS_MAX: usize = 64;

/// A buffer grows from at most this, however much a `Content-Length` claims.
const FIRST_RESERVE: usize = 1 << 20;

/// The bytes of all request bodies held at once.
#[derive(Clone)]
pub(crate) struct Budget {
    bytes: Arc<Semaphore>,
    body_max: usize,
    held: IntGauge,
    discards: Arc<Semaphore>,
    tasks: TaskTracker,
    force: CancellationToken,
}

/// A whole body with its share of the budget.
#[derive(Debug)]
pub(crate) struct Buffered {
    pub bytes: Bytes,
    /// Held as long as the body is.
    _share: Share,
}

/// Bytes of the budget, given back when dropped.
#[derive(Debug)]
pub(crate) struct Share {
    permit: Option<OwnedSemaphorePermit>,
    held: IntGauge,
}

impl Budget {
    pub(crate) fn new(
        (total, body_max): (usize, usize),
        held: IntGauge,
        tasks: TaskTracker,
        force: CancellationToken,
    ) -> Self {
        Self {
            bytes: Arc::new(Semaphore::new(total.min(Semaphore::MAX_PERMITS))),
            body_max,
            held,
            discards: Arc::new(Semaphore::new(DISCARDS_MAX)),
            tasks,
            force,
        }
    }

    /// The whole body, or why not.
    pub(crate) async fn read(&self, headers: &HeaderMap, body: Body) -> Result<Buffered, ApiError> {
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
    ) -> Result<Buffered, ApiError> {
        let mut share = self.share();
        let Some(first) = self.next(pieces).await? else {
            return Ok(Buffered {
                bytes: Bytes::new(),
                _share: share,
            });
        };
        self.take(&mut share, first.len())?;
        // The usual case: the whole body came in one piece, and is used as it lies there.
        if length == Some(first.len() as u64) {
            return Ok(Buffered {
                bytes: first,
                _share: share,
            });
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
        Ok(Buffered {
            bytes: buffer.freeze(),
            _share: share,
        })
    }

    async fn next(&self, pieces: &mut BodyDataStream) -> Result<Option<Bytes>, ApiError> {
        match timeout(PIECE_TIMEOUT, pieces.next()).await {
            Ok(None) => Ok(None),
            Ok(Some(Ok(piece))) if piece.len() > self.body_max => Err(self.too_large()),
            Ok(Some(Ok(piece))) => Ok(Some(piece)),
            Ok(Some(Err(error))) => Err(ApiError::Malformed(format!(
                "The request body broke off: {error}"
            ))),
            Err(_) => Err(ApiError::BodyTimeout),
        }
    }

    fn share(&self) -> Share {
        Share {
            permit: None,
            held: self.held.clone(),
        }
    }

    /// More bytes for a body. Never waits: those who hold bytes might wait for each other.
    fn take(&self, share: &mut Share, bytes: usize) -> Result<(), ApiError> {
        let count = u32::try_from(bytes).map_err(|_| ApiError::BuffersFull)?;
        let more = Arc::clone(&self.bytes)
            .try_acquire_many_owned(count)
            .map_err(|_| ApiError::BuffersFull)?;
        share.held.add(i64::from(count));
        match &mut share.permit {
            Some(permit) => permit.merge(more),
            None => share.permit = Some(more),
        }
        Ok(())
    }

    const fn too_large(&self) -> ApiError {
        ApiError::TooLarge { max: self.body_max }
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

impl Drop for Share {
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

    fn budget(total: usize, body_max: usize) -> Budget {
        let held = IntGauge::new("held", "held").unwrap();
        Budget::new(
            (total, body_max),
            held,
            TaskTracker::new(),
            CancellationToken::new(),
        )
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
    async fn a_body_in_pieces_comes_whole_and_gives_its_bytes_back() {
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
        assert_eq!(error, ApiError::TooLarge { max: 50 });
    }

    #[tokio::test]
    async fn a_body_without_a_length_is_refused_where_it_passes_the_limit() {
        let budget = budget(1000, 50);
        let endless = pieces(1_000_000, 10);
        let error = budget.read(&HeaderMap::new(), endless).await.unwrap_err();
        assert_eq!(error, ApiError::TooLarge { max: 50 });
        assert_eq!(budget.held.get(), 0);
    }

    #[tokio::test]
    async fn bodies_together_are_bounded() {
        let budget = budget(60, 50);
        let first = budget.read(&length(40), pieces(1, 40)).await.unwrap();
        let refused = budget.read(&length(40), pieces(1, 40)).await.unwrap_err();
        assert_eq!(refused, ApiError::BuffersFull);
        drop(first);
        assert!(budget.read(&length(40), pieces(1, 40)).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_stalls_is_given_up() {
        let budget = budget(100, 50);
        let stalled = Body::from_stream(stream::pending::<std::io::Result<Bytes>>());
        let error = budget.read(&length(10), stalled).await.unwrap_err();
        assert_eq!(error, ApiError::BodyTimeout);
    }
}
