//! Robust linear regression.

/// Rounds of reweighting; the coefficients change little after five.
const ROUNDS: usize = 12;

/// Residuals beyond so many median residuals count less, in proportion: Huber's weights.
const HUBER: f64 = 2.0;

/// Coefficients of at least 0 by iteratively reweighted least squares. One that the rows do not
/// determine is 0.
pub(super) fn fit<const N: usize>(rows: &[([f64; N], f64)]) -> [f64; N] {
    let mut weights = vec![1.0; rows.len()];
    let mut found = [0.0; N];
    for _ in 0..ROUNDS {
        found = non_negative(rows, &weights);
        let residual = |(row, value): &([f64; N], f64)| (value - dot(row, &found)).abs();
        let mut sorted: Vec<f64> = rows.iter().map(residual).collect();
        sorted.sort_by(f64::total_cmp);
        let median = sorted.get(sorted.len() / 2).copied().unwrap_or_default();
        let usual = HUBER * median.max(1e-12);
        for (weight, row) in weights.iter_mut().zip(rows) {
            *weight = (usual / residual(row)).min(1.0);
        }
    }
    found
}

fn dot<const N: usize>(row: &[f64; N], by: &[f64; N]) -> f64 {
    row.iter().zip(by).map(|(one, other)| one * other).sum()
}

/// Least squares in which a coefficient that would be negative is 0.
fn non_negative<const N: usize>(rows: &[([f64; N], f64)], weights: &[f64]) -> [f64; N] {
    let mut is_used = [true; N];
    loop {
        let found = solve(rows, weights, is_used);
        match (0..N).find(|&at| found[at] < 0.0) {
            Some(negative) => is_used[negative] = false,
            None => return found,
        }
    }
}

/// Solves the normal equations by elimination; unused coefficients are 0.
fn solve<const N: usize>(
    rows: &[([f64; N], f64)],
    weights: &[f64],
    is_used: [bool; N],
) -> [f64; N] {
    let mut matrix = [[0.0; N]; N];
    let mut right = [0.0; N];
    for ((row, value), weight) in rows.iter().zip(weights) {
        for one in 0..N {
            right[one] += weight * row[one] * value;
            for other in 0..N {
                matrix[one][other] += weight * row[one] * row[other];
            }
        }
    }
    let sizes: [f64; N] = std::array::from_fn(|at| matrix[at][at]);
    for at in 0..N {
        // A pivot that nearly vanishes is a column that the columns before it determine.
        if !is_used[at] || matrix[at][at] <= 1e-9 * sizes[at] {
            matrix[at] = [0.0; N];
            matrix.iter_mut().for_each(|row| row[at] = 0.0);
            (matrix[at][at], right[at]) = (1.0, 0.0);
        }
        for below in at + 1..N {
            let (pivot, factor) = (matrix[at], matrix[below][at] / matrix[at][at]);
            for (value, above) in matrix[below].iter_mut().zip(pivot) {
                *value -= factor * above;
            }
            right[below] -= factor * right[at];
        }
    }
    let mut found = [0.0; N];
    for at in (0..N).rev() {
        let known: f64 = (at + 1..N)
            .map(|after| matrix[at][after] * found[after])
            .sum();
        found[at] = (right[at] - known) / matrix[at][at];
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(outlier: f64) -> Vec<([f64; 3], f64)> {
        let mut rng = fastrand::Rng::with_seed(1);
        let row = |at: usize| {
            let row = [1.0, 10.0 * rng.f64(), rng.f64()];
            let noise = 0.1 * (rng.f64() - 0.5);
            let value = dot(&row, &[3.0, 0.5, 2.0]) + noise;
            (
                row,
                if at.is_multiple_of(10) {
                    value + outlier
                } else {
                    value
                },
            )
        };
        (0..500).map(row).collect()
    }

    #[test]
    fn a_tenth_of_outliers_moves_no_coefficient_far() {
        for outlier in [0.0, 100.0] {
            let found = fit(&rows(outlier));
            for (found, wanted) in found.iter().zip([3.0, 0.5, 2.0]) {
                assert!((found - wanted).abs() < 0.05, "{found} for {wanted}");
            }
        }
    }

    #[test]
    fn no_coefficient_is_negative() {
        let rows: Vec<_> = (1..50)
            .map(|x| ([1.0, f64::from(x)], 100.0 - f64::from(x)))
            .collect();
        let [base, slope] = fit(&rows);
        assert_eq!(slope, 0.0);
        assert!(base > 50.0);
    }

    #[test]
    fn a_coefficient_that_no_row_determines_is_zero() {
        assert_eq!(fit(&[([1.0, 2.0], 3.0); 9]), [3.0, 0.0]);
        assert_eq!(fit(&[([0.0, 1.0], 3.0); 9]), [0.0, 3.0]);
        assert_eq!(fit::<1>(&[]), [0.0]);
    }
}
