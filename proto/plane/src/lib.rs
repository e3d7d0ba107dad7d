//! The plane: the transport between shims, indexers and routers, behind one trait.
//!
//! [`Plane`] has five parts: the log (ordered, bounded, positions), the registry (keys with
//! revisions and leases), the snapshots (immutable blobs), request/reply and broadcast.
//! [`MemoryPlane`] implements it within one process, [`NatsPlane`] over a NATS JetStream server,
//! [`CorePlane`] over a network that stores nothing, such as core NATS ([`NatsBus`]).
//! [`LeaseHolder`] and [`RegistryWatch`] work over any plane, with all retries.
//!
//! Every payload is bytes: a message is encoded and decoded within a process exactly as between
//! processes. Not promised, on purpose: that a broadcast arrives, that the end of a lease is seen
//! immediately, or that the log keeps what it acknowledged. Users keep their own positions, numbers
//! and digests.
#![forbid(unsafe_code)]

mod core_plane;
#[cfg(test)]
#[path = "tests/faulty.rs"]
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
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until};

pub use core_plane::{Bus, CorePlane, CorePlaneConfig, PlaneLog};
pub use lease::{LEASE_RENEWAL, LEASE_TTL, Lease, LeaseEvent, LeaseHolder, LeaseWrite};
pub use memory::{MemoryPlane, MemoryPlaneConfig};
pub use nats::{
    ClockOffset, ExistingStreams, InitConfig, NamespaceSetup, NatsAuth, NatsBus, NatsConfig,
    NatsError, NatsPlane, NatsStats, NatsTls, SetupDifference, StreamRole, StreamUsage,
    unix_ns_of_rfc3339,
};
pub use registry_watch::RegistryWatch;

/// How [`NatsPlane`] finds that a subscription is missing and makes it again: for clients that
/// simulate it.
pub mod supervision {
    pub use crate::nats::{
        INBOX_PROBE, InboxProbe, POLL, PermissionViolation, RefusedPermissions, next_supervised,
    };
}

pub use warmroute_proto::message::{Broadcast, LogMessage, LogStatus};

use warmroute_proto::LogPosition;

/// Delay before a plane operation that failed is tried again.
pub const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Turns that other tasks have after a deadline. An answer passes two tasks of this process: the
/// connection's and the inbox's.
const TURNS_AFTER_DEADLINE: usize = 4;

/// Ends after a moment, when what had arrived by then was passed on. A process that had no processor
/// finds its timers and its sockets due together, and would take an answer that came in time for a
/// late one.
pub async fn after_arrivals(at: Instant) {
    sleep_until(at).await;
    for _ in 0..TURNS_AFTER_DEADLINE {
        yield_now().await;
    }
}

pub type PlaneFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, PlaneError>> + Send + 'a>>;

/// Cancel-safe: dropping a pending `next()` loses nothing.
pub type PlaneStream<T> = Pin<Box<dyn Stream<Item = T> + Send>>;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaneError {
    /// Disconnected, timed out, or not served. The effect of a write is unknown.
    #[error("the plane is unavailable: {0}")]
    Unavailable(String),
    /// The condition of a write did not hold; nothing was written.
    #[error("another writer was first")]
    Conflict,
    /// More bytes than a message may have.
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

/// An event of a watch: first all present values, then [`RegistryEvent::Current`], then changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistryEvent {
    Put {
        key: String,
        entry: RegistryEntry,
    },
    /// Deleted or expired.
    Gone {
        key: String,
    },
    /// All values that were present when the watch began have been reported.
    Current,
}

/// A request to answer. If it is dropped, the requester gets an error or times out.
#[derive(Debug)]
pub struct ServiceRequest {
    pub payload: Bytes,
    pub reply: Reply,
}

/// Sends the answer to a request.
#[derive(Debug)]
pub struct Reply(oneshot::Sender<Bytes>);

impl Reply {
    #[must_use]
    pub const fn new(to: oneshot::Sender<Bytes>) -> Self {
        Self(to)
    }

    /// Answers. A requester that has given up is no error.
    pub fn send(self, payload: Bytes) {
        drop(self.0.send(payload));
    }
}

/// State of the connection to the plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connection {
    Up,
    Down,
}

/// A transport with log, registry, snapshots, request/reply and broadcast.
pub trait Plane: Send + Sync + 'static {
    /// The connection's state. A receiver may miss short changes.
    fn connection(&self) -> watch::Receiver<Connection>;

    // --- log

    fn log_status(&self) -> PlaneFuture<'_, LogStatus>;

    /// Appends a message to the log. The outer future ends when its order after earlier ones is
    /// fixed, the inner one with the acknowledgement, so that appends can be pipelined in order.
    /// Fails while too many appends are unacknowledged; whether their inner futures are polled does
    /// not matter.
    fn append(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, Appended>;

    /// The newest message on a subject that the log still has. A copy of the log that lags may
    /// answer: an unexpected answer is a reason to ask again, not a proof. [`Plane::at`] and
    /// [`Plane::get`] have this limit too.
    fn last_on(&self, subject: String) -> PlaneFuture<'_, Option<LogMessage>>;

    /// The message at a position, if the log has it.
    fn at(&self, position: LogPosition) -> PlaneFuture<'_, Option<LogMessage>>;

    /// All messages after a position, in order, in batches of at least one and at most `batch_max`,
    /// across disconnects and restarts. Starts at the oldest kept message if later than `after`:
    /// compare positions.
    ///
    /// The tail follows the log that exists when this returns. It ends when another log has taken
    /// its place, when the log's newest position is below the tail's, or when another message is at
    /// the tail's position. Call [`Plane::log_status`] after opening a tail, not before, to know
    /// which log it follows, and again after its end. A log that was lost and refilled before the
    /// tail was opened shows only by [`Plane::at`].
    fn tail(&self, after: LogPosition, batch_max: usize) -> PlaneFuture<'_, LogTail>;

    // --- registry

    fn get(&self, key: String) -> PlaneFuture<'_, Option<RegistryEntry>>;

    /// Writes a key. With a lease it expires after that time, which a plane may round up to whole
    /// seconds, unless it is written again. [`PlaneError::Conflict`] if the condition does not
    /// hold.
    fn put(
        &self,
        key: String,
        value: Bytes,
        condition: PutIf,
        lease: Option<Duration>,
    ) -> PlaneFuture<'_, Revision>;

    /// Deletes a key, if it still has this revision. [`PlaneError::Conflict`] if not.
    fn delete(&self, key: String, revision: Revision) -> PlaneFuture<'_, ()>;

    /// Follows all keys with this prefix, across disconnects and restarts. Reports the last of
    /// several changes of a key. [`RegistryWatch`] adds the retries.
    fn watch(&self, prefix: String) -> PlaneFuture<'_, PlaneStream<RegistryEvent>>;

    // --- snapshots

    /// Stores a blob under a new name. [`PlaneError::Conflict`] if the name is used.
    fn put_snapshot(&self, name: String, blob: Bytes) -> PlaneFuture<'_, ()>;

    fn get_snapshot(&self, name: String) -> PlaneFuture<'_, Option<Bytes>>;

    /// Deletes a blob; a missing one is no error.
    fn delete_snapshot(&self, name: String) -> PlaneFuture<'_, ()>;

    /// All names, in ascending order.
    fn snapshots(&self) -> PlaneFuture<'_, Vec<String>>;

    // --- request/reply

    /// Sends a request to one of the subject's servers. [`PlaneError::Unavailable`] immediately if
    /// there is none, [`PlaneError::TooLarge`] if request or answer do not fit.
    fn request(
        &self,
        subject: String,
        payload: Bytes,
        deadline: Duration,
    ) -> PlaneFuture<'_, Bytes>;

    /// Most bytes of a request or answer.
    fn payload_max(&self) -> usize;

    /// Serves a subject until the stream is dropped. Several servers share the requests.
    fn serve(&self, subject: String) -> PlaneFuture<'_, PlaneStream<ServiceRequest>>;

    // --- broadcast

    /// Sends a broadcast to the present subscribers. Lossy: a slow subscriber misses messages.
    fn publish(&self, subject: String, payload: Bytes) -> PlaneFuture<'_, ()>;

    /// Subscribes to a subject, or to all that a trailing `>` stands for. Receives own messages
    /// too.
    fn subscribe(&self, subject: String) -> PlaneFuture<'_, PlaneStream<Broadcast>>;
}

/// The acknowledgement of an append: the position that the log gave.
pub type Appended = PlaneFuture<'static, LogPosition>;

pub type LogTail = PlaneStream<Vec<LogMessage>>;
