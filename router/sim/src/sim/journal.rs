//! Turns cache changes into the events of a step, in vLLM's order.
//!
//! The pool's events come as they happen, then those of the CPU tier; all leave with the next step.
//! Sliding-window groups are shadows: they occupy no blocks of the pool, but publish stores with
//! masked blocks and removals as a hybrid model does, and a hit needs their windows. A consumer that
//! ignores groups gets wrong content.

use std::collections::VecDeque;
use std::ops::Range;

use warmroute_proto::{BlockCut, PrefixHash};

use super::config::{EngineConfig, EventMode};
use super::event::{CacheEvent, EngineHash, GroupKind, Medium, StoredBlocks, engine_hash};
use super::request::EngineSequence;

pub(super) struct EventJournal {
    mode: EventMode,
    life: u64,
    cut: BlockCut,
    groups: Vec<GroupState>,
    main: usize,
    pool: Vec<CacheEvent>,
    offload: Vec<CacheEvent>,
}

struct GroupState {
    kind: GroupKind,
    /// A shadow group's cached blocks, oldest first. Empty for the main group.
    held: VecDeque<PrefixHash>,
    held_max: usize,
}

impl EventJournal {
    pub(super) fn new(config: &EngineConfig) -> Self {
        let group = |&kind| GroupState {
            kind,
            held: VecDeque::new(),
            held_max: (config.num_blocks as usize / 4).max(1),
        };
        Self {
            mode: config.events,
            life: config.life,
            cut: config.block_cut(),
            groups: config.groups.iter().map(group).collect(),
            main: config.main_group(),
            pool: Vec::new(),
            offload: Vec::new(),
        }
    }

    /// Whole blocks `from..to` of a sequence became cached on the GPU.
    pub(super) fn stored(&mut self, sequence: &EngineSequence, from: usize, to: usize) {
        if self.mode == EventMode::Off {
            return;
        }
        for group in 0..self.groups.len() {
            let first = match self.groups[group].kind {
                GroupKind::FullAttention => from,
                GroupKind::SlidingWindow(window) => {
                    let first = from.max(to.saturating_sub(self.window_blocks(window)));
                    self.shadow(group, &sequence.keys[first..to]);
                    first
                }
            };
            let event = self.store_event(sequence, from..to, first, group, Medium::Gpu);
            self.pool.push(CacheEvent::Stored(event));
        }
    }

    pub(super) fn removed(&mut self, key: PrefixHash) {
        let event = self.removal(key, Medium::Gpu, self.main);
        self.push_pool(event);
    }

    pub(super) fn cleared(&mut self) {
        for group in &mut self.groups {
            group.held.clear();
        }
        self.push_pool(CacheEvent::Cleared);
    }

    pub(super) fn offloaded(&mut self, sequence: &EngineSequence, block: usize) {
        if self.mode == EventMode::Published {
            let range = block..block + 1;
            let event = self.store_event(sequence, range, block, self.main, Medium::Cpu);
            self.offload.push(CacheEvent::Stored(event));
        }
    }

    pub(super) fn offload_removed(&mut self, key: PrefixHash) {
        if self.mode == EventMode::Published {
            let event = self.removal(key, Medium::Cpu, self.main);
            self.offload.push(event);
        }
    }

    /// Length of the longest prefix of these blocks whose last ones every sliding-window group
    /// holds, as many as its window has.
    pub(super) fn resume_point(&self, keys: &[PrefixHash]) -> usize {
        let is_resume_point = |&end: &usize| {
            self.groups.iter().all(|group| match group.kind {
                GroupKind::FullAttention => true,
                GroupKind::SlidingWindow(window) => {
                    let first = end.saturating_sub(self.window_blocks(window));
                    keys[first..end].iter().all(|key| group.held.contains(key))
                }
            })
        };
        let mut ends = (0..=keys.len()).rev();
        ends.find(is_resume_point).unwrap_or(0)
    }

    /// Moves everything since the last step into `events`.
    pub(super) fn take(&mut self, events: &mut Vec<CacheEvent>) {
        events.append(&mut self.pool);
        events.append(&mut self.offload);
    }

    fn shadow(&mut self, group: usize, keys: &[PrefixHash]) {
        for &key in keys {
            self.groups[group].held.push_back(key);
        }
        while self.groups[group].held.len() > self.groups[group].held_max {
            if let Some(oldest) = self.groups[group].held.pop_front() {
                let event = self.removal(oldest, Medium::Gpu, group);
                self.push_pool(event);
            }
        }
    }

    fn store_event(
        &self,
        sequence: &EngineSequence,
        covered: Range<usize>,
        first_named: usize,
        group: usize,
        medium: Medium,
    ) -> StoredBlocks {
        let size = self.cut.size.tokens();
        let named = first_named..covered.end;
        StoredBlocks {
            hashes: sequence.keys[named.clone()]
                .iter()
                .map(|&key| self.name(key))
                .collect(),
            parent: sequence.parent_of(covered.start).map(|key| self.name(key)),
            tokens: sequence.tokens[covered.start * size..covered.end * size].to_vec(),
            block_size: self.cut.size,
            // vLLM's offload events leave the extra keys out.
            extra_keys: (medium == Medium::Gpu).then(|| {
                let blocks = named.clone();
                let keys = blocks.map(|block| sequence.extra_keys(block, self.cut));
                keys.collect()
            }),
            lookahead: (self.cut.lookahead > 0).then(|| {
                let tokens = named.map(|block| sequence.lookahead(block, self.cut).to_vec());
                tokens.collect()
            }),
            lora_name: sequence.origin.lora_name.clone(),
            medium,
            group: number(group),
            kind: self.groups[group].kind,
        }
    }

    fn removal(&self, key: PrefixHash, medium: Medium, group: usize) -> CacheEvent {
        CacheEvent::Removed {
            hash: self.name(key),
            medium,
            group: number(group),
        }
    }

    fn push_pool(&mut self, event: CacheEvent) {
        if self.mode == EventMode::Published {
            self.pool.push(event);
        }
    }

    fn name(&self, key: PrefixHash) -> EngineHash {
        engine_hash(self.life, key)
    }

    /// Blocks before a token that its window reaches into.
    fn window_blocks(&self, window: u32) -> usize {
        let before = window.saturating_sub(1) as usize;
        before.div_ceil(self.cut.size.tokens()).max(1)
    }
}

fn number(group: usize) -> u32 {
    u32::try_from(group).unwrap_or(u32::MAX)
}
