//! Requests that the engine generates itself: a load at a fixed rate without the cost of HTTP.
//!
//! Prompts continue earlier ones from a random block on, so that blocks are shared, evicted and
//! stored again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fastrand::Rng;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::warn;
use warmroute_sim::sim::EngineRequest;

use crate::rank::Rank;

/// New blocks a second on each rank.
#[derive(Clone, Default)]
pub(crate) struct LoadRate(Arc<AtomicU32>);

impl LoadRate {
    pub(crate) fn set(&self, blocks_per_sec: u32) {
        self.0.store(blocks_per_sec, Ordering::Relaxed);
    }

    fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

const TICK: Duration = Duration::from_millis(10);
/// Bound of concurrent requests.
const OPEN_MAX: usize = 64;
/// Earlier prompts that a new one may continue.
const RECENT: usize = 48;
const NEW_BLOCKS: std::ops::RangeInclusive<usize> = 4..=48;
const DEPTH_MAX: usize = 128;

pub(crate) async fn run(rank: Arc<Rank>, pace: LoadRate, block: usize, stop: CancellationToken) {
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut prompts = Prompts {
        rng: Rng::new(),
        recent: VecDeque::new(),
        block,
    };
    let mut open = FuturesUnordered::new();
    let (mut due, mut last) = (0.0, Instant::now());
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            Some(()) = open.next() => continue,
            _ = ticks.tick() => {}
        }
        let passed = last.elapsed().as_secs_f64();
        last = Instant::now();
        let rate = f64::from(pace.get());
        // Work that the engine could not accept is due for one second at most.
        due = rate.mul_add(passed, due).min(rate);
        while due > 0.0 && open.len() < OPEN_MAX {
            let (prompt, blocks) = prompts.next();
            let request = EngineRequest {
                prompt,
                max_tokens: prompts.rng.usize(1..=4),
                ..EngineRequest::default()
            };
            match rank.submit(request) {
                Ok(mut generation) => {
                    open.push(async move { while generation.next().await.is_some() {} });
                }
                Err(error) => warn!(?error, "the load is refused"),
            }
            due -= f64::from(blocks);
        }
    }
}

struct Prompts {
    rng: Rng,
    recent: VecDeque<Vec<u32>>,
    block: usize,
}

impl Prompts {
    /// Returns a prompt and its number of new blocks.
    fn next(&mut self) -> (Vec<u32>, u32) {
        let mut prompt = Vec::new();
        if let Some(at) = self.recent.len().checked_sub(1) {
            let earlier = &self.recent[self.rng.usize(0..=at)];
            let blocks = self.rng.usize(0..=earlier.len() / self.block);
            prompt.extend_from_slice(&earlier[..blocks * self.block]);
        }
        let blocks = self.rng.usize(NEW_BLOCKS);
        prompt.extend((0..blocks * self.block).map(|_| self.rng.u32(0..100_000)));
        prompt.truncate(DEPTH_MAX * self.block);
        self.recent.push_back(prompt.clone());
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
        (prompt, u32::try_from(blocks).unwrap_or(u32::MAX))
    }
}
