//! Two loops that keep the fleet true: one follows the registry, one asks every engine for its health.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use prometheus::IntCounter;
use serde::Deserialize;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;
use warmroute_plane::{Plane, PlaneError, RegistryEvent};
use warmroute_proto::codec;
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::subject::Subjects;

use crate::fleet::{Address, Fleet};
use crate::health::Sight;
use crate::ready::Ready;

/// Until the plane is asked again.
const RETRY: Duration = Duration::from_millis(500);

/// An engine's event loop stalls under load without being dead.
const CHECK_DEADLINE: Duration = Duration::from_secs(5);

/// A stranger may send anything.
const MODELS_BYTES_MAX: usize = 1 << 20;

/// A start does not wait longer for workers that do not answer.
const SETTLE: Duration = Duration::from_secs(5);

/// Follows the registry until stopped. While the plane is away the last known workers stay.
pub(crate) async fn follow_registry(
    fleet: Arc<Fleet>,
    plane: Arc<dyn Plane>,
    subjects: Subjects,
    ready: Arc<Ready>,
    unread: IntCounter,
    stop: CancellationToken,
) {
    let follow = async {
        loop {
            match watch(&fleet, plane.as_ref(), &subjects, &ready, &unread).await {
                Ok(()) => tracing::warn!("the registry's watch ended, begun again"),
                Err(error) => tracing::warn!(%error, "the registry cannot be watched"),
            }
            sleep(RETRY).await;
        }
    };
    // An event is taken in by one synchronous call: being dropped at an await harms nothing.
    tokio::select! {
        () = stop.cancelled() => {}
        () = follow => {}
    }
}

async fn watch(
    fleet: &Fleet,
    plane: &dyn Plane,
    subjects: &Subjects,
    ready: &Ready,
    unread: &IntCounter,
) -> Result<(), PlaneError> {
    let mut events = plane.watch(subjects.worker_keys()).await?;
    while let Some(event) = events.next().await {
        match event {
            RegistryEvent::Put { key, entry } => match codec::decode::<WorkerEntry>(&entry.value) {
                Ok(entry) if subjects.worker_key(&entry.worker) == key => {
                    fleet.put(entry, Instant::now());
                }
                // A shim may write its own key only, and speaks for its own worker only.
                Ok(entry) => {
                    tracing::error!(key, worker = %entry.worker, "an entry under another's key");
                    unread.inc();
                }
                Err(error) => {
                    tracing::error!(key, %error, "a worker's entry is unreadable");
                    unread.inc();
                }
            },
            RegistryEvent::Gone { key } => {
                if let Some(worker) = subjects.key_worker(&key) {
                    fleet.gone(&worker);
                }
            }
            RegistryEvent::Current => ready.registry_read(),
        }
    }
    Ok(())
}

/// Asks every engine for its health, each at its own pace, until stopped.
pub(crate) async fn check_health(
    fleet: Arc<Fleet>,
    client: reqwest::Client,
    every: Duration,
    ready: Arc<Ready>,
    stop: CancellationToken,
) {
    let started = Instant::now();
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut asked: BTreeSet<Address> = BTreeSet::new();
    let mut answers = FuturesUnordered::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            // A worker is looked at when it comes, not a period later.
            () = fleet.changed_for_health() => {}
            _ = ticks.tick() => {}
            Some((address, sight)) = answers.next() => {
                asked.remove(&address);
                fleet.see(&address.worker, &address.url, sight, Instant::now());
                if fleet.is_settled() {
                    ready.workers_settled();
                }
                continue;
            }
        }
        if started.elapsed() >= SETTLE {
            ready.workers_settled();
        }
        for address in fleet.addresses() {
            if asked.insert(address.clone()) {
                answers.push(look(client.clone(), address));
            }
        }
    }
}

async fn look(client: reqwest::Client, address: Address) -> (Address, Sight) {
    let sight = match ask(&client, &address, "health").await {
        Ok(response) if response.status().is_success() => Sight::CheckPassed,
        Ok(_) => Sight::CheckFailed,
        Err(error) if error.is_connect() && !error.is_timeout() => Sight::ConnectFailed,
        Err(_) => Sight::CheckFailed,
    };
    if sight == Sight::CheckPassed && !address.must_list.is_empty() {
        // What cannot be read proves nothing: an engine may ask for a key.
        let listed = listed(&client, &address).await.unwrap_or_default();
        let lacks = |model: &String| !listed.contains(model);
        if !listed.is_empty() && address.must_list.iter().any(lacks) {
            return (address, Sight::Stranger);
        }
    }
    (address, sight)
}

async fn ask(
    client: &reqwest::Client,
    address: &Address,
    path: &str,
) -> Result<reqwest::Response, reqwest::Error> {
    let url = format!("{}/{path}", address.url);
    client.get(url).timeout(CHECK_DEADLINE).send().await
}

/// The models that whoever answers there lists.
async fn listed(client: &reqwest::Client, address: &Address) -> Option<BTreeSet<String>> {
    #[derive(Deserialize)]
    struct Page {
        data: Vec<Model>,
    }
    #[derive(Deserialize)]
    struct Model {
        id: String,
    }
    let mut response = ask(client, address, "v1/models").await.ok()?;
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.ok()? {
        body.extend_from_slice(&chunk);
        if body.len() > MODELS_BYTES_MAX {
            return None;
        }
    }
    let page: Page = serde_json::from_slice(&body).ok()?;
    Some(page.data.into_iter().map(|model| model.id).collect())
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::http::StatusCode;
    use axum::routing::get;
    use bytes::Bytes;
    use tokio_util::task::TaskTracker;
    use warmroute_plane::{MemoryPlane, MemoryPlaneConfig, PutIf};
    use warmroute_proto::{Generation, Namespace, RouterId, StreamIdentity, WorkerId};

    use super::*;
    use crate::route::{Core, CoreConfig, Knobs};
    use crate::shared_core::SharedCore;

    fn fleet() -> Arc<Fleet> {
        let core = Core::new(CoreConfig {
            knobs: Knobs::default(),
            router: RouterId([0; 16]),
            incarnation: Generation(1),
            seed: 1,
        });
        Fleet::new(SharedCore::new(core), None)
    }

    fn plane() -> Arc<dyn Plane> {
        Arc::new(MemoryPlane::new(MemoryPlaneConfig {
            identity: StreamIdentity {
                created_unix_ns: 1,
                nonce: 1,
            },
            log_bytes_max: 1 << 20,
            queue_max: 16,
        }))
    }

    fn entry(worker: &str, ranks: u32) -> WorkerEntry {
        WorkerEntry {
            worker: worker.into(),
            url: format!("http://{worker}:1"),
            models: vec!["m".to_owned()],
            loras: Vec::new(),
            ranks,
            block_size: None,
            blocks_per_rank: None,
            max_model_len: None,
            main_attention_only: true,
            version: "0".to_owned(),
        }
    }

    #[tokio::test]
    async fn impossible_and_foreign_entries_are_counted_and_change_nothing() {
        let (plane, fleet, tasks) = (plane(), fleet(), TaskTracker::new());
        let subjects = Subjects::new(&Namespace::from("t"));
        let unread = IntCounter::new("unread", "u").unwrap();
        let stop = CancellationToken::new();
        for (key, entry) in [
            ("good", entry("good", 2)),
            ("huge", entry("huge", u32::MAX)),
            ("thief", entry("good", 1)),
        ] {
            let key = subjects.worker_key(&WorkerId::from(key));
            let value = Bytes::from(codec::encode(&entry).unwrap());
            plane.put(key, value, PutIf::Always, None).await.unwrap();
        }
        let ready = Arc::new(Ready::default());
        let follow = follow_registry(
            Arc::clone(&fleet),
            plane,
            subjects,
            Arc::clone(&ready),
            unread.clone(),
            stop.clone(),
        );
        tasks.spawn(follow);
        while unread.get() < 2 || fleet.snapshot().is_empty() {
            tokio::task::yield_now().await;
        }
        stop.cancel();
        let known = fleet.snapshot().into_iter();
        let known: Vec<_> = known.map(|member| member.entry).collect();
        assert_eq!(known, [entry("good", 2)]);
    }

    /// What somebody answers, at an address that was given up too, and what is made of it.
    #[tokio::test]
    async fn a_worker_that_nobody_vouches_for_has_to_be_what_it_was() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let page = |models: &str| {
            let page = format!(r#"{{"object":"list","data":[{models}]}}"#);
            get(|| async { page })
        };
        let sick = (StatusCode::SERVICE_UNAVAILABLE, "the engine is dead");
        let router = Router::new()
            .route("/{engine}/health", get(|| async { "" }))
            .route("/sick/health", get(move || async move { sick }))
            .route("/sick/v1/models", page(r#"{"id":"m"}"#))
            .route("/same/v1/models", page(r#"{"id":"m"},{"id":"adapter"}"#))
            .route("/other/v1/models", page(r#"{"id":"n"}"#));
        let server = async move { axum::serve(listener, router).await.unwrap() };
        let tasks = TaskTracker::new();
        let server = tasks.spawn(server);
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        for (engine, models, expected) in [
            ("same", vec!["m"], Sight::CheckPassed),
            ("other", vec!["m"], Sight::Stranger),
            ("other", vec![], Sight::CheckPassed),
            ("silent", vec!["m"], Sight::CheckPassed),
            ("sick", vec![], Sight::CheckFailed),
            ("sick", vec!["m"], Sight::CheckFailed),
        ] {
            let address = Address {
                worker: "w".into(),
                url: format!("{url}/{engine}"),
                must_list: models.into_iter().map(str::to_owned).collect(),
            };
            let (_, sight) = look(client.clone(), address).await;
            assert_eq!(sight, expected, "{engine}");
        }
        server.abort();
    }
}
