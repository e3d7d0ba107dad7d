//! Follows the workers and the operators' drains in the registry, and writes drains.
//!
//! A drain's entry has no lease and a key of its own: it reaches all routers, and outlives restarts
//! of routers and the registration of its worker.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prometheus::IntCounter;
use tokio::time::{Instant, MissedTickBehavior, interval, interval_at};
use tokio_util::sync::CancellationToken;
use warmroute_plane::{Plane, PlaneError, PutIf, RegistryEvent, RegistryWatch, Revision};
use warmroute_proto::registry::{DrainEntry, DrainState, DrainUntil, ShimEntry, WorkerEntry};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{WorkerId, codec};

use super::Fleet;
use super::drain_table::{DrainTable, DrainWrite};
use super::state::FleetChange;
use crate::clock::unix_time;
use crate::ready::Ready;

/// Between two comparisons of the registry's drains with the known ones.
pub(super) const REPAIR_PERIOD: Duration = Duration::from_millis(500);

/// Between two collections of entries that nothing needs.
const COLLECT_PERIOD: Duration = Duration::from_secs(3600);

/// Attempts to write a drain while other routers write one of the same worker.
const WRITES_MAX: usize = 4;

pub struct FleetRegistry {
    pub fleet: Arc<Fleet>,
    pub plane: Arc<dyn Plane>,
    pub subjects: Subjects,
    pub ready: Arc<Ready>,
    pub unreadable: IntCounter,
    pub drains_read: AtomicBool,
}

impl FleetRegistry {
    /// The drains that were stored before this router started are known.
    pub(crate) fn drains_read(&self) -> bool {
        self.drains_read.load(Ordering::Relaxed)
    }

    /// Drains a worker: valid here and written for all routers once this returns. Idempotent, but a
    /// drain until undone replaces one that ends by itself. After an error the entry may be written
    /// or not: repeat the command.
    pub(crate) async fn drain(
        &self,
        worker: &WorkerId,
        until: DrainUntil,
    ) -> Result<(), PlaneError> {
        self.write_drain(worker, |drains, now| drains.drain_write(worker, until, now))
            .await
    }

    /// Ends a worker's drain, with the guarantees of [`Self::drain`].
    pub(crate) async fn undrain(&self, worker: &WorkerId) -> Result<(), PlaneError> {
        self.write_drain(worker, |drains, now| drains.end_write(worker, now))
            .await
    }

    /// Writes what `next` gives, until it gives nothing.
    async fn write_drain(
        &self,
        worker: &WorkerId,
        next: impl Fn(&DrainTable, u64) -> Option<DrainWrite>,
    ) -> Result<(), PlaneError> {
        if !self.drains_read() {
            self.read_drain(worker).await?;
        }
        for _ in 0..WRITES_MAX {
            let now = unix_time().as_secs();
            let write = next(&self.fleet.state().drains, now);
            let Some(mut write) = write else {
                return Ok(());
            };
            if write.entry.drain == DrainState::Draining {
                write.entry.shim = self.shim_of(worker).await?;
            }
            match self.write(write).await {
                Err(PlaneError::Conflict) => self.read_drain(worker).await?,
                written => return written,
            }
        }
        Err(unavailable("other routers write drains of this worker"))
    }

    /// The process that holds the lease of the worker's shim.
    async fn shim_of(&self, worker: &WorkerId) -> Result<Option<[u8; 16]>, PlaneError> {
        let Some(found) = self.plane.get(self.subjects.shim_key(worker)).await? else {
            return Ok(None);
        };
        let entry: ShimEntry = codec::decode(&found.value).map_err(unavailable)?;
        Ok(Some(entry.instance))
    }

    /// Ends the drain of a worker whose life it was to end with. A write that conflicts is left to
    /// its winner.
    async fn end_drain(&self, worker: &WorkerId) -> Result<(), PlaneError> {
        let drained = self.fleet.state().drains.ends_with_restart(worker).cloned();
        let Some(drained) = drained else {
            return Ok(());
        };
        let shim = self.shim_of(worker).await?;
        if shim.is_none() || shim == drained.shim {
            return Ok(());
        }
        let now = unix_time().as_secs();
        let write = {
            let state = self.fleet.state();
            let still = state.drains.ends_with_restart(worker) == Some(&drained);
            let next = || state.drains.end_write(worker, now);
            still.then(next).flatten()
        };
        match write {
            Some(write) => {
                tracing::info!(%worker, "worker began a new life, its drain ends");
                self.write(write).await
            }
            None => Ok(()),
        }
    }

    /// Follows the registry until stopped. While the plane is unreachable the last state stands.
    pub async fn follow(self: Arc<Self>, stop: CancellationToken) {
        // Cancel-safe: an event is applied by one synchronous call, and a write that is dropped is
        // repeated by the router that next finds it missing.
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = self.listen() => {}
        }
    }

    async fn listen(&self) {
        let watch = |prefix| RegistryWatch::new(Arc::clone(&self.plane), prefix);
        let mut workers = watch(self.subjects.worker_keys());
        let mut drains = watch(self.subjects.drain_keys());
        let mut repairs = interval(REPAIR_PERIOD);
        let mut collections = interval_at(Instant::now() + COLLECT_PERIOD, COLLECT_PERIOD);
        for ticks in [&mut repairs, &mut collections] {
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        }
        loop {
            tokio::select! {
                biased;
                _ = collections.tick(), if self.drains_read() => {
                    if let Err(error) = self.collect_drains(unix_time().as_secs()).await {
                        tracing::debug!(%error, "cannot collect drain entries");
                    }
                }
                _ = repairs.tick() => {
                    self.restore_drains().await;
                    // Events have their turn however long that took.
                    repairs.reset();
                }
                event = drains.next() => self.drain_event(event, &drains),
                event = workers.next() => self.worker_event(event).await,
            }
        }
    }

    async fn worker_event(&self, event: RegistryEvent) {
        match event {
            RegistryEvent::Put { key, entry } => match codec::decode::<WorkerEntry>(&entry.value) {
                Ok(entry) if self.subjects.worker_key(&entry.worker) == key => {
                    let now = Instant::now().into_std();
                    let worker = entry.worker.clone();
                    self.fleet.update(|state| state.register(entry, now));
                    // Tried again at the next renewal of the registration.
                    if let Err(error) = self.end_drain(&worker).await {
                        tracing::debug!(%worker, %error, "cannot end a drain");
                    }
                }
                // A shim may write the key of its own worker only.
                Ok(_) => self.unreadable(&key, "worker entry under another worker's key"),
                Err(_) => self.unreadable(&key, "worker entry is unreadable"),
            },
            RegistryEvent::Gone { key } => {
                if let Some(worker) = self.subjects.key_worker(&key) {
                    let now = Instant::now().into_std();
                    self.fleet.update(|state| state.deregister(&worker, now));
                }
            }
            RegistryEvent::Current => self.ready.registry_read(),
        }
    }

    fn drain_event(&self, event: RegistryEvent, watch: &RegistryWatch) {
        match event {
            RegistryEvent::Put { key, entry } => match codec::decode::<DrainEntry>(&entry.value) {
                Ok(found) if self.subjects.drain_key(&found.worker) == key => {
                    self.stored(found, entry.revision);
                }
                Ok(_) | Err(_) => self.unreadable(&key, "drain entry is unreadable"),
            },
            RegistryEvent::Gone { key } => {
                if let Some(worker) = self.subjects.key_drained(&key) {
                    self.fleet.state().drains.absent(&worker);
                }
            }
            RegistryEvent::Current => {
                let listed = watch
                    .keys()
                    .filter_map(|key| self.subjects.key_drained(key));
                self.fleet.state().drains.listed(&listed.collect());
                self.drains_read.store(true, Ordering::Relaxed);
                self.ready.drains_read();
            }
        }
    }

    fn unreadable(&self, key: &str, why: &'static str) {
        tracing::error!(key, why, "registry entry ignored");
        self.unreadable.inc();
    }

    /// Writes the drains that the registry lacks.
    async fn restore_drains(&self) {
        let missing = self.fleet.state().drains.missing();
        for write in missing {
            let worker = write.entry.worker.clone();
            match self.write(write).await {
                Ok(()) => tracing::warn!(%worker, "registry had lost a drain entry, restored"),
                Err(PlaneError::Conflict) => self.fleet.state().drains.superseded(&worker),
                Err(error) => {
                    tracing::debug!(%error, "cannot restore a drain entry");
                    return;
                }
            }
        }
    }

    /// Ends drains whose worker is gone for good, and deletes entries that say nothing any more. Each
    /// router tries; a conflict is another one's success.
    pub(super) async fn collect_drains(&self, now_unix_s: u64) -> Result<(), PlaneError> {
        let (abandoned, outdated) = {
            let state = self.fleet.state();
            let is_known = |worker: &WorkerId| state.get(worker).is_some();
            let abandoned = state.drains.abandoned(is_known, now_unix_s);
            (abandoned, state.drains.outdated(now_unix_s))
        };
        for write in abandoned {
            let worker = write.entry.worker.clone();
            if self.shim_of(&worker).await?.is_some() {
                continue;
            }
            match self.write(write).await {
                Ok(()) => tracing::info!(%worker, "its drain until a restart ends: it is gone"),
                Err(PlaneError::Conflict) => {}
                Err(error) => return Err(error),
            }
        }
        for drain in outdated {
            let key = self.subjects.drain_key(&drain.worker);
            match self.plane.delete(key, Revision(drain.revision)).await {
                Ok(()) | Err(PlaneError::Conflict) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn write(&self, write: DrainWrite) -> Result<(), PlaneError> {
        let key = self.subjects.drain_key(&write.entry.worker);
        let value = codec::encode(&write.entry).map_err(unavailable)?;
        let condition = match write.replaces {
            Some(revision) => PutIf::Revision(Revision(revision)),
            None => PutIf::Absent,
        };
        let revision = self.plane.put(key, value.into(), condition, None).await?;
        self.stored(write.entry, revision);
        Ok(())
    }

    /// Reads what the registry has of a worker.
    async fn read_drain(&self, worker: &WorkerId) -> Result<(), PlaneError> {
        match self.plane.get(self.subjects.drain_key(worker)).await? {
            Some(found) => {
                let entry = codec::decode(&found.value).map_err(unavailable)?;
                self.stored(entry, found.revision);
            }
            None => self.fleet.state().drains.absent(worker),
        }
        Ok(())
    }

    fn stored(&self, entry: DrainEntry, revision: Revision) {
        let worker = entry.worker.clone();
        self.fleet.update(|state| {
            let before = state.drains.drain(&worker);
            state.drains.stored(entry, revision.0);
            let drain = state.drains.drain(&worker);
            if drain == before {
                return FleetChange::None;
            }
            tracing::info!(%worker, drain = drain.label(), "worker drain changed");
            FleetChange::Published
        });
    }
}

fn unavailable(why: impl ToString) -> PlaneError {
    PlaneError::Unavailable(why.to_string())
}
