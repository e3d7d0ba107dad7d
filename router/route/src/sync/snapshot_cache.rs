//! Snapshots of own open slots, kept while peers fetch them in parts.
//!
//! Peers that ask within [`SHARED`] share a snapshot. At most two are kept, each for [`KEPT`] after
//! its last use. A peer whose snapshot expired starts again.

use std::ops::Range;
use std::time::{Duration, Instant};

use warmroute_proto::load::{ANSWER_BYTES_MAX, OpenSlot, StatePart};
use warmroute_proto::{RecordNumber, RouterId};

use super::load_state::SlotSnapshot;

const HELD_MAX: usize = 2;

/// Time that a snapshot is kept after its last use.
const KEPT: Duration = Duration::from_secs(2);

/// Age up to which a snapshot is shared. The ring has all newer messages.
const SHARED: Duration = Duration::from_millis(100);

/// Upper bound of a part's encoding without its slots.
const PART_BYTES: usize = 128;

#[derive(Default)]
pub(super) struct SnapshotCache(Vec<CachedSnapshot>);

struct CachedSnapshot {
    stated: SlotSnapshot,
    parts: Vec<Range<usize>>,
    made: Instant,
    used: Instant,
}

impl SnapshotCache {
    /// The number of the newest snapshot, if it may be shared.
    pub(super) fn newest(&self, now: Instant) -> Option<Option<RecordNumber>> {
        let newest = self.0.last()?;
        let fresh = now.saturating_duration_since(newest.made) < SHARED;
        fresh.then_some(newest.stated.head.number)
    }

    pub(super) fn hold(&mut self, stated: SlotSnapshot, now: Instant) -> Option<RecordNumber> {
        let number = stated.head.number;
        self.0.retain(|cached| cached.stated.head.number != number);
        if self.0.len() == HELD_MAX {
            self.0.remove(0);
        }
        self.0.push(CachedSnapshot {
            parts: split(&stated.slots),
            stated,
            made: now,
            used: now,
        });
        number
    }

    pub(super) fn part(
        &mut self,
        router: RouterId,
        number: Option<RecordNumber>,
        part: u32,
        now: Instant,
    ) -> Option<StatePart> {
        let cached = self
            .0
            .iter_mut()
            .find(|cached| cached.stated.head.number == number)?;
        let range = cached.parts.get(usize::try_from(part).ok()?)?.clone();
        cached.used = now;
        let head = cached.stated.head;
        Some(StatePart {
            router,
            incarnation: head.incarnation,
            number,
            digest: head.digest,
            part,
            parts: u32::try_from(cached.parts.len()).unwrap_or(u32::MAX),
            slots: cached.stated.slots.get(range)?.to_vec(),
        })
    }

    pub(super) fn expire(&mut self, now: Instant) {
        self.0
            .retain(|cached| now.saturating_duration_since(cached.used) < KEPT);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

/// Ranges of slots that fit into one answer each; one empty range without slots.
fn split(slots: &[OpenSlot]) -> Vec<Range<usize>> {
    let mut parts = Vec::new();
    let (mut start, mut bytes) = (0, PART_BYTES);
    for (index, slot) in slots.iter().enumerate() {
        let more = slot.encoded_bytes();
        if index > start && bytes + more > ANSWER_BYTES_MAX {
            parts.push(start..index);
            (start, bytes) = (index, PART_BYTES);
        }
        bytes += more;
    }
    parts.push(start..slots.len());
    parts
}
