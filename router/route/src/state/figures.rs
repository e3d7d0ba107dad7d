//! What viewers read of the core. Copies only: nothing is rendered under the lock.

use std::time::{Duration, Instant};

use warmroute_proto::Source;

use super::Core;
use crate::candidates::Leg;
use crate::source_table::SourceId;
use crate::traffic::TrafficTotals;

/// Free places of a source that only its engine's metrics bound: so many requests of a queue decide
/// at a time, so that the bound stops the others.
const UNLIMITED_PLACES: u32 = 64;

/// One source's load and speed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SourceFigures {
    pub active_requests: u32,
    /// Prompt tokens of the requests without a first token.
    pub prefill_tokens: u64,
    /// Distinct blocks that the requests hold.
    pub decode_blocks: u64,
    /// Requests of its engine from elsewhere.
    pub foreign_requests: u32,
    /// Average of the recent times to first token; `None` without one in the last minute.
    pub ttft: Option<Duration>,
    /// As [`Core::ttft_ratio`].
    pub ttft_ratio: Option<f64>,
    /// As [`Core::is_stalled`].
    pub is_stalled: bool,
}

impl Core {
    /// Totals since the start.
    #[must_use]
    pub const fn traffic(&self) -> &TrafficTotals {
        &self.traffic.totals
    }

    /// The model's sources that take further requests, each with how many. `None`: without a limit,
    /// or the model has no sources: a request that is admitted there is refused with the reason, and
    /// does not wait for a place in vain.
    #[must_use]
    pub fn free_places(&self, model: &str, now: Instant) -> Option<Vec<(SourceId, u32)>> {
        let room = self.room(now);
        let candidates = self
            .fleet
            .candidates(model, Leg::Whole)
            .ok()
            .filter(|_| room.is_bounded())?;
        let places = candidates.iter().map(|candidate| {
            let places = match room.free_places(candidate.id, None) {
                u32::MAX => UNLIMITED_PLACES,
                places => places,
            };
            (candidate.id, places)
        });
        Some(places.filter(|(_, free)| *free > 0).collect())
    }

    /// Zeros for an unknown source.
    #[must_use]
    pub fn source_figures(&self, source: &Source, now: Instant) -> SourceFigures {
        let Some(id) = self.table.id(source) else {
            return SourceFigures::default();
        };
        let load = self.slots.load(id);
        SourceFigures {
            active_requests: load.active_requests,
            prefill_tokens: load.prefill_tokens,
            decode_blocks: load.decode_blocks,
            foreign_requests: self.engines.foreign(id, now).requests,
            ttft: self.traffic.ttft(id, now),
            ttft_ratio: self.slowness.ratio(id, now),
            is_stalled: self.stalls.is_stalled(id, now),
        }
    }
}
