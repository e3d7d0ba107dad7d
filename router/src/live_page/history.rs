//! The last five minutes of totals: one point a second, also while there is no viewer, so that a
//! new page is not empty.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use serde::Serialize;

use super::event;
use crate::route::{RUNGS, TrafficTotals};

/// Points kept: five minutes.
const POINTS_MAX: usize = 300;

/// Points that a quantile covers: ten seconds.
const QUANTILE_POINTS: usize = 10;

/// What happened since the point before.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct HistoryPoint {
    pub unix_ms: u64,
    pub prompt_tokens: u64,
    pub credited_tokens: u64,
    pub reported_prompt_tokens: u64,
    pub reported_cached_tokens: u64,
    /// Decisions by rung, in the order of [`RUNGS`].
    pub rungs: [u64; RUNGS.len()],
    /// Over the last [`QUANTILE_POINTS`] points; `None` without a first token in them.
    pub ttft_p50_ms: Option<f64>,
    pub ttft_p95_ms: Option<f64>,
}

#[derive(Default)]
struct History {
    points: VecDeque<HistoryPoint>,
    /// As of the last points, the newest last.
    totals: VecDeque<TrafficTotals>,
}

/// Written once a second, and read when a viewer joins.
#[derive(Default)]
pub(super) struct SharedHistory(Mutex<History>);

impl SharedHistory {
    /// Adds a point, and returns it.
    pub(super) fn push(&self, unix_ms: u64, totals: TrafficTotals) -> HistoryPoint {
        self.history().push(unix_ms, totals)
    }

    /// All points, oldest first.
    pub(super) fn event(&self) -> Bytes {
        let points: Vec<HistoryPoint> = self.history().points.iter().copied().collect();
        let points = serde_json::to_string(&points);
        event("history", points.as_deref().unwrap_or("[]"))
    }

    fn history(&self) -> MutexGuard<'_, History> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl History {
    fn push(&mut self, unix_ms: u64, totals: TrafficTotals) -> HistoryPoint {
        let none = TrafficTotals::default();
        let last = self.totals.back().unwrap_or(&none);
        let oldest = self.totals.front().unwrap_or(&none);
        let quantile = |share| {
            let ttft = totals.ttft_quantile(oldest, share);
            ttft.map(|ttft| ttft.as_secs_f64() * 1e3)
        };
        let since = |total: fn(&TrafficTotals) -> u64| total(&totals).saturating_sub(total(last));
        let point = HistoryPoint {
            unix_ms,
            prompt_tokens: since(|totals| totals.prompt_tokens),
            credited_tokens: since(|totals| totals.credited_tokens),
            reported_prompt_tokens: since(|totals| totals.reported_prompt_tokens),
            reported_cached_tokens: since(|totals| totals.reported_cached_tokens),
            rungs: std::array::from_fn(|rung| totals.rungs[rung].saturating_sub(last.rungs[rung])),
            ttft_p50_ms: quantile(0.5),
            ttft_p95_ms: quantile(0.95),
        };
        if self.points.len() == POINTS_MAX {
            self.points.pop_front();
        }
        self.points.push_back(point);
        if self.totals.len() == QUANTILE_POINTS {
            self.totals.pop_front();
        }
        self.totals.push_back(totals);
        point
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(decisions: u64) -> TrafficTotals {
        let mut totals = TrafficTotals {
            prompt_tokens: 100 * decisions,
            credited_tokens: 60 * decisions,
            ..TrafficTotals::default()
        };
        totals.rungs[0] = decisions;
        totals
    }

    #[test]
    fn the_page_knows_all_rungs_in_order() {
        let script = include_str!("page.js");
        let places = RUNGS.map(|rung| script.find(&format!("[\"{rung}\", ")));
        assert!(places.iter().all(Option::is_some) && places.is_sorted());
    }

    #[test]
    fn points_are_differences_and_bounded() {
        let mut history = History::default();
        history.push(0, totals(5));
        let point = history.push(1000, totals(7));
        assert_eq!((point.prompt_tokens, point.credited_tokens), (200, 120));
        assert_eq!(point.rungs[0], 2);
        assert_eq!(point.ttft_p50_ms, None);
        for second in 2..1000 {
            history.push(second * 1000, totals(7));
        }
        assert_eq!(history.points.len(), POINTS_MAX);
        assert_eq!(history.totals.len(), QUANTILE_POINTS);
        assert_eq!(history.points[0].unix_ms, 700_000);
    }
}
