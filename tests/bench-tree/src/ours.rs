//! Warmroute's tree. Its sources are compiled in here, because the indexer's crate asks for another
//! tokio than the peer pins.

#[path = "../../../indexer/src/tree/mod.rs"]
#[allow(dead_code, unused_imports, unreachable_pub)]
mod tree;

use std::sync::RwLock;

use rustc_hash::FxHashMap;
use warmroute_proto::hash::{LocalHash, PrefixHash, Seed, prefix_hashes};
use warmroute_proto::{Change, Tiers};

use self::tree::{SourceNumber, TierMask, Tree};
use crate::index::Index;
use crate::workload::{Event, TOKENS_PER_BLOCK};

pub fn local_hashes(tokens: &[u32]) -> impl Iterator<Item = LocalHash> {
    tokens
        .chunks_exact(TOKENS_PER_BLOCK)
        .map(|block| LocalHash::of_block(block, &[], Seed::PLAIN))
}

/// What the shim does for the index: engine hash to prefix hash.
#[derive(Default)]
pub struct Translator(FxHashMap<u64, PrefixHash>);

impl Translator {
    pub fn change(&mut self, event: Event) -> (u32, Change) {
        match event {
            Event::Store {
                worker,
                tier,
                parent,
                blocks,
            } => {
                let parent = parent.map(|parent| self.0[&parent]);
                let locals: Vec<_> = blocks.iter().map(|block| LocalHash(block.0)).collect();
                for (prefix, (_, engine)) in prefix_hashes(parent, &locals).zip(blocks) {
                    self.0.insert(engine, prefix);
                }
                let change = Change::Stored {
                    parent,
                    blocks: locals,
                    tier,
                };
                (worker, change)
            }
            Event::Remove {
                worker,
                tier,
                blocks,
            } => {
                let blocks = blocks.iter().map(|block| self.0[block]).collect();
                (worker, Change::Removed { blocks, tier })
            }
        }
    }
}

pub struct Ours {
    tree: RwLock<Tree>,
    numbers: Vec<SourceNumber>,
    allowed: Vec<(SourceNumber, TierMask)>,
}

impl Ours {
    fn apply(&self, worker: u32, change: Change) {
        let number = self.numbers[worker as usize];
        self.tree.write().unwrap().apply(number, &change).unwrap();
    }
}

impl Index for Ours {
    const NAME: &'static str = "warmroute";
    const CONCURRENT: bool = true;
    type Translator = Translator;
    type Change = (u32, Change);
    type Prepared = Vec<LocalHash>;
    type Answer = Vec<Tiers<u32>>;

    fn new(workers: u32) -> Self {
        let mut tree = Tree::new();
        let numbers: Vec<_> = (0..workers).map(|_| tree.open()).collect();
        Self {
            tree: RwLock::new(tree),
            allowed: numbers.iter().map(|&n| (n, TierMask::ALL)).collect(),
            numbers,
        }
    }

    fn translator() -> Translator {
        Translator::default()
    }

    fn translate(translator: &mut Translator, event: Event) -> (u32, Change) {
        translator.change(event)
    }

    fn write(&self, parts: Vec<Vec<Self::Change>>, done: &(dyn Fn(usize) + Sync)) {
        for (index, part) in parts.into_iter().enumerate() {
            for (worker, change) in part {
                self.apply(worker, change);
            }
            done(index);
        }
    }

    fn write_lazily(
        &self,
        changes: &mut (dyn Iterator<Item = Self::Change> + Send),
        done: &(dyn Fn() + Sync),
    ) {
        for (worker, change) in changes {
            self.apply(worker, change);
        }
        done();
    }

    fn prepare(&self, blocks: &[u64], prepared: &mut Self::Prepared) {
        prepared.clear();
        prepared.extend(blocks.iter().map(|&local| LocalHash(local)));
    }

    fn hash(&self, tokens: &[u32], prepared: &mut Self::Prepared) {
        prepared.clear();
        prepared.extend(local_hashes(tokens));
    }

    fn lookup(&self, prepared: &mut Self::Prepared) -> Vec<Tiers<u32>> {
        self.tree.read().unwrap().lookup(prepared, &self.allowed)
    }

    fn each(&self, answer: &Vec<Tiers<u32>>, see: &mut dyn FnMut(u32, Tiers<u32>)) {
        for (worker, run) in (0..).zip(answer) {
            see(worker, *run);
        }
    }
}
