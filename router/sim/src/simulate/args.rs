//! Flags of `simulate`, validated.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum as _};
use warmroute_proto::BlockSize;

use super::arrivals::TraceSlice;
use super::outcome::LatencyBounds;
use super::replicas::{BalancePolicy, RouterSetup};
use super::world::{FleetSetup, SlowWorkers};
use crate::fit::{EngineProfile, ProfileError};
use crate::sim::{EngineConfig, TimingProfile};
use warmroute_route::Knobs;
use warmroute_route::args::{ChoiceArgs, ChoiceArgsError};

/// Replay a trace of requests against a simulated fleet, in virtual time, and print what came of
/// it.
#[derive(Clone, Debug, Args)]
pub struct SimulateArgs {
    #[command(flatten)]
    pub replay: ReplayArgs,
    /// Another seed is another sample: ties, spread of arrivals, balancing, place in the trace.
    #[arg(long, default_value_t = 0)]
    pub(super) seed: u64,
    /// Another draw of what routers leave to chance, ties and temperature, with everything else
    /// that the seed sets as it was: runs that differ by their draw alone differ by chance alone.
    #[arg(long, default_value_t = 0)]
    pub(super) draw: u64,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    pub(super) choice: ChoiceArgs,
    /// Bound of the policy `prefix-hash`: the router's setting `prefix_hash_load_percent`.
    #[arg(long, value_name = "PERCENT", default_value_t = 125)]
    #[arg(value_parser = clap::value_parser!(u32).range(100..))]
    pub(super) prefix_hash_load_percent: u32,
}

/// A trace, the fleet that it is replayed against, and its rate.
#[derive(Clone, Debug, Args)]
pub struct ReplayArgs {
    #[command(flatten)]
    pub source: TraceArgs,
    /// Offered load, as a share of the fleet's capacity; see docs/WORKBENCH.md.
    #[arg(long, default_value_t = 0.8)]
    pub(super) load: f64,
    /// Take this capacity instead of measuring it: requests a second, or concurrent sessions.
    #[arg(long, value_name = "RATE")]
    pub(super) capacity: Option<f64>,
    /// Replay only so many requests, from a place in the trace that the seed chooses.
    #[arg(long, value_name = "COUNT")]
    pub(super) requests: Option<usize>,
    #[command(flatten)]
    pub(super) fleet: FleetArgs,
    #[command(flatten)]
    pub(super) routers: RouterArgs,
    #[command(flatten)]
    pub(super) bounds: BoundArgs,
}

/// Where a trace is, and what of it.
#[derive(Clone, Debug, Args)]
pub struct TraceArgs {
    /// The trace: a recording's directory, one of its files, or Mooncake's form: a JSON object a
    /// line with `input_length`, `output_length`, `hash_ids` (an id for 512 tokens) and either
    /// `timestamp` or `session_id` and `delay`, in milliseconds.
    #[arg(long, value_name = "PATH")]
    pub trace: PathBuf,
    /// Take only a recording's requests for this model. Repeatable.
    #[arg(long = "model", value_name = "NAME")]
    pub models: Vec<String>,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Fleet")]
pub(super) struct FleetArgs {
    /// Simulated workers, of one rank each.
    #[arg(long, default_value_t = 8)]
    pub(super) workers: usize,
    /// How fast a worker is.
    #[arg(long, default_value = "gpu-8b", value_parser = TimingProfile::NAMES)]
    pub(super) profile: String,
    /// A worker's speed and cache, from a file that `trace fit` wrote.
    #[arg(long, value_name = "FILE", conflicts_with = "profile")]
    pub(super) profile_file: Option<PathBuf>,
    /// The content of `profile_file`; see [`ReplayArgs::read_profile`].
    #[arg(skip)]
    fitted: Option<EngineProfile>,
    /// Tokens that a worker's KV cache holds. [default: those of the profile's file, else 409600]
    #[arg(long, value_name = "TOKENS")]
    pub(super) cache_tokens: Option<u32>,
    /// Tokens per KV block.
    #[arg(long, value_name = "TOKENS", default_value_t = 16)]
    pub(super) block_size: u32,
    /// The slow workers take this many times as long for everything.
    #[arg(long, value_name = "TIMES", default_value_t = 1.0)]
    pub(super) slow_worker: f64,
    /// The slow workers are the first ones, so many.
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pub(super) slow_workers: usize,
    /// Until this many seconds of virtual time; else to the end.
    #[arg(long, value_name = "SECONDS")]
    pub(super) slow_secs: Option<f64>,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Routers")]
pub(super) struct RouterArgs {
    /// Simulated routers.
    #[arg(long, default_value_t = 1)]
    pub(super) routers: usize,
    /// Milliseconds until the other routers know of a router's load, or `off`: they never do.
    #[arg(long, default_value = "1", value_name = "MS")]
    pub(super) sync_ms: SyncDelay,
    /// How the balancer in front of the routers chooses.
    #[arg(long, value_enum, default_value_t = BalancePolicy::RoundRobin)]
    pub(super) balance: BalancePolicy,
    /// Milliseconds until the index knows what an engine published.
    #[arg(long, default_value_t = 1.0, value_name = "MS")]
    pub(super) event_delay_ms: f64,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Latency bounds of a good answer")]
pub(super) struct BoundArgs {
    /// Milliseconds to the first token.
    #[arg(long, default_value_t = 5000.0, value_name = "MS")]
    pub(super) ttft_bound_ms: f64,
    /// Milliseconds between two tokens, as the mean of the answer.
    #[arg(long, default_value_t = 100.0, value_name = "MS")]
    pub(super) itl_bound_ms: f64,
}

/// Value of `--sync-ms`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum SyncDelay {
    After(Duration),
    Off,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("neither milliseconds nor `off`")]
pub(super) struct SyncDelayError;

impl std::str::FromStr for SyncDelay {
    type Err = SyncDelayError;

    fn from_str(text: &str) -> Result<Self, SyncDelayError> {
        if text == "off" {
            return Ok(Self::Off);
        }
        let millis: f64 = text.parse().map_err(|_| SyncDelayError)?;
        millis_of(millis).map(Self::After).ok_or(SyncDelayError)
    }
}

impl SyncDelay {
    pub(super) const fn delay(self) -> Option<Duration> {
        match self {
            Self::After(delay) => Some(delay),
            Self::Off => None,
        }
    }

    pub(super) fn millis(self) -> Option<f64> {
        self.delay().map(|delay| delay.as_secs_f64() * 1000.0)
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ArgsError {
    #[error("--{flag} {value} is not between {min} and {max}")]
    Range {
        flag: &'static str,
        value: f64,
        min: f64,
        max: f64,
    },
    #[error("--profile instant takes no time: any load is none; say how fast with --capacity")]
    Instant,
    #[error(transparent)]
    Choice(#[from] ChoiceArgsError),
}

/// A validated simulation.
#[derive(Clone, Debug)]
pub(crate) struct SimulationPlan {
    pub(crate) setup: FleetSetup,
    pub(crate) stretch: TraceSlice,
    pub(crate) bounds: LatencyBounds,
    pub(crate) load: f64,
    /// `None` if it is measured.
    pub(crate) capacity: Option<f64>,
}

impl TryFrom<&SimulateArgs> for SimulationPlan {
    type Error = ArgsError;

    fn try_from(args: &SimulateArgs) -> Result<Self, ArgsError> {
        let knobs = Knobs {
            prefix_load_percent: args.prefix_hash_load_percent,
            ..args.choice.clone().try_into()?
        };
        let mut plan = args.replay.plan(knobs)?;
        plan.setup.seed = args.seed;
        plan.stretch.seed = args.seed;
        plan.setup.replicas.draw = args.draw;
        Ok(plan)
    }
}

impl ReplayArgs {
    /// The plan of seed and draw 0.
    pub(crate) fn plan(&self, knobs: Knobs) -> Result<SimulationPlan, ArgsError> {
        let (args, fleet) = (self, &self.fleet);
        let instant = args.profile() == TimingProfile::INSTANT;
        if instant && args.capacity.is_none() {
            return Err(ArgsError::Instant);
        }
        let capacity = args
            .capacity
            .map(|rate| within("capacity", rate, 1e-6, 1e9));
        let workers = within("workers", fleet.workers as f64, 1.0, 4096.0)? as usize;
        let routers = within("routers", args.routers.routers as f64, 1.0, 256.0)? as usize;
        Ok(SimulationPlan {
            setup: FleetSetup {
                workers,
                engine: args.engine()?,
                replicas: RouterSetup {
                    routers,
                    sync_delay: args.routers.sync_ms.delay(),
                    balance: args.routers.balance,
                    draw: 0,
                    knobs,
                },
                slow: args.slow()?,
                event_delay: millis("event-delay-ms", args.routers.event_delay_ms)?,
                seed: 0,
            },
            stretch: TraceSlice {
                requests: args
                    .requests
                    .map(|count| within("requests", count as f64, 1.0, 1e9))
                    .transpose()?
                    .map(|count| count as usize),
                seed: 0,
            },
            bounds: LatencyBounds {
                ttft: millis("ttft-bound-ms", args.bounds.ttft_bound_ms)?,
                itl: millis("itl-bound-ms", args.bounds.itl_bound_ms)?,
            },
            load: within("load", args.load, 1e-6, 1000.0)?,
            capacity: capacity.transpose()?,
        })
    }

    /// Reads the file of the profile, if one is named.
    pub fn read_profile<E>(
        &mut self,
        read: impl FnOnce(&Path) -> Result<String, E>,
    ) -> Result<(), E>
    where
        E: From<ProfileError>,
    {
        if let Some(path) = &self.fleet.profile_file {
            self.fleet.fitted = Some(EngineProfile::parse(&read(path)?)?);
        }
        Ok(())
    }

    pub(super) fn profile_name(&self) -> String {
        let file = self.fleet.profile_file.as_ref();
        file.map_or_else(
            || self.fleet.profile.clone(),
            |path| path.display().to_string(),
        )
    }

    fn profile(&self) -> TimingProfile {
        if let Some(fitted) = &self.fleet.fitted {
            return fitted.timing();
        }
        TimingProfile::by_name(&self.fleet.profile).unwrap_or(TimingProfile::INSTANT)
    }

    fn engine(&self) -> Result<EngineConfig, ArgsError> {
        let (block, fitted) = (self.fleet.block_size, &self.fleet.fitted);
        let fitted = fitted.as_ref().and_then(|fitted| fitted.cache_tokens);
        let tokens = self.fleet.cache_tokens.or(fitted).unwrap_or(CACHE_TOKENS);
        within("cache-tokens", tokens.into(), f64::from(block), 1e9)?;
        let value = within("block-size", block.into(), 1.0, BLOCK_TOKENS_MAX)?;
        let size = BlockSize::new(block).ok_or(ArgsError::Range {
            flag: "block-size",
            value,
            min: 1.0,
            max: BLOCK_TOKENS_MAX,
        })?;
        Ok(super::capacity::engine(size, tokens, self.profile()))
    }

    fn slow(&self) -> Result<SlowWorkers, ArgsError> {
        let fleet = &self.fleet;
        let until = fleet.slow_secs.unwrap_or(SECS_MAX);
        if fleet.slow_worker == 1.0 {
            return Ok(SlowWorkers::NONE);
        }
        Ok(SlowWorkers {
            count: within(
                "slow-workers",
                fleet.slow_workers as f64,
                1.0,
                fleet.workers as f64,
            )? as usize,
            times: within("slow-worker", fleet.slow_worker, 1.0, 1000.0)?,
            until: Duration::from_secs_f64(within("slow-secs", until, 0.0, SECS_MAX)?),
        })
    }

    pub(super) fn balance_word(&self) -> String {
        let value = self.routers.balance.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// 50 GiB for a model of 8 billion parameters.
const CACHE_TOKENS: u32 = 409_600;

/// Hybrid models have blocks of a few thousand tokens.
const BLOCK_TOKENS_MAX: f64 = 65_536.0;

fn within(flag: &'static str, value: f64, min: f64, max: f64) -> Result<f64, ArgsError> {
    if (min..=max).contains(&value) {
        return Ok(value);
    }
    Err(ArgsError::Range {
        flag,
        value,
        min,
        max,
    })
}

/// A trace of a year is a long one.
const SECS_MAX: f64 = 3.2e7;

/// An hour is long for any of these.
const MILLIS_MAX: f64 = 3_600_000.0;

fn millis(flag: &'static str, value: f64) -> Result<Duration, ArgsError> {
    let value = within(flag, value, 0.0, MILLIS_MAX)?;
    Ok(Duration::from_secs_f64(value / 1000.0))
}

fn millis_of(value: f64) -> Option<Duration> {
    millis("", value).ok()
}
