//! The plane on NATS against a real server: the suite of every plane, and what only servers do.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking, its helpers too"
)]

mod conformance;
#[path = "nats/core.rs"]
mod core_nats;
mod nats_server;
#[path = "nats/settings.rs"]
mod settings;

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE;
use bytes::Bytes;
use conformance::{Fixture, Steps};
use futures_util::{FutureExt as _, StreamExt as _};
use nats_server::NatsServer;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use warmroute_plane::{
    Broadcast, Connection, InitConfig, Lease, LeaseWrite, LogTail, NatsAuth, NatsConfig, NatsError,
    NatsPlane, Plane, PlaneError, PutIf, RegistryEvent,
};
use warmroute_proto::{LogPosition, Namespace};

/// Nothing here takes long; this only keeps a broken test from waiting for ever.
const SOON: Duration = Duration::from_secs(30);

struct Nats {
    plane: NatsPlane,
    server: NatsServer,
}

fn config(server: &NatsServer) -> NatsConfig {
    NatsConfig::new(server.url(), Namespace::from("t"), "test")
}

fn sizes() -> InitConfig {
    InitConfig {
        max_bytes: conformance::LOG_BYTES as u64,
        max_age: Duration::from_secs(3600),
        snapshots_max_bytes: 64 << 20,
        ..InitConfig::default()
    }
}

async fn nats() -> Nats {
    let server = NatsServer::start().await;
    let plane = NatsPlane::init(config(&server), sizes()).await.unwrap();
    Nats { plane, server }
}

impl Nats {
    async fn recreate(&self) {
        let client = async_nats::connect(self.server.url()).await.unwrap();
        let jetstream = async_nats::jetstream::new(client);
        jetstream.delete_stream("wr_t").await.unwrap();
        let init = NatsPlane::init(config(&self.server), sizes());
        init.await.unwrap();
    }
}

impl Fixture for Nats {
    fn plane(&self) -> Arc<dyn Plane> {
        Arc::new(self.plane.clone())
    }

    fn recreate_log(&self) -> Steps<'_> {
        Box::pin(self.recreate())
    }
}

conformance::suite!(suite, super::nats);

/// The answer waits in the socket while its asker has no processor until after the deadline.
#[tokio::test]
async fn an_answer_that_came_in_time_is_not_late() {
    let Nats { plane, server } = nats().await;
    let config = config(&server);
    let (taken, mut asked) = mpsc::channel(1);
    let answer_all = async move {
        let other = NatsPlane::connect(config).await.unwrap();
        let mut requests = other.serve("wr.t.query".into()).await.unwrap();
        taken.send(()).await.unwrap();
        while let Some(request) = requests.next().await {
            request.reply.send(Bytes::from("!"));
            taken.send(()).await.unwrap();
        }
    };
    std::thread::spawn(|| {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().unwrap();
        runtime.block_on(answer_all);
    });
    asked.recv().await.unwrap();
    let deadline = Duration::from_millis(500);
    for _ in 0..3 {
        let hold_up = async {
            asked.recv().await.unwrap();
            std::thread::sleep(2 * deadline);
        };
        let request = plane.request("wr.t.query".into(), Bytes::from("?"), deadline);
        let (answer, ()) = tokio::join!(request, hold_up);
        assert_eq!(answer.unwrap(), Bytes::from("!"));
    }
}

const SUBJECT: &str = "wr.t.kv.a.0";

/// A server and a plane with a log that loses nothing to its bounds.
async fn roomy() -> Nats {
    roomy_with(|_| {}).await
}

async fn roomy_with(change: impl FnOnce(&mut NatsConfig)) -> Nats {
    let server = NatsServer::start().await;
    let mut config = config(&server);
    change(&mut config);
    let max_bytes = 64 << 20;
    let init = InitConfig {
        max_bytes,
        ..sizes()
    };
    let plane = NatsPlane::init(config, init).await.unwrap();
    Nats { plane, server }
}

fn number(number: u64) -> Bytes {
    Bytes::from(number.to_string())
}

async fn append(plane: &NatsPlane, payload: Bytes) -> Result<LogPosition, PlaneError> {
    plane.append(SUBJECT.into(), payload).await?.await
}

/// What a publisher has to do: again until it worked.
async fn append_surely(plane: &NatsPlane, payload: Bytes) -> LogPosition {
    let again = async {
        loop {
            if let Ok(position) = append(plane, payload.clone()).await {
                return position;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(SOON, again).await.expect("in time")
}

async fn up(plane: &NatsPlane) {
    let mut connection = plane.connection();
    let up = connection.wait_for(|is| *is == Connection::Up);
    timeout(SOON, up).await.expect("in time").unwrap();
}

/// Reads the numbers of a tail until this one, by the sequencing rule: what came before is dropped,
/// and so is what is ahead. A window that was cut off in front comes again from where it was cut.
async fn numbers_until(tail: &mut LogTail, last: u64) -> Vec<u64> {
    let mut numbers: Vec<u64> = Vec::new();
    let mut position = LogPosition(0);
    while numbers.last() != Some(&last) {
        let batch = timeout(SOON, tail.next()).await.expect("in time").unwrap();
        for message in batch {
            assert!(message.position > position, "positions only grow");
            position = message.position;
            let number = std::str::from_utf8(&message.payload).unwrap();
            let number = number.parse().unwrap();
            if numbers.last().is_none_or(|last| number == last + 1) {
                numbers.push(number);
            }
        }
    }
    numbers
}

async fn ended(tail: &mut LogTail) {
    let end = async { while tail.next().await.is_some() {} };
    timeout(SOON, end).await.expect("the tail ends");
}

/// Go back N, as publishers do: windows of appends in flight, sent again in order after a failure.
/// Returns how many failed.
async fn publish_numbers(plane: &NatsPlane, mut next: u64, last: u64, window: u64) -> usize {
    let mut failures = 0;
    while next <= last {
        let mut acknowledgements = Vec::new();
        for at in next..=last.min(next + window - 1) {
            match plane.append(SUBJECT.into(), number(at)).await {
                Ok(acknowledged) => acknowledgements.push(acknowledged),
                Err(_) => break,
            }
        }
        let sent = acknowledgements.len();
        for acknowledged in acknowledgements {
            if acknowledged.await.is_err() {
                failures += 1;
                break;
            }
            next += 1;
        }
        if sent == 0 {
            failures += 1;
            sleep(Duration::from_millis(20)).await;
        }
    }
    failures
}

#[tokio::test]
async fn a_killed_server_costs_nothing_that_was_acknowledged() {
    let Nats { plane, mut server } = roomy().await;
    let mut tail = plane.tail(LogPosition(0), 1000).await.unwrap();
    let read = numbers_until(&mut tail, 6000);
    let write = async {
        assert_eq!(publish_numbers(&plane, 1, 2000, 64).await, 0);
        let mut in_flight = Vec::new();
        for at in 2001..=2064 {
            in_flight.push(plane.append(SUBJECT.into(), number(at)).await.unwrap());
        }
        server.kill();
        let mut lost = 0;
        for acknowledged in in_flight {
            lost += usize::from(timeout(SOON, acknowledged).await.expect("in time").is_err());
        }
        assert!(lost > 0, "what was in flight fails");
        assert!(
            plane.stats().answers_cut_off > 0,
            "at the disconnect, not by time-outs"
        );
        let down = append(&plane, number(2001)).await;
        assert!(matches!(down, Err(PlaneError::Unavailable(_))));
        server.restart().await;
        publish_numbers(&plane, 2001, 6000, 64).await;
    };
    let (numbers, ()) = tokio::join!(read, write);
    assert_eq!(numbers, (1..=6000).collect::<Vec<u64>>(), "nothing lost");
    let stats = plane.stats();
    assert!(stats.disconnects >= 1 && stats.connects >= 2, "{stats:?}");
}

#[tokio::test]
async fn a_wiped_server_is_another_log_and_an_empty_registry() {
    let Nats { plane, mut server } = roomy().await;
    put_new(&plane, "wr.t.worker.a").await.unwrap();
    let mut watch = plane.watch("wr.t.worker.".into()).await.unwrap();
    for _ in 0..2 {
        watch.next().await.unwrap();
    }
    publish_numbers(&plane, 1, 5, 5).await;
    let before = plane.log_status().await.unwrap();
    let mut tail = plane.tail(LogPosition(0), 1000).await.unwrap();
    numbers_until(&mut tail, 5).await;
    server.kill();
    std::fs::remove_dir_all(server.store()).unwrap();
    server.restart().await;
    up(&plane).await;
    let no_log = append(&plane, number(6)).await;
    assert!(
        matches!(no_log, Err(PlaneError::Unavailable(_))),
        "at once: {no_log:?}"
    );
    let init = NatsPlane::init(config(&server), sizes()).await;
    let other = init.unwrap();
    publish_numbers(&other, 1, 20, 20).await;
    ended(&mut tail).await;
    let after = plane.log_status().await.unwrap();
    assert_ne!(before.identity, after.identity);
    assert_eq!(
        after.last,
        LogPosition(20),
        "positions alone would not tell"
    );
    let key = "wr.t.worker.a".to_owned();
    let gone = timeout(SOON, watch.next()).await.expect("in time");
    assert_eq!(gone, Some(RegistryEvent::Gone { key }));
}

/// The disk of yesterday comes back and the log goes on past the reader: same identity, positions
/// that fit, other messages.
#[tokio::test]
async fn a_log_that_lost_its_end_and_was_refilled_is_seen() {
    let Nats { plane, mut server } = roomy().await;
    publish_numbers(&plane, 1, 3, 3).await;
    server.kill();
    let yesterday = server.store().with_extension("yesterday");
    copy(&server.store(), &yesterday);
    server.restart().await;
    up(&plane).await;
    for at in 4..=6 {
        append_surely(&plane, number(at)).await;
    }
    let mut tail = plane.tail(LogPosition(0), 1000).await.unwrap();
    let mut later = plane.tail(LogPosition(6), 1000).await.unwrap();
    assert!(
        timeout(Duration::from_millis(300), later.next())
            .await
            .is_err()
    );
    numbers_until(&mut tail, 6).await;
    let identity = plane.log_status().await.unwrap().identity;
    server.kill();
    std::fs::remove_dir_all(server.store()).unwrap();
    copy(&yesterday, &server.store());
    server.restart().await;
    for at in 104..=110 {
        append_surely(&plane, number(at)).await;
    }
    let status = plane.log_status().await.unwrap();
    assert_eq!((status.identity, status.last), (identity, LogPosition(10)));
    ended(&mut tail).await;
    ended(&mut later).await;
}

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").args([from, to]).status();
    assert!(copied.unwrap().success());
}

#[tokio::test]
async fn a_deleted_consumer_is_made_again() {
    let Nats { plane, server } = roomy().await;
    publish_numbers(&plane, 1, 3, 3).await;
    let mut tail = plane.tail(LogPosition(0), 1000).await.unwrap();
    numbers_until(&mut tail, 3).await;
    let client = async_nats::connect(server.url()).await.unwrap();
    let stream = async_nats::jetstream::new(client).get_stream("wr_t").await;
    let stream = stream.unwrap();
    let names: Vec<_> = stream.consumer_names().collect().await;
    assert_eq!(names.len(), 1);
    for name in names {
        stream.delete_consumer(&name.unwrap()).await.unwrap();
    }
    publish_numbers(&plane, 4, 9, 6).await;
    assert_eq!(numbers_until(&mut tail, 9).await, [4, 5, 6, 7, 8, 9]);
    assert!(plane.stats().tails_reopened >= 2);
}

/// A requester may name any subject for the answer, and the server permits an answer there.
#[tokio::test]
async fn answers_go_to_inboxes_only() {
    let Nats { plane, server } = roomy().await;
    let mut requests = plane.serve("wr.t.query".into()).await.unwrap();
    let client = async_nats::connect(server.url()).await.unwrap();
    for reply in ["$JS.API.STREAM.DELETE.wr_t", "wr.t.load", "_INBOX.test.1"] {
        let sent = client.publish_with_reply("wr.t.query", reply, number(1));
        sent.await.unwrap();
    }
    let mut answers = client.subscribe("_INBOX.test.*").await.unwrap();
    client.flush().await.unwrap();
    // Dropped without an answer, it is refused with an empty message.
    let request = timeout(SOON, requests.next()).await.expect("in time");
    drop(request);
    let answer = timeout(SOON, answers.next()).await.expect("in time");
    assert!(answer.unwrap().payload.is_empty());
    let jetstream = async_nats::jetstream::new(client);
    jetstream.get_stream("wr_t").await.unwrap();
    let waiting = requests.next().now_or_never();
    assert!(waiting.is_none(), "another request is served");
}

/// A user who may create consumers may name any subject for their deliveries.
#[tokio::test]
async fn what_a_stream_keeps_is_no_broadcast() {
    let Nats { plane, server } = roomy().await;
    let mut broadcasts = plane.subscribe("wr.t.load".into()).await.unwrap();
    append_surely(&plane, number(1)).await;
    let client = async_nats::connect(server.url()).await.unwrap();
    let stream = async_nats::jetstream::new(client).get_stream("wr_t").await;
    let consumer = async_nats::jetstream::consumer::push::Config {
        deliver_subject: "wr.t.load".into(),
        ..Default::default()
    };
    let mut consumer = stream.unwrap().create_consumer(consumer).await.unwrap();
    let delivered = async {
        while consumer.info().await.unwrap().delivered.stream_sequence < 1 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(SOON, delivered).await.expect("in time");
    plane.publish("wr.t.load".into(), number(2)).await.unwrap();
    let first = timeout(SOON, broadcasts.next()).await.expect("in time");
    let Broadcast { subject, payload } = first.unwrap();
    assert_eq!((subject.as_str(), payload), ("wr.t.load", number(2)));
}

#[tokio::test]
async fn a_watch_tells_what_happened_while_the_server_was_away() {
    let Nats { plane, mut server } = roomy().await;
    let put = async |key: &str, lease| {
        let put = plane.put(key.into(), number(1), PutIf::Absent, lease);
        put.await.unwrap()
    };
    put("wr.t.worker.leased", Some(Duration::from_secs(1))).await;
    put("wr.t.worker.kept", None).await;
    let mut watch = plane.watch("wr.t.worker.".into()).await.unwrap();
    for _ in 0..3 {
        watch.next().await.unwrap();
    }
    server.kill();
    sleep(Duration::from_secs(1)).await;
    server.restart().await;
    up(&plane).await;
    put("wr.t.worker.new", None).await;
    let mut told = Vec::new();
    for _ in 0..2 {
        told.push(match timeout(SOON, watch.next()).await.expect("in time") {
            Some(RegistryEvent::Put { key, .. }) => key,
            Some(RegistryEvent::Gone { key }) => format!("{key} gone"),
            Some(RegistryEvent::Current) => "current twice".to_owned(),
            None => "end".to_owned(),
        });
    }
    told.sort_unstable();
    assert_eq!(told, ["wr.t.worker.leased gone", "wr.t.worker.new"]);
}

/// The renewal came through, its acknowledgement did not.
#[tokio::test]
async fn a_renewal_without_an_answer_is_found_again() {
    let Nats { plane, mut server } = roomy().await;
    let ttl = Duration::from_secs(60);
    let acquire = async |key: &str| {
        let shared: Arc<dyn Plane> = Arc::new(plane.clone());
        let lease = Lease::acquire(shared, key.into(), "one".into(), ttl).await;
        let revision = plane.get(key.into()).await.unwrap().unwrap().revision;
        (lease.unwrap().expect("the lease is free"), revision)
    };
    let (mut own, own_revision) = acquire("wr.t.own").await;
    let (mut other, other_revision) = acquire("wr.t.other").await;
    server.kill();
    for lease in [&mut own, &mut other] {
        assert!(lease.write("two".into()).await.is_err());
    }
    server.restart().await;
    up(&plane).await;
    let write = async |key: &str, value: &'static str, revision| {
        let condition = PutIf::Revision(revision);
        let put = plane.put(key.into(), value.into(), condition, Some(ttl));
        put.await.unwrap();
    };
    write("wr.t.own", "two", own_revision).await;
    write("wr.t.other", "a stranger", other_revision).await;
    for value in ["three", "four"] {
        let written = own.write(value.into()).await.unwrap();
        assert!(matches!(written, LeaseWrite::Held(_)));
    }
    assert_eq!(other.write("three".into()).await, Ok(LeaseWrite::Lost));
}

#[tokio::test]
async fn a_slow_consumer_is_counted_and_loses_no_record() {
    let Nats { plane, .. } = &roomy_with(|config| config.queue_max = 16).await;
    let mut unread = plane.subscribe("wr.t.load".into()).await.unwrap();
    for at in 0..200 {
        plane.publish("wr.t.load".into(), number(at)).await.unwrap();
    }
    // Behind those on the same connection, so they are all here.
    publish_numbers(plane, 1, 500, 8).await;
    let counted = async {
        while plane.stats().slow_consumers == 0 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(SOON, counted).await.expect("counted");
    let oldest = unread.next().await.map(|message| message.payload);
    assert_eq!(oldest, Some(number(0)), "the oldest stay");
    let mut tail = plane.tail(LogPosition(0), 1000).await.unwrap();
    assert_eq!(numbers_until(&mut tail, 500).await.len(), 500);
}

#[tokio::test]
async fn only_init_sets_up_and_nobody_repairs() {
    let server = NatsServer::start().await;
    let mut elsewhere = config(&server);
    elsewhere.url = "nats://127.0.0.1:1".to_owned();
    let refused = NatsPlane::connect(elsewhere).await.err().unwrap();
    assert!(matches!(refused, NatsError::Unreachable(_)), "{refused}");
    let empty = NatsPlane::connect(config(&server)).await.err().unwrap();
    let NatsError::Mismatch(missing) = &empty else {
        panic!("{empty}");
    };
    assert_eq!(missing.len(), 3);
    assert!(
        empty.to_string().contains("KV_wr_t: stream is missing"),
        "{empty}"
    );

    let plane = NatsPlane::init(config(&server), sizes()).await.unwrap();
    let identity = plane.log_status().await.unwrap().identity;
    append(&plane, number(1)).await.unwrap();
    let again = NatsPlane::init(config(&server), sizes()).await.unwrap();
    let status = again.log_status().await.unwrap();
    assert_eq!((status.identity, status.last), (identity, LogPosition(1)));
    let other = InitConfig {
        max_bytes: 1 << 20,
        ..sizes()
    };
    let differs = NatsPlane::init(config(&server), other).await.err().unwrap();
    let must_be = "wr_t: max_bytes is 65536, must be 1048576";
    assert!(differs.to_string().contains(must_be), "{differs}");
    NatsPlane::connect(config(&server)).await.unwrap();

    let client = async_nats::connect(server.url()).await.unwrap();
    let jetstream = async_nats::jetstream::new(client);
    let mut stream = jetstream.get_stream("wr_t").await.unwrap();
    let mut changed = stream.info().await.unwrap().config.clone();
    changed.max_age = Duration::ZERO;
    jetstream.update_stream(changed).await.unwrap();
    let refused = NatsPlane::connect(config(&server)).await.err().unwrap();
    assert!(
        refused
            .to_string()
            .contains("wr_t: max_age is 0ns, must be bounded")
    );
    let mut narrow = stream.info().await.unwrap().config.clone();
    narrow.max_message_size = 4096;
    jetstream.update_stream(narrow).await.unwrap();
    let refused = NatsPlane::init(config(&server), sizes()).await.err();
    let must_be = "wr_t: max_msg_size is 4096, must be -1, or at least 1048576";
    let refused = refused.unwrap().to_string();
    assert!(refused.contains(must_be), "{refused}");
}

/// What lies in the store may be damaged: it is no reason to run out of memory, nor to miss the
/// others.
#[tokio::test]
async fn a_damaged_description_of_a_snapshot_stands_in_nobodys_way() {
    let Nats { plane, server } = nats().await;
    plane.put_snapshot("whole".into(), number(7)).await.unwrap();
    let client = async_nats::connect(server.url()).await.unwrap();
    let jetstream = async_nats::jetstream::new(client);
    let describe = async |name: &str, text: String| {
        let subject = format!("$O.wr_t.M.{}", URL_SAFE.encode(name));
        let published = jetstream.publish(subject, text.into()).await.unwrap();
        published.await.unwrap();
    };
    let huge = |chunks: u64| {
        let size = i64::MAX;
        format!(r#"{{"name":"huge","bucket":"wr_t","nuid":"n","size":{size},"chunks":{chunks}}}"#)
    };
    describe("junk", "no JSON".into()).await;
    for chunks in [0, 1, u64::MAX] {
        describe("huge", huge(chunks)).await;
        assert_eq!(
            plane.get_snapshot("huge".into()).await,
            Ok(None),
            "{chunks}"
        );
    }
    // It has a chunk, and claims to be larger than a chunk can be.
    let chunk = jetstream.publish("$O.wr_t.C.n", number(1)).await.unwrap();
    chunk.await.unwrap();
    describe("huge", huge(1)).await;
    assert_eq!(plane.get_snapshot("huge".into()).await, Ok(None));
    assert_eq!(plane.get_snapshot("junk".into()).await, Ok(None));
    assert_eq!(plane.snapshots().await.unwrap(), ["huge", "whole"]);
    assert_eq!(
        plane.get_snapshot("whole".into()).await,
        Ok(Some(number(7)))
    );
    assert!(plane.stats().snapshots_torn >= 6);
    for name in ["junk", "huge"] {
        plane.delete_snapshot(name.into()).await.unwrap();
        plane.put_snapshot(name.into(), number(8)).await.unwrap();
        assert_eq!(plane.get_snapshot(name.into()).await, Ok(Some(number(8))));
    }
}

/// Three servers that know each other.
async fn cluster() -> [NatsServer; 3] {
    // Routes are named before the servers listen; the ports were free a moment ago.
    let ports = [(); 3].map(|()| {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        socket.local_addr().unwrap().port()
    });
    let route = |port| format!("nats://127.0.0.1:{port}");
    let start = async |index: usize| {
        let arguments = [
            "-js".to_owned(),
            "--name".to_owned(),
            format!("n{index}"),
            "--cluster_name".to_owned(),
            "test".to_owned(),
            "--cluster".to_owned(),
            route(ports[index]),
            "--routes".to_owned(),
            ports.map(route).join(","),
        ];
        NatsServer::start_with(&arguments.map(OsString::from), &[]).await
    };
    [start(0).await, start(1).await, start(2).await]
}

/// Requests for messages end by their bytes; what follows is asked for again.
#[tokio::test]
async fn what_is_larger_than_one_request_is_read_whole() {
    const MIB: usize = 1 << 20;
    let server = NatsServer::start().await;
    let sizes = InitConfig {
        max_bytes: 64 << 20,
        ..sizes()
    };
    let plane = NatsPlane::init(config(&server), sizes).await.unwrap();
    let blob: Bytes = (0..20 * MIB).map(|at| (at / 7) as u8).collect();
    plane
        .put_snapshot("large".into(), blob.clone())
        .await
        .unwrap();
    let found = plane.get_snapshot("large".into()).await.unwrap();
    assert!(found == Some(blob), "20 MiB");
    let records = 300;
    let payload = Bytes::from(vec![1; 64 << 10]);
    for _ in 0..records {
        let appended = plane.append("wr.t.kv.a.0".into(), payload.clone()).await;
        appended.unwrap().await.unwrap();
    }
    let mut tail = plane.tail(LogPosition(0), 1000).await.unwrap();
    let mut position = 0;
    while position < records {
        let batch = timeout(SOON, tail.next()).await.expect("in time");
        for message in batch.expect("the tail goes on") {
            position += 1;
            assert_eq!(message.position, LogPosition(position));
            assert_eq!(message.payload, payload);
        }
    }
}

#[tokio::test]
async fn a_killed_leader_costs_nothing() {
    let mut servers = cluster().await;
    let urls: Vec<String> = servers.iter().map(NatsServer::url).collect();
    let mut config = config(&servers[0]);
    config.url = urls.join(",");
    let init = InitConfig {
        max_bytes: 64 << 20,
        replicas: 3,
        ..sizes()
    };
    let elected = async {
        loop {
            match NatsPlane::init(config.clone(), init).await {
                Ok(plane) => return plane,
                Err(_) => sleep(Duration::from_millis(100)).await,
            }
        }
    };
    let plane = timeout(SOON, elected).await.expect("a leader in time");
    let identity = plane.log_status().await.unwrap().identity;
    let mut tail = plane.tail(LogPosition(0), 1000).await.unwrap();
    let mut watch = plane.watch("wr.t.worker.".into()).await.unwrap();
    assert_eq!(watch.next().await, Some(RegistryEvent::Current));
    let write = async {
        publish_numbers(&plane, 1, 500, 64).await;
        let client = async_nats::connect(urls[0].as_str()).await.unwrap();
        let jetstream = async_nats::jetstream::new(client);
        let info = jetstream
            .get_stream("wr_t")
            .await
            .unwrap()
            .cached_info()
            .clone();
        let leader = info.cluster.unwrap().leader.unwrap();
        let index: usize = leader.trim_start_matches('n').parse().unwrap();
        servers[index].kill();
        publish_numbers(&plane, 501, 1000, 64).await;
        let put = async {
            // A conflict is with ourselves: an earlier try whose acknowledgement was lost.
            let done = [Ok(()), Err(PlaneError::Conflict)];
            while !done.contains(&put_new(&plane, "wr.t.worker.a").await) {
                sleep(Duration::from_millis(100)).await;
            }
        };
        timeout(SOON, put).await.expect("the registry goes on");
    };
    let (numbers, ()) = tokio::join!(numbers_until(&mut tail, 1000), write);
    assert_eq!(numbers, (1..=1000).collect::<Vec<u64>>());
    assert_eq!(plane.log_status().await.unwrap().identity, identity);
    let told = timeout(SOON, watch.next()).await.expect("in time");
    assert!(matches!(told, Some(RegistryEvent::Put { .. })), "{told:?}");
}

/// The shipped configuration, and who connects to it.
struct Shipped {
    server: NatsServer,
}

impl Shipped {
    async fn start() -> Self {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/nats/nats.conf");
        let passwords = [
            "INIT", "DOCTOR", "INDEXER", "ROUTER", "SHIM", "SHIM_0", "SHIM_1",
        ];
        let names = passwords.map(|name| format!("WR_{name}_PASSWORD"));
        let environment: Vec<(&str, &str)> = names.iter().map(|name| (&**name, "pw")).collect();
        let arguments: [OsString; 4] = ["-c".into(), file.into(), "-m".into(), "-1".into()];
        let server = NatsServer::start_with(&arguments, &environment).await;
        let shipped = Self { server };
        let init = NatsPlane::init(shipped.config("init"), sizes());
        init.await.unwrap();
        shipped
    }

    fn config(&self, user: &str) -> NatsConfig {
        let mut config = NatsConfig::new(self.server.url(), Namespace::from("prod"), user);
        config.auth = NatsAuth::UserPassword {
            user: user.to_owned(),
            password: "pw".to_owned(),
        };
        config
    }

    async fn connect(&self, user: &str) -> NatsPlane {
        NatsPlane::connect(self.config(user)).await.unwrap()
    }
}

async fn put_new(plane: &NatsPlane, key: &str) -> Result<(), PlaneError> {
    let put = plane.put(key.into(), number(1), PutIf::Absent, None);
    put.await.map(drop)
}

async fn append_to(plane: &NatsPlane, subject: &str) -> Result<LogPosition, PlaneError> {
    plane.append(subject.into(), number(1)).await?.await
}

fn is_refused<T>(result: &Result<T, PlaneError>) -> bool {
    matches!(result, Err(PlaneError::Unavailable(_)))
}

const OWN: &str = "wr.prod.kv.worker-0.0";

#[tokio::test]
async fn a_shim_writes_its_own_worker_only() {
    let shipped = Shipped::start().await;
    let nobody = NatsPlane::connect(shipped.config("nobody")).await.err();
    assert!(matches!(nobody, Some(NatsError::Refused(_))), "{nobody:?}");
    let shim = shipped.connect("shim-worker-0").await;
    let indexer = shipped.connect("indexer").await;
    let router = shipped.connect("router").await;

    assert_eq!(append_to(&shim, OWN).await, Ok(LogPosition(1)));
    for key in ["worker.worker-0", "shim.worker-0", "generation.worker-0.0"] {
        let key = format!("wr.prod.{key}");
        assert_eq!(put_new(&shim, &key).await, Ok(()), "{key}");
        let again = put_new(&shim, &key).await;
        assert_eq!(
            again,
            Err(PlaneError::Conflict),
            "the shim may look why: {key}"
        );
    }
    assert!(shim.last_on(OWN.into()).await.unwrap().is_some());
    let resyncs = shim.subscribe("wr.prod.resync.worker-0".into()).await;
    assert!(resyncs.is_ok());

    let refused = tokio::join!(
        append_to(&shim, "wr.prod.kv.worker-1.0"),
        put_new(&shim, "wr.prod.worker.worker-1"),
        put_new(&shim, "wr.prod.generation.worker-1.0"),
        shim.put_snapshot("s".into(), number(1)),
        append_to(&indexer, OWN),
        append_to(&router, OWN),
        put_new(&router, "wr.prod.worker.worker-1"),
        put_new(&shim, "wr.prod.drain.worker-0"),
        put_new(&indexer, "wr.prod.drain.worker-0"),
    );
    assert!(is_refused(&refused.0) && is_refused(&refused.1) && is_refused(&refused.2));
    assert!(is_refused(&refused.3) && is_refused(&refused.4) && is_refused(&refused.5));
    assert!(is_refused(&refused.6) && is_refused(&refused.7) && is_refused(&refused.8));
    let doctor = shipped.connect("doctor").await;
    let refused = tokio::join!(
        append_to(&doctor, OWN),
        put_new(&doctor, "wr.prod.snapshot.newest"),
        doctor.put_snapshot("d".into(), number(1)),
    );
    assert!(is_refused(&refused.0) && is_refused(&refused.1) && is_refused(&refused.2));
    let status = indexer.log_status().await.unwrap();
    assert_eq!(status.last, LogPosition(1), "none of them came through");
    for key in ["wr.prod.worker.worker-1", "wr.prod.generation.worker-1.0"] {
        assert_eq!(indexer.get(key.into()).await, Ok(None));
    }
    let complaint = shim.last_server_error().unwrap();
    assert!(complaint.contains("Permissions Violation"), "{complaint}");
}

#[tokio::test]
async fn every_role_may_do_its_work() {
    let shipped = Shipped::start().await;
    let shim = shipped.connect("shim-worker-0").await;
    let indexer = shipped.connect("indexer").await;
    let router = shipped.connect("router").await;
    append_to(&shim, OWN).await.unwrap();
    put_new(&shim, "wr.prod.worker.worker-0").await.unwrap();

    let mut tail = indexer.tail(LogPosition(0), 10).await.unwrap();
    assert_eq!(numbers_until(&mut tail, 1).await, [1]);
    assert!(indexer.at(LogPosition(1)).await.unwrap().is_some());
    for plane in [&indexer, &router] {
        let mut workers = plane.watch("wr.prod.worker.".into()).await.unwrap();
        let first = timeout(SOON, workers.next()).await.expect("in time");
        assert!(matches!(first, Some(RegistryEvent::Put { .. })));
    }
    indexer.put_snapshot("s".into(), number(7)).await.unwrap();
    assert_eq!(indexer.get_snapshot("s".into()).await, Ok(Some(number(7))));
    assert_eq!(indexer.snapshots().await.unwrap(), ["s"]);
    indexer.delete_snapshot("s".into()).await.unwrap();
    put_new(&indexer, "wr.prod.snapshot.newest").await.unwrap();
    put_new(&router, "wr.prod.router.r1").await.unwrap();
    put_new(&router, "wr.prod.drain.worker-0").await.unwrap();

    let mut queries = indexer.serve("wr.prod.query".into()).await.unwrap();
    let ask = router.request("wr.prod.query".into(), number(1), SOON);
    let (answer, ()) = tokio::join!(ask, async {
        let request = queries.next().await.unwrap();
        request.reply.send(number(2));
    });
    assert_eq!(answer, Ok(number(2)));
    let check = async |from: &NatsPlane, to: &NatsPlane, subject: &str| {
        let mut heard = to.subscribe(subject.into()).await.unwrap();
        from.publish(subject.into(), number(3)).await.unwrap();
        let heard = timeout(SOON, heard.next()).await.expect("in time");
        let told = Broadcast {
            subject: subject.into(),
            payload: number(3),
        };
        assert_eq!(heard, Some(told), "{subject}");
    };
    check(&router, &router, "wr.prod.load").await;
    check(&indexer, &shim, "wr.prod.resync.worker-0").await;
    check(&shim, &indexer, "wr.prod.hb.worker-0.0").await;
}
