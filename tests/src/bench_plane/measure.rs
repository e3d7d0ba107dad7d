//! Samples and their quantiles.

use std::time::Duration;

use serde::Serialize;

/// One line of the output; times in microseconds.
#[derive(Serialize)]
pub(crate) struct Figure {
    pub(crate) what: String,
    /// The target rate, or the measured rate without a target. `None` for sequential calls.
    pub(crate) per_sec: Option<u64>,
    pub(crate) p50_us: Option<u128>,
    pub(crate) p99_us: Option<u128>,
    /// Records that the log acknowledged, or exchanges.
    pub(crate) records: u64,
}

impl Figure {
    pub(crate) fn of(
        what: &str,
        per_sec: Option<u64>,
        records: u64,
        samples: &mut [Duration],
    ) -> Self {
        samples.sort_unstable();
        let at = |per_mille: usize| {
            let last = samples.len().saturating_sub(1);
            samples
                .get(last * per_mille / 1000)
                .map(Duration::as_micros)
        };
        Self {
            what: what.to_owned(),
            per_sec,
            p50_us: at(500),
            p99_us: at(990),
            records,
        }
    }

    pub(crate) fn row(&self) -> String {
        let none = || "–".to_owned();
        let time = |us: Option<u128>| us.map_or_else(none, |us| format!("{us} µs"));
        let (p50, p99) = (time(self.p50_us), time(self.p99_us));
        let rate = self.per_sec.map_or_else(none, |rate| rate.to_string());
        let Self { what, records, .. } = self;
        format!("| {what} | {rate} | {p50} | {p99} | {records} |")
    }
}
