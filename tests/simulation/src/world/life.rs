//! One life of an engine after the other: what is asked of it, what it publishes, and what it holds
//! after each batch.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use fastrand::Rng;
use serde_json::Value;
use warmroute_proto::hash::local_hashes;
use warmroute_proto::{BlockSize, LocalHash, Seed, Tier};
use warmroute_router::sim::{
    CacheEvent, EngineConfig, EngineModel, EngineRequest, GroupKind, Medium, RequestId, StepOutcome,
};

use super::model::{Model, Pair, Rules};
use warmroute_mock_engine::{Encoder, HashMode};

/// What a life held after each of its batches.
pub type Truth = Vec<Rc<BTreeSet<Pair>>>;

/// The engine's true state after a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// The engine.
    Once,
    /// The engine, and an independent reading of the wire; both must agree.
    Twice,
}

/// One life of an engine after the other, with the truth after each batch.
pub struct Life {
    pub config: EngineConfig,
    engine: EngineModel,
    pub encoder: Encoder,
    /// Batches that a replay reaches back.
    pub buffer: usize,
    told: Told,
    /// This life: every batch, and what is held after each.
    pub batches: Vec<Bytes>,
    pub truth: Truth,
    model: Model,
    running: Vec<RequestId>,
    /// What the last step did; its events are with the batch.
    pub outcome: StepOutcome,
    pub prompts: Vec<(Vec<u32>, Seed)>,
    /// The engine did something that it publishes with its next batch.
    pub is_text_lost: bool,
    /// It published an event of an unknown type, and has not been emptied since.
    pub is_strange: bool,
}

impl Life {
    /// An engine of this shape, in its first life.
    #[must_use]
    pub fn new(config: EngineConfig, hash_mode: HashMode, told: Told) -> Self {
        let mut life = Self {
            engine: EngineModel::new(config.clone()),
            config,
            encoder: Encoder {
                rank: 0,
                hash_mode,
                loras: vec!["adapter".into()].into(),
                lmcache: false,
            },
            buffer: 10_000,
            told,
            batches: Vec::new(),
            truth: Vec::new(),
            model: Model::new(Rules::TRUE),
            running: Vec::new(),
            outcome: StepOutcome::default(),
            prompts: Vec::new(),
            is_text_lost: false,
            is_strange: false,
        };
        life.begin();
        life
    }

    /// The next life: nothing is cached, sequences start at 0, hashes differ. The last one's truth.
    pub fn begin(&mut self) -> Truth {
        self.config.life = self.config.life.wrapping_add(1 << 32);
        self.engine = EngineModel::new(self.config.clone());
        self.batches.clear();
        self.model = Model::new(Rules::TRUE);
        self.running.clear();
        self.is_text_lost = false;
        self.is_strange = false;
        std::mem::take(&mut self.truth)
    }

    /// A request that has something in common with others, if it fits.
    pub fn submit(&mut self, rng: &mut Rng) {
        let longest = self.config.longest_request();
        if let Some(request) = draw_request(self.config.block_size, longest, rng) {
            self.take(request);
        }
    }

    /// A request of another client; `None` if it does not fit.
    pub fn take(&mut self, request: EngineRequest) -> Option<RequestId> {
        let (lora, salt) = (request.lora_name.clone(), request.cache_salt.clone());
        let prompt = request.prompt.clone();
        let id = self.engine.submit(request).ok()?;
        let seed = Seed::new(lora.as_deref(), salt.as_deref());
        self.prompts.push((prompt, seed));
        self.running.push(id);
        Some(id)
    }

    /// The client has left.
    pub fn drop_request(&mut self, id: RequestId) {
        self.running.retain(|running| *running != id);
        self.engine.abort(id);
    }

    /// One step; the number of the batch that it publishes, if it does.
    pub fn step(&mut self) -> Result<Option<u64>, String> {
        let mut outcome = self.engine.step();
        for finished in &outcome.finished {
            self.running.retain(|id| *id != finished.id);
        }
        let events = std::mem::take(&mut outcome.events);
        self.outcome = outcome;
        if events.is_empty() {
            return Ok(None);
        }
        self.is_text_lost = false;
        self.publish(&events).map(Some)
    }

    pub fn abort(&mut self, rng: &mut Rng) {
        if !self.running.is_empty() {
            let id = self.running.swap_remove(rng.usize(0..self.running.len()));
            self.engine.abort(id);
        }
    }

    pub fn abort_all(&mut self) {
        for id in self.running.drain(..) {
            self.engine.abort(id);
        }
    }

    /// Was it done?
    pub fn reset(&mut self) -> bool {
        let is_done = self.engine.reset_prefix_cache();
        self.is_text_lost |= is_done;
        self.is_strange &= !is_done;
        is_done
    }

    /// Was there anything to evict?
    pub fn evict(&mut self, rng: &mut Rng) -> bool {
        let held = self.engine.held();
        let victim = (!held.is_empty()).then(|| held[rng.usize(0..held.len())].prefix);
        let is_done = victim.is_some_and(|prefix| self.engine.evict(prefix));
        self.is_text_lost |= is_done;
        is_done
    }

    #[must_use]
    pub fn has_requests(&self) -> bool {
        self.engine.has_requests()
    }

    /// One of the prompts that were asked for, as blocks.
    pub fn some_prompt(&self, rng: &mut Rng) -> Option<Vec<LocalHash>> {
        if self.prompts.is_empty() {
            return None;
        }
        let (prompt, seed) = &self.prompts[rng.usize(0..self.prompts.len())];
        Some(local_hashes(prompt, self.config.block_cut(), *seed))
    }

    /// Numbers a batch and notes the truth after it.
    fn publish(&mut self, events: &[CacheEvent]) -> Result<u64, String> {
        let seq = self.batches.len() as u64;
        let time = (self.config.life % 1000) as f64 + seq as f64;
        // The engine lists the main group's blocks: what windows leave usable is read from the wire.
        let has_windows = self.config.groups.len() > 1;
        let mut truth: BTreeSet<Pair> = self
            .engine
            .held()
            .iter()
            .map(|held| (held.prefix.0, tier_of(held.medium).number()))
            .collect();
        if has_windows || self.told == Told::Twice {
            let plain = Encoder {
                hash_mode: HashMode::Int,
                ..self.encoder.clone()
            };
            let payload = plain.encode(time, events).unwrap();
            let payload: Value = rmp_serde::from_slice(&payload).unwrap();
            self.model.apply(&payload);
            let read = self.model.held();
            if has_windows {
                truth = read;
            } else if truth != read {
                return Err(format!(
                    "batch {seq}: wire and engine disagree on the truth"
                ));
            }
        }
        self.truth.push(Rc::new(truth));
        self.batches
            .push(self.encoder.encode(time, events).unwrap().into());
        Ok(seq)
    }
}

/// A request that shares a prefix with others; `None` if it would be too long.
pub fn draw_request(block_size: BlockSize, longest: usize, rng: &mut Rng) -> Option<EngineRequest> {
    let size = block_size.tokens();
    let family = rng.u32(0..4);
    let shared = rng.usize(0..8 * size);
    let own = rng.usize(1..2 * size + 2);
    let mut prompt: Vec<u32> = (0..shared as u32).map(|at| family * 100_000 + at).collect();
    prompt.extend((0..own).map(|_| rng.u32(0..2)));
    // Whole blocks make the engine compute the last one again on every hit.
    if rng.u8(0..4) == 0 {
        prompt.truncate((prompt.len() / size * size).max(1));
    }
    let max_tokens = rng.usize(1..2 * size + 2);
    if prompt.len() + max_tokens > longest {
        return None;
    }
    let lora = (rng.u8(0..6) == 0).then_some("adapter");
    let salt = (rng.u8(0..6) == 0).then_some("tenant-a");
    Some(EngineRequest {
        prompt,
        max_tokens,
        lora_name: lora.map(Arc::from),
        cache_salt: salt.map(Arc::from),
        ..EngineRequest::default()
    })
}

/// KV groups of drawn engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrawnGroups {
    One,
    /// A quarter of the engines has two groups with windows.
    SomeWithWindows,
}

/// An engine of a random shape.
pub fn draw_config(rng: &mut Rng, groups: DrawnGroups) -> EngineConfig {
    let size = BlockSize::new([2, 4, 16][rng.usize(0..3)]).unwrap();
    let mut config = EngineConfig::new(size, rng.u32(12..80));
    config.max_num_batched_tokens = [16, 64, 8192][rng.usize(0..3)];
    config.max_num_seqs = rng.usize(1..8);
    config.cpu_blocks = if rng.bool() { 0 } else { rng.u32(4..40) };
    if rng.u8(0..4) == 0 && groups == DrawnGroups::SomeWithWindows {
        let window = u32::try_from(2 * size.tokens()).unwrap();
        let sliding = GroupKind::SlidingWindow(window);
        config.groups = vec![sliding, sliding, GroupKind::FullAttention];
    }
    config
}

/// The lookahead of a drawn engine: half of those without a CPU tier have some, by a stream of its
/// own, so that everything else remains that of the seed. vLLM has none with a CPU tier.
pub fn draw_lookahead(config: &mut EngineConfig, seed: u64) {
    let mut rng = Rng::with_seed(seed ^ 0x1007_A4EA);
    if config.cpu_blocks == 0 && rng.bool() {
        let size = u32::try_from(config.block_size.tokens()).unwrap_or(u32::MAX);
        config.lookahead = rng.u32(1..4).min(size);
    }
}

const fn tier_of(medium: Medium) -> Tier {
    match medium {
        Medium::Gpu => Tier::Gpu,
        Medium::Cpu => Tier::Cpu,
    }
}
