//! The net changes of the mirror as changes for the log's readers. A pair that was removed and
//! stored again within one batch is removed and stored: its holding was interrupted.
//!
//! Readers know a prefix as long as it is held or has a held descendant. A block whose ancestors
//! are unknown to them can only be sent together with those: the ancestors are stored as well, and
//! removed again (*transient*).

use warmroute_proto::{Change, LocalHash, PrefixHash, Tier};

use super::Mirror;
use super::nodes::{Node, NodeId, Nodes, TierSet};

/// A list of changes in which stores that continue each other are joined.
#[derive(Default)]
struct ChangeWriter {
    changes: Vec<Change>,
    run: Option<StoreRun>,
}

struct StoreRun {
    last: NodeId,
    parent: Option<PrefixHash>,
    blocks: Vec<LocalHash>,
    tier: Tier,
}

impl ChangeWriter {
    fn stored(&mut self, nodes: &Nodes, id: NodeId, node: &Node, tier: Tier) {
        match &mut self.run {
            Some(run) if run.tier == tier && node.parent == run.last => {
                run.blocks.push(node.local);
                run.last = id;
            }
            Some(_) | None => {
                self.flush();
                self.run = Some(StoreRun {
                    last: id,
                    parent: nodes.get(node.parent).map(|parent| parent.prefix),
                    blocks: vec![node.local],
                    tier,
                });
            }
        }
    }

    fn removed(&mut self, blocks: Vec<PrefixHash>, tier: Tier) {
        self.flush();
        if !blocks.is_empty() {
            self.changes.push(Change::Removed { blocks, tier });
        }
    }

    fn flush(&mut self) {
        if let Some(run) = self.run.take() {
            self.changes.push(Change::Stored {
                parent: run.parent,
                blocks: run.blocks,
                tier: run.tier,
            });
        }
    }
}

impl Mirror {
    /// Returns the changes since the last call, and frees the nodes that nothing needs.
    pub(super) fn settle(&mut self) -> Vec<Change> {
        self.update_resume_points();
        let touched = std::mem::take(&mut self.touched);
        let mut writer = ChangeWriter::default();
        for tier in Tier::ALL {
            if self.cleared.has(tier) {
                writer.changes.push(Change::Cleared { tier });
            }
        }
        self.cleared = TierSet::default();
        if std::mem::take(&mut self.adapters.have_switched) {
            self.remove_unfound(&touched, &mut writer);
        }
        self.remove_dipped(&mut writer);
        let mut transient = Vec::new();
        for tier in Tier::ALL {
            if self.groups.slots(tier) == 0 {
                continue; // It holds nothing, and never did.
            }
            for &id in &touched {
                self.emit_stored(id, tier, &mut transient, &mut writer);
            }
        }
        for tier in Tier::ALL {
            if self.groups.slots(tier) == 0 {
                continue;
            }
            let mut gone = Vec::new();
            for &id in &touched {
                if self.nodes.is_emitted(id, tier) && !self.is_held(id, tier) {
                    gone.extend(self.unhold(id, tier));
                }
            }
            for &(id, transient_tier) in &transient {
                // A transient block may be among the touched ones, and removed above.
                if transient_tier == tier && self.nodes.is_emitted(id, tier) {
                    gone.extend(self.unhold(id, tier));
                }
            }
            writer.removed(gone, tier);
        }
        writer.flush();
        self.release(&touched);
        writer.changes
    }

    /// Removes the pairs of adapters' former loads, whose prefixes those of the current ones may have.
    fn remove_unfound(&mut self, touched: &[NodeId], writer: &mut ChangeWriter) {
        for tier in Tier::ALL {
            let mut gone = Vec::new();
            for &id in touched {
                if self.nodes.is_emitted(id, tier) && !self.is_found(id) {
                    gone.extend(self.unhold(id, tier));
                }
            }
            writer.removed(gone, tier);
        }
    }

    /// Requests can find the block: it is not of a former load of its adapter.
    fn is_found(&self, id: NodeId) -> bool {
        let node = self.nodes.get(id);
        node.is_some_and(|node| self.adapters.are_found(node.load))
    }

    /// Removes the pairs that are held again, so that they are stored again below.
    fn remove_dipped(&mut self, writer: &mut ChangeWriter) {
        let dipped = std::mem::take(&mut self.dipped);
        for tier in Tier::ALL {
            let mut gone = Vec::new();
            for &(id, _) in dipped.iter().filter(|(_, of)| *of == tier) {
                if self.nodes.is_emitted(id, tier) && self.is_held(id, tier) {
                    gone.extend(self.unhold(id, tier));
                }
            }
            writer.removed(gone, tier);
        }
    }

    /// The whole mirror as changes for a reader that has nothing, parents first.
    #[must_use]
    pub fn image(&self) -> Vec<Change> {
        let mut emitted = vec![TierSet::default(); self.nodes.slots()];
        let mut writer = ChangeWriter::default();
        let mut transient: Vec<(NodeId, Tier)> = Vec::new();
        let mut path = Vec::new();
        let is_due = |id: NodeId, tier: Tier, emitted: &[TierSet]| {
            self.nodes.is_emitted(id, tier) && !emitted[id.index()].has(tier)
        };
        for tier in Tier::ALL {
            for id in self.nodes.ids() {
                if !is_due(id, tier, &emitted) {
                    continue;
                }
                let mut at = id;
                while let Some(node) = self.nodes.get(at) {
                    if !emitted[at.index()].is_empty() && !is_due(at, tier, &emitted) {
                        break;
                    }
                    path.push(at);
                    at = node.parent;
                }
                while let Some(at) = path.pop() {
                    let Some(node) = self.nodes.get(at) else {
                        continue;
                    };
                    writer.stored(&self.nodes, at, node, tier);
                    emitted[at.index()] = emitted[at.index()].with(tier);
                    if !node.held.has(tier) {
                        transient.push((at, tier));
                    }
                }
            }
        }
        for tier in Tier::ALL {
            let gone = transient
                .iter()
                .filter(|(_, transient_tier)| *transient_tier == tier)
                .filter_map(|(id, _)| self.nodes.get(*id).map(|node| node.prefix))
                .collect();
            writer.removed(gone, tier);
        }
        writer.changes
    }

    /// Emits a block that became held, behind those of its ancestors that readers do not know.
    fn emit_stored(
        &mut self,
        id: NodeId,
        tier: Tier,
        transient: &mut Vec<(NodeId, Tier)>,
        writer: &mut ChangeWriter,
    ) {
        if !self.became_held(id, tier) {
            return;
        }
        let mut at = id;
        while let Some(node) = self.nodes.get(at) {
            if at != id && node.is_visible() && !self.became_held(at, tier) {
                break;
            }
            let parent = node.parent;
            self.path.push(at);
            at = parent;
        }
        while let Some(at) = self.path.pop() {
            if !self.became_held(at, tier) {
                transient.push((at, tier));
            }
            if let Some(node) = self.nodes.get(at) {
                writer.stored(&self.nodes, at, node, tier);
            }
            self.hold(at, tier);
        }
    }

    fn became_held(&self, id: NodeId, tier: Tier) -> bool {
        let node = self.nodes.get(id);
        node.is_some_and(|node| !node.held.has(tier)) && self.is_held(id, tier)
    }

    pub(super) fn is_held(&self, id: NodeId, tier: Tier) -> bool {
        if !self.is_found(id) {
            return false;
        }
        match &self.resume {
            None => self.nodes.is_held(id, tier, self.groups.slots(tier)),
            Some(points) => tier == Tier::Gpu && points.contains(id),
        }
    }

    fn update_resume_points(&mut self) {
        if let Some(mut points) = self.resume.take() {
            let due = self.touched.clone();
            // Through the slab: the nodes are borrowed by the update.
            let mut changed = Vec::new();
            points.update(&self.nodes, due, |id| changed.push(id));
            changed.into_iter().for_each(|id| self.touch(id));
            self.resume = Some(points);
        }
    }

    /// Marks a block as held in the log. Keeps the digest and the count of visible children.
    fn hold(&mut self, id: NodeId, tier: Tier) {
        let Some(node) = self.nodes.get_mut(id) else {
            return;
        };
        let was_visible = node.is_visible();
        node.held = node.held.with(tier);
        let (prefix, parent) = (node.prefix, node.parent);
        self.digests.get_mut(tier).insert(prefix, tier);
        if !was_visible && let Some(parent) = self.nodes.get_mut(parent) {
            parent.visible_children += 1;
        }
    }

    /// The reverse of [`Mirror::hold`]. Returns the block's prefix.
    fn unhold(&mut self, id: NodeId, tier: Tier) -> Option<PrefixHash> {
        let node = self.nodes.get_mut(id)?;
        node.held = node.held.without(tier);
        let prefix = node.prefix;
        self.digests.get_mut(tier).remove(prefix, tier);
        let mut at = id;
        while let Some(node) = self.nodes.get(at)
            && !node.is_visible()
        {
            at = node.parent;
            let Some(parent) = self.nodes.get_mut(at) else {
                break;
            };
            parent.visible_children -= 1;
        }
        Some(prefix)
    }

    fn release(&mut self, touched: &[NodeId]) {
        for &id in touched {
            if let Some(node) = self.nodes.get_mut(id) {
                node.touched = false;
            }
        }
        for &id in touched {
            let (engine_hashes, chain) = (&mut self.engine_hashes, &mut self.block_chain);
            self.nodes.release(id, |hash| {
                engine_hashes.forget(hash);
                chain.forget(hash);
            });
        }
    }
}
