//! Rolling restarts of routers while clients are served.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::front::{Front, Kind};
use super::streams::{Shape, Tally, open};
use super::views::{agree, held, id};
use crate::fleet::{Engines, Flags, Fleet, Mode};

/// Streams a second. `ROLLING_RATE=200` is the full rate, for otherwise idle machines.
const RATE: u32 = 40;

/// At the engines' speed a stream takes about a second.
const SHAPE: Shape = Shape {
    rules: 20,
    tokens: 40,
};

const STREAMING: &[&str] = &["--itl-ms", "25", "--prefill-tokens-per-sec", "200000"];

async fn fleet(routers: usize, flags: &'static [&'static str], engines: usize) -> Fleet {
    fleet_of(routers, flags, engines, Flags::default()).await
}

async fn fleet_of(
    routers: usize,
    flags: &'static [&'static str],
    engines: usize,
    others: Flags,
) -> Fleet {
    let engines = Engines {
        count: engines,
        ranks: 1,
        blocks: 4096,
        flags,
    };
    let mode = Mode::Nats {
        indexers: 1,
        routers,
    };
    Fleet::start(mode, engines, others).await
}

/// No load remains at any router or engine.
async fn until_quiet(fleet: &Fleet) {
    fleet.until_idle().await;
    let quiet = async |fleet: &Fleet| {
        let ended = fleet.counted("finished").await + fleet.counted("aborted").await;
        fleet.counted("active").await == 0 && fleet.counted("started").await == ended
    };
    fleet.until("the engines work for nobody", quiet).await;
    fleet
        .until("all routers agree", async |fleet| agree(fleet).await)
        .await;
    let ignored = fleet
        .metric("warmroute_router_slot_changes_ignored_total")
        .await;
    assert!(ignored.abs() < 0.5, "{ignored} changes that made no sense");
}

#[expect(
    clippy::disallowed_methods,
    reason = "how much load the machine can bear"
)]
fn rate() -> u32 {
    let asked = std::env::var("ROLLING_RATE").ok();
    asked.map_or(RATE, |rate| rate.parse().expect("a number"))
}

/// Compares the requests that routers count with those that clients have open.
///
/// A request that is open throughout a sample must be counted. A request that was not open at any
/// time in it must not be. A sample begins this long before the query, because load reaches the
/// other routers in milliseconds. A machine may stall longer, so one sample decides nothing; a
/// router that is wrong in this many samples in a row has counted a request twice or lost it.
#[derive(Debug, Default)]
struct Counted {
    looks: u64,
    /// The largest excess over the bound in any sample.
    twice_most: u64,
    lost_most: u64,
}

const LOOK: Duration = Duration::from_millis(200);
const WRONG_MAX: u32 = 5;

impl Counted {
    /// Clients that wait at a starting router for its decision are not counted.
    async fn watch(
        &mut self,
        (fleet, tally): (&Fleet, &Tally),
        is_beginning: &AtomicBool,
        is_over: impl Fn() -> bool,
    ) {
        let mut wrong = vec![0; fleet.routers.len()];
        while !is_over() {
            let (ended, sent) = tally.ended_and_sent();
            let all_choose = !is_beginning.load(Ordering::SeqCst);
            sleep(LOOK).await;
            for (by, wrong) in wrong.iter_mut().enumerate() {
                let Some(seen) = try_load(fleet, by).await else {
                    *wrong = 0;
                    continue;
                };
                let (ended_then, sent_then) = tally.ended_and_sent();
                let twice = seen.saturating_sub(sent_then - ended);
                let all_choose = all_choose && !is_beginning.load(Ordering::SeqCst);
                let must = if all_choose {
                    sent.saturating_sub(ended_then)
                } else {
                    0
                };
                let lost = must.saturating_sub(seen);
                self.looks += 1;
                self.twice_most = self.twice_most.max(twice);
                self.lost_most = self.lost_most.max(lost);
                *wrong = if twice + lost > 0 { *wrong + 1 } else { 0 };
                assert!(
                    *wrong < WRONG_MAX,
                    "router {by} counts {seen} at the last of {wrong} looks: {twice} too many, {lost} too few"
                );
            }
        }
    }
}

/// Requests that a router counts, its own and the others'; `None` while it is not ready.
async fn try_load(fleet: &Fleet, by: usize) -> Option<u64> {
    if !fleet.is_ready(&fleet.admin(by, "")).await {
        return None;
    }
    let slots = fleet.http.get(fleet.admin(by, "/v1/slots")).send().await;
    let slots: Value = slots.ok()?.json().await.ok()?;
    let sources = slots["sources"].as_array().expect("sources");
    let active = |source: &Value| source["active_requests"].as_u64().expect("a count");
    Some(sources.iter().map(active).sum())
}

/// SIGTERM to every router in turn; each one is back before the next leaves.
async fn rolling_restart(kind: Kind, rate: u32) {
    let fleet = fleet(3, STREAMING, 4).await;
    let front = Front::start(kind, &fleet).await;
    let (tally, is_over) = (Tally::default(), AtomicBool::new(false));
    let is_beginning = AtomicBool::new(false);
    let (http, base) = (&fleet.http, front.base());
    let begin = Instant::now();
    let restarts = async {
        for (number, router) in fleet.routers.iter().enumerate() {
            let since = Instant::now();
            router.signal("TERM");
            let unready = async |fleet: &Fleet| !fleet.is_ready(&fleet.admin(number, "")).await;
            fleet.until("it says that it leaves", unready).await;
            let status = router.ended().await;
            assert!(status.success(), "router {number}: {status}");
            println!("router {number} left within {:?}", since.elapsed());
            is_beginning.store(true, Ordering::SeqCst);
            router.restart().await;
            let ready = async |fleet: &Fleet| fleet.is_ready(&router.base()).await;
            fleet.until("it is back", ready).await;
            is_beginning.store(false, Ordering::SeqCst);
        }
        is_over.store(true, Ordering::Relaxed);
    };
    let over = || is_over.load(Ordering::Relaxed);
    let load = tally.at_rate((http, &base), rate, SHAPE, over);
    let mut counted = Counted::default();
    tokio::join!(
        restarts,
        load,
        counted.watch((&fleet, &tally), &is_beginning, over)
    );
    let sent = tally.sent.load(Ordering::SeqCst);
    let reached = sent as f64 / begin.elapsed().as_secs_f64();
    let failed = tally.failed.load(Ordering::SeqCst);
    println!("{kind:?}: {sent} streams, {reached:.0} a second, {failed} failed");
    println!("{kind:?}: {counted:?}");
    assert_eq!(failed, 0);
    assert!(counted.looks > 20, "nobody was looked at");
    until_quiet(&fleet).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_routers_restart_behind_haproxy_and_no_request_fails() {
    rolling_restart(Kind::HaProxy, rate()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_routers_restart_behind_nginx_and_no_request_fails() {
    rolling_restart(Kind::Nginx, rate().div_ceil(2)).await;
}

/// A manual drain and undrain: late requests are still served.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_by_hand_serves_on_and_sigterm_lets_streams_end() {
    let fleet = fleet(2, &["--itl-ms", "100"], 1).await;
    let (drain, undrain) = ("/admin/drain", "/admin/undrain");
    let post = async |path: &str| -> (u16, Value) {
        let change = fleet.http.post(fleet.admin(0, path));
        let answer = change.header("x-warmroute-admin", "1").send();
        let answer = answer.await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap())
    };
    let base = fleet.routers[0].base();
    assert_eq!(post(drain).await.1["state"], "draining");
    assert!(!fleet.is_ready(&base).await);
    assert!(fleet.is_ready(&fleet.routers[1].base()).await);
    let tally = Tally::default();
    tally
        .stream(&fleet.http, &base, "Who comes is served.", 5)
        .await;
    assert_eq!(tally.whole.load(Ordering::SeqCst), 1);
    assert_eq!(post(undrain).await.1["state"], "serving");
    assert!(fleet.is_ready(&base).await);

    // A stream of twelve seconds, longer than the drain notice on a busy machine.
    let router = id(&fleet, 0).await;
    let leaving = async {
        let seen = async |fleet: &Fleet| held(fleet, 1, &router).await == 1;
        fleet.until("the other one sees the stream", seen).await;
        fleet.routers[0].signal("TERM");
        let unready = async |fleet: &Fleet| !fleet.is_ready(&fleet.admin(0, "")).await;
        fleet.until("it says that it leaves", unready).await;
        assert_eq!(post(undrain).await.0, 409);
        assert_eq!(held(&fleet, 1, &router).await, 1);
        let status = fleet.routers[0].ended().await;
        assert!(status.success(), "{status}");
    };
    tokio::join!(
        leaving,
        tally.stream(&fleet.http, &base, "Count slowly.", 120)
    );
    assert_eq!(tally.failed.load(Ordering::SeqCst), 0);
    assert_eq!(tally.whole.load(Ordering::SeqCst), 2);
    assert_eq!(held(&fleet, 1, &router).await, 0);
    let metrics = fleet.http.get(fleet.admin(1, "/metrics")).send().await;
    let page = metrics.unwrap().text().await.unwrap();
    let goodbye = "warmroute_router_sync_releases_total{reason=\"goodbye\"} 1";
    assert!(page.contains(goodbye), "no goodbye in {page}");
}

/// After a second SIGTERM it does not wait for its streams.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_cuts_what_is_open() {
    // Longer than any wait here.
    let flags = Flags {
        router: &[concat!(
            "--config=",
            env!("CARGO_MANIFEST_DIR"),
            "/fixtures/long-drain.toml"
        )],
        ..Flags::default()
    };
    let fleet = fleet_of(1, &["--itl-ms", "1000"], 1, flags).await;
    let streams = open(&fleet.http, &fleet.routers[0].base(), 3).await;
    let since = Instant::now();
    fleet.routers[0].signal("TERM");
    let unready = async |fleet: &Fleet| !fleet.is_ready(&fleet.admin(0, "")).await;
    fleet.until("it says that it leaves", unready).await;
    sleep(Duration::from_millis(100)).await;
    fleet.routers[0].signal("TERM");
    assert!(fleet.routers[0].ended().await.success());
    println!("told twice, it ended within {:?}", since.elapsed());
    drop(streams);
}
