//! Requests of this router that may move to another source, because a choice of another router
//! crossed theirs.
//!
//! Routers that decide within the delay between them do not see each other's choices. They choose
//! the same source, and the later request waits for the prefill of the earlier one. The router of
//! the later request receives the earlier choice a moment after its own. Then it decides again
//! ([`Core::reconsider`](super::Core::reconsider)) and moves the request if another source is
//! cheaper by more than a margin. A move costs the delay and what the engine
//! has computed, instead of the prefill.
//!
//! **Order of choices** needs no common clock: a message that took `delay` was decided `delay`
//! before its arrival. Only a choice that was made before the own one causes a second decision.
//! Both routers find the same order if their measured delays are right. If not, both requests move
//! or none does: each still has one source.
//!
//! Bounds: a request moves at most once, only within the longest delay of a peer and
//! [`MOVE_WINDOW_MAX`], and only before its answer begins. At most [`WATCHED_MAX`] requests are
//! watched; further requests stay. Without peers no request is watched.
//!
//! Deliberately absent: agreement. Each router decides about its own requests.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;
use warmroute_proto::RouterId;

use super::source_table::SourceId;

/// Above the delay between two sites of one region.
pub const MOVE_WINDOW_MAX: Duration = Duration::from_millis(60);

/// Upper limit of watched requests: 200,000 a second for 5 ms, 20,000 for 50 ms.
pub const WATCHED_MAX: usize = 1_000;

/// Own choices that an earlier choice of another router crossed, by result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MoveCounts {
    pub moved: u64,
    /// The source was still the best, or as good.
    pub stayed: u64,
    /// The answer had begun or the request had ended.
    pub late: u64,
    /// Requests that were not watched because of [`WATCHED_MAX`].
    pub unwatched: u64,
}

#[derive(Clone, Debug, Default)]
pub struct MoveTracker {
    /// One-way delay of each peer's messages.
    delays: BTreeMap<RouterId, Duration>,
    /// By slot counter, so also by time.
    open: BTreeMap<u64, MovableRequest>,
    /// Slots whose choice was crossed since the last [`Self::take_crossed`].
    crossed: Vec<u64>,
    is_over: bool,
    pub(super) counts: MoveCounts,
}

#[derive(Clone, Copy, Debug)]
struct MovableRequest {
    source: SourceId,
    sent: Instant,
    until: Instant,
}

impl MoveTracker {
    /// Sets the one-way delay of a peer's messages; `None` removes the peer.
    pub fn set_delay(&mut self, peer: RouterId, delay: Option<Duration>) {
        match delay {
            Some(delay) => self.delays.insert(peer, delay),
            None => self.delays.remove(&peer),
        };
    }

    /// Disables moves.
    pub fn stop(&mut self) {
        self.is_over = true;
        self.open.clear();
        self.crossed.clear();
    }

    /// Registers a request of this router. Returns the deadline for moving it, or `None` if it
    /// cannot be moved.
    pub fn sent(&mut self, slot: u64, source: SourceId, now: Instant) -> Option<Instant> {
        let longest = *self.delays.values().max().filter(|_| !self.is_over)?;
        self.expire(now);
        if self.open.len() >= WATCHED_MAX {
            self.counts.unwatched += 1;
            return None;
        }
        let movable = MovableRequest {
            source,
            sent: now,
            until: now + MOVE_WINDOW_MAX.min(longest),
        };
        self.open.insert(slot, movable);
        Some(movable.until)
    }

    /// Its answer began, or it ended or was moved: it stays.
    pub fn settle(&mut self, slot: u64) {
        self.open.remove(&slot);
    }

    /// The source of a request that may be moved.
    #[must_use]
    pub fn source_of(&self, slot: u64) -> Option<SourceId> {
        self.open.get(&slot).map(|movable| movable.source)
    }

    /// Registers a choice of another router. `own` is this router.
    pub fn peer_chose(&mut self, own: RouterId, peer: RouterId, source: SourceId, now: Instant) {
        let Some(&delay) = self.delays.get(&peer) else {
            return;
        };
        self.expire(now);
        let was_earlier = |sent: Instant| {
            let since = now.saturating_duration_since(sent);
            since < delay || (since == delay && peer < own)
        };
        for (&slot, movable) in &self.open {
            let crosses = movable.source == source && was_earlier(movable.sent);
            if crosses && !self.crossed.contains(&slot) {
                self.crossed.push(slot);
            }
        }
    }

    /// Takes the slots to decide again.
    pub fn take_crossed(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.crossed)
    }

    fn expire(&mut self, now: Instant) {
        while let Some(oldest) = self.open.first_entry()
            && now > oldest.get().until
        {
            oldest.remove();
        }
    }
}

#[cfg(test)]
mod tests;
