//! One engine, the wire behind it, and everything that goes wrong between it and a consumer.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use serde_json::Value;
use warmroute_proto::hash::local_hashes;
use warmroute_proto::query::SourceState;
use warmroute_proto::{BlockSize, LocalHash, PrefixHash, Seed, Tier, Tiers};
use warmroute_router::sim::{Config, Engine, GroupKind, Medium, Request, RequestId};
use warmroute_tests::mock::{Encoder, HashMode};

use crate::model::{Model, Pair, Rules, chain};

/// Somebody who follows an engine over the wire and says what it holds.
pub(crate) trait Consumer {
    fn connected(&mut self);
    fn disconnected(&mut self);
    fn live(&mut self, seq: u64, payload: &Bytes);
    /// A replay that it asks for: every batch from here on.
    fn wants_replay(&mut self) -> Option<u64>;
    fn replayed(&mut self, seq: u64, payload: &Bytes);
    fn replay_ended(&mut self);
    fn time_passes(&mut self, by: Duration);
    /// It credits what it knows even if a part can never be known.
    fn goes_on_without_history(&self) -> bool;
    fn claim(&self) -> Claim;
    /// The GPU run of a prompt, as it would be credited.
    fn gpu_run(&self, blocks: &[LocalHash]) -> u32;
    /// The data-parallel rank that it follows.
    fn rank(&self) -> u32;
}

/// What a consumer says at one moment.
pub(crate) struct Claim {
    pub(crate) states: Tiers<SourceState>,
    pub(crate) seq: Option<u64>,
    pub(crate) held: BTreeSet<Pair>,
}

#[derive(Debug)]
pub(crate) enum Verdict {
    Held(Report),
    Broken(String),
}

#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Credited claims that were compared with the truth.
    pub(crate) compared: u64,
    pub(crate) ended_exact: bool,
}

/// How often what goes wrong, in per mille of the steps; drawn by the seed.
struct Faults {
    live_lost: u16,
    replay_hole: u16,
    disconnect: u16,
    restart: u16,
    reset: u16,
    evict: u16,
    abort: u16,
}

pub(crate) struct World {
    rng: Rng,
    faults: Faults,
    config: Config,
    engine: Engine,
    encoder: Encoder,
    /// Batches that a replay reaches back.
    buffer: usize,
    /// This life of the engine: every batch, and what it holds after each.
    batches: Vec<Bytes>,
    truth: Vec<BTreeSet<Pair>>,
    model: Model,
    running: Vec<RequestId>,
    prompts: Vec<(Vec<u32>, Seed)>,
    is_connected: bool,
    /// The engine did something that it tells with its next batch.
    is_untold: bool,
    report: Report,
}

const STEPS: usize = 120;

impl World {
    /// Runs one seed against a consumer.
    pub(crate) fn run(seed: u64, consumer: &mut dyn Consumer) -> Verdict {
        let mut world = Self::new(seed);
        world.encoder.rank = consumer.rank();
        match world.live_through(consumer) {
            Ok(()) => Verdict::Held(world.report),
            Err(why) => Verdict::Broken(why),
        }
    }

    fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let size = BlockSize::new([2, 4, 16][rng.usize(0..3)]).unwrap();
        let mut config = Config::new(size, rng.u32(12..80));
        config.max_num_batched_tokens = [16, 64, 8192][rng.usize(0..3)];
        config.max_num_seqs = rng.usize(1..8);
        config.cpu_blocks = if rng.bool() { 0 } else { rng.u32(4..40) };
        if rng.u8(0..4) == 0 {
            let window = u32::try_from(2 * size.tokens()).unwrap();
            let sliding = GroupKind::SlidingWindow(window);
            config.groups = vec![sliding, sliding, GroupKind::FullAttention];
        }
        let mut rate = |max: u16| if rng.bool() { 0 } else { rng.u16(0..=max) };
        let faults = Faults {
            live_lost: rate(250),
            replay_hole: rate(200),
            disconnect: rate(60),
            restart: rate(40),
            reset: rate(80),
            evict: rate(100),
            abort: rate(100),
        };
        let hash_mode = if rng.bool() {
            HashMode::Int
        } else {
            HashMode::Bytes
        };
        let mut world = Self {
            faults,
            engine: Engine::new(config.clone()),
            config,
            encoder: Encoder {
                rank: 0,
                hash_mode,
                loras: vec!["adapter".into()],
            },
            buffer: if rng.u8(0..3) == 0 {
                rng.usize(2..20)
            } else {
                10_000
            },
            rng,
            batches: Vec::new(),
            truth: Vec::new(),
            model: Model::new(Rules::TRUE),
            running: Vec::new(),
            prompts: Vec::new(),
            is_connected: false,
            is_untold: false,
            report: Report::default(),
        };
        world.config.life = seed;
        world.begin_life();
        world
    }

    fn begin_life(&mut self) {
        self.config.life = self.config.life.wrapping_add(1 << 32);
        self.engine = Engine::new(self.config.clone());
        self.batches.clear();
        self.truth.clear();
        self.model = Model::new(Rules::TRUE);
        self.running.clear();
        self.is_untold = false;
    }

    fn live_through(&mut self, consumer: &mut dyn Consumer) -> Result<(), String> {
        // Some consumers come late.
        for _ in 0..self.rng.usize(0..20) {
            self.submit();
            self.engine_steps(None)?;
        }
        self.connect(consumer);
        self.after(consumer)?;
        for _ in 0..STEPS {
            self.one_step(consumer)?;
            self.after(consumer)?;
        }
        self.heal(consumer)
    }

    fn one_step(&mut self, consumer: &mut dyn Consumer) -> Result<(), String> {
        if self.strikes(self.faults.disconnect) {
            self.toggle_connection(consumer);
        }
        if self.strikes(self.faults.restart) {
            self.is_connected = false;
            consumer.disconnected();
            self.begin_life();
            for _ in 0..self.rng.usize(0..4) {
                self.submit();
                self.engine_steps(None)?;
            }
            self.connect(consumer);
        }
        if self.strikes(self.faults.abort) && !self.running.is_empty() {
            let id = self
                .running
                .swap_remove(self.rng.usize(0..self.running.len()));
            self.engine.abort(id);
        }
        if self.strikes(self.faults.reset) {
            self.is_untold |= self.engine.reset_prefix_cache();
        }
        if self.strikes(self.faults.evict) {
            let held = self.engine.held();
            let victim = (!held.is_empty()).then(|| held[self.rng.usize(0..held.len())].prefix);
            self.is_untold |= victim.is_some_and(|prefix| self.engine.evict(prefix));
        }
        if self.rng.u8(0..10) < 4 {
            self.submit();
        }
        self.engine_steps(Some(consumer))?;
        if self.rng.u8(0..4) == 0 {
            consumer.time_passes(Duration::from_millis(self.rng.u64(1..800)));
        }
        Ok(())
    }

    /// No more faults: what was lost is found, and the last claim is the whole truth.
    fn heal(&mut self, consumer: &mut dyn Consumer) -> Result<(), String> {
        let lossless = self.faults.replay_hole == 0 && self.buffer == 10_000;
        self.faults.live_lost = 0;
        self.faults.replay_hole = 0;
        if !self.is_connected {
            self.connect(consumer);
        }
        while self.engine.has_requests() {
            self.engine_steps(Some(consumer))?;
            self.after(consumer)?;
        }
        for _ in 0..100 {
            consumer.time_passes(Duration::from_millis(100));
            self.after(consumer)?;
        }
        let claim = consumer.claim();
        self.report.ended_exact = claim.states.gpu == SourceState::Exact;
        let has_healed = if lossless {
            self.report.ended_exact
        } else {
            claim.states.gpu.gives_credit() || !consumer.goes_on_without_history()
        };
        let last = (self.truth.len() as u64).checked_sub(1);
        if !has_healed || (claim.states.gpu.gives_credit() && claim.seq != last) {
            let end = claim.seq;
            return Err(format!("ended {:?} at {end:?} of {last:?}", claim.states));
        }
        Ok(())
    }

    // --- the engine

    fn submit(&mut self) {
        let size = self.config.block_size.tokens();
        let longest = self.config.longest_request();
        let family = self.rng.u32(0..4);
        let shared = self.rng.usize(0..8 * size);
        let own = self.rng.usize(1..2 * size + 2);
        let mut prompt: Vec<u32> = (0..shared as u32).map(|at| family * 100_000 + at).collect();
        prompt.extend((0..own).map(|_| self.rng.u32(0..2)));
        // Whole blocks make the engine compute the last one again on every hit.
        if self.rng.u8(0..4) == 0 {
            prompt.truncate((prompt.len() / size * size).max(1));
        }
        let max_tokens = self.rng.usize(1..2 * size + 2);
        if prompt.len() + max_tokens > longest {
            return;
        }
        let lora = (self.rng.u8(0..6) == 0).then_some("adapter");
        let salt = (self.rng.u8(0..6) == 0).then_some("tenant-a");
        self.prompts.push((prompt.clone(), Seed::new(lora, salt)));
        let request = Request {
            prompt,
            max_tokens,
            lora_name: lora.map(Arc::from),
            cache_salt: salt.map(Arc::from),
            items: Vec::new(),
        };
        self.running.push(self.engine.submit(request).unwrap());
    }

    /// Some steps of the engine; what they publish goes out.
    fn engine_steps(&mut self, mut consumer: Option<&mut dyn Consumer>) -> Result<(), String> {
        for _ in 0..self.rng.usize(1..4) {
            let outcome = self.engine.step();
            for finished in outcome.finished {
                self.running.retain(|id| *id != finished.id);
            }
            if outcome.events.is_empty() {
                continue;
            }
            self.is_untold = false;
            let seq = self.publish(&outcome.events)?;
            if let Some(consumer) = consumer.as_deref_mut()
                && self.is_connected
                && !self.strikes(self.faults.live_lost)
            {
                consumer.live(seq, &self.batches[seq as usize]);
                self.after(consumer)?;
            }
        }
        Ok(())
    }

    /// Numbers a batch and notes the truth after it, told twice: by the wire and by the engine.
    fn publish(&mut self, events: &[warmroute_router::sim::Event]) -> Result<u64, String> {
        let seq = self.batches.len() as u64;
        let time = (self.config.life % 1000) as f64 + seq as f64;
        let plain = Encoder {
            hash_mode: HashMode::Int,
            ..self.encoder.clone()
        };
        let payload: Value = rmp_serde::from_slice(&plain.encode(time, events).unwrap()).unwrap();
        self.model.apply(&payload);
        let truth = self.model.held();
        let own: BTreeSet<Pair> = self
            .engine
            .held()
            .iter()
            .map(|held| (held.prefix.0, tier_of(held.medium).number()))
            .collect();
        if truth != own {
            return Err(format!(
                "batch {seq}: wire and engine disagree on the truth"
            ));
        }
        self.truth.push(truth);
        self.batches
            .push(self.encoder.encode(time, events).unwrap().into());
        Ok(seq)
    }

    // --- the wire

    fn connect(&mut self, consumer: &mut dyn Consumer) {
        self.is_connected = true;
        consumer.connected();
    }

    fn toggle_connection(&mut self, consumer: &mut dyn Consumer) {
        if self.is_connected {
            self.is_connected = false;
            consumer.disconnected();
        } else {
            self.connect(consumer);
        }
    }

    /// Answers what the consumer asks, and looks at what it claims.
    fn after(&mut self, consumer: &mut dyn Consumer) -> Result<(), String> {
        for _ in 0..8 {
            if !self.is_connected {
                break;
            }
            let Some(from) = consumer.wants_replay() else {
                break;
            };
            let oldest = self.batches.len().saturating_sub(self.buffer);
            let from = usize::try_from(from).unwrap_or(usize::MAX).max(oldest);
            for seq in from..self.batches.len() {
                if !self.strikes(self.faults.replay_hole) {
                    consumer.replayed(seq as u64, &self.batches[seq]);
                }
            }
            consumer.replay_ended();
        }
        self.check(consumer)
    }

    fn check(&mut self, consumer: &dyn Consumer) -> Result<(), String> {
        let claim = consumer.claim();
        let truth = match claim.seq {
            None => BTreeSet::new(),
            Some(seq) => match self.truth.get(usize::try_from(seq).unwrap()) {
                Some(truth) => truth.clone(),
                None if !claim.states.gpu.gives_credit() => return Ok(()),
                None => return Err(format!("claims batch {seq}, which was never published")),
            },
        };
        for tier in Tier::ALL {
            let of_tier = |pairs: &BTreeSet<Pair>| -> BTreeSet<Pair> {
                pairs
                    .iter()
                    .filter(|(_, of)| *of == tier.number())
                    .copied()
                    .collect()
            };
            let (held, truth) = (of_tier(&claim.held), of_tier(&truth));
            let state = *claim.states.get(tier);
            let is_true = match state {
                SourceState::Exact => held == truth,
                SourceState::Partial | SourceState::Unverified => held.is_subset(&truth),
                SourceState::Stale | SourceState::CatchingUp | SourceState::Unknown => continue,
            };
            self.report.compared += 1;
            if !is_true {
                let ghosts = held.difference(&truth).count();
                let missing = truth.difference(&held).count();
                return Err(format!(
                    "{tier} is {state:?} at {:?}: {ghosts} ghosts, {missing} missing of {}",
                    claim.seq,
                    truth.len()
                ));
            }
        }
        if claim.states.gpu == SourceState::Exact {
            self.check_run(consumer, &truth)?;
        }
        Ok(())
    }

    /// A prompt's credit is the run from its first block, and ends at the first hole.
    fn check_run(&mut self, consumer: &dyn Consumer, truth: &BTreeSet<Pair>) -> Result<(), String> {
        if self.prompts.is_empty() {
            return Ok(());
        }
        let (prompt, seed) = &self.prompts[self.rng.usize(0..self.prompts.len())];
        let blocks = local_hashes(prompt, self.config.block_size, *seed);
        let mut parent = None;
        let expected = blocks
            .iter()
            .take_while(|block| {
                let prefix = chain(parent, block.0);
                parent = Some(prefix);
                truth.contains(&(prefix, Tier::Gpu.number()))
            })
            .count();
        let run = consumer.gpu_run(&blocks);
        if run as usize != expected {
            return Err(format!(
                "credits {run} blocks, {expected} are held in a row"
            ));
        }
        Ok(())
    }

    fn strikes(&mut self, per_mille: u16) -> bool {
        per_mille > 0 && self.rng.u16(0..1000) < per_mille
    }
}

fn tier_of(medium: Medium) -> Tier {
    match medium {
        Medium::Gpu => Tier::Gpu,
        Medium::Cpu => Tier::Cpu,
    }
}

/// Pairs as the index names them.
pub(crate) fn pairs(held: impl Iterator<Item = (PrefixHash, Tier)>) -> BTreeSet<Pair> {
    held.map(|(prefix, tier)| (prefix.0, tier.number()))
        .collect()
}
