//! What viewers read of the core. Copies only: nothing is rendered under the lock.

use std::time::{Duration, Instant};

use warmroute_proto::Source;

use super::Core;
use crate::slots::ActiveLoad;
use crate::traffic::TrafficTotals;

/// One source's load and speed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SourceFigures {
    pub active_requests: u32,
    /// Prompt tokens of the requests without a first token.
    pub prefill_tokens: u64,
    /// Distinct blocks that the requests hold.
    pub decode_blocks: u64,
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

    /// Further requests that the model's sources take before all are full, `most` at the most. A
    /// model without sources has room: a request that is admitted there is refused with the reason,
    /// and does not wait for a place in vain.
    #[must_use]
    pub fn room(&self, model: &str, most: u32) -> u32 {
        let (Ok(candidates), Some(active_max)) =
            (self.fleet.candidates(model), self.knobs.active_max)
        else {
            return most;
        };
        let mut room = 0;
        for candidate in candidates {
            let active = self.slots.active_requests(candidate.id, None);
            room = active_max.saturating_sub(active).saturating_add(room);
            if room >= most {
                return most;
            }
        }
        room
    }

    /// Zeros for an unknown source.
    #[must_use]
    pub fn source_figures(&self, source: &Source, now: Instant) -> SourceFigures {
        let Some(id) = self.table.id(source) else {
            return SourceFigures::default();
        };
        let load = self.slots.load(id);
        SourceFigures {
            active_requests: load.map_or(0, ActiveLoad::active_requests),
            prefill_tokens: load.map_or(0, ActiveLoad::prefill_tokens),
            decode_blocks: load.map_or(0, ActiveLoad::decode_blocks),
            ttft: self.traffic.ttft(id, now),
            ttft_ratio: self.slowness.ratio(id, now),
            is_stalled: self.stalls.is_stalled(id, now),
        }
    }
}
