//! Recording of requests for later replays, into the directory that the settings name.
//!
//! A request that is recorded holds a [`RecordTicket`], which queues its facts at its end. One task
//! writes the queue. A full queue, a prompt that is too long for a file and a failed write
//! drop records and count them; no request waits.

mod files;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warmroute_sim::recording::RequestFacts;

use crate::batch_task::{BatchSink, BatchTask};
use crate::metrics::{Metrics, RecordResult};
use crate::route::Prompt;
use crate::settings::{LiveSettings, RecordingRule};

use files::RecordingFiles;

/// Records that wait to be written.
const QUEUE_MAX: usize = 4096;

/// Blocks of their prompts, of 8 bytes each.
const QUEUED_BLOCKS_MAX: usize = 4 << 20;

/// Time after which a failed recording is begun again.
const RETRY_PERIOD: Duration = Duration::from_secs(30);

/// Begins records while a recording runs.
#[derive(Clone)]
pub(crate) struct Recorder {
    queue: mpsc::Sender<QueuedRecord>,
    shared: Arc<SharedState>,
}

struct SharedState {
    /// A recording runs.
    runs: AtomicBool,
    queued_blocks: AtomicUsize,
    metrics: Arc<Metrics>,
}

/// A request that ended.
pub(crate) struct QueuedRecord {
    arrived: Instant,
    facts: RequestFacts,
    prompt: Arc<Prompt>,
}

/// A request that is recorded at its end.
pub(crate) struct RecordTicket {
    recorder: Recorder,
    prompt: Arc<Prompt>,
}

/// Writes the files of the recording that the settings in force ask for.
pub(crate) struct RecordWriter {
    shared: Arc<SharedState>,
    settings: Arc<LiveSettings>,
    /// What `files` was opened by, or failed by.
    rule: Option<RecordingRule>,
    files: Option<RecordingFiles>,
    retry_at: Instant,
}

impl Recorder {
    pub(crate) fn new(
        settings: Arc<LiveSettings>,
        metrics: Arc<Metrics>,
    ) -> (Self, BatchTask<RecordWriter>) {
        let (sender, queue) = mpsc::channel(QUEUE_MAX);
        let shared = Arc::new(SharedState {
            runs: AtomicBool::new(false),
            queued_blocks: AtomicUsize::new(0),
            metrics,
        });
        let writer = RecordWriter {
            shared: Arc::clone(&shared),
            settings,
            rule: None,
            files: None,
            retry_at: Instant::now(),
        };
        let task = BatchTask::new(queue, writer);
        let queue = sender;
        (Self { queue, shared }, task)
    }

    pub(crate) fn runs(&self) -> bool {
        self.shared.runs.load(Ordering::Relaxed)
    }

    /// Begins a request's record; `None` if nothing is recorded.
    pub(crate) fn open(&self, prompt: &Arc<Prompt>) -> Option<RecordTicket> {
        self.runs().then(|| RecordTicket {
            recorder: self.clone(),
            prompt: Arc::clone(prompt),
        })
    }
}

impl RecordTicket {
    /// Queues the record of a request that has ended.
    pub(crate) fn end(self, arrived: Instant, facts: RequestFacts) {
        let Self { recorder, prompt } = self;
        let shared = &recorder.shared;
        let blocks = prompt.blocks().len();
        let queued = shared.queued_blocks.fetch_add(blocks, Ordering::Relaxed);
        let record = QueuedRecord {
            arrived,
            facts,
            prompt,
        };
        if queued + blocks > QUEUED_BLOCKS_MAX || recorder.queue.try_send(record).is_err() {
            shared.queued_blocks.fetch_sub(blocks, Ordering::Relaxed);
            shared.metrics.recorded(RecordResult::Dropped, 1);
        }
    }
}

impl BatchSink for RecordWriter {
    type Entry = QueuedRecord;
    const BATCH_MAX: usize = 256;

    /// Starts or ends a recording where the settings changed, or after a failure.
    async fn follow_settings(&mut self) {
        let rule = self.settings.current().recording();
        let retries = self.files.is_none() && Instant::now() >= self.retry_at;
        if rule == self.rule && !(rule.is_some() && retries) {
            return;
        }
        self.rule.clone_from(&rule);
        // The lock of the directory ends first.
        self.begin(None);
        let Some(rule) = rule else {
            tracing::info!("recording is off");
            return;
        };
        let dir = rule.dir.clone();
        match spawn_blocking(move || RecordingFiles::open(rule)).await {
            Ok(Ok(files)) => {
                tracing::info!(dir = %dir.display(), "recording requests");
                self.begin(Some(files));
            }
            Ok(Err(error)) => {
                tracing::error!(%error, dir = %dir.display(), "cannot record");
                self.retry_at = Instant::now() + RETRY_PERIOD;
            }
            Err(error) => tracing::error!(%error, "the recording ended"),
        }
    }

    async fn write(&mut self, batch: Vec<QueuedRecord>, _stop: &CancellationToken) {
        let count = batch.len() as u64;
        let blocks = batch.iter().map(|record| record.prompt.blocks().len());
        let blocks: usize = blocks.sum();
        let metrics = Arc::clone(&self.shared.metrics);
        let written = match self.files.take() {
            None => 0,
            Some(mut files) => {
                let append = move || {
                    let appended = files.append(&batch);
                    (files, appended)
                };
                match spawn_blocking(append).await {
                    Ok((files, Ok(written))) => {
                        self.files = Some(files);
                        written
                    }
                    Ok((_, Err(error))) => self.failed(&error),
                    Err(error) => self.failed(&error),
                }
            }
        };
        self.shared
            .queued_blocks
            .fetch_sub(blocks, Ordering::Relaxed);
        metrics.recorded(RecordResult::Written, written);
        metrics.recorded(RecordResult::Dropped, count - written);
    }
}

impl RecordWriter {
    fn begin(&mut self, files: Option<RecordingFiles>) {
        self.shared.runs.store(files.is_some(), Ordering::Relaxed);
        self.shared.metrics.recording(files.is_some());
        self.files = files;
    }

    /// Ends the recording until it is tried again. Returns the number of written records.
    fn failed(&mut self, error: &dyn std::error::Error) -> u64 {
        tracing::error!(%error, "cannot write the recording, trying again in {RETRY_PERIOD:?}");
        self.begin(None);
        self.retry_at = Instant::now() + RETRY_PERIOD;
        0
    }
}
