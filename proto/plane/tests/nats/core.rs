//! The plane without a log server, on a real nats-server without JetStream: the suite of every
//! plane, and how its processes come to agree.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::StreamExt as _;
use tokio::time::{sleep, timeout};
use warmroute_plane::{
    Connection, CorePlane, CorePlaneConfig, NatsBus, NatsConfig, Plane, PlaneError, PutIf,
    RegistryEvent,
};
use warmroute_proto::peers::RegistryPageRequest;
use warmroute_proto::{LogPosition, Namespace, codec};

use crate::conformance::{self, Fixture, Steps};
use crate::nats_server::NatsServer;

/// Only a defect takes longer.
const SOON: Duration = Duration::from_secs(30);

type Core = CorePlane<NatsBus>;

struct Alone {
    plane: Core,
    _server: NatsServer,
}

/// The plane of another process.
async fn process(server: &NatsServer) -> Core {
    static STARTED: AtomicU64 = AtomicU64::new(1);
    let id = STARTED.fetch_add(1, Ordering::Relaxed);
    let namespace = Namespace::from("t");
    let config = NatsConfig::new(server.url(), namespace.clone(), format!("process-{id}"));
    let bus = NatsBus::connect(config).await.unwrap();
    let unix = SystemTime::UNIX_EPOCH.elapsed().unwrap();
    let config = CorePlaneConfig {
        namespace,
        id,
        unix_ns: u64::try_from(unix.as_nanos()).unwrap(),
        log_bytes_max: conformance::LOG_BYTES,
    };
    let plane = CorePlane::start(bus, config);
    assert!(plane.joined(SOON).await);
    plane
}

async fn without_jetstream() -> NatsServer {
    NatsServer::start_with(&[], &[]).await
}

async fn alone() -> Alone {
    let server = without_jetstream().await;
    let plane = process(&server).await;
    Alone {
        plane,
        _server: server,
    }
}

impl Fixture for Alone {
    fn plane(&self) -> Arc<dyn Plane> {
        Arc::new(self.plane.clone())
    }

    fn recreate_log(&self) -> Steps<'_> {
        panic!("the log lives as long as its process")
    }
}

conformance::suite!(without_log_server suite, crate::core_nats::alone);

fn bytes(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

async fn value(plane: &Core, key: &str) -> Option<Bytes> {
    let entry = plane.get(key.to_owned()).await.ok()?;
    entry.map(|entry| entry.value)
}

/// Until every process has this value, or none.
async fn until_all_have(planes: &[&Core], key: &str, wanted: Option<&str>) {
    let all = async {
        for plane in planes {
            while value(plane, key).await != wanted.map(bytes) {
                sleep(Duration::from_millis(20)).await;
            }
        }
    };
    timeout(SOON, all).await.expect("all have it");
}

async fn put(plane: &Core, key: &str, value: &str) {
    let put = plane.put(key.to_owned(), bytes(value), PutIf::Always, None);
    put.await.unwrap();
}

async fn connection(plane: &Core, wanted: Connection) {
    let mut connection = plane.connection();
    let is = connection.wait_for(|is| *is == wanted);
    timeout(SOON, is).await.expect("in time").unwrap();
}

/// Before anything else: a shim would claim a generation that is in use.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_joins_has_the_registry_of_the_others() {
    let server = without_jetstream().await;
    let one = process(&server).await;
    put(&one, "wr.t.generation.w.0", "7").await;
    let pages = async || {
        let request = codec::encode(&RegistryPageRequest::default()).unwrap();
        let pages = one.request("wr.t.core.pages".to_owned(), request.into(), SOON);
        pages.await
    };
    while pages().await.is_err() {
        sleep(Duration::from_millis(100)).await;
    }
    let two = process(&server).await;
    assert_eq!(value(&two, "wr.t.generation.w.0").await, Some(bytes("7")));
}

/// Processes that start together have nothing for each other at first.
#[tokio::test(flavor = "multi_thread")]
async fn what_one_process_lacks_is_found_by_digests() {
    let server = without_jetstream().await;
    let one = process(&server).await;
    put(&one, "wr.t.generation.w.0", "7").await;
    let two = process(&server).await;
    until_all_have(&[&two], "wr.t.generation.w.0", Some("7")).await;
    let entry = two.get("wr.t.generation.w.0".to_owned()).await.unwrap();
    let condition = PutIf::Revision(entry.unwrap().revision);
    let write = two.put(
        "wr.t.generation.w.0".to_owned(),
        bytes("8"),
        condition,
        None,
    );
    write.await.unwrap();
    until_all_have(&[&one], "wr.t.generation.w.0", Some("8")).await;
    let stale = one.put(
        "wr.t.generation.w.0".to_owned(),
        bytes("9"),
        condition,
        None,
    );
    assert_eq!(stale.await, Err(PlaneError::Conflict));
    let clock = async |plane: &Core| plane.log_status().await.unwrap().now_unix_ns;
    let (first, second) = (clock(&one).await, clock(&two).await);
    assert!(first.abs_diff(second) < SOON.as_nanos().try_into().unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_is_not_renewed_ends_everywhere() {
    let server = without_jetstream().await;
    let (one, two) = (process(&server).await, process(&server).await);
    let mut watch = two.watch("wr.t.worker.".to_owned()).await.unwrap();
    let mut seen = async || timeout(SOON, watch.next()).await.unwrap().unwrap();
    assert_eq!(seen().await, RegistryEvent::Current);
    let lease = Some(Duration::from_secs(1));
    let key = "wr.t.worker.a".to_owned();
    let put = one.put(key.clone(), bytes("x"), PutIf::Absent, lease);
    put.await.unwrap();
    drop(one);
    assert!(matches!(seen().await, RegistryEvent::Put { .. }));
    assert_eq!(seen().await, RegistryEvent::Gone { key });
}

/// Records reach every reader; those from before a reader do not.
#[tokio::test(flavor = "multi_thread")]
async fn each_reader_has_a_log_of_its_own() {
    let server = without_jetstream().await;
    let (shim, early) = (process(&server).await, process(&server).await);
    let append = async |payload: &str| {
        let appended = shim.append("wr.t.kv.w.0".to_owned(), bytes(payload)).await;
        appended.unwrap().await.unwrap()
    };
    let mut of_early = early.tail(LogPosition(0), 1).await.unwrap();
    append("a").await;
    let late = process(&server).await;
    let mut of_late = late.tail(LogPosition(0), 1).await.unwrap();
    append("b").await;
    for payload in ["a", "b"] {
        let batch = timeout(SOON, of_early.next()).await.unwrap().unwrap();
        assert_eq!(batch[0].payload, bytes(payload));
    }
    let batch = timeout(SOON, of_late.next()).await.unwrap().unwrap();
    assert_eq!(batch[0].payload, bytes("b"));
    let log = async |plane: &Core| plane.log_status().await.unwrap().identity;
    let (of_early, of_late) = (log(&early).await, log(&late).await);
    assert!(of_early.is_of_one_reader() && of_early != of_late);
}

/// The server stores nothing. The processes have what was written, also during the outage, as far
/// as one of them has it.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_costs_no_registry() {
    let mut server = without_jetstream().await;
    let (one, two) = (process(&server).await, process(&server).await);
    put(&one, "wr.t.drain.w", "draining").await;
    until_all_have(&[&two], "wr.t.drain.w", Some("draining")).await;
    let lease = Some(Duration::from_secs(1));
    let held = one.put("wr.t.worker.w".to_owned(), bytes("x"), PutIf::Absent, lease);
    held.await.unwrap();
    until_all_have(&[&two], "wr.t.worker.w", Some("x")).await;
    server.kill();
    for plane in [&one, &two] {
        connection(plane, Connection::Down).await;
        let refused = plane.get("wr.t.drain.w".to_owned()).await;
        assert!(matches!(refused, Err(PlaneError::Unavailable(_))));
        let append = plane.append("wr.t.kv.w.0".to_owned(), bytes("lost")).await;
        assert!(append.is_err());
        assert!(plane.log_status().await.is_err());
    }
    // Longer than the lease: what was not received does not end it.
    sleep(Duration::from_secs(2)).await;
    server.restart().await;
    for plane in [&one, &two] {
        connection(plane, Connection::Up).await;
        assert!(plane.joined(SOON).await);
    }
    until_all_have(&[&one, &two], "wr.t.worker.w", Some("x")).await;
    until_all_have(&[&one, &two], "wr.t.drain.w", Some("draining")).await;
    until_all_have(&[&one, &two], "wr.t.worker.w", None).await;
    let appended = one.append("wr.t.kv.w.0".to_owned(), bytes("back")).await;
    appended.unwrap().await.unwrap();
}
