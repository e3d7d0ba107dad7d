//! Requests that may still be moved: no byte of an answer is lost, repeated or held back for long.
//! The clock advances only where a test advances it.

use std::time::Duration;

use tokio::time::advance;

use super::world::{Frozen, event};
use super::*;
use crate::route::moves::MOVE_WINDOW_MAX;

/// Bytes that came before the head was passed on are sent first, and once.
#[tokio::test(start_paused = true)]
async fn a_stream_that_could_have_been_moved_is_complete() {
    let _frozen = Frozen::new();
    let engine = Engine::start().await;
    let world = World::with_a_peer(&[&engine]).await;
    for events in 1..=4 {
        let mut body = streaming();
        body["ready"] = json!(events);
        let response = world.send("/v1/completions", &body).await;
        let whole: String = (0..events).map(event).collect();
        assert_eq!(response.text().await.unwrap(), whole);
    }
    world.until_quiet().await;
    assert_eq!(
        world.metric("requests_total{outcome=\"ok\",route=\"completions\"}"),
        4
    );
}

/// Its head is held back until the first output, so that a failure before is another worker's.
#[tokio::test(start_paused = true)]
async fn a_request_is_moved_only_for_a_time() {
    let _frozen = Frozen::new();
    let engines = [Engine::start().await, Engine::start().await];
    let world = World::with_a_peer(&[&engines[0], &engines[1]]).await;
    let sent = world.post("/v1/completions", &streaming()).send();
    let client = TaskTracker::new().spawn(sent);
    let at = asked_engine(&engines).await;
    assert!(!client.is_finished());
    advance(MOVE_WINDOW_MAX + Duration::from_millis(1)).await;
    world.peer_sends(&format!("w{at}"), 100_000);
    let mut response = begun(&engines[at], client).await;
    for number in 1..3 {
        let chunk = engines[at].release(&event(number), &mut response).await;
        assert_eq!(chunk, event(number));
    }
    engines[at].end_stream();
    assert!(response.chunk().await.unwrap().is_none());
    assert_eq!(world.app.core.core().counts().moves.moved, 0);
    assert_eq!(engines[1 - at].asked(), 0);
    world.peer_goes();
    world.until_quiet().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_choice_is_crossed_is_served_by_one_other_engine() {
    let _frozen = Frozen::new();
    let engines = [Engine::start().await, Engine::start().await];
    let world = World::with_a_peer(&[&engines[0], &engines[1]]).await;
    let sent = world.post("/v1/completions", &streaming()).send();
    let client = TaskTracker::new().spawn(sent);
    let at = asked_engine(&engines).await;
    let (left, taken) = (&engines[at], &engines[1 - at]);
    world.peer_sends(&format!("w{at}"), 100_000);
    left.until_abandoned().await;
    taken.until_asked().await;
    let mut response = begun(taken, client).await;
    let worker = response.headers()["x-warmroute-worker"].clone();
    assert_eq!(worker, format!("w{}", 1 - at));
    for number in 1..3 {
        let chunk = taken.release(&event(number), &mut response).await;
        assert_eq!(chunk, event(number));
    }
    taken.end_stream();
    assert!(response.chunk().await.unwrap().is_none());
    assert_eq!((left.asked(), taken.asked()), (1, 1));
    world.peer_goes();
    world.until_quiet().await;
    let counts = world.app.core.core().counts();
    let freed = counts.freed;
    assert_eq!(
        (counts.moves.moved, freed.aborted, freed.completed),
        (1, 1, 1)
    );
    assert_eq!(
        world.newest_decision()[0]["moved_from"]["worker"],
        format!("w{at}")
    );
}

type Sent = tokio::task::JoinHandle<reqwest::Result<reqwest::Response>>;

/// The client's answer, after the engine's first event.
async fn begun(engine: &Engine, client: Sent) -> reqwest::Response {
    engine.send(&event(0)).await;
    let mut response = in_time("the answer begins", client).await.unwrap().unwrap();
    let first = response.chunk().await.unwrap().unwrap();
    assert_eq!(first, event(0));
    response
}

async fn asked_engine(engines: &[Engine; 2]) -> usize {
    tokio::select! {
        () = engines[0].until_asked() => 0,
        () = engines[1].until_asked() => 1,
    }
}
