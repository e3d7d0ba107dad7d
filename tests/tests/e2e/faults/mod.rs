//! Real faults on real processes, under load, with a checker that asks all along.
//!
//! Every fault ends with the same question ([`Scene::is_right_after`]): does every indexer hold what the
//! engines hold, was nothing wrong said meanwhile, and how long did it take? `docs/RELIABILITY.md` has the
//! table, and the environment variables of the long forms.

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

use crate::fleet::{Company, Engines, Flags, Fleet, Mode, NAMESPACE, worker_name};
use watch::Watch;

/// With `FAULTS_LONG=1` faults last as long as an operator's might.
fn is_long() -> bool {
    std::env::var_os("FAULTS_LONG").is_some_and(|value| value != "0")
}

/// A fleet under load, and who checks it.
struct Scene {
    fleet: Fleet,
    watch: Watch,
    blocks_per_sec: u32,
}

impl Scene {
    /// Two workers, two indexers; the engines work by themselves at this rate.
    async fn start(blocks: u32, blocks_per_sec: u32, flags: Flags) -> Self {
        Self::start_with(0, blocks, blocks_per_sec, flags).await
    }

    /// The same with so many routers.
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
        let flags = Flags {
            company: Company::Another,
            ..flags
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

    /// New blocks a second, on every engine.
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

    /// The fault has ended: everything becomes right by itself while the load goes on, and stays so when it
    /// pauses; then index and engines are equal block by block.
    async fn is_right_after(&self, fault: &str) {
        let since = Instant::now();
        self.until_all_exact().await;
        println!("{fault}: exact {:?} after its end", since.elapsed());
        self.is_equal().await;
        println!("{fault}: {}", self.watch.counts());
    }

    /// Every indexer calls every source exact, at or behind the batch that is the engine's last now.
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

    /// Of every engine's first rank.
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

/// Worker, state, engine sequence of every source; none from an indexer that is not there.
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

/// A connection of the test's own.
async fn connect(fleet: &Fleet) -> NatsPlane {
    let url = fleet.parts().urls();
    let config = NatsConfig::new(url, Namespace::from(NAMESPACE), "test");
    NatsPlane::connect(config).await.unwrap()
}

/// Asks the server's own interface; none if it does not answer.
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
