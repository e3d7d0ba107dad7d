use fastrand::Rng;
use proptest::prelude::*;

use super::*;

#[test]
fn policies_are_taken_as_other_routers_spell_them() {
    for (word, policy) in [
        ("round_robin", Policy::RoundRobin),
        ("power_of_two", Policy::PowerOfTwo),
        ("cache_aware", Policy::Time),
        ("prefix_hash", Policy::PrefixHash),
        ("kv-once", Policy::KvOnce),
    ] {
        assert_eq!(word.parse(), Ok(policy), "{word}");
    }
    assert!("cache_unaware".parse::<Policy>().is_err());
}

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
            chosen[odds.choose(costs, &mut rng)] += 1;
        }
        let reported: Vec<f64> = costs.iter().map(|&cost| odds.of(cost)).collect();
        assert!(
            (reported.iter().sum::<f64>() - 1.0).abs() < 1e-9,
            "{reported:?}"
        );
        for (chosen, reported) in chosen.iter().zip(&reported) {
            let share = f64::from(*chosen) / f64::from(ROUNDS);
            assert!((share - reported).abs() < 0.02, "{share} for {reported}");
        }
    }
}

const DRAWS: u32 = 20_000;

/// How often each index is chosen, as a share.
fn shares(costs: &[f64], temperature: f64, scale: f64) -> Vec<f64> {
    let mut rng = Rng::with_seed(7);
    let odds = Odds::new(costs, temperature, scale).unwrap();
    let mut counts = vec![0_u32; costs.len()];
    for _ in 0..DRAWS {
        counts[odds.choose(costs, &mut rng)] += 1;
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
    assert_eq!(Odds::new(&[], 0.0, 1.0), None);
    assert_eq!(Odds::new(&[], 1.0, 1.0), None);
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
        let odds = Odds::new(&costs, temperature, scale).unwrap();
        prop_assert!(odds.choose(&costs, &mut Rng::with_seed(seed)) < costs.len());
        prop_assert!((1.0..=costs.len() as f64).contains(&odds.sum), "{odds:?}");
    }
}
