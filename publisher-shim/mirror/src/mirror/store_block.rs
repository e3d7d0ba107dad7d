//! One block of a store, and the seeds that separate equal tokens.

use warmroute_proto::{LocalHash, Seed};

use super::orphans::BlockContent;
use crate::wire::{BlockKeys, EngineHash, LoraRef, StoredBlocks};

/// Makes blocks opaque that the engine publishes in token pairs, which no router hashes.
const PAIRS: u64 = 0x7061_6972_735f_6f66;

/// One block of a store, with its hash behind a block of the seed `before`.
#[derive(Clone, Copy)]
pub(super) struct StoreBlock<'a> {
    pub(super) hash: EngineHash,
    tokens: &'a [u32],
    /// Tokens behind the block that its name covers.
    lookahead: &'a [u32],
    keys: Option<&'a BlockKeys>,
    is_pairs: bool,
    before: Seed,
    pub(super) seed: Seed,
    pub(super) local: LocalHash,
}

impl<'a> StoreBlock<'a> {
    pub(super) fn new(
        hash: EngineHash,
        tokens: &'a [u32],
        lookahead: &'a [u32],
        keys: Option<&'a BlockKeys>,
        is_pairs: bool,
        before: Seed,
    ) -> Self {
        let items = keys.map_or(&[][..], |keys| keys.items.as_slice());
        let seed = with_opaques(before, opaques(keys, is_pairs));
        Self {
            hash,
            tokens,
            lookahead,
            keys,
            is_pairs,
            before,
            seed,
            local: if lookahead.is_empty() {
                LocalHash::of_block(tokens, items, seed)
            } else {
                LocalHash::of_block(&[tokens, lookahead].concat(), items, seed)
            },
        }
    }

    /// The block behind one of another seed.
    pub(super) fn behind(&self, before: Seed) -> Self {
        if before == self.before {
            return *self;
        }
        let (keys, is_pairs) = (self.keys, self.is_pairs);
        Self::new(
            self.hash,
            self.tokens,
            self.lookahead,
            keys,
            is_pairs,
            before,
        )
    }

    pub(super) fn content(&self) -> BlockContent {
        BlockContent {
            tokens: [self.tokens, self.lookahead].concat(),
            items: self.keys.map_or(&[][..], |keys| &keys.items).into(),
            opaque: opaques(self.keys, self.is_pairs).collect(),
        }
    }
}

/// The keys that make a block opaque, in a fixed order.
fn opaques(keys: Option<&BlockKeys>, is_pairs: bool) -> impl Iterator<Item = u64> + use<> {
    let pairs = is_pairs.then_some(PAIRS);
    let key = keys.and_then(|keys| keys.opaque);
    pairs.into_iter().chain(key)
}

pub(super) fn with_opaques(seed: Seed, opaques: impl Iterator<Item = u64>) -> Seed {
    opaques.fold(seed, |seed, key| seed.with_opaque(&key.to_le_bytes()))
}

/// The seed of a sequence's first block, without the keys that make that block opaque.
pub(super) fn root_seed(stored: &StoredBlocks) -> Seed {
    let salt = stored.salt.as_deref();
    match &stored.lora {
        LoraRef::None => Seed::new(None, salt),
        LoraRef::Named(name) => Seed::new(Some(name), salt),
        // No request can name the engine's number of an adapter.
        LoraRef::Unnamed(id) => Seed::new(None, salt).with_opaque(&id.to_le_bytes()),
    }
}
