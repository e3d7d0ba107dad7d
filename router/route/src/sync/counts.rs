//! Counters since the start, for metrics and views. Field names are part of the HTTP API.

use serde::Serialize;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReplicaCounts {
    pub traffic: TrafficCounts,
    pub verdicts: MessageCounts,
    pub mended: RepairCounts,
    pub refused: LimitCounts,
    /// Routers declared dead after silence.
    pub deaths: u64,
    /// Routers that left.
    pub goodbyes: u64,
    /// Times that this router became isolated.
    pub deafs: u64,
    /// Own incarnations.
    pub incarnations: u64,
}

/// Broadcasts of this router that come back are not counted.
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
    /// Empty questions, which measure the delay.
    pub echoes_out: u64,
    pub echoes_in: u64,
}

/// Messages of peers by result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MessageCounts {
    pub applied: u64,
    pub duplicate: u64,
    pub old: u64,
    /// Received before an earlier message.
    pub ahead: u64,
    pub violation: u64,
    pub malformed: u64,
}

/// Losses found, and repairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RepairCounts {
    pub gaps: u64,
    pub mismatches: u64,
    pub by_numbers: u64,
    pub by_state: u64,
    /// States whose slots did not match their digest.
    pub states_wrong: u64,
    /// Snapshots taken for peers.
    pub cuts: u64,
}

/// Items dropped at a bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LimitCounts {
    /// Routers above the bound.
    pub peers: u64,
    /// Messages that wait for earlier ones.
    pub waiting: u64,
    /// States.
    pub states: u64,
    /// Questions.
    pub asks: u64,
    /// Own messages that left the ring unsent.
    pub unsent: u64,
}
