//! The simulated index: engine events folded into the indexer's tree.
//!
//! [`EngineMirror`] does the shim's work for the engine model: it counts physical copies,
//! translates engine hashes and emits net changes. The engine model publishes one full-attention
//! group and loses no event, so numbering and proofs are not simulated and every source is `exact`.
//! Answers lag behind the engines.

use rustc_hash::FxHashMap;
use warmroute_index::tree::{ChangeError, SourceNumber, TierMask, Tree};
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::query::{IndexAnswer, SourceAnswer, SourceState};
use warmroute_proto::{
    Change, Generation, LocalHash, LogPosition, PrefixHash, RecordNumber, Seed, Source,
    StreamIdentity, Tier, Tiers,
};

use crate::sim::{CacheEvent, EngineHash, StoredBlocks};

/// Blocks of one engine, by its hashes.
#[derive(Default)]
pub(super) struct EngineMirror {
    held: FxHashMap<EngineHash, HeldCopies>,
}

struct HeldCopies {
    prefix: PrefixHash,
    copies: u32,
}

/// An event that contradicts mirror or tree: a defect of the engine model.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum Contradiction {
    #[error("{0:?} is not held and removed or built upon")]
    NotHeld(EngineHash),
    #[error("the cache was cleared, which no request asks for")]
    Cleared,
    #[error(transparent)]
    Tree(#[from] ChangeError),
}

impl EngineMirror {
    /// Net changes of a step's events.
    pub(super) fn take(&mut self, events: &[CacheEvent]) -> Result<Vec<Change>, Contradiction> {
        let mut changes = Vec::new();
        for event in events {
            match event {
                CacheEvent::Stored(stored) => self.store(stored, &mut changes)?,
                CacheEvent::Removed { hash, .. } => self.remove(*hash, &mut changes)?,
                CacheEvent::Cleared => return Err(Contradiction::Cleared),
            }
        }
        Ok(changes)
    }

    /// Held blocks change nothing and split the others into runs.
    fn store(
        &mut self,
        stored: &StoredBlocks,
        changes: &mut Vec<Change>,
    ) -> Result<(), Contradiction> {
        let mut parent = match stored.parent {
            None => None,
            Some(hash) => {
                let held = self.held.get(&hash);
                Some(held.ok_or(Contradiction::NotHeld(hash))?.prefix)
            }
        };
        let mut run: Option<(Option<PrefixHash>, Vec<LocalHash>)> = None;
        let blocks = stored.tokens.chunks_exact(stored.block_size.tokens());
        for (&hash, tokens) in stored.hashes.iter().zip(blocks) {
            if let Some(held) = self.held.get_mut(&hash) {
                held.copies += 1;
                parent = Some(held.prefix);
                changes.extend(run.take().map(stored_run));
                continue;
            }
            let local = LocalHash::of_block(tokens, &[], Seed::PLAIN);
            let prefix = PrefixHash::after(parent, local);
            self.held.insert(hash, HeldCopies { prefix, copies: 1 });
            run.get_or_insert_with(|| (parent, Vec::new()))
                .1
                .push(local);
            parent = Some(prefix);
        }
        changes.extend(run.map(stored_run));
        Ok(())
    }

    fn remove(&mut self, hash: EngineHash, changes: &mut Vec<Change>) -> Result<(), Contradiction> {
        let held = self.held.get_mut(&hash);
        let held = held.ok_or(Contradiction::NotHeld(hash))?;
        held.copies -= 1;
        if held.copies > 0 {
            return Ok(());
        }
        let prefix = held.prefix;
        self.held.remove(&hash);
        if let Some(Change::Removed { blocks, .. }) = changes.last_mut() {
            blocks.push(prefix);
        } else {
            changes.push(Change::Removed {
                blocks: vec![prefix],
                tier: Tier::Gpu,
            });
        }
        Ok(())
    }
}

fn stored_run((parent, blocks): (Option<PrefixHash>, Vec<LocalHash>)) -> Change {
    Change::Stored {
        parent,
        blocks,
        tier: Tier::Gpu,
    }
}

/// All engines' blocks in one tree.
pub(super) struct SimIndex {
    tree: Tree,
    sources: Vec<(Source, SourceNumber)>,
    /// Records applied per source.
    applied: Vec<u64>,
    position: u64,
}

const LOG: StreamIdentity = StreamIdentity {
    created_unix_ns: 0,
    nonce: 0,
};

impl SimIndex {
    #[must_use]
    pub(super) fn new(sources: impl IntoIterator<Item = Source>) -> Self {
        let mut tree = Tree::new();
        let sources: Vec<_> = sources
            .into_iter()
            .map(|source| (source, tree.open()))
            .collect();
        Self {
            tree,
            applied: vec![0; sources.len()],
            sources,
            position: 0,
        }
    }

    /// Applies the next record of a source, by its index.
    pub(super) fn apply(&mut self, at: usize, changes: &[Change]) -> Result<(), Contradiction> {
        for change in changes {
            self.tree.apply(self.sources[at].1, change)?;
        }
        self.applied[at] += 1;
        self.position += 1;
        Ok(())
    }

    #[must_use]
    pub(super) fn answer(&self, blocks: &[LocalHash]) -> IndexAnswer {
        let chain: Vec<PrefixHash> = prefix_hashes(None, blocks).collect();
        let allowed: Vec<_> = self
            .sources
            .iter()
            .map(|(_, number)| (*number, TierMask::ALL))
            .collect();
        let runs = self.tree.lookup_chain(&chain, &allowed);
        let sources = self.sources.iter().zip(&self.applied).zip(runs);
        let sources = sources.map(|(((source, _), &applied), run)| SourceAnswer {
            source: source.clone(),
            generation: Generation(1),
            number: applied.checked_sub(1).map(RecordNumber),
            engine_seq: None,
            states: Tiers::all(SourceState::Exact),
            reason: None,
            proof_age_ms: 0,
            run,
        });
        IndexAnswer::Runs {
            log: LOG,
            position: LogPosition(self.position),
            sources: sources.collect(),
        }
    }

    /// All prefixes of a source, sorted.
    #[cfg(test)]
    pub(super) fn held(&self, at: usize) -> Vec<PrefixHash> {
        let held = self.tree.held(self.sources[at].1);
        let mut held: Vec<PrefixHash> = held.map(|(prefix, _)| prefix).collect();
        held.sort_unstable();
        held
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{EngineConfig, EngineModel, EngineRequest};
    use proptest::prelude::*;
    use warmroute_proto::{BlockSize, DpRank};

    fn source() -> Source {
        Source {
            worker: "w".into(),
            dp_rank: DpRank(0),
        }
    }

    proptest! {
        /// After each step the index holds what the engine holds.
        #[test]
        fn the_index_is_the_engines_cache(
            prompts in proptest::collection::vec((0_u32..3, 1_usize..40, 1_usize..9), 1..40),
            blocks in 12_u32..40,
        ) {
            let mut engine = EngineModel::new(EngineConfig::new(BlockSize::new(4).unwrap(), blocks));
            let (mut mirror, mut index) = (EngineMirror::default(), SimIndex::new([source()]));
            for batch in prompts.chunks(3) {
                for &(kind, tokens, max_tokens) in batch {
                    let prompt = (0..).map(|at| at + 1000 * kind).take(tokens).collect();
                    let request = EngineRequest { prompt, max_tokens, ..EngineRequest::default() };
                    prop_assume!(engine.submit(request).is_ok());
                }
                while engine.has_requests() {
                    let changes = mirror.take(&engine.step().events).unwrap();
                    index.apply(0, &changes).unwrap();
                    let held: Vec<PrefixHash> = engine.held().iter().map(|h| h.prefix).collect();
                    prop_assert_eq!(index.held(0), held);
                }
            }
        }
    }

    #[test]
    fn an_answer_names_every_source_and_what_it_holds() {
        let sources = ["a", "b"].map(|name| Source {
            worker: name.into(),
            dp_rank: DpRank(0),
        });
        let mut index = SimIndex::new(sources);
        let blocks: Vec<LocalHash> = (1..4).map(LocalHash).collect();
        let stored = stored_run((None, blocks[..2].to_vec()));
        index.apply(1, &[stored]).unwrap();
        let IndexAnswer::Runs { sources, .. } = index.answer(&blocks) else {
            panic!("it answers");
        };
        let runs: Vec<u32> = sources.iter().map(|source| source.run.gpu).collect();
        assert_eq!(runs, [0, 2]);
        assert_eq!(sources[0].number, None);
        assert_eq!(sources[1].number, Some(RecordNumber(0)));
    }
}
