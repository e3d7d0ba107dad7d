//! The power of two choices: of two candidates that are drawn at random, the one with fewer active
//! requests.

use fastrand::Rng;

/// Index of the chosen one; `None` for an empty list. The draw decides between equal loads.
pub(crate) fn choose(active: &[u32], rng: &mut Rng) -> Option<usize> {
    let others = active.len().checked_sub(1)?;
    let first = rng.usize(..active.len());
    if others == 0 {
        return Some(first);
    }
    // One of the others: from its own place on, places are one higher.
    let drawn = rng.usize(..others);
    let second = drawn + usize::from(drawn >= first);
    Some(if active[second] < active[first] {
        second
    } else {
        first
    })
}

/// The probability with which [`choose`] takes a candidate with this load, one of `active`.
pub(crate) fn probability(of: u32, active: impl Iterator<Item = u32>) -> f64 {
    let (mut wins, mut count) = (-0.5, 0_u32);
    for other in active {
        count += 1;
        wins += match of.cmp(&other) {
            std::cmp::Ordering::Less => 1.0,
            std::cmp::Ordering::Equal => 0.5,
            std::cmp::Ordering::Greater => 0.0,
        };
    }
    match count {
        0 | 1 => f64::from(count),
        count => wins / (f64::from(count) * f64::from(count - 1) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_have_the_probabilities_that_are_named() {
        let mut rng = Rng::with_seed(3);
        for active in [&[5][..], &[3, 3], &[0, 1, 2, 9], &[4, 4, 1, 7, 7]] {
            let mut chosen = vec![0_u32; active.len()];
            for _ in 0..20_000 {
                chosen[choose(active, &mut rng).unwrap()] += 1;
            }
            for (&of, &times) in active.iter().zip(&chosen) {
                let named = probability(of, active.iter().copied());
                let found = f64::from(times) / 20_000.0;
                assert!((found - named).abs() < 0.02, "{active:?}: {found}, {named}");
            }
        }
        assert_eq!(choose(&[], &mut rng), None);
    }

    #[test]
    fn the_busiest_of_several_is_never_chosen() {
        let mut rng = Rng::with_seed(4);
        assert!((0..1000).all(|_| choose(&[1, 1, 2], &mut rng) != Some(2)));
    }
}
