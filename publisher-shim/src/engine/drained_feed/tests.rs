use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;
use warmroute_process::tls::EngineTls;

use super::*;
use crate::engine::http::EngineHttp;
use crate::engine_key::EngineKeySource;
use crate::wire::{ReplayFrames, live_frames, replay_frames};

/// An engine's route: hands out each answer once, and then empty ones.
#[derive(Default)]
struct Engine {
    answers: Mutex<VecDeque<(u16, String)>>,
    reads: AtomicU64,
    /// An answer needs one of these, if they are limited.
    permits: Option<Semaphore>,
}

impl Engine {
    fn add(&self, events: &[Value]) {
        self.add_raw(200, &serde_json::to_string(events).unwrap());
    }

    fn add_raw(&self, status: u16, body: &str) {
        let mut answers = self.answers.lock().unwrap();
        answers.push_back((status, body.to_owned()));
    }
}

async fn answer(State(engine): State<Arc<Engine>>) -> (StatusCode, String) {
    engine.reads.fetch_add(1, Ordering::Relaxed);
    let next = engine.answers.lock().unwrap().pop_front();
    if let Some(permits) = &engine.permits {
        permits.acquire().await.unwrap().forget();
    }
    let (status, body) = next.unwrap_or_else(|| (200, "[]".to_owned()));
    (StatusCode::from_u16(status).unwrap(), body)
}

struct Follower {
    feed: DrainedFeed,
    events: VecDeque<EngineEvent>,
    replays: u64,
}

async fn follow(engine: &Arc<Engine>, ranks: u32) -> Vec<Follower> {
    let routes = axum::Router::new().route("/kv_cache_events", post(answer));
    let routes = routes.with_state(Arc::clone(engine));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let server = async move { axum::serve(listener, routes).await };
    drop(TaskTracker::new().spawn(server));
    let tls = EngineTls::system().unwrap();
    let mut http = EngineHttp::new(&base, EngineKeySource::default(), &tls).unwrap();
    let route = http.drain(&format!("{base}/kv_cache_events"));
    let drain = Arc::new(EventDrain::new(route, ranks, None));
    let follower = |rank| Follower {
        feed: DrainedFeed::new(Arc::clone(&drain), DpRank(rank)),
        events: VecDeque::new(),
        replays: 0,
    };
    (0..ranks).map(follower).collect()
}

/// What a feed reported; batches by their numbers.
#[derive(Debug, PartialEq, Eq)]
enum Reported {
    Up,
    Down,
    Live(u64),
    Replayed(Vec<u64>),
}

impl Follower {
    async fn next_event(&mut self) -> EngineEvent {
        let mut events = Vec::new();
        while self.events.is_empty() {
            let receive = self.feed.receive(&mut events);
            timeout(Duration::from_secs(20), receive).await.unwrap();
            assert!(events.len() <= BURST_MAX + 1, "bounded bursts");
            self.events.extend(events.drain(..));
        }
        self.events.pop_front().unwrap()
    }

    async fn next(&mut self) -> Reported {
        let mut replayed = Vec::new();
        loop {
            match self.next_event().await {
                EngineEvent::Connected => return Reported::Up,
                EngineEvent::Disconnected => return Reported::Down,
                EngineEvent::Live(frames) => {
                    return Reported::Live(live_frames(&frames).unwrap().seq.unwrap().0);
                }
                EngineEvent::Replay(id, frames) => {
                    assert_eq!(id, ReplayId(self.replays));
                    match replay_frames(&frames).unwrap() {
                        ReplayFrames::Batch { seq, .. } => replayed.push(seq.0),
                        ReplayFrames::End => return Reported::Replayed(replayed),
                    }
                }
            }
        }
    }

    fn request(&mut self, from: u64) {
        self.replays += 1;
        let sent = self
            .feed
            .request_replay(ReplayId(self.replays), EngineSeq(from));
        assert_eq!(sent, Ok(()));
    }

    async fn replay(&mut self, from: u64) -> Vec<u64> {
        self.request(from);
        let reported = self.next().await;
        let Reported::Replayed(batches) = reported else {
            panic!("{reported:?}");
        };
        batches
    }

    /// Reads the route so often that a replay would have been answered.
    async fn assert_silent(&mut self, engine: &Engine) {
        let before = engine.reads.load(Ordering::Relaxed);
        let mut events = Vec::new();
        let read = async {
            while engine.reads.load(Ordering::Relaxed) < before + 4 {
                let receive = self.feed.receive(&mut events);
                // Like the source's ticks, which interrupt it.
                drop(timeout(Duration::from_millis(20), receive).await);
            }
        };
        timeout(Duration::from_secs(20), read).await.unwrap();
        assert!(events.is_empty(), "{events:?}");
    }
}

fn created(number: u64) -> Value {
    json!({"event_id": number, "data": {"type": "created", "num_blocks_per_cache_level": [9]}})
}

fn removed(number: u64) -> Value {
    json!({"event_id": number, "data": {"type": "removed", "block_hashes": [7]}})
}

fn of_rank(rank: u32, mut event: Value) -> Value {
    event["attention_dp_rank"] = rank.into();
    event
}

#[tokio::test]
async fn replays_come_from_what_was_read() {
    let engine = Arc::new(Engine::default());
    let first: Vec<Value> = (1..30).map(removed).collect();
    engine.add(&[&[created(0)][..], &first].concat());
    let follower = &mut follow(&engine, 1).await[0];
    assert_eq!(follower.next().await, Reported::Up);
    assert_eq!(follower.replay(0).await, (0..30).collect::<Vec<_>>());
    engine.add(&[removed(30)]);
    assert_eq!(follower.next().await, Reported::Live(30));
    assert_eq!(follower.replay(30).await, [30]);
    // What is read in between belongs to the answer.
    follower.request(30);
    engine.add(&[removed(31), removed(32)]);
    let Reported::Replayed(replayed) = follower.next().await else {
        panic!("no replay");
    };
    let rest = match replayed.len() {
        1 => vec![follower.next().await, follower.next().await],
        _ => Vec::new(),
    };
    assert!(replayed == [30, 31, 32] || rest == [31, 32].map(Reported::Live));
}

#[tokio::test]
async fn a_failed_read_proves_nothing_before_the_next_event() {
    for failure in [
        (500, "[]"),
        (404, ""),
        (200, "[{]"),
        (200, "{\"error\": 1}"),
    ] {
        let engine = Arc::new(Engine::default());
        engine.add(&[created(0)]);
        let follower = &mut follow(&engine, 1).await[0];
        assert_eq!(follower.next().await, Reported::Up);
        assert_eq!(follower.replay(0).await, [0]);
        engine.add_raw(failure.0, failure.1);
        assert_eq!(follower.next().await, Reported::Down);
        assert_eq!(follower.next().await, Reported::Up);
        follower.request(0);
        follower.assert_silent(&engine).await;
        engine.add(&[removed(1)]);
        assert_eq!(follower.next().await, Reported::Replayed(vec![0, 1]));
    }
}

#[tokio::test]
async fn a_pause_proves_nothing_although_the_numbers_may_fit() {
    // What the next event's number is, and what is replayed.
    for (next, replayed) in [(16, vec![16]), (11, vec![11]), (2, vec![])] {
        let engine = Arc::new(Engine::default());
        let first: Vec<Value> = (1..=10).map(removed).collect();
        engine.add(&[&[created(0)][..], &first].concat());
        let follower = &mut follow(&engine, 1).await[0];
        assert_eq!(follower.next().await, Reported::Up);
        assert_eq!(follower.replay(10).await, [10]);
        // Another process leads, and takes what comes.
        follower.feed.paused();
        assert_eq!(follower.next().await, Reported::Up);
        follower.request(10);
        follower.assert_silent(&engine).await;
        engine.add(&[removed(next)]);
        assert_eq!(follower.next().await, Reported::Replayed(replayed));
    }
}

#[tokio::test]
async fn a_read_from_before_a_pause_is_dropped() {
    let engine = Arc::new(Engine {
        permits: Some(Semaphore::new(1)),
        ..Engine::default()
    });
    engine.add(&[created(0)]);
    let follower = &mut follow(&engine, 1).await[0];
    assert_eq!(follower.next().await, Reported::Up);
    engine.add(&[removed(1)]);
    let mut events = Vec::new();
    while engine.reads.load(Ordering::Relaxed) < 2 {
        let receive = follower.feed.receive(&mut events);
        drop(timeout(Duration::from_millis(1), receive).await);
    }
    follower.feed.paused();
    engine.permits.as_ref().unwrap().add_permits(1000);
    assert_eq!(follower.next().await, Reported::Up);
    follower.request(0);
    follower.assert_silent(&engine).await;
    engine.add(&[removed(3)]);
    assert_eq!(follower.next().await, Reported::Replayed(vec![3]));
}

#[tokio::test]
async fn without_any_event_nothing_is_proven() {
    let engine = Arc::new(Engine::default());
    let follower = &mut follow(&engine, 1).await[0];
    assert_eq!(follower.next().await, Reported::Up);
    follower.request(0);
    follower.assert_silent(&engine).await;
    engine.add(&[removed(17)]);
    assert_eq!(follower.next().await, Reported::Replayed(vec![17]));
}

#[tokio::test]
async fn gaps_and_restarts_show_in_the_numbers() {
    let engine = Arc::new(Engine::default());
    engine.add(&[created(0), removed(1)]);
    let follower = &mut follow(&engine, 1).await[0];
    assert_eq!(follower.next().await, Reported::Up);
    assert_eq!(follower.replay(0).await, [0, 1]);
    engine.add(&[removed(5)]);
    assert_eq!(follower.next().await, Reported::Live(5));
    assert_eq!(follower.replay(1).await, [1, 5], "with the hole");
    engine.add(&[created(0)]);
    assert_eq!(follower.next().await, Reported::Live(0));
    assert_eq!(follower.replay(5).await, [0_u64; 0], "another life");
    assert_eq!(follower.replay(0).await, [0]);
}

#[tokio::test]
async fn an_interrupted_read_loses_nothing() {
    let engine = Arc::new(Engine {
        permits: Some(Semaphore::new(1)),
        ..Engine::default()
    });
    engine.add(&[created(0)]);
    let follower = &mut follow(&engine, 1).await[0];
    assert_eq!(follower.next().await, Reported::Up);
    engine.add(&[removed(1)]);
    let mut events = Vec::new();
    // The route took the events and has not answered.
    while engine.reads.load(Ordering::Relaxed) < 2 {
        let receive = follower.feed.receive(&mut events);
        drop(timeout(Duration::from_millis(1), receive).await);
    }
    for _ in 0..20 {
        let receive = follower.feed.receive(&mut events);
        drop(timeout(Duration::from_millis(1), receive).await);
    }
    assert!(events.is_empty());
    engine.permits.as_ref().unwrap().add_permits(1);
    assert_eq!(follower.next().await, Reported::Live(1));
}

#[tokio::test]
async fn each_rank_has_its_own_numbers() {
    let engine = Arc::new(Engine::default());
    engine.add(&[
        of_rank(0, created(0)),
        of_rank(1, created(0)),
        of_rank(1, removed(1)),
    ]);
    let followers = &mut follow(&engine, 2).await;
    let [first, second] = &mut followers[..] else {
        panic!("two ranks");
    };
    assert_eq!(first.next().await, Reported::Up);
    assert_eq!(first.replay(0).await, [0]);
    assert_eq!(second.next().await, Reported::Up);
    assert_eq!(second.replay(0).await, [0, 1]);
    engine.add(&[of_rank(1, removed(2)), of_rank(0, removed(1))]);
    assert_eq!(first.next().await, Reported::Live(1));
    assert_eq!(second.next().await, Reported::Live(2));
}

#[tokio::test]
async fn a_rank_that_is_not_followed_voids_the_others() {
    let engine = Arc::new(Engine::default());
    engine.add(&[of_rank(0, created(0)), of_rank(1, created(0))]);
    let follower = &mut follow(&engine, 1).await[0];
    assert_eq!(follower.next().await, Reported::Up);
    follower.request(0);
    follower.assert_silent(&engine).await;
    // The engine restarts without that rank.
    engine.add(&[created(0)]);
    assert_eq!(follower.next().await, Reported::Replayed(vec![0]));
}

#[test]
fn kept_events_are_bounded_also_if_they_are_small() {
    let mut kept = KeptEvents::new(0, None);
    for number in 0..200_000 {
        let answer = json!([created(number)]).to_string();
        kept.take(&trtllm::events(answer.as_bytes()).unwrap()[0]);
    }
    assert_eq!(kept.end(), 200_000);
    let (first, ..) = kept.at(0).unwrap();
    assert!((40_000..190_000).contains(&first.0), "{first:?}");
}

#[tokio::test]
async fn a_route_that_waits_for_events_is_left_alone() {
    let follower = &follow(&Arc::default(), 1).await[0];
    let mut reader = follower.feed.drain.reader.lock().await;
    let now = Instant::now();
    let mut is_paused = |took| {
        reader.due = now;
        reader.take_silence(now, took);
        reader.due > now
    };
    let quick = Duration::ZERO;
    let paused = [WAITED, WAITED, quick, WAITED, WAITED, WAITED, WAITED, quick].map(&mut is_paused);
    assert_eq!(
        paused,
        [false, false, false, false, false, true, true, false]
    );
}
