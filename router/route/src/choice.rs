//! Choice of one candidate by cost.
//!
//! Temperature 0 takes the lowest cost, and one of several lowest at random. Above 0 it is a
//! softmax over costs, scaled by the cost of prefilling the whole prompt: `P(i) ∝ exp(−(cost_i −
//! cost_min) / (temperature × scale))`. At temperature 1 a source that is worse by the whole prompt
//! is chosen e times less often.
//!
//! The scale depends on the request alone. Dividing by the range of the costs would give a gap of
//! one block and a gap of ten thousand the same odds, and one bad candidate would change the odds
//! of two good ones.

pub(crate) mod power_of_two;
pub(crate) mod prefix_hash;
pub(crate) mod rendezvous;

use fastrand::Rng;
use warmroute_proto::label_enum;

label_enum! {
    /// Routing policy.
    pub enum Policy {
        /// By predicted time, and again after a choice of another router crossed it.
        Time = "time",
        /// Like `Time`, by what was sent to each source instead of the index.
        Approx = "approx",
        /// By cost in blocks (cache and load), and again like `Time`.
        Kv = "kv",
        /// By cost in blocks, never again.
        KvOnce = "kv-once",
        /// Candidates in turn.
        RoundRobin = "round-robin",
        /// Fewest active requests; ties at random.
        LeastLoad = "least-load",
        Random = "random",
        /// The one with fewer active requests of two candidates at random.
        PowerOfTwo = "power-of-two",
        /// By the session that the request names; without one, like `LeastLoad`.
        Session = "session",
        /// By the prompt's beginning, within a bound of load; a shorter prompt like `LeastLoad`.
        PrefixHash = "prefix-hash",
    }
}

impl Policy {
    /// Whether costs are predicted seconds.
    #[must_use]
    pub const fn is_timed(self) -> bool {
        matches!(self, Self::Time | Self::Approx)
    }

    /// Whether a prompt's tokens and the index matter.
    #[must_use]
    pub const fn reads_index(self) -> bool {
        matches!(self, Self::Time | Self::Kv | Self::KvOnce)
    }

    /// Whether prompts do not matter.
    #[must_use]
    pub const fn is_blind(self) -> bool {
        matches!(
            self,
            Self::RoundRobin | Self::LeastLoad | Self::Random | Self::PowerOfTwo | Self::Session
        )
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown policy {0:?}; known are {known}", known = known_policies())]
pub struct UnknownPolicy(String);

fn known_policies() -> String {
    Policy::ALL.map(Policy::label).join(", ")
}

/// By its label, or as other routers spell it: with `_`, and `cache_aware` for the default.
impl std::str::FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(word: &str) -> Result<Self, UnknownPolicy> {
        let label = word.replace('_', "-");
        if label == "cache-aware" {
            return Ok(Self::Time);
        }
        Self::ALL
            .into_iter()
            .find(|policy| policy.label() == label)
            .ok_or_else(|| UnknownPolicy(word.to_owned()))
    }
}

/// Probabilities of a choice among known costs.
///
/// Total: NaN counts as infinite; infinite costs are chosen only among themselves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Odds {
    lowest: f64,
    /// The highest cost that counts as the lowest: sums of the same terms in another order are ties.
    tied_max: f64,
    /// Unit of the softmax; 0 if the lowest costs share the choice.
    unit: f64,
    /// Sum of all weights: at least 1, at most the number of costs.
    sum: f64,
}

impl Odds {
    /// `None` for an empty list. `scale` is the cost of the whole prompt.
    #[must_use]
    pub fn new(costs: &[f64], temperature: f64, scale: f64) -> Option<Self> {
        costs.first()?;
        // `min` passes over NaN.
        let lowest = costs.iter().copied().fold(f64::INFINITY, f64::min);
        let mut odds = Self {
            lowest,
            tied_max: lowest.max(lowest + 1e-9 * lowest.abs().max(1.0)),
            unit: unit(lowest, temperature, scale).unwrap_or(0.0),
            sum: 0.0,
        };
        odds.sum = match odds.unit > 0.0 {
            true => costs.iter().map(|&cost| odds.weight(cost)).sum(),
            false => costs.iter().filter(|cost| odds.is_tied(**cost)).count() as f64,
        };
        Some(odds)
    }

    /// The probability of one of the costs.
    #[must_use]
    pub fn of(&self, cost: f64) -> f64 {
        self.weight(cost) / self.sum
    }

    /// Index of the chosen one of these costs, of which the odds are.
    #[must_use]
    pub fn choose(&self, costs: &[f64], rng: &mut Rng) -> usize {
        if self.unit > 0.0 {
            self.softmax(costs, rng)
        } else {
            self.lowest_at_random(costs, rng)
        }
    }

    #[inline]
    fn weight(&self, cost: f64) -> f64 {
        if self.unit > 0.0 {
            (-(finite_or_infinite(cost) - self.lowest) / self.unit).exp()
        } else {
            f64::from(u8::from(self.is_tied(cost)))
        }
    }

    #[inline]
    fn is_tied(&self, cost: f64) -> bool {
        finite_or_infinite(cost) <= self.tied_max
    }

    /// One pass: the n-th tie replaces the choice with probability 1/n, so that all are equally
    /// likely.
    fn lowest_at_random(&self, costs: &[f64], rng: &mut Rng) -> usize {
        let (mut chosen, mut seen) = (0, 0);
        for (index, &cost) in costs.iter().enumerate() {
            if self.is_tied(cost) {
                seen += 1;
                if rng.usize(0..seen) == 0 {
                    chosen = index;
                }
            }
        }
        chosen
    }

    fn softmax(&self, costs: &[f64], rng: &mut Rng) -> usize {
        let mut left = rng.f64() * self.sum;
        let mut last = 0;
        for (index, &cost) in costs.iter().enumerate() {
            let weight = self.weight(cost);
            if weight > 0.0 {
                if left < weight {
                    return index;
                }
                left -= weight;
                last = index;
            }
        }
        // A remainder of rounding: the last candidate with any weight.
        last
    }
}

/// Divisor of cost differences; `None` if only the lowest cost counts.
fn unit(lowest: f64, temperature: f64, scale: f64) -> Option<f64> {
    let unit = temperature * scale.max(1.0);
    (unit > 0.0 && unit.is_finite() && lowest.is_finite()).then_some(unit)
}

#[inline]
fn finite_or_infinite(cost: f64) -> f64 {
    if cost.is_nan() { f64::INFINITY } else { cost }
}

#[cfg(test)]
mod tests;
