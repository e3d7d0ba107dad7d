//! A tenant's limits over four routers, by counts of admitted requests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use reqwest::{RequestBuilder, Response};
use serde_json::json;
use tokio::time::{Instant, sleep};
use warmroute_process::access::keys::KeyHash;

use crate::fleet::{Engines, Flags, Fleet, Mode, Place};

const ALL: [usize; 4] = [0, 1, 2, 3];

/// The error of limits over several routers.
const ERROR: f64 = 0.05;

const PER_SECOND: f64 = 100.0;
const REQUESTS_PER_MINUTE: f64 = 600.0;
const TOKENS_PER_MINUTE: f64 = 12_000.0;
const CONCURRENT: usize = 40;

/// Prompt and output of a request of the tenant `tokens`.
const REQUEST_TOKENS: u64 = 50;

/// The tenants, each with one limit and its name as its key.
const LIMITS: [(&str, &str); 4] = [
    ("second", "requests_per_second = 100"),
    ("minute", "requests_per_minute = 600"),
    ("tokens", "tokens_per_minute = 12000"),
    ("concurrent", "max_concurrent_requests = 40"),
];

/// How many requests were admitted in which time.
struct Flood {
    admitted: f64,
    secs: f64,
}

impl Flood {
    /// What a bucket that holds a minute's or a second's units gives in the time: `full` at first.
    fn permitted(&self, full: f64, per_sec: f64) -> f64 {
        full + per_sec * self.secs
    }
}

async fn start() -> (Place, Fleet) {
    let place = Place::new();
    let tenants = LIMITS.map(|(name, limit)| {
        let hash = KeyHash::of(name.as_bytes()).unwrap().to_hex();
        format!(
            "[[tenants]]\nname = \"{name}\"\n{limit}\n\
             keys = [{{ id = \"{name}\", sha256 = \"{hash}\" }}]\n"
        )
    });
    let flags = Flags {
        router: place.router_flags(&tenants.concat()),
        ..Flags::default()
    };
    let engines = Engines {
        count: 1,
        ranks: 1,
        blocks: 4000,
        flags: &["--itl-ms", "200", "--prefill-tokens-per-sec", "200000"],
    };
    let mode = Mode::Nats {
        indexers: 1,
        routers: 4,
    };
    let fleet = Fleet::start(mode, engines, flags).await;
    // In the first reports the parts of the last router are exchanged.
    sleep(Duration::from_secs(1)).await;
    (place, fleet)
}

/// A request that costs an engine next to nothing.
fn version(fleet: &Fleet, base: &str) -> RequestBuilder {
    fleet.http.get(format!("{base}/version"))
}

/// A completion of a prompt, with one token as output unless it is a long stream.
fn complete(fleet: &Fleet, base: &str, prompt_tokens: u64, output: u32) -> RequestBuilder {
    let prompt: Vec<u64> = (300..300 + prompt_tokens).collect();
    let stream = output > 1;
    let body = json!({"model": "mock", "prompt": prompt, "max_tokens": output, "stream": stream});
    let url = format!("{base}/v1/completions");
    fleet.http.post(url).json(&body)
}

fn completion(fleet: &Fleet, base: &str) -> RequestBuilder {
    complete(fleet, base, REQUEST_TOKENS - 1, 1)
}

/// Clients that repeat a refused request after 10 ms.
async fn flood(
    fleet: &Fleet,
    key: &str,
    routers: &[usize],
    secs: u64,
    request: fn(&Fleet, &str) -> RequestBuilder,
) -> Flood {
    let admitted = AtomicU64::new(0);
    let (begun, time) = (Instant::now(), Duration::from_secs(secs));
    let clients = (0..16).map(|client| {
        let base = fleet.routers[routers[client % routers.len()]].base();
        let admitted = &admitted;
        async move {
            while begun.elapsed() < time {
                let sent = request(fleet, &base).bearer_auth(key).send().await;
                let answer = sent.unwrap();
                let status = answer.status().as_u16();
                answer.bytes().await.unwrap();
                match status {
                    200 => {
                        admitted.fetch_add(1, Ordering::Relaxed);
                    }
                    429 => sleep(Duration::from_millis(10)).await,
                    other => panic!("{other}"),
                }
            }
        }
    });
    join_all(clients).await;
    Flood {
        admitted: admitted.into_inner() as f64,
        secs: begun.elapsed().as_secs_f64(),
    }
}

/// Without sharing, four routers would admit the fourfold. The bucket of a minute outweighs what is
/// refilled in the test, so the counts hardly depend on its time.
#[tokio::test(flavor = "multi_thread")]
async fn limits_hold_over_four_routers_within_the_error() {
    let (_place, fleet) = start().await;
    let requests = flood(&fleet, "minute", &ALL, 8, version).await;
    assert_whole(&requests, 1.0, REQUESTS_PER_MINUTE);
    let tokens = flood(&fleet, "tokens", &ALL, 8, completion).await;
    assert_whole(&tokens, REQUEST_TOKENS as f64, TOKENS_PER_MINUTE);
    concurrent_requests_are_bounded(&fleet).await;
    // The first one begins with a full bucket of a second.
    let first = flood(&fleet, "second", &ALL, 6, version).await;
    assert_rate(&first, PER_SECOND, 1.0 - ERROR);
    for (routers, least) in [(&[2][..], 0.8), (&ALL, 1.0 - ERROR)] {
        let next = flood(&fleet, "second", routers, 6, version).await;
        assert_rate(&next, 0.0, least);
    }
}

fn assert_whole(flood: &Flood, units: f64, per_minute: f64) {
    let permitted = flood.permitted(per_minute, per_minute / 60.0);
    let share = flood.admitted * units / permitted;
    println!("{} in {:.2} s: {share:.3}", flood.admitted, flood.secs);
    assert!((1.0 - ERROR..=1.0 + ERROR).contains(&share), "{share}");
}

fn assert_rate(flood: &Flood, full: f64, least: f64) {
    let permitted = flood.permitted(full, PER_SECOND);
    let share = flood.admitted / permitted;
    println!("{} in {:.2} s: {share:.3}", flood.admitted, flood.secs);
    assert!((least..=1.0 + ERROR).contains(&share), "{share}");
}

/// No stream ends in the test: each one that is admitted stays in progress.
async fn concurrent_requests_are_bounded(fleet: &Fleet) {
    let mut open: Vec<Response> = Vec::new();
    for _ in 0..20 {
        let asked = ALL.iter().flat_map(|router| [*router; 15]).map(|router| {
            let base = fleet.routers[router].base();
            complete(fleet, &base, 10, 600)
                .bearer_auth("concurrent")
                .send()
        });
        let answers = join_all(asked).await.into_iter().map(Result::unwrap);
        open.extend(answers.filter(|answer| answer.status() == 200));
        sleep(Duration::from_millis(100)).await;
    }
    println!("{} requests in progress", open.len());
    let (most, least) = (CONCURRENT * 21 / 20, CONCURRENT * 19 / 20);
    assert!((least..=most).contains(&open.len()), "{}", open.len());
}

/// A router that starts beside three others adds nothing to an empty bucket.
#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_router_adds_no_bucket() {
    let (_place, fleet) = start().await;
    let first = flood(&fleet, "minute", &ALL, 6, version).await;
    assert_whole(&first, 1.0, REQUESTS_PER_MINUTE);
    let begun = Instant::now();
    let router = &fleet.routers[3];
    router.kill();
    router.restart().await;
    // Before it is ready too.
    let second = flood(&fleet, "minute", &[3], 6, version).await;
    let refilled = begun.elapsed().as_secs_f64() * REQUESTS_PER_MINUTE / 60.0;
    println!(
        "{} beside {refilled:.1} that were refilled",
        second.admitted
    );
    let most = refilled + ERROR * REQUESTS_PER_MINUTE;
    assert!(
        second.admitted > 0.0 && second.admitted <= most,
        "{}",
        second.admitted
    );
}
