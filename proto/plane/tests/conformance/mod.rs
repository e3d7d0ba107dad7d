//! What every [`Plane`] has to do. `suite!(name, factory)` makes one test of each check; the
//! factory gives a fresh [`Fixture`] whose log keeps about [`LOG_BYTES`].
//!
//! `suite!(without_log_server name, factory)` leaves out what a plane without a log server does
//! differently, and no more:
//! - its log lives and ends with its process, so that no tail outlives it:
//!   `a_tail_ends_with_its_log`;
//! - it has no snapshots: `snapshots_are_immutable`,
//!   `one_of_two_writers_of_a_snapshot_name_wins`.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use tokio::time::timeout;
use warmroute_plane::{
    Broadcast, Connection, Lease, LeaseWrite, LogMessage, LogTail, Plane, PlaneError, PlaneStream,
    PutIf, RegistryEvent, Revision, ServiceRequest,
};
use warmroute_proto::LogPosition;

/// The log of a plane under test keeps about this many bytes.
pub(crate) const LOG_BYTES: usize = 64 << 10;

const SOON: Duration = Duration::from_secs(10);

/// A plane and what can happen to it.
pub(crate) trait Fixture: Sync {
    fn plane(&self) -> Arc<dyn Plane>;

    /// Destroys the log and makes another one, empty.
    fn recreate_log(&self) -> Steps<'_>;
}

pub(crate) type Steps<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

macro_rules! suite {
    ($name:ident, $factory:path) => {
        mod $name {
            use $crate::conformance::{self, Fixture as _, check};

            #[tokio::test]
            async fn a_tail_ends_with_its_log() {
                check::a_tail_ends_with_its_log(&$factory().await).await;
            }

            conformance::suite!(@each $factory;
                snapshots_are_immutable,
                one_of_two_writers_of_a_snapshot_name_wins,
            );
            conformance::suite!(@all $factory);
        }
    };
    (without_log_server $name:ident, $factory:path) => {
        mod $name {
            use $crate::conformance::{self, Fixture as _, check};

            conformance::suite!(@all $factory);
        }
    };
    (@all $factory:path) => {
            conformance::suite!(@each $factory;
                appends_are_ordered_and_acknowledged,
                appends_do_not_wait_for_their_answers_to_be_read,
                tail_continues_behind_a_position,
                tail_waits_and_wakes,
                tail_survives_a_dropped_wait,
                a_tail_beyond_the_end_ends,
                log_is_bounded_and_shows_what_fell_off,
                log_finds_the_last_of_a_subject,
                registry_writes_are_conditional,
                a_lease_runs_out_unless_renewed,
                a_lease_has_one_holder,
                watch_reports_present_keys_then_changes,
                watch_sees_a_lease_end,
                watch_compares_whole_prefixes,
                requests_are_answered_by_one_server,
                unserved_requests_fail,
                broadcast_reaches_all_listeners,
                oversized_payloads_are_refused,
                starts_connected,
            );
    };
    (@each $factory:path; $($check:ident),+ $(,)?) => {
        $(
            #[tokio::test]
            async fn $check() {
                let fixture = $factory().await;
                check::$check(fixture.plane()).await;
            }
        )+
    };
}
pub(crate) use suite;

fn bytes(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

async fn append(plane: &dyn Plane, subject: &str, payload: &str) -> LogPosition {
    let appended = plane.append(subject.into(), bytes(payload)).await.unwrap();
    appended.await.unwrap()
}

async fn soon<T>(stream: &mut PlaneStream<T>) -> T {
    timeout(SOON, stream.next())
        .await
        .expect("in time")
        .expect("not ended")
}

/// Reads a tail until it delivered this many messages.
async fn read(tail: &mut LogTail, count: usize) -> Vec<LogMessage> {
    let mut messages = Vec::new();
    while messages.len() < count {
        let batch = soon(tail).await;
        assert!(!batch.is_empty(), "a batch has at least one message");
        messages.extend(batch);
    }
    messages
}

fn payloads(messages: &[LogMessage]) -> Vec<&str> {
    messages
        .iter()
        .map(|message| std::str::from_utf8(&message.payload).unwrap())
        .collect()
}

pub(crate) mod check {
    use super::*;

    pub(crate) async fn appends_are_ordered_and_acknowledged(plane: Arc<dyn Plane>) {
        let empty = plane.log_status().await.unwrap();
        assert_eq!((empty.first.0, empty.last.0), (1, 0));
        let mut appended = Vec::new();
        for index in 0..50 {
            let payload = bytes(&index.to_string());
            appended.push(plane.append("wr.t.kv.a.0".into(), payload).await.unwrap());
        }
        let mut positions = Vec::new();
        for acknowledged in appended {
            positions.push(acknowledged.await.unwrap().0);
        }
        assert_eq!(positions, (1..=50).collect::<Vec<u64>>());
        let status = plane.log_status().await.unwrap();
        assert_eq!(status.identity, empty.identity);
        assert_eq!((status.first.0, status.last.0), (1, 50));
        let at = plane.at(LogPosition(7)).await.unwrap().unwrap();
        assert_eq!((at.position.0, &at.payload[..]), (7, &b"6"[..]));
        assert_eq!(plane.at(LogPosition(7)).await.unwrap().unwrap(), at);
        assert_eq!(plane.at(LogPosition(51)).await.unwrap(), None);
        let by_one_clock = [empty.now_unix_ns, at.stored_unix_ns, status.now_unix_ns];
        assert!(by_one_clock.is_sorted() && by_one_clock[0] > 0);
    }

    /// More than any bound of what is in flight.
    pub(crate) async fn appends_do_not_wait_for_their_answers_to_be_read(plane: Arc<dyn Plane>) {
        let mut appended = Vec::new();
        for _ in 0..10_000 {
            let append = plane.append("wr.t.kv.a.0".into(), bytes("x"));
            appended.push(append.await.unwrap());
        }
        let last = appended.pop().unwrap().await.unwrap();
        assert_eq!(last, LogPosition(10_000));
        for acknowledged in appended {
            acknowledged.await.unwrap();
        }
    }

    pub(crate) async fn tail_continues_behind_a_position(plane: Arc<dyn Plane>) {
        for payload in ["a", "b", "c", "d"] {
            append(&*plane, "wr.t.kv.a.0", payload).await;
        }
        let mut tail = plane.tail(LogPosition(0), 2).await.unwrap();
        assert_eq!(payloads(&soon(&mut tail).await), ["a", "b"]);
        let mut tail = plane.tail(LogPosition(1), 100).await.unwrap();
        let messages = read(&mut tail, 3).await;
        assert_eq!(payloads(&messages), ["b", "c", "d"]);
        assert_eq!(messages[0].position, LogPosition(2));
        assert_eq!(messages[0].subject, "wr.t.kv.a.0");
        let at = plane.at(LogPosition(2)).await.unwrap().unwrap();
        assert_eq!(at, messages[0], "one message, however it is read");
        assert_eq!(plane.at(LogPosition(0)).await.unwrap(), None);
    }

    pub(crate) async fn tail_waits_and_wakes(plane: Arc<dyn Plane>) {
        let mut tail = plane.tail(LogPosition(0), 100).await.unwrap();
        let writer = Arc::clone(&plane);
        let (read, ()) = tokio::join!(read(&mut tail, 3), async {
            for payload in ["a", "b", "c"] {
                tokio::task::yield_now().await;
                append(&*writer, "wr.t.kv.a.0", payload).await;
            }
        });
        assert_eq!(payloads(&read), ["a", "b", "c"]);
    }

    pub(crate) async fn tail_survives_a_dropped_wait(plane: Arc<dyn Plane>) {
        let mut tail = plane.tail(LogPosition(0), 100).await.unwrap();
        for payload in ["a", "b", "c"] {
            let gave_up = timeout(Duration::from_millis(1), tail.next()).await;
            assert!(gave_up.is_err());
            append(&*plane, "wr.t.kv.a.0", payload).await;
            assert_eq!(payloads(&soon(&mut tail).await), [payload]);
        }
    }

    pub(crate) async fn a_tail_beyond_the_end_ends(plane: Arc<dyn Plane>) {
        append(&*plane, "wr.t.kv.a.0", "a").await;
        let mut tail = plane.tail(LogPosition(2), 100).await.unwrap();
        assert_eq!(timeout(SOON, tail.next()).await, Ok(None));
        let mut tail = plane.tail(LogPosition(1), 100).await.unwrap();
        append(&*plane, "wr.t.kv.a.0", "b").await;
        assert_eq!(payloads(&soon(&mut tail).await), ["b"]);
    }

    pub(crate) async fn a_tail_ends_with_its_log(fixture: &dyn Fixture) {
        let plane = fixture.plane();
        let mut unread = plane.tail(LogPosition(0), 100).await.unwrap();
        for payload in ["a", "b", "c"] {
            append(&*plane, "wr.t.kv.a.0", payload).await;
        }
        let mut tail = plane.tail(LogPosition(0), 100).await.unwrap();
        let mut idle = plane.tail(LogPosition(3), 100).await.unwrap();
        let before = plane.log_status().await.unwrap();
        read(&mut tail, 3).await;
        assert!(
            timeout(Duration::from_millis(1), idle.next())
                .await
                .is_err()
        );
        fixture.recreate_log().await;
        for payload in ["d", "e", "f", "g"] {
            append(&*plane, "wr.t.kv.a.0", payload).await;
        }
        assert_eq!(timeout(SOON, tail.next()).await, Ok(None));
        assert_eq!(timeout(SOON, idle.next()).await, Ok(None));
        assert_eq!(timeout(SOON, unread.next()).await, Ok(None));
        let after = plane.log_status().await.unwrap();
        assert_ne!(before.identity, after.identity);
        let mut tail = plane.tail(LogPosition(0), 100).await.unwrap();
        assert_eq!(payloads(&read(&mut tail, 4).await), ["d", "e", "f", "g"]);
    }

    pub(crate) async fn log_is_bounded_and_shows_what_fell_off(plane: Arc<dyn Plane>) {
        let payload = "x".repeat(1024);
        for _ in 0..3 * LOG_BYTES / 1024 {
            append(&*plane, "wr.t.kv.a.0", &payload).await;
        }
        let status = plane.log_status().await.unwrap();
        assert!(status.first.0 > 1, "the oldest went");
        let kept = status.last.0 + 1 - status.first.0;
        assert!(kept >= 8 && kept <= (2 * LOG_BYTES / 1024) as u64, "{kept}");
        assert_eq!(plane.at(LogPosition(1)).await.unwrap(), None);
        let mut tail = plane.tail(LogPosition(0), 10).await.unwrap();
        let first = soon(&mut tail).await[0].position;
        assert!(first >= status.first, "a jump that the reader can see");
    }

    pub(crate) async fn log_finds_the_last_of_a_subject(plane: Arc<dyn Plane>) {
        append(&*plane, "wr.t.kv.a.0", "old").await;
        append(&*plane, "wr.t.kv.a.0", "new").await;
        append(&*plane, "wr.t.kv.a.1", "other").await;
        let last = plane.last_on("wr.t.kv.a.0".into()).await.unwrap().unwrap();
        assert_eq!((last.position.0, &last.payload[..]), (2, &b"new"[..]));
        assert_eq!(plane.last_on("wr.t.kv.b.0".into()).await.unwrap(), None);
    }

    pub(crate) async fn registry_writes_are_conditional(plane: Arc<dyn Plane>) {
        let put = async |value: &str, condition| {
            plane
                .put("wr.t.k".into(), bytes(value), condition, None)
                .await
        };
        assert_eq!(plane.get("wr.t.k".into()).await.unwrap(), None);
        let first = put("1", PutIf::Absent).await.unwrap();
        assert_eq!(put("2", PutIf::Absent).await, Err(PlaneError::Conflict));
        let second = put("2", PutIf::Revision(first)).await.unwrap();
        assert!(second > first);
        assert_eq!(
            put("3", PutIf::Revision(first)).await,
            Err(PlaneError::Conflict)
        );
        let entry = plane.get("wr.t.k".into()).await.unwrap().unwrap();
        assert_eq!((&entry.value[..], entry.revision), (&b"2"[..], second));
        let delete = async |revision| plane.delete("wr.t.k".into(), revision).await;
        assert_eq!(delete(first).await, Err(PlaneError::Conflict));
        delete(second).await.unwrap();
        assert_eq!(plane.get("wr.t.k".into()).await.unwrap(), None);
        let again = put("4", PutIf::Absent).await.unwrap();
        assert!(again > second, "revisions never come twice");
        put("5", PutIf::Always).await.unwrap();
    }

    /// The second time too: a lease that is taken again must end like the first one.
    pub(crate) async fn a_lease_runs_out_unless_renewed(plane: Arc<dyn Plane>) {
        let ttl = Duration::from_secs(2);
        for round in 0..2 {
            let lease = Lease::acquire(Arc::clone(&plane), "wr.t.l".into(), bytes("me"), ttl);
            let mut lease = lease.await.unwrap().expect("free again in every round");
            for _ in 0..5 {
                tokio::time::sleep(ttl / 4).await;
                let written = lease.write(bytes("still me")).await.unwrap();
                assert!(matches!(written, LeaseWrite::Held(_)));
            }
            assert!(plane.get("wr.t.l".into()).await.unwrap().is_some());
            let gone = async {
                while plane.get("wr.t.l".into()).await.unwrap().is_some() {
                    tokio::time::sleep(ttl / 20).await;
                }
            };
            timeout(SOON, gone)
                .await
                .unwrap_or_else(|_| panic!("round {round}"));
            let written = lease.write(bytes("late")).await.unwrap();
            assert_eq!(written, LeaseWrite::Lost);
        }
    }

    pub(crate) async fn a_lease_has_one_holder(plane: Arc<dyn Plane>) {
        let ttl = Duration::from_secs(5);
        let acquire = async |who: &str| {
            Lease::acquire(Arc::clone(&plane), "wr.t.l".into(), bytes(who), ttl)
                .await
                .unwrap()
        };
        let one = acquire("one").await.expect("the key is free");
        assert!(acquire("two").await.is_none());
        drop(one);
        let one = acquire("one").await.expect("it finds its own value");
        one.release().await.unwrap();
        let mut two = acquire("two").await.expect("it was released");
        let written = two.write(bytes("two")).await.unwrap();
        assert!(matches!(written, LeaseWrite::Held(_)));
    }

    pub(crate) async fn watch_reports_present_keys_then_changes(plane: Arc<dyn Plane>) {
        let put = async |key: &str, value: &str| {
            let put = plane.put(key.into(), bytes(value), PutIf::Always, None);
            put.await.unwrap()
        };
        put("wr.t.worker.a", "1").await;
        put("wr.t.other.a", "1").await;
        let mut watch = plane.watch("wr.t.worker.".into()).await.unwrap();
        assert_eq!(
            key_and_value(soon(&mut watch).await),
            ("wr.t.worker.a".into(), "1".into())
        );
        assert_eq!(soon(&mut watch).await, RegistryEvent::Current);
        let revision = put("wr.t.worker.b", "2").await;
        put("wr.t.other.b", "2").await;
        assert_eq!(
            key_and_value(soon(&mut watch).await),
            ("wr.t.worker.b".into(), "2".into())
        );
        plane
            .delete("wr.t.worker.b".into(), revision)
            .await
            .unwrap();
        assert_eq!(
            key_and_value(soon(&mut watch).await),
            ("wr.t.worker.b".into(), "gone".into())
        );
        put("wr.t.worker.b", "3").await;
        assert_eq!(
            key_and_value(soon(&mut watch).await),
            ("wr.t.worker.b".into(), "3".into())
        );
    }

    pub(crate) async fn watch_sees_a_lease_end(plane: Arc<dyn Plane>) {
        let mut watch = plane.watch("wr.t.".into()).await.unwrap();
        assert_eq!(soon(&mut watch).await, RegistryEvent::Current);
        let lease = Some(Duration::from_secs(1));
        let put = plane.put("wr.t.l".into(), bytes("x"), PutIf::Absent, lease);
        let revision: Revision = put.await.unwrap();
        assert!(revision > Revision(0));
        assert_eq!(
            key_and_value(soon(&mut watch).await),
            ("wr.t.l".into(), "x".into())
        );
        assert_eq!(
            key_and_value(soon(&mut watch).await),
            ("wr.t.l".into(), "gone".into())
        );
    }

    pub(crate) async fn watch_compares_whole_prefixes(plane: Arc<dyn Plane>) {
        let mut watch = plane.watch("wr.t.worker.ab".into()).await.unwrap();
        assert_eq!(soon(&mut watch).await, RegistryEvent::Current);
        let put = async |key: &str| {
            let put = plane.put(key.into(), bytes("1"), PutIf::Absent, None);
            put.await.unwrap()
        };
        put("wr.t.worker.a").await;
        for key in ["wr.t.worker.abc", "wr.t.worker.ab", "wr.t.worker.ab.c"] {
            put(key).await;
            assert_eq!(
                key_and_value(soon(&mut watch).await),
                (key.into(), "1".into())
            );
        }
    }

    fn key_and_value(event: RegistryEvent) -> (String, String) {
        match event {
            RegistryEvent::Put { key, entry } => {
                (key, String::from_utf8(entry.value.to_vec()).unwrap())
            }
            RegistryEvent::Gone { key } => (key, "gone".into()),
            RegistryEvent::Current => ("current".into(), String::new()),
        }
    }

    pub(crate) async fn snapshots_are_immutable(plane: Arc<dyn Plane>) {
        let blob = Bytes::from(vec![7; 3 << 20]);
        plane
            .put_snapshot("s-2".into(), blob.clone())
            .await
            .unwrap();
        plane
            .put_snapshot("s-1".into(), bytes("one"))
            .await
            .unwrap();
        let again = plane.put_snapshot("s-2".into(), bytes("other")).await;
        assert_eq!(again, Err(PlaneError::Conflict));
        assert_eq!(plane.get_snapshot("s-2".into()).await.unwrap(), Some(blob));
        assert_eq!(plane.snapshots().await.unwrap(), ["s-1", "s-2"]);
        plane.delete_snapshot("s-2".into()).await.unwrap();
        plane.delete_snapshot("s-2".into()).await.unwrap();
        assert_eq!(plane.get_snapshot("s-2".into()).await.unwrap(), None);
        assert_eq!(plane.snapshots().await.unwrap(), ["s-1"]);
    }

    pub(crate) async fn one_of_two_writers_of_a_snapshot_name_wins(plane: Arc<dyn Plane>) {
        let put = async |text: &str| plane.put_snapshot("s".into(), bytes(text)).await;
        let (one, two) = tokio::join!(put("one"), put("two"));
        let kept = match (one, two) {
            (Ok(()), Err(PlaneError::Conflict)) => "one",
            (Err(PlaneError::Conflict), Ok(())) => "two",
            both => panic!("{both:?}"),
        };
        let snapshot = plane.get_snapshot("s".into()).await.unwrap();
        assert_eq!(snapshot, Some(bytes(kept)));
    }

    pub(crate) async fn requests_are_answered_by_one_server(plane: Arc<dyn Plane>) {
        let mut one = plane.serve("wr.t.query".into()).await.unwrap();
        let two = plane.serve("wr.t.query".into()).await.unwrap();
        drop(two);
        // A request to a server that has just ended fails immediately and is sent again.
        let ask = async |payload: &str| loop {
            let request = plane.request("wr.t.query".into(), bytes(payload), SOON);
            if let Ok(answer) = timeout(SOON, request).await.expect("in time") {
                break answer;
            }
        };
        for payload in ["a", "b"] {
            let (answer, ()) = tokio::join!(ask(payload), async {
                let ServiceRequest { payload, reply } = soon(&mut one).await;
                reply.send(Bytes::from([&payload[..], b"!"].concat()));
            });
            assert_eq!(answer, bytes(&format!("{payload}!")));
        }
    }

    pub(crate) async fn unserved_requests_fail(plane: Arc<dyn Plane>) {
        let deadline = Duration::from_millis(50);
        let ask = async || {
            plane
                .request("wr.t.query".into(), bytes("?"), deadline)
                .await
        };
        assert!(
            matches!(ask().await, Err(PlaneError::Unavailable(_))),
            "nobody"
        );
        let mut server = plane.serve("wr.t.query".into()).await.unwrap();
        assert!(
            matches!(ask().await, Err(PlaneError::Unavailable(_))),
            "silence"
        );
        let (answer, ()) = tokio::join!(ask(), async {
            drop(soon(&mut server).await);
        });
        assert!(matches!(answer, Err(PlaneError::Unavailable(_))), "dropped");
    }

    pub(crate) async fn broadcast_reaches_all_listeners(plane: Arc<dyn Plane>) {
        let mut exact = plane.subscribe("wr.t.hb.a.0".into()).await.unwrap();
        let mut all = plane.subscribe("wr.t.hb.>".into()).await.unwrap();
        let publish = async |subject: &str, payload: &str| {
            plane.publish(subject.into(), bytes(payload)).await.unwrap();
        };
        publish("wr.t.hb.b.0", "b").await;
        publish("wr.t.hb.a.0", "a").await;
        publish("wr.t.load", "no").await;
        let broadcast = |subject: &str, payload: &str| Broadcast {
            subject: subject.into(),
            payload: bytes(payload),
        };
        assert_eq!(soon(&mut exact).await, broadcast("wr.t.hb.a.0", "a"));
        assert_eq!(soon(&mut all).await, broadcast("wr.t.hb.b.0", "b"));
        assert_eq!(soon(&mut all).await, broadcast("wr.t.hb.a.0", "a"));
    }

    /// Immediately: a time-out would not show the reason.
    pub(crate) async fn oversized_payloads_are_refused(plane: Arc<dyn Plane>) {
        let huge = Bytes::from(vec![0; (4 << 20) + 1]);
        let put = plane.put("wr.t.k".into(), huge.clone(), PutIf::Always, None);
        assert!(matches!(put.await, Err(PlaneError::TooLarge { .. })));
        let mut server = plane.serve("wr.t.query".into()).await.unwrap();
        let ask = async |payload| {
            let request = plane.request("wr.t.query".into(), payload, 10 * SOON);
            timeout(SOON, request).await.expect("in time")
        };
        let question = ask(huge.clone()).await;
        assert!(matches!(question, Err(PlaneError::TooLarge { .. })));
        let (answer, ()) = tokio::join!(ask(bytes("?")), async {
            soon(&mut server).await.reply.send(huge.clone());
        });
        assert!(matches!(answer, Err(PlaneError::TooLarge { .. })), "answer");
        let publish = plane.publish("wr.t.load".into(), huge.clone()).await;
        assert!(matches!(publish, Err(PlaneError::TooLarge { .. })));
        let append = plane.append("wr.t.kv.a.0".into(), huge).await;
        assert!(matches!(append.map(drop), Err(PlaneError::TooLarge { .. })));
    }

    pub(crate) async fn starts_connected(plane: Arc<dyn Plane>) {
        assert_eq!(*plane.connection().borrow(), Connection::Up);
    }
}
