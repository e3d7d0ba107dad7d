//! Writes snapshots: when one is due, by whichever replica has the lease.
//!
//! The order makes a crash at any point harmless: a blob under a new name, then the pointer by
//! compare-and-set, then the deletion of what neither of its two names needs. The lease only saves
//! double work.

use warmroute_plane::{Lease, PutIf, RegistryEntry};
use warmroute_proto::registry::SnapshotLease;
use warmroute_proto::snapshot::{SnapshotHead, SnapshotPointer, SnapshotRef};

use super::follow::{CutMade, CutRequest};
use super::*;
use crate::fold::NoSnapshot;
use crate::metrics::SnapshotOutcome;
use crate::snapshot::policy::{self, BUSY_PAUSE, LEASE, PAUSE, SnapshotProgress};
use crate::snapshot::{Name, format};

/// How often it is looked whether one is due.
const LOOK: Duration = Duration::from_secs(1);

/// The writer is busy restoring, or the plane is away.
const CUT_DEADLINE: Duration = Duration::from_secs(30);

/// The pointer changes hands rarely.
const POINTER_TRIES: usize = 8;

pub(super) struct Snapshots {
    context: ServiceContext,
    config: SnapshotConfig,
    progress: SnapshotProgress,
    attempts: u64,
}

impl Snapshots {
    pub(super) fn new(context: ServiceContext, config: SnapshotConfig) -> Self {
        Self {
            context,
            config,
            progress: SnapshotProgress::default(),
            attempts: 0,
        }
    }

    pub(super) async fn run(mut self, stop: CancellationToken) {
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = sleep(LOOK) => {}
            }
            let age = self.progress.age(now());
            self.context.shared.metrics.snapshot_age(age);
            // Dropped at an await it leaves a blob without a pointer, or a lease that runs out.
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = self.write_if_due() => {}
            }
        }
    }

    async fn write_if_due(&mut self) {
        let Some(reading) = self.reading() else {
            return;
        };
        if !self.progress.is_due(reading, &self.config.schedule) {
            return;
        }
        let outcome = match self.write(reading).await {
            Ok(outcome) => outcome,
            Err(error) => {
                warn!(%error, "no snapshot could be written");
                SnapshotOutcome::Failed
            }
        };
        if outcome != SnapshotOutcome::NotDue {
            self.context.shared.metrics.snapshots.outcomes.inc(outcome);
        }
        match outcome {
            SnapshotOutcome::Written | SnapshotOutcome::NotDue => {}
            SnapshotOutcome::Busy => self.progress.wait_until(now() + BUSY_PAUSE),
            SnapshotOutcome::Superseded
            | SnapshotOutcome::SetAside
            | SnapshotOutcome::Mismatch
            | SnapshotOutcome::Failed => self.progress.wait_until(now() + PAUSE),
        }
    }

    /// None while the start is not decided, or the log is not in.
    fn reading(&self) -> Option<ReadProgress> {
        let shared = &self.context.shared;
        let started = shared.started.load(Ordering::Acquire);
        let fold = shared.read();
        let is_in = fold.log().is_some() && fold.lag() <= READY_LAG_MAX;
        (started && is_in).then(|| shared.reading(&fold))
    }

    async fn write(&mut self, reading: ReadProgress) -> Result<SnapshotOutcome, PlaneError> {
        self.learn(reading).await?;
        if !self.progress.is_due(reading, &self.config.schedule) {
            return Ok(SnapshotOutcome::NotDue);
        }
        self.attempts += 1;
        let value = SnapshotLease {
            writer: self.config.writer.clone(),
            attempt: self.attempts,
        };
        let value = codec::encode(&value).map_err(as_unavailable)?;
        let plane = Arc::clone(&self.context.plane);
        let key = self.context.subjects.snapshot_lease_key();
        let Some(lease) = Lease::acquire(plane, key, value.into(), LEASE).await? else {
            return Ok(SnapshotOutcome::Busy);
        };
        let written = self.write_one().await;
        if let Err(error) = lease.release().await {
            debug!(%error, "the snapshot lease runs out by itself");
        }
        written
    }

    /// What the others did in the meantime.
    async fn learn(&mut self, reading: ReadProgress) -> Result<(), PlaneError> {
        let log = self.context.shared.read().log();
        match self.pointer().await? {
            Some((_, Some(pointer))) if Some(pointer.newest.log) == log => {
                if self.is_dead(&pointer).await? {
                    self.progress.nothing_there();
                } else {
                    self.progress.learned(reading, pointer.newest.at.position);
                }
            }
            Some(_) | None => self.progress.nothing_there(),
        }
        Ok(())
    }

    async fn write_one(&mut self) -> Result<SnapshotOutcome, PlaneError> {
        let begun = now();
        let made = self.cut().await?;
        let verified = in_background(move || {
            let cut = made.cut?;
            cut.verify()?;
            Ok(cut)
        });
        let cut = match verified.await? {
            Ok(cut) => cut,
            Err(error @ NoSnapshot::Mismatch(_)) => {
                error!(%error, "the tree contradicts itself: no snapshot is taken");
                return Ok(SnapshotOutcome::Mismatch);
            }
            Err(NoSnapshot::SetAside) => return Ok(SnapshotOutcome::SetAside),
            Err(NoSnapshot::Diverged) => return Ok(SnapshotOutcome::Busy),
            Err(NoSnapshot::Nothing) => return Ok(SnapshotOutcome::NotDue),
        };
        let (head, blob) = in_background(move || {
            let blob = format::encode(&cut.head, &cut.image);
            blob.map(|blob| (cut.head, Bytes::from(blob)))
        })
        .await?
        .map_err(as_unavailable)?;
        let bytes = blob.len() as u64;
        let name = self.name(&head).to_string();
        self.put(name.clone(), blob).await?;
        let new = SnapshotRef {
            name: name.clone(),
            log: head.log,
            at: head.at,
            bytes,
        };
        let Some(pointer) = self.move_pointer(new).await? else {
            self.context.plane.delete_snapshot(name).await?;
            return Ok(SnapshotOutcome::Superseded);
        };
        self.progress.took(made.reading);
        let took = now().saturating_duration_since(begun);
        let metrics = &self.context.shared.metrics;
        metrics.snapshot_written(bytes, made.took, took);
        let position = head.at.position;
        tracing::debug!(name, %position, bytes, locked = ?made.took, ?took, "snapshot written");
        self.clean_up(&pointer).await;
        Ok(SnapshotOutcome::Written)
    }

    async fn cut(&self) -> Result<CutMade, PlaneError> {
        let (request, made) = oneshot::channel();
        let bytes = self.context.shared.read().tree().image_bytes();
        let buffer = in_background(move || touched(bytes + bytes / 16)).await?;
        let request = CutRequest::Snapshot(buffer, request);
        let cut = async {
            let sent = self.context.shared.cuts.send(request).await;
            sent.map_err(as_unavailable)?;
            made.await.map_err(as_unavailable)
        };
        timeout(CUT_DEADLINE, cut).await.map_err(as_unavailable)?
    }

    /// The store hashes all of it on its way: not on a thread that answers queries.
    async fn put(&self, name: String, blob: Bytes) -> Result<(), PlaneError> {
        let plane = Arc::clone(&self.context.plane);
        let put = blocking::run_future(async move { plane.put_snapshot(name, blob).await });
        put.await.map_err(as_unavailable)?
    }

    fn name(&self, head: &SnapshotHead) -> Name {
        Name {
            log: head.log,
            position: head.at.position,
            suffix: format!("{}-{}", self.config.writer, self.attempts),
        }
    }

    /// The pointer's entry; the pointer is `None` if it cannot be decoded.
    async fn pointer(
        &self,
    ) -> Result<Option<(RegistryEntry, Option<SnapshotPointer>)>, PlaneError> {
        let key = self.context.subjects.snapshot_pointer_key();
        let entry = self.context.plane.get(key).await?;
        Ok(entry.map(|entry| {
            let pointer = codec::decode(&entry.value);
            let pointer = pointer.inspect_err(|error| {
                error!(%error, "unreadable pointer");
                self.context.shared.metrics.bad_entries.inc();
            });
            (entry, pointer.ok())
        }))
    }

    /// Is its record proven to be in the log no more?
    async fn is_dead(&self, pointer: &SnapshotPointer) -> Result<bool, PlaneError> {
        let newest = &pointer.newest;
        let fit = self.context.fit(newest.log, &newest.at).await?;
        Ok(fit.is_broken())
    }

    /// Makes the pointer name the new snapshot; `None` if it names a better one already.
    async fn move_pointer(&self, new: SnapshotRef) -> Result<Option<SnapshotPointer>, PlaneError> {
        for _ in 0..POINTER_TRIES {
            let present = self.pointer().await?;
            let condition = present
                .as_ref()
                .map_or(PutIf::Absent, |(entry, _)| PutIf::Revision(entry.revision));
            let pointer = present.and_then(|(_, pointer)| pointer);
            let is_dead = match &pointer {
                Some(pointer) => self.is_dead(pointer).await?,
                None => false,
            };
            let Some(moved) = policy::moved(pointer.as_ref(), new.clone(), is_dead) else {
                return Ok(None);
            };
            let value = codec::encode(&moved).map_err(as_unavailable)?;
            let key = self.context.subjects.snapshot_pointer_key();
            let put = self.context.plane.put(key, value.into(), condition, None);
            match put.await {
                Ok(_) => {
                    if let Some(dead) = pointer.filter(|_| is_dead) {
                        for name in policy::dropped(&dead, &moved) {
                            self.delete(name).await;
                        }
                    }
                    return Ok(Some(moved));
                }
                Err(PlaneError::Conflict) => {}
                Err(error) => return Err(error),
            }
        }
        Err(unavailable("the pointer keeps changing"))
    }

    /// What stays is deleted next time.
    async fn clean_up(&self, pointer: &SnapshotPointer) {
        match self.context.plane.snapshots().await {
            Ok(names) => {
                for name in policy::outdated(&names, pointer) {
                    self.delete(name).await;
                }
            }
            Err(error) => warn!(%error, "old snapshots cannot be listed"),
        }
    }

    async fn delete(&self, name: &str) {
        if let Err(error) = self.context.plane.delete_snapshot(name.to_owned()).await {
            warn!(name, %error, "an old snapshot cannot be deleted");
        }
    }
}

/// A buffer whose memory is there: to get it takes longer than to fill it, and the log would wait.
fn touched(bytes: usize) -> Vec<u8> {
    let mut buffer = vec![1; bytes];
    buffer.clear();
    buffer
}

async fn in_background<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, PlaneError> {
    blocking::run(work).await.map_err(as_unavailable)
}

fn as_unavailable(error: impl std::fmt::Display) -> PlaneError {
    PlaneError::Unavailable(error.to_string())
}

#[cfg(test)]
mod tests;
