//! The production pipeline: the shim's source, a log in memory, the indexer's fold.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use warmroute_indexer::fold::Fold;
use warmroute_indexer::query;
use warmroute_plane::{Broadcast, LogMessage};
use warmroute_proto::query::{IndexAnswer, IndexQuery, SourceState};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{
    DpRank, EngineHealth, EngineSeq, Generation, LocalHash, LogPosition, Namespace, RecordNumber,
    Source, StreamIdentity, Tiers, WorkerId, codec,
};
use warmroute_shim::source::{
    Effect, FlushResult, LogTail, Notice, RegistryReading, ReplayId, SourceConfig, SourceCore, Tail,
};

use crate::world::{Claim, Consumer, pairs};

/// One rank of the pipeline.
pub(crate) struct Pipeline {
    source: Source,
    core: SourceCore,
    index: Rc<RefCell<Index>>,
    subject: String,
    heartbeats: String,
    generation: Generation,
    /// The source's last record in the log.
    last: Option<(Generation, RecordNumber)>,
    asked: VecDeque<(ReplayId, EngineSeq)>,
    answering: Option<ReplayId>,
    notices: Vec<Notice>,
}

/// State that all ranks share: one log, one fold, one clock.
struct Index {
    now: Instant,
    position: LogPosition,
    fold: Fold,
}

impl Index {
    fn new() -> Self {
        let mut fold = Fold::new(&namespace(), None);
        fold.follow(StreamIdentity {
            created_unix_ns: 1,
            nonce: 1,
        });
        #[expect(
            clippy::disallowed_methods,
            reason = "an origin, never compared with real time"
        )]
        let now = Instant::now();
        Self {
            now,
            position: LogPosition(0),
            fold,
        }
    }

    fn append(&mut self, subject: &str, payload: Bytes) {
        self.fold.observe_end(self.now, self.position, 0);
        self.position = self.position.next();
        let message = LogMessage {
            position: self.position,
            subject: subject.to_owned(),
            payload,
            stored_unix_ns: self.position.0,
        };
        self.fold.apply(self.now, &message);
    }
}

fn namespace() -> Namespace {
    Namespace::from("t")
}

impl Pipeline {
    /// A source whose engine has metrics, which show no drafts.
    pub(crate) fn new() -> Self {
        Self::of_rank(DpRank(0), Rc::new(RefCell::new(Index::new())), Some(false))
    }

    pub(crate) fn without_metrics() -> Self {
        Self::of_rank(DpRank(0), Rc::new(RefCell::new(Index::new())), None)
    }

    /// The next rank of the worker, in the shared index.
    pub(crate) fn beside(&self) -> Self {
        let rank = DpRank(self.source.dp_rank.0 + 1);
        Self::of_rank(rank, Rc::clone(&self.index), Some(false))
    }

    fn of_rank(dp_rank: DpRank, index: Rc<RefCell<Index>>, speculates: Option<bool>) -> Self {
        let source = Source {
            worker: WorkerId::from("w"),
            dp_rank,
        };
        let mut config = SourceConfig::new(source.clone(), true);
        // The log has no clock.
        config.waits_for_clock = false;
        config.rank = Some(dp_rank.0);
        config.mirror.speculates = speculates;
        let mut pipeline = Self {
            subject: Subjects::new(&namespace()).records(&source),
            heartbeats: Subjects::new(&namespace()).heartbeat(&source),
            source,
            core: SourceCore::new(config),
            index,
            generation: Generation(0),
            last: None,
            asked: VecDeque::new(),
            answering: None,
            notices: Vec::new(),
        };
        let now = pipeline.now();
        pipeline.core.health(now, EngineHealth::Healthy);
        pipeline.core.lease_taken(now);
        pipeline.drive();
        pipeline
    }

    fn now(&self) -> Instant {
        self.index.borrow().now
    }

    /// Executes the source's effects. The log and the registry answer without delay.
    fn drive(&mut self) {
        let now = self.now();
        while let Some(effect) = self.core.poll_effect() {
            match effect {
                Effect::Replay { id, from } => {
                    self.asked.clear();
                    self.asked.push_back((id, from));
                }
                Effect::ClaimGeneration { above } => {
                    self.generation = self.generation.max(above).next().unwrap();
                    self.core.generation_claimed(now, self.generation);
                }
                Effect::Append { id, payload } => {
                    self.index.borrow_mut().append(&self.subject, payload);
                    self.last = Some((id.generation, id.number));
                    self.core.acknowledged(now, id);
                }
                Effect::ReadTail { id, is_thorough } => {
                    let seen = LogTail {
                        last: self.last,
                        registered: if is_thorough {
                            RegistryReading::Read(Some(self.generation))
                        } else {
                            RegistryReading::NotRequested
                        },
                        ..LogTail::default()
                    };
                    self.core.log_tail(now, id, Tail::Seen(seen));
                }
                Effect::Flush(id) => self.core.flushed(now, id, FlushResult::Answered),
                Effect::Heartbeat(heartbeat) => {
                    let message = Broadcast {
                        subject: self.heartbeats.clone(),
                        payload: codec::encode(&heartbeat).unwrap().into(),
                    };
                    self.index.borrow_mut().fold.heartbeat(now, &message);
                }
                Effect::Notice(notice) => self.notices.push(notice),
            }
        }
    }
}

impl Consumer for Pipeline {
    fn connected(&mut self) {
        self.core.connected(self.now());
        self.drive();
    }

    fn disconnected(&mut self) {
        self.asked.clear();
        self.core.disconnected(self.now());
        self.drive();
    }

    fn live(&mut self, seq: u64, payload: &Bytes) {
        let seq = Some(EngineSeq(seq));
        self.core.live(self.now(), b"", seq, payload.clone());
        self.drive();
    }

    fn wants_replay(&mut self) -> Option<u64> {
        let (id, from) = self.asked.pop_front()?;
        self.answering = Some(id);
        Some(from.0)
    }

    fn replayed(&mut self, seq: u64, payload: &Bytes) {
        if let Some(id) = self.answering {
            let seq = EngineSeq(seq);
            self.core.replay_batch(self.now(), id, seq, payload);
            self.drive();
        }
    }

    fn replay_ended(&mut self) {
        if let Some(id) = self.answering.take() {
            self.core.replay_end(self.now(), id);
            self.drive();
        }
    }

    fn time_passes(&mut self, by: Duration) {
        let now = self.now() + by;
        self.index.borrow_mut().now = now;
        self.core.tick(now);
        self.drive();
        self.index.borrow_mut().fold.tick(now);
        let resyncs = self.index.borrow_mut().fold.poll_resyncs(now);
        for resync in resyncs {
            if resync.source == self.source {
                self.core.resync(now, resync.above, resync.reason);
                self.drive();
            }
        }
    }

    fn goes_on_without_history(&self) -> bool {
        true
    }

    fn rank(&self) -> u32 {
        self.source.dp_rank.0
    }

    fn claim(&self) -> Claim {
        let Index { now, fold, .. } = &*self.index.borrow();
        let standing = fold
            .statuses(*now)
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
            held: pairs(fold.held(&self.source)),
        }
    }

    fn gpu_run(&self, blocks: &[LocalHash]) -> u32 {
        let query = IndexQuery {
            blocks: blocks.to_vec(),
            at_least: None,
        };
        let Index { now, fold, .. } = &*self.index.borrow();
        match query::answer(fold, &query, *now) {
            IndexAnswer::Runs { sources, .. } => {
                let own = sources.iter().find(|answer| answer.source == self.source);
                own.expect("it is known").run.gpu
            }
            IndexAnswer::Behind { position } => panic!("behind at {position}"),
        }
    }
}

impl std::fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Index { now, fold, .. } = &*self.index.borrow();
        self.core.status(*now).fmt(f)?;
        self.notices.fmt(f)?;
        fold.statuses(*now)
            .try_for_each(|(_, standing)| standing.fmt(f))
    }
}
