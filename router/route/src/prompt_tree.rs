//! The sampled prompts of all sources in one tree: how much of a prompt each source holds, and how
//! many distinct blocks.
//!
//! A path-compressed tree over sampled prefix hashes. A node names the *holders*: the sources with a
//! prompt that ends at or below it. So one walk along a prompt finds what every source shares with
//! it, and touches only sources that share something. Each distinct hash is kept once (8 bytes) for
//! all sources, a prompt adds at most two nodes, and a source one holder a node of its prompts'
//! paths. Inserting and removing touch only what the source does not share with its other prompts.
//! The last source that leaves a node takes the node along.
//!
//! A [`PromptLeaf`] identifies the end of a source's prompt and is valid until it was removed as
//! often as inserted.
//!
//! Equal prefix hashes mean equal prefixes, so a binary search in a run finds where two prompts
//! differ. Hashes that break this rule (a malicious message) give wrong counts for themselves,
//! never a panic or a leak.

use rustc_hash::FxHashMap;
use warmroute_proto::PrefixHash;
use warmroute_proto::load::{SAMPLES_MAX, sampled_length};

use super::source_table::{PerSource, SourceId};

mod holders;

use holders::{HeldBy, HolderChange, Holders};

/// End of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PromptLeaf(NodeId);

type NodeId = u32;

const ROOT: NodeId = 0;

#[derive(Clone, Debug)]
pub struct PromptTree {
    nodes: Vec<PromptNode>,
    vacant: Vec<NodeId>,
    /// A node by its parent and the first hash of its run.
    children: FxHashMap<(NodeId, PrefixHash), NodeId>,
    sizes: PerSource<HeldSize>,
    /// Sum over all sources.
    samples: u64,
}

/// Size of the distinct part of one source's prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct HeldSize {
    blocks: u64,
    samples: u64,
}

/// Blocks of one prompt, from depth 0, that each source holds.
pub type HeldBlocks = PerSource<u32>;

#[derive(Clone, Debug, Default)]
struct PromptNode {
    run: Box<[PrefixHash]>,
    /// Samples before the run.
    before: u32,
    parent: NodeId,
    /// How many children, and the exclusive or of their ids: with one child, that is its id.
    children: u32,
    child_ids: NodeId,
    /// Prompts of all sources that end here.
    ends: u32,
    /// Those of a child are a part of them. The root names none.
    holders: Holders,
}

impl PromptNode {
    fn samples_to_end(&self) -> usize {
        self.before as usize + self.run.len()
    }

    fn size(&self) -> HeldSize {
        let whole = sampled_length(self.samples_to_end());
        HeldSize {
            blocks: u64::from(whole - sampled_length(self.before as usize)),
            samples: self.run.len() as u64,
        }
    }
}

/// Result of a walk along a prompt.
struct PromptWalk {
    node: NodeId,
    /// Samples matched in the node's own run.
    within: usize,
    /// Samples matched in all.
    matched: usize,
}

impl Default for PromptTree {
    fn default() -> Self {
        Self {
            nodes: vec![PromptNode::default()],
            vacant: Vec::new(),
            children: FxHashMap::default(),
            sizes: PerSource::default(),
            samples: 0,
        }
    }
}

impl PromptTree {
    /// Distinct blocks of the sampled parts of a source's prompts.
    #[must_use]
    #[inline]
    pub fn blocks(&self, source: SourceId) -> u64 {
        self.sizes.get(source).map_or(0, |size| size.blocks)
    }

    /// Sum over all sources of the distinct hashes of each.
    #[must_use]
    pub const fn samples(&self) -> u64 {
        self.samples
    }

    /// Blocks of the longest common prefix with any prompt of each source.
    #[must_use]
    pub fn held(&self, prompt: &[PrefixHash]) -> HeldBlocks {
        let mut held = HeldBlocks::default();
        let mut above = ROOT;
        let mut write = |at: NodeId, samples: usize| {
            let blocks = sampled_length(samples);
            for holder in self.node(at).holders.descending() {
                *held.get_mut(holder) = blocks;
            }
        };
        let walk = self.walk_with(clip(prompt), |at| {
            let (node, child) = (self.node(above), self.node(at));
            // As many holders are the same ones, and hold more.
            if above != ROOT && node.holders.len() > child.holders.len() {
                write(above, node.samples_to_end());
            }
            above = at;
        });
        write(walk.node, walk.matched);
        held
    }

    /// The sources with a prompt that is a beginning of this one, or all of it.
    #[must_use]
    pub fn with_beginnings(&self, prompt: &[PrefixHash]) -> PerSource<bool> {
        let mut sources = PerSource::default();
        for at in self.beginnings(prompt) {
            for source in self.node(at).holders.ended() {
                *sources.get_mut(source) = true;
            }
        }
        sources
    }

    /// The nodes whose prompts are beginnings of this one, the longest first.
    fn beginnings(&self, prompt: &[PrefixHash]) -> impl Iterator<Item = NodeId> {
        let walk = self.walk(clip(prompt));
        let first = match walk.within < self.node(walk.node).run.len() {
            true => self.node(walk.node).parent,
            false => walk.node,
        };
        let path = std::iter::successors(Some(first), |&at| Some(self.node(at).parent));
        let path = path.take_while(|&at| at != ROOT);
        path.filter(|&at| self.node(at).ends > 0)
    }

    /// Blocks of the longest common prefix with any prompt of the source.
    #[must_use]
    pub fn longest(&self, source: SourceId, prompt: &[PrefixHash]) -> u32 {
        let walk = self.walk(clip(prompt));
        sampled_length(self.held_on(source, &walk).1)
    }

    /// Like [`Self::longest`], as if one prompt that ends at this leaf were not in the tree.
    #[must_use]
    pub fn longest_without(
        &self,
        source: SourceId,
        prompt: &[PrefixHash],
        leaf: PromptLeaf,
    ) -> u32 {
        let walk = self.walk(clip(prompt));
        let (deepest, samples) = self.held_on(source, &walk);
        let mut own = self.only_of(source, leaf);
        let is_own = own.any(|at| at == deepest);
        let top = own.last().unwrap_or(deepest);
        match is_own {
            true => sampled_length(self.node(top).before as usize),
            false => sampled_length(samples),
        }
    }

    /// Sampled blocks of the source that only the prompt at this leaf takes.
    #[must_use]
    pub fn blocks_only_of(&self, source: SourceId, leaf: PromptLeaf) -> u64 {
        let own = self.only_of(source, leaf);
        own.map(|at| self.node(at).size().blocks).sum()
    }

    /// The deepest node of the walk that the source holds, and its matched samples.
    fn held_on(&self, source: SourceId, walk: &PromptWalk) -> (NodeId, usize) {
        let (mut at, mut samples) = (walk.node, walk.matched);
        while at != ROOT && !self.node(at).holders.contains(source) {
            samples = self.node(at).before as usize;
            at = self.node(at).parent;
        }
        (at, samples)
    }

    /// The nodes that the source holds by the prompt at this leaf alone, from the leaf up.
    fn only_of(&self, source: SourceId, leaf: PromptLeaf) -> impl Iterator<Item = NodeId> {
        let node = self.nodes.get(leaf.0 as usize);
        let is_end = node.is_some_and(|node| node.holders.ends(source) == 1);
        let first = is_end.then_some(leaf.0);
        let path = std::iter::successors(first, |&at| Some(self.node(at).parent));
        path.take_while(move |&at| at != ROOT && self.node(at).holders.is_held_once(source))
    }

    /// Adds one prompt of the source; equal prompts may be in the tree several times.
    pub fn insert(&mut self, source: SourceId, prompt: &[PrefixHash]) -> PromptLeaf {
        let prompt = clip(prompt);
        let walk = self.walk(prompt);
        let mut at = walk.node;
        if walk.within < self.node(at).run.len() {
            at = self.split(at, walk.within);
        }
        if walk.matched < prompt.len() {
            at = self.grow(at, walk.matched, &prompt[walk.matched..]);
        }
        if at != ROOT {
            self.enter(source, at);
        }
        PromptLeaf(at)
    }

    /// Removes one prompt of the source that ends at this leaf.
    pub fn remove(&mut self, source: SourceId, leaf: PromptLeaf) {
        let PromptLeaf(mut at) = leaf;
        if self.leave(source, at).is_none() {
            return;
        }
        while at != ROOT && self.node(at).ends == 0 {
            match self.node(at).children {
                0 => at = self.prune(at),
                1 => return self.merge(at),
                _ => return,
            }
        }
    }

    /// Adds one end of the source at a node below the root, and the source to the nodes above that
    /// it does not hold.
    fn enter(&mut self, source: SourceId, end: NodeId) {
        let (mut at, mut by) = (end, HeldBy::End);
        self.node_mut(end).ends += 1;
        while at != ROOT && self.node_mut(at).holders.enter(source, by) == HolderChange::Membership
        {
            let size = self.node(at).size();
            let held = self.sizes.get_mut(source);
            held.blocks += size.blocks;
            held.samples += size.samples;
            self.samples += size.samples;
            (at, by) = (self.node(at).parent, HeldBy::Child);
        }
    }

    /// Undoes [`Self::enter`]. Returns `None`, without a change, if no prompt of the source ends
    /// there.
    fn leave(&mut self, source: SourceId, end: NodeId) -> Option<()> {
        let (mut at, mut by) = (end, HeldBy::End);
        while at != ROOT {
            let node = self.nodes.get_mut(at as usize)?;
            let left = node.holders.leave(source, by)?;
            node.ends -= u32::from(by == HeldBy::End);
            if left == HolderChange::Count {
                break;
            }
            let (size, parent) = (node.size(), node.parent);
            let held = self.sizes.get_mut(source);
            held.blocks -= size.blocks;
            held.samples -= size.samples;
            self.samples -= size.samples;
            (at, by) = (parent, HeldBy::Child);
        }
        Some(())
    }

    /// The prompt that ends at this leaf.
    #[must_use]
    pub fn prompt(&self, leaf: PromptLeaf) -> Vec<PrefixHash> {
        let PromptLeaf(mut at) = leaf;
        let mut prompt = Vec::new();
        let Some(node) = self.nodes.get(at as usize) else {
            return prompt;
        };
        prompt.resize(node.samples_to_end(), PrefixHash(0));
        while at != ROOT {
            let node = self.node(at);
            let (from, to) = (node.before as usize, node.samples_to_end());
            prompt[from..to].copy_from_slice(&node.run);
            at = node.parent;
        }
        prompt
    }

    /// The leaves of the source's prompts that are prefixes of this one and at most `blocks_max`
    /// long.
    #[must_use]
    pub fn leaves_along(
        &self,
        source: SourceId,
        prompt: &[PrefixHash],
        blocks_max: u32,
    ) -> Vec<PromptLeaf> {
        let is_own = |&at: &NodeId| {
            let node = self.node(at);
            let is_short = sampled_length(node.samples_to_end()) <= blocks_max;
            is_short && node.holders.ends(source) > 0
        };
        let own = self.beginnings(prompt).filter(is_own);
        own.map(PromptLeaf).collect()
    }

    /// Those of `leaves` whose prompts share more than `blocks` blocks with this one.
    pub fn leaves_through(
        &self,
        prompt: &[PrefixHash],
        blocks: u32,
        leaves: impl Iterator<Item = PromptLeaf>,
    ) -> Vec<PromptLeaf> {
        let walk = self.walk(clip(prompt));
        let beyond = (0..walk.matched).find(|&sample| sampled_length(sample + 1) > blocks);
        let Some(beyond) = beyond else {
            return Vec::new();
        };
        let mut top = walk.node;
        while self.node(top).before as usize > beyond {
            top = self.node(top).parent;
        }
        let is_below = |leaf: &PromptLeaf| {
            let mut at = leaf.0;
            while at != ROOT && at != top {
                at = self.node(at).parent;
            }
            at == top
        };
        leaves.filter(is_below).collect()
    }

    fn walk(&self, prompt: &[PrefixHash]) -> PromptWalk {
        self.walk_with(prompt, |_| {})
    }

    /// Visits the nodes along a prompt.
    fn walk_with(&self, prompt: &[PrefixHash], mut visit: impl FnMut(NodeId)) -> PromptWalk {
        let mut walk = PromptWalk {
            node: ROOT,
            within: 0,
            matched: 0,
        };
        while let Some(&next) = prompt.get(walk.matched) {
            let Some(&child) = self.children.get(&(walk.node, next)) else {
                break;
            };
            visit(child);
            let run = &self.node(child).run;
            let common = common_length(run, &prompt[walk.matched..]);
            walk = PromptWalk {
                node: child,
                within: common,
                matched: walk.matched + common,
            };
            if common < run.len() {
                break;
            }
        }
        walk
    }

    /// Splits a node's run after `at` samples. The node keeps its end; a new node takes the
    /// beginning.
    fn split(&mut self, id: NodeId, at: usize) -> NodeId {
        let node = self.node_mut(id);
        let upper_run: Box<[PrefixHash]> = node.run[..at].into();
        let lower_run: Box<[PrefixHash]> = node.run[at..].into();
        let (parent, before) = (node.parent, node.before);
        let holders = node.holders.above();
        let (first, second) = (upper_run[0], lower_run[0]);
        let upper = self.place(PromptNode {
            run: upper_run,
            before,
            parent,
            children: 1,
            child_ids: id,
            ends: 0,
            holders,
        });
        let node = self.node_mut(id);
        node.run = lower_run;
        node.before = before + count(at);
        node.parent = upper;
        self.node_mut(parent).child_ids ^= id ^ upper;
        self.children.insert((parent, first), upper);
        self.children.insert((upper, second), id);
        upper
    }

    fn grow(&mut self, parent: NodeId, before: usize, run: &[PrefixHash]) -> NodeId {
        let node = PromptNode {
            run: run.into(),
            before: count(before),
            parent,
            ..PromptNode::default()
        };
        let id = self.place(node);
        let above = self.node_mut(parent);
        above.children += 1;
        above.child_ids ^= id;
        self.children.insert((parent, run[0]), id);
        id
    }

    /// Removes a node without children and holders. Returns its parent.
    fn prune(&mut self, id: NodeId) -> NodeId {
        let node = self.vacate(id);
        self.children.remove(&(node.parent, node.run[0]));
        let above = self.node_mut(node.parent);
        above.children -= 1;
        above.child_ids ^= id;
        node.parent
    }

    /// Merges a node without ends into its only child, which has the same holders and keeps its id.
    fn merge(&mut self, id: NodeId) {
        let node = self.vacate(id);
        let child = node.child_ids;
        let below = self.node_mut(child);
        let second = below.run[0];
        below.run = [&*node.run, &*below.run].concat().into();
        below.before = node.before;
        below.parent = node.parent;
        self.children.remove(&(id, second));
        self.children.insert((node.parent, node.run[0]), child);
        self.node_mut(node.parent).child_ids ^= id ^ child;
    }

    fn place(&mut self, node: PromptNode) -> NodeId {
        if let Some(id) = self.vacant.pop() {
            *self.node_mut(id) = node;
            return id;
        }
        self.nodes.push(node);
        count(self.nodes.len() - 1)
    }

    fn vacate(&mut self, id: NodeId) -> PromptNode {
        self.vacant.push(id);
        std::mem::take(self.node_mut(id))
    }

    fn node(&self, id: NodeId) -> &PromptNode {
        &self.nodes[id as usize]
    }

    fn node_mut(&mut self, id: NodeId) -> &mut PromptNode {
        &mut self.nodes[id as usize]
    }
}

fn clip(prompt: &[PrefixHash]) -> &[PrefixHash] {
    &prompt[..prompt.len().min(SAMPLES_MAX)]
}

/// Length of the common part of two runs with equal first hashes.
fn common_length(run: &[PrefixHash], prompt: &[PrefixHash]) -> usize {
    let most = run.len().min(prompt.len());
    if run[most - 1] == prompt[most - 1] {
        return most;
    }
    let (mut same, mut differ) = (1, most - 1);
    while same < differ {
        let middle = same.midpoint(differ);
        if run[middle] == prompt[middle] {
            same = middle + 1;
        } else {
            differ = middle;
        }
    }
    same
}

/// A number of nodes or samples; both stay far below 2³².
fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
