//! Schedule of the checkpoints.

use std::time::{Duration, Instant};

use warmroute_proto::Generation;

/// A fifth of the engine's default replay buffer of 10,000 batches: four checkpoints may fail before
/// a restart finds a hole.
const BATCHES_MAX: u64 = 2000;
/// Keeps the replay short after a restart beside a quiet engine.
const AGE_MAX: Duration = Duration::from_secs(10);
/// A new generation is checkpointed soon, because it is the fence.
const AGE_MAX_OF_FENCE: Duration = Duration::from_secs(1);

/// The last checkpoint, by which the next one is due.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointSchedule {
    taken: Instant,
    batches: u64,
    generation: Option<Generation>,
}

impl CheckpointSchedule {
    #[must_use]
    pub const fn new(now: Instant) -> Self {
        Self {
            taken: now,
            batches: 0,
            generation: None,
        }
    }

    /// `batches` counts all that were applied so far; `generation` is the one in use.
    #[must_use]
    pub fn is_due(&self, now: Instant, batches: u64, generation: Option<Generation>) -> bool {
        let new = batches.saturating_sub(self.batches);
        let age = now.saturating_duration_since(self.taken);
        new >= BATCHES_MAX
            || (new > 0 && age >= AGE_MAX)
            || (generation != self.generation && age >= AGE_MAX_OF_FENCE)
    }

    pub const fn taken(&mut self, now: Instant, batches: u64, generation: Option<Generation>) {
        *self = Self {
            taken: now,
            batches,
            generation,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_due_by_batches_by_time_and_by_a_new_fence() {
        let start = crate::testing::start();
        let after = |ms| start + Duration::from_millis(ms);
        let one = Some(Generation(1));
        let mut pace = CheckpointSchedule::new(start);
        pace.taken(start, 100, one);
        assert!(!pace.is_due(after(60_000), 100, one), "nothing is new");
        assert!(!pace.is_due(after(9_999), 101, one));
        assert!(pace.is_due(after(10_000), 101, one));
        assert!(!pace.is_due(start, 2_099, one));
        assert!(pace.is_due(start, 2_100, one));
        assert!(!pace.is_due(after(999), 100, Some(Generation(2))));
        assert!(pace.is_due(after(1_000), 100, Some(Generation(2))));
        pace.taken(after(1_000), 2_100, Some(Generation(2)));
        assert!(!pace.is_due(after(5_000), 2_100, Some(Generation(2))));
    }
}
