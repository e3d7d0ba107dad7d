//! Requests that engines have from elsewhere, by the engines' metrics.
//!
//! An engine may serve others than this fleet's routers: another router, or batch jobs. Slots do not
//! show their requests; a reading of the engine's metrics does. What it counts beyond the open slots
//! of all routers is *foreign*. The caller counts the slots before and after a reading, so that a
//! request that begins or ends between is not taken for a foreign one.
//!
//! A reading counts for [`READING_LIFE`]; without one a source has no foreign requests.

use std::time::{Duration, Instant};

use super::source_table::{PerSource, SourceId};

/// Time after which a reading no longer counts. Engines are read each second; a busy engine may miss
/// some readings.
pub const READING_LIFE: Duration = Duration::from_secs(5);

/// One rank's metrics.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineReading {
    pub running: u32,
    pub waiting: u32,
    /// Share of the KV blocks that running requests hold, 0 to 1; `None` if it is not reported.
    pub kv_usage: Option<f64>,
}

/// What the routers have at a source at the time of a reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoutedLoad {
    pub requests: u32,
    /// Distinct blocks of these requests.
    pub blocks: u64,
}

/// At which a source takes no more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineBounds {
    /// Foreign requests that wait in the engine.
    pub foreign_waiting: u32,
    /// Share of the KV blocks in use.
    pub kv_usage: f64,
}

/// Requests of an engine that no router of the fleet sent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ForeignLoad {
    /// Running and waiting.
    pub requests: u32,
    /// At most so many of them wait: which request waits is not reported.
    pub waiting: u32,
    /// KV blocks of a running request at this engine, on average; `None` if it is not known.
    pub request_blocks: Option<f64>,
}

/// The readings of all sources. Off until it has bounds.
#[derive(Clone, Debug, Default)]
pub struct EngineLoads {
    bounds: Option<EngineBounds>,
    readings: PerSource<Option<SourceReading>>,
}

/// A reading, and what was known of its source then.
#[derive(Clone, Copy, Debug)]
struct SourceReading {
    reading: EngineReading,
    routed: RoutedLoad,
    /// KV blocks of the rank.
    capacity: Option<u64>,
    at: Instant,
}

impl SourceReading {
    fn foreign(&self) -> ForeignLoad {
        let EngineReading {
            running, waiting, ..
        } = self.reading;
        let all = running.saturating_add(waiting);
        let requests = all.saturating_sub(self.routed.requests);
        let used = self.reading.kv_usage.zip(self.capacity);
        let used = used.map(|(usage, capacity)| usage * capacity as f64);
        ForeignLoad {
            requests,
            waiting: requests.min(waiting),
            request_blocks: used
                .filter(|_| running > 0)
                .map(|used| used / f64::from(running)),
        }
    }

    /// The share of KV blocks in use, with what the routers added and freed since the reading.
    fn kv_usage(&self, routed_blocks: u64) -> f64 {
        let usage = self.reading.kv_usage.unwrap_or(0.0);
        let since = routed_blocks as f64 - self.routed.blocks as f64;
        let capacity = self.capacity.filter(|&capacity| capacity > 0);
        capacity.map_or(usage, |capacity| usage + since / capacity as f64)
    }
}

impl EngineLoads {
    /// `None`: off, which forgets all readings.
    pub fn set_bounds(&mut self, bounds: Option<EngineBounds>) {
        if bounds.is_none() {
            self.readings = PerSource::default();
        }
        self.bounds = bounds;
    }

    #[must_use]
    pub const fn is_on(&self) -> bool {
        self.bounds.is_some()
    }

    /// A source's engine reported this. `capacity`: KV blocks of the rank.
    pub fn learn(
        &mut self,
        source: SourceId,
        reading: EngineReading,
        routed: RoutedLoad,
        capacity: Option<u64>,
        at: Instant,
    ) {
        if self.is_on() {
            *self.readings.get_mut(source) = Some(SourceReading {
                reading,
                routed,
                capacity,
                at,
            });
        }
    }

    fn of(&self, source: SourceId, now: Instant) -> Option<&SourceReading> {
        let known = self.readings.get(source)?.as_ref()?;
        (now.saturating_duration_since(known.at) < READING_LIFE).then_some(known)
    }

    /// The last reading, while it counts.
    #[must_use]
    pub fn reading(&self, source: SourceId, now: Instant) -> Option<EngineReading> {
        self.of(source, now).map(|known| known.reading)
    }

    #[must_use]
    #[inline]
    pub fn foreign(&self, source: SourceId, now: Instant) -> ForeignLoad {
        let known = self.of(source, now);
        known.map_or_else(ForeignLoad::default, SourceReading::foreign)
    }

    /// Whether the source is at a bound, while the routers' requests hold so many blocks there.
    #[must_use]
    pub fn is_full(&self, source: SourceId, routed_blocks: u64, now: Instant) -> bool {
        let Some((bounds, known)) = self.bounds.zip(self.of(source, now)) else {
            return false;
        };
        known.foreign().waiting >= bounds.foreign_waiting
            || known.kv_usage(routed_blocks) >= bounds.kv_usage
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::testing::{source_id, start};

    const BOUNDS: EngineBounds = EngineBounds {
        foreign_waiting: 4,
        kv_usage: 0.9,
    };

    const fn reading(running: u32, waiting: u32, kv_usage: f64) -> EngineReading {
        EngineReading {
            running,
            waiting,
            kv_usage: Some(kv_usage),
        }
    }

    /// After a reading of a rank of 1,000 blocks, where the routers have so many requests.
    fn read(reading: EngineReading, requests: u32) -> (EngineLoads, SourceId, Instant) {
        let (mut loads, id, now) = (EngineLoads::default(), source_id(), start());
        loads.set_bounds(Some(BOUNDS));
        let routed = RoutedLoad {
            requests,
            blocks: 100,
        };
        loads.learn(id, reading, routed, Some(1000), now);
        (loads, id, now)
    }

    #[test]
    fn only_what_exceeds_the_routers_requests_is_foreign() {
        let check = |running, waiting, routed, expected| {
            let (loads, id, now) = read(reading(running, waiting, 0.0), routed);
            let foreign = loads.foreign(id, now);
            assert_eq!((foreign.requests, foreign.waiting), expected);
        };
        check(8, 0, 8, (0, 0));
        // The routers' own requests wait.
        check(8, 12, 20, (0, 0));
        check(8, 12, 5, (15, 12));
        check(8, 12, 18, (2, 2));
        // The routers' requests have not reached the engine.
        check(1, 0, 9, (0, 0));
        check(u32::MAX, u32::MAX, 1, (u32::MAX - 1, u32::MAX - 1));
    }

    #[test]
    fn a_foreign_request_is_as_large_as_those_that_run_there() {
        let blocks = |reading| {
            let (loads, id, now) = read(reading, 0);
            loads.foreign(id, now).request_blocks
        };
        assert_eq!(blocks(reading(4, 9, 0.5)), Some(125.0));
        assert_eq!(blocks(reading(0, 9, 0.0)), None);
        let unreported = EngineReading {
            kv_usage: None,
            ..reading(4, 0, 0.0)
        };
        assert_eq!(blocks(unreported), None);
    }

    #[test]
    fn a_source_is_full_at_each_bound() {
        let is_full = |reading, routed, blocks| {
            let (loads, id, now) = read(reading, routed);
            loads.is_full(id, blocks, now)
        };
        assert!(!is_full(reading(8, 3, 0.5), 0, 100));
        assert!(is_full(reading(8, 4, 0.5), 0, 100));
        assert!(!is_full(reading(8, 40, 0.5), 48, 100), "own requests wait");
        assert!(is_full(reading(8, 0, 0.9), 8, 100));
        // 100 blocks of the rank's 1,000 since the reading.
        assert!(is_full(reading(8, 0, 0.8), 8, 200));
        assert!(!is_full(reading(8, 0, 0.95), 8, 0));
    }

    #[test]
    fn a_stale_reading_has_no_effect() {
        let (loads, id, now) = read(reading(90, 90, 1.0), 0);
        let later = now + READING_LIFE;
        assert!(loads.is_full(id, 100, now) && loads.reading(id, now).is_some());
        assert!(!loads.is_full(id, 100, later));
        assert_eq!(loads.foreign(id, later), ForeignLoad::default());
        assert_eq!(loads.reading(id, later), None);
    }

    #[test]
    fn without_bounds_nothing_is_read() {
        let (mut loads, id, now) = read(reading(90, 90, 1.0), 0);
        loads.set_bounds(None);
        assert_eq!(loads.foreign(id, now), ForeignLoad::default());
        loads.learn(id, reading(90, 90, 1.0), RoutedLoad::default(), None, now);
        loads.set_bounds(Some(BOUNDS));
        assert!(!loads.is_full(id, 100, now));
    }
}
