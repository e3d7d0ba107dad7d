//! What it costs that replicas hear each other: processor time of real routers, by how many there are.
//!
//!     cargo test --release -p warmroute-tests --test e2e -- --ignored --nocapture plane::cost
//!
//! The same requests go to two, four and eight routers, and to as many that the server lets say nothing to
//! each other: what differs is the cost of being in step. `COST_ROUTERS=8` measures eight only.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::sleep;

use super::streams::{Shape, Tally};
use super::views::agree;
use crate::fleet::{Access, Engines, Flags, Fleet, Mode};

/// Streams a second, of all routers together.
const RATE: u32 = 48;
const SHAPE: Shape = Shape {
    rules: 200,
    tokens: 200,
};
const LONG: Duration = Duration::from_secs(20);
const IDLE: Duration = Duration::from_secs(8);

/// Seconds of processor that a process took so far: of all its threads, as the scheduler counts them.
fn busy(pid: u32) -> f64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let nanos = threads.map(|thread| -> f64 {
        let schedstat = thread.unwrap().path().join("schedstat");
        // A thread may end between the two.
        let schedstat = fs::read_to_string(schedstat).unwrap_or_default();
        let first = schedstat.split_whitespace().next();
        first.map_or(0.0, |nanos| nanos.parse().unwrap())
    });
    nanos.sum::<f64>() / 1e9
}

fn all_busy(fleet: &Fleet) -> f64 {
    fleet.routers.iter().map(|router| busy(router.pid())).sum()
}

/// Milliseconds of processor a request, of all routers together; what they do when idle taken off.
async fn of(routers: usize, access: Access) -> f64 {
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
    let fleet = Fleet::start(mode, engines, flags).await;
    let before = all_busy(&fleet);
    sleep(IDLE).await;
    let idle = (all_busy(&fleet) - before) / IDLE.as_secs_f64();
    let (tally, is_over, before) = (Tally::default(), AtomicBool::new(false), all_busy(&fleet));
    let out = async |what: &str| {
        let name = format!("warmroute_router_sync_{what}_total{{direction=\"out\"}}");
        let mut sum = 0.0;
        for router in 0..routers {
            let page = fleet.http.get(fleet.admin(router, "/metrics")).send().await;
            let page = page.unwrap().text().await.unwrap();
            let line = page.lines().find_map(|line| line.strip_prefix(&*name));
            sum += line.unwrap_or("0").trim().parse::<f64>().unwrap();
        }
        sum
    };
    let (bytes_before, frames_before) = (out("bytes").await, out("frames").await);
    let over = || is_over.load(Ordering::Relaxed);
    let bases: Vec<String> = fleet.routers.iter().map(|router| router.base()).collect();
    let share = RATE / u32::try_from(routers).unwrap();
    let load = |base| tally.at_rate((&fleet.http, base), share, SHAPE, over);
    let end = async {
        sleep(LONG).await;
        is_over.store(true, Ordering::Relaxed);
    };
    let begin = tokio::time::Instant::now();
    tokio::join!(end, join_all(bases.iter().map(|base| load(base))));
    let took = begin.elapsed().as_secs_f64();
    let whole = tally.whole.load(Ordering::SeqCst) as f64;
    let work = (all_busy(&fleet) - before - idle * took) * 1e3 / whole;
    let bytes = (out("bytes").await - bytes_before) / whole;
    let frames = (out("frames").await - frames_before) / whole;
    println!(
        "{routers} routers, {access:?}: {whole} requests, {work:.3} ms of processor a request; \
         {frames:.2} frames and {bytes:.0} B sent a request; idle {:.2} ms a second and router",
        idle * 1e3 / f64::from(u32::try_from(routers).unwrap()),
    );
    assert_eq!(tally.failed.load(Ordering::SeqCst), 0);
    fleet.until_idle().await;
    if matches!(access, Access::Open) {
        let same = async |fleet: &Fleet| agree(fleet).await;
        fleet.until("all routers agree", same).await;
    }
    work
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement, for a release build on a quiet machine"]
async fn what_hearing_each_other_costs() {
    let only = std::env::var("COST_ROUTERS").map(|only| only.parse::<usize>().unwrap());
    let counts = only.map_or(vec![2, 4, 8], |only| vec![only]);
    for routers in counts {
        let mute = of(routers, Access::MuteRouters).await;
        let more = of(routers, Access::Open).await - mute;
        println!(
            "{routers} routers: in step {more:.3} ms a request more, {:.1} % of the rest",
            more * 100.0 / mute
        );
    }
}
