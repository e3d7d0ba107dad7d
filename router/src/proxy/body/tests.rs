use std::io::Write as _;

use axum::http::HeaderValue;
use flate2::Compression;
use flate2::write::GzEncoder;
use futures_util::stream;

use super::*;

fn budget(buffered_bytes: usize, body_bytes: usize) -> BodyBudget {
    let held = IntGauge::new("held", "held").unwrap();
    let limits = Limits {
        body_bytes,
        buffered_bytes,
        connections: 1,
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
    let read = budget
        .read(&HeaderMap::new(), 0, pieces(5, 10))
        .await
        .unwrap();
    assert_eq!(read.bytes.len(), 50);
    assert_eq!(budget.0.held.get(), 50);
    drop(read);
    assert_eq!(budget.0.held.get(), 0);
    let left = budget.0.common.available_permits() + budget.0.reserve.available_permits();
    assert_eq!(left, 100);
}

#[tokio::test]
async fn a_claim_beyond_the_limit_is_refused_before_a_byte_is_read() {
    let budget = budget(100, 50);
    let error = budget.read(&length(51), 0, pieces(0, 0)).await.unwrap_err();
    assert_eq!(error, ProxyError::TooLarge { max: 50 });
}

#[tokio::test]
async fn a_body_without_a_length_is_refused_where_it_passes_the_limit() {
    let budget = budget(1000, 50);
    let endless = pieces(1_000_000, 10);
    let error = budget
        .read(&HeaderMap::new(), 0, endless)
        .await
        .unwrap_err();
    assert_eq!(error, ProxyError::TooLarge { max: 50 });
    assert_eq!(budget.0.held.get(), 0);
}

/// A thousandth of the bytes.
fn encoded_zeros(bytes: usize) -> Bytes {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(&vec![0; bytes]).unwrap();
    encoder.finish().unwrap().into()
}

async fn read_gzip(budget: &BodyBudget, body: Bytes) -> Result<BufferedBody, ProxyError> {
    let gzip = (header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    let headers = HeaderMap::from_iter([gzip]);
    budget.read(&headers, 7, Body::from(body)).await
}

#[tokio::test]
async fn a_decoded_body_is_charged_in_place_of_the_encoded_one() {
    let budget = budget(2 << 20, 1 << 20);
    let body = read_gzip(&budget, encoded_zeros(1 << 20)).await.unwrap();
    assert_eq!(body.bytes.len(), 1 << 20);
    assert_eq!(budget.0.held.get(), (1 << 20) + 7);
    drop(body);
    assert_eq!(budget.0.held.get(), 0);
    let empty = read_gzip(&budget, Bytes::new()).await.unwrap();
    assert_eq!(empty.bytes, Bytes::new());
}

#[tokio::test]
async fn a_body_that_would_grow_beyond_the_bounds_is_refused_while_it_is_decoded() {
    let bomb = encoded_zeros(32 << 20);
    assert!(bomb.len() < 40_000, "{}", bomb.len());
    let small = budget(64 << 20, 1 << 20);
    let refused = read_gzip(&small, bomb.clone()).await.unwrap_err();
    assert_eq!(refused, ProxyError::TooLarge { max: 1 << 20 });
    assert_eq!(small.0.held.get(), 0);
    // A part of the budget is in use.
    let full = budget(40 << 20, 33 << 20);
    let other = full.charge(20 << 20).unwrap();
    let refused = read_gzip(&full, bomb.clone()).await.unwrap_err();
    assert_eq!(refused, ProxyError::BuffersFull);
    assert_eq!(full.0.held.get(), 20 << 20);
    drop(other);
    assert!(read_gzip(&full, bomb).await.is_ok());
}

#[tokio::test]
async fn bodies_together_are_bounded() {
    let budget = budget(60, 50);
    let first = budget.read(&length(40), 0, pieces(1, 40)).await.unwrap();
    let refused = budget
        .read(&length(40), 0, pieces(1, 40))
        .await
        .unwrap_err();
    assert_eq!(refused, ProxyError::BuffersFull);
    drop(first);
    assert!(budget.read(&length(40), 0, pieces(1, 40)).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_body_that_stalls_is_given_up() {
    let budget = budget(100, 50);
    let stalled = Body::from_stream(stream::pending::<std::io::Result<Bytes>>());
    let error = budget.read(&length(10), 0, stalled).await.unwrap_err();
    assert_eq!(error, ProxyError::BodyTimeout);
}

/// `first` bytes immediately, then `bytes` every `gap`, without an end.
fn trickle(first: usize, bytes: usize, gap: Duration) -> Body {
    let pieces = stream::unfold(Some(first), move |first| async move {
        let bytes = match first {
            Some(first) => first,
            None => {
                tokio::time::sleep(gap).await;
                bytes
            }
        };
        Some((
            Ok::<_, std::io::Error>(Bytes::from(vec![b'x'; bytes])),
            None,
        ))
    });
    Body::from_stream(pieces)
}

async fn time_of_refusal(budget: &BodyBudget, body: Body) -> Duration {
    let started = Instant::now();
    let error = budget.read(&HeaderMap::new(), 0, body).await.unwrap_err();
    assert_eq!(error, ProxyError::BodyTimeout);
    assert_eq!(budget.0.held.get(), 0);
    started.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_large_body_that_trickles_is_refused_after_one_window() {
    let budget = budget(64 << 20, 32 << 20);
    let slow = trickle(20 << 20, 1, Duration::from_secs(1));
    let refused = time_of_refusal(&budget, slow).await;
    assert!(refused <= 2 * PACE_WINDOW, "{refused:?}");
    let slow = trickle(20 << 20, PACE_BYTES_MIN / 20, Duration::from_secs(1));
    let refused = time_of_refusal(&budget, slow).await;
    assert!(refused <= 2 * PACE_WINDOW, "{refused:?}");
}

#[tokio::test(start_paused = true)]
async fn every_body_ends_after_the_total_time() {
    let budget = budget(64 << 20, 32 << 20);
    for (first, bytes) in [(10, 1), (1 << 20, PACE_BYTES_MIN / 5)] {
        let endless = trickle(first, bytes, Duration::from_secs(1));
        assert_eq!(time_of_refusal(&budget, endless).await, BODY_TIME_MAX);
    }
}

/// Eight large bodies that arrive slowly use up the common part, not the reserve.
#[tokio::test(start_paused = true)]
async fn large_bodies_that_fill_the_budget_leave_a_reserve_for_small_ones() {
    let budget = budget(8 << 20, 1 << 20);
    let mut large = Vec::new();
    while let Ok(body) = budget.read(&length(1 << 20), 0, pieces(1, 1 << 20)).await {
        large.push(body);
    }
    assert_eq!(large.len(), 7);
    let small = budget
        .read(&length(1000), 0, pieces(1, 1000))
        .await
        .unwrap();
    let unannounced = budget.read(&HeaderMap::new(), 0, pieces(4, 1000)).await;
    assert_eq!(unannounced.unwrap().bytes.len(), 4000);
    for (headers, pieces) in [
        (length(80_000), pieces(8, 10_000)),
        (HeaderMap::new(), pieces(8, 10_000)),
    ] {
        let refused = budget.read(&headers, 0, pieces).await.unwrap_err();
        assert_eq!(refused, ProxyError::BuffersFull);
    }
    drop((large, small));
    assert_eq!(budget.0.held.get(), 0);
    assert_eq!(budget.0.reserve.available_permits(), 1 << 20);
}

/// Its bytes are no body's: they count neither for its pace nor as large.
#[tokio::test]
async fn heads_are_charged_with_their_bodies() {
    let budget = budget(10_000, 5_000);
    let read = budget
        .read(&length(10), 4_000, pieces(1, 10))
        .await
        .unwrap();
    assert_eq!(budget.0.held.get(), 4_010);
    let mut other = budget
        .read(&length(10), 4_000, pieces(1, 10))
        .await
        .unwrap();
    let refused = budget.read(&length(10), 4_000, pieces(1, 10)).await;
    assert_eq!(refused.unwrap_err(), ProxyError::BuffersFull);
    budget.replace(&mut other, vec![0; 20].into()).unwrap();
    assert_eq!(budget.0.held.get(), 8_030);
    drop((read, other));
    assert_eq!(budget.0.held.get(), 0);
}

#[test]
fn a_head_has_its_path_and_headers() {
    let request = axum::http::Request::builder()
        .uri("/a?b")
        .header("name", "value");
    let (head, ()) = request.body(()).unwrap().into_parts();
    assert_eq!(head_bytes(&head), 4 + 9 + HEADER_ENTRY);
}

/// A body that outgrows the reserve returns what it took from it.
#[tokio::test]
async fn a_body_that_becomes_large_moves_to_the_common_part() {
    let budget = budget(8 << 20, 1 << 20);
    let mut share = budget.share(0);
    let used_up = acquire(&budget.0.common, 7 << 20).unwrap();
    budget.take(&mut share, SMALL_BYTES_MAX).unwrap();
    assert!(budget.take(&mut share, 1).is_err());
    drop(used_up);
    budget.take(&mut share, 1).unwrap();
    assert_eq!(budget.0.reserve.available_permits(), 1 << 20);
    assert_eq!(share.held_bytes(), SMALL_BYTES_MAX + 1);
    assert_eq!(
        budget.0.held.get(),
        i64::try_from(SMALL_BYTES_MAX + 1).unwrap()
    );
}

#[test]
fn what_can_be_left_out_leaves_a_quarter_of_the_budget() {
    let budget = budget(80_000, 1_000);
    let all = budget.0.common_bytes;
    let kept = all / SPARE_DIVISOR;
    assert!(budget.charge_spare(all - kept + 1).is_none());
    let bodies = budget.charge(all - kept - 500).unwrap();
    let spare = budget.charge_spare(300);
    assert!(spare.is_some());
    let mut growing = None;
    assert!(budget.grow_spare(&mut growing, 200));
    assert!(budget.charge_spare(1).is_none());
    assert!(!budget.grow_spare(&mut growing, 1));
    assert!(budget.charge(kept).is_some(), "other work may have it");
    drop((bodies, spare, growing));
    assert_eq!(budget.0.common.available_permits(), all);
}

/// An engine may answer before it has read the request.
#[tokio::test]
async fn a_body_is_charged_until_the_engine_has_it() {
    let budget = budget(80_000, 1_000);
    let body = budget.read(&length(100), 0, pieces(1, 100)).await.unwrap();
    let to_engine = body.charged();
    let rest = to_engine.slice(50..);
    drop((body, to_engine));
    assert_eq!(budget.0.held.get(), 100);
    drop(rest);
    assert_eq!(budget.0.held.get(), 0);
}

#[tokio::test]
async fn a_longer_body_in_place_of_the_clients_is_charged() {
    let budget = budget(80_000, 1_000);
    let mut body = budget.read(&length(100), 0, pieces(1, 100)).await.unwrap();
    budget.replace(&mut body, vec![0; 300].into()).unwrap();
    assert_eq!((body.bytes.len(), budget.0.held.get()), (300, 300));
    let all = budget.0.common.available_permits();
    let _others = budget.charge(all - 10).unwrap();
    let refused = budget.replace(&mut body, vec![0; 80_000].into());
    assert_eq!(refused, Err(ProxyError::BuffersFull));
    drop(body);
    assert_eq!(budget.0.common.available_permits(), 310);
}
