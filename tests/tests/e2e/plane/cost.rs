//! What it costs that replicas hear each other: processor time of real routers, by how many there are.
//!
//!     cargo test --release -p warmroute-tests --test e2e -- --ignored --nocapture plane::cost
//!
//! The same requests go to two, four and eight routers, and to as many that the server lets say nothing to
//! each other: what differs is the cost of being in step.

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
const IDLE: Duration = Duration::from_secs(5);

/// Processor time of a process so far; the kernel counts it in hundredths of a second.
fn busy(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let ticks = |at: usize| -> f64 { fields.split_whitespace().nth(at).unwrap().parse().unwrap() };
    (ticks(11) + ticks(12)) / 100.0
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
    let bytes = async |way: &str| {
        let name = format!("warmroute_router_sync_bytes_total{{direction=\"{way}\"}}");
        let mut sum = 0.0;
        for router in 0..routers {
            let page = fleet.http.get(fleet.admin(router, "/metrics")).send().await;
            let page = page.unwrap().text().await.unwrap();
            let line = page.lines().find_map(|line| line.strip_prefix(&*name));
            sum += line.unwrap_or("0").trim().parse::<f64>().unwrap();
        }
        sum
    };
    let sent_before = bytes("out").await;
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
    let out = (bytes("out").await - sent_before) / whole;
    println!(
        "{routers} routers, {access:?}: {whole} requests, {work:.3} ms of processor a request; \
         {out:.0} B sent a request; idle {:.2} ms a second and router",
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
    for routers in [2, 4, 8] {
        let mute = of(routers, Access::MuteRouters).await;
        let more = of(routers, Access::Open).await - mute;
        println!(
            "{routers} routers: in step {more:.3} ms a request more, {:.1} % of the rest",
            more * 100.0 / mute
        );
    }
}
