//! The access log: one line of JSON for each request, into the file that the settings name, or to
//! standard output.
//!
//! Requests queue their values when they end. One task formats and writes them. A full queue and a
//! failed write drop lines and count them; no request waits. A line has no prompt and no key. The
//! file is opened again within a second after it was renamed or deleted.

#[cfg(test)]
mod tests;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::http::HeaderValue;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;
use tracing::field;
use warmroute_process::access::keys::KeyId;

use crate::batch_task::{BatchSink, BatchTask};
use crate::call_report::EndedRequest;
use crate::metrics::{Metrics, RecordResult};
use crate::settings::LiveSettings;
use crate::tokenize::CivilTime;

/// Lines that wait to be written, up to 1 KiB each.
const QUEUE_MAX: usize = 8192;

/// For the router's user and group.
const FILE_MODE: u32 = 0o640;

/// The path that stands for standard output.
const STDOUT: &str = "-";

/// Queues lines while the log is on.
#[derive(Clone)]
pub(crate) struct AccessLog {
    queue: mpsc::Sender<Arc<EndedRequest>>,
    on: Arc<AtomicBool>,
    metrics: Arc<Metrics>,
}

/// Writes the file that the settings in force name.
pub(crate) struct AccessLogWriter {
    on: Arc<AtomicBool>,
    metrics: Arc<Metrics>,
    settings: Arc<LiveSettings>,
    path: Option<PathBuf>,
    output: Option<LogOutput>,
    /// The last failure, which is logged once.
    failure: Option<String>,
}

enum LogOutput {
    Stdout,
    File(File),
}

/// `docs/REFERENCE.md` describes the keys.
#[derive(Serialize)]
struct AccessLine<'a> {
    time: String,
    request_id: &'a str,
    correlation_id: Option<&'a str>,
    traceparent: Option<&'a str>,
    tenant: Option<&'a str>,
    route: &'a str,
    model: Option<&'a str>,
    worker: Option<&'a str>,
    dp_rank: Option<u32>,
    policy: Option<&'a str>,
    decision: Option<&'a str>,
    index_state: Option<&'a str>,
    prompt_tokens: u32,
    credited_tokens: Option<u32>,
    cached_tokens: Option<u32>,
    output_tokens: u32,
    #[serde(flatten)]
    times: LineTimes,
    resumes: u32,
    status: Option<u16>,
    outcome: &'a str,
}

#[derive(Serialize)]
struct LineTimes {
    queue_ms: f64,
    decision_ms: Option<f64>,
    ttft_ms: Option<f64>,
    total_ms: f64,
}

impl AccessLog {
    pub(crate) fn new(
        settings: Arc<LiveSettings>,
        metrics: Arc<Metrics>,
    ) -> (Self, BatchTask<AccessLogWriter>) {
        let (sender, queue) = mpsc::channel(QUEUE_MAX);
        let on = Arc::new(AtomicBool::new(false));
        let writer = AccessLogWriter {
            on: Arc::clone(&on),
            metrics: Arc::clone(&metrics),
            settings,
            path: None,
            output: None,
            failure: None,
        };
        let task = BatchTask::new(queue, writer);
        let queue = sender;
        (Self { queue, on, metrics }, task)
    }

    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Queues the line of a request, if the log is on.
    pub(crate) fn ended(&self, request: &Arc<EndedRequest>) {
        let is_queued = || {
            let has_place = request.takes_place(&self.queue);
            has_place && self.queue.try_send(Arc::clone(request)).is_ok()
        };
        if self.is_on() && !is_queued() {
            self.metrics.logged(RecordResult::Dropped, 1);
        }
    }
}

/// Appends the line of a request.
fn write_line(request: &EndedRequest, to: &mut Vec<u8>) {
    let text = |value: &'_ HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    let traces = request.traces.each_ref();
    let [correlation, traceparent] = traces.map(|one| one.as_ref().map(text));
    let millis = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
    let placement = request.placement.as_ref();
    let seconds = i64::try_from(request.time.as_secs()).unwrap_or(i64::MAX);
    let second = CivilTime::from_unix(seconds).format("%Y-%m-%dT%H:%M:%S");
    let line = AccessLine {
        time: format!("{second}.{:03}Z", request.time.subsec_millis()),
        request_id: &text(&request.request_id),
        correlation_id: correlation.as_deref(),
        traceparent: traceparent.as_deref(),
        tenant: request.tenant.as_ref().map(KeyId::as_str),
        route: request.route.label(),
        model: request.model.as_deref(),
        worker: placement.map(|one| one.source.worker.as_str()),
        dp_rank: placement.map(|one| one.source.dp_rank.0),
        policy: placement.map(|one| one.policy.label()),
        decision: placement.map(|one| one.basis.label()),
        index_state: placement.map(|one| one.index_state.label()),
        prompt_tokens: request.prompt_tokens,
        credited_tokens: placement.map(|one| one.credited_tokens),
        cached_tokens: request.cached_tokens,
        output_tokens: request.output_tokens,
        times: LineTimes {
            queue_ms: millis(request.timings.queue),
            decision_ms: request.timings.decision.map(millis),
            ttft_ms: request.timings.ttft.map(millis),
            total_ms: millis(request.total),
        },
        resumes: request.resumes,
        status: (request.status > 0).then_some(request.status),
        outcome: request.end.label(),
    };
    let before = to.len();
    if serde_json::to_writer(&mut *to, &line).is_err() {
        to.truncate(before);
        return;
    }
    to.push(b'\n');
}

impl BatchSink for AccessLogWriter {
    type Entry = Arc<EndedRequest>;
    const BATCH_MAX: usize = 512;

    /// Follows the settings, and opens a file again that is no longer at its path.
    async fn follow_settings(&mut self) {
        let path = self.settings.current().access_log();
        if path != self.path {
            self.on.store(path.is_some(), Ordering::Relaxed);
            self.path = path;
            self.output = None;
            self.failure = None;
        }
        let Some(path) = self.path.clone() else {
            return;
        };
        let output = self.output.take();
        match spawn_blocking(move || opened(&path, output)).await {
            Ok(Ok(output)) => {
                self.failure = None;
                self.output = Some(output);
            }
            Ok(Err(error)) => self.failed(&error),
            Err(error) => self.failed(&error),
        }
    }

    async fn write(&mut self, batch: Vec<Arc<EndedRequest>>, _stop: &CancellationToken) {
        let count = batch.len() as u64;
        let Some(mut output) = self.output.take() else {
            self.metrics.logged(RecordResult::Dropped, count);
            return;
        };
        let write = move || {
            let mut lines = Vec::new();
            for request in &batch {
                write_line(request, &mut lines);
            }
            let written = output.write_all(&lines);
            (output, written)
        };
        let result = match spawn_blocking(write).await {
            Ok((output, Ok(()))) => {
                self.output = Some(output);
                RecordResult::Written
            }
            Ok((_, Err(error))) => {
                self.failed(&error);
                RecordResult::Dropped
            }
            Err(error) => {
                self.failed(&error);
                RecordResult::Dropped
            }
        };
        self.metrics.logged(result, count);
    }
}

impl AccessLogWriter {
    /// Logs a failure once. The next check tries again.
    fn failed(&mut self, error: &dyn std::error::Error) {
        let text = error.to_string();
        if self.failure.as_ref() != Some(&text) {
            let path = self
                .path
                .as_deref()
                .map(|path| field::display(path.display()));
            tracing::error!(error = text, path, "cannot write the access log");
        }
        self.failure = Some(text);
        self.output = None;
    }
}

impl LogOutput {
    fn write_all(&mut self, lines: &[u8]) -> io::Result<()> {
        match self {
            Self::File(file) => file.write_all(lines),
            Self::Stdout => {
                let mut stdout = io::stdout().lock();
                stdout.write_all(lines)?;
                stdout.flush()
            }
        }
    }
}

/// The output at `path`: the open one, if it is still there.
fn opened(path: &Path, open: Option<LogOutput>) -> io::Result<LogOutput> {
    if path == Path::new(STDOUT) {
        return Ok(LogOutput::Stdout);
    }
    if let Some(LogOutput::File(file)) = open {
        let kept = file.metadata()?;
        let there = fs::metadata(path)
            .is_ok_and(|there| (there.dev(), there.ino()) == (kept.dev(), kept.ino()));
        if there {
            return Ok(LogOutput::File(file));
        }
    }
    let mut file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(FILE_MODE)
        .open(path)?;
    if ends_within_a_line(path, &file)? {
        file.write_all(b"\n")?;
    }
    Ok(LogOutput::File(file))
}

/// Whether the last write was cut, by a full disk or the end of its process. The next line would
/// continue that one.
fn ends_within_a_line(path: &Path, file: &File) -> io::Result<bool> {
    let found = file.metadata()?;
    if !found.is_file() || found.len() == 0 {
        return Ok(false);
    }
    let mut last = [0];
    let read = File::open(path).and_then(|file| file.read_exact_at(&mut last, found.len() - 1));
    // A file that may be written and not read is taken as it is.
    Ok(read.is_ok() && last != *b"\n")
}
