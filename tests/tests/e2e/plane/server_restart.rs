//! The nats-server dies and comes back.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::equality::{all_exact, until_equal};
use super::load::{sequential, under_load};
use crate::fleet::{Engines, Flags, Fleet, Mode};

/// SIGKILL under load, away for some seconds, back on the same directory: no request fails, and
/// afterwards everything is equal again.
#[tokio::test(flavor = "multi_thread")]
async fn nats_killed_under_load_costs_no_request() {
    let engines = Engines {
        count: 2,
        ranks: 2,
        blocks: 400,
        flags: &["--itl-ms", "2", "--prefill-tokens-per-sec", "50000"],
    };
    let mode = Mode::Nats {
        indexers: 2,
        routers: 2,
    };
    let fleet = Fleet::start(mode, engines, Flags::default()).await;
    fleet.until_indexed().await;
    let ((), served) = under_load(&fleet, 4, async {
        for away in [Duration::from_millis(200), Duration::from_secs(7)] {
            sleep(Duration::from_secs(1)).await;
            let mut server = fleet.parts().server.lock().await;
            server.kill();
            sleep(away).await;
            server.restart().await;
            let back = Instant::now();
            fleet
                .until("all is exact again", async |fleet| all_exact(fleet).await)
                .await;
            println!(
                "away for {away:?}: exact again {:?} after it was back",
                back.elapsed()
            );
        }
    })
    .await;
    println!("{served} requests, none failed");
    fleet.until_idle().await;
    until_equal(&fleet).await;
    sequential(&fleet, 2, 30).await;
    fleet.until_idle().await;
}
