//! How much the mirror knows, tier by tier, and which state it may therefore claim.
//!
//! Two kinds of ignorance are distinguished. *Missing*: the engine may hold blocks that are not in
//! the mirror (`partial`). *Doubt*: the mirror may hold blocks that the engine does not (`stale`).
//!
//! If an engine's events lack a field that distinguishes equal tokens, the state depends on what can
//! go wrong. Without extra keys a salted or multimodal block looks like a plain one: `stale`.
//! Without kinds for several groups a masked group may count: `stale`. Without the LoRA's name its
//! blocks are opaque and only not found: `partial`, from the first such block on. A connector that is
//! not known to publish removals may hold less than it stored: `unverified`, in CPU memory until
//! the first removal that names a KV group.
//! An engine whose metrics show a KV connector may hold blocks in a lower tier of which no event
//! came: `partial`. An engine that has none has no lower tiers: they are `absent`.
//! An operator who knows better can declare it ([`Assumptions`]).

use warmroute_proto::{Tier, TierState, Tiers};

use crate::fields::{Field, FieldReader, Malformed};
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
    /// Connectors publish what they remove from CPU memory and storage.
    pub removals: bool,
}

/// Why a tier's state is not complete, the gravest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TierLimit {
    /// More KV groups than are tracked.
    Groups,
    /// Stores have no field for extra keys.
    NoExtraKeys,
    /// Several KV groups, some without a kind.
    NoGroupKinds,
    /// The connector is not known to publish removals.
    NoRemovals,
    /// An event that is not understood may have removed blocks.
    UnknownEvent,
    /// The connector keeps chunks of several blocks, and a hit needs all chunks before it.
    Chunks,
    /// Stores do not identify their blocks.
    Unidentified,
    /// Blocks of an adapter without a name.
    UnnamedLora,
    /// A block was removed that no event stored.
    Unpaired,
    /// Blocks may be missing: from before the mirror began, without a known parent, or undecodable.
    History,
    /// The engine has a KV connector, and no event has named a block of this tier.
    Silent,
}

impl TierLimit {
    #[must_use]
    pub const fn state(self) -> TierState {
        match self {
            Self::Groups | Self::NoExtraKeys | Self::NoGroupKinds => TierState::Stale,
            Self::NoRemovals | Self::UnknownEvent | Self::Chunks => TierState::Unverified,
            Self::Unidentified
            | Self::UnnamedLora
            | Self::Unpaired
            | Self::History
            | Self::Silent => TierState::Partial,
        }
    }

    /// The reason and what helps, for the operator's log.
    #[must_use]
    pub const fn cause(self) -> &'static str {
        match self {
            Self::Groups => "no credit: it has more KV groups than are tracked",
            Self::NoExtraKeys => {
                "no credit: its events do not carry salts and multimodal items; if none are used, \
                 set --assume no-extra-keys"
            }
            Self::NoGroupKinds => {
                "no credit: its events do not carry the kinds of its KV groups; if all are main \
                 attention, set --assume main-attention-only"
            }
            Self::NoRemovals => {
                "its connector is not known to publish all removals: credit is unverified; if it \
                 does, set --assume removals"
            }
            Self::UnknownEvent => {
                "it sent an event that this version does not know: credit is unverified until it \
                 clears its cache"
            }
            Self::Chunks => {
                "its connector keeps chunks of several blocks: credit is unverified, as a hit needs \
                 all chunks before it"
            }
            Self::Unidentified => {
                "some stored blocks get no credit: GPU memory did not hold them then, or a hit needs \
                 more than the events carry; if they are chunks of a connector, and no salts, \
                 multimodal items or adapters are used, set --assume no-extra-keys,no-lora"
            }
            Self::UnnamedLora => "blocks of LoRA adapters get no credit: events do not name them",
            Self::Unpaired => {
                "it removed a block that it did not store: other such blocks get no credit"
            }
            Self::History => "blocks that it held before get no credit",
            Self::Silent => {
                "its KV connector has published no block of this tier, which may hold some: if it has \
                 the tier, look why its events do not arrive"
            }
        }
    }
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
    /// Blocks were stored that the event does not identify.
    unidentified: bool,
    /// A block was removed that no event stored, though all were seen.
    unpaired: bool,
    /// An event that is not understood may have removed blocks.
    unknown_event: bool,
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
                unidentified,
                unpaired,
                unknown_event,
                stored,
                removes,
            } = self.tiers.get(tier);
            let flags = [
                from_start,
                missing,
                doubt,
                unnamed_lora,
                lacks_extra_keys,
                unidentified,
                unpaired,
                unknown_event,
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
                unidentified: from.read()?,
                unpaired: from.read()?,
                unknown_event: from.read()?,
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
        known.removes |= stored.reports_removals;
        known.unnamed_lora |= matches!(stored.lora, LoraRef::Unnamed(_));
    }

    /// A removal does not show that all are published if a server behind the connector may lose
    /// events, which then name no KV group, or in storage, which others may change.
    pub(super) const fn saw_removal(&mut self, tier: Tier, names_group: bool) {
        if matches!(tier, Tier::Cpu) && names_group {
            self.tiers.cpu.removes = true;
        }
    }

    /// A store did not identify its block.
    pub(super) const fn miss_unidentified(&mut self, tier: Tier) {
        let known = self.tiers.get_mut(tier);
        known.missing = true;
        known.unidentified = true;
    }

    /// Removals of the tier are published, as far as is known.
    pub(super) const fn sees_removals(&self, tier: Tier, assume: Assumptions) -> bool {
        // A checkpoint of an earlier version may say so of storage.
        assume.removals || self.tiers.get(tier).removes && !matches!(tier, Tier::Disk)
    }

    pub(super) const fn miss(&mut self, tier: Tier) {
        self.tiers.get_mut(tier).missing = true;
    }

    pub(super) fn miss_all(&mut self) {
        Tier::ALL.iter().for_each(|&tier| self.miss(tier));
    }

    /// A block was removed that is not held: its store was missed, unless it was from before.
    pub(super) const fn miss_pair(&mut self, tier: Tier) {
        let known = self.tiers.get_mut(tier);
        known.unpaired |= known.from_start && !known.missing;
        known.missing = true;
    }

    /// An event that is not understood may have removed blocks of a tier, or stored some.
    pub(super) const fn distrust(&mut self, tier: Tier) {
        let known = self.tiers.get_mut(tier);
        known.unknown_event = true;
        known.missing = true;
    }

    pub(super) const fn doubt(&mut self, tier: Tier) {
        self.tiers.get_mut(tier).doubt = true;
    }

    /// The engine has no such tier.
    pub(super) fn is_absent(&self, tier: Tier, connects: Option<bool>) -> bool {
        tier != Tier::Gpu && connects == Some(false) && !self.tiers.get(tier).stored
    }

    /// Every store was counted.
    const fn is_whole(&self, tier: Tier) -> bool {
        let known = self.tiers.get(tier);
        known.from_start && !known.missing && !known.doubt
    }

    /// The gravest reason why a tier is not complete.
    pub(super) fn limit(
        &self,
        tier: Tier,
        assume: Assumptions,
        connects: Option<bool>,
        has_orphans: bool,
        lacks_kinds: bool,
    ) -> Option<TierLimit> {
        let known = self.tiers.get(tier);
        // Stores in lower tiers are identified by those in GPU memory.
        let lacks_extra_keys = known.stored && self.tiers.gpu.lacks_extra_keys;
        if known.doubt {
            Some(TierLimit::Groups)
        } else if lacks_extra_keys && !assume.no_extra_keys {
            Some(TierLimit::NoExtraKeys)
        } else if lacks_kinds && !assume.main_attention_only {
            Some(TierLimit::NoGroupKinds)
        } else if known.stored && !self.sees_removals(tier, assume) {
            Some(TierLimit::NoRemovals)
        } else if known.stored && known.unknown_event {
            Some(TierLimit::UnknownEvent)
        } else if known.unidentified {
            Some(TierLimit::Unidentified)
        } else if known.unnamed_lora && !assume.no_lora {
            Some(TierLimit::UnnamedLora)
        } else if known.unpaired {
            Some(TierLimit::Unpaired)
        } else if let (Some(connects), false) = (connects, tier == Tier::Gpu || known.stored) {
            // A tier that does not exist holds nothing, whatever was before.
            connects.then_some(TierLimit::Silent)
        } else if !self.is_whole(tier) || has_orphans {
            Some(TierLimit::History)
        } else {
            None
        }
    }
}
