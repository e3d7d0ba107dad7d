use std::io;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::{get, post};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio_util::task::TaskTracker;
use tower::util::MapFutureLayer;
use warmroute_process::tls::EngineTls;

use super::*;
use crate::engine_clients::{EngineClients, SocketRule};
use crate::engine_keys::EngineKeys;

async fn probe(client: EngineClients, target: &ProbeTarget) -> ProbeResult {
    let keys = EngineKeys::default();
    HttpProbe { client, keys }.probe(target).await
}

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
    let client = crate::testing::engine_clients();
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
            asks_sleep: false,
        };
        let result = probe(client.clone(), &target).await;
        assert_eq!(result, ProbeResult::Seen(expected), "{engine}");
    }
    server.abort();
}

#[tokio::test]
async fn an_engine_is_asked_whether_it_sleeps_unless_it_does_not_tell() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let woken = Arc::new(AtomicBool::new(false));
    let wakes = Arc::clone(&woken);
    let wake = move || {
        wakes.store(true, Ordering::Relaxed);
        async { "" }
    };
    let router = Router::new()
        .route("/{engine}/health", get(|| async { "" }))
        .route(
            "/asleep/is_sleeping",
            get(|| async { r#"{"is_sleeping":true}"# }),
        )
        .route("/asleep/wake_up", post(wake))
        .route(
            "/awake/is_sleeping",
            get(|| async { r#"{"is_sleeping":false}"# }),
        )
        .route("/odd/is_sleeping", get(|| async { "no" }));
    let server =
        TaskTracker::new().spawn(async move { axum::serve(listener, router).await.unwrap() });
    let client = crate::testing::engine_clients();
    for (engine, asks_sleep, expected) in [
        ("asleep", true, Observation::Asleep),
        ("asleep", false, Observation::ProbePassed),
        ("awake", true, Observation::ProbePassed),
        ("odd", true, Observation::PassedWithoutSleep),
        ("without", true, Observation::PassedWithoutSleep),
    ] {
        let target = ProbeTarget {
            worker: "w".into(),
            url: format!("{url}/{engine}"),
            must_list: Vec::new(),
            asks_sleep,
        };
        let (client, keys) = (client.clone(), EngineKeys::default());
        let prober = HttpProbe { client, keys };
        let result = prober.probe(&target).await;
        assert_eq!(result, ProbeResult::Seen(expected), "{engine}");
        prober.wake(&target).await;
    }
    assert!(woken.load(Ordering::Relaxed));
    server.abort();
}

/// The file of an engine's socket may be absent, or left by an engine that has ended.
#[tokio::test]
async fn an_engine_at_a_unix_socket_is_probed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("engine.sock");
    let seen = async || {
        let target = ProbeTarget {
            worker: "w".into(),
            url: format!("unix:{}", path.display()),
            must_list: [].into(),
            asks_sleep: false,
        };
        let client = crate::testing::engine_clients();
        probe(client, &target).await
    };
    assert_eq!(seen().await, ProbeResult::Seen(Observation::ConnectRefused));
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let router = Router::new().route("/health", get(|| async { "" }));
    let server = async move { axum::serve(listener, router).await.unwrap() };
    let server = TaskTracker::new().spawn(server);
    assert_eq!(seen().await, ProbeResult::Seen(Observation::ProbePassed));
    server.abort();
    assert!(server.await.unwrap_err().is_cancelled());
    assert_eq!(seen().await, ProbeResult::Seen(Observation::ConnectRefused));
}

/// Connections fail by this error of the system.
fn fails<F, C, E>(
    errno: i32,
) -> MapFutureLayer<impl Fn(F) -> BoxFuture<'static, Result<C, E>> + Clone + use<F, C, E>>
where
    F: Future<Output = Result<C, E>> + Send + 'static,
    C: Send + 'static,
    E: From<io::Error> + Send + 'static,
{
    MapFutureLayer::new(move |_| {
        std::future::ready(Err(io::Error::from_raw_os_error(errno).into())).boxed()
    })
}

#[tokio::test]
async fn a_probe_without_a_file_for_it_says_nothing_of_the_worker() {
    // As Linux numbers them.
    let [files, refused, unreachable] = [24, 111, 113];
    for (errno, expected) in [
        (files, ProbeResult::Void),
        (refused, ProbeResult::Seen(Observation::ConnectRefused)),
        (unreachable, ProbeResult::Seen(Observation::ProbeFailed)),
    ] {
        let client = EngineClients::new(SocketRule::Allowed, move || {
            let client = EngineTls::system().unwrap().client();
            client.connector_layer(fails(errno))
        });
        let target = ProbeTarget {
            worker: "w".into(),
            url: "http://127.0.0.1:1".to_owned(),
            must_list: [].into(),
            asks_sleep: false,
        };
        let result = probe(client.unwrap(), &target).await;
        assert_eq!(result, expected, "{errno}");
    }
}
