//! Blocks whose parent is not known yet.
//!
//! An orphan has references but no prefix. It is stored under its own engine hash, listed under its
//! parent's, and adopted when the parent appears. Their number is bounded; a store beyond the bound
//! is dropped, and its tier stays incomplete.

use rustc_hash::FxHashMap;
use warmroute_proto::{Tier, Tiers};

use super::references::{GroupTier, References};
use crate::wire::EngineHash;

/// The data from which a block's prefix is computed once its parent is known.
#[derive(Clone, Debug)]
pub(super) struct BlockContent {
    pub(super) tokens: Vec<u32>,
    pub(super) items: Vec<u64>,
    /// Keys that make the block opaque, in the order in which they enter the seed.
    pub(super) opaque: Vec<u64>,
}

#[derive(Clone, Debug)]
pub(super) struct Orphan {
    pub(super) hash: EngineHash,
    pub(super) parent: EngineHash,
    pub(super) content: BlockContent,
    pub(super) references: References,
}

#[derive(Clone, Debug)]
pub(super) struct Orphans {
    max: usize,
    orphans: FxHashMap<EngineHash, Orphan>,
    /// Children by parent, in the order of their arrival.
    children: FxHashMap<EngineHash, Vec<EngineHash>>,
    references: Tiers<u64>,
    /// One had more references than can be counted.
    has_overflowed: bool,
}

/// Ancestors that are looked at for a circle. A longer one stays until the next clear, within the
/// bound of all orphans.
const CIRCLE_MAX: usize = 1 << 12;

impl Orphans {
    pub(super) fn new(max: usize) -> Self {
        Self {
            max,
            orphans: FxHashMap::default(),
            children: FxHashMap::default(),
            references: Tiers::default(),
            has_overflowed: false,
        }
    }

    pub(super) const fn has_overflowed(&self) -> bool {
        self.has_overflowed
    }

    /// References of orphans in a tier: blocks that are held and not in the log.
    pub(super) const fn references(&self, tier: Tier) -> u64 {
        *self.references.get(tier)
    }

    pub(super) fn len(&self) -> usize {
        self.orphans.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.orphans.is_empty()
    }

    /// Adds a reference to an orphan, new or known. `false` if it does not fit.
    pub(super) fn store(
        &mut self,
        hash: EngineHash,
        parent: EngineHash,
        at: GroupTier,
        content: impl FnOnce() -> BlockContent,
    ) -> bool {
        self.add_reference(hash, at)
            || self.insert(|| Orphan {
                hash,
                parent,
                content: content(),
                references: vec![(at, 1)],
            })
    }

    /// Adds a reference to a known orphan. `false` if there is none.
    pub(super) fn add_reference(&mut self, hash: EngineHash, at: GroupTier) -> bool {
        let Some(orphan) = self.orphans.get_mut(&hash) else {
            return false;
        };
        match orphan.references.iter_mut().find(|(known, _)| *known == at) {
            Some((_, count)) => {
                self.has_overflowed |= *count == u32::MAX;
                *count = count.saturating_add(1);
            }
            None => orphan.references.push((at, 1)),
        }
        *self.references.get_mut(at.tier) += 1;
        true
    }

    /// Restores a saved orphan. `false` if it is there already or does not fit.
    pub(super) fn restore(&mut self, orphan: Orphan) -> bool {
        !self.orphans.contains_key(&orphan.hash) && self.insert(|| orphan)
    }

    fn insert(&mut self, orphan: impl FnOnce() -> Orphan) -> bool {
        if self.orphans.len() >= self.max {
            return false;
        }
        let orphan = orphan();
        if self.closes_circle(&orphan) {
            return false;
        }
        for &(at, count) in &orphan.references {
            *self.references.get_mut(at.tier) += u64::from(count);
        }
        let siblings = self.children.entry(orphan.parent).or_default();
        siblings.push(orphan.hash);
        self.orphans.insert(orphan.hash, orphan);
        true
    }

    /// Whether an orphan would be its own ancestor. No engine has such blocks, and each would keep
    /// the others.
    fn closes_circle(&self, orphan: &Orphan) -> bool {
        if orphan.parent == orphan.hash {
            return true;
        }
        // Without a child that waits for it, it is no ancestor.
        if !self.children.contains_key(&orphan.hash) {
            return false;
        }
        let parent = |hash: &EngineHash| self.orphans.get(hash).map(|orphan| orphan.parent);
        let ancestors = std::iter::successors(Some(orphan.parent), parent);
        ancestors.take(CIRCLE_MAX).any(|hash| hash == orphan.hash)
    }

    /// Subtracts a reference. `false` if there is none.
    pub(super) fn remove(&mut self, hash: EngineHash, at: GroupTier) -> bool {
        let Some(orphan) = self.orphans.get_mut(&hash) else {
            return false;
        };
        let mut references = orphan.references.iter();
        let Some(index) = references.position(|&(known, _)| known == at) else {
            return false;
        };
        *self.references.get_mut(at.tier) -= 1;
        orphan.references[index].1 -= 1;
        if orphan.references[index].1 == 0 {
            orphan.references.swap_remove(index);
        }
        self.release(hash);
        true
    }

    /// Takes the children of a parent.
    pub(super) fn take_children(&mut self, parent: EngineHash) -> Vec<Orphan> {
        if self.children.is_empty() {
            return Vec::new();
        }
        let children = self.children.remove(&parent).unwrap_or_default();
        let orphans = children.into_iter().filter_map(|hash| {
            let orphan = self.orphans.remove(&hash)?;
            uncount(&mut self.references, &orphan.references);
            Some(orphan)
        });
        orphans.collect()
    }

    /// Takes the references of a block that got a prefix by another parent than the recorded one.
    pub(super) fn take(&mut self, hash: EngineHash) -> Option<References> {
        if self.orphans.is_empty() {
            return None;
        }
        let orphan = self.orphans.remove(&hash)?;
        uncount(&mut self.references, &orphan.references);
        self.unlist(orphan.parent, hash);
        Some(orphan.references)
    }

    /// All orphans by parent: parents by hash, children in the order of their arrival.
    pub(super) fn by_parent(&self) -> Vec<(EngineHash, Vec<&Orphan>)> {
        #[expect(clippy::disallowed_methods, reason = "sorted right below")]
        let mut parents: Vec<_> = self.children.iter().collect();
        parents.sort_unstable_by_key(|(parent, _)| parent.0);
        let orphans = |children: &Vec<EngineHash>| {
            let orphans = children.iter().filter_map(|hash| self.orphans.get(hash));
            orphans.collect()
        };
        parents
            .into_iter()
            .map(|(&parent, children)| (parent, orphans(children)))
            .collect()
    }

    /// Drops an orphan without references and children, and then its ancestors likewise.
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

    fn unlist(&mut self, parent: EngineHash, child: EngineHash) {
        if let Some(children) = self.children.get_mut(&parent) {
            children.retain(|&listed| listed != child);
            if children.is_empty() {
                self.children.remove(&parent);
            }
        }
    }
}

fn uncount(counts: &mut Tiers<u64>, references: &References) {
    for &(at, count) in references {
        *counts.get_mut(at.tier) -= u64::from(count);
    }
}
