//! The forest restored from its saved nodes.
//!
//! Nodes are restored into their slots; then prefixes are computed from the roots down, and
//! holdings from the leaves up. Each step refuses what no mirror can be.

use warmroute_proto::{Digest, LocalHash, PrefixHash, Seed, Tier, Tiers};

use super::{LoadId, NewNode, Node, NodeId, Nodes, TierSet};
use crate::wire::EngineHash;

/// The saved fields of a node.
#[derive(Clone, Copy, Debug)]
pub(in crate::mirror) struct SavedNode {
    pub(in crate::mirror) local: LocalHash,
    pub(in crate::mirror) seed: Seed,
    pub(in crate::mirror) parent: NodeId,
    pub(in crate::mirror) engine: EngineHash,
    pub(in crate::mirror) load: LoadId,
}

/// State of a node in the walk from the roots down.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Visit {
    Unvisited,
    OnPath,
    Done,
}

impl Nodes {
    /// A copy without what [`Nodes::rebuild_prefixes`] and [`Nodes::add_references`] rebuild.
    pub(in crate::mirror) fn without_indices(&self) -> Self {
        Self {
            slab: self.slab.clone(),
            free: self.free.clone(),
            aliases: self.aliases.clone(),
            ..Self::default()
        }
    }

    pub(in crate::mirror) fn free(&self) -> &[NodeId] {
        &self.free
    }

    pub(in crate::mirror) fn aliases(&self, id: NodeId) -> &[EngineHash] {
        self.aliases.get(&id).map_or(&[], Vec::as_slice)
    }

    /// A slab of blank nodes. `None` if a free slot is out of range or listed twice.
    pub(in crate::mirror) fn with_slots(slots: usize, free: Vec<NodeId>) -> Option<Self> {
        let blank = Node::new(NewNode {
            prefix: PrefixHash(0),
            local: LocalHash(0),
            seed: Seed::PLAIN,
            parent: NodeId::NONE,
            engine: EngineHash(0),
            load: LoadId::NONE,
        });
        let mut slab = vec![Some(blank); slots];
        for id in &free {
            slab.get_mut(id.index())?.take()?;
        }
        Some(Self {
            slab,
            free,
            ..Self::default()
        })
    }

    pub(in crate::mirror) fn restore_node(&mut self, id: NodeId, saved: SavedNode) {
        if let Some(node) = self.get_mut(id) {
            node.local = saved.local;
            node.seed = saved.seed;
            node.parent = saved.parent;
            node.engine = saved.engine;
            node.load = saved.load;
        }
    }

    pub(in crate::mirror) fn add_alias(&mut self, id: NodeId, engine: EngineHash) {
        self.aliases.entry(id).or_default().push(engine);
    }

    /// Computes every prefix from its parent's. Returns the ids, parents first; `None` if a parent
    /// is missing, if the nodes have a cycle, or if two of one load have the same prefix.
    pub(in crate::mirror) fn rebuild_prefixes(&mut self) -> Option<Vec<NodeId>> {
        let mut visits = vec![Visit::Unvisited; self.slab.len()];
        let mut order = Vec::with_capacity(self.slab.len());
        let mut path = Vec::new();
        for id in self.ids().collect::<Vec<_>>() {
            let mut at = id;
            while at != NodeId::NONE && visits.get(at.index())? != &Visit::Done {
                if visits[at.index()] == Visit::OnPath {
                    return None;
                }
                visits[at.index()] = Visit::OnPath;
                path.push(at);
                at = self.get(at)?.parent;
            }
            while let Some(at) = path.pop() {
                let node = self.get(at)?;
                let (parent, load) = (node.parent, node.load);
                let above = self.get(parent).map(|parent| parent.prefix);
                let prefix = PrefixHash::after(above, node.local);
                self.get_mut(at)?.prefix = prefix;
                if let Some(parent) = self.get_mut(parent) {
                    parent.children += 1;
                }
                if self.find(prefix, load).is_some() {
                    return None;
                }
                self.index(at, prefix);
                visits[at.index()] = Visit::Done;
                order.push(at);
            }
        }
        Some(order)
    }

    /// Puts all nodes without a parent below `root`, another such node, and recomputes the prefixes.
    /// No node is held then. Returns the ids, parents first.
    pub(in crate::mirror) fn put_below(&mut self, root: NodeId) -> Option<Vec<NodeId>> {
        for id in self.ids().collect::<Vec<_>>() {
            let node = self.get_mut(id)?;
            node.children = 0;
            node.visible_children = 0;
            node.held = TierSet::default();
            if id != root && node.parent == NodeId::NONE {
                node.parent = root;
            }
        }
        self.by_prefix.clear();
        self.rebuild_prefixes()
    }

    /// Sets which nodes are held. Returns the digests; `None` if nothing needs one of the nodes.
    pub(in crate::mirror) fn rebuild_held(
        &mut self,
        parents_first: &[NodeId],
        is_held: impl Fn(&Self, NodeId, Tier) -> bool,
    ) -> Option<Tiers<Digest>> {
        let mut digests = Tiers::<Digest>::default();
        for &id in parents_first.iter().rev() {
            let mut held = TierSet::default();
            for tier in Tier::ALL {
                if is_held(self, id, tier) {
                    held = held.with(tier);
                    digests.get_mut(tier).insert(self.get(id)?.prefix, tier);
                }
            }
            let node = self.get_mut(id)?;
            node.held = held;
            if !node.is_needed() {
                return None;
            }
            let (is_visible, parent) = (node.is_visible(), node.parent);
            if is_visible && let Some(parent) = self.get_mut(parent) {
                parent.visible_children += 1;
            }
        }
        Some(digests)
    }
}
