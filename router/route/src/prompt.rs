//! A request's prompt for routing: its number of tokens and the hashes of its whole blocks.

use warmroute_proto::hash::local_hashes;
use warmroute_proto::load::SampledPrefix;
use warmroute_proto::{BlockSize, LocalHash, Seed, WorkerId};

/// Whether the engine may read this prompt's blocks from its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheReads {
    Allowed,
    /// The request needs a computed prompt (prompt logprobs): the engine computes all of it.
    Bypassed,
}

/// A prompt; immutable, with consistent fields.
#[derive(Clone, Debug)]
pub struct Prompt {
    tokens: u32,
    block_size: BlockSize,
    seed: Seed,
    blocks: Vec<LocalHash>,
    sampled: SampledPrefix,
    reads: CacheReads,
    /// Workers that tokenize it differently.
    mismatched: Vec<WorkerId>,
}

impl Prompt {
    /// Hashes a prompt's tokens.
    #[must_use]
    pub fn new(tokens: &[u32], block_size: BlockSize, seed: Seed) -> Self {
        let count = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let blocks = local_hashes(tokens, block_size, seed);
        Self::of_blocks(count, block_size, seed, blocks)
    }

    /// A prompt whose whole blocks are hashed.
    #[must_use]
    pub fn of_blocks(
        tokens: u32,
        block_size: BlockSize,
        seed: Seed,
        blocks: Vec<LocalHash>,
    ) -> Self {
        let sampled = SampledPrefix::of(&blocks);
        Self {
            tokens,
            block_size,
            seed,
            blocks,
            sampled,
            reads: CacheReads::Allowed,
            mismatched: Vec::new(),
        }
    }

    /// A prompt without tokens: an estimated size and no blocks. Routed by load only.
    #[must_use]
    pub fn opaque(tokens_estimate: u32, block_size: BlockSize) -> Self {
        Self::of_blocks(tokens_estimate, block_size, Seed::PLAIN, Vec::new())
    }

    #[must_use]
    pub const fn with_reads(mut self, reads: CacheReads) -> Self {
        self.reads = reads;
        self
    }

    #[must_use]
    pub fn with_mismatched(mut self, mismatched: Vec<WorkerId>) -> Self {
        self.mismatched = mismatched;
        self
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
        self.block_size
    }

    #[must_use]
    pub const fn seed(&self) -> Seed {
        self.seed
    }

    /// The whole blocks, from depth 0. If empty, an index query is useless.
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
        match self.reads {
            CacheReads::Allowed => u32::try_from(self.hit_blocks().len()).unwrap_or(u32::MAX),
            CacheReads::Bypassed => 0,
        }
    }

    pub(crate) fn block_tokens(&self) -> u32 {
        u32::try_from(self.block_size.tokens()).unwrap_or(u32::MAX)
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
    fn an_opaque_prompt_has_a_size_and_no_credit() {
        let prompt = Prompt::opaque(1000, BlockSize::new(16).unwrap());
        assert_eq!(prompt.blocks_taken(), 63);
        assert_eq!(prompt.credit_max(), 0);
    }
}
