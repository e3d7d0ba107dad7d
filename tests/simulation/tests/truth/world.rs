//! One engine, the wire behind it, and the faults between it and a consumer.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use warmroute_mock_engine::HashMode;
use warmroute_proto::query::SourceState;
use warmroute_proto::{LocalHash, PrefixHash, Tier, Tiers};
use warmroute_simulation::world::life::{DrawnGroups, Life, Told, draw_config, draw_lookahead};
use warmroute_simulation::world::model::{Pair, gpu_run};

/// A consumer that follows an engine over the wire and claims what it holds.
pub(crate) trait Consumer {
    fn connected(&mut self);
    fn disconnected(&mut self);
    fn live(&mut self, seq: u64, payload: &Bytes);
    /// The first batch of a wanted replay.
    fn wants_replay(&mut self) -> Option<u64>;
    fn replayed(&mut self, seq: u64, payload: &Bytes);
    fn replay_ended(&mut self);
    fn time_passes(&mut self, by: Duration);
    /// Whether it gives credit although a part can never be known.
    fn goes_on_without_history(&self) -> bool;
    fn claim(&self) -> Claim;
    /// The credited GPU run of a prompt.
    fn gpu_run(&self, blocks: &[LocalHash]) -> u32;
    /// The data-parallel rank that it follows.
    fn rank(&self) -> u32;
}

/// A consumer's claim at one moment.
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

/// Fault rates in per mille of the steps; drawn by the seed.
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
    /// Draws the prompts of checks, so that what a consumer claims changes no later fault.
    prompt_rng: Rng,
    faults: Faults,
    engine: Life,
    is_connected: bool,
    report: Report,
}

const STEPS: usize = 120;

impl World {
    /// Runs one seed against a consumer.
    pub(crate) fn run(seed: u64, consumer: &mut dyn Consumer) -> Verdict {
        let mut world = Self::new(seed);
        world.engine.encoder.rank = consumer.rank();
        match world.live_through(consumer) {
            Ok(()) => Verdict::Held(world.report),
            Err(why) => Verdict::Broken(why),
        }
    }

    fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let mut config = draw_config(&mut rng, DrawnGroups::SomeWithWindows);
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
        let buffer = if rng.u8(0..3) == 0 {
            rng.usize(2..20)
        } else {
            10_000
        };
        draw_lookahead(&mut config, seed);
        config.life = seed;
        let mut engine = Life::new(config, hash_mode, Told::Twice);
        engine.buffer = buffer;
        Self {
            prompt_rng: rng.fork(),
            rng,
            faults,
            engine,
            is_connected: false,
            report: Report::default(),
        }
    }

    fn live_through(&mut self, consumer: &mut dyn Consumer) -> Result<(), String> {
        // Some consumers start late.
        for _ in 0..self.rng.usize(0..20) {
            self.engine.submit(&mut self.rng);
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
            self.engine.begin();
            for _ in 0..self.rng.usize(0..4) {
                self.engine.submit(&mut self.rng);
                self.engine_steps(None)?;
            }
            self.connect(consumer);
        }
        if self.strikes(self.faults.abort) {
            self.engine.abort(&mut self.rng);
        }
        if self.strikes(self.faults.reset) {
            self.engine.reset();
        }
        if self.strikes(self.faults.evict) {
            self.engine.evict(&mut self.rng);
        }
        if self.rng.u8(0..10) < 4 {
            self.engine.submit(&mut self.rng);
        }
        self.engine_steps(Some(consumer))?;
        if self.rng.u8(0..4) == 0 {
            consumer.time_passes(Duration::from_millis(self.rng.u64(1..800)));
        }
        Ok(())
    }

    /// Ends the faults. Everything lost is recovered, and the last claim is the whole truth.
    fn heal(&mut self, consumer: &mut dyn Consumer) -> Result<(), String> {
        let lossless = self.faults.replay_hole == 0 && self.engine.buffer == 10_000;
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
        let last = (self.engine.truth.len() as u64).checked_sub(1);
        if !has_healed || (claim.states.gpu.gives_credit() && claim.seq != last) {
            let end = claim.seq;
            return Err(format!("ended {:?} at {end:?} of {last:?}", claim.states));
        }
        Ok(())
    }

    // --- the engine

    /// Steps the engine and publishes the events.
    fn engine_steps(&mut self, mut consumer: Option<&mut dyn Consumer>) -> Result<(), String> {
        for _ in 0..self.rng.usize(1..4) {
            let Some(seq) = self.engine.step()? else {
                continue;
            };
            if let Some(consumer) = consumer.as_deref_mut()
                && self.is_connected
                && !self.strikes(self.faults.live_lost)
            {
                consumer.live(seq, &self.engine.batches[seq as usize]);
                self.after(consumer)?;
            }
        }
        Ok(())
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

    /// Serves the consumer's replays and checks its claims.
    fn after(&mut self, consumer: &mut dyn Consumer) -> Result<(), String> {
        for _ in 0..8 {
            if !self.is_connected {
                break;
            }
            let Some(from) = consumer.wants_replay() else {
                break;
            };
            let oldest = self.engine.batches.len().saturating_sub(self.engine.buffer);
            let from = usize::try_from(from).unwrap_or(usize::MAX).max(oldest);
            for seq in from..self.engine.batches.len() {
                if !self.strikes(self.faults.replay_hole) {
                    consumer.replayed(seq as u64, &self.engine.batches[seq]);
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
            Some(seq) => match self.engine.truth.get(usize::try_from(seq).unwrap()) {
                Some(truth) => BTreeSet::clone(truth),
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
                SourceState::Exact | SourceState::Absent => held == truth,
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

    /// A prompt's credit is the run from its first block and ends at the first hole; of an engine
    /// with windows it ends at the deepest resume point.
    fn check_run(&mut self, consumer: &dyn Consumer, truth: &BTreeSet<Pair>) -> Result<(), String> {
        let Some(blocks) = self.engine.some_prompt(&mut self.prompt_rng) else {
            return Ok(());
        };
        let expected = gpu_run(truth, blocks.iter().map(|block| block.0));
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

/// Pairs as the index names them.
pub(crate) fn pairs(held: impl Iterator<Item = (PrefixHash, Tier)>) -> BTreeSet<Pair> {
    held.map(|(prefix, tier)| (prefix.0, tier.number()))
        .collect()
}
