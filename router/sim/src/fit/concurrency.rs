//! Sum of the values of intervals that are open at a time, on average.

/// Values of overlapping intervals, integrated over time.
#[derive(Debug, Default)]
pub(super) struct Concurrency {
    /// Times at which the sum changes, ascending, with the sum after and the area before.
    changes: Vec<(f64, f64, f64)>,
}

/// An interval in seconds, and what it adds while it is open.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpenInterval {
    pub start: f64,
    pub end: f64,
    pub value: f64,
}

impl Concurrency {
    pub(super) fn new(intervals: impl Iterator<Item = OpenInterval>) -> Self {
        let mut edges: Vec<(f64, f64)> = intervals
            .flat_map(|one| [(one.start, one.value), (one.end, -one.value)])
            .collect();
        edges.sort_by(|one, other| one.0.total_cmp(&other.0));
        let (mut sum, mut area, mut last) = (0.0, 0.0, 0.0);
        let changes = edges.into_iter().map(|(at, by)| {
            area += sum * (at - last);
            sum += by;
            last = at;
            (at, sum, area)
        });
        Self {
            changes: changes.collect(),
        }
    }

    /// The mean sum between two times.
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
            Some((since, sum, area)) => area + sum * (at - since),
            None => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_counts_each_interval_by_its_part() {
        let intervals = [(0.0, 4.0, 1.0), (1.0, 2.0, 1.0), (3.0, 9.0, 2.0)];
        let intervals = intervals.map(|(start, end, value)| OpenInterval { start, end, value });
        let found = Concurrency::new(intervals.into_iter());
        assert_eq!(found.mean(0.0, 4.0), 7.0 / 4.0);
        assert_eq!(found.mean(1.0, 2.0), 2.0);
        assert_eq!(found.mean(8.0, 10.0), 1.0);
        assert_eq!((found.mean(20.0, 21.0), found.mean(5.0, 5.0)), (0.0, 0.0));
    }
}
