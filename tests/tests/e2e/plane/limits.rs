//! A tenant's limit over four routers.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use crate::fleet::{Engines, Flags, Fleet, Mode, Place};

const PER_SECOND: f64 = 100.0;
const KEY: &str = "abc";
const SHA256: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

/// Admitted requests and seconds, of clients that repeat a refused request after 10 ms.
async fn flood(fleet: &Fleet, routers: &[usize], time: Duration) -> (f64, f64) {
    let admitted = AtomicU64::new(0);
    let begun = Instant::now();
    let clients = (0..16).map(|client| {
        let router = routers[client % routers.len()];
        let url = format!("{}/v1/models", fleet.routers[router].base());
        let admitted = &admitted;
        async move {
            while begun.elapsed() < time {
                let answer = fleet.http.get(&url).bearer_auth(KEY).send().await.unwrap();
                match answer.status().as_u16() {
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
    let secs = begun.elapsed().as_secs_f64();
    (admitted.into_inner() as f64, secs)
}

/// Without sharing, four routers would admit the fourfold.
#[tokio::test(flavor = "multi_thread")]
async fn a_limit_holds_over_four_routers() {
    let place = Place::new();
    let config = place.path("router.toml");
    let tenant = format!(
        "[[tenants]]\nname = \"t\"\nrequests_per_second = 100\n\
         keys = [{{ id = \"k\", sha256 = \"{SHA256}\" }}]\n"
    );
    fs::write(&config, tenant).unwrap();
    let config = String::leak(config.to_str().unwrap().to_owned());
    let flags = Flags {
        router: Vec::leak(vec!["--config", config]),
        ..Flags::default()
    };
    let engines = Engines {
        count: 1,
        ranks: 1,
        blocks: 1000,
        flags: &[],
    };
    let mode = Mode::Nats {
        indexers: 1,
        routers: 4,
    };
    let fleet = Fleet::start(mode, engines, flags).await;
    for routers in [&[0, 1, 2, 3][..], &[2], &[0, 1, 2, 3]] {
        let (admitted, secs) = flood(&fleet, routers, Duration::from_secs(8)).await;
        let rate = PER_SECOND * secs;
        println!(
            "routers {routers:?}: {admitted} in {secs:.2} s, {:.3} of the limit",
            admitted / rate
        );
        // One full bucket at the beginning.
        assert!(admitted <= 1.05 * (rate + PER_SECOND), "{admitted} {rate}");
        assert!(admitted >= 0.7 * rate, "{admitted} {rate}");
    }
}
