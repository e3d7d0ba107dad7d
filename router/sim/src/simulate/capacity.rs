//! Capacity of a fleet for a trace: the unit of `--load`.
//!
//! Capacity is the highest rate at which one `kv` router with weight 1 answers [`GOOD_SHARE`]
//! of the trace's requests within the bounds. It depends on trace, workers and bounds only, so that
//! all policies, knobs, router counts and seeds are compared at one rate. A bisection with coarse
//! blocks finds it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use warmroute_proto::BlockSize;

use super::SimulationError;
use super::args::SimulationPlan;
use super::arrivals::{ArrivalRate, Arrivals, TraceSlice};
use super::replicas::{BalancePolicy, RouterSetup};
use super::world::{self, FleetSetup, SlowWorkers};
use crate::sim::{EngineConfig, TimingProfile};
use crate::trace::Trace;
use warmroute_route::Policy;

/// Share of good answers that defines capacity.
const GOOD_SHARE: f64 = 0.9;

/// Ratio of the bracket's ends at which the bisection stops.
const PRECISION: f64 = 1.02;

/// Block size of the measurement.
const COARSE_TOKENS: u32 = 128;

/// An engine with this many tokens of cache.
pub(crate) fn engine(size: BlockSize, cache_tokens: u32, profile: TimingProfile) -> EngineConfig {
    let blocks = cache_tokens as usize / size.tokens();
    EngineConfig {
        profile,
        vocabulary: Arc::new([0]),
        // One of them is the null block.
        ..EngineConfig::new(
            size,
            u32::try_from(blocks).unwrap_or(u32::MAX).saturating_add(1),
        )
    }
}

/// The capacity: requests a second, or concurrent sessions.
pub(crate) fn measure(
    trace: &Trace,
    plan: &SimulationPlan,
    epoch: Instant,
) -> Result<f64, SimulationError> {
    let setup = reference(&plan.setup);
    let stretch = TraceSlice {
        requests: None,
        seed: 0,
    };
    let serves = |rate: f64| -> Result<bool, SimulationError> {
        let arrivals = Arrivals::new(trace, stretch, pace(trace, &setup, rate));
        let outcome = world::run(trace, arrivals, &setup, epoch)?;
        Ok(outcome.goodput(plan.bounds) >= GOOD_SHARE)
    };
    let guess = first_guess(trace, &setup);
    let most = most(trace, guess);
    let mut low = guess.min(most);
    while !serves(low)? {
        low /= 2.0;
        // Late even one after the other: any rate is as good.
        if low * 1024.0 < guess.min(1.0) {
            return Ok(low);
        }
    }
    let mut high = low * 2.0;
    while serves(high.min(most))? {
        low = high.min(most);
        high = low * 2.0;
        if low >= most {
            return Ok(most);
        }
    }
    while high / low > PRECISION && !same_sessions(trace, low, high) {
        let middle = (low * high).sqrt();
        if serves(middle)? {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok(low)
}

/// Arrivals at this rate: requests a second, or open sessions.
pub(crate) fn pace(trace: &Trace, setup: &FleetSetup, rate: f64) -> ArrivalRate {
    if !trace.has_sessions() {
        return ArrivalRate::Rate(rate);
    }
    let firsts = trace
        .sessions
        .iter()
        .map(|session| &trace.requests[session.start]);
    let tokens: f64 = firsts.map(|first| f64::from(first.input_tokens)).sum();
    let mean = tokens / trace.sessions.len() as f64;
    let speed = setup.engine.profile.prefill_tokens_per_sec * setup.workers as f64;
    // Half of the rate at which the fleet could prefill these prompts.
    let apart = if speed > 0.0 { 2.0 * mean / speed } else { 0.0 };
    ArrivalRate::Sessions {
        open: rate.round().max(1.0) as usize,
        apart: Duration::from_secs_f64(apart),
    }
}

fn reference(setup: &FleetSetup) -> FleetSetup {
    let engine = &setup.engine;
    let tokens = engine.num_blocks.saturating_sub(1) as usize * engine.block_size.tokens();
    let coarse = BlockSize::new(COARSE_TOKENS).filter(|size| tokens >= 16 * size.tokens());
    let size = coarse.unwrap_or(engine.block_size);
    let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
    FleetSetup {
        workers: setup.workers,
        engine: self::engine(size, tokens, engine.profile),
        replicas: RouterSetup {
            routers: 1,
            sync_delay: None,
            balance: BalancePolicy::RoundRobin,
            draw: 0,
            knobs: Policy::Kv.into(),
        },
        slow: SlowWorkers::NONE,
        event_delay: Duration::from_millis(1),
        seed: 0,
    }
}

/// Rate of a fleet without cache hits and without decoding.
fn first_guess(trace: &Trace, setup: &FleetSetup) -> f64 {
    if trace.has_sessions() {
        return setup.workers as f64;
    }
    let tokens: f64 = trace
        .requests
        .iter()
        .map(|r| f64::from(r.input_tokens))
        .sum();
    let mean = tokens / trace.requests.len() as f64;
    setup.workers as f64 * setup.engine.profile.prefill_tokens_per_sec.max(1.0) / mean
}

/// Upper limit: all sessions concurrently. A trace that is too short to fill the fleet at a
/// thousand times the guess has all its requests concurrently.
fn most(trace: &Trace, guess: f64) -> f64 {
    match trace.sessions.len() {
        0 => guess * 1024.0,
        sessions => sessions as f64,
    }
}

fn same_sessions(trace: &Trace, low: f64, high: f64) -> bool {
    trace.has_sessions() && low.round() + 1.0 >= high.round()
}
