//! Choices for gateways of one's own, which report what becomes of them.

use std::time::Duration;

use axum::extract::Request;

use super::*;
use crate::selections::{Outcome, Selection, Selections, TicketReport};

async fn select(selections: &Selections, json: &Value) -> Selection {
    let request = Request::post("/v1/completions").body(Body::from(json.to_string()));
    let selected = selections.select(request.unwrap(), None).await;
    selected.map_err(|refused| refused.status()).unwrap()
}

fn report(ticket: &str, outcome: Outcome, usage: Option<Value>) -> TicketReport {
    TicketReport {
        ticket: ticket.to_owned(),
        outcome,
        usage,
    }
}

fn load(world: &World) -> (u32, u64) {
    let load = &world.loads()[0];
    (load.active_requests, load.prefill_tokens)
}

#[tokio::test]
async fn a_ticket_holds_a_slot_until_it_is_freed() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let selections = Selections::new(&world.app);
    let usage = json!({"prompt_tokens": 40, "completion_tokens": 7});
    for has_first_token in [true, false] {
        let selected = select(&selections, &body(40)).await;
        assert_eq!((&*selected.worker, selected.dp_rank), ("w0", 0));
        assert_eq!(selected.url, engine.url);
        // The second one counts less: its blocks were sent before.
        assert!(load(&world).0 == 1 && load(&world).1 > 0);
        if has_first_token {
            for _ in 0..2 {
                assert!(selections.first_token(&selected.ticket).await);
                assert_eq!(load(&world), (1, 0));
            }
        }
        let freed = report(&selected.ticket, Outcome::Completed, Some(usage.clone()));
        assert!(selections.free(&freed).await);
        assert!(!selections.free(&freed).await, "once");
        world.until_quiet().await;
    }
    let tokens = world.metric("model_output_tokens_total{model=\"m\",worker=\"w0\"}");
    assert_eq!(tokens, 14);
    assert_eq!(
        world.metric("requests_total{outcome=\"ok\",route=\"completions\"}"),
        2
    );
    assert_eq!(world.metric("selections_total{outcome=\"completed\"}"), 2);
}

/// A caller need not wait for one report before it sends the next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_that_cross_leave_no_ticket() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let selections = Selections::new(&world.app);
    for _ in 0..200 {
        let selected = select(&selections, &body(4)).await;
        let freed = report(&selected.ticket, Outcome::Completed, None);
        let first = Arc::clone(&selections);
        let first =
            TaskTracker::new().spawn(async move { first.first_token(&selected.ticket).await });
        assert!(selections.free(&freed).await);
        first.await.unwrap();
        assert!(!selections.free(&freed).await);
    }
    world.until_quiet().await;
}

#[tokio::test]
async fn what_ends_otherwise_frees_its_slot_too() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let selections = Selections::new(&world.app);
    for outcome in [Outcome::Failed, Outcome::Aborted] {
        for has_first_token in [true, false] {
            let selected = select(&selections, &body(40)).await;
            if has_first_token {
                selections.first_token(&selected.ticket).await;
            }
            assert!(
                selections
                    .free(&report(&selected.ticket, outcome, None))
                    .await
            );
            world.until_quiet().await;
        }
    }
    for outcome in ["failed", "aborted"] {
        let ended = world.metric(&format!("selections_total{{outcome=\"{outcome}\"}}"));
        assert_eq!(ended, 2, "{outcome}");
    }
    let failures = world.metric("requests_total{outcome=\"engine_5xx\",route=\"completions\"}");
    assert_eq!(failures, 1);
}

#[tokio::test]
async fn a_request_that_is_not_served_gets_no_ticket() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let selections = Selections::new(&world.app);
    let refused = async |text: &'static str, endpoints: Option<Vec<String>>| {
        let request = Request::post("/v1/completions")
            .body(Body::from(text))
            .unwrap();
        selections
            .select(request, endpoints)
            .await
            .unwrap_err()
            .status()
    };
    assert_eq!(refused("{", None).await, StatusCode::BAD_REQUEST);
    let outside = Some(vec!["192.0.2.1:1".to_owned()]);
    let status = refused(r#"{"model":"m","prompt":[1]}"#, outside).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(!selections.first_token("no-ticket").await);
    world.until_quiet().await;
    assert_eq!(world.metric("selections_total{outcome=\"refused\"}"), 2);
}

#[tokio::test(start_paused = true)]
async fn a_forgotten_ticket_expires() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let selections = Selections::new(&world.app);
    let stop = tokio_util::sync::CancellationToken::new();
    let expiry = TaskTracker::new().spawn(Arc::clone(&selections).expire(stop.clone()));
    let forgotten = select(&selections, &body(40)).await;
    let kept = select(&selections, &body(40)).await;
    tokio::time::sleep(Duration::from_secs(599)).await;
    assert!(selections.first_token(&kept.ticket).await);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(load(&world).0, 1);
    assert!(!selections.first_token(&forgotten.ticket).await);
    assert!(selections.first_token(&kept.ticket).await);
    assert_eq!(world.metric("selections_total{outcome=\"expired\"}"), 1);
    stop.cancel();
    expiry.await.unwrap();
}
