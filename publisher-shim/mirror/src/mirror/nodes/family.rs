//! The children of each node, kept only where they are walked.

use super::NodeId;

/// Children as lists through the slab.
#[derive(Clone, Debug, Default)]
pub(in crate::mirror) struct Family(Vec<FamilyLinks>);

#[derive(Clone, Copy, Debug)]
struct FamilyLinks {
    first_child: NodeId,
    next: NodeId,
    previous: NodeId,
}

impl FamilyLinks {
    const NONE: Self = Self {
        first_child: NodeId::NONE,
        next: NodeId::NONE,
        previous: NodeId::NONE,
    };
}

impl Family {
    /// Adds a node without children.
    pub(super) fn add(&mut self, id: NodeId, parent: NodeId) {
        let slots = [id, parent].into_iter().filter_map(NodeId::some);
        let slots = slots.map(|id| id.index() + 1).max().unwrap_or_default();
        if self.0.len() < slots {
            self.0.resize(slots, FamilyLinks::NONE);
        }
        if parent.some().is_none() {
            return;
        }
        let next = std::mem::replace(&mut self.0[parent.index()].first_child, id);
        self.0[id.index()].next = next;
        self.0[id.index()].previous = NodeId::NONE;
        if next.some().is_some() {
            self.0[next.index()].previous = id;
        }
    }

    /// Removes a node without children.
    pub(super) fn remove(&mut self, id: NodeId, parent: NodeId) {
        let links = std::mem::replace(&mut self.0[id.index()], FamilyLinks::NONE);
        if links.next.some().is_some() {
            self.0[links.next.index()].previous = links.previous;
        }
        if links.previous.some().is_some() {
            self.0[links.previous.index()].next = links.next;
        } else if parent.some().is_some() {
            self.0[parent.index()].first_child = links.next;
        }
    }

    pub(super) fn children(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let first = self.0.get(id.index()).map(|links| links.first_child);
        std::iter::successors(first.and_then(NodeId::some), |id| {
            self.0[id.index()].next.some()
        })
    }
}
