//! The blocks of the mirror, as a forest of prefixes.
//!
//! A node is one prefix, of one load of an adapter. It stays as long as it has references or
//! children. A leaf without references is freed, so that every node has a held block at or below it:
//! memory is bounded by what the engine holds, ancestors included.

mod family;
mod load;

use hashbrown::HashTable;
use rustc_hash::FxHashMap;
use warmroute_proto::{LocalHash, PrefixHash, Seed, Tier};

use super::references::{FirstGroup, FurtherGroups, GroupSlot, GroupTier};
use crate::wire::EngineHash;
use family::Family;
pub(super) use load::SavedNode;

/// Engine hashes without references that a node with a child or references keeps beside its own:
/// later events may name them. The tests reach the bound.
pub(super) const ALIASES_MAX: usize = if cfg!(test) { 3 } else { 16 };

/// One load of an adapter; the default stands for blocks without a named adapter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LoadId(pub(super) u16);

impl LoadId {
    pub(super) const NONE: Self = Self(0);

    pub(super) const fn number(self) -> u16 {
        self.0
    }

    /// A number that does not fit is that of no load.
    pub(super) fn of(number: u32) -> Self {
        Self(u16::try_from(number).unwrap_or(u16::MAX))
    }
}

/// An index into the slab of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct NodeId(u32);

impl NodeId {
    pub(super) const NONE: Self = Self(u32::MAX);

    pub(super) const fn of(number: u32) -> Self {
        Self(number)
    }

    pub(super) const fn number(self) -> u32 {
        self.0
    }

    pub(super) const fn some(self) -> Option<Self> {
        if self.0 == u32::MAX { None } else { Some(self) }
    }

    pub(super) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A set of tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TierSet(u8);

impl TierSet {
    pub(super) const fn has(self, tier: Tier) -> bool {
        self.0 & (1 << tier.number()) != 0
    }

    pub(super) const fn with(self, tier: Tier) -> Self {
        Self(self.0 | (1 << tier.number()))
    }

    pub(super) const fn without(self, tier: Tier) -> Self {
        Self(self.0 & !(1 << tier.number()))
    }

    pub(super) const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) prefix: PrefixHash,
    pub(super) local: LocalHash,
    /// The seed of the block's local hash; its children inherit it.
    pub(super) seed: Seed,
    pub(super) parent: NodeId,
    pub(super) children: u32,
    /// Children that the log's readers know: held, or ancestors of a held one.
    pub(super) visible_children: u32,
    /// Number of references, over all groups and tiers.
    pub(super) references: u32,
    /// References of the first main group; further groups are in [`Nodes::further`].
    first_group: FirstGroup,
    /// One engine hash of this prefix; further ones are in [`Nodes::aliases`].
    pub(super) engine: EngineHash,
    /// The adapter's load that it was computed with. Nodes of different loads may have one prefix.
    pub(super) load: LoadId,
    /// The tiers in which the log's readers see it held.
    pub(super) held: TierSet,
    /// It is in [`Mirror::touched`](super::Mirror).
    pub(super) touched: bool,
}

impl Node {
    fn new(new: NewNode) -> Self {
        Self {
            prefix: new.prefix,
            local: new.local,
            seed: new.seed,
            parent: new.parent,
            children: 0,
            visible_children: 0,
            references: 0,
            first_group: FirstGroup::default(),
            engine: new.engine,
            load: new.load,
            held: TierSet::default(),
            touched: false,
        }
    }

    /// Whether the log's readers know this prefix.
    pub(super) const fn is_visible(&self) -> bool {
        !self.held.is_empty() || self.visible_children > 0
    }

    const fn is_needed(&self) -> bool {
        self.references > 0 || self.children > 0 || self.visible_children > 0
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Nodes {
    slab: Vec<Option<Node>>,
    free: Vec<NodeId>,
    /// All nodes, by the hashes of their prefixes. The prefixes are in the slab only, so that the
    /// table stays in the processor's cache.
    by_prefix: HashTable<NodeId>,
    further: FurtherGroups<NodeId>,
    aliases: FxHashMap<NodeId, Vec<EngineHash>>,
    /// `None` unless resume points are kept.
    family: Option<Family>,
    /// A node had more references than can be counted. It has those of all its groups and hashes,
    /// so that no other count overflows before.
    has_overflowed: bool,
}

impl Nodes {
    pub(super) fn len(&self) -> usize {
        self.by_prefix.len()
    }

    /// The ids of all nodes, in the order of the slab.
    pub(super) fn ids(&self) -> impl Iterator<Item = NodeId> + '_ {
        (0_u32..)
            .map(NodeId)
            .zip(&self.slab)
            .filter_map(|(id, node)| node.as_ref().map(|_| id))
    }

    pub(super) const fn slots(&self) -> usize {
        self.slab.len()
    }

    pub(super) fn get(&self, id: NodeId) -> Option<&Node> {
        self.slab.get(id.index())?.as_ref()
    }

    pub(super) fn get_mut(&mut self, id: NodeId) -> Option<&mut Node> {
        self.slab.get_mut(id.index())?.as_mut()
    }

    /// The node of a prefix and load, created if it does not exist. Its engine hash, which no node has,
    /// becomes an alias of an existing one. `None` if the slab is full.
    pub(super) fn find_or_insert(&mut self, new: NewNode) -> Option<NodeId> {
        if let Some(id) = self.find(new.prefix, new.load) {
            if self.get(id)?.engine != new.engine {
                self.add_alias(id, new.engine);
            }
            return Some(id);
        }
        let node = Node::new(new);
        let id = match self.free.pop() {
            Some(id) => {
                *self.slab.get_mut(id.index())? = Some(node);
                id
            }
            None => {
                let id = NodeId(u32::try_from(self.slab.len()).ok()?);
                id.some()?;
                self.slab.push(Some(node));
                id
            }
        };
        self.index(id, new.prefix);
        if let Some(parent) = self.get_mut(new.parent) {
            parent.children += 1;
        }
        if let Some(family) = &mut self.family {
            family.add(id, new.parent);
        }
        Some(id)
    }

    /// Drops an alias of a node that has more than it keeps. `false` if that keeps it.
    pub(super) fn drop_alias(&mut self, id: NodeId, engine: EngineHash) -> bool {
        let aliases = self.aliases.get_mut(&id);
        let Some(aliases) = aliases.filter(|aliases| aliases.len() > ALIASES_MAX) else {
            return false;
        };
        let at = aliases.iter().position(|&alias| alias == engine);
        at.map(|at| aliases.swap_remove(at)).is_some()
    }

    pub(super) fn find(&self, prefix: PrefixHash, load: LoadId) -> Option<NodeId> {
        let is_it = |&id: &NodeId| {
            let node = self.get(id);
            node.is_some_and(|node| node.prefix == prefix && node.load == load)
        };
        self.by_prefix.find(prefix.0, is_it).copied()
    }

    /// Reads what a search for each of these prefixes reads first.
    pub(super) fn read_ahead(&self, prefixes: impl Iterator<Item = PrefixHash>) {
        let mut last = NodeId::NONE;
        prefixes.for_each(|prefix| {
            self.by_prefix.find(prefix.0, |&id| {
                last = id;
                false
            });
        });
        std::hint::black_box(last);
    }

    /// Makes a node findable, which no other node of its prefix and load is.
    fn index(&mut self, id: NodeId, prefix: PrefixHash) {
        let slab = &self.slab;
        let hash = |id: &NodeId| {
            let node = slab.get(id.index()).and_then(Option::as_ref);
            node.map_or(0, |node| node.prefix.0)
        };
        self.by_prefix.insert_unique(prefix.0, id, hash);
    }

    /// Lists the children of each node from now on.
    pub(super) fn keep_children(&mut self) {
        let mut family = Family::default();
        for id in self.ids() {
            if let Some(node) = self.get(id) {
                family.add(id, node.parent);
            }
        }
        self.family = Some(family);
    }

    pub(super) fn children(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let family = self.family.iter();
        family.flat_map(move |family| family.children(id))
    }

    pub(super) fn add_references(&mut self, id: NodeId, at: GroupTier, count: u32) {
        // Through the slab: `get_mut` would borrow the further groups as well.
        let Some(Some(node)) = self.slab.get_mut(id.index()) else {
            return;
        };
        self.has_overflowed |= node.references.checked_add(count).is_none();
        node.references = node.references.saturating_add(count);
        self.further.add(id, &mut node.first_group, at, count);
    }

    pub(super) const fn has_overflowed(&self) -> bool {
        self.has_overflowed
    }

    /// Subtracts one reference, which the node has: it has those of all its engine hashes.
    pub(super) fn subtract_reference(&mut self, id: NodeId, at: GroupTier) {
        let Some(Some(node)) = self.slab.get_mut(id.index()) else {
            return;
        };
        let had_one = self.further.subtract(id, &mut node.first_group, at);
        assert!(
            had_one.is_some(),
            "an engine hash has more references than its node"
        );
        node.references -= 1;
    }

    pub(super) fn has_reference(&self, id: NodeId, at: GroupTier) -> bool {
        let node = self.get(id);
        node.is_some_and(|node| self.further.get(id, &node.first_group, at) > 0)
    }

    /// Whether all of a tier's groups hold the block.
    pub(super) fn is_held(&self, id: NodeId, tier: Tier, slots: GroupSlot) -> bool {
        slots > 0 && (0..slots).all(|slot| self.has_reference(id, GroupTier { slot, tier }))
    }

    /// Whether the log's readers see the block held.
    pub(super) fn is_emitted(&self, id: NodeId, tier: Tier) -> bool {
        self.get(id).is_some_and(|node| node.held.has(tier))
    }

    /// Frees a node that nothing needs, and then its ancestors likewise. Calls `forgotten` with each
    /// of their engine hashes.
    pub(super) fn release(&mut self, mut id: NodeId, mut forgotten: impl FnMut(EngineHash)) {
        while self.get(id).is_some_and(|node| !node.is_needed()) {
            let Some(node) = self.slab.get_mut(id.index()).and_then(Option::take) else {
                return;
            };
            self.free.push(id);
            if let Ok(entry) = self
                .by_prefix
                .find_entry(node.prefix.0, |&known| known == id)
            {
                entry.remove();
            }
            forgotten(node.engine);
            if let Some(aliases) = self.aliases.remove(&id) {
                aliases.into_iter().for_each(&mut forgotten);
            }
            if let Some(family) = &mut self.family {
                family.remove(id, node.parent);
            }
            id = node.parent;
            if let Some(parent) = self.get_mut(id) {
                parent.children -= 1;
            }
        }
    }
}

/// The fields by which a node is created.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewNode {
    pub(super) prefix: PrefixHash,
    pub(super) local: LocalHash,
    pub(super) seed: Seed,
    pub(super) parent: NodeId,
    pub(super) engine: EngineHash,
    pub(super) load: LoadId,
}
