//! Three nats-servers with three replicas of each stream.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;
use tokio::time::{Instant, sleep};
use warmroute_plane::{NatsPlane, Plane as _};
use warmroute_proto::subject::Subjects;

use super::{Scene, api, connect, is_long, positions};
use crate::fleet::{Access, Flags, Fleet, NAMESPACE, PATIENCE, cluster, signal, worker_name};
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
        restart(&scene.fleet, leader).await;
        let copied = async |_: &Fleet| lagging(&plane).await == Some(0);
        scene.fleet.until("three copies again", copied).await;
        println!("three copies {:?} after it was back", since.elapsed());
    }
    println!("led by {led:?}");
    assert_ne!(led[0], led[1], "another node led");
    scene.is_right_after("both back").await;
    scene.end().await;
}

/// The log's leader stands still with open sockets, as on a suspended machine. Prints how long each
/// source is without credit. Credit returns while the leader stands still.
#[tokio::test(flavor = "multi_thread")]
async fn leader_frozen() {
    let flags = Flags {
        access: Access::Cluster,
        init: &["--replicas", "3"],
        ..Flags::default()
    };
    let scene = Scene::start(3000, 2000, flags).await;
    let plane = connect(&scene.fleet).await;
    let rounds = if is_long() { 5 } else { 1 };
    for _ in 0..rounds {
        let leader = leader(&scene.fleet, &plane).await;
        let pid = with_node(&scene.fleet, leader, |node| node.pid()).await;
        signal(pid, "STOP");
        let mut dark = DarkTimes::default();
        let frozen = Instant::now();
        while frozen.elapsed() < FROZEN {
            scene.watch.check();
            dark.look(&scene.fleet).await;
            sleep(LOOK_EVERY).await;
        }
        dark.print();
        assert!(dark.is_over(), "sources have credit again: {dark:?}");
        signal(pid, "CONT");
        scene.is_right_after("leader frozen and continued").await;
        let copied = async |_: &Fleet| lagging(&plane).await == Some(0);
        scene.fleet.until("three copies again", copied).await;
    }
    scene.end().await;
}

/// Time for which a leader stands still.
const FROZEN: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Times without credit, by indexer and worker.
#[derive(Debug, Default)]
struct DarkTimes {
    present: BTreeMap<(usize, String), Instant>,
    longest: BTreeMap<(usize, String), Duration>,
}

impl DarkTimes {
    async fn look(&mut self, fleet: &Fleet) {
        for (number, index) in fleet.indexes().iter().enumerate() {
            let sources = positions(fleet, index).await.unwrap_or_default();
            for worker in (0..fleet.engines.len()).map(worker_name) {
                let is_credited = sources
                    .iter()
                    .any(|(of, state, _)| *of == worker && CREDITED.contains(&state.as_str()));
                let of = (number, worker);
                let since = match is_credited {
                    true => self.present.remove(&of),
                    false => Some(*self.present.entry(of.clone()).or_insert_with(Instant::now)),
                };
                if let Some(since) = since {
                    let longest = self.longest.entry(of).or_default();
                    *longest = since.elapsed().max(*longest);
                }
            }
        }
    }

    fn is_over(&self) -> bool {
        self.present.is_empty()
    }

    fn print(&self) {
        for ((indexer, worker), time) in &self.longest {
            let secs = time.as_secs_f64();
            println!("indexer {indexer}: {worker} without credit for {secs:.1} s at most");
        }
        println!("{} of all sources lost credit", self.longest.len());
    }
}

/// The log has two servers, the registry three. Without one of the log's, leases are renewed and
/// records are not acknowledged.
#[tokio::test(flavor = "multi_thread")]
async fn log_without_a_leader() {
    let flags = Flags {
        access: Access::Cluster,
        init: &["--replicas", "3"],
        ..Flags::default()
    };
    let scene = Scene::start(3000, 2000, flags).await;
    let plane = connect(&scene.fleet).await;
    let mut config = info(&plane).await.expect("the log")["config"].take();
    config["num_replicas"] = 2.into();
    let updated = api(&plane, &format!("STREAM.UPDATE.wr_{NAMESPACE}"), &config).await;
    assert!(updated.is_some_and(|answer| answer["error"].is_null()));
    let two = async |_: &Fleet| follower(&plane).await.is_some();
    scene.fleet.until("two copies of the log", two).await;
    let follower = follower(&plane).await.expect("a follower");
    // Otherwise the registry would be without a leader too, until it has elected one.
    let led_elsewhere = async |_: &Fleet| leads_elsewhere_than(&plane, follower).await;
    scene
        .fleet
        .until("another node leads the registry", led_elsewhere)
        .await;
    scene.is_right_after("two copies of the log").await;

    with_node(&scene.fleet, follower, |node| node.kill()).await;
    let since = Instant::now();
    let uncredited = async |fleet: &Fleet| {
        scene.watch.check();
        credited(fleet).await == 0
    };
    let named = "no source is credited";
    scene.fleet.until(named, uncredited).await;
    println!(
        "{named} {:?} after the log lost its leader",
        since.elapsed()
    );
    let subjects = Subjects::new(&NAMESPACE.into());
    let lease = async || {
        let key = subjects.shim_key(&worker_name(0).as_str().into());
        let lease = plane.get(key).await.expect("the registry answers");
        lease.expect("a lease").revision
    };
    let earlier = lease().await;
    let without_the_log = Instant::now();
    let renewed = async |fleet: &Fleet| {
        assert_eq!(credited(fleet).await, 0, "without the log");
        scene.watch.check();
        lease().await > earlier && without_the_log.elapsed() > Duration::from_secs(5)
    };
    scene
        .fleet
        .until_caught(
            PATIENCE,
            "a lease is renewed, so the registry has a leader",
            renewed,
        )
        .await;

    restart(&scene.fleet, follower).await;
    scene.is_right_after("the log has a leader").await;
    scene.end().await;
}

/// States that give credit.
const CREDITED: [&str; 2] = ["exact", "partial"];

/// Sources that an indexer credits.
async fn credited(fleet: &Fleet) -> usize {
    let mut credited = 0;
    for index in fleet.indexes() {
        let sources = positions(fleet, &index).await.unwrap_or_default();
        let states = sources.iter().map(|(_, state, _)| state.as_str());
        credited += states.filter(|state| CREDITED.contains(state)).count();
    }
    credited
}

/// The node with the log's one other copy, once there are two that are equal.
async fn follower(plane: &NatsPlane) -> Option<usize> {
    let info = info(plane).await?;
    let [copy] = info["cluster"]["replicas"].as_array()?.as_slice() else {
        return None;
    };
    let name = copy["name"].as_str().filter(|_| copy["current"] == true)?;
    (0..usize::from(cluster::NODES)).find(|&index| cluster::node(index) == name)
}

/// Whether the registry has a leader that is not this node, which gives the role up if it leads.
async fn leads_elsewhere_than(plane: &NatsPlane, node: usize) -> bool {
    let registry = format!("KV_wr_{NAMESPACE}");
    let info = api(plane, &format!("STREAM.INFO.{registry}"), &json!({})).await;
    let leader = info.unwrap_or_default()["cluster"]["leader"].take();
    if leader == cluster::node(node) {
        let step_down = format!("STREAM.LEADER.STEPDOWN.{registry}");
        api(plane, &step_down, &json!({})).await;
        return false;
    }
    leader.is_string()
}

async fn restart(fleet: &Fleet, node: usize) {
    match node.checked_sub(1) {
        None => fleet.parts().server.lock().await.restart().await,
        Some(peer) => fleet.parts().peers.lock().await[peer].restart().await,
    }
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

async fn with_node<R>(fleet: &Fleet, node: usize, act: impl FnOnce(&mut NatsServer) -> R) -> R {
    match node.checked_sub(1) {
        None => act(&mut *fleet.parts().server.lock().await),
        Some(peer) => act(&mut fleet.parts().peers.lock().await[peer]),
    }
}
