//! `warmroute-indexer doctor` on a real fleet: healthy, with every fault, with a
//! replica that reports wrong content, and without its server.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::time::Instant;
use warmroute_indexer::fold::{HeartbeatVerdict, RecordVerdict};
use warmroute_plane::{NatsConfig, NatsPlane, Plane, PutIf, RegistryEvent, ServiceRequest};
use warmroute_proto::registry::IndexerEntry;
use warmroute_proto::snapshot::SnapshotPointer;
use warmroute_proto::subject::Subjects;
use warmroute_proto::view::ViewPage;
use warmroute_proto::{Namespace, codec};
use warmroute_shim::source::GenerationReason;

use super::equality::{states, until_equal};
use super::load::{sequential, under_load};
use crate::fleet::{Engines, Flags, Fleet, Mode, text};

const DEADLINE: Duration = Duration::from_secs(5);

/// Findings by code: what each is about.
pub(crate) type Found = BTreeMap<String, Vec<String>>;

/// A healthy fleet has no findings. A killed indexer, a stopped shim, a corrupt snapshot, a shrunk
/// log and a partial source are found, each by its code and with advice. After the repair the
/// report is clean. Without a server the command fails soon.
#[tokio::test(flavor = "multi_thread")]
async fn every_illness_is_found_and_nothing_else() {
    let engines = Engines {
        count: 3,
        ranks: 1,
        blocks: 600,
        flags: &["--profile", "instant", "--buffer-steps", "20"],
    };
    let mode = Mode::Nats {
        indexers: 2,
        routers: 1,
    };
    let flags = Flags {
        indexer: &["--snapshot-every-secs", "1"],
        ..Flags::default()
    };
    let fleet = Fleet::start(mode, engines, flags).await;
    sequential(&fleet, 40, 90).await;
    until_equal(&fleet).await;
    let plane = connect(&fleet).await;
    until_snapshot(&plane).await;
    let (code, found) = look(&fleet).await;
    assert_eq!((code, found), (Some(0), Found::new()), "a healthy fleet");

    lose_history(&fleet).await;
    let stopped = &fleet.parts().shims[0];
    stopped.signal("STOP");
    fleet.parts().indexers[1].kill();
    let name = corrupt_newest(&plane).await;
    let bound = resize_log(&plane, 4096).await;
    let (code, found) = look(&fleet).await;
    assert_eq!(code, Some(1));
    for (code, about) in [
        ("indexers_missing", "1 of 2 answer"),
        ("shim_silent", "worker-0/0: nothing within"),
        ("snapshot_unreadable", name.as_str()),
        ("stream_resized", "wr_prod: max_bytes is 4096"),
        ("source_partial", "worker-2/0: "),
    ] {
        let about_all = found.get(code);
        let is_there = about_all.is_some_and(|all| all.iter().any(|one| one.contains(about)));
        assert!(is_there, "{code} about {about} in {found:?}");
    }
    assert!(!found.contains_key("indexers_differ"), "{found:?}");
    assert!(!found.contains_key("mirror_differs"), "{found:?}");

    stopped.signal("CONT");
    resize_log(&plane, bound).await;
    fleet.parts().indexers[1].restart().await;
    heal_partial(&fleet).await;
    until_snapshot(&plane).await;
    let mended = async |fleet: &Fleet| look(fleet).await == (Some(0), Found::new());
    fleet.until("the doctor has nothing to say", mended).await;

    fleet.parts().server.lock().await.kill();
    let begun = Instant::now();
    let command = ["doctor", "--wait-secs", "1"];
    // Frees the server's handle: the command takes its address from it.
    let (code, said) = fleet.command("doctor", &command).await;
    println!("without a server: {code:?} after {:?}", begun.elapsed());
    assert_eq!(code, Some(2));
    assert!(said.contains("nats_unreachable"), "{said}");
}

/// A crashed node is named while its worker is away, and a deleted log is a finding, not the end of the
/// report.
#[tokio::test(flavor = "multi_thread")]
async fn a_crashed_node_and_a_deleted_log_are_found() {
    let engines = Engines {
        count: 2,
        ranks: 1,
        blocks: 600,
        flags: &["--profile", "instant"],
    };
    let mode = Mode::Nats {
        indexers: 2,
        routers: 1,
    };
    let fleet = Fleet::start(mode, engines, Flags::default()).await;
    sequential(&fleet, 42, 20).await;
    fleet.engines[1].process.kill();
    fleet.parts().shims[1].kill();
    let is_lost = async |fleet: &Fleet| {
        let (_, found) = look(fleet).await;
        let lost = found.get("worker_lost");
        lost.is_some_and(|lost| lost[0].starts_with("worker-1: not registered for "))
    };
    fleet
        .until("doctor names the crashed worker", is_lost)
        .await;

    let plane = connect(&fleet).await;
    let delete = "$JS.API.STREAM.DELETE.wr_prod".to_owned();
    plane.request(delete, Bytes::new(), DEADLINE).await.unwrap();
    let (code, found) = look(&fleet).await;
    assert_eq!(code, Some(1));
    assert!(found["stream_missing"][0].contains("wr_prod"), "{found:?}");
}

/// Exit code and findings.
pub(crate) async fn look(fleet: &Fleet) -> (Option<i32>, Found) {
    let (report, code) = run(fleet, &["--expect-indexers", "2"]).await;
    (code, findings(&report))
}

/// Report and exit code.
async fn run(fleet: &Fleet, flags: &[&str]) -> (Value, Option<i32>) {
    let command = [&["doctor", "--json"], flags].concat();
    let (code, said) = fleet.command("doctor", &command).await;
    let report: Value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}"));
    println!("{report:#}");
    assert_eq!(report["needs_somebody"], json!(code == Some(1)));
    (report, code)
}

fn findings(report: &Value) -> Found {
    let mut found = Found::new();
    for finding in report["findings"].as_array().expect("findings") {
        for part in ["cause", "effect", "run"] {
            assert!(!text(&finding[part]).is_empty());
        }
        let about = finding["about"].as_array().expect("what it is about");
        let about = about.iter().map(text).collect();
        found.insert(text(&finding["code"]), about);
    }
    found
}

async fn connect(fleet: &Fleet) -> NatsPlane {
    let url = fleet.parts().server.lock().await.url();
    let config = NatsConfig::new(url, Namespace::from("prod"), "test");
    NatsPlane::connect(config).await.unwrap()
}

async fn pointer(plane: &NatsPlane) -> Option<SnapshotPointer> {
    let key = Subjects::new(&Namespace::from("prod")).snapshot_pointer_key();
    let entry = plane.get(key).await.unwrap()?;
    Some(codec::decode(&entry.value).unwrap())
}

/// The newest snapshot covers everything: without events no new one is due.
async fn until_snapshot(plane: &NatsPlane) {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let last = plane.log_status().await.unwrap().last;
        let newest = pointer(plane).await.map(|pointer| pointer.newest);
        if newest.is_some_and(|newest| newest.at.position == last) {
            return;
        }
        assert!(Instant::now() < end, "no snapshot of all");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The third shim restarts without the batches that its engine's replay buffer has dropped.
async fn lose_history(fleet: &Fleet) {
    for number in 0.. {
        let truth = fleet.get(fleet.engine(2, "/debug/blocks")).await;
        // Twice the buffer's size.
        if truth["ranks"][0]["last_seq"].as_u64() >= Some(40) {
            break;
        }
        ask_third(fleet, &format!("{number} ").repeat(100)).await;
    }
    let shim = &fleet.parts().shims[2];
    // A clean stop, so that its lease is free.
    shim.signal("TERM");
    assert!(shim.ended().await.success());
    shim.restart().await;
    until_state(fleet, "partial").await;
}

/// Resetting the engine's cache removes what is missing.
async fn heal_partial(fleet: &Fleet) {
    let reset = fleet.engine(2, "/reset_prefix_cache");
    fleet.http.post(reset).send().await.unwrap();
    // The engine publishes the reset with its next batch.
    ask_third(fleet, &"x ".repeat(100)).await;
    until_state(fleet, "exact").await;
}

/// Sends requests directly to the worker.
async fn ask_third(fleet: &Fleet, prompt: &str) {
    let body = json!({"model": "mock", "prompt": prompt, "max_tokens": 1});
    let url = fleet.engine(2, "/v1/completions");
    let answer = fleet.http.post(url).json(&body).send().await.unwrap();
    assert!(answer.status().is_success(), "{}", answer.status());
}

async fn until_state(fleet: &Fleet, word: &str) {
    let index = fleet.indexes().remove(0);
    let is_so = async |fleet: &Fleet| {
        let states = states(fleet, &index).await;
        states.get("worker-2/0").is_some_and(|state| state == word)
    };
    fleet.until(word, is_so).await;
}

/// Changes one byte of the newest snapshot. Returns its name.
async fn corrupt_newest(plane: &NatsPlane) -> String {
    until_snapshot(plane).await;
    let name = pointer(plane).await.unwrap().newest.name;
    let blob = plane.get_snapshot(name.clone()).await.unwrap().unwrap();
    let mut blob = BytesMut::from(blob);
    let middle = blob.len() / 2;
    blob[middle] ^= 1;
    plane.delete_snapshot(name.clone()).await.unwrap();
    let put = plane.put_snapshot(name.clone(), blob.freeze());
    put.await.unwrap();
    name
}

/// Changes the log's bound, as an operator's tools do. Returns the old one.
async fn resize_log(plane: &NatsPlane, max_bytes: i64) -> i64 {
    let ask = async |api: &str, body: Bytes| -> Value {
        let subject = format!("$JS.API.STREAM.{api}.wr_prod");
        let answer = plane.request(subject, body, DEADLINE).await.unwrap();
        serde_json::from_slice(&answer).unwrap()
    };
    let mut config = ask("INFO", Bytes::new()).await["config"].take();
    let before = config["max_bytes"].as_i64().unwrap();
    config["max_bytes"] = json!(max_bytes);
    let answer = ask("UPDATE", config.to_string().into()).await;
    assert_eq!(answer["config"]["max_bytes"], json!(max_bytes), "{answer}");
    before
}

/// Two indexers, their shims and engines agree, also under load, down to the engines' cached
/// tokens. `doctor` names the source for which a replica reports wrong content. The parts' pages
/// are complete.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_with_wrong_content_is_found() {
    let engines = Engines {
        count: 2,
        ranks: 2,
        blocks: 600,
        flags: &["--profile", "instant"],
    };
    let mode = Mode::Nats {
        indexers: 2,
        routers: 1,
    };
    let flags = Flags {
        indexer: &["--snapshot-every-secs", "1"],
        ..Flags::default()
    };
    let fleet = Fleet::start(mode, engines, flags).await;
    sequential(&fleet, 41, 40).await;
    until_equal(&fleet).await;
    assert_pages(&fleet).await;
    let (report, code) = run(&fleet, &["--probe"]).await;
    assert_eq!(
        (code, findings(&report)),
        (Some(0), Found::new()),
        "healthy"
    );
    let rows = report["rest"].as_array().expect("rows");
    let row = |what: &str| rows.iter().find(|row| row["what"] == what).expect("a row");
    assert_eq!(
        row("probes")["is"],
        "8 of exact sources",
        "by each of two indexers"
    );
    let agreement = text(&row("agreement")["is"]);
    assert!(agreement.ends_with("of 4 of 4 sources"), "{agreement}");
    let (looked, served) = under_load(&fleet, 2, look(&fleet)).await;
    println!("looked beside {served} requests");
    assert_eq!(looked, (Some(0), Found::new()), "a healthy fleet at work");

    fleet.until_idle().await;
    until_equal(&fleet).await;
    let plane: Arc<dyn Plane> = Arc::new(connect(&fleet).await);
    let subjects = Subjects::new(&Namespace::from("prod"));
    let lies = lie(&plane, &subjects).await;
    let (code, found) = tokio::select! {
        () = lies => unreachable!("it lies for ever"),
        looked = look(&fleet) => looked,
    };
    assert_eq!(code, Some(1));
    for code in ["indexers_differ", "mirror_differs"] {
        let about = found
            .get(code)
            .unwrap_or_else(|| panic!("{code} in {found:?}"));
        let is_named = |one: &String| one.starts_with("worker-1/0 at ") && one.contains("liar");
        assert!(about.iter().all(is_named), "{about:?}");
    }
}

/// Registers a replica that repeats a real one's answers, except for one source.
async fn lie(plane: &Arc<dyn Plane>, subjects: &Subjects) -> impl Future<Output = ()> + use<> {
    let real = {
        let mut replicas = plane.watch(subjects.indexer_keys()).await.unwrap();
        let Some(RegistryEvent::Put { entry, .. }) = replicas.next().await else {
            panic!("no replica is registered");
        };
        codec::decode::<IndexerEntry>(&entry.value).unwrap()
    };
    let mut requests = plane.serve(subjects.query_at("liar")).await.unwrap();
    let entry = IndexerEntry {
        id: "liar".to_owned(),
        ..real.clone()
    };
    let value = codec::encode(&entry).unwrap();
    let key = subjects.indexer_key("liar");
    let put = plane.put(key, value.into(), PutIf::Absent, None);
    put.await.unwrap();
    let (plane, asked) = (Arc::clone(plane), subjects.query_at(&real.id));
    async move {
        while let Some(ServiceRequest { payload, reply }) = requests.next().await {
            let answer = plane.request(asked.clone(), payload, DEADLINE).await;
            let answer = answer.unwrap();
            // Routers query it as well.
            let Ok(mut view) = codec::decode::<ViewPage>(&answer) else {
                reply.send(answer);
                continue;
            };
            for source in &mut view.sources {
                let wrong =
                    source.source.worker.as_str() == "worker-1" && source.source.dp_rank.0 == 0;
                if let Some(digest) = source.digest.as_mut().filter(|_| wrong) {
                    digest.sum ^= 1;
                }
            }
            reply.send(codec::encode(&view).unwrap().into());
        }
    }
}

/// Content that every process's pages must have, whatever happened before.
const INDEXER_SERIES: [&str; 22] = [
    "sources{state=\"exact\"}",
    "source_state{worker=\"worker-0\",dp_rank=\"1\",state=\"exact\"}",
    "source_state_age_seconds{worker=\"worker-0\",dp_rank=\"1\"}",
    "source_generation{worker=\"worker-0\",dp_rank=\"1\"}",
    "source_generations_lately{worker=\"worker-0\",dp_rank=\"1\"}",
    "source_number{worker=\"worker-0\",dp_rank=\"1\"}",
    "source_engine_seq{worker=\"worker-0\",dp_rank=\"1\"}",
    "source_blocks{worker=\"worker-0\",dp_rank=\"1\"}",
    "source_record_age_seconds{worker=\"worker-0\",dp_rank=\"1\"}",
    "source_proof_age_seconds{worker=\"worker-0\",dp_rank=\"1\"}",
    "source_heartbeat_way_seconds{worker=\"worker-0\",dp_rank=\"1\"}",
    "sources_not_shown",
    "resyncs_total{reason=\"gap\"}",
    "log_lag_messages",
    "log_lag_seconds",
    "event_to_visible_seconds_count",
    "event_to_visible_seconds_bucket{le=\"+Inf\"}",
    "snapshot_age_seconds",
    "snapshot_bytes",
    "snapshot_duration_seconds_count",
    "logs_broken_total{fit=\"lost_end\"}",
    "snapshots_skipped_total{reason=\"corrupt\"}",
];

const SHIM_SERIES: [&str; 14] = [
    "generation",
    "last_number",
    "engine_seq",
    "event_age_seconds",
    "proof_age_seconds",
    "orphans",
    "orphans_dropped_total",
    "gaps_total",
    "gaps_unfilled_total",
    "replays_total",
    "generations_total",
    "outbox_bytes",
    "duplicates_total",
    "tails_unexpected_total",
];

/// Every promised metric is on the pages of real processes, described once. Every verdict is
/// present before it first happens.
async fn assert_pages(fleet: &Fleet) {
    until_snapshot(&connect(fleet).await).await;
    let index = page(fleet, fleet.indexes().remove(0)).await;
    for name in INDEXER_SERIES {
        assert!(
            has(&index, &format!("warmroute_indexer_{name}")),
            "{name} in\n{index}"
        );
    }
    for verdict in RecordVerdict::ALL {
        let name = format!(
            "warmroute_indexer_records_total{{verdict=\"{}\"}}",
            verdict.label()
        );
        assert!(has(&index, &name), "{name}");
    }
    for verdict in HeartbeatVerdict::ALL {
        let word = verdict.label();
        let name = format!("warmroute_indexer_heartbeats_total{{verdict=\"{word}\"}}");
        assert!(has(&index, &name), "{name}");
    }
    let shim = page(fleet, fleet.parts().shims[0].base()).await;
    for name in SHIM_SERIES {
        for rank in [0, 1] {
            let name = format!("warmroute_shim_{name}{{worker=\"worker-0\",dp_rank=\"{rank}\"}}");
            assert!(has(&shim, &name), "{name} in\n{shim}");
        }
    }
    let reasons = shim
        .lines()
        .filter(|line| line.starts_with("warmroute_shim_resyncs_total{"));
    assert_eq!(
        reasons.count(),
        2 * GenerationReason::ALL.len(),
        "each reason of each source"
    );
    for page in [&index, &shim, &page(fleet, fleet.admin(0, "")).await] {
        let described = page.lines().filter(|line| line.starts_with("# TYPE "));
        let mut described: Vec<&str> = described.collect();
        let all = described.len();
        described.sort_unstable();
        described.dedup();
        assert_eq!(described.len(), all, "described twice");
        for name in [
            "up",
            "disconnects_total",
            "server_errors_total",
            "in_bytes_total",
        ] {
            assert!(has(page, &format!("warmroute_nats_{name}")), "{name}");
        }
    }
}

async fn page(fleet: &Fleet, base: String) -> String {
    let answer = fleet.http.get(format!("{base}/metrics")).send().await;
    answer.unwrap().text().await.unwrap()
}

/// Labels have no order on a page.
fn has(page: &str, series: &str) -> bool {
    let parts = |series: &str| -> (String, Vec<String>) {
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        let labels = labels.trim_end_matches('}').split(',').map(str::to_owned);
        let mut labels: Vec<String> = labels.collect();
        labels.sort();
        (name.to_owned(), labels)
    };
    let wanted = parts(series);
    let series = page.lines().filter_map(|line| line.rsplit_once(' '));
    series
        .into_iter()
        .any(|(series, _)| parts(series) == wanted)
}
