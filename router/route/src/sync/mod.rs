//! Replication of load between routers. Pure: bytes and time in, effects out.
//!
//! Invariant: a replica that follows a router at number N of incarnation I holds exactly the slots
//! that the router held when it wrote N. Nothing of an incarnation below the fence is applied.
//!
//! - **Numbers.** A router's messages obey the sequencing rule. A replica requests missing messages
//!   from their sender, or all of its open slots as of one number, in parts, if the messages are no
//!   longer kept. Until the slots are complete, the view stays unchanged and later messages wait.
//! - **Heartbeats** reveal messages lost at the end, and compare digests at equal numbers. After a
//!   mismatch the open slots are fetched.
//! - **Echoes** measure the one-way delay of messages ([`LoadState::set_delay`]): one empty
//!   question a second to each peer. Decisions use it ([`crate::moves`]); replication does not.
//! - **Death.** A router without messages for [`DEAD_AFTER`] is dead: its slots are freed and its
//!   incarnation stays as the fence. A later message proves that it lives, not its load: it is
//!   followed again after its open slots were fetched.
//! - **Isolation.** Broadcasts come back to their sender. A router that does not receive its own
//!   heartbeats is disconnected, paused or behind. It declares no router dead and keeps its views.
//!   When its heartbeats come back, all peers get a full timeout, and [`RECONNECT_GRACE`] if it was
//!   isolated so long that peers may be reconnecting too.
//! - **Incarnations.** A router that was isolated for [`DEAD_AFTER`] assumes that its peers freed
//!   its slots. It takes a new incarnation, which fences delayed messages of the old one, and
//!   continues its open slots as number 0. Requests do not notice.
//!
//! Without live peers a router sends only heartbeats. Every buffer is bounded by a constant below;
//! [`ReplicaCounts`] counts what exceeds it.
//!
//! Deliberately absent: sockets and leases (the shell's), slots (behind [`LoadState`]), consensus.
//! Each router alone determines its load.

use std::time::Duration;

mod counts;
mod echo;
mod load_state;
mod loopback;
mod outbox;
mod peer;
mod replica;
mod snapshot_cache;
mod view;

pub use counts::{LimitCounts, MessageCounts, RepairCounts, ReplicaCounts, TrafficCounts};
pub use load_state::{LedgerHead, LoadState, OutgoingMessages, SlotSnapshot, head};
pub use replica::{AskId, LoadReplica, PlaneLink, ReplicaEffect};
pub use view::{DigestComparison, ReplicaStatus, RouterView, StatusDetail, ViewStatus};

/// Time between two heartbeats.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);

/// Silence after which a router is dead: four heartbeats are lost and the fifth is late.
pub const DEAD_AFTER: Duration = Duration::from_millis(2500);

/// Time without own heartbeats after which a router is isolated: two are lost. Below [`DEAD_AFTER`]
/// less a heartbeat, so that a router detects its own isolation before a peer seems dead.
pub const ISOLATED_AFTER: Duration = Duration::from_millis(1250);

/// Timeout of peers after a long isolation: one lease, and longer than the longest pause between
/// two attempts to connect.
pub const RECONNECT_GRACE: Duration = Duration::from_secs(6);

/// A new router is ready after this time at the latest.
pub const JOIN_MAX: Duration = Duration::from_millis(2500);

/// Time between two calls of [`LoadReplica::tick`].
pub const TICK: Duration = Duration::from_millis(50);

/// Time between two frames. Timers fire up to a millisecond late.
pub const FRAME_PAUSE: Duration = Duration::from_micros(300);

/// Messages that are not urgent ([`SlotEvent::is_urgent`](crate::SlotEvent::is_urgent)) leave with
/// the next frame, or after this time.
pub const LAZY_DELAY: Duration = Duration::from_millis(500);

/// A question is repeated after this time without an answer.
pub const ASK_TIMEOUT: Duration = Duration::from_millis(200);

/// First and longest pause between failed questions; pauses double.
const ASK_PAUSE: (Duration, Duration) = (Duration::from_millis(25), Duration::from_millis(200));

/// First and longest pause between repairs without effect; pauses double.
const REPAIR_PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// Time that a dead router's fence is kept.
const FENCE_KEPT: Duration = Duration::from_secs(60);

/// Known routers, dead ones included. A new router replaces the longest dead one, or is ignored if
/// all live.
pub const PEERS_MAX: usize = 128;

/// Bytes of messages that wait for earlier ones, per peer. Later messages are dropped and requested
/// again.
pub const WAITING_BYTES_MAX: usize = 1 << 20;

/// Bytes of partial states of all peers: 50,000 prompts of 8,000 tokens. A larger state is dropped
/// and fetched again later.
pub const STATE_BYTES_MAX: usize = 64 << 20;

/// Questions answered per [`TICK`]. Further ones are dropped; their senders repeat them.
const SERVED_MAX: u32 = 512;

#[cfg(test)]
mod tests;
