//! Engines with sliding-window or state-space layers: which of their events are counted, and where.
//!
//! Such a group's stores name only the blocks that can serve a hit, without their positions. Their
//! hashes are those of the full-attention group's event for the same tokens, which is in the same
//! batch: so these events are folded behind the others of their batch.

use warmroute_proto::label_enum;
use warmroute_proto::{LocalHash, PrefixHash, Seed, Tier};

use super::groups::{GroupRole, HitNeed};
use super::nodes::{LoadId, NodeId};
use super::references::GroupTier;
use super::resume::ResumePoints;
use super::{Inconsistency, Mirror, Predecessor, RunPosition, StoreBlock, block_chain};
use crate::wire::{CacheEvent, EngineHash, StoredBlocks};

label_enum! {
    /// What the events do not show of an engine's prefix lookup. Its hits may be shorter than what
    /// is credited.
    pub enum LookupDoubt {
        /// It decodes speculatively: with EAGLE or MTP a hit loses its last block.
        Speculation = "speculative decoding",
        /// It has state-space layers: with a KV connector a hit follows another rule.
        StateSpace = "state-space layers",
        /// Its metrics, which would show speculative decoding, are not known.
        NoMetrics = "no /metrics, which would show speculative decoding",
    }
}

impl Mirror {
    /// Why hits may be shorter than what is credited; `None` if nothing of this is known, or if the
    /// operator declared a plain lookup.
    #[must_use]
    pub fn lookup_doubt(&self) -> Option<LookupDoubt> {
        if self.config.assume.plain_lookup {
            return None;
        }
        match self.config.speculates {
            // Where names cover the tokens that drafts depend on, a hit loses nothing.
            _ if self.lookahead > 0 && !self.groups.has_state() => None,
            Some(true) => Some(LookupDoubt::Speculation),
            _ if self.groups.has_state() => Some(LookupDoubt::StateSpace),
            None => Some(LookupDoubt::NoMetrics),
            Some(false) => None,
        }
    }

    /// Learns the groups of a batch before its events are folded.
    pub(super) fn learn_groups(&mut self, events: &[CacheEvent]) -> Result<(), Inconsistency> {
        let mut has_new = false;
        for event in events {
            if let CacheEvent::Stored(stored) = event {
                let tier = stored.medium.tier();
                has_new |= self.groups.learn(tier, stored.group, stored.block_size);
            }
        }
        if !has_new {
            return Ok(());
        }
        if self.groups.is_windowed() {
            self.renew_resume_points()?;
        }
        // The new group holds nothing: no block is held by all groups any more.
        self.touch_all();
        Ok(())
    }

    /// Makes resume points of what is held, or counts them by the groups now known.
    fn renew_resume_points(&mut self) -> Result<(), Inconsistency> {
        let is_first = self.resume.is_none();
        self.resume = Some(ResumePoints::new(&self.groups));
        if is_first && self.nodes.len() > 0 {
            for tier in Tier::ALL {
                if self.digests.get(tier).count > 0 {
                    self.cleared = self.cleared.with(tier);
                }
            }
            self.digests = warmroute_proto::Tiers::default();
            if let Some(root) = self.resume_root()?.node.some() {
                self.nodes.put_below(root);
            }
        }
        if is_first {
            self.nodes.keep_children();
        }
        Ok(())
    }

    /// The position above all resume points.
    pub(super) fn resume_root(&mut self) -> Result<Predecessor, Inconsistency> {
        /// No engine names a block so.
        const ENGINE_HASH: EngineHash = EngineHash(LocalHash::RESUME_ROOT.0);
        let above = Predecessor {
            node: NodeId::NONE,
            prefix: None,
            seed: Seed::PLAIN,
            load: LoadId::NONE,
        };
        let local = LocalHash::RESUME_ROOT;
        let node = self.attach(ENGINE_HASH, None, above, local, Seed::PLAIN)?;
        let node = node.unwrap_or(NodeId::NONE);
        // Without a block below it is freed when the batch is settled.
        self.touch(node);
        Ok(Predecessor {
            node,
            prefix: Some(PrefixHash::after(None, local)),
            seed: Seed::PLAIN,
            load: LoadId::NONE,
        })
    }

    /// The blocks of this group's events are placed by those of another one.
    pub(super) fn is_placed_by_others(&self, tier: Tier, index: Option<u32>) -> bool {
        if tier != Tier::Gpu || self.resume.is_none() || !self.groups.has_runs() {
            return false;
        }
        match self.groups.role(tier, index) {
            Some(GroupRole::Counted(slot)) => {
                let need = self.groups.needs(tier).get(usize::from(slot));
                matches!(need, Some(HitNeed::Window(_)))
            }
            Some(GroupRole::Ignored | GroupRole::Untracked) | None => false,
        }
    }

    /// Folds the events that others of the same batch place.
    pub(super) fn fold_placed_by_others(&mut self, events: &[CacheEvent]) {
        for event in events {
            match event {
                CacheEvent::Stored(stored) => {
                    let tier = stored.medium.tier();
                    if self.is_placed_by_others(tier, stored.group.index) {
                        self.store_by_hash_at_its_place(stored);
                    }
                }
                CacheEvent::Removed(removed) => {
                    if self.is_placed_by_others(removed.medium.tier(), removed.group) {
                        self.remove(removed);
                    }
                }
                CacheEvent::Cleared | CacheEvent::Unknown(_) => {}
            }
        }
    }

    /// No group places the blocks of the others: their own events have to.
    pub(super) fn has_windows_only(&self, tier: Tier) -> bool {
        tier == Tier::Gpu && self.resume.is_some() && !self.groups.has_runs()
    }

    /// Stores the blocks of a range that the event names, placed by their hashes unless it names
    /// all.
    pub(super) fn store_by_chain(
        &mut self,
        stored: &StoredBlocks,
        block_tokens: usize,
        mut position: RunPosition,
        at: GroupTier,
    ) -> Result<(), Inconsistency> {
        let digests = self.block_chain.of_range(stored, block_tokens);
        let digests = digests.unwrap_or_default();
        let computed = digests.iter().map(|digest| EngineHash::of_bytes(digest));
        let mut names: Vec<EngineHash> = computed.collect();
        let is_named_whole = stored.hashes.len() == stored.tokens.len() / block_tokens;
        let mut unplaced = stored.hashes.iter().peekable();
        for name in &names {
            unplaced.next_if_eq(&name);
        }
        let is_proven = unplaced.peek().is_none();
        if is_named_whole {
            names.clone_from(&stored.hashes);
        } else if !is_proven {
            self.counters.stores_not_indexable += 1;
            self.knowledge.miss(at.tier);
            return Ok(());
        }
        let mut due = stored.hashes.iter().peekable();
        let mut keys = stored.keys.iter().peekable();
        let blocks = names.iter().zip(stored.tokens.chunks_exact(block_tokens));
        for (index, (&hash, tokens)) in blocks.enumerate() {
            if due.peek().is_none() {
                break;
            }
            let keys = keys.next_if(|(of, _)| *of == index).map(|(_, keys)| keys);
            let is_pairs = stored.tokens_per_position > 1;
            let named = stored.hashes.len() - due.len();
            let is_due = due.next_if_eq(&&hash).is_some();
            let lookahead = if is_due {
                stored.lookahead_of(named)
            } else {
                block_chain::following(stored, block_tokens, index)
            };
            let seed = position.seed();
            let block = StoreBlock::new(hash, tokens, lookahead, keys, is_pairs, seed);
            position = if is_due {
                self.store_block(&block, position, at)?
            } else {
                self.pass_block(&block, position)?
            };
            if is_proven && let Some(&digest) = digests.get(index) {
                self.block_chain.insert(digest);
            }
        }
        Ok(())
    }

    /// Makes the node of a block that is named by none and precedes one that is.
    fn pass_block(
        &mut self,
        block: &StoreBlock<'_>,
        position: RunPosition,
    ) -> Result<RunPosition, Inconsistency> {
        if let RunPosition::After(above) = position {
            let block = block.behind(above.seed);
            let node = self.attach(block.hash, None, above, block.local, block.seed)?;
            self.touch(node.unwrap_or(NodeId::NONE));
        }
        Ok(self.after_hash(block.hash))
    }

    fn store_by_hash_at_its_place(&mut self, stored: &StoredBlocks) {
        let tier = stored.medium.tier();
        let Some(GroupRole::Counted(slot)) = self.groups.role(tier, stored.group.index) else {
            return;
        };
        let at = GroupTier { slot, tier };
        let size = self.block_size.map(warmroute_proto::BlockSize::tokens);
        let is_of_other_size = size != usize::try_from(stored.block_size).ok();
        for &hash in &stored.hashes {
            let node = self.engine_hashes.node(hash).filter(|_| !is_of_other_size);
            match node {
                Some(node) => self.add_references(hash, node, at, 1),
                None if !is_of_other_size && self.orphans.add_reference(hash, at) => {}
                None => {
                    self.counters.stores_not_indexable += 1;
                    self.knowledge.miss(tier);
                }
            }
        }
    }
}
