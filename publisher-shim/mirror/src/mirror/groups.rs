//! Which of an engine's KV groups count, learned from its stores.
//!
//! Only main-attention groups do: of the others positions cannot be told. Old engine_hashes send no kind
//! or no index; one group alone is then taken to be main attention.

use warmroute_proto::{Tier, Tiers};

use super::nodes::GroupSlot;
use crate::checkpoint::{FieldReader, FieldWriter, Malformed};
use crate::wire::{BlockGroup, GroupKind};

/// More groups than any model has. Beyond, stores are not understood.
const GROUPS_MAX: usize = 64;

/// What a group is to the mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupRole {
    /// It counts; the number is dense within its tier.
    Main(GroupSlot),
    /// It counts, and was not known before: nothing is held in it yet.
    NewMain(GroupSlot),
    /// Ignored on purpose.
    Masked,
    /// Of an unknown kind: whether it ought to count cannot be told.
    Unknown,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Groups {
    tiers: Tiers<Vec<KnownGroup>>,
    /// How many of each tier are main groups.
    main_count: Tiers<GroupSlot>,
}

#[derive(Clone, Copy, Debug)]
struct KnownGroup {
    index: Option<u32>,
    role: GroupRole,
    told: bool,
}

impl Groups {
    /// The role of the group that a store entries.
    pub(super) fn learn(&mut self, tier: Tier, group: BlockGroup) -> GroupRole {
        if let Some(role) = self.role(tier, group.index) {
            return role;
        }
        let groups = self.tiers.get_mut(tier);
        if groups.len() >= GROUPS_MAX {
            return GroupRole::Unknown;
        }
        let main_count = self.main_count.get_mut(tier);
        let role = match group.kind {
            Some(GroupKind::Main) | None => GroupRole::Main(*main_count),
            Some(GroupKind::Masked) => GroupRole::Masked,
            Some(GroupKind::Unknown) => GroupRole::Unknown,
        };
        groups.push(KnownGroup {
            index: group.index,
            role,
            told: group.kind.is_some(),
        });
        match role {
            GroupRole::Main(slot) => {
                // No more than `GROUPS_MAX`.
                *main_count += 1;
                GroupRole::NewMain(slot)
            }
            GroupRole::NewMain(_) | GroupRole::Masked | GroupRole::Unknown => role,
        }
    }

    /// The role of a group that some store named before.
    pub(super) fn role(&self, tier: Tier, index: Option<u32>) -> Option<GroupRole> {
        let groups = self.tiers.get(tier);
        let group = groups.iter().find(|group| group.index == index)?;
        Some(group.role)
    }

    /// How many groups have to hold a block for the tier to hold it.
    pub(super) const fn main_count(&self, tier: Tier) -> GroupSlot {
        *self.main_count.get(tier)
    }

    pub(super) const fn main_groups(&self) -> Tiers<GroupSlot> {
        self.main_count
    }

    /// A tier with several groups whose kinds nobody told.
    pub(super) fn lacks_group_kinds(&self, tier: Tier) -> bool {
        let groups = self.tiers.get(tier);
        groups.len() > 1 && groups.iter().any(|group| !group.told)
    }

    pub(super) fn save(&self, writer: &mut FieldWriter) {
        for tier in Tier::ALL {
            let groups = self.tiers.get(tier);
            writer.count(groups.len());
            for group in groups {
                writer.u8(u8::from(group.index.is_some()));
                writer.u32(group.index.unwrap_or_default());
                writer.u8(match group.role {
                    GroupRole::Main(_) | GroupRole::NewMain(_) => 0,
                    GroupRole::Masked => 1,
                    GroupRole::Unknown => 2,
                });
                writer.u8(u8::from(group.told));
            }
        }
    }

    pub(super) fn load(reader: &mut FieldReader<'_>) -> Result<Self, Malformed> {
        let mut loaded = Self::default();
        for tier in Tier::ALL {
            let groups = loaded.tiers.get_mut(tier);
            let main_count = loaded.main_count.get_mut(tier);
            let count = reader.count(7)?;
            if count > GROUPS_MAX {
                return Err(Malformed("the number of groups"));
            }
            for _ in 0..count {
                let has_index = reader.flag()?;
                let index = Some(reader.u32()?).filter(|_| has_index);
                let role = match reader.u8()? {
                    0 => {
                        *main_count += 1;
                        GroupRole::Main(*main_count - 1)
                    }
                    1 => GroupRole::Masked,
                    2 => GroupRole::Unknown,
                    _ => return Err(Malformed("a group's role")),
                };
                if groups.iter().any(|group| group.index == index) {
                    return Err(Malformed("one group twice"));
                }
                let told = reader.flag()?;
                groups.push(KnownGroup { index, role, told });
            }
        }
        Ok(loaded)
    }

    /// Nothing but main attention was seen.
    pub(super) fn is_main_attention_only(&self) -> bool {
        Tier::ALL.iter().all(|&tier| {
            let mut groups = self.tiers.get(tier).iter();
            groups.all(|group| matches!(group.role, GroupRole::Main(_)))
        })
    }
}
