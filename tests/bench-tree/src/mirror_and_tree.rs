//! The shim's mirrors and the tree in sequence, on one thread.
//!
//! The peer's tree translates engine hashes itself; here a mirror per worker does, which also
//! hashes the tokens and counts references. In a fleet each mirror runs on a machine of its own:
//! the sum is the total cost, not one process's. Records are neither encoded nor sent.

use std::cell::RefCell;

use warmroute_mirror::mirror::{Mirror, MirrorConfig, Start};
use warmroute_mirror::wire::{
    self, Batch, BlockGroup, EngineHash, GroupKind, LoraRef, Medium, RemovedBlocks, StoredBlocks,
};
use warmroute_proto::hash::{LocalHash, PrefixHash};
use warmroute_proto::{Tier, Tiers};

use crate::index::Index;
use crate::ours::{Ours, local_hashes};
use crate::workload::{Event, TOKENS_PER_BLOCK};

/// The files name blocks by hashes: these tokens stand for one.
fn tokens(local: u64) -> [u32; TOKENS_PER_BLOCK] {
    let mut tokens = [0; TOKENS_PER_BLOCK];
    (tokens[0], tokens[1]) = (local as u32, (local >> 32) as u32);
    tokens
}

const fn medium(tier: Tier) -> Medium {
    match tier {
        Tier::Gpu => Medium::Gpu,
        Tier::Cpu => Medium::Cpu,
        Tier::Disk => Medium::Disk,
    }
}

fn batch(event: Event) -> (u32, Batch) {
    let (worker, event) = match event {
        Event::Store {
            worker,
            tier,
            parent,
            blocks,
        } => {
            let stored = StoredBlocks {
                hashes: blocks.iter().map(|block| EngineHash(block.1)).collect(),
                parent: parent.map(EngineHash),
                tokens: blocks.iter().flat_map(|block| tokens(block.0)).collect(),
                tokens_per_position: 1,
                block_size: TOKENS_PER_BLOCK as u32,
                lookahead: 0,
                lookahead_tokens: Vec::new(),
                lora: LoraRef::None,
                lora_number: None,
                salt: None,
                keys: Vec::new(),
                reports_extra_keys: true,
                reports_removals: true,
                medium: medium(tier),
                group: BlockGroup {
                    index: Some(0),
                    kind: Some(GroupKind::Main),
                },
            };
            (worker, wire::CacheEvent::Stored(Box::new(stored)))
        }
        Event::Remove {
            worker,
            tier,
            blocks,
        } => {
            let removed = RemovedBlocks {
                hashes: blocks.into_iter().map(EngineHash).collect(),
                medium: medium(tier),
                group: Some(0),
            };
            (worker, wire::CacheEvent::Removed(removed))
        }
    };
    let batch = Batch {
        events: vec![event],
        ..Batch::default()
    };
    (worker, batch)
}

pub struct MirrorAndTree {
    mirrors: RefCell<Vec<Mirror>>,
    tree: Ours,
}

impl MirrorAndTree {
    fn apply(&self, worker: u32, batch: &Batch) {
        let mirror = &mut self.mirrors.borrow_mut()[worker as usize];
        let changes = mirror.apply(batch).unwrap();
        self.tree
            .apply_all(changes.into_iter().map(|change| (worker, change)));
    }
}

impl Index for MirrorAndTree {
    const NAME: &'static str = "warmroute: mirror + tree";
    type Translator = ();
    type Change = (u32, Batch);
    type Prepared = Vec<PrefixHash>;
    type Answer = Vec<Tiers<u32>>;

    fn new(workers: u32) -> Self {
        let mirror = |_| Mirror::new(MirrorConfig::default(), Start::Empty);
        Self {
            mirrors: RefCell::new((0..workers).map(mirror).collect()),
            tree: Ours::new(workers),
        }
    }

    fn translator() {}

    fn translate((): &mut (), event: Event) -> (u32, Batch) {
        batch(event)
    }

    fn write(&self, parts: Vec<Vec<Self::Change>>, done: &(dyn Fn(usize) + Sync)) {
        for (index, part) in parts.into_iter().enumerate() {
            for (worker, batch) in part {
                self.apply(worker, &batch);
            }
            done(index);
        }
    }

    fn write_lazily(
        &self,
        changes: &mut (dyn Iterator<Item = Self::Change> + Send),
        done: &(dyn Fn() + Sync),
    ) {
        for (worker, batch) in changes {
            self.apply(worker, &batch);
        }
        done();
    }

    fn prepare(&self, blocks: &[u64], prepared: &mut Vec<PrefixHash>) {
        let locals: Vec<u64> = blocks
            .iter()
            .flat_map(|&block| local_hashes(&tokens(block)).collect::<Vec<LocalHash>>())
            .map(|local| local.0)
            .collect();
        self.tree.prepare(&locals, prepared);
    }

    fn hash(&self, tokens: &[u32], prepared: &mut Vec<PrefixHash>) {
        self.tree.hash(tokens, prepared);
    }

    fn lookup(&self, prepared: &mut Vec<PrefixHash>) -> Vec<Tiers<u32>> {
        self.tree.lookup(prepared)
    }

    fn each(&self, answer: &Vec<Tiers<u32>>, see: &mut dyn FnMut(u32, Tiers<u32>)) {
        self.tree.each(answer, see);
    }
}
