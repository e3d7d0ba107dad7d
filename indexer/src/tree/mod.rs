//! Which source holds which blocks: exact, pure, and as simple as it can be.
//!
//! A node is one prefix of blocks, named by its [`PrefixHash`]. Each source that holds it in some
//! tier, or holds a descendant of it, stands among its holders: so each source's nodes are closed
//! towards the root, and a removed block stays known while the source holds something below it.
//!
//! Every operation of one change is O(1) a block. A lookup checks every depth: membership at one
//! depth says nothing about its ancestors, because engines evict a block while a descendant stays.
//! A closed source is dead at once; what it held is given back in bounded steps by
//! [`Tree::reclaim`], and its number is used again only afterwards.
//!
//! What it does not know: generations, states, time, or names of sources.

mod dump;
mod lookup;

use rustc_hash::FxHashMap;
use warmroute_proto::{Change, Digest, LocalHash, PrefixHash, Tier, Tiers};

pub(crate) use dump::Dump;

/// A source's place in the tree. Dense, given by [`Tree::open`]; dead after [`Tree::close`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceNumber(u32);

impl SourceNumber {
    const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A set of tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct TierMask(u8);

impl TierMask {
    pub const NONE: Self = Self(0);
    pub const ALL: Self = Self(0b111);

    #[must_use]
    pub const fn of(tier: Tier) -> Self {
        Self(1 << tier.number())
    }

    #[must_use]
    pub const fn with(self, tier: Tier) -> Self {
        Self(self.0 | Self::of(tier).0)
    }

    #[must_use]
    pub const fn without(self, tier: Tier) -> Self {
        Self(self.0 & !Self::of(tier).0)
    }

    #[must_use]
    pub const fn has(self, tier: Tier) -> bool {
        self.0 & Self::of(tier).0 != 0
    }

    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    #[must_use]
    pub const fn both(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

/// A change that contradicts what its source holds. The part before the contradiction is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    #[error("{prefix:?} is held on {tier} already")]
    AlreadyHeld { prefix: PrefixHash, tier: Tier },
    #[error("{prefix:?} is not held on {tier}")]
    NotHeld { prefix: PrefixHash, tier: Tier },
    #[error("nothing is known of the parent {parent:?}")]
    NoParent { parent: PrefixHash },
    #[error("the source is closed")]
    Closed,
}

/// One prefix. Kept as long as it has holders.
struct Node {
    parent: Option<PrefixHash>,
    local: LocalHash,
    /// Ascending by number.
    holders: Vec<Holder>,
}

/// That a source holds a node, or holds something below it.
struct Holder {
    number: SourceNumber,
    tiers: TierMask,
    /// Child nodes among whose holders this source is, too. Zero together with no tiers: gone.
    children: u32,
    /// Where the node stands in the source's list.
    slot: u32,
}

#[derive(Default)]
struct Holdings {
    life: Life,
    digest: Digest,
    /// Every node among whose holders the source is, in no order.
    nodes: Vec<PrefixHash>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Life {
    #[default]
    Free,
    Open,
    /// Dead, but not all given back yet.
    Closed,
}

/// What one node and one holder take, with the slack of the map and the lists that they stand in.
const NODE_BYTES: usize = (size_of::<Node>() + size_of::<PrefixHash>()) * 3 / 2;
const HOLDER_BYTES: usize = size_of::<Holder>() * 3 / 2 + size_of::<PrefixHash>() * 3 / 2;

/// See the module's documentation.
#[derive(Default)]
pub struct Tree {
    nodes: FxHashMap<PrefixHash, Node>,
    sources: Vec<Holdings>,
    free: Vec<SourceNumber>,
    closed: Vec<SourceNumber>,
    entries: usize,
}

impl Tree {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A new source that holds nothing.
    pub fn open(&mut self) -> SourceNumber {
        let number = match self.free.pop() {
            Some(number) => number,
            None => {
                let next = u32::try_from(self.sources.len()).unwrap_or(u32::MAX);
                debug_assert!(next < u32::MAX, "sources are few");
                self.sources.push(Holdings::default());
                SourceNumber(next)
            }
        };
        if let Some(source) = self.sources.get_mut(number.index()) {
            source.life = Life::Open;
        }
        number
    }

    /// Ends a source: at once it holds nothing. What it held is given back by [`Self::reclaim`].
    pub fn close(&mut self, number: SourceNumber) {
        if let Some(source) = self.opened(number) {
            source.life = Life::Closed;
            source.digest = Digest::default();
            self.closed.push(number);
        }
    }

    /// Gives back at most `nodes_max` of what closed sources held. Is there more?
    pub fn reclaim(&mut self, nodes_max: usize) -> bool {
        for _ in 0..nodes_max {
            let Some(&number) = self.closed.last() else {
                return false;
            };
            let Some(source) = self.sources.get_mut(number.index()) else {
                return false;
            };
            match source.nodes.pop() {
                Some(prefix) => self.drop_holder(prefix, number),
                None => {
                    *source = Holdings::default();
                    self.closed.pop();
                    self.free.push(number);
                }
            }
        }
        !self.closed.is_empty()
    }

    /// Applies one change of a source.
    pub fn apply(&mut self, number: SourceNumber, change: &Change) -> Result<(), ChangeError> {
        self.opened(number).ok_or(ChangeError::Closed)?;
        match change {
            Change::Stored {
                parent,
                blocks,
                tier,
            } => self.store(number, *parent, blocks, *tier),
            Change::Removed { blocks, tier } => blocks
                .iter()
                .try_for_each(|&prefix| self.remove(number, prefix, *tier)),
            Change::Cleared { tier } => {
                self.clear(number, *tier);
                Ok(())
            }
        }
    }

    /// Count and sum of all pairs that the source holds.
    #[must_use]
    pub fn digest(&self, number: SourceNumber) -> Digest {
        self.sources
            .get(number.index())
            .map_or_else(Digest::default, |source| source.digest)
    }

    /// The digest, computed anew from the nodes: what [`Self::digest`] must be.
    #[must_use]
    pub fn recomputed_digest(&self, number: SourceNumber) -> Digest {
        let mut digest = Digest::default();
        for (prefix, tier) in self.held(number) {
            digest.insert(prefix, tier);
        }
        digest
    }

    /// All pairs that the source holds, in no order.
    pub fn held(&self, number: SourceNumber) -> impl Iterator<Item = (PrefixHash, Tier)> {
        self.listed(number).flat_map(move |(prefix, _, holder)| {
            Tier::ALL
                .into_iter()
                .filter(|&tier| holder.tiers.has(tier))
                .map(move |tier| (prefix, tier))
        })
    }

    /// What the source holds as changes that make an empty source equal to it, parents first.
    /// Removed ancestors are stored and removed again at the end.
    #[must_use]
    pub fn dump(&self, number: SourceNumber) -> Vec<Change> {
        Dump::of(self, number)
    }

    /// Per source of `allowed`, in that order: the run on the GPU from depth 0, then, from its end
    /// on, the run in the lower tiers, where a block counts for CPU before disk. The first block in
    /// neither ends it. A tier that is not allowed counts as holding nothing.
    #[must_use]
    pub fn lookup(
        &self,
        blocks: &[LocalHash],
        allowed: &[(SourceNumber, TierMask)],
    ) -> Vec<Tiers<u32>> {
        lookup::runs(self, blocks, allowed)
    }

    /// Distinct prefixes, those of closed sources that are not given back yet included.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Roughly the memory of all nodes and holders.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.nodes.len() * NODE_BYTES + self.entries * HOLDER_BYTES
    }

    /// How many nodes the source stands in: a measure of what it costs.
    #[must_use]
    pub fn entries(&self, number: SourceNumber) -> usize {
        self.sources
            .get(number.index())
            .map_or(0, |source| source.nodes.len())
    }

    fn opened(&mut self, number: SourceNumber) -> Option<&mut Holdings> {
        self.sources
            .get_mut(number.index())
            .filter(|source| source.life == Life::Open)
    }

    /// The nodes of an open source, each with the source's place among its holders.
    fn listed(&self, number: SourceNumber) -> impl Iterator<Item = (PrefixHash, &Node, &Holder)> {
        self.sources
            .get(number.index())
            .filter(|source| source.life == Life::Open)
            .into_iter()
            .flat_map(|source| &source.nodes)
            .filter_map(move |&prefix| {
                let node = self.nodes.get(&prefix)?;
                Some((prefix, node, node.holder(number)?))
            })
    }

    fn store(
        &mut self,
        number: SourceNumber,
        parent: Option<PrefixHash>,
        blocks: &[LocalHash],
        tier: Tier,
    ) -> Result<(), ChangeError> {
        let mut parent = parent;
        for &local in blocks {
            let prefix = PrefixHash::after(parent, local);
            self.store_one(number, (parent, local, prefix), tier)?;
            parent = Some(prefix);
        }
        Ok(())
    }

    fn store_one(
        &mut self,
        number: SourceNumber,
        (parent, local, prefix): (Option<PrefixHash>, LocalHash, PrefixHash),
        tier: Tier,
    ) -> Result<(), ChangeError> {
        if let Some(holder) = self.holder_mut(prefix, number) {
            if holder.tiers.has(tier) {
                return Err(ChangeError::AlreadyHeld { prefix, tier });
            }
            holder.tiers = holder.tiers.with(tier);
        } else {
            if let Some(parent) = parent {
                let holder = self.holder_mut(parent, number);
                holder.ok_or(ChangeError::NoParent { parent })?.children += 1;
            }
            self.add_holder(number, (parent, local, prefix), TierMask::of(tier));
        }
        if let Some(source) = self.opened(number) {
            source.digest.insert(prefix, tier);
        }
        Ok(())
    }

    fn add_holder(
        &mut self,
        number: SourceNumber,
        (parent, local, prefix): (Option<PrefixHash>, LocalHash, PrefixHash),
        tiers: TierMask,
    ) {
        let Some(source) = self.sources.get_mut(number.index()) else {
            return;
        };
        let slot = u32::try_from(source.nodes.len()).unwrap_or(u32::MAX);
        source.nodes.push(prefix);
        self.entries += 1;
        let node = self.nodes.entry(prefix).or_insert_with(|| Node {
            parent,
            local,
            holders: Vec::new(),
        });
        let at = node
            .holders
            .partition_point(|holder| holder.number < number);
        let holder = Holder {
            number,
            tiers,
            children: 0,
            slot,
        };
        node.holders.insert(at, holder);
    }

    fn remove(
        &mut self,
        number: SourceNumber,
        prefix: PrefixHash,
        tier: Tier,
    ) -> Result<(), ChangeError> {
        let holder = self
            .holder_mut(prefix, number)
            .filter(|holder| holder.tiers.has(tier))
            .ok_or(ChangeError::NotHeld { prefix, tier })?;
        holder.tiers = holder.tiers.without(tier);
        if let Some(source) = self.opened(number) {
            source.digest.remove(prefix, tier);
        }
        self.forget_unneeded(number, prefix);
        Ok(())
    }

    fn clear(&mut self, number: SourceNumber, tier: Tier) {
        let prefixes: Vec<_> = self
            .listed(number)
            .filter(|(_, _, holder)| holder.tiers.has(tier))
            .map(|(prefix, _, _)| prefix)
            .collect();
        for prefix in prefixes {
            // Each was listed as held a moment ago, and nothing but its own removal ends that.
            let removed = self.remove(number, prefix, tier);
            debug_assert_eq!(removed, Ok(()));
        }
    }

    /// Takes the source out of a node that it neither holds nor needs, and so on towards the root.
    fn forget_unneeded(&mut self, number: SourceNumber, prefix: PrefixHash) {
        let mut next = Some(prefix);
        while let Some(prefix) = next {
            let Some(node) = self.nodes.get(&prefix) else {
                return;
            };
            let Some(holder) = node.holder(number) else {
                return;
            };
            if !holder.tiers.is_empty() || holder.children > 0 {
                return;
            }
            next = node.parent;
            let slot = holder.slot;
            self.unlist(number, slot);
            self.drop_holder(prefix, number);
            if let Some(parent) = next.and_then(|parent| self.holder_mut(parent, number)) {
                debug_assert!(parent.children > 0, "a child was counted when it came");
                parent.children = parent.children.saturating_sub(1);
            }
        }
    }

    /// Takes a slot out of a source's list; the last one moves into its place.
    fn unlist(&mut self, number: SourceNumber, slot: u32) {
        let Some(source) = self.sources.get_mut(number.index()) else {
            return;
        };
        let index = slot as usize;
        if index >= source.nodes.len() {
            return;
        }
        source.nodes.swap_remove(index);
        let moved = source.nodes.get(index).copied();
        if let Some(holder) = moved.and_then(|moved| self.holder_mut(moved, number)) {
            holder.slot = slot;
        }
    }

    fn drop_holder(&mut self, prefix: PrefixHash, number: SourceNumber) {
        let Some(node) = self.nodes.get_mut(&prefix) else {
            return;
        };
        if let Ok(at) = node.find(number) {
            node.holders.remove(at);
            self.entries -= 1;
        }
        if node.holders.is_empty() {
            self.nodes.remove(&prefix);
        }
    }

    fn holder_mut(&mut self, prefix: PrefixHash, number: SourceNumber) -> Option<&mut Holder> {
        let node = self.nodes.get_mut(&prefix)?;
        let at = node.find(number).ok()?;
        node.holders.get_mut(at)
    }
}

impl Node {
    fn find(&self, number: SourceNumber) -> Result<usize, usize> {
        self.holders
            .binary_search_by_key(&number, |holder| holder.number)
    }

    fn holder(&self, number: SourceNumber) -> Option<&Holder> {
        self.holders.get(self.find(number).ok()?)
    }
}

#[cfg(test)]
mod tests;
