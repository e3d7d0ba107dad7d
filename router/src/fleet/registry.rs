//! Follows the workers and the operators' drains in the registry, and writes drains.
//!
//! A drain's entry has no lease and a key of its own: it reaches all routers, and outlives restarts
//! of routers and the registration of its worker.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prometheus::IntCounter;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use warmroute_plane::{Plane, PlaneError, PutIf, RegistryEvent, RegistryWatch, Revision};
use warmroute_proto::registry::{DrainEntry, DrainState, WorkerEntry};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{WorkerId, codec};

use super::Fleet;
use super::drain_table::DrainWrite;
use super::state::FleetChange;
use crate::clock::unix_time;
use crate::ready::Ready;

/// Between two comparisons of the registry's drains with the known ones.
const REPAIR_PERIOD: Duration = Duration::from_millis(500);

/// Attempts to write a drain while other routers write one of the same worker.
const WRITES_MAX: usize = 4;

pub(crate) struct FleetRegistry {
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

    /// Drains a worker or ends its drain: valid here and written for all routers once this returns.
    /// Idempotent. After an error the entry may be written or not: repeat the command.
    pub(crate) async fn set_drain(
        &self,
        worker: &WorkerId,
        drain: DrainState,
    ) -> Result<(), PlaneError> {
        if !self.drains_read() {
            self.read_drain(worker).await?;
        }
        for _ in 0..WRITES_MAX {
            let now = unix_time().as_secs();
            let write = self.fleet.state().drains.next_write(worker, drain, now);
            let Some(write) = write else {
                return Ok(());
            };
            match self.write(write).await {
                Err(PlaneError::Conflict) => self.read_drain(worker).await?,
                written => return written,
            }
        }
        Err(unavailable("other routers write drains of this worker"))
    }

    /// Follows the registry until stopped. While the plane is unreachable the last state stands.
    pub(crate) async fn follow(self: Arc<Self>, stop: CancellationToken) {
        // Cancel-safe: an event is applied by one synchronous call, and a write that is dropped is
        // repeated by the router that next finds it missing.
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.listen() => {}
        }
    }

    async fn listen(&self) {
        let watch = |prefix| RegistryWatch::new(Arc::clone(&self.plane), prefix);
        let mut workers = watch(self.subjects.worker_keys());
        let mut drains = watch(self.subjects.drain_keys());
        let mut repairs = interval(REPAIR_PERIOD);
        repairs.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                event = workers.next() => self.worker_event(event),
                event = drains.next() => self.drain_event(event, &drains),
                _ = repairs.tick() => self.restore_drains().await,
            }
        }
    }

    fn worker_event(&self, event: RegistryEvent) {
        match event {
            RegistryEvent::Put { key, entry } => match codec::decode::<WorkerEntry>(&entry.value) {
                Ok(entry) if self.subjects.worker_key(&entry.worker) == key => {
                    let now = Instant::now().into_std();
                    self.fleet.update(|state| state.register(entry, now));
                }
                // A shim may write the key of its own worker only.
                Ok(_) => self.unreadable(&key, "worker entry under another worker's key"),
                Err(_) => self.unreadable(&key, "worker entry is unreadable"),
            },
            RegistryEvent::Gone { key } => {
                if let Some(worker) = self.subjects.key_worker(&key) {
                    self.fleet.update(|state| state.deregister(&worker));
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
            tracing::info!(%worker, ?drain, "worker drain changed");
            FleetChange::Published
        });
    }
}

fn unavailable(why: impl ToString) -> PlaneError {
    PlaneError::Unavailable(why.to_string())
}
