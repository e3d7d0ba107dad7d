//! Requests, and the engine's state of each.

use std::sync::Arc;

use warmroute_proto::hash::{PlacedItem, item_hash, items_within};
use warmroute_proto::{BlockCut, LocalHash, PrefixHash, Seed};

use super::event::{ExtraKey, mix};

/// Request id within one engine, in order of submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineRequest {
    pub prompt: Vec<u32>,
    /// Number of generated tokens, unless the model's length ends them before.
    pub max_tokens: usize,
    pub lora_name: Option<Arc<str>>,
    /// Where its adapter was loaded from, which the hashes of its blocks cover; empty for the first
    /// such place.
    pub lora_path: Arc<str>,
    pub cache_salt: Option<Arc<str>>,
    /// They follow each other.
    pub items: Vec<PlacedItem>,
}

/// Prompt tokens found in the cache when the request was first scheduled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedTokens {
    pub gpu: usize,
    /// After the GPU run, in the CPU tier.
    pub cpu: usize,
}

impl CachedTokens {
    /// As `usage.prompt_tokens_details.cached_tokens` reports it.
    #[must_use]
    pub const fn total(self) -> usize {
        self.gpu + self.cpu
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// `max_tokens` or the model's length was reached.
    Length,
}

/// A request in the scheduler.
///
/// Invariants: `keys` has every block of `tokens` that has a name; `table` covers at least `computed` tokens
/// while running and is empty while waiting; the first `cached_blocks` of it are cached.
pub(super) struct EngineSequence {
    pub(super) id: RequestId,
    /// The prompt, then what was generated.
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_len: usize,
    pub(super) max_tokens: usize,
    pub(super) keys: Vec<PrefixHash>,
    pub(super) table: Vec<u32>,
    pub(super) computed: usize,
    pub(super) cached_blocks: usize,
    /// Tokens that the current step computes for it.
    pub(super) scheduled: usize,
    pub(super) preempted: bool,
    pub(super) origin: Origin,
    /// Stands for all tokens so far.
    tokens_mix: u64,
}

/// Inputs of a sequence's block hashes besides tokens.
pub(super) struct Origin {
    pub(super) lora_name: Option<Arc<str>>,
    cache_salt: Option<Arc<str>>,
    items: Vec<PlacedItem>,
    seed: Seed,
}

impl EngineSequence {
    pub(super) fn new(id: RequestId, request: EngineRequest, cut: BlockCut) -> Self {
        let seed = Seed::new(request.lora_name.as_deref(), request.cache_salt.as_deref());
        let origin = Origin {
            seed: match request.lora_path.as_bytes() {
                [] => seed,
                path => seed.with_opaque(path),
            },
            lora_name: request.lora_name.filter(|name| !name.is_empty()),
            cache_salt: request.cache_salt.filter(|salt| !salt.is_empty()),
            items: request.items,
        };
        let prompt_len = request.prompt.len();
        let mut sequence = Self {
            id,
            tokens: request.prompt,
            prompt_len,
            max_tokens: request.max_tokens,
            keys: Vec::with_capacity(cut.blocks(prompt_len)),
            table: Vec::new(),
            computed: 0,
            cached_blocks: 0,
            scheduled: 0,
            preempted: false,
            origin,
            tokens_mix: 0,
        };
        sequence.name_blocks(cut);
        sequence.tokens_mix = sequence.mix_of_tokens(cut);
        sequence
    }

    pub(super) const fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Appends a token that depends only on the tokens before it, wherever the prompt ends: a prompt
    /// that ends with generated tokens is continued as the one that they were generated from.
    pub(super) fn generate(&mut self, vocabulary: &[u32], cut: BlockCut) -> u32 {
        let choices = vocabulary.len().max(1) as u64;
        #[expect(clippy::cast_possible_truncation, reason = "below the slice's length")]
        let token = vocabulary
            .get((mix(!self.tokens_mix) % choices) as usize)
            .copied()
            .unwrap_or(0);
        self.tokens.push(token);
        if self.keys.len() < cut.blocks(self.tokens.len()) {
            self.name_blocks(cut);
            self.tokens_mix = self.mix_of_tokens(cut);
        } else {
            self.tokens_mix = mix(self.tokens_mix ^ u64::from(token));
        }
        token
    }

    pub(super) fn parent_of(&self, block: usize) -> Option<PrefixHash> {
        block.checked_sub(1).map(|before| self.keys[before])
    }

    pub(super) fn extra_keys(&self, block: usize, cut: BlockCut) -> Vec<ExtraKey> {
        self.origin.extra_keys(block, cut)
    }

    /// The tokens behind a named block that its name covers.
    pub(super) fn lookahead(&self, block: usize, cut: BlockCut) -> &[u32] {
        let end = (block + 1) * cut.size.tokens();
        &self.tokens[end..end + cut.lookahead as usize]
    }

    fn name_blocks(&mut self, cut: BlockCut) {
        let size = cut.size.tokens();
        for block in self.keys.len()..cut.blocks(self.tokens.len()) {
            let start = block * size;
            let covered = start..start + cut.covered_tokens();
            let tokens = &self.tokens[covered.clone()];
            let local = if self.origin.items.is_empty() {
                LocalHash::of_block(tokens, &[], self.origin.seed)
            } else {
                let items = items_within(&self.origin.items, covered);
                let hash = |i: &PlacedItem| item_hash(&i.identifier, i.offset_from(start));
                LocalHash::of_block(
                    tokens,
                    &items.map(hash).collect::<Vec<_>>(),
                    self.origin.seed,
                )
            };
            let parent = self.keys.last().copied();
            self.keys.push(PrefixHash::after(parent, local));
        }
    }

    fn mix_of_tokens(&self, cut: BlockCut) -> u64 {
        let whole = self.keys.len() * cut.size.tokens();
        let start = self.keys.last().map_or(self.origin.seed.0, |key| key.0);
        self.tokens[whole..]
            .iter()
            .fold(start, |sum, &token| mix(sum ^ u64::from(token)))
    }
}

impl Origin {
    fn extra_keys(&self, block: usize, cut: BlockCut) -> Vec<ExtraKey> {
        let mut keys = Vec::new();
        keys.extend(self.lora_name.clone().map(ExtraKey::Lora));
        let start = block * cut.size.tokens();
        let items = items_within(&self.items, start..start + cut.covered_tokens());
        keys.extend(items.map(|item| ExtraKey::Item {
            identifier: Arc::clone(&item.identifier),
            offset: item.offset_from(start),
        }));
        if block == 0 {
            keys.extend(self.cache_salt.clone().map(ExtraKey::Salt));
        }
        keys
    }
}
