use futures_util::FutureExt as _;
use tokio::sync::Semaphore;
use warmroute_plane::{MemoryPlane, MemoryPlaneConfig};
use warmroute_proto::query::{SourceAnswer, SourceState, UnknownReason};
use warmroute_proto::registry::ResyncReason;
use warmroute_proto::{Change, Generation, RecordNumber};

use super::*;
use crate::tests_support::{self, Running, TestShim, locals, source, stored};

pub(super) const W: &str = "w1/0";
pub(super) const SECOND: Duration = Duration::from_secs(1);

pub(super) fn query_for(names: &str) -> IndexQuery {
    IndexQuery {
        blocks: locals(names),
        at_least: None,
    }
}

pub(super) fn only(answer: IndexAnswer) -> SourceAnswer {
    match answer {
        IndexAnswer::Runs { mut sources, .. } => {
            assert_eq!(sources.len(), 1);
            sources.remove(0)
        }
        IndexAnswer::Behind { .. } => panic!("behind"),
    }
}

pub(super) fn state(running: &Running) -> (SourceState, Option<UnknownReason>) {
    let answer = only(running.handle.query(&query_for("a")));
    (answer.states.gpu, answer.reason)
}

/// A service that has folded one source holding `a b`.
pub(super) async fn running() -> (Running, TestShim) {
    let running = Running::start(tests_support::plane());
    // The first tick has looked where the log ends.
    sleep(SECOND).await;
    let mut shim = TestShim::new(W);
    let record = shim.record(vec![stored("", "a b", Tier::Gpu)]);
    running.publish(&record).await;
    (running, shim)
}

#[tokio::test(start_paused = true)]
async fn records_are_answered_over_the_plane() {
    let (running, _) = running().await;
    let payload = codec::encode(&query_for("a b c")).unwrap();
    let subject = running.subjects.query();
    let reply = running.plane.request(subject, payload.into(), SECOND).await;
    let answer = only(codec::decode(&reply.unwrap()).unwrap());
    assert_eq!(answer.source, source(W));
    assert_eq!(answer.number, Some(RecordNumber(0)));
    assert_eq!(answer.states.gpu, SourceState::Exact);
    assert_eq!(answer.run.gpu, 2);
    assert_eq!(running.handle.position(), LogPosition(1));
    assert_eq!(running.handle.held(&source(W)).len(), 2);
}

#[tokio::test(start_paused = true)]
async fn without_heartbeats_a_source_is_unknown_after_five_seconds() {
    let (running, shim) = running().await;
    for _ in 0..10 {
        sleep(SECOND).await;
        running.heartbeat(&shim).await;
    }
    assert_eq!(state(&running), (SourceState::Exact, None));
    sleep(4 * SECOND).await;
    assert_eq!(state(&running), (SourceState::Exact, None));
    sleep(SECOND).await;
    let unknown = (SourceState::Unknown, Some(UnknownReason::NoProof));
    assert_eq!(state(&running), unknown);
}

/// A heartbeat that waited while the reader stood still proves nothing about the present; the next one does.
#[tokio::test(start_paused = true)]
async fn what_waited_for_a_reader_that_stood_still_is_no_proof() {
    let (running, shim) = running().await;
    running.heartbeat(&shim).await;
    sleep(Duration::from_millis(600)).await;
    assert_eq!(state(&running), (SourceState::Exact, None));
    running.heartbeat(&shim).await;
    // Time jumps before the reader has its turn.
    tokio::time::advance(20 * SECOND).await;
    let unknown = (SourceState::Unknown, Some(UnknownReason::NoProof));
    for _ in 0..20 {
        assert_eq!(state(&running), unknown);
        sleep(100 * Duration::from_millis(1)).await;
    }
    running.heartbeat(&shim).await;
    sleep(Duration::from_millis(1)).await;
    assert_eq!(state(&running), (SourceState::Exact, None));
}

#[tokio::test(start_paused = true)]
async fn backlog_is_unknown_until_a_heartbeat() {
    let plane = tests_support::plane();
    let mut shim = TestShim::new(W);
    for _ in 0..300 {
        let change = stored("", "a b", Tier::Gpu);
        tests_support::append(&plane, &shim.record(vec![change])).await;
        let change = Change::Cleared { tier: Tier::Gpu };
        tests_support::append(&plane, &shim.record(vec![change])).await;
    }
    let change = stored("", "a", Tier::Gpu);
    let last = tests_support::append(&plane, &shim.record(vec![change])).await;
    let running = Running::start(plane);
    let mut positions = running.handle.positions();
    positions.wait_for(|at| *at >= last).await.unwrap();
    assert_eq!(state(&running).0, SourceState::Unknown);
    running.heartbeat(&shim).await;
    sleep(Duration::from_millis(1)).await;
    assert_eq!(state(&running).0, SourceState::Exact);
    assert!(running.handle.is_ready());
}

#[tokio::test(start_paused = true)]
async fn lost_lease_masks_the_worker() {
    let (running, shim) = running().await;
    running.register("w1", Some(3 * SECOND)).await;
    sleep(2 * SECOND).await;
    running.heartbeat(&shim).await;
    assert_eq!(state(&running), (SourceState::Exact, None));
    sleep(2 * SECOND).await;
    let gone = (SourceState::Unknown, Some(UnknownReason::ShimGone));
    assert_eq!(state(&running), gone);
    running.register("w1", None).await;
    sleep(Duration::from_millis(1)).await;
    assert_eq!(state(&running), (SourceState::Exact, None));
}

#[tokio::test(start_paused = true)]
async fn gap_ends_in_a_request_to_the_shim() {
    let (running, mut shim) = running().await;
    let subject = running.subjects.resync(&source(W).worker);
    let mut requests = running.plane.subscribe(subject).await.unwrap();
    shim.record(vec![stored("", "x", Tier::Gpu)]);
    let record = shim.record(vec![stored("", "y", Tier::Gpu)]);
    running.publish(&record).await;
    let request = codec::decode::<ResyncRequest>(&requests.next().await.unwrap().payload).unwrap();
    assert_eq!(request.source, source(W));
    assert_eq!(request.above, Generation(1));
    assert_eq!(request.reason, ResyncReason::Gap);
}

#[tokio::test(start_paused = true)]
async fn malformed_query_is_counted_and_not_answered() {
    let (running, _) = running().await;
    let subject = running.subjects.query();
    let junk = Bytes::from_static(b"junk");
    let reply = running.plane.request(subject, junk, SECOND).await;
    assert!(reply.is_err());
    let text = String::from_utf8(running.handle.metrics_text().unwrap()).unwrap();
    let line = "warmroute_indexer_queries_total{outcome=\"malformed\"} 1";
    assert!(text.contains(line), "{text}");
    assert!(text.contains("warmroute_indexer_sources{state=\"exact\"} 1"));
}

/// Routers wait for milliseconds: what waited longest is refused first.
#[tokio::test(start_paused = true)]
async fn of_the_queries_that_wait_the_oldest_are_refused() {
    const REFUSED: usize = 10;
    let plane = MemoryPlane::new(MemoryPlaneConfig {
        identity: tests_support::IDENTITY,
        log_bytes_max: 1 << 20,
        queue_max: 1024,
    });
    let context = at_rest(plane.clone()).writer.context;
    let subject = context.subjects.query();
    let (places, tasks) = (Arc::new(Semaphore::new(0)), TaskTracker::new());
    let stop = CancellationToken::new();
    let serve = context.clone();
    let serve = serve.serve(
        subject.clone(),
        Arc::clone(&places),
        tasks.clone(),
        stop.clone(),
    );
    let serving = tasks.spawn(serve);
    tokio::task::yield_now().await;
    let query = Bytes::from(codec::encode(&query_for("a")).unwrap());
    let ask = |_| {
        let (plane, subject, query) = (plane.clone(), subject.clone(), query.clone());
        tasks.spawn(async move { plane.request(subject, query, 60 * SECOND).await })
    };
    let asked: Vec<_> = (0..queries::WAITING_MAX + REFUSED).map(ask).collect();
    sleep(Duration::from_millis(1)).await;
    let are_over: Vec<bool> = asked.iter().map(|asked| asked.is_finished()).collect();
    assert!(are_over[..REFUSED].iter().all(|is_over| *is_over));
    assert!(are_over[REFUSED..].iter().all(|is_over| !is_over));
    places.add_permits(1);
    let mut answered = 0;
    for asked in asked {
        answered += usize::from(asked.await.unwrap().is_ok());
    }
    assert_eq!(answered, queries::WAITING_MAX);
    stop.cancel();
    serving.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn before_the_log_is_known_there_is_no_answer() {
    let handle = at_rest(tests_support::plane()).handle();
    assert!(!handle.is_ready());
    let answer = handle.query(&query_for("a"));
    assert!(matches!(answer, IndexAnswer::Behind { .. }));
    assert_eq!(handle.digest().position, None);
}

/// While the writer reads for long, another writer would wait for it, and new readers for that one.
#[tokio::test(start_paused = true)]
async fn the_task_that_writes_snapshots_takes_no_lock_while_a_source_is_cut() {
    const HANGS: Duration = Duration::from_secs(60);
    let (running, _) = running().await;
    let service = at_rest(running.plane.clone());
    let context = ServiceContext {
        shared: Arc::clone(&running.handle.shared),
        ..service.writer.context
    };
    let mark = running.handle.shared.read().mark().unwrap();
    let (send, answered) = std::sync::mpsc::channel();
    let cut = running.handle.shared.read();
    let asking = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_time().build().unwrap();
        let fit = runtime.block_on(context.fit(tests_support::IDENTITY, &mark));
        send.send(fit).unwrap();
    });
    let fit = answered.recv_timeout(HANGS);
    drop(cut);
    asking.join().unwrap();
    assert_eq!(fit, Ok(Ok(crate::same_log::LogMatch::Same)));
}

/// A service that does not run.
fn at_rest(plane: impl Plane + 'static) -> Service {
    let config = IndexerConfig {
        namespace: tests_support::namespace(),
        max_memory_bytes: None,
    };
    Service::new(config, Arc::new(plane)).unwrap()
}

/// A handle, and the requests for cuts that come by it.
fn without_a_writer() -> (Handle, follow::Cuts) {
    let service = at_rest(tests_support::plane());
    let handle = service.handle();
    (handle, follow::Cuts::new(service.cut_requests))
}

/// Clients that leave would otherwise keep the writer busy.
#[tokio::test(start_paused = true)]
async fn a_cut_whose_requester_left_is_not_made() {
    let (handle, mut cuts) = without_a_writer();
    let left = handle.cut_source(source("a/0")).now_or_never();
    assert!(left.is_none());
    let next = async {
        let request = cuts.next().await.request.take();
        let Some(CutRequest::Source(source, made)) = request else {
            panic!("a snapshot");
        };
        made.send(None).ok().unwrap();
        source
    };
    let (cut, next) = tokio::join!(handle.cut_source(source("b/0")), next);
    assert_eq!(next, source("b/0"));
    assert!(cut.unwrap().is_none());
}

/// However many cuts are asked for, the log has most of the writer's time.
#[tokio::test(start_paused = true)]
async fn the_writer_rests_from_cuts_in_proportion_to_the_last_one() {
    let (handle, mut cuts) = without_a_writer();
    let mut rest = 0;
    for (took, then) in [(0, 0), (100, 400), (10_000, 2_000), (1, 4)] {
        let asked = Instant::now();
        let turn = async {
            let turn = cuts.next().await;
            assert_eq!(asked.elapsed().as_millis(), rest);
            tokio::time::advance(Duration::from_millis(took)).await;
            drop(turn);
        };
        let (cut, ()) = tokio::join!(handle.cut_source(source("a/0")), turn);
        assert!(cut.is_err());
        rest = then;
    }
}

/// The log's clock shows 41 s more than before, ours next to nothing.
async fn offer_suspension(plane: &MemoryPlane, shared: &Shared) {
    let unix_ns = plane.log_status().await.unwrap().now_unix_ns;
    let at = now();
    shared.offer_clock(ClockAnswer {
        asked: at,
        answered: at,
        unix_ns: unix_ns + 41_000_000_000,
    });
}

#[tokio::test(start_paused = true)]
async fn what_another_task_reads_of_the_logs_clock_reaches_the_fold_before_the_next_tick() {
    let (running, shim) = running().await;
    running.heartbeat(&shim).await;
    sleep(TICK / 4).await;
    assert_eq!(state(&running), (SourceState::Exact, None));
    offer_suspension(&running.plane, &running.handle.shared).await;
    sleep(Duration::from_millis(1)).await;
    assert_eq!(state(&running).0, SourceState::Unknown);
}

/// Between two sessions, or while one begins, the writer may wait for the log longer than a proof
/// counts.
#[tokio::test(start_paused = true)]
async fn a_writer_that_waits_takes_in_the_logs_clock() {
    let plane = tests_support::plane();
    let Service { writer, .. } = at_rest(plane.clone());
    drop(
        writer
            .timed_status()
            .await
            .map(|(_, clock)| writer.fold.write().observe_clock(clock)),
    );
    let wait = async {
        sleep(SECOND).await;
        offer_suspension(&plane, &writer.shared).await;
        sleep(Duration::from_millis(1)).await;
        assert!(writer.shared.take_clock_answer().is_none(), "it is taken");
    };
    writer.beside_clock(wait).await;
    offer_suspension(&plane, &writer.shared).await;
    let again = writer.shared.take_clock_answer().unwrap();
    let stood = writer.fold.write().observe_clock(again);
    assert_eq!(stood, Duration::ZERO, "it was counted before");
}

#[test]
fn of_two_answers_the_one_that_shows_more_waits_for_the_writer() {
    let service = at_rest(tests_support::plane());
    let shared = &service.writer.shared;
    let start = now();
    let answer = |asked: u32, answered: u32, unix_ns| ClockAnswer {
        asked: start + asked * SECOND,
        answered: start + answered * SECOND,
        unix_ns,
    };
    shared.offer_clock(answer(0, 3, 9));
    shared.offer_clock(answer(1, 2, 5));
    assert_eq!(shared.take_clock_answer().unwrap().unix_ns, 9);
    shared.offer_clock(answer(0, 3, 9));
    shared.offer_clock(answer(4, 5, 8));
    assert_eq!(
        shared.take_clock_answer().unwrap().unix_ns,
        8,
        "the log's clock was set back"
    );
    assert!(shared.take_clock_answer().is_none());
}

#[tokio::test(start_paused = true)]
async fn run_ends_when_it_is_told_to() {
    let (running, _) = running().await;
    running.stop.cancel();
    running.run.await.unwrap().unwrap();
}
