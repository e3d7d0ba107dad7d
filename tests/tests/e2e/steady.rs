//! A steady load, some of whose clients leave: afterwards no slot, socket or memory of it is left.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use serde_json::json;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::task::TaskTracker;

use crate::fleet::traffic::request;
use crate::fleet::{Engines, Flags, Fleet, Mode, Process, client};

/// Requests a second, and seconds; `STEADY_SECS` overrides the latter.
const RATE: u64 = 200;
const SECS: u64 = 20;

/// Clients close idle connections before the router does, after 30 s: a request on one that the router
/// closes at that time fails.
const IDLE_MAX: Duration = Duration::from_secs(15);

/// Open files that are no leak: connections that health checks and scrapes open at the time.
const FILES_SPARE: usize = 8;

/// Memory that is no leak: caches that fill, and the allocator's spare pages.
const BYTES_SPARE: u64 = 48 << 20;

#[expect(clippy::disallowed_methods, reason = "how long the machine is at hand")]
fn secs() -> u64 {
    let given = std::env::var("STEADY_SECS");
    given.map_or(SECS, |secs| secs.parse().expect("a number"))
}

/// How the requests ended.
#[derive(Default)]
struct RequestEnds {
    whole: AtomicU64,
    left: AtomicU64,
    failed: AtomicU64,
}

impl RequestEnds {
    fn failed(&self, number: u64, why: &dyn Debug) -> &AtomicU64 {
        println!("request {number} failed: {why:?}");
        &self.failed
    }

    fn counts(&self) -> [u64; 3] {
        [&self.whole, &self.left, &self.failed].map(|count| count.load(Ordering::Relaxed))
    }
}

/// Every second request is a stream, and every eighth client leaves in mid-stream.
async fn send(http: &reqwest::Client, base: &str, number: u64, ends: &RequestEnds) {
    let (path, mut body) = request(&mut Rng::with_seed(number));
    let is_stream = number.is_multiple_of(2);
    body["stream"] = json!(is_stream);
    let sent = http.post(format!("{base}{path}")).json(&body).send().await;
    let end = match sent {
        Ok(mut answer) if answer.status().is_success() && number.is_multiple_of(8) => {
            // It leaves after the first bytes.
            drop(answer.chunk().await);
            &ends.left
        }
        Ok(answer) if answer.status().is_success() => match answer.bytes().await {
            Ok(_) => &ends.whole,
            Err(error) => ends.failed(number, &error),
        },
        Ok(answer) => ends.failed(number, &answer.status()),
        Err(error) => ends.failed(number, &error),
    };
    end.fetch_add(1, Ordering::Relaxed);
}

/// Sends at a steady rate, and waits for the last answer.
async fn load(fleet: &Fleet, secs: u64) -> [u64; 3] {
    let http = client().pool_idle_timeout(IDLE_MAX).build().unwrap();
    let (ends, tasks) = (Arc::<RequestEnds>::default(), TaskTracker::new());
    let mut ticks = interval(Duration::from_secs(1) / u32::try_from(RATE).unwrap());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for number in 0..RATE * secs {
        ticks.tick().await;
        let router = &fleet.routers[usize::try_from(number).unwrap() % fleet.routers.len()];
        let (http, base, ends) = (http.clone(), router.base(), Arc::clone(&ends));
        tasks.spawn(async move { send(&http, &base, number, &ends).await });
    }
    tasks.close();
    tasks.wait().await;
    ends.counts()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_steady_load_leaves_no_slot_socket_or_memory() {
    let engines = Engines {
        count: 2,
        ranks: 1,
        blocks: 2048,
        flags: &["--itl-ms", "1", "--prefill-tokens-per-sec", "400000"],
    };
    let mode = Mode::Nats {
        indexers: 1,
        routers: 2,
    };
    let fleet = Fleet::start(mode, engines, Flags::default()).await;
    fleet.until_indexed().await;
    let parts = || fleet.routers.iter().chain(&fleet.parts().indexers);
    let files: Vec<usize> = parts().map(Process::open_files).collect();
    // Caches fill, and engines begin to evict.
    let [whole, left, failed] = load(&fleet, SECS / 4).await;
    assert!(whole > 0 && left > 0 && failed == 0, "{failed} failed");
    let memory: Vec<u64> = parts().map(Process::resident_bytes).collect();

    let secs = secs();
    let [whole, left, failed] = load(&fleet, secs).await;
    println!("{secs} s: {whole} whole, {left} left, {failed} failed");
    assert_eq!(failed, 0);
    assert_eq!(whole + left, RATE * secs);
    fleet.until_idle().await;
    let opened = fleet.metric("warmroute_router_slots_opened_total").await;
    let freed = fleet.metric("warmroute_router_slots_freed_total").await;
    assert!(
        (opened - freed).abs() < 0.5,
        "{opened} opened, {freed} freed"
    );
    let closed = async |_: &Fleet| {
        let now = parts().map(Process::open_files);
        let mut pairs = now.zip(&files);
        pairs.all(|(now, before)| now <= before + FILES_SPARE)
    };
    fleet.until("sockets are closed", closed).await;
    for (part, before) in parts().zip(&memory) {
        let (before, after) = (*before, part.resident_bytes());
        let mib = |bytes: u64| bytes >> 20;
        println!("memory: {} MiB, then {} MiB", mib(before), mib(after));
        assert!(after <= before + BYTES_SPARE, "{before} and {after} bytes");
    }
}
