//! The plane: everything through which the parts meet, behind one trait.
//!
//! [`Plane`] has five faces: the log (ordered, bounded, positions), the registry (keys with
//! revisions and leases), the snapshots (immutable blobs), request/reply and broadcast. Above it
//! nobody knows what carries the bytes; [`MemoryPlane`] carries them within one process,
//! [`NatsPlane`] through a NATS JetStream server.
//!
//! Every payload is bytes: a message is encoded and decoded in process exactly as it would be
//! between processes. What the trait does not promise, on purpose: that a broadcast arrives, that a
//! lease's end is seen at once, or that the log keeps what it acknowledged. Its users hold their own
//! positions, numbers and digests.
#![forbid(unsafe_code)]

#[cfg(test)]
mod faulty;
mod lease;
mod memory;
mod nats;
mod registry_watch;

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use tokio::sync::{oneshot, watch};

pub use lease::{LEASE_RENEWAL, LEASE_TTL, Lease, LeaseEvent, LeaseHolder, LeaseLost, LeaseWrite};
pub use memory::{MemoryPlane, MemoryPlaneConfig};
pub use nats::{
    ClockOffset, InitConfig, NamespaceSetup, NatsAuth, NatsConfig, NatsError, NatsPlane, NatsStats,
    NatsTls, SetupDifference, StreamRole, StreamUsage,
};
pub use registry_watch::RegistryWatch;

pub use warmroute_proto::message::{Broadcast, LogMessage, LogStatus};

use warmroute_proto::LogPosition;

/// Delay before a plane operation that failed is tried again.
pub const RETRY_DELAY: Duration = Duration::from_millis(500);

pub type PlaneFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, PlaneError>> + Send + 'a>>;

/// Cancel-safe: dropping a pending `next()` loses nothing.
pub type PlaneStream<T> = Pin<Box<dyn Stream<Item = T> + Send>>;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaneError {
    /// Not now: cut off, timed out, or nobody answers. The effect of a write is unknown.
    #[error("the plane is unavailable: {0}")]
    Unavailable(String),
    /// The condition of a write did not hold; nothing was written.
    #[error("somebody else was first")]
    Conflict,
    /// More bytes than the plane takes at once.
    #[error("{bytes} bytes exceed the plane's limit of {max}")]
    TooLarge { bytes: usize, max: usize },
}

/// A registry value with the revision that a conditional write names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistryEntry {
    pub value: Bytes,
    pub revision: Revision,
}

/// Grows with every write to the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

/// The condition of a registry write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutIf {
    Always,
    Absent,
    Revision(Revision),
}

/// What a watcher sees: first all present values, then [`RegistryEvent::Current`], then changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistryEvent {
    Put {
        key: String,
        entry: RegistryEntry,
    },
    /// Deleted, or its lease ran out.
    Gone {
        key: String,
    },
    /// Everything that was there when the watch began has been told.
    Current,
}

/// A request that a service has to answer; dropped unanswered, its sender waits for its time-out.
#[derive(Debug)]
pub struct ServiceRequest {
    pub payload: Bytes,
    pub reply: Reply,
}

/// The way back to whoever asked.
#[derive(Debug)]
pub struct Reply(oneshot::Sender<Bytes>);

impl Reply {
    #[must_use]
    pub const fn new(to: oneshot::Sender<Bytes>) -> Self {
        Self(to)
    }

    /// Answers. An asker that gave up in the meantime is no error.
    pub fn send(self, payload: Bytes) {
        drop(self.0.send(payload));
    }
}

/// Is the plane within reach?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connection {
    Up,
    Down,
}

/// See the module's documentation.
pub trait Plane: Send + Sync + 'static {
    /// The connection's state; its receiver sees every change of it, if not every flicker.
    fn connection(&self) -> watch::Receiver<Connection>;

    // --- log

    fn log_status(&self) -> PlaneFuture<'_, LogStatus>;

    /// Hands a message to the log. The outer future ends when its place behind earlier ones is
    /// fixed, the inner one with the acknowledgement: appends can be pipelined in order. One
    /// that cannot go out because too many are without an answer fails; answered ones do not count,
    /// looked at or not.
    fn append(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, Appended>;

    /// The newest message on a subject that the log still has. Where the log has several copies, one
    /// that is a moment behind may answer: a surprise is a reason to ask again, not yet a proof. The
    /// same holds for [`Plane::at`] and [`Plane::get`].
    fn last_on(&self, subject: String) -> PlaneFuture<'_, Option<LogMessage>>;

    /// The message at a position, if the log has it.
    fn at(&self, position: LogPosition) -> PlaneFuture<'_, Option<LogMessage>>;

    /// Everything behind `after`, in order, in batches of at least one and at most `batch_max`, across
    /// disconnects and restarts. Starts at the oldest kept message if `after` fell off the end:
    /// compare positions.
    ///
    /// The tail follows the log that is there when this returns, and ends when that log is no more:
    /// when another one has taken its place, when its newest position is below the tail's, or when
    /// the message at the tail's position is another one. Ask [`Plane::log_status`] after opening a
    /// tail, not before, to know which log it follows, and again when it ended. What was lost and
    /// refilled before the tail was opened only its user can see, by [`Plane::at`].
    fn tail(&self, after: LogPosition, batch_max: usize) -> PlaneFuture<'_, LogTail>;

    // --- registry

    fn get(&self, key: String) -> PlaneFuture<'_, Option<RegistryEntry>>;

    /// Writes a key. With a lease it ends after that time, which a plane may round up to whole
    /// seconds, unless it is written again. [`PlaneError::Conflict`] if the condition does not hold.
    fn put(
        &self,
        key: String,
        value: Bytes,
        condition: PutIf,
        lease: Option<Duration>,
    ) -> PlaneFuture<'_, Revision>;

    /// Deletes a key, if it still has this revision. [`PlaneError::Conflict`] if not.
    fn delete(&self, key: String, revision: Revision) -> PlaneFuture<'_, ()>;

    /// Follows all keys with this prefix, across disconnects and restarts. Of several changes of a
    /// key its last one is told.
    fn watch(&self, prefix: String) -> PlaneFuture<'_, PlaneStream<RegistryEvent>>;

    // --- snapshots

    /// Stores a blob under a name that was never used before. [`PlaneError::Conflict`] if it was.
    fn put_snapshot(&self, name: String, blob: Bytes) -> PlaneFuture<'_, ()>;

    fn get_snapshot(&self, name: String) -> PlaneFuture<'_, Option<Bytes>>;

    /// Deletes a blob; one that is not there is no error.
    fn delete_snapshot(&self, name: String) -> PlaneFuture<'_, ()>;

    /// All names, in ascending order.
    fn snapshots(&self) -> PlaneFuture<'_, Vec<String>>;

    // --- request/reply

    /// Asks one of those that serve the subject. [`PlaneError::Unavailable`] at once if nobody does,
    /// [`PlaneError::TooLarge`] if question or answer do not fit.
    fn request(
        &self,
        subject: String,
        payload: Bytes,
        deadline: Duration,
    ) -> PlaneFuture<'_, Bytes>;

    /// Serves a subject, together with whoever else does, until the stream is dropped.
    fn serve(&self, subject: String) -> PlaneFuture<'_, PlaneStream<ServiceRequest>>;

    // --- broadcast

    /// Tells everybody who listens now. Lossy: a listener that does not keep up misses messages.
    fn publish(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, ()>;

    /// Listens to a subject, or to all that a trailing `>` stands for. Own messages come too.
    fn subscribe(&self, subject: String) -> PlaneFuture<'_, PlaneStream<Broadcast>>;
}

/// The acknowledgement of an append: the position that the log gave.
pub type Appended = PlaneFuture<'static, LogPosition>;

pub type LogTail = PlaneStream<Vec<LogMessage>>;
