use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::get;
use tokio_util::task::TaskTracker;

use super::super::probe::{ProbeResult, probe};
use super::*;

#[tokio::test]
async fn an_unregistered_worker_must_list_its_models() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let page = |models: &str| {
        let page = format!(r#"{{"object":"list","data":[{models}]}}"#);
        get(|| async { page })
    };
    let sick = (StatusCode::SERVICE_UNAVAILABLE, "the engine is dead");
    let router = Router::new()
        .route("/{engine}/health", get(|| async { "" }))
        .route("/sick/health", get(move || async move { sick }))
        .route("/sick/v1/models", page(r#"{"id":"m"}"#))
        .route("/same/v1/models", page(r#"{"id":"m"},{"id":"adapter"}"#))
        .route("/other/v1/models", page(r#"{"id":"n"}"#));
    let server = async move { axum::serve(listener, router).await.unwrap() };
    let tasks = TaskTracker::new();
    let server = tasks.spawn(server);
    let client = crate::testing::http_client();
    for (engine, models, expected) in [
        ("same", vec!["m"], Observation::ProbePassed),
        ("other", vec!["m"], Observation::OtherEngine),
        ("other", vec![], Observation::ProbePassed),
        ("silent", vec!["m"], Observation::ProbePassed),
        ("sick", vec![], Observation::ProbeFailed),
        ("sick", vec!["m"], Observation::ProbeFailed),
    ] {
        let target = ProbeTarget {
            worker: "w".into(),
            url: format!("{url}/{engine}"),
            must_list: models.into_iter().map(str::to_owned).collect(),
        };
        let (_, result) = probe(client.clone(), HeaderMap::new(), target).await;
        assert_eq!(result, ProbeResult::Seen(expected), "{engine}");
    }
    server.abort();
}
