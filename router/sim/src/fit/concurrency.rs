//! How many intervals are open at a time, on average.

/// Counts of overlapping intervals, integrated over time.
#[derive(Debug, Default)]
pub(super) struct Concurrency {
    /// Times at which the count changes, ascending, with the count after and the area before.
    changes: Vec<(f64, f64, f64)>,
}

impl Concurrency {
    /// Intervals as (start, end) in seconds.
    pub(super) fn new(intervals: impl Iterator<Item = (f64, f64)>) -> Self {
        let mut edges: Vec<(f64, f64)> = intervals
            .flat_map(|(start, end)| [(start, 1.0), (end, -1.0)])
            .collect();
        edges.sort_by(|one, other| one.0.total_cmp(&other.0));
        let (mut count, mut area, mut last) = (0.0, 0.0, 0.0);
        let changes = edges.into_iter().map(|(at, by)| {
            area += count * (at - last);
            count += by;
            last = at;
            (at, count, area)
        });
        Self {
            changes: changes.collect(),
        }
    }

    /// The mean number of open intervals between two times.
    pub(super) fn mean(&self, start: f64, end: f64) -> f64 {
        if end > start {
            (self.area(end) - self.area(start)) / (end - start)
        } else {
            0.0
        }
    }

    fn area(&self, at: f64) -> f64 {
        let later = self.changes.partition_point(|change| change.0 <= at);
        match later.checked_sub(1).map(|place| self.changes[place]) {
            Some((since, count, area)) => area + count * (at - since),
            None => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_counts_each_interval_by_its_part() {
        let found = Concurrency::new([(0.0, 4.0), (1.0, 2.0), (3.0, 9.0)].into_iter());
        assert_eq!(found.mean(0.0, 4.0), 6.0 / 4.0);
        assert_eq!(found.mean(1.0, 2.0), 2.0);
        assert_eq!(found.mean(8.0, 10.0), 0.5);
        assert_eq!((found.mean(20.0, 21.0), found.mean(5.0, 5.0)), (0.0, 0.0));
    }
}
