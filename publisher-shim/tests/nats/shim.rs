//! One shim in the test's process, and what NATS does to it.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use warmroute_proto::TierState;
use warmroute_shim::source::GenerationReason;
use warmroute_shim::{Handle, NotReady};

use crate::world::{Shim, World, until};

fn count(shim: &Shim, reason: GenerationReason) -> u64 {
    let sources = shim.handle.sources();
    sources[0].counters.reasons.of(reason)
}

async fn until_credited(handle: &Handle) {
    let is_complete = || handle.sources()[0].states.gpu == TierState::Complete;
    until(is_complete, || format!("{:?}", handle.sources())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn row_8_a_server_killed_under_load_costs_nothing() {
    let mut world = World::start().await;
    let shim = world.shim("shim", world.config()).await;
    world.store(1);
    world.until_equal(&shim).await;
    for token in 2..3000 {
        world.store(token);
        if token % 3 == 0 {
            world.remove(token - 1);
        }
        if token % 1000 == 0 {
            world.server.kill();
            sleep(Duration::from_millis(300)).await;
            world.server.restart().await;
        } else if token % 10 == 0 {
            sleep(Duration::from_millis(2)).await;
        }
    }
    let healed = Instant::now();
    let fold = world.until_equal(&shim).await;
    println!(
        "equal {:?} after the last event; generations {:?}, {} duplicates",
        healed.elapsed(),
        fold.generations,
        fold.duplicates
    );
    assert_eq!(
        fold.generations.len(),
        1,
        "nothing was lost: no image is sent again"
    );
    until_credited(&shim.handle).await;
    shim.end().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn row_7_an_outbox_that_overflows_is_one_generation() {
    let mut world = World::start().await;
    let mut config = world.config();
    config.outbox_bytes_max = 20_000;
    let shim = world.shim("shim", config).await;
    world.store(1);
    world.until_equal(&shim).await;
    world.server.kill();
    let is_away = || shim.handle.readiness() == Err(NotReady::PlaneAway);
    until(is_away, || format!("{:?}", shim.handle.readiness())).await;
    for token in 2..2000 {
        world.store(token);
    }
    let is_full = || count(&shim, GenerationReason::OutboxFull) == 1;
    until(is_full, || format!("{:?}", shim.handle.sources())).await;
    let is_read = || shim.handle.sources()[0].prefixes == 1999;
    until(is_read, || format!("{:?}", shim.handle.sources())).await;
    assert!(shim.handle.sources()[0].waiting_bytes <= 30_000);
    world.server.restart().await;
    let fold = world.until_equal(&shim).await;
    assert_eq!(count(&shim, GenerationReason::OutboxFull), 1);
    assert_eq!(fold.generations.len(), 2, "{:?}", fold.generations);
    until_credited(&shim.handle).await;
    shim.end().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn row_16c_a_wiped_registry_is_built_again_and_generations_go_on() {
    let mut world = World::start().await;
    let shim = world.shim("shim", world.config()).await;
    world.store(1);
    let before = world.until_equal(&shim).await;
    let client = async_nats::connect(world.server.url()).await.unwrap();
    let jetstream = async_nats::jetstream::new(client);
    jetstream.delete_stream("KV_wr_t").await.unwrap();
    world.init().await;
    let is_written = || count(&shim, GenerationReason::RegistryLost) == 1;
    until(is_written, || format!("{:?}", shim.handle.sources())).await;
    world.store(2);
    let after = world.until_equal(&shim).await;
    assert!(after.generation > before.generation);
    shim.end().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn row_10_a_log_made_anew_gets_the_whole_image() {
    let mut world = World::start().await;
    let shim = world.shim("shim", world.config()).await;
    for token in 1..100 {
        world.store(token);
    }
    let before = world.until_equal(&shim).await;
    let client = async_nats::connect(world.server.url()).await.unwrap();
    let jetstream = async_nats::jetstream::new(client);
    jetstream.delete_stream("wr_t").await.unwrap();
    let is_unready = || matches!(shim.handle.readiness(), Err(NotReady::LogUnreadable(_)));
    until(is_unready, || format!("{:?}", shim.handle.readiness())).await;
    world.init().await;
    until(
        || shim.handle.is_ready(),
        || format!("{:?}", shim.handle.readiness()),
    )
    .await;
    let is_seen = || count(&shim, GenerationReason::LogLost) == 1;
    until(is_seen, || format!("{:?}", shim.handle.sources())).await;
    world.store(100);
    let after = world.until_equal(&shim).await;
    assert!(after.generation > before.generation);
    shim.end().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn row_9_a_log_rolled_back_to_an_older_copy_is_found() {
    let mut world = World::start().await;
    let shim = world.shim("shim", world.config()).await;
    for token in 1..50 {
        world.store(token);
    }
    world.until_equal(&shim).await;
    let copy = world.server.store().with_extension("copy");
    world.server.kill();
    copy_dir(&world.server.store(), &copy);
    world.server.restart().await;
    for token in 50..100 {
        world.store(token);
    }
    let before = world.until_equal(&shim).await;
    world.server.kill();
    std::fs::remove_dir_all(world.server.store()).unwrap();
    std::fs::rename(&copy, world.server.store()).unwrap();
    world.server.restart().await;
    let is_seen =
        || count(&shim, GenerationReason::LogLost) + count(&shim, GenerationReason::Overtaken) == 1;
    until(is_seen, || format!("{:?}", shim.handle.sources())).await;
    world.store(100);
    let after = world.until_equal(&shim).await;
    assert!(after.generation > before.generation);
    until_credited(&shim.handle).await;
    shim.end().await;
    world.end().await;
}

fn copy_dir(from: &std::path::Path, to: &std::path::Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_dir(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}
