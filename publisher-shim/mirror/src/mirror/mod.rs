//! An exact copy of what one rank's engine holds, by content.
//!
//! [`Mirror`] folds decoded batches. It counts references per engine hash, attention group and tier,
//! because an engine holds a block in several physical copies; it translates engine hashes to
//! prefix hashes; and it returns, batch by batch, which (prefix, tier) pairs became held or ceased
//! to be held. A pair is held if every main group of the tier holds it, summed over copies and
//! engine hashes; for engines with windows see `resume`.
//!
//! The mirror also tracks how much it knows ([`Mirror::states`]): whether it saw everything since the
//! engine was empty, whether a store did not decode, and whether the events have all fields that
//! distinguish blocks. An [`Inconsistency`] empties it.
//!
//! Sequence numbers, replays and time are in `source`. Pure: no IO, no clock.

mod adapters;
mod aliases;
mod block_chain;
mod chunks;
mod emit;
mod engine_hashes;
mod groups;
mod knowledge;
mod nodes;
mod orphans;
mod references;
mod removals;
mod resume;
mod save;
mod store_block;
mod windowed;

use warmroute_proto::label_enum;
use warmroute_proto::{
    BlockCut, BlockSize, Change, Digest, LocalHash, PrefixHash, Seed, Tier, TierState, TierStates,
    Tiers,
};

use crate::wire::{Batch, CacheEvent, EngineHash, GroupKind, StoredBlocks};
use adapters::Adapters;
use block_chain::BlockChain;
use engine_hashes::EngineHashes;
use groups::{GroupRole, Groups};
use knowledge::Knowledge;
pub use knowledge::{Assumptions, Start, TierLimit};
use nodes::{LoadId, NewNode, NodeId, Nodes, TierSet};
use orphans::Orphans;
use references::{GroupTier, References};
use resume::ResumePoints;
pub use save::MirrorSnapshot;
use store_block::{StoreBlock, root_seed, with_opaques};
pub use windowed::LookupDoubt;

#[derive(Clone, Copy, Debug)]
pub struct MirrorConfig {
    /// The block size that events must have; `None`: that of the first store in GPU memory.
    pub block_size: Option<BlockSize>,
    /// The engine's number of KV blocks; more references than that are an [`Inconsistency`].
    pub blocks_max: Option<u64>,
    /// Bound of the orphans kept.
    pub orphans_max: usize,
    /// Whether the engine decodes speculatively; `None` if its metrics are not known.
    pub speculates: Option<bool>,
    /// Whether the engine has a KV connector, and so lower tiers; `None` if that is not known.
    pub connects: Option<bool>,
    pub assume: Assumptions,
}

impl Default for MirrorConfig {
    fn default() -> Self {
        Self {
            block_size: None,
            blocks_max: None,
            orphans_max: 1 << 16,
            speculates: None,
            connects: None,
            assume: Assumptions::default(),
        }
    }
}

label_enum! {
    /// A sign that the mirror may hold blocks which the engine does not. The mirror is then empty
    /// and partial, and its readers need a new generation.
    #[derive(PartialOrd, Ord, Hash)]
    pub enum Inconsistency {
        /// One engine hash stands for two prefixes.
        TwoPrefixes = "two_prefixes",
        /// More references than the engine has blocks.
        TooMany = "too_many",
        /// A payload did not decode: it may have removed any block.
        Undecodable = "undecodable",
    }
}

impl Inconsistency {
    /// What the engine did, for the operator's log.
    #[must_use]
    pub const fn cause(self) -> &'static str {
        match self {
            Self::TwoPrefixes => "gave one block hash to two prefixes; its hashes have no position",
            Self::TooMany => "stored more blocks than it has",
            Self::Undecodable => "sent a payload that this version does not know",
        }
    }
}

/// Counts of what was not a plain store or removal.
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

/// The copy of one rank's cache.
#[derive(Clone, Debug)]
pub struct Mirror {
    config: MirrorConfig,
    /// Provisional until the first store in GPU memory confirms it.
    block_size: Option<BlockSize>,
    block_size_is_confirmed: bool,
    /// Tokens behind a block that its name covers; provisional as the block size is.
    lookahead: u32,
    nodes: Nodes,
    engine_hashes: EngineHashes,
    orphans: Orphans,
    groups: Groups,
    /// What is held, if an engine's hits need more than an unbroken run; `None` otherwise.
    resume: Option<ResumePoints>,
    /// Empty unless no group of the engine has full attention.
    block_chain: BlockChain,
    adapters: Adapters,
    knowledge: Knowledge,
    digests: Tiers<Digest>,
    counters: MirrorCounters,
    /// Blocks whose state may have changed since the last `settle`, each once.
    touched: Vec<NodeId>,
    /// Tiers that held something and were emptied since the last `settle`.
    cleared: TierSet,
    /// Held pairs that lost their last reference since the last `settle`, held again or not.
    dipped: Vec<(NodeId, Tier)>,
    /// Scratch space of `emit_stored`, empty between calls.
    path: Vec<NodeId>,
}

/// The position of the next block of a run.
#[derive(Clone, Copy)]
enum RunPosition {
    After(Predecessor),
    /// The parent is unknown: the block is an orphan.
    Orphaned {
        parent: EngineHash,
    },
}

impl RunPosition {
    /// The seed of the block before, if that is known.
    const fn seed(self) -> Seed {
        match self {
            Self::After(predecessor) => predecessor.seed,
            Self::Orphaned { .. } => Seed::PLAIN,
        }
    }
}

/// The block before another one; the default is the start of a plain sequence.
#[derive(Clone, Copy)]
struct Predecessor {
    node: NodeId,
    prefix: Option<PrefixHash>,
    seed: Seed,
    load: LoadId,
}

/// Blocks kept of a tier whose removals are not published: nothing else bounds them.
const UNREMOVED_MAX: u64 = 1 << 20;

/// Blocks whose memory is read together: the processor's innermost cache holds their nodes.
const READ_AHEAD_MAX: usize = 64;

impl Mirror {
    #[must_use]
    pub fn new(config: MirrorConfig, start: Start) -> Self {
        Self {
            config,
            block_size: config.block_size,
            block_size_is_confirmed: false,
            lookahead: 0,
            nodes: Nodes::default(),
            engine_hashes: EngineHashes::default(),
            orphans: Orphans::new(config.orphans_max),
            groups: Groups::default(),
            resume: None,
            block_chain: BlockChain::default(),
            adapters: Adapters::default(),
            knowledge: Knowledge::new(start),
            digests: Tiers::default(),
            counters: MirrorCounters::default(),
            touched: Vec::new(),
            cleared: TierSet::default(),
            dipped: Vec::new(),
            path: Vec::new(),
        }
    }

    /// Begins another life of the engine: empties the mirror and forgets its facts. Keeps the
    /// counters and, provisionally, the blocks' cut.
    pub fn begin(&mut self, start: Start) {
        *self = Self {
            block_size: self.block_size,
            lookahead: self.lookahead,
            counters: self.counters,
            ..Self::new(self.config, start)
        };
    }

    /// Empties the mirror within a life of the engine: its contents are unknown from now on.
    pub fn forget(&mut self) {
        self.drop_blocks();
        self.cleared = TierSet::default();
        self.knowledge.forget();
    }

    /// Folds a batch. Returns the changes of pairs whose state differs before and after, and of
    /// pairs that were removed and stored again: readers see every interruption.
    pub fn apply(&mut self, batch: &Batch) -> Result<Vec<Change>, Inconsistency> {
        match self.fold(batch) {
            Ok(()) => Ok(self.settle()),
            Err(inconsistency) => {
                self.forget();
                Err(inconsistency)
            }
        }
    }

    /// Empties the mirror: a payload did not decode, so its events are unknown.
    pub fn reject_payload(&mut self) -> Inconsistency {
        self.counters.events_not_understood += 1;
        self.forget();
        Inconsistency::Undecodable
    }

    /// The states that the mirror supports, whatever the age of the source's proof.
    #[must_use]
    pub fn states(&self) -> TierStates {
        let (limits, connects) = (self.limits(), self.config.connects);
        let state = |tier| match limits.get(tier) {
            Some(limit) => limit.state(),
            None if self.knowledge.is_absent(tier, connects) => TierState::Absent,
            None => TierState::Complete,
        };
        let states = Tiers {
            gpu: state(Tier::Gpu),
            cpu: state(Tier::Cpu),
            disk: state(Tier::Disk),
        };
        match self.lookup_doubt() {
            Some(_) => states.map(|state| state.weakest(TierState::Unverified)),
            None => states,
        }
    }

    /// Why each tier is not complete.
    #[must_use]
    pub fn limits(&self) -> Tiers<Option<TierLimit>> {
        let limit = |tier| {
            let has_orphans = self.orphans.references(tier) > 0;
            let lacks_kinds = self.groups.lacks_kinds(tier);
            let (assume, connects) = (self.config.assume, self.config.connects);
            let known = (self.knowledge).limit(tier, assume, connects, has_orphans, lacks_kinds);
            let has_chunks = self.groups.has_chunks(tier, self.block_size);
            let chunks = has_chunks.then_some(TierLimit::Chunks);
            // The gravest one.
            known.into_iter().chain(chunks).min()
        };
        Tiers {
            gpu: limit(Tier::Gpu),
            cpu: limit(Tier::Cpu),
            disk: limit(Tier::Disk),
        }
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
    pub fn block_cut(&self) -> Option<BlockCut> {
        let lookahead = self.lookahead;
        self.block_size.map(|size| BlockCut { size, lookahead })
    }

    #[must_use]
    pub const fn block_size_is_confirmed(&self) -> bool {
        self.block_size_is_confirmed
    }

    /// Sets a provisional block size; that of the events takes precedence.
    pub fn suggest_block_size(&mut self, block_size: BlockSize) {
        if self.config.block_size.is_none() && !self.block_size_is_confirmed {
            self.block_size = Some(block_size);
        }
    }

    pub const fn set_blocks_max(&mut self, blocks: Option<u64>) {
        self.config.blocks_max = blocks;
    }

    pub const fn set_speculation(&mut self, speculates: Option<bool>) {
        self.config.speculates = speculates;
    }

    pub const fn set_connector(&mut self, connects: Option<bool>) {
        self.config.connects = connects;
    }

    /// No group seen so far has another kind than main attention.
    #[must_use]
    pub fn main_attention_only(&self) -> bool {
        self.groups.is_main_attention_only()
    }

    /// Number of prefixes kept, removed ancestors of held ones included.
    #[must_use]
    pub fn prefixes(&self) -> usize {
        self.nodes.len()
    }

    #[must_use]
    pub fn orphans(&self) -> usize {
        self.orphans.len()
    }

    /// Every held pair, sorted; for tests and dumps.
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
        self.learn_groups(&batch.events)?;
        let is_clear = |event: &CacheEvent| matches!(event, CacheEvent::Cleared);
        for events in batch.events.split_inclusive(is_clear) {
            for event in events {
                match event {
                    CacheEvent::Stored(stored) => self.store(stored)?,
                    CacheEvent::Removed(removed)
                        if self.is_placed_by_others(removed.medium.tier(), removed.group) => {}
                    CacheEvent::Removed(removed) => self.remove(removed),
                    CacheEvent::Cleared => self.clear(),
                    CacheEvent::Unknown(unknown) => self.meet_unknown(*unknown),
                }
            }
            // What a clear ends needs no place.
            if self.resume.is_some() && !events.last().is_some_and(is_clear) {
                self.fold_placed_by_others(events);
            }
        }
        let skipped = batch.skipped;
        self.counters.stores_not_understood += u64::from(skipped.stores);
        self.counters.events_not_understood += u64::from(skipped.others);
        self.counters.events_untracked += u64::from(skipped.untracked);
        if self.nodes.has_overflowed() || self.orphans.has_overflowed() {
            return Err(Inconsistency::TooMany);
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
        if self.resume.is_some() {
            self.nodes.keep_children();
        }
        self.engine_hashes = EngineHashes::default();
        self.block_chain.clear();
        self.adapters = Adapters::default();
        self.orphans = Orphans::new(self.config.orphans_max);
        self.digests = Tiers::default();
        self.touched.clear();
        self.dipped.clear();
    }

    fn store(&mut self, stored: &StoredBlocks) -> Result<(), Inconsistency> {
        // A chunk's event names no adapter.
        let has_chunks = self
            .groups
            .has_chunks(stored.medium.tier(), self.block_size);
        let may_split = has_chunks && self.config.assume.no_lora;
        let size = self.block_size.filter(|_| may_split);
        match size.and_then(|size| chunks::split(stored, size)) {
            Some(blocks) => self.store_blocks(&blocks),
            None => self.store_blocks(stored),
        }
    }

    fn store_blocks(&mut self, stored: &StoredBlocks) -> Result<(), Inconsistency> {
        let tier = stored.medium.tier();
        let slot = match self.groups.role(tier, stored.group.index) {
            Some(GroupRole::Counted(slot)) => slot,
            Some(GroupRole::Ignored) => return Ok(()),
            Some(GroupRole::Untracked) | None => {
                self.knowledge.doubt(tier);
                return Ok(());
            }
        };
        if stored.group.kind == Some(GroupKind::Unknown) {
            self.knowledge.miss(tier);
        }
        if stored.hashes.is_empty() && (stored.tokens.is_empty() || self.resume.is_some()) {
            return Ok(());
        }
        self.knowledge.saw_store(tier, stored);
        let sees_removals = self.knowledge.sees_removals(tier, self.config.assume);
        if !sees_removals && self.digests.get(tier).count >= UNREMOVED_MAX {
            self.knowledge.miss(tier);
            return Ok(());
        }
        if self.resume.is_some() && tier != Tier::Gpu {
            // No connector publishes what a hit with windows needs of a lower tier.
            self.counters.stores_not_indexable += 1;
            self.knowledge.miss_unidentified(tier);
            return Ok(());
        }
        if self.is_placed_by_others(tier, stored.group.index) {
            return Ok(());
        }
        let at = GroupTier { slot, tier };
        let reports_keys = stored.reports_extra_keys || self.config.assume.no_extra_keys;
        // Without tokens: a block that moves between tiers.
        if stored.tokens.is_empty() || tier != Tier::Gpu && !reports_keys {
            self.store_by_hash(stored, at);
            return Ok(());
        }
        let Some(block_tokens) = self.block_tokens(stored) else {
            self.counters.stores_not_indexable += 1;
            self.knowledge.miss_unidentified(tier);
            return Ok(());
        };
        let Some(load) = self.load_of(stored, block_tokens) else {
            self.counters.stores_not_indexable += 1;
            self.knowledge.miss_unidentified(tier);
            return Ok(());
        };
        let start = self.start_of(stored, load)?;
        if self.has_windows_only(tier) {
            return self.store_by_chain(stored, block_tokens, start, at);
        }
        self.store_run(stored, block_tokens, start, at)
    }

    /// Stores blocks one behind the other, from a position on.
    fn store_run(
        &mut self,
        stored: &StoredBlocks,
        block_tokens: usize,
        mut position: RunPosition,
        at: GroupTier,
    ) -> Result<(), Inconsistency> {
        let mut keys = stored.keys.iter().peekable();
        let tokens = stored.tokens.chunks_exact(block_tokens);
        let mut blocks = stored.hashes.iter().zip(tokens).enumerate().peekable();
        let mut run = Vec::with_capacity(stored.hashes.len().min(READ_AHEAD_MAX));
        while blocks.peek().is_some() {
            let mut before = position.seed();
            run.extend(
                blocks
                    .by_ref()
                    .take(READ_AHEAD_MAX)
                    .map(|(index, (&hash, tokens))| {
                        let keys = keys.next_if(|(of, _)| *of == index).map(|(_, keys)| keys);
                        let is_pairs = stored.tokens_per_position > 1;
                        let lookahead = stored.lookahead_of(index);
                        let block =
                            StoreBlock::new(hash, tokens, lookahead, keys, is_pairs, before);
                        before = block.seed;
                        block
                    }),
            );
            self.read_ahead_stores(&run, position);
            for block in run.drain(..) {
                position = self.store_block(&block, position, at)?;
            }
        }
        Ok(())
    }

    /// Reads the memory that stores at a position need, as for removals.
    fn read_ahead_stores(&self, blocks: &[StoreBlock<'_>], position: RunPosition) {
        if blocks.len() < 2 {
            return;
        }
        let mut known = [NodeId::NONE; READ_AHEAD_MAX];
        for (id, block) in known.iter_mut().zip(blocks) {
            *id = self.engine_hashes.node(block.hash).unwrap_or(NodeId::NONE);
        }
        if let RunPosition::After(predecessor) = position {
            let mut prefix = predecessor.prefix;
            self.nodes.read_ahead(blocks.iter().map(|block| {
                let next = PrefixHash::after(prefix, block.local);
                prefix = Some(next);
                next
            }));
        }
        let known = known.iter().take(blocks.len());
        let references = known.filter_map(|&id| self.nodes.get(id));
        std::hint::black_box(references.map(|node| node.references).max());
    }

    /// A store that does not identify its blocks by content, as offloading connectors send: no
    /// tokens by default, never extra keys. Blocks known by their hash count; the rest is missing.
    fn store_by_hash(&mut self, stored: &StoredBlocks, at: GroupTier) {
        for &hash in &stored.hashes {
            match self.engine_hashes.node(hash) {
                Some(node) => self.add_references(hash, node, at, 1),
                None => {
                    self.counters.stores_not_indexable += 1;
                    self.knowledge.miss_unidentified(at.tier);
                }
            }
        }
    }

    /// Numbers per block, if the store has the source's block size and the tokens of all its blocks.
    fn block_tokens(&mut self, stored: &StoredBlocks) -> Option<usize> {
        let size = BlockSize::new(stored.block_size)?;
        let per_block = size
            .tokens()
            .checked_mul(stored.tokens_per_position as usize)?;
        let tier = stored.medium.tier();
        let named = per_block.checked_mul(stored.hashes.len())?;
        let is_whole = if self.has_windows_only(tier) {
            named <= stored.tokens.len() && stored.tokens.len().is_multiple_of(per_block)
        } else {
            named == stored.tokens.len()
        };
        let is_gpu = tier == Tier::Gpu;
        let is_known_kind = stored.group.kind != Some(GroupKind::Unknown);
        let may_decide = self.config.block_size.is_none() && !self.block_size_is_confirmed;
        if is_whole && is_gpu && is_known_kind && may_decide {
            self.block_size = Some(size);
        }
        if is_whole && is_gpu && !self.block_size_is_confirmed {
            self.lookahead = stored.lookahead;
        }
        let is_cut_alike = self.block_size == Some(size) && self.lookahead == stored.lookahead;
        if !is_whole || !is_cut_alike {
            return None;
        }
        self.block_size_is_confirmed |= is_gpu;
        Some(per_block)
    }

    fn start_of(
        &mut self,
        stored: &StoredBlocks,
        load: LoadId,
    ) -> Result<RunPosition, Inconsistency> {
        let root = match stored.parent {
            Some(parent) => return Ok(self.after_hash(parent)),
            None if self.resume.is_some() => self.resume_root()?,
            None => Predecessor {
                node: NodeId::NONE,
                prefix: None,
                seed: Seed::PLAIN,
                load,
            },
        };
        Ok(RunPosition::After(Predecessor {
            seed: root_seed(stored),
            load,
            ..root
        }))
    }

    /// The position after an engine hash.
    fn after_hash(&self, hash: EngineHash) -> RunPosition {
        let node = self.engine_hashes.node(hash);
        let predecessor = node.and_then(|node| self.predecessor(node));
        predecessor.map_or(RunPosition::Orphaned { parent: hash }, RunPosition::After)
    }

    fn predecessor(&self, id: NodeId) -> Option<Predecessor> {
        let node = self.nodes.get(id)?;
        Some(Predecessor {
            node: id,
            prefix: Some(node.prefix),
            seed: node.seed,
            load: node.load,
        })
    }

    /// Counts one block of a run. Returns the position of the next one.
    fn store_block(
        &mut self,
        block: &StoreBlock<'_>,
        position: RunPosition,
        at: GroupTier,
    ) -> Result<RunPosition, Inconsistency> {
        let predecessor = match position {
            RunPosition::After(predecessor) => predecessor,
            RunPosition::Orphaned { parent } => {
                match self.engine_hashes.node(block.hash) {
                    Some(node) => self.add_references(block.hash, node, at, 1),
                    None => {
                        let content = || block.content();
                        if !self.orphans.store(block.hash, parent, at, content) {
                            self.counters.orphans_dropped += 1;
                            self.knowledge.miss(at.tier);
                        }
                    }
                }
                return Ok(self.after_hash(block.hash));
            }
        };
        let block = &block.behind(predecessor.seed);
        let (local, seed) = (block.local, block.seed);
        let Some(node) = self.attach(block.hash, Some(at), predecessor, local, seed)? else {
            self.knowledge.miss(at.tier);
            return Ok(RunPosition::Orphaned { parent: block.hash });
        };
        if !self.orphans.is_empty() {
            self.adopt(block.hash)?;
        }
        let orphaned = RunPosition::Orphaned { parent: block.hash };
        Ok(self.predecessor(node).map_or(orphaned, RunPosition::After))
    }

    /// The node of a block behind a known one, created if it does not exist; counts a reference, if
    /// one is given. `None` if the slab is full.
    fn attach(
        &mut self,
        engine: EngineHash,
        reference: Option<GroupTier>,
        predecessor: Predecessor,
        local: LocalHash,
        seed: Seed,
    ) -> Result<Option<NodeId>, Inconsistency> {
        let new = NewNode {
            prefix: PrefixHash::after(predecessor.prefix, local),
            local,
            seed,
            parent: predecessor.node,
            engine,
            load: predecessor.load,
        };
        let nodes = &mut self.nodes;
        let found = self
            .engine_hashes
            .find_or_insert(engine, reference, || nodes.find_or_insert(new));
        let Some((id, is_new)) = found else {
            return Ok(None);
        };
        let has_prefix = |id| {
            self.nodes
                .get(id)
                .is_some_and(|node| node.prefix == new.prefix && node.load == new.load)
        };
        if !is_new && !has_prefix(id) {
            return Err(Inconsistency::TwoPrefixes);
        }
        if is_new && let Some(references) = self.orphans.take(engine) {
            self.add_all_references(engine, id, &references);
        }
        if let Some(at) = reference {
            self.nodes.add_references(id, at, 1);
            self.touch(id);
        }
        Ok(Some(id))
    }

    /// Attaches the orphaned children of a block, and then theirs.
    fn adopt(&mut self, parent: EngineHash) -> Result<(), Inconsistency> {
        let mut parents = vec![parent];
        while let Some(parent) = parents.pop() {
            for orphan in self.orphans.take_children(parent) {
                let RunPosition::After(predecessor) = self.after_hash(parent) else {
                    continue;
                };
                let content = &orphan.content;
                let seed = with_opaques(predecessor.seed, content.opaque.iter().copied());
                let local = LocalHash::of_block(&content.tokens, &content.items, seed);
                match self.attach(orphan.hash, None, predecessor, local, seed)? {
                    Some(id) => self.add_all_references(orphan.hash, id, &orphan.references),
                    None => self.knowledge.miss_all(),
                }
                parents.push(orphan.hash);
            }
        }
        Ok(())
    }

    fn add_all_references(&mut self, hash: EngineHash, id: NodeId, references: &References) {
        for &(at, count) in references {
            self.add_references(hash, id, at, count);
        }
        // Without references too: the block may be needed by its children only.
        self.touch(id);
    }

    fn add_references(&mut self, hash: EngineHash, id: NodeId, at: GroupTier, count: u32) {
        self.engine_hashes.add(hash, at, count);
        self.nodes.add_references(id, at, count);
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

    fn touch_all(&mut self) {
        let ids: Vec<NodeId> = self.nodes.ids().collect();
        ids.into_iter().for_each(|id| self.touch(id));
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
pub(crate) mod tests;
