//! Snapshots through a plane: written, read, skipped, and what starts from them.

use futures_util::FutureExt as _;
use warmroute_plane::MemoryPlane;
use warmroute_proto::query::SourceState;
use warmroute_proto::registry::{IndexerEntry, ResyncReason};
use warmroute_proto::{Generation, StreamIdentity};

use super::*;

use crate::service::tests::{SECOND, W, only, query_for, running, state};
use crate::tests_support::{self, IDENTITY, Running, TestShim, append, source, stored};

/// What the tests' plane keeps of the log: a few records.
fn small() -> MemoryPlane {
    tests_support::plane_of(4 << 10)
}

async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    let cap = Instant::now() + 600 * SECOND;
    while !is_so().await {
        assert!(Instant::now() < cap, "it never comes true");
        sleep(Duration::from_millis(100)).await;
    }
}

async fn pointer(plane: &MemoryPlane) -> Option<SnapshotPointer> {
    let key = Subjects::new(&tests_support::namespace()).snapshot_pointer_key();
    let entry = plane.get(key).await.unwrap();
    entry.map(|entry| codec::decode(&entry.value).unwrap())
}

/// Waits until the pointer is at least here.
async fn snapshotted(plane: &MemoryPlane, position: LogPosition) -> SnapshotPointer {
    until(async || {
        let pointer = pointer(plane).await;
        pointer.is_some_and(|pointer| pointer.newest.at.position >= position)
    })
    .await;
    pointer(plane).await.unwrap()
}

fn metric(running: &Running, line: &str) -> bool {
    let text = String::from_utf8(running.handle.metrics_text().unwrap()).unwrap();
    text.lines()
        .any(|found| found == format!("warmroute_indexer_{line}"))
}

async fn end(running: Running) {
    running.stop.cancel();
    running.run.await.unwrap().unwrap();
}

/// A plane whose log lost everything before a snapshot, and the shim of its one source.
async fn trimmed() -> (MemoryPlane, TestShim, DigestView) {
    let running = Running::start_keeping(small(), "first");
    sleep(SECOND).await;
    let mut shim = TestShim::new(W);
    for name in ["a", "b", "c"] {
        running
            .publish(&shim.record(vec![stored("", name, Tier::Gpu)]))
            .await;
    }
    snapshotted(&running.plane, running.handle.position()).await;
    while running.plane.log_status().await.unwrap().first.0 < 4 {
        for name in ["x", "y"] {
            running
                .publish(&shim.record(vec![stored("", name, Tier::Gpu)]))
                .await;
            let prefix = tests_support::removed(name, Tier::Gpu);
            running.publish(&shim.record(vec![prefix])).await;
        }
        snapshotted(&running.plane, running.handle.position()).await;
    }
    running.heartbeat(&shim).await;
    sleep(Duration::from_millis(1)).await;
    let lived = running.handle.digest();
    let plane = running.plane.clone();
    end(running).await;
    (plane, shim, lived)
}

#[tokio::test(start_paused = true)]
async fn a_replica_starts_from_a_snapshot_and_the_tail() {
    let (plane, mut shim, _) = trimmed().await;
    let last = append(&plane, &shim.record(vec![stored("", "tail", Tier::Gpu)])).await;
    let running = Running::start_keeping(plane, "second");
    until(async || running.handle.position() >= last).await;
    assert_eq!(running.handle.held(&source(W)), shim.pairs);
    assert_eq!(
        state(&running).0,
        SourceState::Unknown,
        "nothing proves it yet"
    );
    running.heartbeat(&shim).await;
    sleep(Duration::from_millis(1)).await;
    assert_eq!(state(&running).0, SourceState::Exact);
    assert!(running.handle.is_ready());
    assert!(metric(&running, "restores_total{cause=\"start\"} 1"));
}

#[tokio::test(start_paused = true)]
async fn two_are_kept_and_names_are_never_used_twice() {
    let (running, mut shim) = {
        let running = Running::start_keeping(tests_support::plane(), "w");
        (running, TestShim::new(W))
    };
    let mut seen = BTreeSet::new();
    for name in ["a", "b", "c", "d", "e"] {
        running
            .publish(&shim.record(vec![stored("", name, Tier::Gpu)]))
            .await;
        let pointer = snapshotted(&running.plane, running.handle.position()).await;
        assert!(seen.insert(pointer.newest.name));
    }
    until(async || running.plane.snapshots().await.unwrap().len() == 2).await;
    let pointer = pointer(&running.plane).await.unwrap();
    let mut names = vec![pointer.older.unwrap().name, pointer.newest.name];
    names.sort();
    assert_eq!(running.plane.snapshots().await.unwrap(), names);
    let key = running.subjects.snapshot_lease_key();
    assert_eq!(
        running.plane.get(key).await.unwrap(),
        None,
        "the lease is given back"
    );
}

/// It may be that no piece of a snapshot is late, and that all of them together take for ever.
#[tokio::test(start_paused = true)]
async fn a_start_does_not_wait_for_ever_for_a_slow_store() {
    let (plane, mut shim, _) = trimmed().await;
    plane.stall_snapshots(true);
    let subject = Subjects::new(&tests_support::namespace()).resync(&source(W).worker);
    let mut requests = plane.subscribe(subject).await.unwrap();
    let running = Running::start_keeping(plane, "second");
    sleep(500 * SECOND).await;
    assert!(
        !running.handle.has_started(),
        "a large snapshot may take that long"
    );
    sleep(102 * SECOND).await;
    assert!(running.handle.is_ready());
    running.heartbeat(&shim).await;
    let request = timeout(60 * SECOND, requests.next())
        .await
        .unwrap()
        .unwrap();
    let request: ResyncRequest = codec::decode(&request.payload).unwrap();
    assert_eq!(request.source, source(W));
    shim.next_generation();
    running
        .publish(&shim.record(vec![stored("", "a", Tier::Gpu)]))
        .await;
    running.heartbeat(&shim).await;
    until(async || state(&running).0 == SourceState::Exact).await;
}

/// Puts other bytes in a snapshot's place, as a broken disk would.
async fn corrupt(plane: &MemoryPlane, name: &str, how: impl FnOnce(&mut Vec<u8>)) {
    let mut blob = plane
        .get_snapshot(name.to_owned())
        .await
        .unwrap()
        .unwrap()
        .to_vec();
    how(&mut blob);
    plane.delete_snapshot(name.to_owned()).await.unwrap();
    plane
        .put_snapshot(name.to_owned(), blob.into())
        .await
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_corrupt_snapshot_is_skipped_for_the_older_one() {
    let (running, mut shim) = {
        let running = Running::start_keeping(tests_support::plane(), "w");
        (running, TestShim::new(W))
    };
    for name in ["a", "b"] {
        running
            .publish(&shim.record(vec![stored("", name, Tier::Gpu)]))
            .await;
        snapshotted(&running.plane, running.handle.position()).await;
    }
    let (plane, position) = (running.plane.clone(), running.handle.position());
    end(running).await;
    let newest = pointer(&plane).await.unwrap().newest.name;
    corrupt(&plane, &newest, |blob| blob[20] ^= 1).await;
    let running = Running::start_keeping(plane.clone(), "v");
    until(async || running.handle.position() >= position).await;
    assert!(metric(
        &running,
        "snapshots_skipped_total{reason=\"corrupt\"} 1"
    ));
    assert!(metric(&running, "restores_total{cause=\"start\"} 1"));
    assert_eq!(running.handle.held(&source(W)), shim.pairs);
    end(running).await;
    // All of them: the log is whole, and read from its beginning.
    for name in plane.snapshots().await.unwrap() {
        corrupt(&plane, &name, |blob| blob.truncate(30)).await;
    }
    let running = Running::start_keeping(plane, "u");
    until(async || running.handle.position() >= position).await;
    assert_eq!(running.handle.held(&source(W)), shim.pairs);
    assert!(metric(&running, "restores_total{cause=\"start\"} 0"));
}

#[tokio::test(start_paused = true)]
async fn a_lost_registry_does_not_lose_the_snapshots() {
    let (plane, shim, _) = trimmed().await;
    let key = Subjects::new(&tests_support::namespace()).snapshot_pointer_key();
    let entry = plane.get(key.clone()).await.unwrap().unwrap();
    plane.delete(key.clone(), entry.revision).await.unwrap();
    let running = Running::start_keeping(plane.clone(), "second");
    until(async || running.handle.held(&source(W)) == shim.pairs).await;
    end(running).await;
    let junk = Bytes::from_static(b"junk");
    plane.put(key, junk, PutIf::Absent, None).await.unwrap();
    let mut shim = shim;
    let running = Running::start_keeping(plane, "third");
    running
        .publish(&shim.record(vec![stored("", "more", Tier::Gpu)]))
        .await;
    assert_eq!(running.handle.held(&source(W)), shim.pairs);
    until(async || metric(&running, "snapshots_total{outcome=\"written\"} 1")).await;
}

#[tokio::test(start_paused = true)]
async fn snapshots_of_another_log_are_not_loaded() {
    // Whatever the clock of the server showed that created it.
    for created_unix_ns in [2, 0] {
        another_log(created_unix_ns).await;
    }
}

async fn another_log(created_unix_ns: u64) {
    let (plane, mut shim, _) = trimmed().await;
    let former = pointer(&plane).await.unwrap();
    plane.recreate_log(StreamIdentity {
        created_unix_ns,
        nonce: 9,
    });
    let running = Running::start_keeping(plane, "second");
    shim.next_generation();
    sleep(SECOND).await;
    running
        .publish(&shim.record(vec![stored("", "new", Tier::Gpu)]))
        .await;
    assert_eq!(state(&running).0, SourceState::Exact);
    assert_eq!(running.handle.held(&source(W)), shim.pairs);
    assert!(metric(&running, "restores_total{cause=\"start\"} 0"));
    let pointer = {
        until(async || pointer(&running.plane).await.unwrap().newest.log.nonce == 9).await;
        pointer(&running.plane).await.unwrap()
    };
    assert_eq!(pointer.older, None, "no reader needs it");
    until(async || {
        let names = running.plane.snapshots().await.unwrap();
        !names.contains(&former.newest.name) && names.contains(&pointer.newest.name)
    })
    .await;
    assert!(metric(
        &running,
        "snapshots_total{outcome=\"superseded\"} 0"
    ));
}

#[tokio::test(start_paused = true)]
async fn a_log_recreated_under_a_running_indexer_is_resynced() {
    let running = Running::start_keeping(tests_support::plane(), "w");
    sleep(SECOND).await;
    let mut shim = TestShim::new(W);
    running
        .publish(&shim.record(vec![stored("", "a", Tier::Gpu)]))
        .await;
    let mut requests = running
        .plane
        .subscribe(running.subjects.resync(&source(W).worker))
        .await
        .unwrap();
    running.plane.recreate_log(StreamIdentity {
        created_unix_ns: 2,
        nonce: 9,
    });
    let request: ResyncRequest = codec::decode(&requests.next().await.unwrap().payload).unwrap();
    assert_eq!(request.reason, ResyncReason::LogLost);
    assert!(!state(&running).0.gives_credit());
    assert!(metric(&running, "logs_broken_total{fit=\"another_log\"} 1"));
    shim.next_generation();
    append(
        &running.plane,
        &shim.record(vec![stored("", "b", Tier::Gpu)]),
    )
    .await;
    until(async || running.handle.held(&source(W)) == shim.pairs).await;
    running.heartbeat(&shim).await;
    sleep(Duration::from_millis(1)).await;
    assert_eq!(state(&running).0, SourceState::Exact);
}

#[tokio::test(start_paused = true)]
async fn a_brand_new_replica_with_a_trimmed_log_and_no_snapshot_asks_for_images() {
    let (plane, shim, _) = trimmed().await;
    for name in plane.snapshots().await.unwrap() {
        plane.delete_snapshot(name).await.unwrap();
    }
    let subjects = Subjects::new(&tests_support::namespace());
    let subject = subjects.resync(&source(W).worker);
    let mut requests = plane.subscribe(subject).await.unwrap();
    let running = Running::start_keeping(plane, "second");
    until(async || running.handle.is_ready()).await;
    assert_eq!(state(&running).0, SourceState::Unknown);
    let request = loop {
        running.heartbeat(&shim).await;
        if let Ok(request) = timeout(SECOND, requests.next()).await {
            break codec::decode::<ResyncRequest>(&request.unwrap().payload).unwrap();
        }
    };
    assert_eq!(request.reason, ResyncReason::Gap);
    assert_eq!(request.above, Generation(1));
}

#[tokio::test(start_paused = true)]
async fn two_replicas_write_one_snapshot() {
    let plane = tests_support::plane();
    let one = Running::start_keeping(plane.clone(), "one");
    let two = Running::start_keeping(plane, "two");
    let mut shim = TestShim::new(W);
    for name in ["a", "b", "c", "d"] {
        one.publish(&shim.record(vec![stored("", name, Tier::Gpu)]))
            .await;
        snapshotted(&one.plane, one.handle.position()).await;
        sleep(30 * SECOND).await;
    }
    let count = |running: &Running, outcome: &str| {
        (0..9).find(|count| {
            metric(
                running,
                &format!("snapshots_total{{outcome=\"{outcome}\"}} {count}"),
            )
        })
    };
    let written = [count(&one, "written"), count(&two, "written")].map(Option::unwrap);
    assert_eq!(written.iter().sum::<i32>(), 4, "{written:?}");
    for running in [&one, &two] {
        assert_eq!(count(running, "failed"), Some(0));
    }
    let writers = one.plane.snapshots().await.unwrap();
    assert!(writers.iter().all(|name| Name::parse(name).is_some()));
}

#[tokio::test(start_paused = true)]
async fn a_replica_shows_itself_in_the_registry_until_it_ends() {
    let replica = Replica {
        id: "i1".to_owned(),
        url: Some("http://127.0.0.1:8090".to_owned()),
    };
    let plane = tests_support::plane();
    let running = Running::start_with(plane, |service| service.registered_as(replica));
    let key = running.subjects.indexer_key("i1");
    let ready = async || {
        let entry = running.plane.get(key.clone()).await.unwrap();
        entry.is_some_and(|entry| codec::decode::<IndexerEntry>(&entry.value).unwrap().ready)
    };
    until(ready).await;
    sleep(60 * SECOND).await;
    assert!(ready().await, "it is renewed");
    let query = codec::encode(&IndexQuery {
        blocks: Vec::new(),
        at_least: None,
    });
    let own = running.subjects.query_at("i1");
    let answer = running.plane.request(own, query.unwrap().into(), SECOND);
    assert!(answer.await.is_ok(), "it answers at its own subject");
    let plane = running.plane.clone();
    end(running).await;
    assert_eq!(plane.get(key).await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn a_source_that_diverged_here_is_repaired_from_a_snapshot() {
    let running = Running::start_keeping(tests_support::plane(), "w");
    sleep(SECOND).await;
    let mut shim = TestShim::new(W);
    running
        .publish(&shim.record(vec![stored("", "a b", Tier::Gpu)]))
        .await;
    snapshotted(&running.plane, running.handle.position()).await;
    let subject = running.subjects.resync(&source(W).worker);
    let mut requests = running.plane.subscribe(subject).await.unwrap();
    let mut wrong = shim.clone();
    wrong.pairs.clear();
    running.heartbeat(&wrong).await;
    until(async || metric(&running, "restores_total{cause=\"mismatch\"} 1")).await;
    until(async || running.handle.held(&source(W)) == shim.pairs).await;
    until(async || {
        running.heartbeat(&shim).await;
        state(&running).0 == SourceState::Exact
    })
    .await;
    let asked = timeout(60 * SECOND, requests.next()).await;
    assert!(asked.is_err(), "no image is requested");
    // In the same generation a second time: now it is asked for.
    running.heartbeat(&wrong).await;
    let request = requests.next().await.unwrap();
    let request: ResyncRequest = codec::decode(&request.payload).unwrap();
    assert_eq!(request.reason, ResyncReason::Mismatch);
    assert!(metric(&running, "restores_total{cause=\"mismatch\"} 1"));
}

/// Two sources in a snapshot; the first one diverged while the store stalls.
async fn diverged_before_a_slow_store() -> (Running, TestShim, TestShim) {
    let running = Running::start_keeping(tests_support::plane(), "w");
    sleep(SECOND).await;
    let (mut wrong, mut other) = (TestShim::new(W), TestShim::new("w2/0"));
    for shim in [&mut wrong, &mut other] {
        running
            .publish(&shim.record(vec![stored("", "a", Tier::Gpu)]))
            .await;
    }
    snapshotted(&running.plane, running.handle.position()).await;
    running.plane.stall_snapshots(true);
    let right = wrong.clone();
    wrong.pairs.clear();
    running.heartbeat(&wrong).await;
    (running, right, other)
}

fn state_of(running: &Running, shim: &TestShim) -> SourceState {
    let IndexAnswer::Runs { sources, .. } = running.handle.query(&query_for("a")) else {
        panic!("behind");
    };
    let of_it = |part: &&warmroute_proto::query::SourceAnswer| part.source == shim.source;
    sources.iter().find(of_it).unwrap().states.gpu
}

/// Records and heartbeats are read beside the snapshot, and once more behind its position.
#[tokio::test(start_paused = true)]
async fn a_slow_store_stops_neither_records_nor_heartbeats() {
    let (running, right, mut other) = diverged_before_a_slow_store().await;
    let subject = running.subjects.resync(&source(W).worker);
    let mut requests = running.plane.subscribe(subject).await.unwrap();
    for step in 0..16 {
        sleep(SECOND / 2).await;
        let record = other.record(vec![stored("", &format!("n{step}"), Tier::Gpu)]);
        timeout(SECOND, running.publish(&record)).await.unwrap();
        running.heartbeat(&other).await;
        sleep(Duration::from_millis(1)).await;
        assert_eq!(state_of(&running, &other), SourceState::Exact, "{step}");
        assert!(!state_of(&running, &right).gives_credit());
    }
    assert!(requests.next().now_or_never().is_none(), "it is being read");
    running.plane.stall_snapshots(false);
    until(async || metric(&running, "restores_total{cause=\"mismatch\"} 1")).await;
    until(async || {
        running.heartbeat(&right).await;
        running.heartbeat(&other).await;
        sleep(Duration::from_millis(1)).await;
        [&right, &other].map(|shim| state_of(&running, shim)) == [SourceState::Exact; 2]
    })
    .await;
    assert_eq!(running.handle.held(&other.source), other.pairs);
    assert!(requests.next().now_or_never().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_store_that_stays_slow_is_given_up_for_an_image() {
    let (running, _, other) = diverged_before_a_slow_store().await;
    let subject = running.subjects.resync(&source(W).worker);
    let mut requests = running.plane.subscribe(subject).await.unwrap();
    let request = loop {
        running.heartbeat(&other).await;
        if let Ok(request) = timeout(SECOND, requests.next()).await {
            break codec::decode::<ResyncRequest>(&request.unwrap().payload).unwrap();
        }
        assert_eq!(state_of(&running, &other), SourceState::Exact);
    };
    assert_eq!(request.reason, ResyncReason::Mismatch);
    assert!(metric(&running, "restores_total{cause=\"mismatch\"} 0"));
}

#[tokio::test(start_paused = true)]
async fn who_falls_off_the_log_takes_a_newer_snapshot() {
    let plane = small();
    let running = Running::start_keeping(plane.clone(), "slow");
    sleep(SECOND).await;
    let mut shim = TestShim::new(W);
    running
        .publish(&shim.record(vec![stored("", "a", Tier::Gpu)]))
        .await;
    running.heartbeat(&shim).await;
    snapshotted(&plane, running.handle.position()).await;
    let subject = running.subjects.resync(&source(W).worker);
    let mut requests = plane.subscribe(subject).await.unwrap();
    // No other task runs between these: the log goes on without its reader.
    let mut other = Fold::new(&tests_support::namespace(), None);
    other.follow(IDENTITY);
    for position in 1.. {
        if position > 1 {
            let name = format!("n{position}");
            append(&plane, &shim.record(vec![stored("", &name, Tier::Gpu)])).await;
        }
        let message = plane.at(LogPosition(position)).await.unwrap().unwrap();
        other.apply(now(), &message);
        if plane.log_status().await.unwrap().first > LogPosition(10) {
            break;
        }
    }
    let cut = other.cut(Vec::new()).unwrap();
    let name = Name {
        log: cut.head.log,
        position: cut.head.at.position,
        suffix: "quick-1".to_owned(),
    };
    let blob = format::encode(&cut.head, &cut.image).unwrap();
    plane
        .put_snapshot(name.to_string(), blob.into())
        .await
        .unwrap();
    until(async || metric(&running, "restores_total{cause=\"fell_off\"} 1")).await;
    until(async || running.handle.held(&source(W)) == shim.pairs).await;
    until(async || {
        running.heartbeat(&shim).await;
        state(&running).0 == SourceState::Exact
    })
    .await;
    assert!(timeout(60 * SECOND, requests.next()).await.is_err());
}

/// Heartbeats are read in between; then what is missing is asked for.
#[tokio::test(start_paused = true)]
async fn who_falls_off_the_log_waits_for_a_slow_store_only_briefly() {
    let plane = small();
    let running = Running::start_keeping(plane.clone(), "slow");
    sleep(SECOND).await;
    let mut shim = TestShim::new(W);
    let mut idle = TestShim::new("w2/0");
    for shim in [&mut idle, &mut shim] {
        running
            .publish(&shim.record(vec![stored("", "a", Tier::Gpu)]))
            .await;
    }
    snapshotted(&plane, running.handle.position()).await;
    let subject = running.subjects.resync(&source(W).worker);
    let mut requests = plane.subscribe(subject).await.unwrap();
    plane.stall_snapshots(true);
    let mut last = LogPosition(0);
    // A snapshot above the gap, of which no more is read than its name.
    let name = Name {
        log: IDENTITY,
        position: LogPosition(9_999),
        suffix: "quick-1".to_owned(),
    };
    let blob = Bytes::from_static(b"never read");
    plane.put_snapshot(name.to_string(), blob).await.unwrap();
    // No other task runs between these: the log goes on without its reader.
    while plane.log_status().await.unwrap().first <= LogPosition(10) {
        last = append(&plane, &shim.record(vec![stored("", "b", Tier::Gpu)])).await;
    }
    while running.handle.position() < last {
        assert_eq!(state_of(&running, &idle), SourceState::Exact);
        sleep(SECOND / 2).await;
        running.heartbeat(&idle).await;
        sleep(Duration::from_millis(1)).await;
    }
    let request = requests.next().await.unwrap();
    let request: ResyncRequest = codec::decode(&request.payload).unwrap();
    assert_eq!(request.reason, ResyncReason::Gap);
}

#[tokio::test(start_paused = true)]
async fn many_queries_at_once_are_all_answered() {
    let (running, _) = running().await;
    let mut long = query_for("a b c");
    long.blocks.resize(100_000, warmroute_proto::LocalHash(1));
    let ask = async |number: usize| {
        let query = if number.is_multiple_of(8) {
            &long
        } else {
            &query_for("a b c")
        };
        let payload = codec::encode(query).unwrap();
        let subject = running.subjects.query();
        let reply = running.plane.request(subject, payload.into(), SECOND).await;
        only(codec::decode(&reply.unwrap()).unwrap()).run.gpu
    };
    let answers = futures_util::future::join_all((0..60).map(ask)).await;
    assert!(answers.iter().all(|&run| run == 2));
    let mut ahead = query_for("a");
    ahead.at_least = Some(LogPosition(9));
    let payload = codec::encode(&ahead).unwrap();
    let subject = running.subjects.query();
    let reply = running.plane.request(subject, payload.into(), SECOND).await;
    let position = LogPosition(1);
    let behind: IndexAnswer = codec::decode(&reply.unwrap()).unwrap();
    assert_eq!(behind, IndexAnswer::Behind { position });
}
