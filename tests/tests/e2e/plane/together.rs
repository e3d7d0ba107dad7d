//! All parts together under load.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::agreement::Agreement;
use super::equality::until_equal;
use super::load::{sequential, under_load};
use crate::fleet::{Engines, Flags, Fleet, Mode};

/// Set `PLANE_LOAD_SECS=60` for the long form.
fn load_time() -> Duration {
    let told = std::env::var_os("PLANE_LOAD_SECS");
    let told = told.and_then(|text| text.to_str()?.parse().ok());
    Duration::from_secs(told.unwrap_or(12))
}

/// Two indexers at one position hold equal content; so do shim and indexers at one record, and all
/// routers at one number. Sampled under load and at rest: then engines, mirrors and indexes are
/// equal and no slot remains.
#[tokio::test(flavor = "multi_thread")]
async fn every_view_is_the_same_under_load_and_when_quiet() {
    let engines = Engines {
        count: 3,
        ranks: 2,
        blocks: 400,
        flags: &["--itl-ms", "5", "--prefill-tokens-per-sec", "20000"],
    };
    let mode = Mode::Nats {
        indexers: 2,
        routers: 3,
    };
    let fleet = Fleet::start(mode, engines, Flags::default()).await;
    fleet.until_indexed().await;
    let mut agreement = Agreement::default();
    let end = Instant::now() + load_time();
    let ((), served) = under_load(&fleet, 8, async {
        while Instant::now() < end {
            agreement.look(&fleet).await;
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let compared = ["positions", "records", "slots"].map(|what| agreement.compared(what));
    println!("{served} requests; compared {compared:?} positions, records, slots");
    assert!(
        compared.iter().all(|&times| times >= 20),
        "too little was compared"
    );

    let quiet = Instant::now();
    fleet.until_idle().await;
    until_equal(&fleet).await;
    println!("equal {:?} after the last request", quiet.elapsed());
    agreement.look(&fleet).await;
    sequential(&fleet, 1, 60).await;
    fleet.until_idle().await;
    until_equal(&fleet).await;
}
