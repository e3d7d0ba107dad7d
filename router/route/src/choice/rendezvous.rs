//! Rendezvous hashing: each source has a weight for a key, and the heaviest source owns the key.
//!
//! Weights depend on key and source alone, so that all routers agree without exchanging anything.
//! When a source leaves, only its own keys get another owner; a new source takes an equal share from
//! each of the others.

use warmroute_proto::Source;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The weight of a source for a key.
pub(super) fn weight(key: u64, source: &Source) -> u64 {
    // An odd factor, so that the seeds of all ranks differ.
    let rank = u64::from(source.dp_rank.0).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    xxh3_64_with_seed(source.worker.as_str().as_bytes(), key.wrapping_add(rank))
}

/// Index of the source that owns the key; `None` for an empty list.
pub(crate) fn owner<'s>(key: u64, sources: impl Iterator<Item = &'s Source>) -> Option<usize> {
    let weighed = sources.enumerate();
    let heaviest = weighed.max_by_key(|(_, source)| weight(key, source));
    heaviest.map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmroute_proto::DpRank;

    fn sources(count: u32) -> Vec<Source> {
        let source = |number: u32| Source {
            worker: format!("w{}", number / 2).into(),
            dp_rank: DpRank(number % 2),
        };
        (0..count).map(source).collect()
    }

    #[test]
    fn sources_own_equal_shares_of_keys() {
        let sources = sources(8);
        let mut owned = [0_u32; 8];
        for key in 0..8000 {
            owned[owner(key, sources.iter()).unwrap()] += 1;
        }
        // Five standard deviations are 148.
        assert!(
            owned.iter().all(|&keys| keys.abs_diff(1000) < 150),
            "{owned:?}"
        );
    }

    #[test]
    fn only_the_keys_of_a_source_that_leaves_move() {
        let all = sources(8);
        let left: Vec<&Source> = all.iter().filter(|source| **source != all[3]).collect();
        let mut moved = [0_u32; 8];
        for key in 0..8000 {
            let before = &all[owner(key, all.iter()).unwrap()];
            let after = left[owner(key, left.iter().copied()).unwrap()];
            if before == &all[3] {
                moved[all.iter().position(|source| source == after).unwrap()] += 1;
            } else {
                assert_eq!(before, after);
            }
        }
        // Its thousand keys are spread over the other seven.
        let spread = moved.iter().filter(|&&keys| keys.abs_diff(143) < 60);
        assert_eq!(spread.count(), 7, "{moved:?}");
    }

    #[test]
    fn the_order_of_sources_does_not_matter() {
        let all = sources(8);
        for key in 0..100 {
            let one = &all[owner(key, all.iter()).unwrap()];
            let place = owner(key, all.iter().rev()).unwrap();
            assert_eq!(one, &all[7 - place]);
        }
        assert_eq!(owner(1, std::iter::empty()), None);
    }
}
