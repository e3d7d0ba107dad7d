//! The forest made again from what was saved of it.
//!
//! Nodes are saved in their old node_ids, grown (prefix hashes from the roots down), and held again
//! (from the leaves up). Each step refuses what no mirror could have been.

use warmroute_proto::{Digest, LocalHash, PrefixHash, Seed, Tier, Tiers};

use super::{GroupSlot, Node, NodeId, Nodes, TierSet};
use crate::wire::EngineHash;

/// What is saved of a node.
#[derive(Clone, Copy, Debug)]
pub(in crate::mirror) struct SavedNode {
    pub(in crate::mirror) local: LocalHash,
    pub(in crate::mirror) seed: Seed,
    pub(in crate::mirror) parent: NodeId,
    pub(in crate::mirror) engine: EngineHash,
}

/// How far a node has grown.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Visit {
    SavedNode,
    OnTheWay,
    Grown,
}

impl Nodes {
    /// A copy without what [`Nodes::rebuild_prefixes`] makes again.
    pub(in crate::mirror) fn without_indices(&self) -> Self {
        Self {
            slab: self.slab.clone(),
            free: self.free.clone(),
            by_prefix: Default::default(),
            more: Default::default(),
            aliases: self.aliases.clone(),
        }
    }

    pub(in crate::mirror) fn free(&self) -> &[NodeId] {
        &self.free
    }

    pub(in crate::mirror) fn aliases(&self, id: NodeId) -> &[EngineHash] {
        self.aliases.get(&id).map_or(&[], Vec::as_slice)
    }

    /// So many node_ids, these of them free. `None` if one of those is none of them, or twice free.
    pub(in crate::mirror) fn with_slots(slots: usize, free: Vec<NodeId>) -> Option<Self> {
        let mut slab: Vec<Option<Node>> = vec![None; slots];
        let mut is_free = vec![false; slots];
        for id in &free {
            let is_free = is_free.get_mut(id.index())?;
            if std::mem::replace(is_free, true) {
                return None;
            }
        }
        let blank = Node {
            prefix: PrefixHash(0),
            local: LocalHash(0),
            seed: Seed::PLAIN,
            parent: NodeId::NONE,
            children: 0,
            visible_children: 0,
            references: 0,
            first_group: [0; 3],
            engine: EngineHash(0),
            held: TierSet::default(),
            touched: false,
        };
        for (position, is_free) in slab.iter_mut().zip(is_free) {
            *position = (!is_free).then(|| blank.clone());
        }
        Some(Self {
            slab,
            free,
            ..Self::default()
        })
    }

    /// The ids of all node_ids that are not free.
    pub(in crate::mirror) fn node_ids(&self) -> Vec<NodeId> {
        self.ids().collect()
    }

    pub(in crate::mirror) fn restore_node(&mut self, id: NodeId, saved: SavedNode) {
        if let Some(node) = self.get_mut(id) {
            node.local = saved.local;
            node.seed = saved.seed;
            node.parent = saved.parent;
            node.engine = saved.engine;
        }
    }

    pub(in crate::mirror) fn add_alias(&mut self, id: NodeId, engine: EngineHash) {
        self.aliases.entry(id).or_default().push(engine);
    }

    pub(in crate::mirror) fn add_references(
        &mut self,
        id: NodeId,
        (slot, tier): (GroupSlot, Tier),
        count: u32,
    ) {
        let Some(node) = self.get_mut(id) else { return };
        node.references = node.references.saturating_add(count);
        let sum = if slot == 0 {
            &mut node.first_group[tier.index()]
        } else {
            self.more.entry((id, slot, tier)).or_default()
        };
        *sum = sum.saturating_add(count);
    }

    /// Computes every prefix from its parent's, and tells the ids parents first. `None` if a parent
    /// is not there, if the nodes are no forest, or if two have one prefix.
    pub(in crate::mirror) fn rebuild_prefixes(&mut self) -> Option<Vec<NodeId>> {
        let mut visits = vec![Visit::SavedNode; self.slab.len()];
        let mut order = Vec::with_capacity(self.slab.len());
        let mut path = Vec::new();
        for id in self.node_ids() {
            let mut at = id;
            while at != NodeId::NONE && visits.get(at.index())? != &Visit::Grown {
                if visits[at.index()] == Visit::OnTheWay {
                    return None;
                }
                visits[at.index()] = Visit::OnTheWay;
                path.push(at);
                at = self.get(at)?.parent;
            }
            while let Some(at) = path.pop() {
                let node = self.get(at)?;
                let parent = node.parent;
                let above = self.get(parent).map(|parent| parent.prefix);
                let prefix = PrefixHash::after(above, node.local);
                self.get_mut(at)?.prefix = prefix;
                if let Some(parent) = self.get_mut(parent) {
                    parent.children += 1;
                }
                if self.by_prefix.insert(prefix, at).is_some() {
                    return None;
                }
                visits[at.index()] = Visit::Grown;
                order.push(at);
            }
        }
        Some(order)
    }

    /// Holds what the references say, given the number of main groups by tier; tells the digests.
    /// `None` if a node is there that nothing needs.
    pub(in crate::mirror) fn rebuild_held(
        &mut self,
        parents_first: &[NodeId],
        groups: &Tiers<GroupSlot>,
    ) -> Option<Tiers<Digest>> {
        let mut digests = Tiers::<Digest>::default();
        for &id in parents_first.iter().rev() {
            let mut held = TierSet::default();
            for tier in Tier::ALL {
                let main_count = *groups.get(tier);
                if main_count > 0 && self.is_held(id, tier, main_count) {
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
