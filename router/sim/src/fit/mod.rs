//! `warmroute-router trace fit`: the engine profile that explains a recording, and what a replay
//! with it gives beside what was recorded.
//!
//! A step takes `overhead + prefill tokens / rate + step + (sequences − 1) × per sequence`, and an
//! answer a time outside the engine. Two regressions find the coefficients:
//!
//! - An answer's decode time is a sum of steps: of its gaps, of the sequences that ran beside it, and
//!   of the prompts that were prefilled during it.
//! - The first token of a prompt that no other prompt waits beside takes its own uncached tokens and,
//!   where sequences run, half a step until its own begins; a whole step more shows asynchronous
//!   scheduling. What an idle engine takes beyond its tokens is the overhead, as far as that is
//!   less than a step, and else outside the engine.
//!
//! Pure.

mod cache;
mod concurrency;
mod profile;
mod regression;
mod samples;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use warmroute_proto::BlockSize;
use warmroute_route::Knobs;
use warmroute_route::args::ChoiceArgs;

pub use profile::{EngineProfile, ProfileError};

use crate::recording::Recording;
use crate::simulate::arrivals::{ArrivalRate, Arrivals, TraceSlice};
use crate::simulate::capacity;
use crate::simulate::outcome::{Figures, LatencyBounds, percentile};
use crate::simulate::replicas::{BalancePolicy, RouterSetup};
use crate::simulate::world::{self, FleetSetup, SlowWorkers};
use crate::trace::Trace;
use samples::Samples;

/// Rows below which a regression says nothing.
const ROWS_MIN: usize = 30;

#[derive(Clone, Debug, Args)]
pub struct FitArgs {
    /// A recording's directory, or one of its files.
    #[arg(value_name = "IN")]
    pub from: PathBuf,
    /// The profile to write, for --profile-file of simulate and tune.
    #[arg(value_name = "OUT")]
    pub to: PathBuf,
    /// Take only the requests for this model. Repeatable.
    #[arg(long = "model", value_name = "NAME")]
    pub models: Vec<String>,
    #[command(flatten)]
    pub choice: ChoiceArgs,
}

#[derive(Debug, thiserror::Error)]
pub enum FitError {
    #[error("{found} {what}, and {ROWS_MIN} are needed: record for longer")]
    TooFew { what: &'static str, found: usize },
    #[error("no profile explains the recording: {0}")]
    Impossible(#[from] ProfileError),
}

/// Fits a profile to a recording's requests of these models. Returns it with the comparison of
/// replay and recording. `epoch` is the start of virtual time.
pub fn fit(
    recording: &Recording,
    args: &FitArgs,
    epoch: Instant,
) -> anyhow::Result<(EngineProfile, String)> {
    let trace = Trace::of_recording(recording, &args.models)?;
    let samples = Samples::of(recording, &args.models);
    let profile = samples.profile(trace.piece_tokens())?;
    let knobs = Knobs::try_from(args.choice.clone())?;
    let figures = replay(&trace, &samples, &profile, knobs, epoch)?;
    let report = report(&samples, &profile, &figures);
    Ok((profile, report))
}

/// The recording's arrivals, on as many engines.
fn replay(
    trace: &Trace,
    samples: &Samples,
    profile: &EngineProfile,
    knobs: Knobs,
    epoch: Instant,
) -> anyhow::Result<Figures> {
    let size = BlockSize::new(trace.piece_tokens()).context("a recording without blocks")?;
    // Without evictions the cache had room for all.
    let roomy = u32::try_from(samples.tokens()).unwrap_or(u32::MAX);
    let cache_tokens = profile.cache_tokens.unwrap_or(roomy);
    let setup = FleetSetup {
        workers: samples.sources(),
        engine: capacity::engine(size, cache_tokens, profile.timing()),
        replicas: RouterSetup {
            routers: 1,
            sync_delay: None,
            balance: BalancePolicy::RoundRobin,
            draw: 0,
            knobs,
        },
        slow: SlowWorkers::NONE,
        event_delay: Duration::from_millis(1),
        seed: 0,
    };
    let stretch = TraceSlice {
        requests: None,
        seed: 0,
    };
    let pace = ArrivalRate::Rate(trace.rate());
    let arrivals = Arrivals::new(trace, stretch, pace);
    let outcome = world::run(trace, arrivals, &setup, epoch)?;
    let unbounded = LatencyBounds {
        ttft: Duration::MAX,
        itl: Duration::MAX / u32::MAX,
    };
    Ok(outcome.figures(unbounded))
}

fn report(samples: &Samples, profile: &EngineProfile, simulated: &Figures) -> String {
    let cache = match profile.cache_tokens {
        Some(tokens) => format!("{tokens} tokens of cache"),
        None => "cache not fitted: nothing was evicted, or engines do not report hits".to_owned(),
    };
    let EngineProfile {
        prefill_tokens_per_sec: rate,
        step_ms: step,
        step_ms_per_sequence: each,
        step_ms_per_context_token: context_token,
        step_overhead_ms: overhead,
        async_scheduling,
        request_ms: outside,
        ..
    } = profile;
    let scheduling = if *async_scheduling {
        "; asynchronous scheduling"
    } else {
        ""
    };
    let mut lines = vec![
        format!("{samples}"),
        format!("prefill {rate:.0} tokens/s; steps of {step:.3} ms, {each:.4} ms more for each"),
        format!(
            "further sequence, {:.4} ms for 1,000 tokens of context,",
            1e3 * context_token
        ),
        format!("{overhead:.3} ms of overhead; {outside:.3} ms outside engines"),
        format!("{cache}{scheduling}"),
        String::new(),
        format!(
            "{:<16}{:>12}{:>12}{:>9}",
            "", "recorded", "simulated", "error"
        ),
    ];
    let ttfts = samples.ttfts();
    let millis = |time: Duration| time.as_secs_f64() * 1000.0;
    let mean = ttfts.iter().sum::<Duration>() / u32::try_from(ttfts.len()).unwrap_or(1).max(1);
    for (name, recorded, simulated) in [
        ("TTFT mean, ms", millis(mean), simulated.ttft_mean_ms),
        (
            "TTFT p50, ms",
            millis(percentile(&ttfts, 50)),
            simulated.ttft_p50_ms,
        ),
        (
            "TTFT p99, ms",
            millis(percentile(&ttfts, 99)),
            simulated.ttft_p99_ms,
        ),
    ] {
        let error = 100.0 * (simulated / recorded - 1.0);
        lines.push(format!(
            "{name:<16}{recorded:>12.1}{simulated:>12.1}{error:>+7.1} %"
        ));
    }
    if let Some(recorded) = samples.hit_rate() {
        let (recorded, simulated) = (100.0 * recorded, 100.0 * simulated.hit_rate);
        let points = simulated - recorded;
        lines.push(format!(
            "{:<16}{recorded:>12.1}{simulated:>12.1}{points:>+7.1} points",
            "hit rate, %"
        ));
    }
    lines.join("\n")
}
