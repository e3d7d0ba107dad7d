//! Engines with requests from elsewhere: the setting `engines.load`.

use std::fs;
use std::path::PathBuf;

use futures_util::future::join_all;
use reqwest::Response;
use serde_json::Value;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::fleet::{Engines, Flags, Fleet, Mode, Place};
use crate::plane::streams::body;

const ENGINES: Engines = Engines {
    count: 2,
    ranks: 1,
    blocks: 20_000,
    flags: &["--itl-ms", "20", "--max-num-seqs", "4"],
};

/// Streams to an engine past the routers: four run, the others wait.
const FOREIGN: usize = 16;

/// Streams through the routers.
const ROUTED: u64 = 6;

on_both_planes!(requests_avoid_engines_with_requests_from_elsewhere);

struct LoadedFleet {
    fleet: Fleet,
    settings: PathBuf,
    _place: Place,
}

impl LoadedFleet {
    async fn start(mode: Mode) -> Self {
        let place = Place::new();
        let settings = place.path("router.toml");
        let flags = Flags {
            router: place.router_flags(""),
            ..Flags::default()
        };
        Self {
            fleet: Fleet::start(mode, ENGINES, flags).await,
            settings,
            _place: place,
        }
    }

    fn set(&self, engines: &str) {
        fs::write(&self.settings, format!("[engines]\n{engines}\n")).unwrap();
        self.fleet
            .routers
            .iter()
            .for_each(|router| router.signal("HUP"));
    }

    /// Opens streams to an engine past the routers, until dropped.
    async fn flood(&self, engine: usize) -> Vec<Response> {
        let url = self.fleet.engine(engine, "/v1/completions");
        let sent = (0..FOREIGN).map(|number| {
            let body = body(
                &format!("Batch {number}: {}", "go on. ".repeat(2000)),
                30_000,
            );
            self.fleet.http.post(&url).json(&body).send()
        });
        let answers = join_all(sent).await.into_iter().map(Result::unwrap);
        answers.collect()
    }

    /// Waits until each router sees so many waiting requests from elsewhere at an engine.
    async fn until_seen(&self, engine: usize, waiting: Option<u64>) {
        let is_seen = async |fleet: &Fleet| {
            for router in 0..fleet.routers.len() {
                let page = fleet.get(fleet.admin(router, "/workers")).await;
                let rank = &page["workers"][engine]["engine_load"]["0"];
                if rank["foreign_waiting"].as_u64() != waiting {
                    return false;
                }
            }
            true
        };
        self.fleet.until("the engine's load is seen", is_seen).await;
    }

    /// Opens streams through the routers, until dropped.
    fn open(&self) -> Vec<AbortOnDropHandle<()>> {
        let streams = (0..ROUTED).map(|number| {
            let url = self.fleet.url("/v1/completions");
            let body = body(&format!("Chat {number}, not to end."), 3000);
            let sent = self.fleet.http.post(url).json(&body).send();
            let read = async move { drop(sent.await.unwrap().bytes().await) };
            AbortOnDropHandle::new(TaskTracker::new().spawn(read))
        });
        streams.collect()
    }

    /// Active requests at each engine, in each router's view, once all have their slots.
    async fn spread(&self) -> [u64; 2] {
        let is_open = async |fleet: &Fleet| {
            for router in 0..fleet.routers.len() {
                if fleet.load(router).await.0 != ROUTED {
                    return false;
                }
            }
            true
        };
        self.fleet.until("all streams have slots", is_open).await;
        let slots = self.fleet.get(self.fleet.admin(0, "/v1/slots")).await;
        let active = |engine: usize| {
            let name = format!("worker-{engine}");
            let sources = slots["sources"].as_array().unwrap().iter();
            let mut rows = sources.filter(|row| row["worker"] == *name);
            rows.next()
                .map_or(0, |row| row["active_requests"].as_u64().unwrap())
        };
        [active(0), active(1)]
    }

    async fn queued(&self) -> f64 {
        self.fleet
            .metric("warmroute_router_queue_requests{model=\"mock\"}")
            .await
    }
}

async fn requests_avoid_engines_with_requests_from_elsewhere(mode: Mode) {
    let loaded = LoadedFleet::start(mode).await;
    let fleet = &loaded.fleet;
    let waiting = Some(FOREIGN as u64 - 4);
    let first = loaded.flood(0).await;

    // By the cost alone.
    loaded.set("load = true\nmax_foreign_waiting = 1000");
    loaded.until_seen(0, waiting).await;
    let streams = loaded.open();
    assert_eq!(loaded.spread().await, [0, ROUTED]);
    // The routers' own requests, of each router, are not from elsewhere.
    loaded.until_seen(1, Some(0)).await;
    let page: Value = fleet.get(fleet.admin(0, "/workers")).await;
    assert_eq!(page["workers"][1]["load_error"], Value::Null);
    drop(streams);
    fleet.until_idle().await;

    loaded.set("load = false");
    loaded.until_seen(0, None).await;
    let streams = loaded.open();
    let [flooded, other] = loaded.spread().await;
    assert!(flooded > 0 && other > 0, "{flooded}, {other}");
    drop(streams);
    fleet.until_idle().await;

    // Both engines are past the bound: the queue engages without --max-active-requests.
    loaded.set("load = true");
    let second = loaded.flood(1).await;
    loaded.until_seen(0, waiting).await;
    loaded.until_seen(1, waiting).await;
    let _streams = loaded.open();
    let all_wait = async |_: &Fleet| loaded.queued().await == ROUTED as f64;
    fleet.until("all requests wait", all_wait).await;
    drop(second);
    let [flooded, other] = loaded.spread().await;
    assert_eq!((flooded, other), (0, ROUTED));
    assert_eq!(loaded.queued().await, 0.0);
    drop(first);
}
