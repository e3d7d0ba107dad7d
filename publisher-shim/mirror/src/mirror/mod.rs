//! An exact copy of what one rank's engine holds, by content.
//!
//! [`Mirror`] folds decoded batches. It counts references per engine hash, main-attention group and
//! tier, because an engine holds a block in several physical copies, each with a store and a
//! removal of its own; it translates engine hashes to prefix hashes; and it tells, batch by batch,
//! which (prefix, tier) pairs became held or ceased to be. A pair is held when every main group of
//! the tier holds it, summed over copies and engine hashes.
//!
//! It also knows how much it knows ([`Mirror::states`]): whether it saw everything since the engine
//! was empty, whether something could not be understood, and whether the engine's events tell
//! enough. [`Inconsistency`]s that the copy is wrong empty it.
//!
//! Not here: sequence numbers, replays and time (`source`). Pure: no IO, no clock.

mod emit;
mod engine_hashes;
mod groups;
mod knowledge;
mod nodes;
mod orphans;
mod save;

use warmroute_proto::{
    BlockSize, Change, Digest, LocalHash, PrefixHash, Seed, Tier, TierStates, Tiers,
};

use crate::wire::{Batch, BlockKeys, CacheEvent, EngineHash, LoraRef, RemovedBlocks, StoredBlocks};
use engine_hashes::EngineHashes;
use groups::{GroupRole, Groups};
use knowledge::Knowledge;
pub use knowledge::{Assumptions, Start};
use nodes::{GroupSlot, NewNode, NodeId, Nodes, TierSet};
use orphans::{BlockContent, Orphans};
pub use save::MirrorSnapshot;

/// What a mirror is told from outside.
#[derive(Clone, Copy, Debug)]
pub struct MirrorConfig {
    /// The block size that the operator insists on; otherwise the events tell it.
    pub block_size: Option<BlockSize>,
    /// The engine's number of KV blocks; holding more references than that is a sign.
    pub blocks_max: Option<u64>,
    /// Orphans kept at most.
    pub orphans_max: usize,
    pub assume: Assumptions,
}

// Until the shell uses the new name.
pub use MirrorConfig as Config;

impl Default for MirrorConfig {
    fn default() -> Self {
        Self {
            block_size: None,
            blocks_max: None,
            orphans_max: 1 << 16,
            assume: Assumptions::default(),
        }
    }
}

/// A sign that the mirror is wrong. It is then empty and partial, and readers need a new
/// generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Inconsistency {
    /// A block was removed that is not held, though everything was seen from the start.
    BelowZero,
    /// One engine hash stands for two prefixes.
    TwoPrefixes,
    /// More references than the engine has blocks.
    TooMany,
}

impl Inconsistency {
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::BelowZero => "below_zero",
            Self::TwoPrefixes => "two_prefixes",
            Self::TooMany => "too_many",
        }
    }
}

/// What happened so far that is no plain store or removal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MirrorCounters {
    pub stores_not_indexable: u64,
    pub stores_not_understood: u64,
    pub events_not_understood: u64,
    pub events_untracked: u64,
    pub removals_unknown: u64,
    pub orphans_dropped: u64,
    pub clears: u64,
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Mirror {
    config: MirrorConfig,
    /// Provisional until the first store in GPU memory confirms it.
    block_size: Option<BlockSize>,
    block_size_is_confirmed: bool,
    nodes: Nodes,
    engine_hashes: EngineHashes,
    orphans: Orphans,
    groups: Groups,
    knowledge: Knowledge,
    digests: Tiers<Digest>,
    counters: MirrorCounters,
    /// Blocks whose state may have changed since the last settlement, each once.
    touched: Vec<NodeId>,
    /// Tiers that were emptied since then and held something before.
    cleared: TierSet,
    /// Room for climbing to known ancestors.
    path: Vec<NodeId>,
}

/// Where the next block of a run belongs.
#[derive(Clone, Copy)]
enum RunPosition {
    Behind {
        node: NodeId,
        prefix: Option<PrefixHash>,
        seed: Seed,
    },
    Unknown {
        parent: EngineHash,
    },
}

/// A digest that stands for "published in pairs", which no router's hash can have.
const PAIRS: u64 = 0x7061_6972_735f_6f66;

impl Mirror {
    #[must_use]
    pub fn new(config: MirrorConfig, start: Start) -> Self {
        Self {
            config,
            block_size: config.block_size,
            block_size_is_confirmed: false,
            nodes: Nodes::default(),
            engine_hashes: EngineHashes::default(),
            orphans: Orphans::new(config.orphans_max),
            groups: Groups::default(),
            knowledge: Knowledge::new(start),
            digests: Tiers::default(),
            counters: MirrorCounters::default(),
            touched: Vec::new(),
            cleared: TierSet::default(),
            path: Vec::new(),
        }
    }

    /// Another life of the engine begins: nothing is held, nothing is known of the engine.
    pub fn begin(&mut self, start: Start) {
        let provisional = self.block_size;
        let counters = self.counters;
        *self = Self::new(self.config, start);
        self.block_size = provisional;
        self.counters = counters;
    }

    /// The engine lives on, but what it holds is not known any more.
    pub fn forget(&mut self) {
        self.drop_blocks();
        self.cleared = TierSet::default();
        self.knowledge.forget();
    }

    /// Folds a batch. The changes are net: only pairs whose state differs before and after.
    pub fn apply(&mut self, batch: &Batch) -> Result<Vec<Change>, Inconsistency> {
        match self.fold(batch) {
            Ok(()) => Ok(self.settle()),
            Err(sign) => {
                self.forget();
                Err(sign)
            }
        }
    }

    /// A batch was lost to its decoder: whatever was in it is unknown.
    pub fn doubt(&mut self) {
        self.counters.events_not_understood += 1;
        self.knowledge.doubt_all();
    }

    /// What the mirror can vouch for by itself.
    #[must_use]
    pub fn states(&self) -> TierStates {
        self.knowledge.states(
            self.config.assume,
            |tier| self.orphans.references(tier) > 0,
            |tier| self.groups.lacks_group_kinds(tier),
        )
    }

    #[must_use]
    pub fn digest(&self) -> Digest {
        total(&self.digests)
    }

    #[must_use]
    pub const fn digests(&self) -> &Tiers<Digest> {
        &self.digests
    }

    #[must_use]
    pub const fn counters(&self) -> &MirrorCounters {
        &self.counters
    }

    #[must_use]
    pub const fn block_size(&self) -> Option<BlockSize> {
        self.block_size
    }

    #[must_use]
    pub const fn block_size_is_confirmed(&self) -> bool {
        self.block_size_is_confirmed
    }

    /// A block size that is not from the events; theirs wins.
    pub fn suggest_block_size(&mut self, block_size: BlockSize) {
        if self.config.block_size.is_none() && !self.block_size_is_confirmed {
            self.block_size = Some(block_size);
        }
    }

    pub const fn set_blocks_max(&mut self, blocks: Option<u64>) {
        self.config.blocks_max = blocks;
    }

    /// As far as was seen, the engine has main-attention groups only.
    #[must_use]
    pub fn main_attention_only(&self) -> bool {
        self.groups.is_main_attention_only()
    }

    /// Prefixes kept, removed ancestors of held ones included.
    #[must_use]
    pub fn prefixes(&self) -> usize {
        self.nodes.len()
    }

    #[must_use]
    pub fn orphans(&self) -> usize {
        self.orphans.len()
    }

    /// Every held pair, sorted: for tests and dumps.
    #[must_use]
    pub fn held(&self) -> Vec<(PrefixHash, Tier)> {
        let mut held: Vec<_> = self
            .nodes
            .ids()
            .filter_map(|id| self.nodes.get(id))
            .flat_map(|node| {
                let tiers = Tier::ALL.into_iter().filter(|&tier| node.held.has(tier));
                tiers.map(|tier| (node.prefix, tier))
            })
            .collect();
        held.sort_unstable();
        held
    }

    fn fold(&mut self, batch: &Batch) -> Result<(), Inconsistency> {
        for event in &batch.events {
            match event {
                CacheEvent::Stored(stored) => self.store(stored)?,
                CacheEvent::Removed(removed) => self.remove(removed)?,
                CacheEvent::Cleared => self.clear(),
            }
        }
        let skipped = batch.skipped;
        self.counters.stores_not_understood += u64::from(skipped.stores);
        self.counters.events_not_understood += u64::from(skipped.others);
        self.counters.events_untracked += u64::from(skipped.untracked);
        if skipped.stores > 0 {
            self.knowledge.miss_all();
        }
        if skipped.others > 0 {
            self.knowledge.doubt_all();
        }
        match self.config.blocks_max {
            Some(max) if self.engine_hashes.gpu_references() > max => Err(Inconsistency::TooMany),
            Some(_) | None => Ok(()),
        }
    }

    fn clear(&mut self) {
        self.counters.clears += 1;
        self.drop_blocks();
        self.knowledge.cleared();
    }

    fn drop_blocks(&mut self) {
        for tier in Tier::ALL {
            if self.digests.get(tier).count > 0 {
                self.cleared = self.cleared.with(tier);
            }
        }
        self.nodes = Nodes::default();
        self.engine_hashes = EngineHashes::default();
        self.orphans = Orphans::new(self.config.orphans_max);
        self.digests = Tiers::default();
        self.touched.clear();
    }

    fn store(&mut self, stored: &StoredBlocks) -> Result<(), Inconsistency> {
        let tier = stored.medium.tier();
        let slot = match self.groups.learn(tier, stored.group) {
            GroupRole::Main(slot) => slot,
            GroupRole::NewMain(slot) => {
                self.touch_all_for(slot);
                slot
            }
            GroupRole::Masked => return Ok(()),
            GroupRole::Unknown => {
                self.knowledge.doubt(tier);
                return Ok(());
            }
        };
        if stored.hashes.is_empty() && stored.tokens.is_empty() {
            return Ok(());
        }
        self.knowledge.saw_store(tier, stored);
        let names_blocks = !stored.tokens.is_empty()
            && (stored.reports_extra_keys || self.config.assume.no_extra_keys);
        if tier != Tier::Gpu && !names_blocks {
            self.store_unnamed(stored, slot);
            return Ok(());
        }
        let Some(block_tokens) = self.block_tokens(stored) else {
            self.counters.stores_not_indexable += 1;
            self.knowledge.miss(tier);
            return Ok(());
        };
        let mut position = self.position_of(stored);
        let mut keys = stored.keys.iter().peekable();
        let blocks = stored.tokens.chunks_exact(block_tokens);
        for (index, (&hash, tokens)) in stored.hashes.iter().zip(blocks).enumerate() {
            let keys = keys.next_if(|(at, _)| *at == index).map(|(_, keys)| keys);
            let block = StoreBlock {
                hash,
                tokens,
                keys,
                is_pairs: stored.tokens_per_position > 1,
            };
            position = self.store_block(&block, position, (slot, tier))?;
        }
        Ok(())
    }

    /// A store without all that entries its blocks, as offloading connectors send: no tokens by
    /// default, never the extra keys. What is known by its hash counts; the rest is missing.
    fn store_unnamed(&mut self, stored: &StoredBlocks, slot: GroupSlot) {
        let tier = stored.medium.tier();
        for &hash in &stored.hashes {
            match self.engine_hashes.node(hash) {
                Some(node) => self.refer(hash, node, slot, tier),
                None => {
                    self.counters.stores_not_indexable += 1;
                    self.knowledge.miss(tier);
                }
            }
        }
    }

    /// Numbers per block, if the store has the source's block size and is whole.
    fn block_tokens(&mut self, stored: &StoredBlocks) -> Option<usize> {
        let size = BlockSize::new(stored.block_size)?;
        let each = size
            .tokens()
            .checked_mul(stored.tokens_per_position as usize)?;
        let whole = each.checked_mul(stored.hashes.len())? == stored.tokens.len();
        let may_decide = self.config.block_size.is_none()
            && !self.block_size_is_confirmed
            && stored.medium.tier() == Tier::Gpu;
        if whole && may_decide {
            self.block_size = Some(size);
        }
        if !whole || self.block_size != Some(size) {
            return None;
        }
        self.block_size_is_confirmed |= stored.medium.tier() == Tier::Gpu;
        Some(each)
    }

    fn position_of(&self, stored: &StoredBlocks) -> RunPosition {
        let Some(parent) = stored.parent else {
            return RunPosition::Behind {
                node: NodeId::NONE,
                prefix: None,
                seed: root_seed(stored),
            };
        };
        self.position_after(parent)
            .unwrap_or(RunPosition::Unknown { parent })
    }

    fn position_after(&self, parent: EngineHash) -> Option<RunPosition> {
        self.behind(self.engine_hashes.node(parent)?)
    }

    fn behind(&self, id: NodeId) -> Option<RunPosition> {
        let node = self.nodes.get(id)?;
        Some(RunPosition::Behind {
            node: id,
            prefix: Some(node.prefix),
            seed: node.seed,
        })
    }

    /// Counts one block of a run, and tells where the next one belongs.
    fn store_block(
        &mut self,
        block: &StoreBlock<'_>,
        position: RunPosition,
        (slot, tier): (GroupSlot, Tier),
    ) -> Result<RunPosition, Inconsistency> {
        let parent = match position {
            RunPosition::Behind { node, prefix, seed } => (node, prefix, seed),
            RunPosition::Unknown { parent } => {
                if let Some(node) = self.engine_hashes.node(block.hash) {
                    self.refer(block.hash, node, slot, tier);
                    return Ok(self
                        .position_after(block.hash)
                        .unwrap_or(RunPosition::Unknown { parent: block.hash }));
                }
                let content = || block.content();
                if !self
                    .orphans
                    .store(block.hash, parent, (slot, tier), content)
                {
                    self.counters.orphans_dropped += 1;
                    self.knowledge.miss(tier);
                }
                return Ok(RunPosition::Unknown { parent: block.hash });
            }
        };
        let items = block.keys.map_or(&[][..], |keys| keys.items.as_slice());
        let seed = with_opaques(parent.2, block.opaques());
        let reference = Some((slot, tier));
        let named = (block.hash, reference);
        let next = self.attach(named, parent, block.tokens, items, seed)?;
        let Some(node) = next else {
            self.knowledge.miss(tier);
            return Ok(RunPosition::Unknown { parent: block.hash });
        };
        if !self.orphans.is_empty() {
            self.adopt(block.hash)?;
        }
        Ok(self
            .behind(node)
            .unwrap_or(RunPosition::Unknown { parent: block.hash }))
    }

    /// The node of a block whose parent is known, with one reference more if there is one to count.
    /// `None` if there is no room.
    fn attach(
        &mut self,
        (engine, reference): (EngineHash, Option<(GroupSlot, Tier)>),
        parent: (NodeId, Option<PrefixHash>, Seed),
        tokens: &[u32],
        items: &[u64],
        seed: Seed,
    ) -> Result<Option<NodeId>, Inconsistency> {
        let local = LocalHash::of_block(tokens, items, seed);
        let prefix = PrefixHash::after(parent.1, local);
        let nodes = &mut self.nodes;
        let named = self.engine_hashes.name(engine, reference, || {
            nodes.name(NewNode {
                prefix,
                local,
                seed,
                parent: parent.0,
                engine,
            })
        });
        let Some((id, is_new)) = named else {
            return Ok(None);
        };
        let is_same = is_new || self.nodes.get(id).is_some_and(|node| node.prefix == prefix);
        if !is_same {
            return Err(Inconsistency::TwoPrefixes);
        }
        if is_new && let Some(references) = self.orphans.take(engine) {
            self.refer_many(engine, id, &references);
        }
        if let Some((slot, tier)) = reference {
            self.nodes.add_reference(id, slot, tier);
            self.touch(id);
        }
        Ok(Some(id))
    }

    /// Lets in the orphans that waited for this block, and those that waited for them.
    fn adopt(&mut self, parent: EngineHash) -> Result<(), Inconsistency> {
        let mut parents = vec![parent];
        while let Some(parent) = parents.pop() {
            let found = self.orphans.children_of(parent);
            if found.is_empty() {
                continue;
            }
            let Some(RunPosition::Behind { node, prefix, seed }) = self.position_after(parent)
            else {
                continue;
            };
            for orphan in found {
                let content = &orphan.content;
                let seed = with_opaques(seed, content.opaque.iter().copied());
                let behind = (node, prefix, seed);
                let named = (orphan.hash, None);
                let attached = self.attach(named, behind, &content.tokens, &content.items, seed)?;
                match attached {
                    Some(id) => self.refer_many(orphan.hash, id, &orphan.references),
                    None => self.knowledge.miss_all(),
                }
                parents.push(orphan.hash);
            }
        }
        Ok(())
    }

    fn refer_many(&mut self, hash: EngineHash, id: NodeId, counts: &[(GroupSlot, Tier, u32)]) {
        for &(slot, tier, count) in counts {
            for _ in 0..count {
                self.refer(hash, id, slot, tier);
            }
        }
        // Even without references: it may be a hole that only its children keep.
        self.touch(id);
    }

    fn refer(&mut self, hash: EngineHash, id: NodeId, slot: GroupSlot, tier: Tier) {
        self.engine_hashes.add(hash, slot, tier);
        self.nodes.add_reference(id, slot, tier);
        self.touch(id);
    }

    fn touch(&mut self, id: NodeId) {
        if let Some(node) = self.nodes.get_mut(id)
            && !node.touched
        {
            node.touched = true;
            self.touched.push(id);
        }
    }

    /// A main group turned up that holds nothing yet: what the others hold is not held by all.
    fn touch_all_for(&mut self, slot: GroupSlot) {
        if slot == 0 {
            return;
        }
        let ids: Vec<NodeId> = self.nodes.ids().collect();
        for id in ids {
            self.touch(id);
        }
    }

    fn remove(&mut self, removed: &RemovedBlocks) -> Result<(), Inconsistency> {
        let tier = removed.medium.tier();
        let slot = match self.groups.role(tier, removed.group) {
            Some(GroupRole::Main(slot) | GroupRole::NewMain(slot)) => Some(slot),
            Some(GroupRole::Masked) => return Ok(()),
            Some(GroupRole::Unknown) => {
                self.knowledge.doubt(tier);
                return Ok(());
            }
            None => None,
        };
        self.knowledge.saw_removal(tier);
        for &hash in &removed.hashes {
            let known = slot.is_some_and(|slot| self.unrefer(hash, slot, tier));
            if !known {
                self.counters.removals_unknown += 1;
                if self.knowledge.is_whole(tier) {
                    return Err(Inconsistency::BelowZero);
                }
            }
        }
        Ok(())
    }

    fn unrefer(&mut self, hash: EngineHash, slot: GroupSlot, tier: Tier) -> bool {
        match self.engine_hashes.drop(hash, slot, tier) {
            Some(id) => {
                self.nodes.drop_reference(id, slot, tier);
                self.touch(id);
                true
            }
            None => self.orphans.remove(hash, slot, tier),
        }
    }
}

/// One block of a store.
struct StoreBlock<'a> {
    hash: EngineHash,
    tokens: &'a [u32],
    keys: Option<&'a BlockKeys>,
    is_pairs: bool,
}

impl StoreBlock<'_> {
    /// What makes it opaque, in a fixed order.
    fn opaques(&self) -> impl Iterator<Item = u64> + use<> {
        let pairs = self.is_pairs.then_some(PAIRS);
        let key = self.keys.and_then(|keys| keys.opaque);
        pairs.into_iter().chain(key)
    }

    fn content(&self) -> BlockContent {
        BlockContent {
            tokens: self.tokens.into(),
            items: self.keys.map_or(&[][..], |keys| &keys.items).into(),
            opaque: self.opaques().collect(),
        }
    }
}

fn with_opaques(seed: Seed, opaques: impl Iterator<Item = u64>) -> Seed {
    opaques.fold(seed, |seed, key| seed.with_opaque(&key.to_le_bytes()))
}

/// The seed of a sequence's first block, before what makes that block opaque.
fn root_seed(stored: &StoredBlocks) -> Seed {
    let salt = stored.salt.as_deref();
    match &stored.lora {
        LoraRef::None => Seed::new(None, salt),
        LoraRef::Named(name) => Seed::new(Some(name), salt),
        // A number that means nothing outside the engine: no request can name it.
        LoraRef::Unnamed(id) => Seed::new(None, salt).with_opaque(&id.to_le_bytes()),
    }
}

/// The digest over all tiers.
pub(crate) fn total(digests: &Tiers<Digest>) -> Digest {
    Tier::ALL.iter().fold(Digest::default(), |sum, &tier| {
        let digest = digests.get(tier);
        Digest {
            count: sum.count.wrapping_add(digest.count),
            sum: sum.sum.wrapping_add(digest.sum),
        }
    })
}

#[cfg(test)]
mod tests;
