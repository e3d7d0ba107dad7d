//! Readings of the engines' metrics ([`crate::engine_load`]).

use std::time::Instant;

use warmroute_proto::{DpRank, Source, WorkerId};

use super::Core;
use crate::engine_load::{EngineBounds, EngineReading, ForeignLoad, RoutedLoad};
use crate::room::SourceRoom;
use crate::source_table::SourceId;

impl Core {
    /// Sets the bounds of engines' metrics; `None`: metrics have no effect.
    pub fn set_engine_bounds(&mut self, bounds: Option<EngineBounds>) {
        self.engines.set_bounds(bounds);
    }

    /// The routers' open requests at each rank of a worker.
    #[must_use]
    pub fn rank_requests(&self, worker: &WorkerId, ranks: u32) -> Vec<u32> {
        let requests = |rank| {
            let id = self.table.id(&source(worker, rank));
            id.map_or(0, |id| self.slots.active_requests(id, None))
        };
        (0..ranks).map(requests).collect()
    }

    /// Takes a reading of each rank of a worker. `before`: [`Self::rank_requests`] at the time when
    /// the engine was asked.
    pub fn engine_read(
        &mut self,
        worker: &WorkerId,
        readings: &[EngineReading],
        before: &[u32],
        now: Instant,
    ) {
        let capacity = self.fleet.blocks_per_rank(worker);
        for ((rank, reading), before) in (0..).zip(readings).zip(before) {
            let id = self.table.intern(&source(worker, rank));
            let load = self.slots.load(id);
            let routed = RoutedLoad {
                requests: (*before).max(load.active_requests),
                blocks: load.decode_blocks,
            };
            self.engines.learn(id, *reading, routed, capacity, now);
        }
    }

    /// What the source's engine reported last and how much of it is foreign, while it counts.
    #[must_use]
    pub fn engine_load(
        &self,
        source: &Source,
        now: Instant,
    ) -> Option<(EngineReading, ForeignLoad)> {
        let id = self.table.id(source)?;
        let reading = self.engines.reading(id, now)?;
        Some((reading, self.engines.foreign(id, now)))
    }

    pub(super) const fn room(&self, now: Instant) -> SourceRoom<'_> {
        SourceRoom {
            slots: &self.slots,
            engines: &self.engines,
            active_max: self.knobs.active_max,
            now,
        }
    }

    /// Active requests of a source, foreign ones included.
    pub(super) fn concurrent(&self, source: SourceId, now: Instant) -> u32 {
        let active = self.slots.active_requests(source, None);
        active.saturating_add(self.engines.foreign(source, now).requests)
    }

    /// Tokens of waiting prompts from elsewhere, where their size is known.
    pub(super) fn foreign_tokens(&self, source: SourceId, block_tokens: u32, now: Instant) -> u64 {
        let foreign = self.engines.foreign(source, now);
        let blocks = f64::from(foreign.waiting) * foreign.request_blocks.unwrap_or(0.0);
        // A saturating cast of a number of at least 0.
        (blocks * f64::from(block_tokens)) as u64
    }
}

fn source(worker: &WorkerId, rank: u32) -> Source {
    Source {
        worker: worker.clone(),
        dp_rank: DpRank(rank),
    }
}
