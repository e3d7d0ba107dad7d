//! A multiset of sampled prompts: longest common prefix, and number of distinct blocks.
//!
//! A path-compressed tree over sampled prefix hashes. Each distinct hash is kept once (8 bytes) and
//! a prompt adds at most two nodes. Inserting and removing touch only what is not shared. A
//! [`PromptLeaf`] identifies the end of a prompt and is valid until it was removed as often as
//! inserted.
//!
//! Equal prefix hashes mean equal prefixes, so a binary search in a run finds where two prompts
//! differ. Hashes that break this rule (a malicious message) give wrong counts for themselves,
//! never a panic or a leak.

use rustc_hash::FxHashMap;
use warmroute_proto::PrefixHash;
use warmroute_proto::load::{SAMPLES_MAX, sampled_length};

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
    blocks: u64,
    samples: u64,
}

#[derive(Clone, Debug, Default)]
struct PromptNode {
    run: Box<[PrefixHash]>,
    /// Samples before the run.
    before: u32,
    parent: NodeId,
    /// How many children, and the exclusive or of their ids: with one child, that is its id.
    children: u32,
    child_ids: NodeId,
    /// Prompts that end here.
    ends: u32,
}

impl PromptNode {
    fn samples_to_end(&self) -> usize {
        self.before as usize + self.run.len()
    }

    fn blocks(&self) -> u64 {
        let whole = sampled_length(self.samples_to_end());
        u64::from(whole - sampled_length(self.before as usize))
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
            blocks: 0,
            samples: 0,
        }
    }
}

impl PromptTree {
    /// Distinct blocks of the sampled parts of all prompts.
    #[must_use]
    pub const fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Number of distinct hashes.
    #[must_use]
    pub const fn samples(&self) -> u64 {
        self.samples
    }

    /// Blocks of the longest common prefix with any prompt in the set.
    #[must_use]
    pub fn longest(&self, prompt: &[PrefixHash]) -> u32 {
        if self.blocks == 0 {
            return 0;
        }
        sampled_length(self.walk(clip(prompt)).matched)
    }

    /// Like [`Self::longest`], as if one prompt that ends at this leaf were not in the set.
    #[must_use]
    pub fn longest_without(&self, prompt: &[PrefixHash], leaf: PromptLeaf) -> u32 {
        let walk = self.walk(clip(prompt));
        let own = match self.only_of(leaf) {
            Some(_) if walk.node == leaf.0 => walk.within,
            Some(_) | None => 0,
        };
        sampled_length(walk.matched - own)
    }

    /// Sampled blocks that only the prompt at this leaf takes.
    #[must_use]
    pub fn blocks_only_of(&self, leaf: PromptLeaf) -> u64 {
        self.only_of(leaf).map_or(0, PromptNode::blocks)
    }

    /// The node whose run belongs to a single prompt: the leaf, if no other prompt ends or goes on
    /// there.
    fn only_of(&self, leaf: PromptLeaf) -> Option<&PromptNode> {
        let node = self.nodes.get(leaf.0 as usize)?;
        (leaf.0 != ROOT && node.ends == 1 && node.children == 0).then_some(node)
    }

    /// Adds one prompt; equal prompts may be in the set several times.
    pub fn insert(&mut self, prompt: &[PrefixHash]) -> PromptLeaf {
        let prompt = clip(prompt);
        let walk = self.walk(prompt);
        let mut at = walk.node;
        if walk.within < self.node(at).run.len() {
            at = self.split(at, walk.within);
        }
        if walk.matched < prompt.len() {
            at = self.grow(at, walk.matched, &prompt[walk.matched..]);
        }
        self.node_mut(at).ends += 1;
        PromptLeaf(at)
    }

    /// Removes one prompt that ends at this leaf.
    pub fn remove(&mut self, leaf: PromptLeaf) {
        let PromptLeaf(mut at) = leaf;
        let Some(node) = self.nodes.get_mut(at as usize) else {
            return;
        };
        let Some(ends) = node.ends.checked_sub(1) else {
            return;
        };
        node.ends = ends;
        while at != ROOT && self.node(at).ends == 0 {
            match self.node(at).children {
                0 => at = self.prune(at),
                1 => return self.merge(at),
                _ => return,
            }
        }
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

    /// The leaves of the prompts that are prefixes of this one and at most `blocks_max` long.
    #[must_use]
    pub fn leaves_along(&self, prompt: &[PrefixHash], blocks_max: u32) -> Vec<PromptLeaf> {
        let mut leaves = Vec::new();
        let walk = self.walk(clip(prompt));
        let mut at = walk.node;
        if walk.within < self.node(at).run.len() {
            at = self.node(at).parent;
        }
        while at != ROOT {
            let node = self.node(at);
            if node.ends > 0 && sampled_length(node.samples_to_end()) <= blocks_max {
                leaves.push(PromptLeaf(at));
            }
            at = node.parent;
        }
        leaves
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
        let mut walk = PromptWalk {
            node: ROOT,
            within: 0,
            matched: 0,
        };
        while let Some(&next) = prompt.get(walk.matched) {
            let Some(&child) = self.children.get(&(walk.node, next)) else {
                break;
            };
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
        let (first, second) = (upper_run[0], lower_run[0]);
        let upper = self.place(PromptNode {
            run: upper_run,
            before,
            parent,
            children: 1,
            child_ids: id,
            ends: 0,
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
        self.blocks += node.blocks();
        self.samples += run.len() as u64;
        let id = self.place(node);
        let above = self.node_mut(parent);
        above.children += 1;
        above.child_ids ^= id;
        self.children.insert((parent, run[0]), id);
        id
    }

    /// Removes a node without children. Returns its parent.
    fn prune(&mut self, id: NodeId) -> NodeId {
        let node = self.vacate(id);
        self.blocks -= node.blocks();
        self.samples -= node.run.len() as u64;
        self.children.remove(&(node.parent, node.run[0]));
        let above = self.node_mut(node.parent);
        above.children -= 1;
        above.child_ids ^= id;
        node.parent
    }

    /// Merges a node without ends into its only child, which keeps its id.
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
