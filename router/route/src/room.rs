//! How many further requests a source takes.

use std::time::Instant;

use super::engine_load::EngineLoads;
use super::slots::{SlotKey, Slots};
use super::source_table::SourceId;

/// What bounds the requests of sources.
#[derive(Clone, Copy, Debug)]
pub struct SourceRoom<'a> {
    pub slots: &'a Slots,
    pub engines: &'a EngineLoads,
    /// Requests at which a source takes no more, foreign ones included.
    pub active_max: Option<u32>,
    pub now: Instant,
}

impl SourceRoom<'_> {
    #[must_use]
    pub const fn is_bounded(&self) -> bool {
        self.active_max.is_some() || self.engines.is_on()
    }

    /// Further requests that the source takes, as if the slot `except` were not open; `u32::MAX`
    /// without a limit.
    #[must_use]
    pub fn free_places(&self, source: SourceId, except: Option<SlotKey>) -> u32 {
        let blocks = self.slots.load(source).decode_blocks;
        if self.engines.is_full(source, blocks, self.now) {
            return 0;
        }
        let Some(most) = self.active_max else {
            return u32::MAX;
        };
        let foreign = self.engines.foreign(source, self.now).requests;
        let active = self.slots.active_requests(source, except);
        most.saturating_sub(active.saturating_add(foreign))
    }
}
