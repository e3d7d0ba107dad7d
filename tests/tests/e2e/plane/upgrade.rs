//! Parts of two versions on one plane: an upgrade and its rollback, one part at a time, in every
//! order that gives another mixture. `tests/mixed-versions.sh` builds the other version.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;

use super::drain;
use super::front::{Front, Kind};
use super::streams::{Shape, Tally};
use super::views::{agree, held, id};
use crate::fleet::traffic::{Served, serve_at};
use crate::fleet::version::Version;
use crate::fleet::{BLOCK, Engines, Flags, Fleet, Mode};

const ENGINES: Engines = Engines {
    count: 2,
    ranks: 2,
    blocks: 4096,
    flags: &["--itl-ms", "15", "--prefill-tokens-per-sec", "200000"],
};
const REPLICAS: usize = 2;
const MODE: Mode = Mode::Nats {
    indexers: REPLICAS,
    routers: REPLICAS,
};
const RATE: u32 = 15;
const SHAPE: Shape = Shape {
    rules: 20,
    tokens: 30,
};
/// Answers of the index that may be late, one after the other, on a busy machine.
const LATE_MAX: usize = 50;

#[derive(Clone, Copy, Debug)]
enum Part {
    Indexers,
    Routers,
    Shims,
}

/// All parts are of the other version, and so is the plane. They become this version, return, and
/// become it again in another order: all eight mixtures of three kinds of parts.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "tests/mixed-versions.sh builds the other version"]
async fn a_fleet_of_the_other_version_is_upgraded_and_rolled_back() {
    use Part::{Indexers, Routers, Shims};
    let upgrade = Upgrade::start(Version::Other).await;
    upgrade
        .step(&[Indexers, Routers, Shims], Version::This)
        .await;
    upgrade.fleet.init();
    upgrade
        .step(&[Indexers, Shims, Routers], Version::Other)
        .await;
    upgrade
        .step(&[Shims, Indexers, Routers], Version::This)
        .await;
    upgrade.end();
}

/// Streams and buckets are of this version.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "tests/mixed-versions.sh builds the other version"]
async fn a_fleet_of_this_version_is_rolled_back_and_upgraded() {
    use Part::{Indexers, Routers, Shims};
    let upgrade = Upgrade::start(Version::This).await;
    upgrade
        .step(&[Shims, Routers, Indexers], Version::Other)
        .await;
    upgrade
        .step(&[Indexers, Routers, Shims], Version::This)
        .await;
    upgrade.end();
}

struct Upgrade {
    fleet: Fleet,
    front: Front,
}

impl Upgrade {
    async fn start(version: Version) -> Self {
        let flags = Flags {
            shim: &["--state-dir", "PLACE/state"],
            indexer: &["--snapshot-every-secs", "1"],
            version,
            ..Flags::default()
        };
        let fleet = Fleet::start(MODE, ENGINES, flags).await;
        let front = Front::start(Kind::HaProxy, &fleet).await;
        let upgrade = Self { fleet, front };
        upgrade
            .is_right(&format!("all parts of version {version:?}"))
            .await;
        upgrade
    }

    /// Replaces the parts in this order, each replica under load, and checks every mixture.
    async fn step(&self, parts: &[Part], version: Version) {
        for &part in parts {
            for replica in 0..REPLICAS {
                self.replace_under_load(part, replica, version).await;
                let mixture = format!("{part:?}[{replica}] of version {version:?}");
                self.is_right(&mixture).await;
            }
        }
    }

    async fn replace_under_load(&self, part: Part, replica: usize, version: Version) {
        let (fleet, tally, is_over) = (&self.fleet, Tally::default(), AtomicBool::new(false));
        let replace = async {
            let begun = async |_: &Fleet| tally.ended_and_sent().0 >= u64::from(RATE);
            fleet.until("streams end", begun).await;
            let parts = fleet.parts();
            match part {
                Part::Indexers => parts.indexers[replica].replace(version.indexer()).await,
                Part::Routers => fleet.routers[replica].replace(version.router()).await,
                Part::Shims => parts.shims[replica].replace(version.shim()).await,
            }
            fleet
                .until("all parts are ready", async |fleet| fleet.all_ready().await)
                .await;
            let (ended, _) = tally.ended_and_sent();
            let served = async |_: &Fleet| tally.ended_and_sent().0 > ended + u64::from(RATE);
            fleet.until("streams end with it", served).await;
            is_over.store(true, Ordering::Relaxed);
        };
        let base = self.front.base();
        let load = tally.at_rate((&fleet.http, &base), RATE, SHAPE, || {
            is_over.load(Ordering::Relaxed)
        });
        tokio::join!(replace, load);
        let (sent, failed) = (tally.sent.into_inner(), tally.failed.into_inner());
        println!(
            "{part:?}[{replica}] replaced by version {version:?}: {sent} streams, {failed} failed"
        );
        assert_eq!(failed, 0, "{part:?}[{replica}] became {version:?}");
    }

    /// Load, credit, drains and messages are right at every router.
    async fn is_right(&self, mixture: &str) {
        let fleet = &self.fleet;
        fleet.until_idle().await;
        fleet.until_indexed().await;
        fleet
            .until("all routers agree", async |fleet| agree(fleet).await)
            .await;
        fleet.assert_indexed_is_true().await;
        for router in 0..REPLICAS {
            self.credits_are_exact(router, mixture).await;
            self.load_is_seen(router).await;
        }
        drain::passes_between_routers(fleet).await;
        self.nothing_is_unreadable(mixture).await;
    }

    /// One of more requests than sources gets credit, and each credit is what the engine reports.
    async fn credits_are_exact(&self, router: usize, mixture: &str) {
        let rules = "Rule: be exact, or say that you are not. ".repeat(30);
        let prompt = format!("{mixture}, router {router}. {rules}");
        let body = json!({"model": "mock", "prompt": prompt, "max_tokens": 2});
        let mut credited_tokens = 0;
        for _ in 0..=ENGINES.count * usize::from(ENGINES.ranks) {
            let served = self.answered(router, &body).await;
            assert_eq!(served.state, "exact", "{mixture}");
            let credited = served.overlap_blocks * BLOCK;
            assert_eq!(credited, served.cached_tokens, "{mixture}, router {router}");
            credited_tokens += credited;
            self.fleet.until_indexed().await;
        }
        assert!(credited_tokens > 0, "no credit: {mixture}, router {router}");
    }

    /// Sends a request until an index answered in time.
    async fn answered(&self, router: usize, body: &serde_json::Value) -> Served {
        for _ in 0..LATE_MAX {
            let served = serve_at(&self.fleet, router, "/v1/completions", body).await;
            if !served.is_without_answer() {
                return served;
            }
            self.fleet.until_indexed().await;
        }
        panic!("no index answers router {router}");
    }

    /// The other router counts an open stream, and its end.
    async fn load_is_seen(&self, router: usize) {
        let fleet = &self.fleet;
        let (name, other) = (id(fleet, router).await, (router + 1) % REPLICAS);
        let body = super::streams::body("Count, and do not stop.", 400);
        let url = format!("{}/v1/completions", fleet.routers[router].base());
        let stream = fleet.http.post(url).json(&body).send().await.unwrap();
        let seen = async |fleet: &Fleet| held(fleet, other, &name).await == 1;
        fleet
            .until("the other router counts the stream", seen)
            .await;
        drop(stream);
        fleet.until_idle().await;
    }

    /// No part has seen a message that it cannot read, and none has crashed.
    async fn nothing_is_unreadable(&self, mixture: &str) {
        let mut counts = BTreeMap::new();
        let parts = self.fleet.parts();
        let pages = [
            (
                parts
                    .indexers
                    .iter()
                    .map(|part| part.base())
                    .collect::<Vec<_>>(),
                &[
                    "warmroute_indexer_records_total{verdict=\"undecodable\"}",
                    "warmroute_indexer_heartbeats_total{verdict=\"undecodable\"}",
                    "warmroute_indexer_queries_total{outcome=\"malformed\"}",
                    "warmroute_indexer_bad_registry_entries_total",
                ][..],
            ),
            (
                (0..REPLICAS)
                    .map(|router| self.fleet.admin(router, ""))
                    .collect(),
                &[
                    "warmroute_router_sync_verdicts_total{verdict=\"malformed\"}",
                    "warmroute_router_slot_changes_ignored_total",
                    "warmroute_router_bad_registry_entries_total",
                ][..],
            ),
            (
                parts.shims.iter().map(|part| part.base()).collect(),
                &["warmroute_shim_messages_unreadable_total"][..],
            ),
        ];
        for (bases, names) in pages {
            for base in bases {
                for name in names {
                    let count = self.fleet.metric_at(format!("{base}/metrics"), name).await;
                    if count > 0.0 {
                        counts.insert((base.clone(), *name), count);
                    }
                }
            }
        }
        assert!(counts.is_empty(), "{mixture}: {counts:?}");
    }

    fn end(&self) {
        let parts = self.fleet.parts();
        let all = parts
            .shims
            .iter()
            .chain(&parts.indexers)
            .chain(&self.fleet.routers);
        for part in all {
            assert!(part.is_running());
            let panics = part.logged().matches("panicked").count();
            assert_eq!(panics, 0, "{}", part.logged());
        }
    }
}
