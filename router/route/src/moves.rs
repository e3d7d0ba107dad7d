//! Which of this router's requests may still go elsewhere, because another router's choice crossed
//! theirs.
//!
//! Routers that decide within the delay between them cannot see each other. They choose the same source,
//! and the later request waits for the prefill of the earlier one. The later one's router hears of it a
//! moment after it decided, and that is early enough: it decides again
//! ([`Core::reconsider`](super::Core::reconsider)), and if another source is now cheaper by more than a
//! margin, the request goes there. It pays the delay, not the prefill.
//!
//! **Who was earlier** needs no common clock: what took `delay` to come was decided `delay` before it
//! came, and only what was decided before one's own choice makes one reconsider it. Both sides judge
//! alike as far as their measured delays are right. Where they are not, now and then both requests move
//! or neither does: either way each has one place, on average no worse a one than without all this.
//!
//! Bounds: a request moves once at most; only within the longest delay of a peer, [`MOVE_WINDOW_MAX`] at most;
//! only before anything is known of its answer. At most [`WATCHED_MAX`] requests are watched, what comes
//! beyond stays where it is. Without peers nothing is watched.
//!
//! Deliberately absent: asking the others. It is each router's own request, and its own decision.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;
use warmroute_proto::RouterId;

use super::source_table::SourceId;

/// After this an idle engine is deep in a prefill, and to stop it saves nobody anything.
pub const MOVE_WINDOW_MAX: Duration = Duration::from_millis(15);

/// Requests watched at once: 200,000 a second for 5 ms.
pub const WATCHED_MAX: usize = 1_000;

/// What became of own choices that an earlier one of another router crossed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MoveCounts {
    pub moved: u64,
    /// Their source was still the best, or as good.
    pub stayed: u64,
    /// When they were looked at their answer had begun, or they had ended.
    pub late: u64,
    /// Requests that were not watched for want of room.
    pub unwatched: u64,
}

#[derive(Clone, Debug, Default)]
pub struct MoveTracker {
    /// Of the peers: how long their messages are on their way.
    delays: BTreeMap<RouterId, Duration>,
    /// By slot, and so by time.
    open: BTreeMap<u64, MovableRequest>,
    /// Slots whose choice was crossed since somebody asked.
    crossed: Vec<u64>,
    is_over: bool,
    pub(super) counts: MoveCounts,
}

#[derive(Clone, Copy, Debug)]
struct MovableRequest {
    source: SourceId,
    sent: Instant,
}

impl MoveTracker {
    /// How long a peer's messages are on their way; none: it is gone.
    pub fn set_delay(&mut self, peer: RouterId, delay: Option<Duration>) {
        match delay {
            Some(delay) => self.delays.insert(peer, delay),
            None => self.delays.remove(&peer),
        };
    }

    /// From here on nothing moves.
    pub fn stop(&mut self) {
        self.is_over = true;
        self.open.clear();
        self.crossed.clear();
    }

    /// A request of this router goes to a source. Until when it may be moved; none: never.
    pub fn sent(&mut self, slot: u64, source: SourceId, now: Instant) -> Option<Instant> {
        let longest = *self.delays.values().max().filter(|_| !self.is_over)?;
        self.expire(now);
        if self.open.len() >= WATCHED_MAX {
            self.counts.unwatched += 1;
            return None;
        }
        self.open.insert(slot, MovableRequest { source, sent: now });
        Some(now + MOVE_WINDOW_MAX.min(longest))
    }

    /// Its answer began, it ended, or it was moved.
    pub fn settle(&mut self, slot: u64) {
        self.open.remove(&slot);
    }

    /// The source of a request that may be moved.
    #[must_use]
    pub fn source_of(&self, slot: u64) -> Option<SourceId> {
        self.open.get(&slot).map(|movable| movable.source)
    }

    /// Another router's request goes to a source. `own`: this router.
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

    /// The slots to be looked at again.
    pub fn take_crossed(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.crossed)
    }

    fn expire(&mut self, now: Instant) {
        while let Some(oldest) = self.open.first_entry()
            && now.saturating_duration_since(oldest.get().sent) > MOVE_WINDOW_MAX
        {
            oldest.remove();
        }
    }
}

#[cfg(test)]
mod tests;
