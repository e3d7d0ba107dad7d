//! A real Prometheus scrapes a fleet under load: every panel of every dashboard in `deploy/grafana`
//! has data, and no alert of `deploy/prometheus/rules.yml` fires.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use fastrand::Rng;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::fleet::traffic::{request, send};
use crate::fleet::{Engines, Flags, Fleet, Mode, report};
use crate::prometheus::{Prometheus, deploy};

/// Scrapes each second; a dozen queries of 30 s need some of them.
const PATIENCE: Duration = Duration::from_secs(120);

/// What Grafana puts in place of the variables when all of their values are chosen.
const VARIABLES: [(&str, &str); 4] = [
    ("$__rate_interval", "30s"),
    ("$model", ".*"),
    ("$worker", ".*"),
    ("$instance", ".*"),
];

/// Ends queries that have no series in health.
const FALLBACK: &str = " or on() vector(0)";

/// Panels with a query that has a series only after a failure, a drain or a lost record.
const HEALTHY: [&str; 11] = [
    "fleet: \"Workers\"",
    "router: \"Aborted by clients\"",
    "router: \"Attempts that engines failed\"",
    "router: \"Lost log lines and records\"",
    "router: \"Prompts without block hashes\"",
    "router: \"Retries\"",
    "router: \"Settings files refused\"",
    "router: \"Workers passed over\"",
    "worker: \"Credit ignored\"",
    "worker: \"Failed checks of tokenizer and blocks\"",
    "worker: \"Failed\"",
];

/// One query of a dashboard.
struct PanelQuery {
    /// Dashboard and panel.
    name: String,
    query: String,
}

/// Whether the query has a value that is a number.
async fn has_data(prometheus: &Prometheus, fleet: &Fleet, query: &str) -> bool {
    let number = |one: &Value| {
        let value = one["value"][1].as_str().expect("a value");
        value.parse::<f64>().is_ok_and(f64::is_finite)
    };
    prometheus.query(fleet, query).await.iter().any(number)
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
    // prometheus-adapter names a counter without its suffix.
    let autoscaler = deploy("kubernetes/components/autoscaling/router.yaml");
    let autoscaler = fs::read_to_string(autoscaler).expect("a file");
    let metric = autoscaler
        .split_once("metric: { name: ")
        .expect("a metric")
        .1;
    let (metric, _) = metric.split_once(" }").expect("its end");
    text += &format!("{metric}_total\n");
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
    let started = Instant::now();
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
            if !has_data(&prometheus, &fleet, &one.query).await {
                left.push(one);
            }
        }
        empty = left;
    }
    report(
        "every query of the dashboards, Prometheus included",
        started,
    );
    let mut silent = BTreeSet::new();
    for PanelQuery { name, query } in panel_queries() {
        let own = query.trim_end_matches(FALLBACK);
        if own != query && !has_data(&prometheus, &fleet, own).await {
            silent.insert(name);
        }
    }
    silent.retain(|name| !HEALTHY.contains(&&**name));
    assert!(silent.is_empty(), "only the fallback has data: {silent:#?}");
    let fired = prometheus.fired(&fleet).await;
    assert!(fired.is_empty(), "{fired:#?}");
}
