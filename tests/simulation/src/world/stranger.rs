//! A client with a shim's permissions that sends what no shim sends.

use bytes::Bytes;
use warmroute_plane::Broadcast;
use warmroute_proto::registry::GenerationEntry;
use warmroute_proto::{
    DpRank, Generation, Heartbeat, Record, RecordNumber, Source, WorkerId, codec,
};

use super::World;
use super::host::Input;

impl World {
    /// A heartbeat in the worker's name, on the subject of another one.
    pub(super) fn speak_for_another(&mut self, worker: usize) -> bool {
        let Some(last) = self.last_heartbeat(worker) else {
            return false;
        };
        let other = match self.rates.workers {
            1 => Source {
                worker: WorkerId::from("w9"),
                dp_rank: DpRank(0),
            },
            workers => self.engines[(worker + 1) % workers].source.clone(),
        };
        self.say(&other, &last);
        true
    }

    /// The highest generation there is, in a heartbeat, the log or the registry.
    pub(super) fn claim_the_last_generation(&mut self, worker: usize) -> bool {
        let Some(last) = self.last_heartbeat(worker) else {
            return false;
        };
        let generation = Generation(u64::MAX);
        let source = last.source.clone();
        match self.dice.later.u8(0..3) {
            0 => self.say(&source, &Heartbeat { generation, ..last }),
            1 => {
                let record = Record {
                    source: source.clone(),
                    generation,
                    number: RecordNumber(0),
                    engine_seq: None,
                    changes: Vec::new(),
                    states: last.states,
                    after: warmroute_proto::Digest::default(),
                    sent_at: None,
                };
                let subject = self.subjects.records(&source);
                let payload = codec::encode(&record).unwrap();
                self.plane.append(self.now, subject, payload.into());
            }
            _ => {
                let value = codec::encode(&GenerationEntry { generation }).unwrap();
                let key = self.subjects.generation_key(&source);
                // What was there is nowhere else, unless in the log.
                self.checks.history_lost = true;
                self.plane.overwrite(key, value.into());
            }
        }
        true
    }

    /// The worker's last heartbeat, of the state that the log has of it.
    fn last_heartbeat(&self, worker: usize) -> Option<Heartbeat> {
        let source = &self.engines[worker].source;
        let mut last = self.vouched.last.get(source)?.clone();
        let stored = self.plane.log.last_on(&self.subjects.records(source));
        let record = stored.and_then(|message| codec::decode::<Record>(&message.payload).ok());
        if let Some(record) = record.filter(|record| record.generation == last.generation) {
            last.number = Some(record.number);
            last.engine_seq = record.engine_seq;
            last.after = record.after;
        }
        last.sent_at = None;
        Some(last)
    }

    fn say(&mut self, to: &Source, heartbeat: &Heartbeat) {
        let message = Broadcast {
            subject: self.subjects.heartbeat(to),
            payload: Bytes::from(codec::encode(heartbeat).unwrap()),
        };
        for at in 0..self.indexers.len() {
            let host = self.indexers[at].host;
            let after = self.delay();
            self.send_host(host, after, Input::Broadcast(message.clone()));
        }
    }
}
