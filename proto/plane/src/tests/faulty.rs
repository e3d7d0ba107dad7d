//! Test support: a registry in memory whose operations fail by script.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use tokio::sync::watch;
use warmroute_proto::{LogPosition, StreamIdentity};

use crate::{
    Appended, Broadcast, Connection, LogMessage, LogStatus, LogTail, MemoryPlane,
    MemoryPlaneConfig, Plane, PlaneError, PlaneFuture, PlaneStream, PutIf, RegistryEntry,
    RegistryEvent, Revision, ServiceRequest,
};

#[derive(Clone, Copy)]
pub(crate) enum Fault {
    /// The operation fails without effect.
    Refused,
    /// The write takes effect, but its answer is lost.
    AnswerLost,
    /// The write takes effect, but no answer ever comes.
    Hangs,
    /// The watch ends after so many events.
    EndsAfter(usize),
}

pub(crate) struct FaultyPlane {
    plane: MemoryPlane,
    /// One for each put and watch to come; then all succeed.
    faults: Mutex<VecDeque<Fault>>,
}

impl FaultyPlane {
    pub(crate) fn new() -> Self {
        let identity = StreamIdentity {
            created_unix_ns: 1,
            nonce: 1,
        };
        Self {
            plane: MemoryPlane::new(MemoryPlaneConfig {
                identity,
                log_bytes_max: 1,
                queue_max: 1,
            }),
            faults: Mutex::default(),
        }
    }

    pub(crate) fn script(&self, faults: &[Fault]) {
        let mut script = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        script.extend(faults);
    }

    fn fault(&self) -> Option<Fault> {
        let mut script = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        script.pop_front()
    }
}

fn refused<T>() -> Result<T, PlaneError> {
    Err(PlaneError::Unavailable("by script".to_owned()))
}

impl Plane for FaultyPlane {
    fn payload_max(&self) -> usize {
        self.plane.payload_max()
    }

    fn get(&self, key: String) -> PlaneFuture<'_, Option<RegistryEntry>> {
        self.plane.get(key)
    }

    fn put(
        &self,
        key: String,
        value: Bytes,
        condition: PutIf,
        lease: Option<Duration>,
    ) -> PlaneFuture<'_, Revision> {
        let fault = self.fault();
        Box::pin(async move {
            if matches!(fault, Some(Fault::Refused)) {
                return refused();
            }
            let put = self.plane.put(key, value, condition, lease).await;
            match fault {
                Some(Fault::AnswerLost) => refused(),
                Some(Fault::Hangs) => std::future::pending().await,
                Some(Fault::Refused | Fault::EndsAfter(_)) | None => put,
            }
        })
    }

    fn delete(&self, key: String, revision: Revision) -> PlaneFuture<'_, ()> {
        self.plane.delete(key, revision)
    }

    fn watch(&self, prefix: String) -> PlaneFuture<'_, PlaneStream<RegistryEvent>> {
        let fault = self.fault();
        Box::pin(async move {
            let events = self.plane.watch(prefix).await?;
            match fault {
                Some(Fault::EndsAfter(count)) => Ok(Box::pin(events.take(count)) as PlaneStream<_>),
                Some(Fault::Refused | Fault::AnswerLost | Fault::Hangs) => refused(),
                None => Ok(events),
            }
        })
    }

    fn connection(&self) -> watch::Receiver<Connection> {
        self.plane.connection()
    }

    fn log_status(&self) -> PlaneFuture<'_, LogStatus> {
        unreachable!("these tests use the registry only")
    }

    fn append(&self, _: String, _: Bytes) -> PlaneFuture<'_, Appended> {
        unreachable!("these tests use the registry only")
    }

    fn last_on(&self, _: String) -> PlaneFuture<'_, Option<LogMessage>> {
        unreachable!("these tests use the registry only")
    }

    fn at(&self, _: LogPosition) -> PlaneFuture<'_, Option<LogMessage>> {
        unreachable!("these tests use the registry only")
    }

    fn tail(&self, _: LogPosition, _: usize) -> PlaneFuture<'_, LogTail> {
        unreachable!("these tests use the registry only")
    }

    fn put_snapshot(&self, _: String, _: Bytes) -> PlaneFuture<'_, ()> {
        unreachable!("these tests use the registry only")
    }

    fn get_snapshot(&self, _: String) -> PlaneFuture<'_, Option<Bytes>> {
        unreachable!("these tests use the registry only")
    }

    fn delete_snapshot(&self, _: String) -> PlaneFuture<'_, ()> {
        unreachable!("these tests use the registry only")
    }

    fn snapshots(&self) -> PlaneFuture<'_, Vec<String>> {
        unreachable!("these tests use the registry only")
    }

    fn request(&self, _: String, _: Bytes, _: Duration) -> PlaneFuture<'_, Bytes> {
        unreachable!("these tests use the registry only")
    }

    fn serve(&self, _: String) -> PlaneFuture<'_, PlaneStream<ServiceRequest>> {
        unreachable!("these tests use the registry only")
    }

    fn publish(&self, _: String, _: Bytes) -> PlaneFuture<'_, ()> {
        unreachable!("these tests use the registry only")
    }

    fn subscribe(&self, _: String) -> PlaneFuture<'_, PlaneStream<Broadcast>> {
        unreachable!("these tests use the registry only")
    }
}
