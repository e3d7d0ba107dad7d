//! A real Prometheus with the alerts of `deploy/prometheus/rules.yml`, over a fleet on NATS.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::fleet::{Fleet, Process, free_port};
use crate::nats_server::child::Watchdog;

/// One for each kind of process.
const JOBS: [&str; 3] = ["router", "indexer", "shim"];

/// Scrapes and evaluates each second.
pub(crate) struct Prometheus {
    child: Child,
    watchdog: Watchdog,
    base: String,
}

impl Prometheus {
    pub(crate) async fn start(fleet: &Fleet) -> Self {
        discover(fleet);
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

    /// The series of a query.
    pub(crate) async fn query(&self, fleet: &Fleet, query: &str) -> Vec<Value> {
        let url = format!("{}/api/v1/query", self.base);
        let escaped = query.bytes().map(|byte| format!("%{byte:02x}"));
        let form = format!("query={}", escaped.collect::<String>());
        let asked = fleet.http.post(url).body(form);
        let asked = asked.header("content-type", "application/x-www-form-urlencoded");
        let answer = asked.send().await.expect("an answer");
        let answer: Value = answer.json().await.expect("JSON");
        assert_eq!(answer["status"], "success", "{query}: {answer}");
        let series = answer["data"]["result"].as_array().expect("a vector");
        series.clone()
    }

    /// Alerts whose condition holds, for however short a time.
    pub(crate) async fn alerts(&self, fleet: &Fleet) -> Vec<Value> {
        let shown = fleet.get(format!("{}/api/v1/alerts", self.base)).await;
        let alerts = shown["data"]["alerts"].as_array().expect("alerts");
        alerts.clone()
    }

    /// Alerts that fired since the start.
    pub(crate) async fn fired(&self, fleet: &Fleet) -> Vec<Value> {
        let query = r#"count_over_time(ALERTS{alertstate="firing"}[1h])"#;
        self.query(fleet, query).await
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        self.watchdog.end();
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

pub(crate) fn deploy(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../deploy")
        .join(path)
}

/// The targets are files, which Prometheus reads again when they change. JSON is YAML.
fn config_text(fleet: &Fleet) -> String {
    let job = |name: &str| {
        let files = json!({ "files": [fleet.file(&format!("{name}.json"))] });
        json!({ "job_name": name, "file_sd_configs": [files] })
    };
    json!({
        "global": { "scrape_interval": "1s", "evaluation_interval": "1s" },
        "rule_files": [deploy("prometheus/rules.yml")],
        "scrape_configs": JOBS.map(job),
    })
    .to_string()
}

/// Names the processes that run now, as a service discovery does.
pub(crate) fn discover(fleet: &Fleet) {
    let address = |url: String| url.replace("http://", "");
    let running = |processes: &[Process]| {
        let running = processes.iter().filter(|process| process.is_running());
        running.map(|process| address(process.base())).collect()
    };
    let routers = 0..fleet.routers.len();
    let routers = routers.map(|router| address(fleet.admin(router, "")));
    let (indexers, shims) = (&fleet.parts().indexers, &fleet.parts().shims);
    let targets: [Vec<String>; 3] = [routers.collect(), running(indexers), running(shims)];
    for (job, targets) in JOBS.iter().zip(targets) {
        let part = fleet.file("targets.part");
        fs::write(&part, json!([{ "targets": targets }]).to_string()).expect("a file");
        fs::rename(part, fleet.file(&format!("{job}.json"))).expect("the same directory");
    }
}
