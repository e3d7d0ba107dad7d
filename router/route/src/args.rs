//! The flags that set the [`Knobs`].

use clap::Args;
use warmroute_proto::Tiers;

use crate::choice::Policy;
use crate::cost::Knobs;

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Choice")]
pub struct ChoiceArgs {
    /// How a worker is chosen: `time` by predicted time, learned for each worker; `kv` weighs cache
    /// overlap against load by the two flags below. Both decide again if another router's choice
    /// crossed theirs; `kv-once` never does. `approx` is `time` by what was sent to each worker,
    /// without tokenizer and index. Policies to compare with: `round-robin`, `least-load`, `random` and
    /// `power-of-two` ignore the cache; `session` keeps a session on one worker, `prefix-hash` a
    /// prompt's beginning. `round_robin`, `power_of_two` and `cache_aware` (`time`) are taken as other
    /// routers have them. [default: time; kv if one of the two flags below is set]
    #[arg(long, env = "WARMROUTE_POLICY")]
    pub policy: Option<Policy>,
    /// Weight of a block to prefill against a block to decode, ≥ 0. Higher favours time to first
    /// token, lower favours even decoding. [default: 1]
    #[arg(
        long,
        env = "WARMROUTE_OVERLAP_SCORE_WEIGHT",
        value_name = "WEIGHT",
        allow_negative_numbers = true
    )]
    pub overlap_score_weight: Option<f64>,
    /// Randomness of the choice, ≥ 0: 0 takes the lowest cost, higher spreads over near ones.
    /// [default: 0]
    #[arg(
        long,
        env = "WARMROUTE_ROUTER_TEMPERATURE",
        value_name = "TEMPERATURE",
        allow_negative_numbers = true
    )]
    pub router_temperature: Option<f64>,
    /// What a cached block is worth that is not on the GPU, against one that is: 0 to 1. Lower where
    /// loading it is slow.
    #[arg(
        long,
        env = "WARMROUTE_TIER_CREDITS",
        default_value = "cpu=0.8,disk=0.3"
    )]
    pub tier_credits: TierCredits,
    /// Concurrent requests on one rank; when all ranks are full, requests wait in the router.
    /// Unbounded where it is not given: engines queue.
    #[arg(long, env = "WARMROUTE_MAX_ACTIVE_REQUESTS", value_name = "REQUESTS")]
    pub max_active_requests: Option<u32>,
}

/// A flag of [`ChoiceArgs`] with a value out of range.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum ChoiceArgsError {
    #[error("--{flag} {value} is not a finite number of at least 0")]
    Negative { flag: &'static str, value: f64 },
    #[error("--max-active-requests 0 is not between 1 and {max}", max = u32::MAX)]
    NoRequests,
    #[error(
        "--policy time and approx have neither --overlap-score-weight nor --router-temperature"
    )]
    Unweighed,
}

impl TryFrom<ChoiceArgs> for Knobs {
    type Error = ChoiceArgsError;

    fn try_from(args: ChoiceArgs) -> Result<Self, ChoiceArgsError> {
        if args.max_active_requests == Some(0) {
            return Err(ChoiceArgsError::NoRequests);
        }
        let is_weighed = args.overlap_score_weight.is_some() || args.router_temperature.is_some();
        let implied = if is_weighed { Policy::Kv } else { Policy::Time };
        let policy = args.policy.unwrap_or(implied);
        if policy.is_timed() && is_weighed {
            return Err(ChoiceArgsError::Unweighed);
        }
        let default = Self::default();
        let overlap_score_weight =
            (args.overlap_score_weight).unwrap_or(default.overlap_score_weight);
        let temperature = args.router_temperature.unwrap_or(default.temperature);
        Ok(Self {
            policy,
            overlap_score_weight: weight("overlap-score-weight", overlap_score_weight)?,
            temperature: weight("router-temperature", temperature)?,
            tier_weights: Tiers {
                gpu: 1.0,
                cpu: args.tier_credits.cpu,
                disk: args.tier_credits.disk,
            },
            active_max: args.max_active_requests,
            ..default
        })
    }
}

fn weight(flag: &'static str, value: f64) -> Result<f64, ChoiceArgsError> {
    if value.is_finite() && value >= 0.0 {
        return Ok(value);
    }
    Err(ChoiceArgsError::Negative { flag, value })
}

/// Value of `--tier-credits`: `cpu=` and `disk=`, each between 0 and 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierCredits {
    pub cpu: f64,
    pub disk: f64,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not cpu=C or disk=D with a number from 0 to 1, each at most once")]
pub struct TierCreditsError(String);

impl std::str::FromStr for TierCredits {
    type Err = TierCreditsError;

    fn from_str(spec: &str) -> Result<Self, TierCreditsError> {
        let (mut cpu, mut disk) = (None, None);
        for part in spec.split(',') {
            let wrong = || TierCreditsError(part.to_owned());
            let (tier, credit) = part.split_once('=').ok_or_else(wrong)?;
            let credit: f64 = credit.parse().map_err(|_| wrong())?;
            let slot = match tier {
                "cpu" => &mut cpu,
                "disk" => &mut disk,
                _ => return Err(wrong()),
            };
            if !(0.0..=1.0).contains(&credit) || slot.replace(credit).is_some() {
                return Err(wrong());
            }
        }
        Ok(Self {
            cpu: cpu.unwrap_or(0.8),
            disk: disk.unwrap_or(0.3),
        })
    }
}
