//! How router replicas keep one view of everybody's load. Pure: bytes and time in, effects out.
//!
//! Invariant: a replica that follows a router at number N of incarnation I holds exactly the slots that
//! the router itself held when it wrote N. Nothing of an incarnation below the fence is ever applied.
//!
//! - **Numbers.** A router's messages obey the sequencing rule. What is missing is asked for at once, of
//!   its sender: the messages if they are still kept, else all its open slots as of one number, in
//!   parts. While the slots are on their way the view stands still and messages wait beside it.
//! - **Heartbeats** show what was lost at the end, and compare digests at equal numbers. A mismatch is
//!   mended by the open slots.
//! - **Echoes** tell how long messages are on their way ([`LoadState::delay`]): an empty question a second to
//!   each peer. Nothing here depends on it; decisions do ([`crate::moves`]).
//! - **Silence.** A router that was not heard for [`DEAD_AFTER`] is dead: its slots are freed, its incarnation
//!   stays as fence. What is heard of it later proves that it lives, not what it has: it is followed
//!   again once it stated its open slots.
//! - **Nobody is dead to the deaf.** Broadcasts come back to their sender. A router that does not hear
//!   its own heartbeats is cut off, paused or behind, and judges nobody; what it holds stays as it was.
//!   When it hears itself again, everybody gets the time anew that one needs to be heard, and more
//!   ([`RECONNECT_GRACE`]) if it was deaf so long that the others, too, may still be on their way back.
//! - **Incarnations.** Not heard for [`DEAD_AFTER`], a router takes it that the others freed its slots. It takes
//!   a new incarnation, which fences what the old one may still have on the way, and begins with its
//!   open slots as number 0. They are the same slots: their requests know nothing of it.
//!
//! Without peers nothing is sent but heartbeats. Every buffer is bounded by a constant below, and what
//! happens at the bound is counted in [`ReplicaCounts`].
//!
//! Deliberately absent: sockets and leases (`replication`), what a slot is (`route::slots`, behind
//! [`LoadState`]), agreement. Replicas do not vote; each router alone says what it has.

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
pub use view::{DigestComparison, ReplicaStatus, RouterView, ViewStatus};

/// Between two heartbeats.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);

/// A router silent for this long is dead: four heartbeats are lost, the fifth is late.
pub const DEAD_AFTER: Duration = Duration::from_millis(2500);

/// OwnState heartbeats not heard for this long: deaf. Two are lost. Well below [`DEAD_AFTER`] less a heartbeat, so
/// that a cut is known as one's own before anybody seems dead.
pub const ISOLATED_AFTER: Duration = Duration::from_millis(1250);

/// After one's own long silence, what a peer gets to be heard again: one lease, and more than the longest
/// pause between two attempts to connect.
pub const RECONNECT_GRACE: Duration = Duration::from_secs(6);

/// A joiner is ready after this, whatever is still missing.
pub const JOIN_MAX: Duration = Duration::from_millis(2500);

/// How often [`LoadReplica::tick`] wants to be called.
pub const TICK: Duration = Duration::from_millis(50);

/// Between two frames. Timers fire up to a millisecond late, so that a message waits for one at most.
pub const FRAME_PAUSE: Duration = Duration::from_micros(300);

/// What is not urgent ([`SlotEvent::is_urgent`](crate::SlotEvent::is_urgent)) leaves with the
/// next frame, or after this.
pub const LAZY_DELAY: Duration = Duration::from_millis(500);

/// A question that was not answered by now is asked again.
pub const ASK_TIMEOUT: Duration = Duration::from_millis(200);

/// Pauses between failed questions double from the first to the second.
const ASK_PAUSE: (Duration, Duration) = (Duration::from_millis(25), Duration::from_millis(200));

/// Pauses between repairs that did not help double from the first to the second.
const REPAIR_PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// A dead router's fence is kept for this long.
const FENCE_KEPT: Duration = Duration::from_secs(60);

/// Routers known, the dead included. A new one takes the place of the longest dead; if all live, it is
/// not listened to.
pub const PEERS_MAX: usize = 128;

/// Messages that wait for those before them, a peer. Later ones are dropped, and asked for again.
pub const WAITING_BYTES_MAX: usize = 1 << 20;

/// SlotSnapshot slots that wait for their last part, of all peers together: 50,000 prompts of 8,000 tokens.
/// Beyond, a repair is given up and tried again later.
pub const STATE_BYTES_MAX: usize = 64 << 20;

/// Questions answered in one [`TICK`]; more are dropped, and asked again by their senders.
const SERVED_MAX: u32 = 512;

#[cfg(test)]
mod tests;
