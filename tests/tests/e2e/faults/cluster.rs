//! Three nats-servers with three replicas of each stream.

use serde_json::json;
use tokio::time::Instant;
use warmroute_plane::NatsPlane;

use super::{Scene, api, connect};
use crate::fleet::{Access, Flags, Fleet, NAMESPACE, cluster};
use crate::nats_server::NatsServer;

/// The log's leader is killed under load and restarted; then the next leader. An indexer starts
/// while there is no leader.
#[tokio::test(flavor = "multi_thread")]
async fn leader_killed() {
    let flags = Flags {
        access: Access::Cluster,
        init: &["--replicas", "3"],
        ..Flags::default()
    };
    let scene = Scene::start(3000, 2000, flags).await;
    let plane = connect(&scene.fleet).await;
    let mut led = Vec::new();
    for _ in 0..2 {
        let leader = leader(&scene.fleet, &plane).await;
        led.push(leader);
        with_node(&scene.fleet, leader, |node| node.kill()).await;
        // A process that joins during an election waits for its end.
        scene.fleet.parts().indexers[1].restart().await;
        scene
            .is_right_after("leader killed, indexer restarted")
            .await;
        let since = Instant::now();
        let mut server = scene.fleet.parts().server.lock().await;
        let mut peers = scene.fleet.parts().peers.lock().await;
        match leader.checked_sub(1) {
            None => server.restart().await,
            Some(peer) => peers[peer].restart().await,
        }
        drop((server, peers));
        let copied = async |_: &Fleet| lagging(&plane).await == Some(0);
        scene.fleet.until("three copies again", copied).await;
        println!("three copies {:?} after it was back", since.elapsed());
    }
    println!("led by {led:?}");
    assert_ne!(led[0], led[1], "another node led");
    scene.is_right_after("both back").await;
    scene.end().await;
}

async fn leader(fleet: &Fleet, plane: &NatsPlane) -> usize {
    let found = std::cell::Cell::new(None);
    let look = async |_: &Fleet| {
        let info = info(plane).await.unwrap_or_default();
        let leader = info["cluster"]["leader"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let nodes = 0..usize::from(cluster::NODES);
        found.set(
            nodes
                .into_iter()
                .find(|&index| cluster::node(index) == leader),
        );
        found.get().is_some()
    };
    fleet.until("the log has a leader", look).await;
    found.get().unwrap()
}

/// Replicas that are offline or behind.
async fn lagging(plane: &NatsPlane) -> Option<usize> {
    let info = info(plane).await?;
    let copies = info["cluster"]["replicas"].as_array()?;
    Some(copies.iter().filter(|copy| copy["current"] != true).count())
}

async fn info(plane: &NatsPlane) -> Option<serde_json::Value> {
    api(plane, &format!("STREAM.INFO.wr_{NAMESPACE}"), &json!({})).await
}

async fn with_node(fleet: &Fleet, node: usize, act: impl FnOnce(&mut NatsServer)) {
    match node.checked_sub(1) {
        None => act(&mut *fleet.parts().server.lock().await),
        Some(peer) => act(&mut fleet.parts().peers.lock().await[peer]),
    }
}
