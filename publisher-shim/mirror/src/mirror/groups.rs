//! The engine's KV-cache groups that count, learned from its stores.
//!
//! Only main-attention groups count: positions in the others are unknown. Old engines send no kind
//! or no index; a group without a kind is taken for main attention. So is a group of an unknown
//! kind: if it is one, its blocks are needed; if not, fewer blocks are held than could be.

use warmroute_proto::{Tier, Tiers};

use super::references::GroupSlot;
use crate::checkpoint::{Field, FieldReader, Malformed, write_length};
use crate::wire::{BlockGroup, GroupKind};

/// More groups than any model has; further ones are not tracked.
const GROUPS_MAX: usize = 64;

/// What the mirror does with a group's events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupRole {
    /// Counts references, under a slot that is dense within the tier.
    Main(GroupSlot),
    /// Ignores them.
    Masked,
    /// Ignores them and doubts the tier: there are too many groups.
    Untracked,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Groups {
    tiers: Tiers<Vec<KnownGroup>>,
    main_count: Tiers<GroupSlot>,
}

#[derive(Clone, Copy, Debug)]
struct KnownGroup {
    index: Option<u32>,
    role: GroupRole,
    /// `None` if the engine did not send it.
    kind: Option<GroupKind>,
}

impl Groups {
    /// The role of a store's group, which is assigned with the group's first store.
    pub(super) fn learn(&mut self, tier: Tier, group: BlockGroup) -> GroupRole {
        if let Some(role) = self.role(tier, group.index) {
            return role;
        }
        let groups = self.tiers.get_mut(tier);
        if groups.len() >= GROUPS_MAX {
            return GroupRole::Untracked;
        }
        let role = match group.kind {
            Some(GroupKind::Main | GroupKind::Unknown) | None => {
                let main_count = self.main_count.get_mut(tier);
                *main_count += 1;
                GroupRole::Main(*main_count - 1)
            }
            Some(GroupKind::Masked) => GroupRole::Masked,
        };
        groups.push(KnownGroup {
            index: group.index,
            role,
            kind: group.kind,
        });
        role
    }

    /// The role of a group, or `None` before its first store.
    pub(super) fn role(&self, tier: Tier, index: Option<u32>) -> Option<GroupRole> {
        let groups = self.tiers.get(tier);
        let group = groups.iter().find(|group| group.index == index)?;
        Some(group.role)
    }

    /// Number of groups that must hold a block for the tier to hold it.
    pub(super) const fn main_count(&self, tier: Tier) -> GroupSlot {
        *self.main_count.get(tier)
    }

    /// The tier has several groups, and the engine did not send the kinds of all.
    pub(super) fn lacks_kinds(&self, tier: Tier) -> bool {
        let groups = self.tiers.get(tier);
        groups.len() > 1 && groups.iter().any(|group| group.kind.is_none())
    }

    /// No group seen so far has another kind than main attention.
    pub(super) fn is_main_attention_only(&self) -> bool {
        Tier::ALL.iter().all(|&tier| {
            let mut groups = self.tiers.get(tier).iter();
            groups.all(|group| matches!(group.kind, Some(GroupKind::Main) | None))
        })
    }

    pub(super) fn write(&self, to: &mut Vec<u8>) {
        for tier in Tier::ALL {
            let groups = self.tiers.get(tier);
            write_length(groups.len(), to);
            for group in groups {
                group.index.is_some().write(to);
                group.index.unwrap_or_default().write(to);
                let kind: u8 = match group.kind {
                    Some(GroupKind::Main) | None => 0,
                    Some(GroupKind::Masked) => 1,
                    Some(GroupKind::Unknown) => 2,
                };
                kind.write(to);
                group.kind.is_some().write(to);
            }
        }
    }

    pub(super) fn read(from: &mut FieldReader<'_>) -> Result<Self, Malformed> {
        const GROUP_BYTES: usize = 7;
        let mut groups = Self::default();
        for tier in Tier::ALL {
            let length = from.length(GROUP_BYTES)?;
            if length > GROUPS_MAX {
                return Err(Malformed("the number of groups"));
            }
            for _ in 0..length {
                let has_index = from.read()?;
                let index = Some(from.read()?).filter(|_| has_index);
                let kind = match (from.read::<u8>()?, from.read()?) {
                    (0, true) => Some(GroupKind::Main),
                    (0, false) => None,
                    (1, true) => Some(GroupKind::Masked),
                    (2, true) => Some(GroupKind::Unknown),
                    _ => return Err(Malformed("a group's kind")),
                };
                if groups.role(tier, index).is_some() {
                    return Err(Malformed("a duplicate group"));
                }
                groups.learn(tier, BlockGroup { index, kind });
            }
        }
        Ok(groups)
    }
}
