//! The real thing: the shim's source, a log in memory, the indexer's fold.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use warmroute_indexer::fold::Fold;
use warmroute_indexer::query;
use warmroute_proto::bus::LogMessage;
use warmroute_proto::query::{Answer, Query, SourceState};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{
    DpRank, EngineHealth, EngineSeq, Generation, LocalHash, LogPosition, Namespace, Source,
    StreamIdentity, Tiers, WorkerId, codec,
};
use warmroute_shim::source::{Config, Effect, Notice, ReplayId, SourceCore};

use crate::world::{Claim, Consumer, pairs};

pub(crate) struct Pipeline {
    now: Instant,
    source: Source,
    core: SourceCore,
    fold: Fold,
    subject: String,
    position: LogPosition,
    generation: Generation,
    asked: VecDeque<(ReplayId, EngineSeq)>,
    answering: Option<ReplayId>,
    notices: Vec<Notice>,
}

impl Pipeline {
    pub(crate) fn new() -> Self {
        let source = Source {
            worker: WorkerId::from("w"),
            dp_rank: DpRank(0),
        };
        Self::with(Config::new(source, true))
    }

    pub(crate) fn with(config: Config) -> Self {
        let namespace = Namespace::from("t");
        let mut fold = Fold::new(&namespace, None);
        fold.follow(StreamIdentity {
            created_unix_ns: 1,
            nonce: 1,
        });
        #[expect(
            clippy::disallowed_methods,
            reason = "an origin, never compared with real time"
        )]
        let now = Instant::now();
        let source = config.source.clone();
        let mut pipeline = Self {
            now,
            subject: Subjects::new(&namespace).records(&source),
            source,
            core: SourceCore::new(config),
            fold,
            position: LogPosition(0),
            generation: Generation(0),
            asked: VecDeque::new(),
            answering: None,
            notices: Vec::new(),
        };
        pipeline.core.health(now, EngineHealth::Healthy);
        pipeline.core.lease_taken(now);
        pipeline.drive();
        pipeline
    }

    /// Carries out what the source wants done; the log and the registry answer at once.
    fn drive(&mut self) {
        while let Some(effect) = self.core.poll_effect() {
            match effect {
                Effect::Replay { id, from } => {
                    self.asked.clear();
                    self.asked.push_back((id, from));
                }
                Effect::ClaimGeneration { above } => {
                    self.generation = self.generation.max(above).next();
                    self.core.generation_claimed(self.now, self.generation);
                }
                Effect::Append { id, payload } => {
                    self.fold.observe_end(self.now, self.position);
                    self.position = self.position.next();
                    let message = LogMessage {
                        position: self.position,
                        subject: self.subject.clone(),
                        payload,
                        stored_unix_ns: self.position.0,
                    };
                    self.fold.apply(self.now, &message);
                    self.core.acknowledged(self.now, id);
                }
                Effect::Heartbeat(heartbeat) => {
                    let bytes = codec::encode(&heartbeat).unwrap();
                    self.fold.heartbeat(self.now, &bytes);
                }
                Effect::Notice(notice) => self.notices.push(notice),
            }
        }
    }
}

impl Consumer for Pipeline {
    fn connected(&mut self) {
        self.core.connected(self.now);
        self.drive();
    }

    fn disconnected(&mut self) {
        self.asked.clear();
        self.core.disconnected(self.now);
        self.drive();
    }

    fn live(&mut self, seq: u64, payload: &Bytes) {
        self.core
            .live(self.now, b"", Some(EngineSeq(seq)), payload.clone());
        self.drive();
    }

    fn wants_replay(&mut self) -> Option<u64> {
        let (id, from) = self.asked.pop_front()?;
        self.answering = Some(id);
        Some(from.0)
    }

    fn replayed(&mut self, seq: u64, payload: &Bytes) {
        if let Some(id) = self.answering {
            self.core
                .replay_batch(self.now, id, EngineSeq(seq), payload);
            self.drive();
        }
    }

    fn replay_ended(&mut self) {
        if let Some(id) = self.answering.take() {
            self.core.replay_end(self.now, id);
            self.drive();
        }
    }

    fn time_passes(&mut self, by: Duration) {
        self.now += by;
        self.core.tick(self.now);
        self.drive();
        self.fold.tick(self.now);
        for resync in self.fold.poll_resyncs(self.now) {
            self.core.resync(self.now, resync.above, resync.reason);
            self.drive();
        }
    }

    fn goes_on_without_history(&self) -> bool {
        true
    }

    fn claim(&self) -> Claim {
        let standing = self
            .fold
            .standings(self.now)
            .find(|(source, _)| **source == self.source)
            .map(|(_, standing)| standing);
        Claim {
            states: standing.as_ref().map_or_else(
                || Tiers::all(SourceState::Unknown),
                |standing| standing.states,
            ),
            seq: standing
                .and_then(|standing| standing.engine_seq)
                .map(|seq| seq.0),
            held: pairs(self.fold.held(&self.source)),
        }
    }

    fn gpu_run(&self, blocks: &[LocalHash]) -> u32 {
        let query = Query {
            blocks: blocks.to_vec(),
            at_least: None,
        };
        match query::answer(&self.fold, &query, self.now) {
            Answer::Runs { sources, .. } => sources[0].run.gpu,
            Answer::Behind { position } => panic!("behind at {position}"),
        }
    }
}

impl std::fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.core.status(self.now).fmt(f)?;
        self.notices.fmt(f)?;
        self.fold
            .standings(self.now)
            .try_for_each(|(_, standing)| standing.fmt(f))
    }
}
