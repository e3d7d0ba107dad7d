//! Shims that cannot reach NATS while their engines work.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{Scene, is_long};
use crate::fleet::{Flags, Fleet, Links, Way};

/// Blocks a second, summed over both engines.
const RATE: u32 = 20_000;

/// One link carries nothing, the other one is refused; the indexers stay connected. The first
/// outbox holds everything, the second one overflows and sends an image instead.
#[tokio::test(flavor = "multi_thread")]
async fn shims_cut_from_nats() {
    let flags = Flags {
        links: Links::Proxied,
        last_shim: &["--outbox-bytes", "1048576"],
        ..Flags::default()
    };
    let scene = Scene::start(20_000, RATE / 2, flags).await;
    let length = Duration::from_secs(if is_long() { 120 } else { 15 });
    let stored = async || {
        scene
            .engines("stored")
            .await
            .into_iter()
            .flatten()
            .sum::<u64>()
    };
    let before = stored().await;
    let since = Instant::now();
    scene.fleet.link(0).set(Way::Silent);
    scene.fleet.link(1).set(Way::Refused);
    sleep(length).await;
    // On a busy machine the engines store less.
    let is_full = async |fleet: &Fleet| overflows(fleet, 1).await >= 1.0;
    scene
        .fleet
        .until("the second outbox is full", is_full)
        .await;
    let full = [
        waiting(&scene.fleet, 0).await,
        waiting(&scene.fleet, 1).await,
    ];
    let (blocks, length) = (stored().await - before, since.elapsed());
    scene.fleet.link(0).set(Way::Open);
    scene.fleet.link(1).set(Way::Open);
    let rate = u128::from(blocks) * 1000 / length.as_millis();
    println!("cut for {length:?} at {rate} new blocks/s; bytes in the outboxes {full:?}");
    scene.is_right_after("shims cut from nats").await;
    assert_eq!(overflows(&scene.fleet, 0).await, 0.0, "it had room");
    scene.end().await;
}

async fn waiting(fleet: &Fleet, shim: usize) -> f64 {
    let page = format!("{}/metrics", fleet.parts().shims[shim].base());
    fleet.metric_at(page, "warmroute_shim_outbox_bytes").await
}

/// Number of images that replaced a backlog.
async fn overflows(fleet: &Fleet, shim: usize) -> f64 {
    let base = fleet.parts().shims[shim].base();
    let page = fleet
        .http
        .get(format!("{base}/metrics"))
        .send()
        .await
        .unwrap();
    let page = page.text().await.unwrap();
    let lines = page
        .lines()
        .filter(|line| line.contains("reason=\"outbox_full\""));
    lines
        .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
        .sum()
}
