//! Differences that are paired by seed.

/// A ratio with the bounds of its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PairedRatio {
    pub(super) ratio: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

impl PairedRatio {
    /// Geometric mean of one side over the other; both are logarithms, in the order of seeds.
    pub(super) fn of(
        one: impl Iterator<Item = f64>,
        other: impl Iterator<Item = f64>,
    ) -> Option<Self> {
        let differences: Vec<f64> = one.zip(other).map(|(one, other)| one - other).collect();
        let count = differences.len();
        let t = student_t(count.checked_sub(1)?)?;
        let mean = differences.iter().sum::<f64>() / count as f64;
        let squares: f64 = differences.iter().map(|each| (each - mean).powi(2)).sum();
        let error = (squares / (count - 1) as f64 / count as f64).sqrt();
        Some(Self {
            ratio: mean.exp(),
            low: (mean - t * error).exp(),
            high: (mean + t * error).exp(),
        })
    }

    /// The interval contains no difference.
    pub(super) fn is_noise(&self) -> bool {
        self.low <= 1.0 && self.high >= 1.0
    }

    /// As a difference in percent, with the interval.
    pub(super) fn percent(&self) -> String {
        let [ratio, low, high] = [self.ratio, self.low, self.high].map(|r| (r - 1.0) * 100.0);
        format!("{ratio:+.1} % [{low:+.1}, {high:+.1}]")
    }
}

/// The 97.5 % quantile of Student's t; of a count between two entries the larger one.
fn student_t(freedom: usize) -> Option<f64> {
    const QUANTILES: [(usize, f64); 14] = [
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (4, 2.776),
        (5, 2.571),
        (6, 2.447),
        (7, 2.365),
        (8, 2.306),
        (9, 2.262),
        (10, 2.228),
        (15, 2.131),
        (20, 2.086),
        (30, 2.042),
        (60, 2.000),
    ];
    let mut known = QUANTILES.iter().rev();
    known.find(|(least, _)| *least <= freedom).map(|(_, t)| *t)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_constant_difference_is_certain_and_a_wide_one_noise() {
        let ratio = |one: &[f64], other: &[f64]| {
            PairedRatio::of(one.iter().copied(), other.iter().copied())
        };
        let half = ratio(
            &[1.0, 2.0, 5.0],
            &[1.0 + 2f64.ln(), 2.0 + 2f64.ln(), 5.0 + 2f64.ln()],
        );
        let half = half.unwrap();
        assert!((half.ratio - 0.5).abs() < 1e-9 && (half.high - 0.5).abs() < 1e-9);
        assert!(!half.is_noise());
        assert_eq!(half.percent(), "-50.0 % [-50.0, -50.0]");
        assert!(
            ratio(&[0.0, 1.0, 2.0], &[1.0, 0.0, 2.1])
                .unwrap()
                .is_noise()
        );
        assert_eq!(ratio(&[1.0], &[2.0]), None);
        assert_eq!(ratio(&[], &[]), None);
    }

    /// Differences 1, 2, 3: mean 2, standard error 1/√3, t of 2 degrees of freedom 4.303.
    #[test]
    fn the_interval_is_students() {
        let one = [1.0, 2.0, 3.0].into_iter();
        let found = PairedRatio::of(one, [0.0; 3].into_iter()).unwrap();
        assert!((found.high.ln() - (2.0 + 4.303 / 3f64.sqrt())).abs() < 1e-9);
    }
}
