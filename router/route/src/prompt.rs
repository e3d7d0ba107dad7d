//! A request's prompt for routing: its number of tokens and the hashes of its whole blocks.

use std::sync::Arc;

use warmroute_proto::hash::local_hashes;
use warmroute_proto::load::{SAMPLES_MAX, SampledPrefix, sampled_length};
use warmroute_proto::{BlockCut, BlockSize, LocalHash, Seed, WorkerId};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::prompt_form::PromptForm;

/// A rough size of text that is not tokenized.
pub const BYTES_PER_TOKEN: usize = 4;

/// Whether the engine may read this prompt's blocks from its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheReads {
    Allowed,
    /// The request needs a computed prompt (prompt logprobs): the engine computes all of it.
    Bypassed,
}

/// What a prompt's hashes are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptBasis {
    /// The tokens that the engine will have.
    Tokens,
    /// The text of a request whose tokens are not known. Equal hashes mean equal beginnings, for
    /// predictions and for what was sent; the index does not know them.
    Text,
}

/// The session that a request belongs to, hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionKey(pub(crate) u64);

impl SessionKey {
    /// `None` for an empty name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        (!name.is_empty()).then(|| Self(xxh3_64_with_seed(name.as_bytes(), 0)))
    }
}

/// A prompt; immutable, with consistent fields.
#[derive(Clone, Debug)]
pub struct Prompt {
    tokens: u32,
    cut: BlockCut,
    seed: Seed,
    blocks: Vec<LocalHash>,
    sampled: SampledPrefix,
    basis: PromptBasis,
    reads: CacheReads,
    session: Option<SessionKey>,
    /// `None` if reports say nothing about prompts of one form.
    form: Option<Arc<PromptForm>>,
    /// Workers that tokenize it differently.
    mismatched: Vec<WorkerId>,
    /// Its tokens in blocks of other cuts.
    other_cuts: Vec<Self>,
    /// The client sees the answer while it is made, and what it has seen is not made again: an engine
    /// that fails costs it the answer.
    is_shown: bool,
}

impl Prompt {
    /// Hashes a prompt's tokens.
    #[must_use]
    pub fn new(tokens: &[u32], cut: impl Into<BlockCut>, seed: Seed) -> Self {
        let cut = cut.into();
        let count = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let blocks = local_hashes(tokens, cut, seed);
        Self::of_blocks(count, cut, seed, blocks)
    }

    /// A prompt whose named blocks are hashed.
    #[must_use]
    pub fn of_blocks(
        tokens: u32,
        cut: impl Into<BlockCut>,
        seed: Seed,
        blocks: Vec<LocalHash>,
    ) -> Self {
        let sampled = SampledPrefix::of(&blocks);
        Self {
            tokens,
            cut: cut.into(),
            seed,
            blocks,
            sampled,
            basis: PromptBasis::Tokens,
            reads: CacheReads::Allowed,
            session: None,
            form: None,
            mismatched: Vec::new(),
            other_cuts: Vec::new(),
            is_shown: false,
        }
    }

    /// A prompt whose tokens are not known: its size is estimated, and its beginning is recognised
    /// by text. Parts of different requests are compared only if all parts before them are equal.
    #[must_use]
    pub fn of_text(
        parts: &[&[u8]],
        tokens_estimate: u32,
        block_size: BlockSize,
        seed: Seed,
    ) -> Self {
        let chunk_bytes = block_size.tokens().saturating_mul(BYTES_PER_TOKEN);
        let mut seed = seed.with_opaque(b"text").0;
        let mut chunks = Vec::new();
        let chunks_max = sampled_length(SAMPLES_MAX) as usize;
        for part in parts {
            for chunk in part
                .chunks_exact(chunk_bytes)
                .take(chunks_max - chunks.len())
            {
                chunks.push(LocalHash(xxh3_64_with_seed(chunk, seed)));
            }
            // The end of a part is a part of what follows.
            let rest = part.len() - part.len() % chunk_bytes;
            seed = xxh3_64_with_seed(&part[rest..], seed);
        }
        Self {
            sampled: SampledPrefix::of(&chunks),
            basis: PromptBasis::Text,
            ..Self::opaque(tokens_estimate, block_size)
        }
    }

    /// A prompt without tokens: an estimated size and no blocks. Routed by load only.
    #[must_use]
    pub fn opaque(tokens_estimate: u32, block_size: BlockSize) -> Self {
        Self::of_blocks(tokens_estimate, block_size, Seed::PLAIN, Vec::new())
    }

    #[must_use]
    pub fn with_reads(mut self, reads: CacheReads) -> Self {
        self.each_cut(|cut| cut.reads = reads);
        self
    }

    /// Only `self`, not its other cuts, names the session.
    #[must_use]
    pub const fn with_session(mut self, session: Option<SessionKey>) -> Self {
        self.session = session;
        self
    }

    /// Only `self`, not its other cuts.
    #[must_use]
    pub const fn with_shown(mut self, is_shown: bool) -> Self {
        self.is_shown = is_shown;
        self
    }

    /// Only `self`, not its other cuts, has the form.
    #[must_use]
    pub fn with_form(mut self, form: Option<Arc<PromptForm>>) -> Self {
        self.form = form;
        self
    }

    #[must_use]
    pub fn with_mismatched(mut self, mismatched: Vec<WorkerId>) -> Self {
        self.each_cut(|cut| cut.mismatched.clone_from(&mismatched));
        self
    }

    /// This prompt with the same tokens in blocks of other cuts, for workers that have those.
    #[must_use]
    pub fn with_other_cuts(mut self, cuts: Vec<Self>) -> Self {
        self.other_cuts = cuts;
        self
    }

    fn each_cut(&mut self, mut change: impl FnMut(&mut Self)) {
        self.other_cuts.iter_mut().for_each(&mut change);
        change(self);
    }

    /// The prompt in blocks of this cut. Without one of this cut, or with an unknown cut, `self`.
    #[must_use]
    pub fn cut(&self, wanted: Option<BlockCut>) -> &Self {
        let mut others = self.other_cuts.iter();
        let other = wanted.and_then(|wanted| others.find(|prompt| prompt.cut == wanted));
        other.unwrap_or(self)
    }

    /// All cuts, this one first.
    pub fn cuts(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(&self.other_cuts)
    }

    /// Whether the worker has the prompt's tokens, so that its blocks can be compared.
    #[must_use]
    pub fn is_tokenized_by(&self, worker: &WorkerId) -> bool {
        !self.mismatched.contains(worker)
    }

    #[must_use]
    pub const fn tokens(&self) -> u32 {
        self.tokens
    }

    #[must_use]
    pub const fn block_size(&self) -> BlockSize {
        self.cut.size
    }

    #[must_use]
    pub const fn block_cut(&self) -> BlockCut {
        self.cut
    }

    #[must_use]
    pub const fn seed(&self) -> Seed {
        self.seed
    }

    /// The named blocks, from depth 0. If empty, an index query is useless.
    #[must_use]
    pub fn blocks(&self) -> &[LocalHash] {
        &self.blocks
    }

    /// The blocks that a hit can have, from depth 0: all but that of the last token. A longer query
    /// would find resume points that the engine does not look at.
    #[must_use]
    pub fn hit_blocks(&self) -> &[LocalHash] {
        let by_tokens = self.tokens.saturating_sub(1) / self.block_tokens();
        let blocks = usize::try_from(by_tokens).unwrap_or(usize::MAX);
        &self.blocks[..blocks.min(self.blocks.len())]
    }

    #[must_use]
    pub const fn sampled(&self) -> &SampledPrefix {
        &self.sampled
    }

    #[must_use]
    pub const fn basis(&self) -> PromptBasis {
        self.basis
    }

    #[must_use]
    pub const fn is_shown(&self) -> bool {
        self.is_shown
    }

    #[must_use]
    pub const fn session(&self) -> Option<SessionKey> {
        self.session
    }

    #[must_use]
    pub const fn form(&self) -> Option<&Arc<PromptForm>> {
        self.form.as_ref()
    }

    #[must_use]
    pub const fn reads(&self) -> CacheReads {
        self.reads
    }

    /// Blocks of the prompt in a cache, the partial last one included.
    #[must_use]
    pub fn blocks_taken(&self) -> u32 {
        self.tokens.div_ceil(self.block_tokens())
    }

    /// Upper limit of the credit. The engine always computes the last token, so the last block of a
    /// prompt of whole blocks is never a hit.
    #[must_use]
    pub fn credit_max(&self) -> u32 {
        match (self.reads, self.basis) {
            (CacheReads::Bypassed, _) => 0,
            (CacheReads::Allowed, PromptBasis::Tokens) => {
                u32::try_from(self.hit_blocks().len()).unwrap_or(u32::MAX)
            }
            (CacheReads::Allowed, PromptBasis::Text) => sampled_length(self.sampled.hashes.len()),
        }
    }

    pub(crate) fn block_tokens(&self) -> u32 {
        u32::try_from(self.cut.size.tokens()).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(tokens: u32) -> Prompt {
        let tokens: Vec<u32> = (0..tokens).collect();
        Prompt::new(&tokens, BlockSize::new(16).unwrap(), Seed::PLAIN)
    }

    #[test]
    fn credit_ends_before_the_last_token() {
        for (tokens, credit) in [
            (0, 0),
            (1, 0),
            (16, 0),
            (17, 1),
            (32, 1),
            (33, 2),
            (1024, 63),
        ] {
            assert_eq!(prompt(tokens).credit_max(), credit, "{tokens} tokens");
        }
    }

    #[test]
    fn what_holds_for_a_prompt_holds_for_each_cut() {
        let cut = Prompt::new(&[0; 100], BlockSize::new(32).unwrap(), Seed::PLAIN);
        let prompt = prompt(100).with_other_cuts(vec![cut]);
        assert_eq!(
            prompt.cut(BlockSize::new(32).map(Into::into)).credit_max(),
            3
        );
        let prompt = prompt
            .with_reads(CacheReads::Bypassed)
            .with_mismatched(vec!["w".into()]);
        assert_eq!(prompt.cuts().count(), 2);
        for cut in prompt.cuts() {
            assert_eq!(cut.credit_max(), 0);
            assert!(!cut.is_tokenized_by(&"w".into()));
        }
    }

    #[test]
    fn a_partial_block_is_taken_but_not_hashed() {
        let prompt = prompt(40);
        assert_eq!(prompt.blocks().len(), 2);
        assert_eq!(prompt.blocks_taken(), 3);
    }

    #[test]
    fn a_prompt_that_bypasses_the_cache_has_no_credit() {
        let prompt = prompt(64).with_reads(CacheReads::Bypassed);
        assert_eq!(prompt.credit_max(), 0);
    }

    #[test]
    fn a_prompt_of_text_shares_chunks_until_it_differs() {
        let size = BlockSize::new(16).unwrap();
        let of = |parts: &[&[u8]]| Prompt::of_text(parts, 100, size, Seed::PLAIN);
        let common = |one: &Prompt, other: &Prompt| {
            let both = one.sampled().hashes.iter().zip(&other.sampled().hashes);
            both.take_while(|(one, other)| one == other).count()
        };
        let text = [b'a'; 64 * 3 + 10];
        let longer = [
            &text[..],
            b"and another turn of the conversation, longer than a chunk, so",
        ];
        let (first, second) = (of(&[&text]), of(&[&longer.concat()]));
        assert_eq!(
            (first.sampled().hashes.len(), common(&first, &second)),
            (3, 3)
        );
        assert_eq!((first.blocks().len(), first.credit_max()), (0, 3));
        let with_tools = of(&[b"[tools]", &text]);
        assert_eq!(common(&first, &with_tools), 0, "other tools come before it");
        assert_eq!(common(&of(&[b"[tools]", &text]), &with_tools), 3);
        let seed = Seed::new(None, Some("tenant"));
        let salted = Prompt::of_text(&[&text], 100, size, seed);
        assert_eq!(common(&first, &salted), 0);
    }

    #[test]
    fn an_opaque_prompt_has_a_size_and_no_credit() {
        let prompt = Prompt::opaque(1000, BlockSize::new(16).unwrap());
        assert_eq!(prompt.blocks_taken(), 63);
        assert_eq!(prompt.credit_max(), 0);
    }
}
