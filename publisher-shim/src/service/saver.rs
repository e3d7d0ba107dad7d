//! Checkpoints of one rank: read at the start, written while it runs and at its end.
//!
//! The rank's loop only makes the cut; encoding and writing run on a thread for what blocks, one at a
//! time. No failure here stops a shim: it is counted and said, and the next one is due in its time.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, timeout};
use tracing::{info, warn};
use warmroute_proto::Source;

use crate::checkpoint::{self, Checkpoint, Pace, Restored};
use crate::source::{CheckpointStatus, Config, SourceCore};
use crate::state_dir::StateDir;

/// A clean stop waits no longer for its last checkpoint.
const LAST_MAX: Duration = Duration::from_secs(3);

/// What one writing came to: bytes, or what went wrong.
pub(super) type Saved = Result<usize, String>;

pub(super) struct Saver {
    dir: Arc<StateDir>,
    source: Source,
    pace: Pace,
    under_way: Option<JoinHandle<Saved>>,
    /// Of the writing under way.
    begun: Instant,
    written_at: Option<Instant>,
    status: CheckpointStatus,
}

impl Saver {
    /// Reads what is there, and begins with it if it can be used.
    pub(super) async fn open(dir: Arc<StateDir>, config: Config) -> (SourceCore, Self) {
        let source = config.source.clone();
        let now = Instant::now();
        let mut saver = Self {
            dir: Arc::clone(&dir),
            source: source.clone(),
            pace: Pace::new(now.into_std()),
            under_way: None,
            begun: now,
            written_at: None,
            status: CheckpointStatus::default(),
        };
        let mirror = config.mirror;
        let read = spawn_blocking(move || read(&dir, &source, mirror)).await;
        let core = match read {
            Ok(Ok(Some(restored))) => {
                let point = &restored.header;
                info!(
                    source = %saver.source,
                    engine_seq = point.engine_seq.0,
                    generation = point.generation.0,
                    blocks = restored.blocks(),
                    "begins at a checkpoint"
                );
                SourceCore::resume(config, restored)
            }
            Ok(Ok(None)) => SourceCore::new(config),
            Ok(Err(why)) => saver.refuse(config, &why),
            Err(_) => saver.refuse(config, "reading it failed"),
        };
        (core, saver)
    }

    fn refuse(&mut self, config: Config, why: &str) -> SourceCore {
        self.status.refused += 1;
        warn!(source = %self.source, why, "a checkpoint is not used");
        SourceCore::new(config)
    }

    /// Begins a checkpoint if one is due.
    pub(super) fn consider(&mut self, core: &SourceCore) {
        let now = Instant::now();
        let (batches, generation) = (core.batches(), core.generation());
        let is_due = self.pace.is_due(now.into_std(), batches, generation);
        if self.under_way.is_none() && is_due {
            self.pace.taken(now.into_std(), batches, generation);
            if let Some(checkpoint) = core.checkpoint() {
                self.status.cut = now.elapsed();
                self.begun = now;
                self.under_way = Some(self.write(checkpoint));
            }
        }
    }

    fn write(&self, checkpoint: Checkpoint) -> JoinHandle<Saved> {
        let (dir, source) = (Arc::clone(&self.dir), self.source.clone());
        spawn_blocking(move || {
            let bytes = checkpoint::encode(&checkpoint);
            // Before the disk is waited for.
            drop(checkpoint);
            dir.save(&source, &bytes)
                .map_err(|error| error.to_string())?;
            Ok(bytes.len())
        })
    }

    /// Waits for the writing under way; for ever if there is none. Cancel-safe.
    pub(super) async fn saved(&mut self) -> Saved {
        match &mut self.under_way {
            Some(under_way) => {
                let saved = under_way.await;
                self.under_way = None;
                saved.unwrap_or_else(|error| Err(error.to_string()))
            }
            None => std::future::pending().await,
        }
    }

    pub(super) fn note(&mut self, saved: Saved) {
        match saved {
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

    /// The last checkpoint, at a clean stop.
    pub(super) async fn finish(mut self, core: &SourceCore) {
        let last = async {
            if self.under_way.is_some() {
                let saved = self.saved().await;
                self.note(saved);
            }
            if let Some(checkpoint) = core.checkpoint() {
                self.begun = Instant::now();
                let saved = self.write(checkpoint).await;
                self.note(saved.unwrap_or_else(|error| Err(error.to_string())));
            }
        };
        if timeout(LAST_MAX, last).await.is_err() {
            warn!("the last checkpoint takes too long: the one before it stays");
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
    dir: &StateDir,
    source: &Source,
    mirror: crate::mirror::Config,
) -> Result<Option<Restored>, String> {
    let Some(bytes) = dir.load(source).map_err(|error| error.to_string())? else {
        return Ok(None);
    };
    let restored = checkpoint::decode(&bytes, source, mirror);
    restored.map(Some).map_err(|refused| refused.to_string())
}
