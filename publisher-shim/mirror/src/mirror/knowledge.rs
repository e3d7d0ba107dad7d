//! How much the mirror knows, tier by tier, and which state it may therefore claim.
//!
//! Two kinds of ignorance are distinguished. *Missing*: the engine may hold blocks that are not in
//! the mirror (`partial`). *Doubt*: the mirror may hold blocks that the engine does not (`stale`).
//!
//! If an engine's events lack a field that distinguishes equal tokens, the state depends on what can
//! go wrong. Without extra keys a salted or multimodal block looks like a plain one: `stale`.
//! Without kinds for several groups a masked group may count: `stale`. Without the LoRA's name its
//! blocks are opaque and only not found: `partial`, from the first such block on. An operator who
//! knows that a feature is unused can declare it ([`Assumptions`]).

use warmroute_proto::{Tier, TierState, TierStates, Tiers};

use crate::checkpoint::{Field, FieldReader, Malformed};
use crate::wire::{LoraRef, StoredBlocks};

/// The operator's declarations about the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Assumptions {
    /// No salts, multimodal items or prompt embeddings are used.
    pub no_extra_keys: bool,
    /// No LoRA adapters are used.
    pub no_lora: bool,
    /// All KV groups are main attention.
    pub main_attention_only: bool,
    /// Prefix hits lose no block to speculative decoding, and no KV connector is used.
    pub plain_lookup: bool,
}

/// What is known of the engine's cache when a mirror begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The engine holds nothing, and every batch from its first on will be seen.
    Empty,
    /// The engine may hold anything.
    Unknown,
}

#[derive(Clone, Debug)]
pub(super) struct Knowledge {
    tiers: Tiers<TierKnowledge>,
}

#[derive(Clone, Copy, Debug, Default)]
struct TierKnowledge {
    /// The tier was empty when the mirror began to follow it.
    from_start: bool,
    missing: bool,
    doubt: bool,
    /// Blocks of an adapter without a name were stored.
    unnamed_lora: bool,
    /// Blocks of an event without a field for extra keys were stored.
    lacks_extra_keys: bool,
    stored: bool,
    /// Its connector sends removals; stays true for the engine's life.
    removes: bool,
}

impl Knowledge {
    pub(super) fn new(start: Start) -> Self {
        let tier = |tier| TierKnowledge {
            from_start: start == Start::Empty,
            removes: tier == Tier::Gpu,
            ..TierKnowledge::default()
        };
        Self {
            tiers: Tiers {
                gpu: tier(Tier::Gpu),
                cpu: tier(Tier::Cpu),
                disk: tier(Tier::Disk),
            },
        }
    }

    pub(super) fn write(&self, to: &mut Vec<u8>) {
        for tier in Tier::ALL {
            let TierKnowledge {
                from_start,
                missing,
                doubt,
                unnamed_lora,
                lacks_extra_keys,
                stored,
                removes,
            } = self.tiers.get(tier);
            let flags = [
                from_start,
                missing,
                doubt,
                unnamed_lora,
                lacks_extra_keys,
                stored,
                removes,
            ];
            flags.iter().for_each(|flag| flag.write(to));
        }
    }

    pub(super) fn read(from: &mut FieldReader<'_>) -> Result<Self, Malformed> {
        let mut knowledge = Self::new(Start::Unknown);
        for tier in Tier::ALL {
            *knowledge.tiers.get_mut(tier) = TierKnowledge {
                from_start: from.read()?,
                missing: from.read()?,
                doubt: from.read()?,
                unnamed_lora: from.read()?,
                lacks_extra_keys: from.read()?,
                stored: from.read()?,
                removes: from.read()?,
            };
        }
        Ok(knowledge)
    }

    /// The engine emptied its GPU memory. The contents of its other tiers become unknown.
    pub(super) fn cleared(&mut self) {
        self.forget();
        self.tiers.gpu.from_start = true;
    }

    /// The mirror was emptied, and the engine's contents are unknown.
    pub(super) fn forget(&mut self) {
        for tier in Tier::ALL {
            let known = self.tiers.get_mut(tier);
            *known = TierKnowledge {
                removes: known.removes,
                ..TierKnowledge::default()
            };
        }
    }

    pub(super) fn saw_store(&mut self, tier: Tier, stored: &StoredBlocks) {
        let known = self.tiers.get_mut(tier);
        known.stored = true;
        // In lower tiers a store without the field counts only for blocks known by their hash.
        known.lacks_extra_keys |= tier == Tier::Gpu && !stored.reports_extra_keys;
        known.unnamed_lora |= matches!(stored.lora, LoraRef::Unnamed(_));
    }

    pub(super) const fn saw_removal(&mut self, tier: Tier) {
        self.tiers.get_mut(tier).removes = true;
    }

    pub(super) const fn miss(&mut self, tier: Tier) {
        self.tiers.get_mut(tier).missing = true;
    }

    pub(super) fn miss_all(&mut self) {
        Tier::ALL.iter().for_each(|&tier| self.miss(tier));
    }

    pub(super) const fn doubt(&mut self, tier: Tier) {
        self.tiers.get_mut(tier).doubt = true;
    }

    /// Every store was counted, so that a removal of an unknown block is a contradiction.
    pub(super) const fn is_whole(&self, tier: Tier) -> bool {
        let known = self.tiers.get(tier);
        known.from_start && !known.missing && !known.doubt
    }

    pub(super) fn states(
        &self,
        assume: Assumptions,
        has_orphans: impl Fn(Tier) -> bool,
        lacks_kinds: impl Fn(Tier) -> bool,
    ) -> TierStates {
        let state = |tier| {
            let known = self.tiers.get(tier);
            let doubt = known.doubt
                || (known.lacks_extra_keys && !assume.no_extra_keys)
                || (lacks_kinds(tier) && !assume.main_attention_only)
                || (known.stored && !known.removes);
            let missing = !self.is_whole(tier)
                || has_orphans(tier)
                || (known.unnamed_lora && !assume.no_lora);
            if doubt {
                TierState::Stale
            } else if missing {
                TierState::Partial
            } else {
                TierState::Complete
            }
        };
        TierStates {
            gpu: state(Tier::Gpu),
            cpu: state(Tier::Cpu),
            disk: state(Tier::Disk),
        }
    }
}
