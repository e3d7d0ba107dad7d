//! A service on a plane in memory, for the tests of the shell.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warmroute_plane::{Broadcast, MemoryPlane, MemoryPlaneConfig, Plane as _, PutIf};
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{LogPosition, Record, codec};

pub(crate) use warmroute_index::tests_support::*;

use crate::snapshot::Schedule;
use crate::{Handle, IndexerConfig, Service, SnapshotConfig, TaskFailed};

/// A plane within the process.
pub(crate) fn plane() -> MemoryPlane {
    plane_of(1 << 20)
}

/// A plane in memory with a log of so many bytes.
pub(crate) fn plane_of(log_bytes_max: usize) -> MemoryPlane {
    MemoryPlane::new(MemoryPlaneConfig {
        identity: IDENTITY,
        log_bytes_max,
        queue_max: 64,
    })
}

/// A service that runs on a plane, with what one needs to talk to it.
pub(crate) struct Running {
    pub(crate) plane: MemoryPlane,
    pub(crate) handle: Handle,
    pub(crate) subjects: Subjects,
    pub(crate) stop: CancellationToken,
    pub(crate) run: tokio::task::JoinHandle<Result<(), TaskFailed>>,
}

impl Running {
    pub(crate) fn start(plane: MemoryPlane) -> Self {
        Self::start_with(plane, |service| service)
    }

    /// One that keeps snapshots, written after every record but not more than one a second.
    pub(crate) fn start_keeping(plane: MemoryPlane, writer: &str) -> Self {
        let config = SnapshotConfig {
            writer: writer.to_owned(),
            schedule: Schedule {
                bytes: 1,
                every: Duration::from_secs(600),
            },
        };
        Self::start_with(plane, |service| service.with_snapshots(config))
    }

    pub(crate) fn start_with(plane: MemoryPlane, with: impl FnOnce(Service) -> Service) -> Self {
        let config = IndexerConfig {
            namespace: namespace(),
            max_memory_bytes: None,
        };
        let service = with(Service::new(config, Arc::new(plane.clone())).unwrap());
        let handle = service.handle();
        let stop = CancellationToken::new();
        let run = TaskTracker::new().spawn(service.run(stop.clone()));
        Self {
            plane,
            handle,
            subjects: Subjects::new(&namespace()),
            stop,
            run,
        }
    }

    /// Appends a record, and waits until it is folded.
    pub(crate) async fn publish(&self, record: &Record) {
        let position = append(&self.plane, record).await;
        let mut positions = self.handle.positions();
        positions.wait_for(|at| *at >= position).await.unwrap();
    }

    pub(crate) async fn heartbeat(&self, shim: &TestShim) {
        let Broadcast { subject, payload } = heartbeat_message(&shim.heartbeat());
        self.plane.publish(subject, payload).await.unwrap();
    }

    pub(crate) async fn register(&self, worker: &str, lease: Option<Duration>) {
        self.register_as(&worker_entry(worker), lease).await;
    }

    pub(crate) async fn register_as(&self, entry: &WorkerEntry, lease: Option<Duration>) {
        let key = self.subjects.worker_key(&entry.worker);
        let value = codec::encode(entry).unwrap();
        let put = self.plane.put(key, value.into(), PutIf::Always, lease);
        put.await.unwrap();
    }
}

pub(crate) async fn append(plane: &MemoryPlane, record: &Record) -> LogPosition {
    let subject = Subjects::new(&namespace()).records(&record.source);
    let payload = codec::encode(record).unwrap();
    let appended = plane.append(subject, payload.into()).await.unwrap();
    appended.await.unwrap()
}
