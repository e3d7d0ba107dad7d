//! One source's holdings as changes: an image.
//!
//! Order: every node once, parents first, in its first tier (removed ancestors on the GPU); then
//! the further tiers; then the removal of the removed ancestors, which by then have descendants.
//! Siblings are sorted by hash, so that equal holdings give equal dumps.

use rustc_hash::FxHashMap;
use warmroute_proto::{Change, LocalHash, PrefixHash, Tier};

use super::SourceNode;

/// Nodes of a step: some 50 µs.
const STEP_NODES: usize = 256;

/// Maximum blocks of a change, which must fit into a record.
const BLOCKS_MAX: usize = 1024;

type Children = FxHashMap<Option<PrefixHash>, Vec<SourceNode>>;

/// Every node of one source, in no order: a copy that is made under the lock and sorted without it.
pub struct SourceNodes(pub(super) Vec<SourceNode>);

impl SourceNodes {
    /// Changes that make an empty source equal to this one, parents first. Removed ancestors are
    /// stored and removed again at the end.
    #[must_use]
    pub fn into_changes(self) -> Vec<Change> {
        self.into_changes_in_steps(|| ())
    }

    /// [`SourceNodes::into_changes`], with a pause after each short step.
    #[must_use]
    pub fn into_changes_in_steps(self, mut pause: impl FnMut()) -> Vec<Change> {
        let mut children = Children::default();
        for (index, node) in self.0.into_iter().enumerate() {
            children.entry(node.parent).or_default().push(node);
            if index % STEP_NODES == 0 {
                pause();
            }
        }
        let mut dump = Dump::default();
        dump.walk(children, pause);
        dump.finish()
    }
}

/// Changes under construction.
#[derive(Default)]
struct Dump {
    changes: Vec<Change>,
    /// Last prefix of the last change.
    end: Option<PrefixHash>,
    removed: Vec<PrefixHash>,
    further: Vec<(Option<PrefixHash>, LocalHash, Tier)>,
}

impl Dump {
    /// Walks depth first, without recursion because prompts are long.
    fn walk(&mut self, mut children: Children, mut pause: impl FnMut()) {
        let mut open = vec![(None, ordered(&mut children, None))];
        let mut nodes = 0;
        while let Some((parent, siblings)) = open.last_mut() {
            let parent = *parent;
            match siblings.pop() {
                Some(entry) => {
                    self.node(parent, &entry);
                    nodes += 1;
                    if nodes % STEP_NODES == 0 {
                        pause();
                    }
                    let below = ordered(&mut children, Some(entry.prefix));
                    if !below.is_empty() {
                        open.push((Some(entry.prefix), below));
                    }
                }
                None => {
                    open.pop();
                }
            }
        }
    }

    fn node(&mut self, parent: Option<PrefixHash>, entry: &SourceNode) {
        let mut tiers = Tier::ALL.into_iter().filter(|&tier| entry.tiers.has(tier));
        let first = tiers.next();
        if first.is_none() {
            self.removed.push(entry.prefix);
        }
        self.store(parent, entry.local, first.unwrap_or(Tier::Gpu));
        self.further
            .extend(tiers.map(|tier| (parent, entry.local, tier)));
    }

    fn store(&mut self, parent: Option<PrefixHash>, local: LocalHash, tier: Tier) {
        let end = Some(PrefixHash::after(parent, local));
        let continued = parent.is_some() && parent == self.end;
        match self.changes.last_mut() {
            Some(Change::Stored {
                blocks, tier: last, ..
            }) if continued && *last == tier && blocks.len() < BLOCKS_MAX => blocks.push(local),
            Some(_) | None => self.changes.push(Change::Stored {
                parent,
                blocks: vec![local],
                tier,
            }),
        }
        self.end = end;
    }

    fn finish(mut self) -> Vec<Change> {
        // A stable sort by tier joins each tier's runs and keeps the walk's order.
        let mut further = std::mem::take(&mut self.further);
        further.sort_by_key(|&(_, _, tier)| tier);
        self.end = None;
        for (parent, local, tier) in further {
            self.store(parent, local, tier);
        }
        let removals = self
            .removed
            .chunks(BLOCKS_MAX)
            .map(|blocks| Change::Removed {
                blocks: blocks.to_vec(),
                tier: Tier::Gpu,
            });
        self.changes.extend(removals);
        self.changes
    }
}

/// A node's children in reverse order.
fn ordered(children: &mut Children, of: Option<PrefixHash>) -> Vec<SourceNode> {
    let mut entries = children.remove(&of).unwrap_or_default();
    entries.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.prefix));
    entries
}
