//! A plane on NATS whose server may not be reached yet. Until then it is unavailable, as after a
//! disconnect; afterwards it forwards every call.

use std::future::ready;
use std::sync::OnceLock;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use warmroute_plane::{
    Appended, Broadcast, Connection, LogMessage, LogStatus, LogTail, NatsBus, Plane, PlaneError,
    PlaneFuture, PlaneStream, PutIf, RegistryEntry, RegistryEvent, Revision, ServiceRequest,
};
use warmroute_proto::LogPosition;
use warmroute_proto::codec::MESSAGE_BYTES_MAX;

pub(crate) struct JoiningPlane {
    joined: OnceLock<Joined>,
    connection: watch::Sender<Connection>,
}

/// A plane on NATS, with a log server or without.
pub(crate) struct Joined {
    pub(crate) plane: Box<dyn Plane>,
    pub(crate) bus: NatsBus,
}

impl JoiningPlane {
    pub(crate) fn new() -> Self {
        Self {
            joined: OnceLock::new(),
            connection: watch::Sender::new(Connection::Down),
        }
    }

    /// The connection, once the server was reached.
    pub(crate) fn bus(&self) -> Option<&NatsBus> {
        self.joined.get().map(|joined| &joined.bus)
    }

    /// Sets the plane once its server is reached. Later calls have no effect.
    pub(crate) fn reached(&self, joined: Joined) {
        let state = *joined.plane.connection().borrow();
        if self.joined.set(joined).is_ok() {
            self.connection.send_replace(state);
        }
    }

    /// Forwards the state of the plane's connection until the plane ends, and reports each change.
    pub(crate) async fn forward_connection(&self, report: impl Fn(Connection)) {
        let Some(joined) = self.joined.get() else {
            return;
        };
        let mut states = joined.plane.connection();
        loop {
            let state = *states.borrow_and_update();
            if self.connection.send_replace(state) != state {
                report(state);
            }
            if states.changed().await.is_err() {
                return;
            }
        }
    }

    fn joined(&self) -> Result<&dyn Plane, PlaneError> {
        let missing = || PlaneError::Unavailable("no server was reached yet".to_owned());
        let joined = self.joined.get().ok_or_else(missing)?;
        Ok(&*joined.plane)
    }
}

/// Forwards a call to the plane.
macro_rules! forward {
    ($self:ident.$call:ident($($argument:expr),*)) => {
        match $self.joined() {
            Ok(plane) => plane.$call($($argument),*),
            Err(error) => Box::pin(ready(Err(error))),
        }
    };
}

impl Plane for JoiningPlane {
    fn payload_max(&self) -> usize {
        self.joined()
            .map_or(MESSAGE_BYTES_MAX, |plane| plane.payload_max())
    }

    fn connection(&self) -> watch::Receiver<Connection> {
        self.connection.subscribe()
    }

    fn log_status(&self) -> PlaneFuture<'_, LogStatus> {
        forward!(self.log_status())
    }

    fn append(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, Appended> {
        forward!(self.append(subject, payload))
    }

    fn last_on(&self, subject: String) -> PlaneFuture<'_, Option<LogMessage>> {
        forward!(self.last_on(subject))
    }

    fn at(&self, position: LogPosition) -> PlaneFuture<'_, Option<LogMessage>> {
        forward!(self.at(position))
    }

    fn tail(&self, after: LogPosition, batch_max: usize) -> PlaneFuture<'_, LogTail> {
        forward!(self.tail(after, batch_max))
    }

    fn get(&self, key: String) -> PlaneFuture<'_, Option<RegistryEntry>> {
        forward!(self.get(key))
    }

    fn put(
        &self,
        key: String,
        value: Bytes,
        condition: PutIf,
        lease: Option<Duration>,
    ) -> PlaneFuture<'_, Revision> {
        forward!(self.put(key, value, condition, lease))
    }

    fn delete(&self, key: String, revision: Revision) -> PlaneFuture<'_, ()> {
        forward!(self.delete(key, revision))
    }

    fn watch(&self, prefix: String) -> PlaneFuture<'_, PlaneStream<RegistryEvent>> {
        forward!(self.watch(prefix))
    }

    fn put_snapshot(&self, name: String, blob: Bytes) -> PlaneFuture<'_, ()> {
        forward!(self.put_snapshot(name, blob))
    }

    fn get_snapshot(&self, name: String) -> PlaneFuture<'_, Option<Bytes>> {
        forward!(self.get_snapshot(name))
    }

    fn delete_snapshot(&self, name: String) -> PlaneFuture<'_, ()> {
        forward!(self.delete_snapshot(name))
    }

    fn snapshots(&self) -> PlaneFuture<'_, Vec<String>> {
        forward!(self.snapshots())
    }

    fn request(
        &self,
        subject: String,
        payload: Bytes,
        deadline: Duration,
    ) -> PlaneFuture<'_, Bytes> {
        forward!(self.request(subject, payload, deadline))
    }

    fn serve(&self, subject: String) -> PlaneFuture<'_, PlaneStream<ServiceRequest>> {
        forward!(self.serve(subject))
    }

    fn publish(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, ()> {
        forward!(self.publish(subject, payload))
    }

    fn subscribe(&self, subject: String) -> PlaneFuture<'_, PlaneStream<Broadcast>> {
        forward!(self.subscribe(subject))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn until_the_server_is_reached_nothing_is_available_and_nothing_waits() {
        let joining = JoiningPlane::new();
        assert_eq!(*joining.connection().borrow(), Connection::Down);
        assert!(matches!(
            joining.log_status().await,
            Err(PlaneError::Unavailable(_))
        ));
        assert!(matches!(
            joining.get("key".to_owned()).await,
            Err(PlaneError::Unavailable(_))
        ));
    }
}
