//! The indexer as a process against a real nats-server: starts, kills, and logs that are not what
//! they were.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking, its helpers too"
)]

#[path = "../../proto/plane/tests/nats_server/mod.rs"]
mod nats_server;
mod process;

use std::collections::BTreeMap;
use std::path::Path;

use futures_util::StreamExt as _;
use nats_server::NatsServer;
use process::{Indexer, Publisher, eventually, init, namespace, plane};
use tokio::time::Instant;
use warmroute_plane::{Plane as _, PlaneError};
use warmroute_proto::codec::Message;
use warmroute_proto::query::{IndexAnswer, IndexQuery};
use warmroute_proto::registry::{IndexerEntry, ResyncRequest};
use warmroute_proto::roster::{
    HolderAnswer, HolderPart, HolderQuery, RosterId, RosterNumber, RosterPage, RosterPageRequest,
};
use warmroute_proto::snapshot::SnapshotPointer;
use warmroute_proto::subject::Subjects;
use warmroute_proto::view::{ReplicaFaults, ReplicaFaultsRequest};
use warmroute_proto::{LocalHash, LogPosition, Source, codec};

/// Log bytes that hold some 200 records of 64 blocks.
const SMALL: &[&str] = &["--max-bytes", "128KiB"];
const ROOMY: &[&str] = &["--max-bytes", "64MiB"];

async fn server(sizes: &[&str]) -> NatsServer {
    let server = NatsServer::start().await;
    let (text, ok) = init(&server.url(), sizes);
    assert!(ok, "{text}");
    server
}

async fn pointer(plane: &warmroute_plane::NatsPlane) -> Option<SnapshotPointer> {
    let key = Subjects::new(&namespace()).snapshot_pointer_key();
    let entry = plane.get(key).await.unwrap()?;
    Some(codec::decode(&entry.value).unwrap())
}

async fn snapshot_reaches(plane: &warmroute_plane::NatsPlane, position: LogPosition) {
    eventually("a snapshot reaches the position", async || {
        let pointer = pointer(plane).await;
        pointer.is_some_and(|pointer| pointer.newest.at.position >= position)
    })
    .await;
}

#[tokio::test]
async fn init_creates_verifies_and_tells_the_difference() {
    let server = NatsServer::start().await;
    let (text, ok) = init(&server.url(), SMALL);
    assert!(ok, "{text}");
    assert!(text.contains("before: wr_t: stream is missing"), "{text}");
    assert!(text.contains("now: namespace t is set up"), "{text}");
    let (text, ok) = init(&server.url(), SMALL);
    assert!(ok && !text.contains("before"), "{text}");
    let (text, ok) = init(&server.url(), ROOMY);
    assert!(!ok);
    assert!(
        text.contains("max_bytes is 131072, must be 67108864"),
        "{text}"
    );
}

/// The server reserves the bound of each stream, whatever is in it.
#[tokio::test]
async fn init_says_what_a_store_without_room_needs() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("nats.conf");
    std::fs::write(&file, "jetstream { max_file_store: 512MB }").unwrap();
    let server = NatsServer::start_with(&["-c".into(), file.into()], &[]).await;
    let (text, ok) = init(&server.url(), &["--max-bytes", "256MiB"]);
    assert!(!ok);
    assert!(text.contains("OBJ_wr_t: insufficient storage"), "{text}");
    let advice = "it reserves 536870912 bytes of the server's max_file_store";
    assert!(text.contains(advice), "{text}");
    let (text, ok) = init(&server.url(), SMALL);
    assert!(
        !ok && text.contains("max_bytes is 268435456, must be 131072"),
        "{text}"
    );
}

#[tokio::test]
async fn a_wrong_set_up_is_refused_with_the_difference() {
    let server = NatsServer::start().await;
    let mut command = process::command(&server.url(), &["--port", "0", "--host", "127.0.0.1"]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("wr_t: stream is missing"), "{text}");
}

#[tokio::test]
async fn it_starts_while_nats_is_away_and_says_so() {
    let mut server = server(ROOMY).await;
    server.kill();
    let mut indexer = Indexer::start(&server.url());
    for path in ["/health", "/healthz", "/liveness"] {
        assert_eq!(indexer.get(path).await.0, 200, "{path}");
    }
    for path in ["/readyz", "/readiness"] {
        assert_eq!(indexer.get(path).await.0, 503, "{path}");
    }
    assert_eq!(indexer.position().await, None);
    server.restart().await;
    eventually("it is ready", async || {
        indexer.get("/readyz").await.0 == 200
    })
    .await;
    let plane = plane(&server).await;
    let mut publisher = Publisher::new(&plane, "a");
    publisher.publish(10).await;
    publisher.is_exact_at(&indexer).await;
    let (_, page) = indexer.get("/metrics").await;
    assert!(
        page.contains("\nwarmroute_nats_connects_total 1\n"),
        "{page}"
    );
    assert!(indexer.metric("resident_bytes").await > 1 << 20);
    assert!(indexer.end(), "SIGTERM drains");
    let keys = Subjects::new(&namespace()).indexer_keys();
    let mut watch = plane.watch(keys).await.unwrap();
    let first = watch.next().await.unwrap();
    let gone = warmroute_plane::RegistryEvent::Current;
    assert_eq!(first, gone, "it took its entry away");
}

#[tokio::test]
async fn replicas_show_themselves() {
    let server = server(ROOMY).await;
    let indexer = Indexer::start(&server.url());
    let plane = plane(&server).await;
    let keys = Subjects::new(&namespace()).indexer_keys();
    let mut watch = plane.watch(keys).await.unwrap();
    let shown = async {
        loop {
            if let Some(warmroute_plane::RegistryEvent::Put { entry, .. }) = watch.next().await {
                let entry: IndexerEntry = codec::decode(&entry.value).unwrap();
                if entry.ready {
                    return entry;
                }
            }
        }
    };
    let entry = tokio::time::timeout(process::CAP, shown).await.unwrap();
    let url = entry.url.unwrap();
    assert!(url.starts_with("http://127.0.0.1:"), "{url}");
    assert_eq!(indexer.get("/readyz").await.0, 200);
}

#[tokio::test]
async fn killed_after_the_log_was_trimmed_it_is_the_one_that_lived() {
    let server = server(SMALL).await;
    let plane = plane(&server).await;
    let lived = Indexer::start(&server.url());
    let mut killed = Indexer::start(&server.url());
    let mut busy = Publisher::new(&plane, "busy");
    let mut idle = Publisher::new(&plane, "idle");
    idle.publish(100).await;
    let before = busy.publish(64).await;
    for indexer in [&lived, &killed] {
        indexer.reaches(before).await;
    }
    killed.kill();
    let mut last = before;
    while plane.log_status().await.unwrap().first <= before {
        for _ in 0..20 {
            last = busy.publish(64).await;
        }
        snapshot_reaches(&plane, last).await;
    }
    for _ in 0..5 {
        last = busy.publish(64).await;
    }
    lived.reaches(last).await;
    let start = Instant::now();
    let killed = Indexer::start(&server.url());
    killed.reaches(last).await;
    eventually("both are equal", async || {
        killed.folded().await == lived.folded().await
    })
    .await;
    println!("back after {:?}", start.elapsed());
    for publisher in [&busy, &idle] {
        publisher.is_exact_at(&killed).await;
        publisher.is_exact_at(&lived).await;
    }
    assert_eq!(killed.metric("restores_total{cause=\"start\"}").await, 1);
    for reason in ["gap", "mismatch", "fenced", "log_lost"] {
        let name = format!("resyncs_total{{reason=\"{reason}\"}}");
        assert_eq!(
            killed.metric(&name).await + lived.metric(&name).await,
            0,
            "{reason}"
        );
    }
    // Two of them, one writer at a time, two kept.
    for indexer in [&killed, &lived] {
        assert_eq!(
            indexer.metric("snapshots_total{outcome=\"failed\"}").await,
            0
        );
    }
    eventually("two snapshots are kept", async || {
        plane.snapshots().await.unwrap().len() == 2
    })
    .await;
}

#[tokio::test]
async fn a_corrupt_and_a_torn_snapshot_are_skipped() {
    let server = server(ROOMY).await;
    let plane = plane(&server).await;
    let mut publisher = Publisher::new(&plane, "a");
    let mut last = LogPosition(0);
    {
        let _indexer = Indexer::start(&server.url());
        for _ in 0..2 {
            last = publisher.publish(100).await;
            snapshot_reaches(&plane, last).await;
        }
    }
    let pointer = pointer(&plane).await.unwrap();
    let newest = pointer.newest.name;
    let blob = plane.get_snapshot(newest.clone()).await.unwrap().unwrap();
    let mut corrupt = blob.to_vec();
    let middle = corrupt.len() / 2;
    corrupt[middle] ^= 1;
    plane.delete_snapshot(newest.clone()).await.unwrap();
    plane.put_snapshot(newest, corrupt.into()).await.unwrap();
    let indexer = Indexer::start(&server.url());
    indexer.reaches(last).await;
    publisher.is_exact_at(&indexer).await;
    assert_eq!(
        indexer
            .metric("snapshots_skipped_total{reason=\"corrupt\"}")
            .await,
        1
    );
    assert_eq!(indexer.metric("restores_total{cause=\"start\"}").await, 1);
    drop(indexer);
    // Chunks of all of them go: they are torn, and the log is read from its beginning.
    let client = async_nats::connect(server.url()).await.unwrap();
    let jetstream = async_nats::jetstream::new(client);
    let objects = jetstream.get_stream("OBJ_wr_t").await.unwrap();
    objects.purge().filter("$O.wr_t.C.*").await.unwrap();
    let indexer = Indexer::start(&server.url());
    indexer.reaches(last).await;
    publisher.is_exact_at(&indexer).await;
    assert!(
        indexer
            .metric("snapshots_skipped_total{reason=\"torn\"}")
            .await
            >= 1
    );
    assert_eq!(indexer.metric("restores_total{cause=\"start\"}").await, 0);
}

#[tokio::test]
async fn a_stream_deleted_and_recreated_is_resynced() {
    let server = server(ROOMY).await;
    let plane = plane(&server).await;
    let indexer = Indexer::start(&server.url());
    let mut publisher = Publisher::new(&plane, "a");
    let mut last = LogPosition(0);
    for _ in 0..20 {
        last = publisher.publish(20).await;
    }
    indexer.reaches(last).await;
    publisher.is_exact_at(&indexer).await;
    let subject = Subjects::new(&namespace()).resync(&publisher.source.worker);
    let mut requests = plane.subscribe(subject).await.unwrap();
    let client = async_nats::connect(server.url()).await.unwrap();
    let jetstream = async_nats::jetstream::new(client);
    jetstream.delete_stream("wr_t").await.unwrap();
    eventually("it is not ready, and says why", async || {
        let (status, why) = indexer.get("/readyz").await;
        status == 503 && why.starts_with("the log cannot be read: ")
    })
    .await;
    let (text, ok) = init(&server.url(), ROOMY);
    assert!(ok, "{text}");
    // Without a request it would have to be luck: the new log is filled beyond the old position.
    let request = tokio::time::timeout(process::CAP, requests.next())
        .await
        .unwrap();
    let request: ResyncRequest = codec::decode(&request.unwrap().payload).unwrap();
    assert_eq!(request.above, publisher.generation);
    publisher.next_generation();
    for _ in 0..30 {
        last = publisher.publish(20).await;
    }
    assert_eq!(last, LogPosition(30));
    publisher.is_exact_at(&indexer).await;
    assert_eq!(indexer.get("/readyz").await.0, 200);
    assert_eq!(
        indexer
            .metric("logs_broken_total{fit=\"another_log\"}")
            .await,
        1
    );
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[tokio::test]
async fn a_log_rolled_back_and_refilled_past_the_position_is_found() {
    let mut server = server(ROOMY).await;
    let plane = plane(&server).await;
    let indexer = Indexer::start(&server.url());
    let mut idle = Publisher::new(&plane, "idle");
    let mut busy = Publisher::new(&plane, "busy");
    idle.publish(50).await;
    for _ in 0..5 {
        busy.publish(20).await;
    }
    // The server's directory as of now comes back later.
    server.kill();
    let old = server.store().with_extension("old");
    copy(&server.store(), &old);
    server.restart().await;
    eventually("the plane is back", async || {
        plane.log_status().await.is_ok()
    })
    .await;
    let mut last = LogPosition(0);
    for _ in 0..5 {
        last = busy.publish(20).await;
    }
    indexer.reaches(last).await;
    for publisher in [&idle, &busy] {
        publisher.is_exact_at(&indexer).await;
    }
    // Refilled while the indexer sees nothing: identity, first and last look healthy afterwards.
    indexer.pause();
    server.kill();
    std::fs::remove_dir_all(server.store()).unwrap();
    std::fs::rename(&old, server.store()).unwrap();
    server.restart().await;
    eventually("the plane is back", async || {
        plane.log_status().await.is_ok()
    })
    .await;
    busy.next_generation();
    let mut refilled = LogPosition(0);
    while refilled <= last {
        refilled = busy.publish(20).await;
    }
    let start = Instant::now();
    indexer.go_on();
    eventually("it is found", async || {
        let name = "logs_broken_total{fit=\"other_record\"}";
        indexer.metric(name).await > 0
    })
    .await;
    println!("found after {:?}", start.elapsed());
    for publisher in [&busy, &idle] {
        publisher.is_exact_at(&indexer).await;
    }
}

/// Kills an indexer when it does this step of a snapshot; the next one starts from the one before.
async fn killed_at(step: &str) {
    let server = server(ROOMY).await;
    let plane = plane(&server).await;
    let mut publisher = Publisher::new(&plane, "a");
    let mut indexer = Indexer::start(&server.url());
    let first = publisher.publish(100).await;
    snapshot_reaches(&plane, first).await;
    let client = async_nats::connect(server.url()).await.unwrap();
    let mut steps = client.subscribe(step.to_owned()).await.unwrap();
    client.flush().await.unwrap();
    let last = publisher.publish(100).await;
    let seen = tokio::time::timeout(process::CAP, steps.next()).await;
    assert!(seen.unwrap().is_some(), "{step}");
    indexer.kill();
    let next = Indexer::start(&server.url());
    next.reaches(last).await;
    assert_eq!(
        next.metric("restores_total{cause=\"start\"}").await,
        1,
        "{step}"
    );
    for why in ["corrupt", "torn", "record_differs", "trimmed"] {
        let name = format!("snapshots_skipped_total{{reason=\"{why}\"}}");
        assert_eq!(next.metric(&name).await, 0, "{step}: {why}");
    }
    publisher.is_exact_at(&next).await;
    // And it goes on taking them, once the dead one's lease has run out.
    let last = publisher.publish(100).await;
    snapshot_reaches(&plane, last).await;
}

#[tokio::test]
async fn killed_at_every_step_of_a_snapshot_the_next_start_is_good() {
    let steps = [
        "$KV.wr_t.wr.t.snapshot.writer",
        "$O.wr_t.C.>",
        "$O.wr_t.M.>",
        "$KV.wr_t.wr.t.snapshot.newest",
    ];
    futures_util::future::join_all(steps.map(killed_at)).await;
}

/// Beside what is folded: the runtime, the connection, a batch of the log, answers.
const BEYOND_THE_BOUND: u64 = 64 << 20;

#[tokio::test]
async fn its_memory_keeps_to_the_bound() {
    const BOUND: u64 = 24 << 20;
    let server = server(ROOMY).await;
    let plane = plane(&server).await;
    let mut requests = plane
        .subscribe(Subjects::new(&namespace()).resync(&"a".into()))
        .await
        .unwrap();
    let bound = BOUND.to_string();
    let indexer = Indexer::start_with(&server.url(), &["--max-memory", &bound]);
    let mut publishers: Vec<_> = ["a", "b", "c", "d"]
        .iter()
        .map(|name| Publisher::new(&plane, name))
        .collect();
    // Some 80 MB if all were folded; "a" is the largest.
    let mut last = LogPosition(0);
    let mut most = 0;
    for round in 0..100 {
        for (at, publisher) in publishers.iter_mut().enumerate() {
            if at == 0 || round % 2 == 0 {
                last = publisher.publish(7_000).await;
            }
        }
        most = most.max(indexer.metric("resident_bytes").await);
        assert!(indexer.metric("memory_estimated_bytes").await <= BOUND);
    }
    indexer.reaches(last).await;
    most = most.max(indexer.metric("resident_bytes").await);
    println!("at most {most} bytes resident, bound {BOUND}");
    assert!(most <= BOUND + BEYOND_THE_BOUND);
    assert!(indexer.metric("sources_set_aside").await >= 1);
    assert!(indexer.metric("set_asides_total").await >= 1);
    let digest = indexer.digest().await;
    for publisher in &publishers {
        let worker = publisher.source.worker.as_str();
        let sources = digest["sources"].as_array().unwrap();
        let source = sources
            .iter()
            .find(|source| source["worker"] == worker)
            .unwrap();
        if source["reason"] == "memory" {
            assert_eq!(source["state"], "unknown");
            assert!(source["digest"].is_null(), "nothing is claimed");
        } else {
            assert_eq!(source["digest"], publisher.hex().as_str());
        }
    }
    assert_eq!(indexer.metric("returns_total").await, 0);
    drop(indexer);
    let asked = futures_util::FutureExt::now_or_never(requests.next());
    assert!(asked.is_none(), "no request for what does not fit");
}

/// Four times what fits: what the process takes besides the bound is the runtime, the connection
/// and what is on its way.
#[tokio::test]
async fn the_whole_process_keeps_to_its_bound() {
    const BOUND: u64 = 24 << 20;
    const BESIDES: u64 = 64 << 20;
    let server = server(ROOMY).await;
    let indexer = Indexer::start_with(&server.url(), &["--max-memory", "24MiB"]);
    let plane = plane(&server).await;
    let empty = indexer.resident_most();
    let mut publishers: Vec<_> = ["a", "b", "c", "d", "e", "f", "g", "h"]
        .map(|name| Publisher::new(&plane, name))
        .into();
    let mut last = LogPosition(0);
    for _ in 0..180 {
        for publisher in &mut publishers {
            last = publisher.publish(2000).await;
        }
    }
    indexer.reaches(last).await;
    let (most, aside) = (
        indexer.resident_most(),
        indexer.metric("sources_set_aside").await,
    );
    eprintln!(
        "bound {BOUND}, resident at most {most}, {empty} of these when empty, \
         {aside} of 8 set aside"
    );
    assert!(most <= BOUND + BESIDES, "the bound is one of the process");
    assert!((1..8).contains(&aside), "some are folded, some are not");
}

/// The blocks that a publisher with this first letter stores first.
fn first_blocks(letter: u8) -> Vec<LocalHash> {
    let first = u64::from(letter) << 32;
    (first..first + 10).map(LocalHash).collect()
}

/// The subject of the one replica.
async fn own_subject(plane: &warmroute_plane::NatsPlane) -> String {
    let subjects = Subjects::new(&namespace());
    let mut watch = plane.watch(subjects.indexer_keys()).await.unwrap();
    loop {
        if let Some(warmroute_plane::RegistryEvent::Put { key, .. }) = watch.next().await {
            return subjects.query_at(&subjects.key_indexer(&key).unwrap());
        }
    }
}

async fn request<Q: Message, A: Message>(
    plane: &warmroute_plane::NatsPlane,
    subject: &str,
    query: &Q,
) -> Result<A, PlaneError> {
    let query = codec::encode(query).unwrap();
    let answer = plane.request(subject.to_owned(), query.into(), process::CAP);
    Ok(codec::decode(&answer.await?).unwrap())
}

/// All rows of the replica's roster, and in how many pages they came.
async fn whole_roster(
    plane: &warmroute_plane::NatsPlane,
    subject: &str,
) -> (BTreeMap<RosterNumber, Source>, usize) {
    let (mut rows, mut pages) = (BTreeMap::new(), 0);
    let mut ask = RosterPageRequest {
        roster: RosterId(0),
        since: 0,
    };
    loop {
        let page: RosterPage = request(plane, subject, &ask).await.unwrap();
        pages += 1;
        let more = page.more;
        (ask.roster, ask.since) = (page.roster, page.version);
        rows.extend(page.rows.into_iter().map(|row| (row.number, row.source)));
        if !more {
            return (rows, pages);
        }
    }
}

async fn holders(
    plane: &warmroute_plane::NatsPlane,
    subject: &str,
    blocks: Vec<LocalHash>,
) -> HolderPart {
    let query = HolderQuery {
        blocks,
        from: RosterNumber(0),
        known: RosterPageRequest::default(),
    };
    match request(plane, subject, &query).await.unwrap() {
        HolderAnswer::Holders(part) => part,
        HolderAnswer::Behind => panic!("behind"),
    }
}

#[tokio::test]
async fn both_forms_of_a_query_are_answered_alike() {
    let server = server(ROOMY).await;
    let plane = plane(&server).await;
    let indexer = Indexer::start(&server.url());
    let mut publishers = ["a", "ab", "b"].map(|worker| Publisher::new(&plane, worker));
    for publisher in &mut publishers {
        publisher.publish(10).await;
    }
    for publisher in &publishers {
        publisher.is_exact_at(&indexer).await;
    }
    let subject = own_subject(&plane).await;
    let (rows, _) = whole_roster(&plane, &subject).await;
    let query = IndexQuery {
        blocks: first_blocks(b'a'),
        at_least: None,
    };
    let any = Subjects::new(&namespace()).query();
    let IndexAnswer::Runs { sources, .. } = request(&plane, &any, &query).await.unwrap() else {
        panic!("behind");
    };
    let held = sources.iter().filter(|source| source.run.gpu == 10);
    let held: Vec<_> = held.map(|of| (of.source.clone(), of.number)).collect();
    assert_eq!(held.len(), 2);
    let part = holders(&plane, &subject, first_blocks(b'a')).await;
    let details = part.details.iter();
    let mut named: Vec<_> = details
        .map(|of| (rows[&of.source].clone(), of.number))
        .collect();
    named.sort();
    assert_eq!(named, held);
    assert_eq!(part.groups.len(), 1);
    assert_eq!(
        (
            part.groups[0].run.gpu,
            part.groups[0].members.iter().count()
        ),
        (10, 2)
    );
}

/// 600 sources with names of 2,000 characters: 1.2 MB where every source is named.
#[tokio::test]
async fn an_answer_that_does_not_fit_is_counted() {
    let server = server(ROOMY).await;
    let plane = plane(&server).await;
    let indexer = Indexer::start(&server.url());
    let mut last = LogPosition(0);
    for number in 0..600 {
        let name = format!("{number}-{}", "a".repeat(2_000));
        last = Publisher::new(&plane, &name).publish(1).await;
    }
    indexer.reaches(last).await;
    let query = IndexQuery {
        blocks: first_blocks(b'1'),
        at_least: None,
    };
    let any = Subjects::new(&namespace()).query();
    let refused = request::<_, IndexAnswer>(&plane, &any, &query).await;
    assert!(
        matches!(refused, Err(PlaneError::TooLarge { .. })),
        "{refused:?}"
    );
    assert_eq!(
        indexer.metric("queries_total{outcome=\"too_large\"}").await,
        1
    );
    let subject = own_subject(&plane).await;
    let faults: ReplicaFaults = request(&plane, &subject, &ReplicaFaultsRequest {})
        .await
        .unwrap();
    assert_eq!((faults.answers_too_large, faults.turned_away), (1, 0));
    let (rows, pages) = whole_roster(&plane, &subject).await;
    assert_eq!(rows.len(), 600);
    assert!(pages > 1);
    holders(&plane, &subject, first_blocks(b'1')).await;
    assert_eq!(
        indexer.metric("queries_total{outcome=\"too_large\"}").await,
        1
    );
}

/// The dump is longer than what sockets buffer.
#[tokio::test]
async fn dumps_that_are_not_read_hold_no_place() {
    let server = server(ROOMY).await;
    let plane = plane(&server).await;
    let indexer = Indexer::start(&server.url());
    let mut publisher = Publisher::new(&plane, "a");
    for _ in 0..80 {
        publisher.publish(4_000).await;
    }
    publisher.is_exact_at(&indexer).await;
    let mut silent = Vec::new();
    for _ in 0..4 {
        silent.push(
            indexer
                .send("GET /dump HTTP/1.1\r\nHost: localhost\r\n\r\n")
                .await,
        );
    }
    eventually("a dump is complete", async || {
        let (status, body) = indexer.get("/dump").await;
        let blocks = body.matches(',').count();
        status == 200 && blocks > 300_000 && body.ends_with("\r\n0\r\n\r\n")
    })
    .await;
}

#[tokio::test]
async fn the_api_needs_its_key() {
    let server = server(ROOMY).await;
    let file = std::env::temp_dir().join(format!("warmroute-key-{}", std::process::id()));
    std::fs::write(&file, "an-older-key-of-this-test\na-key-of-this-test\n").unwrap();
    let indexer = Indexer::start_with(&server.url(), &["--api-key-file", file.to_str().unwrap()]);
    for path in ["/workers", "/dump"] {
        assert_eq!(indexer.get(path).await.0, 401, "{path}");
        let path = format!("{path} HTTP/1.1\r\nAuthorization: Bearer a-key-of-this-test\r\nX:");
        assert_eq!(indexer.get(&path).await.0, 200, "{path}");
    }
    for path in ["/health", "/metrics", "/v1/digest"] {
        assert_eq!(indexer.get(path).await.0, 200, "{path}");
    }
    std::fs::remove_file(file).unwrap();
}
