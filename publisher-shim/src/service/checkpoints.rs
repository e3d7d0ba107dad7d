//! Checkpoints of one rank: read at the start, written periodically and at the end.
//!
//! The rank's loop only takes the copy; encoding and writing block, and run elsewhere, one at a time.
//! No failure here stops a shim: it is counted and logged, and the next checkpoint is due as usual.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};
use tracing::{info, warn};
use warmroute_process::blocking;
use warmroute_proto::Source;

use crate::checkpoint::{self, Checkpoint, CheckpointSchedule, Restored};
use crate::source::{CheckpointStatus, SourceConfig, SourceCore};
use crate::state_dir::CheckpointStore;

/// The longest wait of a clean stop for its last checkpoint.
const LAST_WRITE_MAX: Duration = Duration::from_secs(3);

/// Bytes written, or the error.
pub(super) type WriteResult = Result<usize, String>;

type Writing = Pin<Box<dyn Future<Output = WriteResult> + Send>>;

pub(super) struct CheckpointWriter {
    store: Arc<dyn CheckpointStore>,
    source: Source,
    schedule: CheckpointSchedule,
    writing: Option<Writing>,
    /// When the current write began.
    begun: Instant,
    written_at: Option<Instant>,
    status: CheckpointStatus,
}

impl CheckpointWriter {
    /// Reads the stored checkpoint, and resumes from it if it is usable.
    pub(super) async fn open(
        store: Arc<dyn CheckpointStore>,
        config: SourceConfig,
    ) -> (SourceCore, Self) {
        let source = config.source.clone();
        let now = Instant::now();
        let mut writer = Self {
            store: Arc::clone(&store),
            source: source.clone(),
            schedule: CheckpointSchedule::new(now.into_std()),
            writing: None,
            begun: now,
            written_at: None,
            status: CheckpointStatus::default(),
        };
        let mirror = config.mirror;
        let read = blocking::run(move || read(&*store, &source, mirror)).await;
        let core = match read {
            Ok(Ok(Some(restored))) => {
                let point = &restored.header;
                info!(
                    source = %writer.source,
                    engine_seq = point.engine_seq.0,
                    generation = point.generation.0,
                    blocks = restored.blocks(),
                    "resumed from a checkpoint"
                );
                SourceCore::resume(config, restored)
            }
            Ok(Ok(None)) => SourceCore::new(config),
            Ok(Err(why)) => writer.refuse(config, &why),
            Err(_) => writer.refuse(config, "reading it failed"),
        };
        (core, writer)
    }

    fn refuse(&mut self, config: SourceConfig, why: &str) -> SourceCore {
        self.status.refused += 1;
        warn!(source = %self.source, why, "checkpoint refused");
        SourceCore::new(config)
    }

    /// Begins a write if one is due.
    pub(super) fn write_if_due(&mut self, core: &SourceCore) {
        let now = Instant::now();
        let (batches, generation) = (core.batches(), core.generation());
        let is_due = self.schedule.is_due(now.into_std(), batches, generation);
        if self.writing.is_none() && is_due {
            self.schedule.taken(now.into_std(), batches, generation);
            if let Some(checkpoint) = core.checkpoint() {
                self.status.cut = now.elapsed();
                self.begun = now;
                self.writing = Some(self.write(checkpoint));
            }
        }
    }

    fn write(&self, checkpoint: Checkpoint) -> Writing {
        let (store, source) = (Arc::clone(&self.store), self.source.clone());
        let write = move || {
            let bytes = checkpoint::encode(&checkpoint);
            // Frees the copy before the disk write.
            drop(checkpoint);
            store
                .save(&source, &bytes)
                .map_err(|error| error.to_string())?;
            Ok(bytes.len())
        };
        Box::pin(async {
            let written = blocking::run(write).await;
            written.unwrap_or_else(|error| Err(error.to_string()))
        })
    }

    /// Drives the current write to its end; pending if there is none. Cancel-safe.
    pub(super) async fn written(&mut self) -> WriteResult {
        match &mut self.writing {
            Some(writing) => {
                let written = writing.await;
                self.writing = None;
                written
            }
            None => std::future::pending().await,
        }
    }

    pub(super) fn record(&mut self, written: WriteResult) {
        match written {
            Ok(bytes) => {
                self.written_at = Some(self.begun);
                self.status.written += 1;
                self.status.bytes = bytes;
                self.status.took = self.begun.elapsed();
            }
            Err(error) => {
                self.status.failed += 1;
                warn!(source = %self.source, %error, "cannot write a checkpoint");
            }
        }
    }

    /// Writes the last checkpoint at a clean stop.
    pub(super) async fn finish(mut self, core: &SourceCore) {
        let last = async {
            if self.writing.is_some() {
                let written = self.written().await;
                self.record(written);
            }
            if let Some(checkpoint) = core.checkpoint() {
                self.begun = Instant::now();
                let written = self.write(checkpoint).await;
                self.record(written);
            }
        };
        if timeout(LAST_WRITE_MAX, last).await.is_err() {
            warn!("the last checkpoint is not written in time; the previous one stays");
        }
    }

    pub(super) fn status(&self) -> CheckpointStatus {
        CheckpointStatus {
            age: self.written_at.map(|at| at.elapsed()),
            ..self.status
        }
    }
}

fn read(
    store: &dyn CheckpointStore,
    source: &Source,
    mirror: crate::mirror::MirrorConfig,
) -> Result<Option<Restored>, String> {
    let Some(bytes) = store.load(source).map_err(|error| error.to_string())? else {
        return Ok(None);
    };
    let restored = checkpoint::decode(&bytes, source, mirror);
    restored.map(Some).map_err(|refused| refused.to_string())
}
