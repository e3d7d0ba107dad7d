//! A real Prometheus scrapes a fleet under load: every panel of every dashboard in `deploy/grafana`
//! has data, and no alert of `deploy/prometheus/rules.yml` fires.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fastrand::Rng;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::fleet::traffic::{request, send};
use crate::fleet::{Engines, Flags, Fleet, Mode, free_port};
use crate::nats_server::child::Watchdog;

/// Scrapes each second; a dozen queries of 30 s need some of them.
const PATIENCE: Duration = Duration::from_secs(120);

/// What Grafana puts in place of the variables when all of their values are chosen.
const VARIABLES: [(&str, &str); 4] = [
    ("$__rate_interval", "30s"),
    ("$model", ".*"),
    ("$worker", ".*"),
    ("$instance", ".*"),
];

struct Prometheus {
    child: Child,
    watchdog: Watchdog,
    base: String,
}

/// One query of a dashboard.
struct PanelQuery {
    /// Dashboard and panel.
    name: String,
    query: String,
}

impl Prometheus {
    async fn start(fleet: &Fleet) -> Self {
        let config = fleet.file("prometheus.yml");
        fs::write(&config, config_text(fleet)).expect("a file");
        let port = free_port();
        let log = fs::File::create(fleet.file("prometheus.log")).expect("a file");
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                fleet.file("tsdb").display()
            ))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("prometheus is installed (Debian: prometheus)");
        let started = Self {
            watchdog: Watchdog::over(&child),
            child,
            base: format!("http://127.0.0.1:{port}"),
        };
        let ready = format!("{}/-/ready", started.base);
        fleet
            .until("Prometheus is ready", async |fleet| {
                let answer = fleet.http.get(&ready).send().await;
                answer.is_ok_and(|answer| answer.status().is_success())
            })
            .await;
        started
    }

    /// Whether the query has a value that is a number.
    async fn has_data(&self, fleet: &Fleet, query: &str) -> bool {
        let url = format!("{}/api/v1/query", self.base);
        let escaped = query.bytes().map(|byte| format!("%{byte:02x}"));
        let form = format!("query={}", escaped.collect::<String>());
        let asked = fleet.http.post(url).body(form);
        let asked = asked.header("content-type", "application/x-www-form-urlencoded");
        let answer: Value = asked
            .send()
            .await
            .expect("an answer")
            .json()
            .await
            .expect("JSON");
        assert_eq!(answer["status"], "success", "{query}: {answer}");
        let series = answer["data"]["result"].as_array().expect("a vector");
        let number = |one: &Value| {
            let value = one["value"][1].as_str().expect("a value");
            value.parse::<f64>().is_ok_and(f64::is_finite)
        };
        series.iter().any(number)
    }

    async fn alerts(&self, fleet: &Fleet) -> Value {
        fleet.get(format!("{}/api/v1/alerts", self.base)).await
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        self.watchdog.end();
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn deploy(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../deploy")
        .join(path)
}

/// One job for each kind of process.
fn config_text(fleet: &Fleet) -> String {
    let address = |url: String| url.replace("http://", "");
    let parts = fleet.parts();
    let routers = (0..fleet.routers.len()).map(|router| address(fleet.admin(router, "")));
    let shims = parts.shims.iter().map(|shim| address(shim.base()));
    let indexers = parts.indexers.iter().map(|indexer| address(indexer.base()));
    let job = |name: &str, targets: Vec<String>| {
        let group = json!({ "targets": targets });
        json!({ "job_name": name, "static_configs": [group] })
    };
    // JSON is YAML.
    json!({
        "global": { "scrape_interval": "1s", "evaluation_interval": "1s" },
        "rule_files": [deploy("prometheus/rules.yml")],
        "scrape_configs": [
            job("router", routers.collect()),
            job("indexer", indexers.collect()),
            job("shim", shims.collect()),
        ],
    })
    .to_string()
}

/// The queries of all dashboards.
fn panel_queries() -> Vec<PanelQuery> {
    let mut queries = Vec::new();
    for name in ["fleet", "worker", "router", "plane"] {
        let text = fs::read_to_string(deploy(&format!("grafana/{name}.json"))).expect("a file");
        let dashboard: Value = serde_json::from_str(&text).expect("JSON");
        for panel in dashboard["panels"].as_array().expect("panels") {
            for target in panel["targets"].as_array().expect("targets") {
                let expr = target["expr"].as_str().expect("a query");
                let all = VARIABLES.into_iter();
                queries.push(PanelQuery {
                    name: format!("{name}: {}", panel["title"]),
                    query: all.fold(expr.to_owned(), |query, (of, to)| query.replace(of, to)),
                });
            }
        }
    }
    queries
}

/// The source that declares the metrics.
fn declarations() -> String {
    let root = deploy("..");
    let files = [
        "router/src/metrics.rs",
        "router/src/settings/tls.rs",
        "indexer/src/metrics.rs",
        "publisher-shim/src/metrics.rs",
        "proto/process/src/nats.rs",
        "proto/process/src/build.rs",
    ];
    let folders = ["router/src/metrics", "indexer/src/metrics"];
    let within = folders.iter().flat_map(|folder| {
        let entries = fs::read_dir(root.join(folder)).expect("a folder");
        entries.map(|entry| entry.expect("an entry").path())
    });
    let files = files.iter().map(|file| root.join(file));
    let sources = files.chain(within).filter(|path| path.is_file());
    let read = |path| fs::read_to_string(path).expect("a file");
    sources.map(read).collect()
}

/// Queries that may be empty in health end with `or on() vector(0)`, which would hide a wrong name.
#[test]
fn every_queried_metric_is_declared() {
    let declared = declarations();
    let mut text = fs::read_to_string(deploy("prometheus/rules.yml")).expect("a file");
    text.extend(panel_queries().into_iter().map(|one| one.query + "\n"));
    let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
    for rest in text.split("warmroute_").skip(1) {
        let name = rest.split(|c| !is_name(c)).next().unwrap_or_default();
        let parts = ["router_", "indexer_", "shim_", "nats_"];
        let own = parts.iter().find_map(|part| name.strip_prefix(part));
        let own = own.unwrap_or(name);
        let bare = own.strip_suffix("_bucket").unwrap_or(own);
        let is_declared = [own, bare].iter().any(|one| {
            declared.contains(&format!("\"{one}\"")) || declared.contains(&format!("_{one}"))
        });
        assert!(is_declared, "warmroute_{name}");
    }
}

/// Some requests: streams, answers in one piece, and one for a model that no worker serves.
async fn load(fleet: &Fleet, rng: &mut Rng) {
    for number in 0..12 {
        let (path, mut body) = request(rng);
        if number % 2 == 0 {
            body["stream"] = json!(true);
            body["stream_options"] = json!({ "include_usage": true });
        }
        if number == 11 {
            body["model"] = json!("unknown");
        }
        let answer = send(fleet, path, &body).await;
        answer.bytes().await.expect("a whole answer");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_panel_has_data_and_no_alert_fires() {
    let engines = Engines {
        count: 2,
        ranks: 1,
        blocks: 600,
        flags: &["--profile", "instant"],
    };
    let mode = Mode::Nats {
        indexers: 2,
        routers: 2,
    };
    let fleet = Fleet::start(mode, engines, Flags::default()).await;
    let prometheus = Prometheus::start(&fleet).await;
    let mut rng = Rng::with_seed(51);
    let mut empty = panel_queries();
    assert!(empty.len() > 80, "{}", empty.len());
    let deadline = Instant::now() + PATIENCE;
    while !empty.is_empty() {
        let missing = empty
            .iter()
            .map(|one| format!("{}: {}", one.name, one.query));
        let missing: Vec<String> = missing.collect();
        assert!(Instant::now() < deadline, "no data: {missing:#?}");
        load(&fleet, &mut rng).await;
        let mut left = Vec::new();
        for one in empty {
            if !prometheus.has_data(&fleet, &one.query).await {
                left.push(one);
            }
        }
        empty = left;
    }
    let alerts = prometheus.alerts(&fleet).await;
    let alerts = alerts["data"]["alerts"].as_array().expect("alerts");
    let firing: Vec<&Value> = alerts
        .iter()
        .filter(|one| one["state"] == "firing")
        .collect();
    assert!(firing.is_empty(), "{firing:#?}");
}
