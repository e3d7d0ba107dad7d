//! What happened so far, for metrics and views.

use serde::Serialize;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReplicaCounts {
    pub traffic: TrafficCounts,
    pub verdicts: MessageCounts,
    pub mended: RepairCounts,
    pub refused: LimitCounts,
    /// Routers that fell silent.
    pub deaths: u64,
    /// Routers that said goodbye.
    pub goodbyes: u64,
    /// Times that this router did not hear itself.
    pub deafs: u64,
    /// OwnState incarnations taken.
    pub incarnations: u64,
}

/// Without one's own, which come back and are left aside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TrafficCounts {
    pub messages_out: u64,
    pub frames_out: u64,
    pub bytes_out: u64,
    pub messages_in: u64,
    pub frames_in: u64,
    pub bytes_in: u64,
    pub heartbeats_in: u64,
    pub asks_out: u64,
    pub asks_failed: u64,
    pub asks_in: u64,
    /// Empty questions, which measure the way.
    pub echoes_out: u64,
    pub echoes_in: u64,
}

/// Messages of peers by what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MessageCounts {
    pub applied: u64,
    pub duplicate: u64,
    pub old: u64,
    /// Waited for one before it.
    pub ahead: u64,
    pub violation: u64,
    pub malformed: u64,
}

/// What was found missing or wrong, and what mended it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RepairCounts {
    pub gaps: u64,
    pub mismatches: u64,
    pub by_numbers: u64,
    pub by_state: u64,
    /// States whose slots did not add up to their digest.
    pub states_wrong: u64,
    /// States given to others, snapshots taken for them.
    pub cuts: u64,
}

/// What met a bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LimitCounts {
    /// A router more than can be known.
    pub peers: u64,
    /// A message more than may wait.
    pub waiting: u64,
    /// A state larger than may be taken in.
    pub states: u64,
    /// A question more than is answered.
    pub asks: u64,
    /// OwnState messages that fell off the ring before they were sent.
    pub unsent: u64,
}
