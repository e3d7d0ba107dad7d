//! Concurrent and sequential clients.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};

use fastrand::Rng;
use futures_util::future::join_all;

use crate::fleet::traffic::{request, serve};
use crate::fleet::{BLOCK, Fleet};

/// Runs clients until the work is done. No request may fail. Returns the work's result
/// and the number of requests.
pub(crate) async fn under_load<T>(
    fleet: &Fleet,
    clients: u64,
    work: impl Future<Output = T>,
) -> (T, u64) {
    let is_over = AtomicBool::new(false);
    let client = async |seed| {
        let mut rng = Rng::with_seed(seed);
        let mut served = 0;
        while !is_over.load(Ordering::Relaxed) {
            let (path, body) = request(&mut rng);
            serve(fleet, path, &body).await;
            served += 1;
        }
        served
    };
    let work = async {
        let out = work.await;
        is_over.store(true, Ordering::Relaxed);
        out
    };
    let (out, served) = tokio::join!(work, join_all((0..clients).map(client)));
    (out, served.iter().sum())
}

/// Sends requests sequentially through every router in turn, each after every index has the
/// previous one's blocks: the credit must equal the engine's cached tokens. Returns the cached
/// tokens of all.
pub(crate) async fn sequential(fleet: &Fleet, seed: u64, requests: u32) -> u64 {
    let mut rng = Rng::with_seed(seed);
    let (mut cached, mut late) = (0, 0);
    for number in 0..requests {
        fleet.until_indexed().await;
        let (path, body) = request(&mut rng);
        let served = serve(fleet, path, &body).await;
        if served.is_without_answer() {
            late += 1;
            continue;
        }
        let (credited, worker) = (served.overlap_blocks * BLOCK, &served.worker);
        assert_eq!(served.state, "exact", "request {number} at {worker}");
        assert_eq!(
            credited, served.cached_tokens,
            "request {number} at {worker}"
        );
        cached += credited;
    }
    println!("{requests} sequential requests, {cached} tokens cached; {late} without an answer");
    assert!(cached > 0, "the requests share prefixes");
    assert!(late < requests / 2, "the index does not answer");
    cached
}
