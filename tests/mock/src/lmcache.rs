//! The CPU tier as LMCache keeps and publishes it: chunks of several blocks. Written from
//! `publisher-shim/mirror/testdata/lmcache056.bin`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use warmroute_proto::BlockSize;
use warmroute_sim::sim::{CacheEvent, EngineHash, Medium, StoredBlocks};

pub(crate) const CHUNK_TOKENS: usize = 256;

/// The chunks whose blocks are all in CPU memory.
pub(crate) struct Chunks {
    /// Blocks of a chunk.
    blocks: usize,
    /// Every block ever stored on the GPU.
    known: BTreeMap<EngineHash, Arc<KnownBlock>>,
    held: BTreeSet<EngineHash>,
    /// By their last block.
    published: BTreeSet<EngineHash>,
}

struct KnownBlock {
    parent: Option<EngineHash>,
    depth: usize,
    tokens: Vec<u32>,
}

impl Chunks {
    pub(crate) fn new(blocks: usize) -> Self {
        Self {
            blocks,
            known: BTreeMap::new(),
            held: BTreeSet::new(),
            published: BTreeSet::new(),
        }
    }

    /// The events with the CPU tier's blocks as chunks.
    pub(crate) fn rewrite(&mut self, events: &[CacheEvent]) -> Vec<CacheEvent> {
        let mut rewritten = Vec::new();
        for event in events {
            match event {
                CacheEvent::Stored(stored) if stored.medium == Medium::Cpu => {
                    self.held.extend(&stored.hashes);
                }
                CacheEvent::Removed {
                    hash,
                    medium: Medium::Cpu,
                    ..
                } => {
                    self.held.remove(hash);
                }
                CacheEvent::Stored(stored) => {
                    self.learn(stored);
                    rewritten.push(event.clone());
                }
                CacheEvent::Removed { .. } | CacheEvent::Cleared => rewritten.push(event.clone()),
            }
        }
        rewritten.extend(self.changes());
        rewritten
    }

    fn learn(&mut self, stored: &StoredBlocks) {
        let mut parent = stored.parent;
        let blocks = stored.tokens.chunks_exact(stored.block_size.tokens());
        for (&hash, tokens) in stored.hashes.iter().zip(blocks) {
            let before = parent.and_then(|parent| self.known.get(&parent));
            let block = KnownBlock {
                parent,
                depth: before.map_or(0, |before| before.depth + 1),
                tokens: tokens.to_vec(),
            };
            self.known.insert(hash, Arc::new(block));
            parent = Some(hash);
        }
    }

    fn changes(&mut self) -> Vec<CacheEvent> {
        let last_blocks = self.held.iter().filter(|hash| {
            let depth = self.known.get(hash).map(|block| block.depth);
            depth.is_some_and(|depth| (depth + 1).is_multiple_of(self.blocks))
        });
        // A chunk comes after the one before it.
        let mut whole: Vec<(usize, EngineHash, StoredBlocks)> = last_blocks
            .filter_map(|&last| Some((self.known[&last].depth, last, self.chunk(last)?)))
            .collect();
        whole.sort_by_key(|(depth, ..)| *depth);
        let now: BTreeSet<EngineHash> = whole.iter().map(|(_, last, _)| *last).collect();
        let gone: Vec<EngineHash> = self.published.difference(&now).copied().collect();
        let removed = gone.into_iter().map(|last| CacheEvent::Removed {
            hash: chunk_hash(last),
            medium: Medium::Cpu,
            group: 0,
        });
        let before = std::mem::replace(&mut self.published, now);
        let new = whole
            .into_iter()
            .filter(|(_, last, _)| !before.contains(last));
        removed
            .chain(new.map(|(_, _, chunk)| CacheEvent::Stored(chunk)))
            .collect()
    }

    /// The chunk that ends with a block, if all of its blocks are held.
    fn chunk(&self, last: EngineHash) -> Option<StoredBlocks> {
        let mut blocks = Vec::new();
        let mut at = Some(last);
        for _ in 0..self.blocks {
            let hash = at.filter(|hash| self.held.contains(hash))?;
            let block = self.known.get(&hash)?;
            blocks.push(Arc::clone(block));
            at = block.parent;
        }
        let tokens = blocks.iter().rev().flat_map(|block| &block.tokens);
        let tokens: Vec<u32> = tokens.copied().collect();
        Some(StoredBlocks {
            hashes: vec![chunk_hash(last)],
            parent: at.map(chunk_hash),
            block_size: BlockSize::new(u32::try_from(tokens.len()).ok()?)?,
            tokens,
            extra_keys: None,
            lookahead: None,
            lora_name: None,
            medium: Medium::Cpu,
            group: 0,
            kind: warmroute_sim::sim::GroupKind::FullAttention,
        })
    }
}

/// A chunk is not named as its last block is.
const fn chunk_hash(last: EngineHash) -> EngineHash {
    EngineHash(last.0.rotate_left(17) ^ 0x1_ac4e)
}
