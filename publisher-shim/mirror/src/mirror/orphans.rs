//! Blocks whose parent is not known yet.
//!
//! An orphan has references but no prefix: its position in the forest is not known. It is kept by its
//! own engine hash and listed under its parent's, and enters when that one appears. The number kept
//! is bounded; what does not fit is dropped, and its tier stays incomplete.

use rustc_hash::FxHashMap;
use warmroute_proto::{Tier, Tiers};

use super::nodes::GroupSlot;
use crate::wire::EngineHash;

/// What is needed to name the block once its parent is known.
#[derive(Clone, Debug)]
pub(super) struct BlockContent {
    pub(super) tokens: Box<[u32]>,
    pub(super) items: Box<[u64]>,
    /// All that makes it opaque, in the order in which it enters the seed.
    pub(super) opaque: Box<[u64]>,
}

#[derive(Clone, Debug)]
struct Orphan {
    parent: EngineHash,
    content: BlockContent,
    /// By group and tier; a handful of entries at most.
    references: Vec<(GroupSlot, Tier, u32)>,
}

/// An orphan that found its parent.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) hash: EngineHash,
    pub(super) content: BlockContent,
    pub(super) references: Vec<(GroupSlot, Tier, u32)>,
}

#[derive(Clone, Debug)]
pub(super) struct Orphans {
    max: usize,
    orphans: FxHashMap<EngineHash, Orphan>,
    /// Children by parent, both by engine hash, in the order of their arrival.
    children: FxHashMap<EngineHash, Vec<EngineHash>>,
    references: Tiers<u64>,
}

impl Orphans {
    pub(super) fn new(max: usize) -> Self {
        Self {
            max,
            orphans: FxHashMap::default(),
            children: FxHashMap::default(),
            references: Tiers::default(),
        }
    }

    /// References of orphans in a tier: blocks that are held but not told.
    pub(super) const fn references(&self, tier: Tier) -> u64 {
        *self.references.get(tier)
    }

    pub(super) fn len(&self) -> usize {
        self.orphans.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.orphans.is_empty()
    }

    /// One more reference to an orphan, new or known. `false` if there is no room for it.
    pub(super) fn store(
        &mut self,
        hash: EngineHash,
        parent: EngineHash,
        at: (GroupSlot, Tier),
        content: impl FnOnce() -> BlockContent,
    ) -> bool {
        if let Some(orphan) = self.orphans.get_mut(&hash) {
            orphan.refer(at);
            *self.references.get_mut(at.1) += 1;
            return true;
        }
        if self.orphans.len() >= self.max {
            return false;
        }
        let mut orphan = Orphan {
            parent,
            content: content(),
            references: Vec::new(),
        };
        orphan.refer(at);
        *self.references.get_mut(at.1) += 1;
        self.orphans.insert(hash, orphan);
        self.children.entry(parent).or_default().push(hash);
        true
    }

    /// One reference less. `false` if there was none.
    pub(super) fn remove(&mut self, hash: EngineHash, slot: GroupSlot, tier: Tier) -> bool {
        let Some(orphan) = self.orphans.get_mut(&hash) else {
            return false;
        };
        let Some(at) = orphan
            .references
            .iter()
            .position(|&(s, t, _)| (s, t) == (slot, tier))
        else {
            return false;
        };
        *self.references.get_mut(tier) -= 1;
        orphan.references[at].2 -= 1;
        if orphan.references[at].2 == 0 {
            orphan.references.swap_remove(at);
        }
        self.release(hash);
        true
    }

    /// Takes what waits for this parent.
    pub(super) fn children_of(&mut self, parent: EngineHash) -> Vec<Found> {
        if self.children.is_empty() {
            return Vec::new();
        }
        let children = self.children.remove(&parent).unwrap_or_default();
        children
            .into_iter()
            .filter_map(|hash| {
                let orphan = self.orphans.remove(&hash)?;
                self.uncount(&orphan.references);
                Some(Found {
                    hash,
                    content: orphan.content,
                    references: orphan.references,
                })
            })
            .collect()
    }

    /// The block's position became known by another path than its recorded parent.
    pub(super) fn take(&mut self, hash: EngineHash) -> Option<Vec<(GroupSlot, Tier, u32)>> {
        if self.orphans.is_empty() {
            return None;
        }
        let orphan = self.orphans.remove(&hash)?;
        self.uncount(&orphan.references);
        self.unlist(orphan.parent, hash);
        Some(orphan.references)
    }

    /// Everything that waits, by parent: parents in the order of their hashes, children in the order
    /// of their arrival.
    pub(super) fn by_parent(&self) -> Vec<(EngineHash, Vec<Found>)> {
        #[expect(clippy::disallowed_methods, reason = "sorted right below")]
        let mut parents: Vec<_> = self.children.iter().collect();
        parents.sort_unstable_by_key(|(parent, _)| parent.0);
        let found = |&hash: &EngineHash| {
            let orphan = self.orphans.get(&hash)?;
            Some(Found {
                hash,
                content: orphan.content.clone(),
                references: orphan.references.clone(),
            })
        };
        parents
            .into_iter()
            .map(|(&parent, children)| (parent, children.iter().filter_map(found).collect()))
            .collect()
    }

    /// Takes an orphan back as it was saved. `false` if it is there already or has no room.
    pub(super) fn load(
        &mut self,
        hash: EngineHash,
        parent: EngineHash,
        content: BlockContent,
        references: Vec<(GroupSlot, Tier, u32)>,
    ) -> bool {
        if self.orphans.len() >= self.max || self.orphans.contains_key(&hash) {
            return false;
        }
        for &(_, tier, count) in &references {
            *self.references.get_mut(tier) += u64::from(count);
        }
        let orphan = Orphan {
            parent,
            content,
            references,
        };
        self.orphans.insert(hash, orphan);
        self.children.entry(parent).or_default().push(hash);
        true
    }

    /// Drops an orphan that nothing needs, and what it alone kept.
    fn release(&mut self, mut hash: EngineHash) {
        while let Some(orphan) = self.orphans.get(&hash) {
            if !orphan.references.is_empty() || self.children.contains_key(&hash) {
                return;
            }
            let parent = orphan.parent;
            self.orphans.remove(&hash);
            self.unlist(parent, hash);
            hash = parent;
        }
    }

    fn uncount(&mut self, references: &[(GroupSlot, Tier, u32)]) {
        for &(_, tier, count) in references {
            *self.references.get_mut(tier) -= u64::from(count);
        }
    }

    fn unlist(&mut self, parent: EngineHash, child: EngineHash) {
        if let Some(children) = self.children.get_mut(&parent) {
            children.retain(|&children| children != child);
            if children.is_empty() {
                self.children.remove(&parent);
            }
        }
    }
}

impl Orphan {
    fn refer(&mut self, (slot, tier): (GroupSlot, Tier)) {
        match self
            .references
            .iter_mut()
            .find(|(s, t, _)| (*s, *t) == (slot, tier))
        {
            Some((_, _, count)) => *count = count.saturating_add(1),
            None => self.references.push((slot, tier, 1)),
        }
    }
}
