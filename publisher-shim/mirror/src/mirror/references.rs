//! Reference counts by group and tier.
//!
//! An engine holds a block in several physical copies, each with a store and a removal of its own.

use std::collections::hash_map::Entry;
use std::hash::Hash;

use rustc_hash::FxHashMap;
use warmroute_proto::Tier;

use crate::fields::{Field, FieldReader, Malformed};

/// The index of a counted group among those of its tier.
pub(super) type GroupSlot = u8;

/// The memory of one group in one tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GroupTier {
    pub(super) slot: GroupSlot,
    pub(super) tier: Tier,
}

/// The references of one block, each group and tier at most once.
pub(super) type References = Vec<(GroupTier, u32)>;

/// Counts of a tier's first group, by tier: the only ones of most engines.
pub(super) type FirstGroup = [u32; 3];

/// Counts of all further groups. None of them is zero.
#[derive(Clone, Debug)]
pub(super) struct FurtherGroups<K>(FxHashMap<(K, GroupTier), u32>);

impl<K> Default for FurtherGroups<K> {
    fn default() -> Self {
        Self(FxHashMap::default())
    }
}

impl<K: Copy + Eq + Hash> FurtherGroups<K> {
    pub(super) fn add(&mut self, key: K, first: &mut FirstGroup, at: GroupTier, count: u32) {
        let sum = if at.slot == 0 {
            &mut first[at.tier.index()]
        } else {
            self.0.entry((key, at)).or_default()
        };
        *sum = sum.saturating_add(count);
    }

    /// Subtracts one reference. `None` if there is none.
    pub(super) fn subtract(&mut self, key: K, first: &mut FirstGroup, at: GroupTier) -> Option<()> {
        if at.slot == 0 {
            let count = &mut first[at.tier.index()];
            *count = count.checked_sub(1)?;
            return Some(());
        }
        let Entry::Occupied(mut count) = self.0.entry((key, at)) else {
            return None;
        };
        *count.get_mut() -= 1;
        if *count.get() == 0 {
            count.remove();
        }
        Some(())
    }

    pub(super) fn get(&self, key: K, first: &FirstGroup, at: GroupTier) -> u32 {
        if at.slot == 0 {
            first[at.tier.index()]
        } else {
            self.0.get(&(key, at)).copied().unwrap_or_default()
        }
    }
}

impl Field for (GroupTier, u32) {
    const BYTES_MIN: usize = 6;

    fn write(&self, to: &mut Vec<u8>) {
        let &(GroupTier { slot, tier }, count) = self;
        slot.write(to);
        tier.number().write(to);
        count.write(to);
    }

    fn read(from: &mut FieldReader<'_>) -> Result<Self, Malformed> {
        let slot = from.read()?;
        let tier = Tier::ALL.get(usize::from(from.read::<u8>()?));
        let &tier = tier.ok_or(Malformed("a tier"))?;
        Ok((GroupTier { slot, tier }, from.read()?))
    }
}
