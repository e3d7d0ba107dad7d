//! Recent removals of one source, by position in the log: shows that a block was held without
//! interruption.
//!
//! A ring of [`REMOVALS_MAX`] entries of 8 bytes, of the present generation. What was dropped from
//! it is [`HoldSpan::Uncovered`]. Two blocks with one fingerprint are taken for each other, so the
//! ring may report an interruption that did not happen and never misses one.

use std::collections::VecDeque;

use warmroute_proto::query::HoldSpan;
use warmroute_proto::{Change, LogPosition, PrefixHash};

/// 16 KiB a source: seconds of an engine that evicts several hundred blocks a second.
pub(super) const REMOVALS_MAX: usize = 2048;

/// Ring of removals.
#[derive(Debug, Default)]
pub(super) struct RecentRemovals {
    /// All removals above this position are in the ring; `None` before the first record.
    floor: Option<u64>,
    /// Position that the entries' offsets count from.
    base: u64,
    entries: VecDeque<RemovedBlock>,
}

#[derive(Clone, Copy, Debug)]
struct RemovedBlock {
    /// The record's position less `base`.
    offset: u32,
    fingerprint: u32,
}

impl RecentRemovals {
    /// A ring that covers nothing up to this position.
    pub(super) fn above(position: LogPosition) -> Self {
        let mut removals = Self::default();
        removals.restart(position);
        removals
    }

    /// Adds the removals of an applied record.
    pub(super) fn record(&mut self, position: LogPosition, changes: &[Change]) {
        if self.floor.is_none() {
            return self.restart(position);
        }
        let Ok(offset) = u32::try_from(position.0.saturating_sub(self.base)) else {
            return self.restart(position);
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
                Change::Cleared { .. } => return self.restart(position),
            }
        }
        while self.entries.len() > REMOVALS_MAX {
            let oldest = self.entries.pop_front();
            let dropped = oldest.map(|oldest| self.base + u64::from(oldest.offset));
            self.floor = self.floor.max(dropped);
        }
    }

    /// Whether a block that is held now was held since a position.
    pub(super) fn span(&self, block: PrefixHash, since: LogPosition) -> HoldSpan {
        if self.floor.is_none_or(|floor| since.0 < floor) {
            return HoldSpan::Uncovered;
        }
        let newest_first = self.entries.iter().rev();
        let mut later =
            newest_first.take_while(|removed| self.base + u64::from(removed.offset) > since.0);
        match later.any(|removed| removed.fingerprint == fingerprint(block)) {
            true => HoldSpan::Interrupted,
            false => HoldSpan::Held,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<RemovedBlock>()
    }

    fn restart(&mut self, position: LogPosition) {
        self.entries.clear();
        self.floor = Some(position.0);
        self.base = position.0;
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

    #[test]
    fn only_later_removals_of_the_block_interrupt() {
        let mut removals = RecentRemovals::default();
        let span = |removals: &RecentRemovals, block, since| {
            removals.span(PrefixHash(block), LogPosition(since))
        };
        assert_eq!(span(&removals, 1, 0), HoldSpan::Uncovered);
        removals.record(LogPosition(4), &removed([1]));
        assert_eq!(span(&removals, 1, 3), HoldSpan::Uncovered);
        assert_eq!(span(&removals, 1, 4), HoldSpan::Held);
        removals.record(LogPosition(5), &removed([1, 2]));
        assert_eq!(span(&removals, 1, 4), HoldSpan::Interrupted);
        assert_eq!(span(&removals, 1, 5), HoldSpan::Held);
        assert_eq!(span(&removals, 3, 4), HoldSpan::Held);
        removals.record(LogPosition(6), &[Change::Cleared { tier: Tier::Cpu }]);
        assert_eq!(span(&removals, 3, 5), HoldSpan::Uncovered);
        assert_eq!(span(&removals, 3, 6), HoldSpan::Held);
        let beyond = LogPosition(7 + u64::from(u32::MAX));
        removals.record(beyond, &removed([3]));
        assert_eq!(
            removals.span(PrefixHash(3), LogPosition(6)),
            HoldSpan::Uncovered
        );
    }

    proptest! {
        /// Against a list of all removals: no interruption is missed, and the memory is bounded.
        #[test]
        fn no_interruption_is_missed(
            records in prop::collection::vec(prop::collection::vec(0_u64..40, 0..400), 1..30),
            since in 0_u64..30,
        ) {
            let mut removals = RecentRemovals::above(LogPosition(0));
            let mut later = std::collections::BTreeSet::<u64>::new();
            for (position, blocks) in (1..).zip(&records) {
                removals.record(LogPosition(position), &removed(blocks.iter().copied()));
                later.extend(blocks.iter().copied().filter(|_| position > since));
            }
            prop_assert!(removals.entries.len() <= REMOVALS_MAX);
            for block in 0..40 {
                match removals.span(PrefixHash(block), LogPosition(since)) {
                    HoldSpan::Held => prop_assert!(!later.contains(&block)),
                    HoldSpan::Interrupted => prop_assert!(later.contains(&block)),
                    HoldSpan::Uncovered => {}
                    HoldSpan::Absent => prop_assert!(false, "only the tree knows"),
                }
            }
        }
    }
}
