//! The number of the next generation.

use warmroute_proto::Generation;

/// 1 + the highest of `above`, the registry's generation and the log's. Implausible values are left
/// out, lowest first: a damaged or malicious one must not use up the numbers. `None` if no number is
/// left.
#[must_use]
pub fn next_generation(
    above: Generation,
    registered: Option<Generation>,
    last: Option<Generation>,
) -> Option<Generation> {
    let mut others: Vec<Generation> = registered.into_iter().chain(last).collect();
    others.sort_unstable();
    let highest = others.into_iter().fold(above, |highest, other| {
        if other.is_plausible_after(highest) {
            highest.max(other)
        } else {
            highest
        }
    });
    highest.next()
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: u64 = u64::MAX;
    const FAR: u64 = 1 << 40;

    fn next(above: u64, registered: Option<u64>, last: Option<u64>) -> Option<u64> {
        let next = next_generation(
            Generation(above),
            registered.map(Generation),
            last.map(Generation),
        );
        next.map(|next| next.0)
    }

    #[test]
    fn the_next_one_is_above_all_that_are_known() {
        assert_eq!(next(0, None, None), Some(1));
        assert_eq!(next(3, Some(7), Some(5)), Some(8));
        assert_eq!(next(3, Some(5), Some(7)), Some(8));
        assert_eq!(next(9, Some(5), Some(7)), Some(10));
        assert_eq!(
            next(1 << 32, Some(2 << 32), Some(3 << 32)),
            Some((3 << 32) + 1)
        );
    }

    #[test]
    fn no_single_value_uses_up_the_numbers() {
        for impossible in [FAR, END - 1, END] {
            assert_eq!(next(3, Some(impossible), Some(7)), Some(8));
            assert_eq!(next(3, Some(7), Some(impossible)), Some(8));
            assert_eq!(next(3, Some(impossible), Some(impossible)), Some(4));
            assert_eq!(next(0, Some(impossible), None), Some(1));
        }
    }

    /// Behind the last number nothing is claimed: the same one would fence no reader.
    #[test]
    fn no_number_is_given_twice() {
        assert_eq!(next(END - 1, Some(END - 1), None), Some(END));
        assert_eq!(next(END - 1, Some(END), None), None);
        assert_eq!(next(END, None, None), None);
    }
}
