//! The blocks that the mirror knows, as a forest of prefixes.
//!
//! A node is one prefix. It stays while anything refers to it: references of the engine, or a
//! child. Since a leaf without references goes at once, every node has a held block at or below it:
//! memory is bounded by what the engine holds, its prefixes included.

mod load;

use std::collections::hash_map::Entry;

use rustc_hash::FxHashMap;
use warmroute_proto::{LocalHash, PrefixHash, Seed, Tier};

use crate::wire::EngineHash;
pub(super) use load::SavedNode;

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
    /// What the block was hashed with; its children inherit it.
    pub(super) seed: Seed,
    pub(super) parent: NodeId,
    pub(super) children: u32,
    /// Children that the log's readers know: held, or above a held one.
    pub(super) visible_children: u32,
    /// Sum of the references below, over all groups and tiers.
    pub(super) references: u32,
    /// References of the first main group, by tier; further groups are in [`Nodes::more`].
    first_group: [u32; 3],
    /// One engine hash that means this prefix; further ones are in [`Nodes::aliases`].
    pub(super) engine: EngineHash,
    /// Where the log says that it is held.
    pub(super) held: TierSet,
    /// It is in the list of blocks whose state may have changed.
    pub(super) touched: bool,
}

impl Node {
    /// The log's readers know this prefix.
    pub(super) const fn is_visible(&self) -> bool {
        !self.held.is_empty() || self.visible_children > 0
    }

    const fn is_needed(&self) -> bool {
        self.references > 0 || self.children > 0 || self.visible_children > 0
    }
}

/// A main-attention group's position among those of its tier.
pub(super) type GroupSlot = u8;

#[derive(Clone, Debug, Default)]
pub(super) struct Nodes {
    slab: Vec<Option<Node>>,
    free: Vec<NodeId>,
    by_prefix: FxHashMap<PrefixHash, NodeId>,
    more: FxHashMap<(NodeId, GroupSlot, Tier), u32>,
    aliases: FxHashMap<NodeId, Vec<EngineHash>>,
}

impl Nodes {
    pub(super) fn len(&self) -> usize {
        self.by_prefix.len()
    }

    /// Ids in the order of the slab, the free ones left out.
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

    /// The node of a prefix that an engine hash entries, made if it is not there. `None` if there is
    /// no room.
    pub(super) fn name(&mut self, of: NewNode) -> Option<NodeId> {
        let vacant = match self.by_prefix.entry(of.prefix) {
            Entry::Occupied(known) => {
                let id = *known.get();
                let node = self.slab.get(id.index())?.as_ref()?;
                if node.engine != of.engine {
                    let aliases = self.aliases.entry(id).or_default();
                    if !aliases.contains(&of.engine) {
                        aliases.push(of.engine);
                    }
                }
                return Some(id);
            }
            Entry::Vacant(vacant) => vacant,
        };
        let node = Node {
            prefix: of.prefix,
            local: of.local,
            seed: of.seed,
            parent: of.parent,
            children: 0,
            visible_children: 0,
            references: 0,
            first_group: [0; 3],
            engine: of.engine,
            held: TierSet::default(),
            touched: false,
        };
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
        vacant.insert(id);
        if let Some(parent) = self.get_mut(of.parent) {
            parent.children += 1;
        }
        Some(id)
    }

    pub(super) fn add_reference(&mut self, id: NodeId, slot: GroupSlot, tier: Tier) {
        let Some(node) = self.get_mut(id) else { return };
        node.references = node.references.saturating_add(1);
        if slot == 0 {
            let count = &mut node.first_group[tier.index()];
            *count = count.saturating_add(1);
        } else {
            *self.more.entry((id, slot, tier)).or_default() += 1;
        }
    }

    pub(super) fn drop_reference(&mut self, id: NodeId, slot: GroupSlot, tier: Tier) {
        let Some(node) = self.get_mut(id) else { return };
        node.references = node.references.saturating_sub(1);
        if slot == 0 {
            let count = &mut node.first_group[tier.index()];
            *count = count.saturating_sub(1);
        } else if let Some(count) = self.more.get_mut(&(id, slot, tier)) {
            *count -= 1;
            if *count == 0 {
                self.more.remove(&(id, slot, tier));
            }
        }
    }

    /// Every one of a tier's main groups holds the block.
    pub(super) fn is_held(&self, id: NodeId, tier: Tier, groups: GroupSlot) -> bool {
        let first = self
            .get(id)
            .is_some_and(|node| node.first_group[tier.index()] > 0);
        first && (1..groups).all(|slot| self.more.contains_key(&(id, slot, tier)))
    }

    /// Frees a node that nothing needs, and its ancestors that then nothing needs either. Tells
    /// every engine hash that named one of them.
    pub(super) fn release(&mut self, mut id: NodeId, mut forgotten: impl FnMut(EngineHash)) {
        while self.get(id).is_some_and(|node| !node.is_needed()) {
            let Some(node) = self.slab.get_mut(id.index()).and_then(Option::take) else {
                return;
            };
            self.free.push(id);
            self.by_prefix.remove(&node.prefix);
            forgotten(node.engine);
            if let Some(aliases) = self.aliases.remove(&id) {
                aliases.into_iter().for_each(&mut forgotten);
            }
            id = node.parent;
            if let Some(parent) = self.get_mut(id) {
                parent.children -= 1;
            }
        }
    }
}

/// What a node is made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewNode {
    pub(super) prefix: PrefixHash,
    pub(super) local: LocalHash,
    pub(super) seed: Seed,
    pub(super) parent: NodeId,
    pub(super) engine: EngineHash,
}
