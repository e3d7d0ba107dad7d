//! The prefixes after which an engine with sliding-window or state-space layers can resume.
//!
//! A hit of such an engine ends at a *resume point*: a prefix whose blocks all full-attention
//! groups hold, and whose last blocks every other group holds, as many as its window has. The
//! longest hit of a prompt is its deepest resume point; between two of them there is none. So the
//! mirror publishes resume points in place of held blocks, below [`LocalHash::RESUME_ROOT`]: a
//! reader that does not know the rule finds none of them (ADR 15).
//!
//! Each prefix keeps whether its run is whole and, per window, how many consecutive blocks end with
//! it. Both follow from its parent's, so a change is passed on to descendants until it changes
//! nothing: within a window's length, or below a block of the run.
//!
//! [`LocalHash::RESUME_ROOT`]: warmroute_proto::LocalHash::RESUME_ROOT

use warmroute_proto::Tier;

use super::groups::{Groups, HitNeed, WINDOWS_MAX};
use super::nodes::{NodeId, Nodes};
use super::references::{GroupSlot, GroupTier};

/// The resume points among a mirror's prefixes.
#[derive(Clone, Debug)]
pub(super) struct ResumePoints {
    run_slots: Vec<GroupSlot>,
    windows: Vec<Window>,
    /// By node. That of a free slot of the slab is meaningless.
    reaches: Vec<Reach>,
}

/// The groups with one window.
#[derive(Clone, Debug)]
struct Window {
    blocks: u32,
    slots: Vec<GroupSlot>,
}

/// What the engine holds of one prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Reach {
    /// All groups that need every block hold all of them.
    is_whole: bool,
    is_resume_point: bool,
    /// Per window: consecutive blocks that end here, at most as many as it has; that many too if
    /// they are all from the prompt's first.
    blocks: [u32; WINDOWS_MAX],
}

impl ResumePoints {
    pub(super) fn new(groups: &Groups) -> Self {
        let slots = |wanted: HitNeed| -> Vec<GroupSlot> {
            let needs = (0..).zip(groups.needs(Tier::Gpu));
            let slots = needs.filter(|&(_, &need)| need == wanted);
            slots.map(|(slot, _)| slot).collect()
        };
        let windows = groups.windows().into_iter().map(|blocks| Window {
            blocks,
            slots: slots(HitNeed::Window(blocks)),
        });
        Self {
            run_slots: slots(HitNeed::Run),
            windows: windows.collect(),
            reaches: Vec::new(),
        }
    }

    pub(super) fn contains(&self, id: NodeId) -> bool {
        let reach = self.reaches.get(id.index());
        reach.is_some_and(|reach| reach.is_resume_point)
    }

    /// Brings the changed prefixes and their descendants up to date. Calls `changed` with each whose
    /// reach changed.
    pub(super) fn update(
        &mut self,
        nodes: &Nodes,
        mut due: Vec<NodeId>,
        mut changed: impl FnMut(NodeId),
    ) {
        self.reaches.resize(nodes.slots(), Reach::default());
        // The first is taken first: parents usually come before their children.
        due.reverse();
        while let Some(id) = due.pop() {
            let Some(node) = nodes.get(id) else {
                continue;
            };
            let reach = self.reach(nodes, id, node.parent);
            if self.reaches[id.index()] != reach {
                self.reaches[id.index()] = reach;
                changed(id);
                due.extend(nodes.children(id));
            }
        }
    }

    /// Computes every reach, given the ids with parents first.
    pub(super) fn rebuild(&mut self, nodes: &Nodes, parents_first: &[NodeId]) {
        self.reaches = vec![Reach::default(); nodes.slots()];
        for &id in parents_first {
            if let Some(node) = nodes.get(id) {
                self.reaches[id.index()] = self.reach(nodes, id, node.parent);
            }
        }
    }

    fn reach(&self, nodes: &Nodes, id: NodeId, parent: NodeId) -> Reach {
        let Some(parent) = parent.some() else {
            return self.root();
        };
        let above = self.reaches[parent.index()];
        let holds = |slots: &[GroupSlot]| {
            let tier = Tier::Gpu;
            let mut slots = slots.iter();
            slots.all(|&slot| nodes.has_reference(id, GroupTier { slot, tier }))
        };
        let mut reach = Reach {
            is_whole: above.is_whole && holds(&self.run_slots),
            ..Reach::default()
        };
        reach.is_resume_point = reach.is_whole;
        for (at, window) in self.windows.iter().enumerate() {
            if holds(&window.slots) {
                reach.blocks[at] = (above.blocks[at] + 1).min(window.blocks);
            }
            reach.is_resume_point &= reach.blocks[at] == window.blocks;
        }
        reach
    }

    /// Before a prompt's first block nothing is missing.
    fn root(&self) -> Reach {
        let mut root = Reach {
            is_whole: true,
            ..Reach::default()
        };
        for (blocks, window) in root.blocks.iter_mut().zip(&self.windows) {
            *blocks = window.blocks;
        }
        root
    }
}
