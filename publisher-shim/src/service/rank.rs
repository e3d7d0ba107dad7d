//! One rank's task: sockets and plane on the outside, [`SourceCore`] inside. No decision is here.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{FuturesOrdered, StreamExt as _};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, info, warn};
use warmroute_proto::bus::{Plane, PlaneError, PutIf};
use warmroute_proto::registry::{GenerationEntry, ResyncRequest};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{
    EngineHealth, Generation, Heartbeat, LogPosition, Record, RecordNumber, Source, codec,
};

use super::Shared;
use crate::config::Endpoints;
use crate::engine::EngineInfo;
use crate::feed::{Ask, Feed, Heard};
use crate::mirror;
use crate::source::{AppendId, Config, Effect, Notice, SourceCore};
use crate::wire::{ReplayFrames, live_frames, replay_frames};

const TICK: Duration = Duration::from_millis(100);
const PLANE_DEADLINE: Duration = Duration::from_secs(5);
/// Two rounds of the publisher's window.
const APPENDS_MAX: usize = 256;
const DONE_MAX: usize = 256;
/// Messages taken from the sockets before the plane's answers get their turn.
const BURST_MAX: usize = 64;
const TAIL_EVERY_TICKS: u32 = 10;

/// What a rank's task listens to beside its sockets.
pub(super) struct Signals {
    pub(super) leader: watch::Receiver<bool>,
    pub(super) health: watch::Receiver<EngineHealth>,
    pub(super) info: watch::Receiver<Arc<EngineInfo>>,
    pub(super) resyncs: mpsc::Receiver<ResyncRequest>,
}

/// An answer of the plane.
enum Done {
    Appended(AppendId, Option<LogPosition>),
    Claimed(Option<Generation>),
    Tail(LogTail),
}

/// What the log has last on the source's subject.
enum LogTail {
    Record(Option<(Generation, RecordNumber)>),
    /// It may have been trimmed, or the log did not answer.
    Unknown,
}

pub(super) struct Rank {
    core: SourceCore,
    feed: Feed,
    /// As the flags say; what they leave open is the engine's to tell.
    fixed: Endpoints,
    endpoints: Endpoints,
    shared: Arc<Shared>,
    outside: Outside,
    appends: mpsc::Sender<(AppendId, Bytes)>,
    last_append: Option<LogPosition>,
}

/// How a rank reaches the plane.
#[derive(Clone)]
struct Outside {
    plane: Arc<dyn Plane>,
    subjects: Subjects,
    source: Source,
    done: mpsc::Sender<Done>,
    tasks: TaskTracker,
}

impl Rank {
    /// Runs one rank until it is told to stop.
    pub(super) async fn run(
        config: Config,
        fixed: Endpoints,
        shared: Arc<Shared>,
        signals: Signals,
        stop: CancellationToken,
    ) -> std::io::Result<()> {
        let source = config.source.clone();
        let feed = Feed::start(&source.to_string(), fixed.clone())?;
        let (done, answers) = mpsc::channel(DONE_MAX);
        let (appends, queue) = mpsc::channel(APPENDS_MAX);
        let outside = Outside {
            plane: Arc::clone(&shared.plane),
            subjects: shared.subjects.clone(),
            source,
            done,
            tasks: TaskTracker::new(),
        };
        let appender = outside.clone();
        let stopped = stop.clone();
        let tasks = outside.tasks.clone();
        tasks.spawn(async move {
            tokio::select! {
                () = appender.append_all(queue) => {}
                () = stopped.cancelled() => {}
            }
        });
        let rank = Self {
            core: SourceCore::new(config),
            feed,
            endpoints: fixed.clone(),
            fixed,
            shared,
            outside,
            appends,
            last_append: None,
        };
        rank.serve(signals, answers, stop).await;
        tasks.close();
        Ok(())
    }

    async fn serve(
        mut self,
        mut signals: Signals,
        mut answers: mpsc::Receiver<Done>,
        stop: CancellationToken,
    ) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut count = 0_u32;
        let mut burst = Vec::with_capacity(BURST_MAX);
        signals.leader.mark_changed();
        signals.info.mark_changed();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                heard = self.feed.heard.recv_many(&mut burst, BURST_MAX) => {
                    if heard == 0 {
                        warn!(source = %self.outside.source, "the socket thread ended");
                        return;
                    }
                    burst.drain(..).for_each(|heard| self.hear(heard));
                }
                Some(done) = answers.recv() => self.done(done),
                Ok(()) = signals.leader.changed() => {
                    let leads = *signals.leader.borrow_and_update();
                    self.lease(leads);
                }
                Ok(()) = signals.health.changed() => {
                    let health = *signals.health.borrow_and_update();
                    self.core.health(now(), health);
                }
                Ok(()) = signals.info.changed() => {
                    let info = Arc::clone(&signals.info.borrow_and_update());
                    self.learn(&info);
                }
                Some(request) = signals.resyncs.recv() => {
                    self.core.resync(now(), request.above, request.reason);
                }
                _ = ticks.tick() => {
                    self.core.tick(now());
                    count = count.wrapping_add(1);
                    if count.is_multiple_of(TAIL_EVERY_TICKS) && self.core.is_idle() {
                        self.outside.look_at_tail(self.last_append);
                    }
                }
            }
            self.act();
        }
    }

    fn hear(&mut self, heard: Heard) {
        let now = now();
        match heard {
            Heard::Connected => self.core.connected(now),
            Heard::Disconnected => {
                self.core.disconnected(now);
                // Its sockets may be elsewhere when it is back.
                self.shared.refresh.notify_one();
            }
            Heard::Live(frames) => match live_frames(&frames) {
                Some(live) => {
                    let payload = Bytes::copy_from_slice(live.payload);
                    self.core.live(now, live.topic, live.seq, payload);
                }
                None => self.core.live_lost(now),
            },
            Heard::Lost => self.core.live_lost(now),
            Heard::Replay(id, frames) => match replay_frames(&frames) {
                Some(ReplayFrames::Batch { seq, payload }) => {
                    self.core.replay_batch(now, id, seq, payload);
                }
                Some(ReplayFrames::End) => self.core.replay_end(now, id),
                None => self.core.replay_failed(now, id),
            },
            Heard::ReplayFailed(id) => self.core.replay_failed(now, id),
        }
    }

    fn done(&mut self, done: Done) {
        let now = now();
        match done {
            Done::Appended(id, Some(position)) => {
                self.last_append = self.last_append.max(Some(position));
                self.core.acknowledged(now, id);
            }
            Done::Appended(id, None) => self.core.append_failed(now, id),
            Done::Claimed(Some(generation)) => self.core.generation_claimed(now, generation),
            Done::Claimed(None) => self.core.claim_failed(now),
            Done::Tail(LogTail::Record(last)) => self.core.log_tail(now, last),
            Done::Tail(LogTail::Unknown) => {}
        }
    }

    fn lease(&mut self, leads: bool) {
        if leads {
            self.core.lease_taken(now());
        } else {
            self.core.lease_lost();
        }
    }

    fn learn(&mut self, info: &EngineInfo) {
        self.core.learn(info.block_size, info.blocks);
        let told = info.endpoints.get(&self.outside.source.dp_rank);
        let told = told.cloned().unwrap_or_default();
        let endpoints = Endpoints {
            live: self.fixed.live.clone().or(told.live),
            replay: self.fixed.replay.clone().or(told.replay),
        };
        // An engine that is just starting tells nothing: keep what was known.
        let is_known = endpoints.live.is_some() && !info.models.is_empty();
        if is_known && endpoints != self.endpoints {
            let has_replay = endpoints.replay.is_some();
            if self.feed.ask(Ask::Endpoints(endpoints.clone())) {
                self.endpoints = endpoints;
                self.core.replay_available(now(), has_replay);
            }
        }
    }

    /// Does what the core wants done.
    fn act(&mut self) {
        while let Some(effect) = self.core.poll_effect() {
            match effect {
                Effect::Replay { id, from } => {
                    if !self.feed.ask(Ask::Replay { id, from }) {
                        self.core.replay_failed(now(), id);
                    }
                }
                Effect::ClaimGeneration { above } => self.outside.claim(above),
                Effect::Append { id, payload } => {
                    if self.appends.try_send((id, payload)).is_err() {
                        self.core.append_failed(now(), id);
                    }
                }
                Effect::Heartbeat(heartbeat) => self.outside.heartbeat(&heartbeat),
                Effect::Notice(notice) => self.notice(notice),
            }
        }
        self.shared
            .set_status(self.core.status(now()), mirror_facts(self.core.mirror()));
    }

    fn notice(&self, notice: Notice) {
        let source = &self.outside.source;
        match notice {
            Notice::NewGeneration(reason) => {
                info!(%source, reason = reason.word(), "a new generation begins");
            }
            Notice::State(state) => info!(%source, ?state, "the source's state changed"),
        }
    }
}

fn mirror_facts(mirror: &mirror::Mirror) -> super::MirrorFacts {
    super::MirrorFacts {
        block_size: mirror.block_size(),
        main_attention_only: mirror.main_attention_only(),
    }
}

impl Outside {
    /// Appends in order; their acknowledgements are awaited behind each other.
    async fn append_all(self, mut queue: mpsc::Receiver<(AppendId, Bytes)>) {
        let subject = self.subjects.records(&self.source);
        let mut under_way = FuturesOrdered::new();
        loop {
            let ended = tokio::select! {
                next = queue.recv() => {
                    let Some((id, payload)) = next else { return };
                    let append = self.plane.append(subject.clone(), payload);
                    match timeout(PLANE_DEADLINE, append).await {
                        Ok(Ok(acknowledged)) => {
                            under_way.push_back(async move {
                                let answer = timeout(PLANE_DEADLINE, acknowledged).await;
                                Done::Appended(id, answer.ok().and_then(Result::ok))
                            });
                            continue;
                        }
                        Ok(Err(_)) | Err(_) => Done::Appended(id, None),
                    }
                }
                Some(ended) = under_way.next() => ended,
            };
            if self.done.send(ended).await.is_err() {
                return;
            }
        }
    }

    fn claim(&self, above: Generation) {
        let this = self.clone();
        self.tasks.spawn(async move {
            let claim = timeout(PLANE_DEADLINE, this.next_generation(above)).await;
            let generation = match claim {
                Ok(Ok(generation)) => Some(generation),
                Ok(Err(error)) => {
                    debug!(source = %this.source, %error, "cannot claim a generation yet");
                    None
                }
                Err(_) => None,
            };
            drop(this.done.send(Done::Claimed(generation)).await);
        });
    }

    /// 1 + the highest of the registry's, the log's and `above`, by compare-and-set.
    async fn next_generation(&self, above: Generation) -> Result<Generation, PlaneError> {
        let key = self.subjects.generation_key(&self.source);
        let entry = self.plane.get(key.clone()).await?;
        let registered = entry
            .as_ref()
            .and_then(|entry| codec::decode::<GenerationEntry>(&entry.value).ok())
            .map(|entry| entry.generation);
        let last = self
            .plane
            .last_on(self.subjects.records(&self.source))
            .await?
            .and_then(|message| codec::decode::<Record>(&message.payload).ok())
            .map(|record| record.generation);
        let highest = registered.max(last).max(Some(above)).unwrap_or_default();
        let generation = highest.next();
        let value = codec::encode(&GenerationEntry { generation })
            .map_err(|error| PlaneError::Unavailable(error.to_string()))?;
        let condition = entry.map_or(PutIf::Absent, |entry| PutIf::Revision(entry.revision));
        self.plane
            .put(key, Bytes::from(value), condition, None)
            .await?;
        Ok(generation)
    }

    fn heartbeat(&self, heartbeat: &Heartbeat) {
        let Ok(payload) = codec::encode(heartbeat) else {
            return;
        };
        let this = self.clone();
        self.tasks.spawn(async move {
            let subject = this.subjects.heartbeat(&this.source);
            let publish = this.plane.publish(subject, Bytes::from(payload));
            // The next one comes in a second.
            drop(timeout(Duration::from_secs(1), publish).await);
        });
    }

    fn look_at_tail(&self, last_append: Option<LogPosition>) {
        let this = self.clone();
        self.tasks.spawn(async move {
            let look = timeout(PLANE_DEADLINE, this.tail(last_append)).await;
            let tail = look.ok().and_then(Result::ok).unwrap_or(LogTail::Unknown);
            drop(this.done.send(Done::Tail(tail)).await);
        });
    }

    async fn tail(&self, last_append: Option<LogPosition>) -> Result<LogTail, PlaneError> {
        let subject = self.subjects.records(&self.source);
        if let Some(message) = self.plane.last_on(subject).await? {
            let record = codec::decode::<Record>(&message.payload).ok();
            return Ok(LogTail::Record(
                record.map(|record| (record.generation, record.number)),
            ));
        }
        let status = self.plane.log_status().await?;
        let was_trimmed = last_append.is_none_or(|position| position < status.first);
        Ok(if was_trimmed {
            LogTail::Unknown
        } else {
            LogTail::Record(None)
        })
    }
}

/// The one clock of the shell; the core gets it as an argument.
fn now() -> std::time::Instant {
    Instant::now().into_std()
}
