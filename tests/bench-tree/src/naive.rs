//! The naive index: a hash map from engine hash to workers, walked block by block.

use std::cell::RefCell;

use rustc_hash::FxHashMap;
use warmroute_proto::Tiers;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::index::Index;
use crate::workload::Event;

const SEED: u64 = 1337;

pub struct HashMapWalk(RefCell<FxHashMap<u64, Vec<u32>>>);

pub fn engine_hash(parent: Option<u64>, local: u64) -> u64 {
    let Some(parent) = parent else { return local };
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&parent.to_le_bytes());
    bytes[8..].copy_from_slice(&local.to_le_bytes());
    xxh3_64_with_seed(&bytes, SEED)
}

fn chain(locals: impl Iterator<Item = u64>, engine: &mut Vec<u64>) {
    engine.clear();
    let mut parent = None;
    engine.extend(locals.map(|local| {
        let hash = engine_hash(parent, local);
        parent = Some(hash);
        hash
    }));
}

impl HashMapWalk {
    fn apply(map: &mut FxHashMap<u64, Vec<u32>>, event: Event) {
        match event {
            Event::Store { worker, blocks, .. } => {
                for (_, block) in blocks {
                    let workers = map.entry(block).or_default();
                    if !workers.contains(&worker) {
                        workers.push(worker);
                    }
                }
            }
            Event::Remove { worker, blocks, .. } => {
                for block in blocks {
                    let Some(workers) = map.get_mut(&block) else {
                        continue;
                    };
                    workers.retain(|&held| held != worker);
                    if workers.is_empty() {
                        map.remove(&block);
                    }
                }
            }
        }
    }
}

impl Index for HashMapWalk {
    const NAME: &'static str = "hash map walk";
    type Translator = ();
    type Change = Event;
    type Prepared = Vec<u64>;
    type Answer = FxHashMap<u32, u32>;

    fn new(_: u32) -> Self {
        Self(RefCell::default())
    }

    fn translator() {}

    fn translate((): &mut (), event: Event) -> Event {
        event
    }

    fn write(&self, parts: Vec<Vec<Event>>, done: &(dyn Fn(usize) + Sync)) {
        let map = &mut *self.0.borrow_mut();
        for (index, part) in parts.into_iter().enumerate() {
            part.into_iter().for_each(|event| Self::apply(map, event));
            done(index);
        }
    }

    fn write_lazily(
        &self,
        changes: &mut (dyn Iterator<Item = Event> + Send),
        done: &(dyn Fn() + Sync),
    ) {
        changes.for_each(|event| Self::apply(&mut self.0.borrow_mut(), event));
        done();
    }

    fn prepare(&self, blocks: &[u64], prepared: &mut Vec<u64>) {
        chain(blocks.iter().copied(), prepared);
    }

    fn hash(&self, tokens: &[u32], prepared: &mut Vec<u64>) {
        let locals = crate::ours::local_hashes(tokens).map(|local| local.0);
        chain(locals, prepared);
    }

    fn lookup(&self, prepared: &mut Vec<u64>) -> FxHashMap<u32, u32> {
        let map = self.0.borrow();
        let mut runs = FxHashMap::default();
        for (depth, block) in (0..).zip(prepared.iter()) {
            let Some(workers) = map.get(block) else { break };
            for &worker in workers {
                let run = runs.entry(worker).or_insert(0);
                if *run == depth {
                    *run += 1;
                }
            }
        }
        runs
    }

    fn each(&self, answer: &FxHashMap<u32, u32>, see: &mut dyn FnMut(u32, Tiers<u32>)) {
        for (&worker, &gpu) in answer {
            let run = Tiers {
                gpu,
                ..Tiers::default()
            };
            see(worker, run);
        }
    }
}
