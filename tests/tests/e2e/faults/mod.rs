//! Real faults on real processes, under load, with a checker that queries continuously.
//!
//! After every fault [`Scene::is_right_after`] checks that every indexer holds what the engines
//! hold and that no answer was wrong, and measures the time. `docs/RELIABILITY.md` has the table
//! and the environment variables of the long forms.

mod cluster;
mod cut;
mod pauses;
mod server;
mod snapshots;
mod versions;
mod watch;

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;
use warmroute_plane::{NatsConfig, NatsPlane, Plane as _};
use warmroute_proto::Namespace;

use crate::fleet::{Engines, Flags, Fleet, Mode, NAMESPACE, worker_name};
use watch::Watch;

/// With `FAULTS_LONG=1` faults last as long as real ones may.
fn is_long() -> bool {
    std::env::var_os("FAULTS_LONG").is_some_and(|value| value != "0")
}

/// A fleet under load and its checker.
struct Scene {
    fleet: Fleet,
    watch: Watch,
    blocks_per_sec: u32,
}

impl Scene {
    /// Starts two workers and two indexers; the engines generate their load at this rate.
    async fn start(blocks: u32, blocks_per_sec: u32, flags: Flags) -> Self {
        Self::start_with(0, blocks, blocks_per_sec, flags).await
    }

    /// Like `start`, with `routers` routers.
    async fn start_with(routers: usize, blocks: u32, blocks_per_sec: u32, flags: Flags) -> Self {
        let engines = Engines {
            count: 2,
            ranks: 1,
            blocks,
            flags: &["--profile", "instant", "--history"],
        };
        let mode = Mode::Nats {
            indexers: 2,
            routers,
        };
        let fleet = Fleet::start(mode, engines, flags).await;
        let watch = Watch::start(&fleet, 1);
        let scene = Self {
            fleet,
            watch,
            blocks_per_sec,
        };
        scene.work(blocks_per_sec).await;
        scene.watch.until_exact(&scene.fleet, 20).await;
        scene
    }

    /// Sets the new blocks a second of every engine.
    async fn work(&self, blocks_per_sec: u32) {
        for engine in 0..self.fleet.engines.len() {
            let load = self
                .fleet
                .http
                .post(self.fleet.engine(engine, "/debug/load"));
            let body = json!({"blocks_per_sec": blocks_per_sec});
            assert!(load.json(&body).send().await.unwrap().status().is_success());
        }
    }

    /// The fault has ended: everything becomes exact while the load continues, and stays exact when
    /// it pauses. Then index and engines are equal block by block.
    async fn is_right_after(&self, fault: &str) {
        let since = Instant::now();
        self.until_all_exact().await;
        println!("{fault}: exact {:?} after its end", since.elapsed());
        self.is_equal().await;
        println!("{fault}: {}", self.watch.counts());
    }

    /// Waits until every indexer reports every source exact, at or behind the engine's current last
    /// batch.
    async fn until_all_exact(&self) {
        let wanted = self.engines("last_seq").await;
        self.fleet
            .until("everything is exact", async |fleet| {
                self.watch.check();
                self.are_at(fleet, &wanted).await
            })
            .await;
    }

    async fn is_equal(&self) {
        self.work(0).await;
        let idle = async |fleet: &Fleet| fleet.counted("active").await == 0;
        self.fleet.until("the engines are idle", idle).await;
        let wanted = self.engines("published_seq_that_changed").await;
        let caught_up = async |fleet: &Fleet| self.are_at(fleet, &wanted).await;
        self.fleet.until("the index has caught up", caught_up).await;
        self.fleet.assert_indexed_is_true().await;
        self.work(self.blocks_per_sec).await;
        self.watch.until_exact(&self.fleet, 10).await;
    }

    async fn are_at(&self, fleet: &Fleet, wanted: &[Option<u64>]) -> bool {
        for index in fleet.indexes() {
            let Some(positions) = positions(fleet, &index).await else {
                return false;
            };
            for (engine, wanted) in wanted.iter().enumerate() {
                match positions.iter().find(|row| row.0 == worker_name(engine)) {
                    Some((_, state, seq)) if state == "exact" && seq >= wanted => {}
                    Some(_) | None => return false,
                }
            }
        }
        true
    }

    /// The first rank of every engine.
    async fn engines(&self, what: &str) -> Vec<Option<u64>> {
        let mut all = Vec::new();
        for engine in 0..self.fleet.engines.len() {
            let told = self
                .fleet
                .get(self.fleet.engine(engine, "/debug/counters"))
                .await;
            all.push(told["ranks"][0][what].as_u64());
        }
        all
    }

    async fn end(self) {
        let counts = self.watch.end().await;
        println!("all in all {counts}");
    }
}

/// Worker, state, engine sequence of every source; `None` from an indexer that does not answer.
async fn positions(fleet: &Fleet, index: &str) -> Option<Vec<(String, String, Option<u64>)>> {
    let asked = fleet.http.get(format!("{index}/v1/digest"));
    let answer = asked.timeout(Duration::from_secs(2)).send().await.ok()?;
    let digest: Value = answer.json().await.ok()?;
    let row = |source: &Value| {
        let text = |key: &str| Some(source[key].as_str()?.to_owned());
        Some((
            text("worker")?,
            text("state")?,
            source["engine_seq"].as_u64(),
        ))
    };
    digest["sources"].as_array()?.iter().map(row).collect()
}

/// The test's own connection.
async fn connect(fleet: &Fleet) -> NatsPlane {
    let url = fleet.parts().urls();
    let config = NatsConfig::new(url, Namespace::from(NAMESPACE), "test");
    NatsPlane::connect(config).await.unwrap()
}

/// Queries the server's own API; `None` without an answer.
async fn api(plane: &NatsPlane, request: &str, body: &Value) -> Option<Value> {
    let subject = format!("$JS.API.{request}");
    let body = body.to_string().into_bytes();
    let answer = plane
        .request(subject, body.into(), Duration::from_secs(5))
        .await;
    serde_json::from_slice(&answer.ok()?).ok()
}

async fn metric(fleet: &Fleet, index: &str, name: &str) -> f64 {
    fleet.metric_at(format!("{index}/metrics"), name).await
}

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_dir(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).unwrap();
        }
    }
}
