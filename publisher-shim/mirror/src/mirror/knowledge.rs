//! How much the mirror knows, tier by tier, and what it may therefore claim.
//!
//! Two kinds of ignorance are kept apart. *Missing*: blocks may be held that are not told; what is
//! told is held (`partial`). *Doubt*: what is told may not be held (`stale`).
//!
//! Where an engine's events lack a field that separates equal tokens, the choice is by what can go
//! wrong. Without extra keys a salted or multimodal block looks like a plain one: `stale`. Without
//! kinds for several groups a masked group may count: `stale`. Without the LoRA's name its blocks
//! are opaque, so that they are only not found: `partial`, from the first such block on. An
//! operator who knows that a feature is unused says so ([`Assumptions`]).

use warmroute_proto::{Tier, TierState, TierStates, Tiers};

use crate::checkpoint::{FieldReader, FieldWriter, Malformed};
use crate::wire::{LoraRef, StoredBlocks};

/// What the operator vouches for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Assumptions {
    /// No salts, multimodal items or prompt embeddings are used.
    pub no_extra_keys: bool,
    /// No LoRA adapters are used.
    pub no_lora: bool,
    /// All KV groups are main attention.
    pub main_attention_only: bool,
}

/// What is known of the engine's cache when a mirror begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The engine holds nothing: every batch from its first on will be seen.
    Empty,
    /// It may hold anything.
    Unknown,
}

#[derive(Clone, Debug)]
pub(super) struct Knowledge {
    tiers: Tiers<TierKnowledge>,
}

#[derive(Clone, Copy, Debug)]
struct TierKnowledge {
    /// The tier was empty when the mirror began to follow it.
    from_start: bool,
    missing: bool,
    doubt: bool,
    /// Blocks whose adapter has no name.
    unnamed_lora: bool,
    /// Blocks of an event without room for extra keys.
    lacks_extra_keys: bool,
    stored: bool,
    /// Its connector sends removals. It stays true for the engine's life.
    removes: bool,
}

impl Knowledge {
    pub(super) fn new(start: Start) -> Self {
        let tier = |tier| TierKnowledge {
            from_start: start == Start::Empty,
            missing: false,
            doubt: false,
            unnamed_lora: false,
            lacks_extra_keys: false,
            stored: false,
            removes: tier == Tier::Gpu,
        };
        Self {
            tiers: Tiers {
                gpu: tier(Tier::Gpu),
                cpu: tier(Tier::Cpu),
                disk: tier(Tier::Disk),
            },
        }
    }

    pub(super) fn save(&self, writer: &mut FieldWriter) {
        for tier in Tier::ALL {
            let TierKnowledge {
                from_start,
                missing,
                doubt,
                unnamed_lora,
                lacks_extra_keys,
                stored,
                removes,
            } = *self.tiers.get(tier);
            let flags = [
                from_start,
                missing,
                doubt,
                unnamed_lora,
                lacks_extra_keys,
                stored,
                removes,
            ];
            flags.iter().for_each(|&flag| writer.u8(u8::from(flag)));
        }
    }

    pub(super) fn load(reader: &mut FieldReader<'_>) -> Result<Self, Malformed> {
        let mut loaded = Self::new(Start::Unknown);
        for tier in Tier::ALL {
            *loaded.tiers.get_mut(tier) = TierKnowledge {
                from_start: reader.flag()?,
                missing: reader.flag()?,
                doubt: reader.flag()?,
                unnamed_lora: reader.flag()?,
                lacks_extra_keys: reader.flag()?,
                stored: reader.flag()?,
                removes: reader.flag()?,
            };
        }
        Ok(loaded)
    }

    /// The engine emptied its GPU memory. What its other tiers hold is not known any more.
    pub(super) fn cleared(&mut self) {
        self.forget();
        self.tiers.gpu.from_start = true;
    }

    /// Nothing is told any more, and what is held is not known.
    pub(super) fn forget(&mut self) {
        for tier in Tier::ALL {
            let known = self.tiers.get_mut(tier);
            *known = TierKnowledge {
                from_start: false,
                missing: false,
                doubt: false,
                unnamed_lora: false,
                lacks_extra_keys: false,
                stored: false,
                removes: known.removes,
            };
        }
    }

    pub(super) fn saw_store(&mut self, tier: Tier, stored: &StoredBlocks) {
        let known = self.tiers.get_mut(tier);
        known.stored = true;
        // In lower tiers a store that tells less only counts for blocks that are known by hash.
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

    pub(super) fn doubt_all(&mut self) {
        Tier::ALL.iter().for_each(|&tier| self.doubt(tier));
    }

    /// Every store was counted: a removal of something else contradicts that.
    pub(super) const fn is_whole(&self, tier: Tier) -> bool {
        let known = self.tiers.get(tier);
        known.from_start && !known.missing && !known.doubt
    }

    pub(super) fn states(
        &self,
        assume: Assumptions,
        has_orphans: impl Fn(Tier) -> bool,
        lacks_group_kinds: impl Fn(Tier) -> bool,
    ) -> TierStates {
        let state = |tier| {
            let known = self.tiers.get(tier);
            let doubt = known.doubt
                || (known.lacks_extra_keys && !assume.no_extra_keys)
                || (lacks_group_kinds(tier) && !assume.main_attention_only)
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
