//! Bodies of version 1 that differ from version 2: records and heartbeats without `sent_at`.

use bincode::Decode;

use crate::{
    Change, Digest, EngineHealth, EngineSeq, Generation, RecordNumber, Source, TierStates,
};

#[derive(Decode)]
pub(super) struct RecordV1 {
    source: Source,
    generation: Generation,
    number: RecordNumber,
    engine_seq: Option<EngineSeq>,
    changes: Vec<Change>,
    states: TierStates,
    after: Digest,
}

impl From<RecordV1> for crate::Record {
    fn from(old: RecordV1) -> Self {
        Self {
            source: old.source,
            generation: old.generation,
            number: old.number,
            engine_seq: old.engine_seq,
            changes: old.changes,
            states: old.states,
            after: old.after,
            sent_at: None,
        }
    }
}

#[derive(Decode)]
pub(super) struct HeartbeatV1 {
    source: Source,
    generation: Generation,
    number: Option<RecordNumber>,
    engine_seq: Option<EngineSeq>,
    states: TierStates,
    after: Digest,
    health: EngineHealth,
}

impl From<HeartbeatV1> for crate::Heartbeat {
    fn from(old: HeartbeatV1) -> Self {
        Self {
            source: old.source,
            generation: old.generation,
            number: old.number,
            engine_seq: old.engine_seq,
            states: old.states,
            after: old.after,
            health: old.health,
            sent_at: None,
        }
    }
}
