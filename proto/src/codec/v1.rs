//! Bodies of version 1, where they differ from today's: records and heartbeats said nothing of their age.

use bincode::Decode;

use crate::{
    Change, Digest, EngineHealth, EngineSeq, Generation, RecordNumber, Source, TierStates,
};

#[derive(Decode)]
pub(super) struct Record {
    source: Source,
    generation: Generation,
    number: RecordNumber,
    engine_seq: Option<EngineSeq>,
    changes: Vec<Change>,
    states: TierStates,
    after: Digest,
}

impl From<Record> for crate::Record {
    fn from(old: Record) -> Self {
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
pub(super) struct Heartbeat {
    source: Source,
    generation: Generation,
    number: Option<RecordNumber>,
    engine_seq: Option<EngineSeq>,
    states: TierStates,
    after: Digest,
    health: EngineHealth,
}

impl From<Heartbeat> for crate::Heartbeat {
    fn from(old: Heartbeat) -> Self {
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
