//! Cost of replication: processor time of real routers, by their number.
//!
//!     cargo test --release -p warmroute-tests --test e2e -- --ignored --nocapture plane::cost
//!
//! Equal requests go to two, four and eight routers, and at the same time to as many routers whose
//! messages the server denies. The difference is the cost of replication; other load on the machine
//! affects both alike. `COST_ROUTERS=8` measures eight only.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use super::streams::{Shape, Tally};
use super::views::agree;
use crate::fleet::{Access, Engines, Flags, Fleet, Mode};

/// Streams a second, summed over a fleet's routers.
const RATE: u32 = 32;
const SHAPE: Shape = Shape {
    rules: 200,
    tokens: 200,
};
/// Rounds, in which both fleets run at the same time. Two rounds of one fleet differ by a tenth.
const TURN: Duration = Duration::from_secs(5);
const TURNS: usize = 24;
const IDLE: Duration = Duration::from_secs(8);

/// Processor seconds of a process: the sum over its threads, from the scheduler.
fn busy(pid: u32) -> f64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let nanos = threads.map(|thread| -> f64 {
        let schedstat = thread.unwrap().path().join("schedstat");
        // A thread may end between the two reads.
        let schedstat = fs::read_to_string(schedstat).unwrap_or_default();
        let first = schedstat.split_whitespace().next();
        first.map_or(0.0, |nanos| nanos.parse().unwrap())
    });
    nanos.sum::<f64>() / 1e9
}

fn all_busy(fleet: &Fleet) -> f64 {
    fleet.routers.iter().map(|router| busy(router.pid())).sum()
}

struct Side {
    fleet: Fleet,
    tally: Tally,
    /// Processor seconds a second without requests.
    idle: f64,
    /// By round.
    work: Vec<f64>,
}

impl Side {
    async fn start(routers: usize, access: Access) -> Self {
        let engines = Engines {
            count: 2,
            ranks: 1,
            blocks: 16384,
            flags: &["--itl-ms", "10", "--prefill-tokens-per-sec", "1000000"],
        };
        let mode = Mode::Nats {
            indexers: 1,
            routers,
        };
        let flags = Flags {
            access,
            ..Flags::default()
        };
        Self {
            fleet: Fleet::start(mode, engines, flags).await,
            tally: Tally::default(),
            idle: 0.0,
            work: Vec::new(),
        }
    }

    /// Messages that the routers have sent.
    async fn out(&self, what: &str) -> f64 {
        let name = format!("warmroute_router_sync_{what}_total{{direction=\"out\"}}");
        let mut sum = 0.0;
        for router in 0..self.fleet.routers.len() {
            let url = self.fleet.admin(router, "/metrics");
            let page = self.fleet.http.get(url).send().await.unwrap();
            let page = page.text().await.unwrap();
            let line = page.lines().find_map(|line| line.strip_prefix(&*name));
            sum += line.unwrap_or("0").trim().parse::<f64>().unwrap();
        }
        sum
    }

    fn whole(&self) -> f64 {
        self.tally.whole.load(Ordering::SeqCst) as f64
    }

    /// Processor milliseconds a request, without the idle share.
    async fn turn(&self) -> f64 {
        let bases: Vec<String> = self
            .fleet
            .routers
            .iter()
            .map(|router| router.base())
            .collect();
        let (busy, whole, begin) = (all_busy(&self.fleet), self.whole(), Instant::now());
        let is_over = AtomicBool::new(false);
        let over = || is_over.load(Ordering::Relaxed);
        let share = RATE / u32::try_from(bases.len()).unwrap();
        let http = &self.fleet.http;
        let load = |base| self.tally.at_rate((http, base), share, SHAPE, over);
        let end = async {
            sleep(TURN).await;
            is_over.store(true, Ordering::Relaxed);
        };
        tokio::join!(end, join_all(bases.iter().map(|base| load(base))));
        let work = all_busy(&self.fleet) - busy - self.idle * begin.elapsed().as_secs_f64();
        work * 1e3 / (self.whole() - whole)
    }

    fn mean(&self) -> f64 {
        self.work.iter().sum::<f64>() / self.work.len() as f64
    }
}

/// The mean difference of two fleets in the same round, and half of its 95 % confidence interval.
fn differences(ones: &[f64], others: &[f64]) -> (f64, f64) {
    let pairs = ones.iter().zip(others);
    let each: Vec<f64> = pairs.map(|(one, other)| one - other).collect();
    let count = each.len() as f64;
    let mean = each.iter().sum::<f64>() / count;
    let squares: f64 = each.iter().map(|one| (one - mean).powi(2)).sum();
    (mean, 1.96 * (squares / (count - 1.0) / count).sqrt())
}

async fn of(routers: usize) {
    let (mut mute, mut open) = (
        Side::start(routers, Access::MuteRouters).await,
        Side::start(routers, Access::Open).await,
    );
    let before = [&mute, &open].map(|side| all_busy(&side.fleet));
    sleep(IDLE).await;
    for (side, before) in [&mut mute, &mut open].into_iter().zip(before) {
        side.idle = (all_busy(&side.fleet) - before) / IDLE.as_secs_f64();
    }
    // The first round opens connections and warms up.
    tokio::join!(mute.turn(), open.turn());
    let (begin, bytes, frames) = (
        open.whole(),
        open.out("bytes").await,
        open.out("frames").await,
    );
    for _ in 0..TURNS {
        let (muted, opened) = tokio::join!(mute.turn(), open.turn());
        mute.work.push(muted);
        open.work.push(opened);
    }
    let whole = open.whole() - begin;
    let (bytes, frames) = (
        (open.out("bytes").await - bytes) / whole,
        (open.out("frames").await - frames) / whole,
    );
    for (side, name) in [(&mute, "mute"), (&open, "in step")] {
        let idle = side.idle * 1e3 / side.fleet.routers.len() as f64;
        println!(
            "{routers} routers, {name}: {} requests, {:.3} ms of processor a request {:.2?}; \
             idle {idle:.2} ms a second and router",
            side.whole(),
            side.mean(),
            side.work,
        );
        assert_eq!(side.tally.failed.load(Ordering::SeqCst), 0);
        side.fleet.until_idle().await;
    }
    let (more, half) = differences(&open.work, &mute.work);
    let percent = 100.0 / mute.mean();
    println!(
        "{routers} routers: in step {more:.3} ± {half:.3} ms a request more, {:.1} ± {:.1} % of the rest; \
         {frames:.2} frames and {bytes:.0} B sent a request",
        more * percent,
        half * percent,
    );
    let same = async |fleet: &Fleet| agree(fleet).await;
    open.fleet.until("all routers agree", same).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement, for a release build on a quiet machine"]
#[expect(clippy::disallowed_methods, reason = "a switch for whoever measures")]
async fn what_hearing_each_other_costs() {
    let only: Option<usize> = std::env::var("COST_ROUTERS")
        .ok()
        .map(|only| only.parse().unwrap());
    for routers in [2, 4, 8] {
        if only.is_none_or(|only| only == routers) {
            of(routers).await;
        }
    }
}
