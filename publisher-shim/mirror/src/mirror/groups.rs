//! The engine's KV-cache groups, learned from its stores, and what a prefix hit needs of each.
//!
//! Old engines send no kind or no index; a group without a kind is taken for main attention. So is
//! a group of an unknown kind: if it is one, its blocks are needed; if not, fewer blocks are held
//! than could be.

use std::num::NonZeroU32;

use warmroute_proto::{BlockSize, Tier, Tiers};

use super::references::GroupSlot;
use crate::fields::{Field, FieldReader, Malformed, write_length};
use crate::wire::{BlockGroup, GroupKind};

/// More groups than any model has; further ones are not tracked.
const GROUPS_MAX: usize = 64;
/// Different windows of one engine, each counted separately; groups of further ones are not tracked.
pub(super) const WINDOWS_MAX: usize = 4;

/// What the mirror does with a group's events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupRole {
    /// Counts references, under a slot that is dense within the tier.
    Counted(GroupSlot),
    /// Ignores them: the group needs part of a lower tier's blocks.
    Ignored,
    /// Ignores them and doubts the tier: there are too many groups or windows.
    Untracked,
}

/// The blocks of a group that a prefix hit needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HitNeed {
    /// All blocks of the prefix.
    Run,
    /// As many last blocks of the prefix, or all of a shorter one.
    Window(u32),
}

#[derive(Clone, Debug, Default)]
pub(super) struct Groups {
    tiers: Tiers<Vec<KnownGroup>>,
    /// By slot.
    needs: Tiers<Vec<HitNeed>>,
}

#[derive(Clone, Copy, Debug)]
struct KnownGroup {
    index: Option<u32>,
    role: GroupRole,
    /// `None` if the engine did not send it.
    kind: Option<GroupKind>,
    block_tokens: u32,
}

impl Groups {
    /// Learns a store's group. `true` if it is new and its references count.
    pub(super) fn learn(&mut self, tier: Tier, group: BlockGroup, block_tokens: u32) -> bool {
        if self.role(tier, group.index).is_some() {
            return false;
        }
        if self.tiers.get(tier).len() >= GROUPS_MAX {
            return false;
        }
        let need = need(group.kind, block_tokens);
        let role = match need {
            HitNeed::Window(_) if tier != Tier::Gpu => GroupRole::Ignored,
            HitNeed::Window(blocks) if !self.has_room_for(blocks) => GroupRole::Untracked,
            HitNeed::Run | HitNeed::Window(_) => {
                let needs = self.needs.get_mut(tier);
                needs.push(need);
                #[expect(clippy::cast_possible_truncation, reason = "at most GROUPS_MAX")]
                GroupRole::Counted((needs.len() - 1) as GroupSlot)
            }
        };
        self.tiers.get_mut(tier).push(KnownGroup {
            index: group.index,
            role,
            kind: group.kind,
            block_tokens,
        });
        matches!(role, GroupRole::Counted(_))
    }

    fn has_room_for(&self, window: u32) -> bool {
        let windows = self.windows();
        windows.contains(&window) || windows.len() < WINDOWS_MAX
    }

    /// The role of a group, or `None` before its first store.
    pub(super) fn role(&self, tier: Tier, index: Option<u32>) -> Option<GroupRole> {
        let groups = self.tiers.get(tier);
        let group = groups.iter().find(|group| group.index == index)?;
        Some(group.role)
    }

    /// What a hit needs of each counted group of a tier, by slot.
    pub(super) fn needs(&self, tier: Tier) -> &[HitNeed] {
        self.needs.get(tier)
    }

    /// Number of groups of a tier that count.
    #[expect(clippy::cast_possible_truncation, reason = "at most GROUPS_MAX")]
    pub(super) fn slots(&self, tier: Tier) -> GroupSlot {
        self.needs.get(tier).len() as GroupSlot
    }

    /// The different windows of the GPU's groups, in the order of their appearance.
    pub(super) fn windows(&self) -> Vec<u32> {
        let mut windows = Vec::new();
        for need in self.needs(Tier::Gpu) {
            if let &HitNeed::Window(blocks) = need
                && !windows.contains(&blocks)
            {
                windows.push(blocks);
            }
        }
        windows
    }

    pub(super) fn is_windowed(&self) -> bool {
        let needs = self.needs(Tier::Gpu);
        needs.iter().any(|need| matches!(need, HitNeed::Window(_)))
    }

    /// A group on the GPU names every block by its position, so that the others are placed by it.
    pub(super) fn has_runs(&self) -> bool {
        self.needs(Tier::Gpu).contains(&HitNeed::Run)
    }

    /// A hit needs the state of a state-space layer.
    pub(super) fn has_state(&self) -> bool {
        let mut groups = self.tiers.gpu.iter();
        groups.any(|group| group.kind == Some(GroupKind::State))
    }

    /// The tier has several groups, and the engine did not send the kinds of all.
    pub(super) fn lacks_kinds(&self, tier: Tier) -> bool {
        let groups = self.tiers.get(tier);
        groups.len() > 1 && groups.iter().any(|group| group.kind.is_none())
    }

    /// A group of the tier has chunks of several of the engine's blocks.
    pub(super) fn has_chunks(&self, tier: Tier, block_size: Option<BlockSize>) -> bool {
        let mut groups = self.tiers.get(tier).iter();
        let is_larger =
            |tokens: u32| block_size.is_some_and(|size| tokens as usize > size.tokens());
        tier != Tier::Gpu && groups.any(|group| is_larger(group.block_tokens))
    }

    /// The tier's groups have an index and this one has none, or the reverse.
    pub(super) fn are_named_otherwise(&self, tier: Tier, index: Option<u32>) -> bool {
        let groups = self.tiers.get(tier);
        let mut named = groups.iter().map(|group| group.index.is_some());
        !groups.is_empty() && named.all(|is_named| is_named != index.is_some())
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
                let (kind, window) = match group.kind {
                    None => (0_u8, 0_u32),
                    Some(GroupKind::Main) => (1, 0),
                    Some(GroupKind::Sliding(window)) => (2, window.get()),
                    Some(GroupKind::State) => (3, 0),
                    Some(GroupKind::Unknown) => (4, 0),
                };
                kind.write(to);
                window.write(to);
                group.block_tokens.write(to);
            }
        }
    }

    pub(super) fn read(from: &mut FieldReader<'_>) -> Result<Self, Malformed> {
        const GROUP_BYTES: usize = 14;
        let mut groups = Self::default();
        for tier in Tier::ALL {
            let length = from.length(GROUP_BYTES)?;
            if length > GROUPS_MAX {
                return Err(Malformed("the number of groups"));
            }
            for _ in 0..length {
                let has_index = from.read()?;
                let index = Some(from.read()?).filter(|_| has_index);
                let kind = match (from.read::<u8>()?, NonZeroU32::new(from.read()?)) {
                    (0, None) => None,
                    (1, None) => Some(GroupKind::Main),
                    (2, Some(window)) => Some(GroupKind::Sliding(window)),
                    (3, None) => Some(GroupKind::State),
                    (4, None) => Some(GroupKind::Unknown),
                    _ => return Err(Malformed("a group's kind")),
                };
                if groups.role(tier, index).is_some() {
                    return Err(Malformed("a duplicate group"));
                }
                groups.learn(tier, BlockGroup { index, kind }, from.read()?);
            }
        }
        Ok(groups)
    }
}

/// vLLM's rule: a token of a sliding layer attends to the `window - 1` tokens before it.
fn need(kind: Option<GroupKind>, block_tokens: u32) -> HitNeed {
    match kind {
        Some(GroupKind::Main | GroupKind::Unknown) | None => HitNeed::Run,
        Some(GroupKind::Sliding(window)) => {
            let blocks = (window.get() - 1).div_ceil(block_tokens.max(1));
            HitNeed::Window(blocks.max(1))
        }
        Some(GroupKind::State) => HitNeed::Window(1),
    }
}
