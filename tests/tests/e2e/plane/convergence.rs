//! Load messages that are lost, duplicated and delayed on their way to each router.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::agreement::Agreement;
use super::streams::{Shape, Tally, open};
use super::views::agree;
use crate::fleet::{Access, Engines, Flags, Fleet, Mode};

const LOSS: Duration = Duration::from_secs(5);

/// Agreement is promised within a second after the loss. Only a defect takes longer.
const AGREED_MAX: Duration = Duration::from_secs(15);

/// Streams a second at each of three routers.
const RATE: u32 = 30;
const SHAPE: Shape = Shape {
    rules: 20,
    tokens: 8,
};

/// During the loss, equal numbers mean equal slots. After it, while requests continue, all routers
/// agree soon.
#[tokio::test(flavor = "multi_thread")]
async fn routers_agree_soon_after_a_third_of_their_messages_was_lost() {
    let engines = Engines {
        count: 4,
        ranks: 1,
        blocks: 8192,
        flags: &["--itl-ms", "200", "--prefill-tokens-per-sec", "200000"],
    };
    let mode = Mode::Nats {
        indexers: 1,
        routers: 3,
    };
    let flags = Flags {
        access: Access::LossyRouters,
        ..Flags::default()
    };
    let fleet = Fleet::start(mode, engines, flags).await;
    let lossy = fleet.parts().lossy();
    let bases: Vec<String> = fleet.routers.iter().map(|router| router.base()).collect();
    let (tally, is_over) = (Tally::default(), AtomicBool::new(false));
    let (mut agreement, mut divergence) = (Agreement::default(), 0.0_f64);
    lossy.lose(true);
    let mut kept = Vec::new();
    for base in &bases {
        kept.extend(open(&fleet.http, base, 10).await);
    }
    let faults = async {
        let begin = Instant::now();
        while begin.elapsed() < LOSS {
            agreement.look(&fleet).await;
            let seen = fleet
                .metric("warmroute_router_sync_divergence_requests")
                .await;
            divergence = divergence.max(seen);
            sleep(Duration::from_millis(20)).await;
        }
        lossy.lose(false);
        let since = Instant::now();
        let same = async |fleet: &Fleet| agree(fleet).await;
        fleet
            .until_caught(AGREED_MAX, "all hold the same of all", same)
            .await;
        println!("agreed {:?} after the loss, under load", since.elapsed());
        is_over.store(true, Ordering::Relaxed);
    };
    let over = || is_over.load(Ordering::Relaxed);
    let load = |base| tally.at_rate((&fleet.http, base), RATE, SHAPE, over);
    tokio::join!(faults, load(&bases[0]), load(&bases[1]), load(&bases[2]));
    let (lost, compared) = (lossy.counts(), agreement.compared("slots"));
    let metric = async |name: &str| {
        let name = format!("warmroute_router_sync_{name}_total");
        fleet.metric(&name).await
    };
    let (gaps, repairs) = (metric("gaps").await, metric("repairs").await);
    println!(
        "deliveries lost, doubled, late: {lost:?}; {gaps} gaps, {repairs} repairs; {compared} comparisons; \
         views differed by {divergence} requests at most"
    );
    assert!(lost.iter().all(|&count| count > 0) && gaps > 0.0 && repairs > 0.0);
    assert!(compared > 0, "nothing was compared");
    assert_eq!(tally.failed.load(Ordering::SeqCst), 0);
    drop(kept);
    fleet.until_idle().await;
    let same = async |fleet: &Fleet| agree(fleet).await;
    fleet.until("all routers agree", same).await;
}
