//! What a plane without a log server needs of its network.

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;

use crate::{Broadcast, Connection, PlaneFuture, PlaneStream, ServiceRequest};

/// Publish and subscribe, requests and replies: the part of a [`crate::Plane`] that stores nothing.
/// The calls have the meanings that they have there.
pub trait Bus: Send + Sync + 'static {
    /// The connection's state. A receiver may miss short changes.
    fn connection(&self) -> watch::Receiver<Connection>;

    /// Most bytes of a message.
    fn payload_max(&self) -> usize;

    /// Messages of one sender reach a subscriber in the order in which they were sent.
    fn publish(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, ()>;

    fn subscribe(&self, subject: String) -> PlaneFuture<'_, PlaneStream<Broadcast>>;

    /// `None` if no process serves the subject. Not certain: a process may just have begun to.
    fn request(
        &self,
        subject: String,
        payload: Bytes,
        deadline: Duration,
    ) -> PlaneFuture<'_, Option<Bytes>>;

    fn serve(&self, subject: String) -> PlaneFuture<'_, PlaneStream<ServiceRequest>>;
}
