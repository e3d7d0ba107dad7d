//! Derives workload files with holes or three tiers from one without.
//!
//! `holes`: a part of the stored blocks is removed while their descendants stay, and stored again
//! when the worker stores after them; at the end the same part of all held blocks is removed.
//! `tiers`: a part of the blocks is copied to the CPU when stored or evicted, and later moves to
//! the disk or is removed. The answers come from a walk over sets.
//!
//! `grow`: several copies of the workload, to measure the effect of size.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;
use warmroute_proto::{Tier, Tiers};

use crate::naive::engine_hash;
use crate::workload::{
    Event, Query, Random, TOKENS_PER_BLOCK, Trailer, Version, Workload, checksum, mix,
};

/// Queries of a derived file, few because walking sets is slow.
const QUERIES_MAX: usize = 10_000;

pub enum Kind {
    /// This part of the blocks.
    Holes(f64),
    Tiers,
}

/// A block and its holders.
struct Block {
    parent: Option<u64>,
    local: u64,
    /// Ascending by worker; a bit for each tier.
    holders: Vec<(u32, u8)>,
}

struct Deriver {
    random: Random,
    kind: Kind,
    blocks: FxHashMap<u64, Block>,
    /// Per worker, blocks moved to the CPU, the oldest first.
    offloaded: Vec<VecDeque<u64>>,
    cpu_max: usize,
    events: Vec<u8>,
    count: u64,
    trailer: Trailer,
}

impl Block {
    fn tiers(&self, worker: u32) -> u8 {
        let found = self
            .holders
            .binary_search_by_key(&worker, |holder| holder.0);
        found.map_or(0, |at| self.holders[at].1)
    }

    fn set(&mut self, worker: u32, tiers: u8) {
        match self
            .holders
            .binary_search_by_key(&worker, |holder| holder.0)
        {
            Ok(at) if tiers == 0 => drop(self.holders.remove(at)),
            Ok(at) => self.holders[at].1 = tiers,
            Err(at) => self.holders.insert(at, (worker, tiers)),
        }
    }
}

impl Deriver {
    fn new(base: &Workload, kind: Kind, seed: u64) -> Self {
        Self {
            random: Random(seed),
            kind,
            blocks: FxHashMap::default(),
            offloaded: vec![VecDeque::new(); base.workers as usize],
            cpu_max: 200_000 / base.workers as usize,
            events: Vec::new(),
            count: 0,
            trailer: Trailer::default(),
        }
    }

    fn has(&self, worker: u32, block: u64, tier: Tier) -> bool {
        self.blocks[&block].tiers(worker) & (1 << tier.number()) != 0
    }

    fn head(&mut self, kind: u8, tier: Tier, count: usize, worker: u32, parent: Option<u64>) {
        let flags = (tier.number() << 1) | u8::from(parent.is_some());
        self.events.extend([kind, flags]);
        self.events.extend((count as u16).to_le_bytes());
        self.events.extend(worker.to_le_bytes());
        self.events.extend(parent.unwrap_or(0).to_le_bytes());
        self.count += 1;
    }

    fn store(&mut self, worker: u32, parent: Option<u64>, blocks: &[u64], tier: Tier) {
        self.head(1, tier, blocks.len(), worker, parent);
        for engine in blocks {
            let block = self.blocks.get_mut(engine).unwrap();
            self.events.extend(block.local.to_le_bytes());
            self.events.extend(engine.to_le_bytes());
            block.set(worker, block.tiers(worker) | 1 << tier.number());
        }
        self.trailer.stored += blocks.len() as u64;
    }

    fn remove(&mut self, worker: u32, blocks: &[u64], tier: Tier) {
        if blocks.is_empty() {
            return;
        }
        self.head(2, tier, blocks.len(), worker, None);
        for engine in blocks {
            self.events.extend(engine.to_le_bytes());
            let block = self.blocks.get_mut(engine).unwrap();
            block.set(worker, block.tiers(worker) & !(1 << tier.number()));
        }
        self.trailer.removed += blocks.len() as u64;
    }

    /// Restores a block and its ancestors on the GPU, in runs.
    fn fill(&mut self, worker: u32, block: Option<u64>) {
        let mut missing = Vec::new();
        let mut next = block;
        while let Some(engine) = next {
            if !self.has(worker, engine, Tier::Gpu) {
                missing.push(engine);
            }
            next = self.blocks[&engine].parent;
        }
        while let Some(first) = missing.pop() {
            let mut run = vec![first];
            while missing
                .last()
                .is_some_and(|next| self.blocks[next].parent == run.last().copied())
            {
                run.extend(missing.pop());
            }
            self.store(worker, self.blocks[&first].parent, &run, Tier::Gpu);
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Store {
                worker,
                parent,
                blocks,
                ..
            } => {
                let mut above = parent;
                for &(local, engine) in &blocks {
                    let block = Block {
                        parent: above,
                        local,
                        holders: Vec::new(),
                    };
                    self.blocks.entry(engine).or_insert(block);
                    above = Some(engine);
                }
                if matches!(self.kind, Kind::Holes(_)) {
                    self.fill(worker, parent);
                }
                let engines: Vec<_> = blocks.iter().map(|block| block.1).collect();
                self.store(worker, parent, &engines, Tier::Gpu);
                self.after_store(worker, parent, &engines);
            }
            Event::Remove { worker, blocks, .. } => {
                let held = |block: &u64| self.has(worker, *block, Tier::Gpu);
                let blocks: Vec<_> = blocks.into_iter().filter(held).collect();
                if matches!(self.kind, Kind::Tiers) {
                    let chosen = |_: &&u64| self.random.chance(0.5);
                    let chosen: Vec<_> = blocks.iter().rev().filter(chosen).copied().collect();
                    self.offload(worker, &chosen);
                }
                self.remove(worker, &blocks, Tier::Gpu);
            }
        }
    }

    fn after_store(&mut self, worker: u32, parent: Option<u64>, engines: &[u64]) {
        match self.kind {
            Kind::Holes(part) => {
                // The last one stays: so the others keep a descendant.
                for &engine in &engines[..engines.len() - 1] {
                    if self.random.chance(part) {
                        self.remove(worker, &[engine], Tier::Gpu);
                    }
                }
            }
            Kind::Tiers => {
                let chosen = self.random.chance(0.2);
                let new = |block: &u64| !self.has(worker, *block, Tier::Cpu);
                if chosen && engines.iter().all(new) {
                    self.store(worker, parent, engines, Tier::Cpu);
                    self.offloaded[worker as usize].extend(engines);
                    self.shrink(worker);
                }
            }
        }
    }

    /// Stores blocks, parents first, in as few runs as possible.
    fn store_runs(&mut self, worker: u32, blocks: &[u64], tier: Tier) {
        let mut rest = blocks;
        while let Some(&first) = rest.first() {
            let follows = |pair: &&[u64]| self.blocks[&pair[1]].parent == Some(pair[0]);
            let length = 1 + rest.windows(2).take_while(follows).count();
            self.store(worker, self.blocks[&first].parent, &rest[..length], tier);
            rest = &rest[length..];
        }
    }

    fn offload(&mut self, worker: u32, blocks: &[u64]) {
        let new = |block: &&u64| !self.has(worker, **block, Tier::Cpu);
        let blocks: Vec<_> = blocks.iter().filter(new).copied().collect();
        self.store_runs(worker, &blocks, Tier::Cpu);
        self.offloaded[worker as usize].extend(blocks);
        self.shrink(worker);
    }

    /// Keeps a worker's CPU tier small: the oldest move to the disk or are removed, 32 at a time.
    fn shrink(&mut self, worker: u32) {
        while self.offloaded[worker as usize].len() > self.cpu_max {
            let oldest = &mut self.offloaded[worker as usize];
            let mut oldest: Vec<_> = oldest.drain(..oldest.len().min(32)).collect();
            oldest.retain(|&block| self.has(worker, block, Tier::Cpu));
            let chosen = |block: &&u64| {
                self.random.chance(0.7) && !self.blocks[*block].tiers(worker) & 4 != 0
            };
            let chosen: Vec<_> = oldest.iter().filter(chosen).copied().collect();
            self.store_runs(worker, &chosen, Tier::Disk);
            self.remove(worker, &oldest, Tier::Cpu);
        }
    }

    /// Up to 64 blocks of one worker at a time, from anywhere.
    fn last_holes(&mut self, part: f64) {
        let mut engines: Vec<_> = self.blocks.keys().copied().collect();
        engines.sort_unstable();
        let mut holes = vec![Vec::new(); self.offloaded.len()];
        for engine in engines {
            for &(worker, _) in &self.blocks[&engine].holders {
                if self.random.chance(part) {
                    holes[worker as usize].push(engine);
                }
            }
        }
        for (worker, holes) in (0..).zip(holes) {
            let mut rest = &holes[..];
            while !rest.is_empty() {
                let count = (1 + self.random.next() % 64) as usize;
                let (some, others) = rest.split_at(count.min(rest.len()));
                self.remove(worker, some, Tier::Gpu);
                rest = others;
            }
        }
    }

    fn runs(&self, locals: &[u64]) -> Vec<(u32, Tiers<u32>)> {
        let mut walks: Vec<(u32, Tiers<u32>)> = Vec::new();
        let mut engine = None;
        for (depth, &local) in (0_u32..).zip(locals) {
            let here = engine_hash(engine, local);
            engine = Some(here);
            let Some(block) = self.blocks.get(&here) else {
                break;
            };
            if depth == 0 {
                walks.extend(
                    block
                        .holders
                        .iter()
                        .map(|holder| (holder.0, Tiers::default())),
                );
            }
            let mut any = false;
            for (worker, run) in &mut walks {
                if run.gpu + run.cpu + run.disk != depth {
                    continue;
                }
                let tiers = block.tiers(*worker);
                any |= tiers != 0;
                match tiers {
                    tiers if tiers & 1 != 0 && run.gpu == depth => run.gpu += 1,
                    tiers if tiers & 2 != 0 => run.cpu += 1,
                    tiers if tiers & 4 != 0 => run.disk += 1,
                    _ => {}
                }
            }
            if !any {
                break;
            }
        }
        walks
    }
}

/// A file derived from `base`, as bytes.
pub fn derive(base: &Workload, kind: Kind, seed: u64) -> Vec<u8> {
    let mut deriver = Deriver::new(base, kind, seed);
    for event in base.events() {
        deriver.event(event);
    }
    if let Kind::Holes(part) = deriver.kind {
        deriver.last_holes(part);
    }
    let held = deriver
        .blocks
        .values()
        .filter(|block| !block.holders.is_empty());
    deriver.trailer.resident_distinct = held.count() as u64;
    let pairs = deriver.blocks.values().flat_map(|block| &block.holders);
    deriver.trailer.resident_entries = pairs.map(|holder| u64::from(holder.1.count_ones())).sum();
    let queries = &base.queries[..QUERIES_MAX.min(base.queries.len())];
    let mut locals = Vec::new();
    for (index, query) in queries.iter().enumerate() {
        base.fill(query, &mut locals);
        let mut best = 0;
        for (worker, run) in deriver.runs(&locals) {
            let sum = checksum(Version::Two, index, worker, run);
            deriver.trailer.checksum_all = deriver.trailer.checksum_all.wrapping_add(sum);
            best = best.max(run.gpu + run.cpu + run.disk);
        }
        deriver.trailer.sum_best += u64::from(best);
        deriver.trailer.sum_query_len += locals.len() as u64;
    }
    encode(
        b"KVWL0002",
        base.workers,
        &base.sequences,
        queries,
        &deriver,
    )
}

fn encode(
    magic: &[u8; 8],
    workers: u32,
    sequences: &[Vec<u64>],
    queries: &[Query],
    deriver: &Deriver,
) -> Vec<u8> {
    let mut bytes = magic.to_vec();
    bytes.extend((TOKENS_PER_BLOCK as u32).to_le_bytes());
    bytes.extend(workers.to_le_bytes());
    for number in [deriver.count, sequences.len() as u64, queries.len() as u64] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend_from_slice(&deriver.events);
    for sequence in sequences {
        bytes.extend((sequence.len() as u64).to_le_bytes());
        sequence
            .iter()
            .for_each(|local| bytes.extend(local.to_le_bytes()));
    }
    for query in queries {
        for number in [query.sequence, query.prefix, query.suffix, query.class] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(query.suffix_seed.to_le_bytes());
    }
    let trailer = &deriver.trailer;
    for number in [
        trailer.stored,
        trailer.removed,
        trailer.resident_entries,
        trailer.resident_distinct,
        trailer.checksum_all,
        trailer.checksum_best,
        trailer.sum_best,
        trailer.sum_query_len,
    ] {
        bytes.extend(number.to_le_bytes());
    }
    bytes
}

/// `copies` parallel copies of the workload, each with blocks of its own, on the same workers. The
/// queries go round the copies, so the answers are those of one.
pub fn grow(base: &Workload, copies: u64) -> Vec<u8> {
    let renamed = |hash: u64, copy: u64| mix(hash ^ copy.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mut deriver = Deriver::new(base, Kind::Tiers, 0);
    for event in base.events() {
        for copy in 0..copies {
            match &event {
                Event::Store {
                    worker,
                    tier,
                    parent,
                    blocks,
                } => {
                    let parent = parent.map(|parent| renamed(parent, copy));
                    deriver.head(1, *tier, blocks.len(), *worker, parent);
                    for &(local, engine) in blocks {
                        deriver.events.extend(renamed(local, copy).to_le_bytes());
                        deriver.events.extend(renamed(engine, copy).to_le_bytes());
                    }
                }
                Event::Remove {
                    worker,
                    tier,
                    blocks,
                } => {
                    deriver.head(2, *tier, blocks.len(), *worker, None);
                    for &engine in blocks {
                        deriver.events.extend(renamed(engine, copy).to_le_bytes());
                    }
                }
            }
        }
    }
    let sequences = (0..copies)
        .flat_map(|copy| {
            let renamed = move |local: &u64| renamed(*local, copy);
            let sequences = base.sequences.iter();
            sequences.map(move |sequence| sequence.iter().map(renamed).collect())
        })
        .collect::<Vec<Vec<u64>>>();
    let per_copy = base.sequences.len() as u64;
    let queries: Vec<_> = (0..)
        .zip(&base.queries)
        .map(|(index, query)| Query {
            sequence: query
                .sequence
                .wrapping_add((index % copies * per_copy) as u32),
            ..*query
        })
        .collect();
    deriver.trailer = base.trailer;
    deriver.trailer.stored *= copies;
    deriver.trailer.removed *= copies;
    deriver.trailer.resident_entries *= copies;
    deriver.trailer.resident_distinct *= copies;
    encode(b"KVWL0001", base.workers, &sequences, &queries, &deriver)
}
