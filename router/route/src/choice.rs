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

use fastrand::Rng;

/// Routing policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// By cost (cache and load), and again after a choice of another router crossed it.
    Kv,
    /// By cost, never again.
    KvOnce,
    /// Candidates in turn.
    RoundRobin,
    /// Fewest active requests; ties at random.
    LeastLoad,
    Random,
}

impl Policy {
    pub const ALL: [Self; 5] = [
        Self::Kv,
        Self::KvOnce,
        Self::RoundRobin,
        Self::LeastLoad,
        Self::Random,
    ];

    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::KvOnce => "kv-once",
            Self::RoundRobin => "round-robin",
            Self::LeastLoad => "least-load",
            Self::Random => "random",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown policy {0:?}; known are kv, kv-once, round-robin, least-load and random")]
pub struct UnknownPolicy(String);

impl std::str::FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(word: &str) -> Result<Self, UnknownPolicy> {
        Self::ALL
            .into_iter()
            .find(|policy| policy.label() == word)
            .ok_or_else(|| UnknownPolicy(word.to_owned()))
    }
}

/// Probabilities of a choice among known costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Odds {
    lowest: f64,
    /// Unit of the softmax; 0 if the lowest costs share the choice.
    unit: f64,
    /// Sum of all weights.
    sum: f64,
}

impl Odds {
    /// The probabilities with which [`choose`] chooses.
    #[must_use]
    pub fn new(costs: &[f64], temperature: f64, scale: f64) -> Option<Self> {
        let lowest = lowest(costs)?;
        let mut odds = Self {
            lowest,
            unit: unit(lowest, temperature, scale).unwrap_or(0.0),
            sum: 0.0,
        };
        odds.sum = costs.iter().map(|&cost| odds.weight(cost)).sum();
        Some(odds)
    }

    /// The probability of one of the costs.
    #[must_use]
    pub fn of(&self, cost: f64) -> f64 {
        self.weight(cost) / self.sum
    }

    fn weight(&self, cost: f64) -> f64 {
        let cost = finite_or_infinite(cost);
        if self.unit > 0.0 {
            (-(cost - self.lowest) / self.unit).exp()
        } else {
            f64::from(u8::from(ties(cost, self.lowest)))
        }
    }
}

fn lowest(costs: &[f64]) -> Option<f64> {
    costs
        .iter()
        .copied()
        .map(finite_or_infinite)
        .min_by(f64::total_cmp)
}

/// Divisor of cost differences; `None` if only the lowest cost counts.
fn unit(lowest: f64, temperature: f64, scale: f64) -> Option<f64> {
    let unit = temperature * scale.max(1.0);
    (unit > 0.0 && unit.is_finite() && lowest.is_finite()).then_some(unit)
}

/// Index of the chosen cost; `None` for an empty list. `scale` is the cost of the whole prompt.
///
/// Total: NaN counts as infinite; infinite costs are chosen only among themselves.
#[must_use]
pub fn choose(costs: &[f64], temperature: f64, scale: f64, rng: &mut Rng) -> Option<usize> {
    let lowest = lowest(costs)?;
    match unit(lowest, temperature, scale) {
        Some(unit) => Some(softmax(costs, lowest, unit, rng)),
        None => lowest_at_random(costs, lowest, rng),
    }
}

/// Equal up to rounding: sums of the same terms in another order are ties.
fn ties(cost: f64, lowest: f64) -> bool {
    cost <= lowest || cost <= lowest + 1e-9 * lowest.abs().max(1.0)
}

/// One pass: the n-th tie replaces the choice with probability 1/n, so that all are equally likely.
fn lowest_at_random(costs: &[f64], lowest: f64, rng: &mut Rng) -> Option<usize> {
    let mut chosen = None;
    let mut seen = 0;
    for (index, &cost) in costs.iter().enumerate() {
        if ties(finite_or_infinite(cost), lowest) {
            seen += 1;
            if rng.usize(0..seen) == 0 {
                chosen = Some(index);
            }
        }
    }
    chosen
}

/// The lowest cost has weight 1, so that the sum is at least 1 and at most the number of costs.
fn softmax(costs: &[f64], lowest: f64, unit: f64, rng: &mut Rng) -> usize {
    let weight = |cost: f64| (-(finite_or_infinite(cost) - lowest) / unit).exp();
    let sum: f64 = costs.iter().copied().map(weight).sum();
    let mut left = rng.f64() * sum;
    let mut last = 0;
    for (index, &cost) in costs.iter().enumerate() {
        let weight = weight(cost);
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

fn finite_or_infinite(cost: f64) -> f64 {
    if cost.is_nan() { f64::INFINITY } else { cost }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reported probabilities are the frequencies of choices.
    #[test]
    fn the_odds_are_the_shares() {
        const ROUNDS: u32 = 20_000;
        let mut rng = Rng::with_seed(5);
        for (temperature, costs) in [
            (0.0, &[3.0, 1.0, 1.0, f64::NAN][..]),
            (0.7, &[3.0, 1.0, 9.0, f64::INFINITY][..]),
            (0.7, &[f64::NAN, f64::INFINITY][..]),
        ] {
            let odds = Odds::new(costs, temperature, 4.0).unwrap();
            let mut chosen = vec![0_u32; costs.len()];
            for _ in 0..ROUNDS {
                chosen[choose(costs, temperature, 4.0, &mut rng).unwrap()] += 1;
            }
            let told: Vec<f64> = costs.iter().map(|&cost| odds.of(cost)).collect();
            assert!((told.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{told:?}");
            for (chosen, told) in chosen.iter().zip(&told) {
                let share = f64::from(*chosen) / f64::from(ROUNDS);
                assert!((share - told).abs() < 0.02, "{share} for {told}");
            }
        }
        assert_eq!(Odds::new(&[], 0.0, 1.0), None);
    }
    use fastrand::Rng;
    use proptest::prelude::*;

    const DRAWS: u32 = 20_000;

    /// How often each index is chosen, as a share.
    fn shares(costs: &[f64], temperature: f64, scale: f64) -> Vec<f64> {
        let mut rng = Rng::with_seed(7);
        let mut counts = vec![0_u32; costs.len()];
        for _ in 0..DRAWS {
            counts[choose(costs, temperature, scale, &mut rng).unwrap()] += 1;
        }
        counts
            .into_iter()
            .map(|count| f64::from(count) / f64::from(DRAWS))
            .collect()
    }

    fn close(found: &[f64], expected: &[f64]) {
        for (found, expected) in found.iter().zip(expected) {
            // Five standard deviations of a share of 20,000 draws are below 0.018.
            assert!((found - expected).abs() < 0.018, "{found} for {expected}");
        }
    }

    #[test]
    fn ties_are_broken_at_random_and_evenly() {
        close(
            &shares(&[5.0, 3.0, 3.0, 9.0, 3.0, 3.0], 0.0, 1.0),
            &[0.0, 0.25, 0.25, 0.0, 0.25, 0.25],
        );
    }

    #[test]
    fn the_lowest_always_wins_at_temperature_zero() {
        assert_eq!(shares(&[5.0, 2.999, 3.0], 0.0, 1.0), [0.0, 1.0, 0.0]);
    }

    #[test]
    fn softmax_has_the_documented_odds() {
        // A gap of one whole prompt at temperature 1: e to 1.
        let e = std::f64::consts::E;
        let expected = [e / (e + 1.0), 1.0 / (e + 1.0)];
        close(&shares(&[10.0, 110.0], 1.0, 100.0), &expected);
        close(&shares(&[10.0, 60.0], 0.5, 100.0), &expected);
    }

    #[test]
    fn the_gap_keeps_its_absolute_meaning() {
        let small = shares(&[0.0, 1.0], 1.0, 100.0);
        let large = shares(&[0.0, 10_000.0], 1.0, 100.0);
        close(&small, &[0.5025, 0.4975]);
        close(&large, &[1.0, 0.0]);
    }

    #[test]
    fn a_bad_candidate_does_not_change_the_odds_of_the_others() {
        let two = shares(&[0.0, 50.0], 1.0, 100.0);
        let three = shares(&[0.0, 50.0, 100_000.0], 1.0, 100.0);
        close(&three[..2], &two);
    }

    #[test]
    fn nothing_to_choose_from_is_no_choice() {
        assert_eq!(choose(&[], 0.0, 1.0, &mut Rng::with_seed(1)), None);
        assert_eq!(choose(&[], 1.0, 1.0, &mut Rng::with_seed(1)), None);
    }

    #[test]
    fn what_is_no_number_is_never_preferred() {
        for temperature in [0.0, 1.0] {
            assert_eq!(
                shares(&[f64::NAN, 4.0, f64::INFINITY], temperature, 1.0),
                [0.0, 1.0, 0.0]
            );
        }
        close(&shares(&[f64::NAN, f64::INFINITY], 1.0, 1.0), &[0.5, 0.5]);
    }

    #[test]
    fn every_policy_is_known_by_its_word() {
        for policy in Policy::ALL {
            assert_eq!(policy.label().parse(), Ok(policy));
        }
        assert!("fastest".parse::<Policy>().is_err());
    }

    proptest! {
        #[test]
        fn any_costs_have_a_choice(
            costs in prop::collection::vec(prop::num::f64::ANY, 1..20),
            temperature in prop::num::f64::ANY,
            scale in prop::num::f64::ANY,
            seed: u64,
        ) {
            let chosen = choose(&costs, temperature, scale, &mut Rng::with_seed(seed));
            prop_assert!(chosen.is_some_and(|index| index < costs.len()));
        }
    }
}
