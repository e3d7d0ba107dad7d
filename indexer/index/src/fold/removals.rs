//! Recent removals of one source, by record number: shows that a block was held without
//! interruption.
//!
//! A ring of [`REMOVALS_MAX`] entries of 8 bytes, of the present generation. What was dropped from
//! it is [`HoldSpan::Uncovered`]. Two blocks with one fingerprint are taken for each other, so the
//! ring may report an interruption that did not happen and never misses one.

use std::collections::VecDeque;

use warmroute_proto::query::HoldSpan;
use warmroute_proto::{Change, LogPosition, PrefixHash, RecordNumber};

/// 16 KiB a source: seconds of an engine that evicts several hundred blocks a second.
pub(super) const REMOVALS_MAX: usize = 2048;

/// Where a record is, by its number and by its place in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecordPlace {
    pub(super) number: RecordNumber,
    pub(super) position: LogPosition,
}

/// Ring of removals.
#[derive(Debug, Default)]
pub(super) struct RecentRemovals {
    /// All removals above this number are in the ring; `None` before the first record.
    floor: Option<u64>,
    /// Nothing is known of records before it: their numbers may have been given twice.
    began: LogPosition,
    /// Number that the entries' offsets count from.
    base: u64,
    entries: VecDeque<RemovedBlock>,
}

#[derive(Clone, Copy, Debug)]
struct RemovedBlock {
    /// The record's number less `base`.
    offset: u32,
    fingerprint: u32,
}

impl RecentRemovals {
    /// A ring that covers nothing before this record.
    pub(super) fn above(place: RecordPlace) -> Self {
        let mut removals = Self::default();
        removals.restart(place);
        removals
    }

    /// Adds the removals of an applied record.
    pub(super) fn record(&mut self, place: RecordPlace, changes: &[Change]) {
        if self.floor.is_none() {
            return self.restart(place);
        }
        let Ok(offset) = u32::try_from(place.number.0.saturating_sub(self.base)) else {
            return self.restart(place);
        };
        for change in changes {
            match change {
                Change::Stored { .. } => {}
                Change::Removed { blocks, .. } => {
                    let removed = blocks.iter().map(|block| RemovedBlock {
                        offset,
                        fingerprint: fingerprint(*block),
                    });
                    self.entries.extend(removed);
                }
                Change::Cleared { .. } => return self.restart(place),
            }
        }
        while self.entries.len() > REMOVALS_MAX {
            let oldest = self.entries.pop_front();
            let dropped = oldest.map(|oldest| self.base + u64::from(oldest.offset));
            self.floor = self.floor.max(dropped);
        }
    }

    /// Whether a block that is held now was held since a record.
    pub(super) fn span(&self, block: PrefixHash, since: RecordPlace) -> HoldSpan {
        let number = since.number.0;
        if since.position < self.began || self.floor.is_none_or(|floor| number < floor) {
            return HoldSpan::Uncovered;
        }
        let newest_first = self.entries.iter().rev();
        let mut later =
            newest_first.take_while(|removed| self.base + u64::from(removed.offset) > number);
        match later.any(|removed| removed.fingerprint == fingerprint(block)) {
            true => HoldSpan::Interrupted,
            false => HoldSpan::Held,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<RemovedBlock>()
    }

    fn restart(&mut self, place: RecordPlace) {
        self.entries.clear();
        self.began = place.position;
        self.floor = Some(place.number.0);
        self.base = place.number.0;
    }
}

/// The low half of a hash.
const fn fingerprint(block: PrefixHash) -> u32 {
    (block.0 & u32::MAX as u64) as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use warmroute_proto::Tier;

    use super::*;

    fn removed(blocks: impl IntoIterator<Item = u64>) -> Vec<Change> {
        vec![Change::Removed {
            blocks: blocks.into_iter().map(PrefixHash).collect(),
            tier: Tier::Gpu,
        }]
    }

    /// The record of a number, in a log of this source alone.
    const fn at(number: u64) -> RecordPlace {
        RecordPlace {
            number: RecordNumber(number),
            position: LogPosition(100 + number),
        }
    }

    #[test]
    fn only_later_removals_of_the_block_interrupt() {
        let mut removals = RecentRemovals::default();
        let span =
            |removals: &RecentRemovals, block, since| removals.span(PrefixHash(block), at(since));
        assert_eq!(span(&removals, 1, 0), HoldSpan::Uncovered);
        removals.record(at(4), &removed([1]));
        assert_eq!(span(&removals, 1, 3), HoldSpan::Uncovered);
        assert_eq!(span(&removals, 1, 4), HoldSpan::Held);
        removals.record(at(5), &removed([1, 2]));
        assert_eq!(span(&removals, 1, 4), HoldSpan::Interrupted);
        assert_eq!(span(&removals, 1, 5), HoldSpan::Held);
        assert_eq!(span(&removals, 3, 4), HoldSpan::Held);
        removals.record(at(6), &[Change::Cleared { tier: Tier::Cpu }]);
        assert_eq!(span(&removals, 3, 5), HoldSpan::Uncovered);
        assert_eq!(span(&removals, 3, 6), HoldSpan::Held);
        let beyond = at(7 + u64::from(u32::MAX));
        removals.record(beyond, &removed([3]));
        assert_eq!(span(&removals, 3, 6), HoldSpan::Uncovered);
    }

    #[test]
    fn positions_that_the_log_gives_again_hide_no_removal() {
        let mut removals = RecentRemovals::above(at(0));
        let refilled = |number, position| RecordPlace {
            number: RecordNumber(number),
            position: LogPosition(position),
        };
        removals.record(refilled(7, 103), &removed([1]));
        // The credit was of record 5, when the log had it at 105.
        let span = |since| removals.span(PrefixHash(1), since);
        assert_eq!(span(at(5)), HoldSpan::Interrupted);
        assert_eq!(span(at(7)), HoldSpan::Held);
        // The number was given once before.
        assert_eq!(span(refilled(7, 99)), HoldSpan::Uncovered);
    }

    #[test]
    fn what_the_ring_dropped_is_not_covered() {
        let mut removals = RecentRemovals::above(at(0));
        removals.record(at(1), &removed([1]));
        let others = 2..1 + REMOVALS_MAX as u64;
        removals.record(at(2), &removed(others));
        let span = |removals: &RecentRemovals, since| removals.span(PrefixHash(1), at(since));
        assert_eq!(span(&removals, 0), HoldSpan::Interrupted);
        removals.record(at(3), &removed([9]));
        assert_eq!(span(&removals, 0), HoldSpan::Uncovered);
        assert_eq!(span(&removals, 1), HoldSpan::Held);
    }

    proptest! {
        /// Against a list of all removals: no interruption is missed, and the memory is bounded.
        #[test]
        fn no_interruption_is_missed(
            records in prop::collection::vec(prop::collection::vec(0_u64..40, 0..400), 1..30),
            since in 0_u64..30,
        ) {
            let mut removals = RecentRemovals::above(at(0));
            let mut later = std::collections::BTreeSet::<u64>::new();
            for (number, blocks) in (1..).zip(&records) {
                removals.record(at(number), &removed(blocks.iter().copied()));
                later.extend(blocks.iter().copied().filter(|_| number > since));
            }
            prop_assert!(removals.entries.len() <= REMOVALS_MAX);
            for block in 0..40 {
                match removals.span(PrefixHash(block), at(since)) {
                    HoldSpan::Held => prop_assert!(!later.contains(&block)),
                    HoldSpan::Interrupted => prop_assert!(later.contains(&block)),
                    HoldSpan::Uncovered => {}
                    HoldSpan::Absent => prop_assert!(false, "only the tree knows"),
                }
            }
        }
    }
}
