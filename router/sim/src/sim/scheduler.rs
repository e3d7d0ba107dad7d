//! vLLM's scheduler: tokens and blocks of each request per step.
//!
//! There are no prefill and decode phases: every sequence has tokens to compute, and a step
//! distributes a token budget, running sequences first. A sequence whose tokens are all computed at
//! the end of a step gets its next one.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use warmroute_proto::PrefixHash;

use super::config::EngineConfig;
use super::event::{CacheEvent, Medium};
use super::journal::EventJournal;
use super::offload::CpuTier;
use super::pool::BlockPool;
use super::request::{CachedTokens, EngineSequence, FinishReason, RequestId};
use super::timing::StepWork;

/// Load of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineLoad {
    pub running: usize,
    pub waiting: usize,
    /// Blocks in use by requests.
    pub used_blocks: usize,
    pub usable_blocks: usize,
}

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineTotals {
    /// Tokens looked up in the prefix cache at first admission.
    pub prefix_queries: u64,
    /// Tokens of these lookups found on the GPU.
    pub prefix_hits: u64,
    pub preemptions: u64,
    pub computed_prompt_tokens: u64,
    pub generated_tokens: u64,
}

/// Result of one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutcome {
    /// Time until the results are visible.
    pub duration: Duration,
    /// One batch for the publisher; empty batches are not published.
    pub events: Vec<CacheEvent>,
    /// Requests that were scheduled for the first time.
    pub admitted: Vec<Admitted>,
    pub produced: Vec<Produced>,
    pub finished: Vec<Finished>,
    /// Requests that lost their blocks and are queued again.
    pub preempted: Vec<RequestId>,
    pub work: StepWork,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    pub id: RequestId,
    pub cached: CachedTokens,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Produced {
    pub id: RequestId,
    pub token: u32,
    /// 1 for the first token.
    pub generated: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    pub id: RequestId,
    pub reason: FinishReason,
}

impl StepOutcome {
    fn clear(&mut self) {
        let Self {
            duration,
            events,
            admitted,
            produced,
            finished,
            preempted,
            work,
        } = self;
        *duration = Duration::ZERO;
        *work = StepWork::default();
        events.clear();
        admitted.clear();
        produced.clear();
        finished.clear();
        preempted.clear();
    }
}

pub(super) struct StepScheduler {
    pub(super) config: EngineConfig,
    pub(super) totals: EngineTotals,
    cache: Cache,
    waiting: VecDeque<EngineSequence>,
    running: Vec<EngineSequence>,
}

/// The tiers and their events: borrowed as one while the queues are borrowed.
struct Cache {
    pool: BlockPool,
    offload: Option<CpuTier>,
    journal: EventJournal,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Allocation {
    Done,
    /// Too few free blocks. Nothing was changed.
    Short,
}

/// Cached prefix of a sequence.
struct Hit {
    gpu: Vec<u32>,
    /// Blocks in the CPU tier after the GPU run.
    cpu: usize,
}

impl StepScheduler {
    pub(super) fn new(config: EngineConfig) -> Self {
        let cache = Cache {
            pool: BlockPool::new(config.num_blocks),
            offload: (config.cpu_blocks > 0).then(|| CpuTier::new(config.cpu_blocks)),
            journal: EventJournal::new(&config),
        };
        Self {
            config,
            totals: EngineTotals::default(),
            cache,
            waiting: VecDeque::new(),
            running: Vec::new(),
        }
    }

    pub(super) fn enqueue(&mut self, sequence: EngineSequence) {
        self.waiting.push_back(sequence);
    }

    pub(super) fn abort(&mut self, id: RequestId) -> bool {
        if let Some(at) = self.running.iter().position(|sequence| sequence.id == id) {
            let mut sequence = self.running.remove(at);
            self.cache.pool.release(&mut sequence.table);
            return true;
        }
        let at = self.waiting.iter().position(|sequence| sequence.id == id);
        at.and_then(|at| self.waiting.remove(at)).is_some()
    }

    pub(super) fn step(&mut self, outcome: &mut StepOutcome) {
        outcome.clear();
        if !self.has_requests() {
            return;
        }
        let mut budget = self.config.max_num_batched_tokens;
        self.schedule_running(&mut budget, outcome);
        if outcome.preempted.is_empty() {
            self.schedule_waiting(&mut budget, outcome);
        }
        self.sample(outcome);
        self.retire(outcome);
        self.cache.journal.take(&mut outcome.events);
        outcome.duration = self.config.profile.step_time(outcome.work);
    }

    pub(super) fn reset_prefix_cache(&mut self) -> bool {
        let done = self.cache.pool.reset();
        if done {
            self.cache.journal.cleared();
        }
        done
    }

    pub(super) fn evict(&mut self, key: PrefixHash) -> bool {
        self.cache.pool.evict(key, &mut self.cache.journal)
    }

    pub(super) fn has_requests(&self) -> bool {
        !self.running.is_empty() || !self.waiting.is_empty()
    }

    pub(super) fn load(&self) -> EngineLoad {
        let usable = self.cache.pool.usable_blocks();
        EngineLoad {
            running: self.running.len(),
            waiting: self.waiting.len(),
            used_blocks: usable - self.cache.pool.free_blocks(),
            usable_blocks: usable,
        }
    }

    pub(super) fn held_pairs(&self) -> impl Iterator<Item = (PrefixHash, Medium)> {
        let gpu = self.cache.pool.keys().map(|key| (key, Medium::Gpu));
        let cpu = self.cache.offload.iter().flat_map(CpuTier::keys);
        gpu.chain(cpu.map(|key| (key, Medium::Cpu)))
    }

    fn schedule_running(&mut self, budget: &mut usize, outcome: &mut StepOutcome) {
        let mut at = 0;
        while at < self.running.len() && *budget > 0 {
            let sequence = &mut self.running[at];
            let tokens = (sequence.tokens.len() - sequence.computed).min(*budget);
            match self.cache.extend(sequence, tokens, &self.config) {
                Allocation::Done => {
                    sequence.scheduled = tokens;
                    *budget -= tokens;
                    at += 1;
                }
                Allocation::Short => self.preempt_last(outcome),
            }
        }
    }

    /// Moves the last admitted sequence to the head of the waiting queue. It computes again what
    /// the cache does not save.
    fn preempt_last(&mut self, outcome: &mut StepOutcome) {
        let Some(mut sequence) = self.running.pop() else {
            return;
        };
        self.cache.pool.release(&mut sequence.table);
        sequence.computed = 0;
        sequence.cached_blocks = 0;
        sequence.preempted = true;
        self.totals.preemptions += 1;
        outcome.preempted.push(sequence.id);
        self.waiting.push_front(sequence);
    }

    fn schedule_waiting(&mut self, budget: &mut usize, outcome: &mut StepOutcome) {
        while *budget > 0 && self.running.len() < self.config.max_num_seqs {
            let Some(mut sequence) = self.waiting.pop_front() else {
                return;
            };
            let hit = self.cache.find(&sequence, &self.config);
            let size = self.config.block_size.tokens();
            let cached = CachedTokens {
                gpu: hit.gpu.len() * size,
                cpu: hit.cpu * size,
            };
            let tokens = (sequence.tokens.len() - cached.total()).min(*budget);
            let allocation = self.cache.admit(&mut sequence, hit, tokens, &self.config);
            if allocation == Allocation::Short {
                self.waiting.push_front(sequence);
                return;
            }
            sequence.scheduled = tokens;
            *budget -= tokens;
            outcome.work.loaded_tokens += cached.cpu;
            if !sequence.preempted {
                self.totals.prefix_queries += sequence.tokens.len() as u64;
                self.totals.prefix_hits += cached.gpu as u64;
                outcome.admitted.push(Admitted {
                    id: sequence.id,
                    cached,
                });
            }
            self.running.push(sequence);
        }
    }

    /// The forward pass: computes the scheduled tokens; a sequence with nothing left to compute
    /// gets a token.
    fn sample(&mut self, outcome: &mut StepOutcome) {
        for sequence in &mut self.running {
            let scheduled = std::mem::take(&mut sequence.scheduled);
            if scheduled == 0 {
                continue;
            }
            if scheduled == 1 && sequence.computed >= sequence.prompt_len {
                outcome.work.decode_sequences += 1;
                outcome.work.context_tokens += sequence.computed;
            } else {
                outcome.work.prefill_tokens += scheduled;
                self.totals.computed_prompt_tokens += scheduled as u64;
            }
            sequence.computed += scheduled;
            if sequence.computed == sequence.tokens.len() {
                let token = sequence.generate(&self.config.vocabulary, self.config.block_cut());
                self.totals.generated_tokens += 1;
                outcome.produced.push(Produced {
                    id: sequence.id,
                    token,
                    generated: sequence.generated(),
                });
            }
        }
    }

    fn retire(&mut self, outcome: &mut StepOutcome) {
        let pool = &mut self.cache.pool;
        self.running.retain_mut(|sequence| {
            if sequence.generated() < sequence.max_tokens {
                return true;
            }
            pool.release(&mut sequence.table);
            outcome.finished.push(Finished {
                id: sequence.id,
                reason: FinishReason::Length,
            });
            false
        });
    }

    #[cfg(test)]
    pub(super) fn check(&self) {
        let size = self.config.block_size.tokens();
        let tables: Vec<&[u32]> = self.running.iter().map(|s| s.table.as_slice()).collect();
        self.cache.pool.check(&tables);
        for sequence in &self.running {
            assert!(sequence.computed <= sequence.tokens.len());
            assert_eq!(sequence.table.len(), sequence.computed.div_ceil(size));
            let named = self.config.block_cut().blocks(sequence.tokens.len());
            assert_eq!(sequence.keys.len(), named);
            let filled = sequence.computed / size;
            if self.config.lookahead == 0 {
                assert_eq!(sequence.cached_blocks, filled);
            }
            assert!(sequence.cached_blocks <= filled.min(named));
        }
        assert!(
            self.waiting
                .iter()
                .all(|sequence| sequence.table.is_empty())
        );
        assert!(self.running.len() <= self.config.max_num_seqs);
    }
}

impl Cache {
    /// The longest cached prefix. At least one token is computed, so a prompt of whole blocks never
    /// hits its last block.
    fn find(&self, sequence: &EngineSequence, config: &EngineConfig) -> Hit {
        let blocks_max = (sequence.tokens.len() - 1) / config.block_size.tokens();
        let keys = &sequence.keys[..blocks_max.min(sequence.keys.len())];
        let mut gpu: Vec<u32> = keys.iter().map_while(|&key| self.pool.find(key)).collect();
        gpu.truncate(self.journal.resume_point(&keys[..gpu.len()]));
        let cpu = self.offload.as_ref().map_or(0, |offload| {
            let chunk = config.cpu_chunk_blocks.max(1);
            // Chunks before the end of what the GPU has are held, too, or there is no hit.
            let from = if chunk == 1 { gpu.len() } else { 0 };
            let held = keys[from..].iter().take_while(|&&key| offload.holds(key));
            let end = (from + held.count()) / chunk * chunk;
            end.saturating_sub(gpu.len())
        });
        Hit { gpu, cpu }
    }

    /// Allocates the first blocks of a sequence. It is admitted only if all of its present tokens
    /// fit, although only `tokens` of them are computed in this step.
    fn admit(
        &mut self,
        sequence: &mut EngineSequence,
        hit: Hit,
        tokens: usize,
        config: &EngineConfig,
    ) -> Allocation {
        let size = config.block_size.tokens();
        let touched = hit.gpu.len();
        let idle = hit
            .gpu
            .iter()
            .filter(|&&block| self.pool.is_idle(block))
            .count();
        let missing = sequence.tokens.len().div_ceil(size) - touched;
        if missing + idle > self.pool.free_blocks() {
            return Allocation::Short;
        }
        self.pool.touch(&hit.gpu);
        sequence.table = hit.gpu;
        sequence.cached_blocks = touched;
        sequence.computed = (touched + hit.cpu) * size;
        let allocation = self.extend(sequence, tokens, config);
        self.offload(sequence, 0..touched);
        allocation
    }

    /// Allocates blocks for `tokens` more tokens. Filled blocks are cached.
    fn extend(
        &mut self,
        sequence: &mut EngineSequence,
        tokens: usize,
        config: &EngineConfig,
    ) -> Allocation {
        let size = config.block_size.tokens();
        let end = sequence.computed + tokens;
        let missing = end.div_ceil(size).saturating_sub(sequence.table.len());
        if missing > self.pool.free_blocks() {
            return Allocation::Short;
        }
        self.pool
            .take(missing, &mut sequence.table, &mut self.journal);
        // vLLM computes the last tokens again that drafts read beyond the next one.
        let again = config.lookahead.saturating_sub(1) as usize;
        let filled = end.saturating_sub(again) / size;
        self.cache_filled(sequence, filled.min(sequence.keys.len()));
        Allocation::Done
    }

    fn cache_filled(&mut self, sequence: &mut EngineSequence, filled: usize) {
        let from = sequence.cached_blocks;
        if from >= filled {
            return;
        }
        for block in from..filled {
            self.pool.cache(sequence.table[block], sequence.keys[block]);
        }
        self.journal.stored(sequence, from, filled);
        self.offload(sequence, from..filled);
        sequence.cached_blocks = filled;
    }

    fn offload(&mut self, sequence: &EngineSequence, blocks: Range<usize>) {
        if let Some(offload) = &mut self.offload {
            for block in blocks {
                offload.store(sequence, block, &mut self.journal);
            }
        }
    }
}
