use std::collections::BTreeSet;

use serde_json::Value;
use tempfile::TempDir;

use super::*;
use crate::batch_task::CHECK_PERIOD;
use crate::call_report::CallReport;
use crate::metrics::{RequestEnd, RouteLabel};
use crate::settings::Settings;
use crate::testing::TestTask;

fn settings(path: &Path) -> Settings {
    let text = format!("access_log = \"{}\"\n", path.display());
    Settings::parse(&text).unwrap()
}

struct Running {
    log: AccessLog,
    live: Arc<LiveSettings>,
    metrics: Arc<Metrics>,
    task: TestTask,
}

impl Running {
    fn start(settings: Settings) -> Self {
        let live = LiveSettings::new(settings);
        let metrics = Arc::new(Metrics::new().unwrap());
        let (log, writer) = AccessLog::new(Arc::clone(&live), Arc::clone(&metrics));
        let task = TestTask::spawn(|stop| writer.run(stop));
        Self {
            log,
            live,
            metrics,
            task,
        }
    }

    async fn until_on(&self) {
        while !self.log.on.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn request(&self, id: &'static str) {
        self.request_with(id, 503);
    }

    fn request_with(&self, id: &'static str, status: u16) {
        let traces = [None, Some(HeaderValue::from_static("00-ab-cd-01"))];
        let id = HeaderValue::from_static(id);
        let mut report = CallReport::new(RouteLabel::Chat, id, traces);
        report.status = status;
        report.end = RequestEnd::Shed;
        report.tenant = Some("acme".parse().unwrap());
        let request = EndedRequest::new(&report, Duration::from_micros(1500));
        self.log.ended(&Arc::new(request));
    }

    fn lines(&self, outcome: &str) -> u64 {
        let series = format!("access_log_lines_total{{outcome=\"{outcome}\"}}");
        self.metrics.value(&series)
    }

    async fn until_written(&self, lines: u64) {
        while self.lines("written") < lines {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn end(self) -> Arc<Metrics> {
        self.task.end().await;
        self.metrics
    }
}

fn ids(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    let parse = |line: &str| serde_json::from_str::<Value>(line).unwrap();
    let ids = text.lines().map(|line| parse(line)["request_id"].clone());
    ids.map(|id| id.as_str().unwrap().to_owned()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_renamed_file_is_opened_again_and_the_stop_loses_nothing() {
    let folder = TempDir::new().unwrap();
    let (path, rotated) = (folder.path().join("log"), folder.path().join("log.1"));
    let running = Running::start(settings(&path));
    running.until_on().await;
    running.request("one");
    running.until_written(1).await;
    fs::rename(&path, &rotated).unwrap();
    tokio::time::sleep(2 * CHECK_PERIOD).await;
    running.request("two");
    running.until_written(2).await;
    running.live.replace(settings(&folder.path().join("other")));
    tokio::time::sleep(2 * CHECK_PERIOD).await;
    running.request("three \"quoted\"");
    running.end().await;
    assert_eq!(ids(&rotated), ["one"]);
    assert_eq!(ids(&path), ["two"]);
    assert_eq!(ids(&folder.path().join("other")), ["three \"quoted\""]);
}

/// As after a full disk: a line is lost, and the next one is whole.
#[tokio::test(start_paused = true)]
async fn a_torn_line_ends_before_the_next_one() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("log");
    fs::write(&path, "{\"request_id\":\"whole\"}\n{\"request_id\":\"to").unwrap();
    let running = Running::start(settings(&path));
    running.until_on().await;
    running.request("one");
    running.end().await;
    let text = fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[1], "{\"request_id\":\"to");
    let last: Value = serde_json::from_str(lines[2]).unwrap();
    assert_eq!((lines.len(), &last["request_id"]), (3, &"one".into()));
}

/// The keys are what `docs/REFERENCE.md` lists; none may show a prompt or a key.
#[tokio::test(start_paused = true)]
async fn a_line_has_these_keys() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("log");
    let running = Running::start(settings(&path));
    running.until_on().await;
    running.request("one");
    running.end().await;
    let line: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let keys: BTreeSet<&str> = line
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    let documented = include_str!("../../../docs/REFERENCE.md");
    let (_, section) = documented.split_once("### Access log").unwrap();
    let section = section.split("\n### ").next().unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
    let named = rows.flat_map(|row| {
        let names = row.split(" | ").next().unwrap_or_default();
        names.split(['`', ',', ' ']).filter(|name| !name.is_empty())
    });
    assert_eq!(named.collect::<BTreeSet<_>>(), keys);
    assert_eq!(line["status"], 503);
    assert_eq!(line["outcome"], "shed");
    assert_eq!(line["tenant"], "acme");
    assert_eq!(line["total_ms"], 1.5);
    assert_eq!(line["traceparent"], "00-ab-cd-01");
    assert_eq!(line["worker"], Value::Null);
    assert!(line["time"].as_str().unwrap().ends_with('Z'), "{line}");
}

#[tokio::test(start_paused = true)]
async fn lines_that_cannot_be_written_are_counted_and_no_request_waits() {
    let folder = TempDir::new().unwrap();
    // A directory is no file.
    let running = Running::start(settings(folder.path()));
    running.until_on().await;
    running.request("one");
    while running.lines("dropped") < 1 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    running.live.replace(settings(&folder.path().join("log")));
    tokio::time::sleep(2 * CHECK_PERIOD).await;
    // No task runs between two awaits.
    for _ in 0..QUEUE_MAX + 7 {
        running.request("many");
    }
    let metrics = running.end().await;
    let dropped = "access_log_lines_total{outcome=\"dropped\"}";
    assert_eq!(metrics.value(dropped), 8);
    assert_eq!(ids(&folder.path().join("log")).len(), QUEUE_MAX);
}

/// Requests without a valid key leave places for others.
#[tokio::test(start_paused = true)]
async fn clients_without_a_key_fill_no_queue() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("log");
    let running = Running::start(settings(&path));
    running.until_on().await;
    for _ in 0..QUEUE_MAX {
        running.request_with("unknown", 401);
    }
    running.request("one");
    running.end().await;
    let ids = ids(&path);
    assert_eq!(ids.len(), QUEUE_MAX / 8 + 1);
    assert_eq!(ids.last().unwrap(), "one");
}
