//! More requests than places: two routers let them wait, and every one is served.

use futures_util::future::join_all;

use super::streams::Tally;
use crate::fleet::{Engines, Flags, Fleet, Mode};

const REQUESTS: usize = 60;

/// A refused request would be a failed one.
#[tokio::test]
async fn requests_wait_for_a_place_at_two_routers() {
    let engines = Engines {
        count: 2,
        ranks: 1,
        blocks: 20_000,
        flags: &["--itl-ms", "5"],
    };
    let mode = Mode::Nats {
        indexers: 1,
        routers: 2,
    };
    let flags = Flags {
        router: &["--max-active-requests", "2"],
        ..Flags::default()
    };
    let fleet = Fleet::start(mode, engines, flags).await;
    let bases: Vec<String> = fleet.routers.iter().map(|router| router.base()).collect();
    let tally = Tally::default();
    let streams = (0..REQUESTS).map(|number| {
        let (base, prompt) = (&bases[number % 2], format!("Request {number} of many."));
        let (tally, http) = (&tally, &fleet.http);
        async move { tally.stream(http, base, &prompt, 20).await }
    });
    join_all(streams).await;
    assert_eq!(tally.ended_and_sent(), (60, 60));
    let failed = tally.failed.load(std::sync::atomic::Ordering::SeqCst);
    assert_eq!(failed, 0);
    let is_idle = async |fleet: &Fleet| fleet.metric("warmroute_router_slots_open").await == 0.0;
    fleet.until("no slot is open", is_idle).await;
    let shed = fleet.metric("warmroute_router_queue_shed_total").await;
    assert_eq!(shed, 0.0);
    let queued = "warmroute_router_queue_requests{model=\"mock\"}";
    assert_eq!(fleet.metric(queued).await, 0.0);
}
