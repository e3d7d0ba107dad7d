//! Shims that cannot reach NATS while their engines work.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{Scene, is_long};
use crate::fleet::{Flags, Links, Way};

/// Blocks a second, both engines together.
const RATE: u32 = 20_000;

/// One link carries nothing, the other one is refused; indexers are not cut. The outboxes take it all.
#[tokio::test(flavor = "multi_thread")]
async fn shims_cut_from_nats() {
    let flags = Flags {
        links: Links::Proxied,
        ..Flags::default()
    };
    let scene = Scene::start(20_000, RATE / 2, flags).await;
    let length = Duration::from_secs(if is_long() { 120 } else { 15 });
    let before = scene.engines("last_seq").await;
    let since = Instant::now();
    scene.fleet.link(0).set(Way::Silent);
    scene.fleet.link(1).set(Way::Refused);
    sleep(length).await;
    let after = scene.engines("last_seq").await;
    scene.fleet.link(0).set(Way::Open);
    scene.fleet.link(1).set(Way::Open);
    println!(
        "cut for {:?}; engine batches {before:?} to {after:?}",
        since.elapsed()
    );
    scene.is_right_after("shims cut from nats").await;
    scene.end().await;
}
