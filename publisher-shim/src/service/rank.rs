//! One rank's task: moves inputs of the engine and the plane into [`SourceCore`] and its effects out.
//! It decides nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{mpsc, watch};
use tokio::task::yield_now;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};
use warmroute_plane::Connection;
use warmroute_proto::registry::ResyncRequest;
use warmroute_proto::{EngineHealth, LogPosition};

use super::checkpoints::{CheckpointWriter, WriteResult};
use super::lease::Leadership;
use super::log_clock::ClockReading;
use super::rank_plane::{PlaneAnswer, RankPlane};
use super::{RankView, ShimState};
use crate::config::Endpoints;
use crate::engine::{
    BURST_MAX, EngineEvent, EngineFeed as _, EngineInfo, EngineLink, FlushRequest,
};
use crate::source::{
    AppendId, Effect, EngineFacts, FlushId, FlushResult, Notice, ReplaySupport, SourceConfig,
    SourceCore,
};
use crate::state_dir::CheckpointStore;
use crate::wire::{ReplayFrames, live_frames, replay_frames};

const TICK: Duration = Duration::from_millis(100);
/// Two rounds of the publisher's window.
const APPENDS_MAX: usize = 256;
const ANSWERS_MAX: usize = 256;

/// A rank's configuration.
pub(super) struct RankConfig {
    pub(super) source: SourceConfig,
    pub(super) endpoints: Endpoints,
    pub(super) checkpoints: Option<Arc<dyn CheckpointStore>>,
}

/// A rank's inputs beside its engine sockets.
pub(super) struct RankInputs {
    pub(super) leadership: watch::Receiver<Leadership>,
    pub(super) health: watch::Receiver<EngineHealth>,
    pub(super) info: watch::Receiver<Arc<EngineInfo>>,
    pub(super) clock: watch::Receiver<Option<ClockReading>>,
    pub(super) resyncs: mpsc::Receiver<ResyncRequest>,
}

pub(super) struct RankTask<E: EngineLink> {
    engine: Arc<E>,
    core: SourceCore,
    checkpoints: Option<CheckpointWriter>,
    feed: E::Feed,
    /// From the flags; the engine reports the others.
    configured: Endpoints,
    endpoints: Endpoints,
    shared: Arc<ShimState>,
    plane: RankPlane,
    appends: mpsc::Sender<(AppendId, Bytes)>,
    last_append: Option<LogPosition>,
    /// The last term in which this shim led.
    term: Option<u64>,
    leads: bool,
}

impl<E: EngineLink> RankTask<E> {
    /// Runs one rank until `stop`.
    pub(super) async fn run(
        engine: Arc<E>,
        config: RankConfig,
        shared: Arc<ShimState>,
        inputs: RankInputs,
        stop: CancellationToken,
    ) {
        let configured = config.endpoints;
        let source = config.source.source.clone();
        let (core, checkpoints) = match config.checkpoints {
            Some(store) => {
                let (core, writer) = CheckpointWriter::open(store, config.source).await;
                (core, Some(writer))
            }
            None => (SourceCore::new(config.source), None),
        };
        // A checkpoint proves nothing without a replay endpoint: wait for the engine's report first.
        let endpoints = if checkpoints.is_some() && configured.replay.is_none() {
            Endpoints::default()
        } else {
            configured.clone()
        };
        let feed = engine.feed(source.dp_rank, endpoints.clone());
        let (answers, received) = mpsc::channel(ANSWERS_MAX);
        let (appends, queue) = mpsc::channel(APPENDS_MAX);
        let plane = RankPlane {
            plane: Arc::clone(&shared.plane),
            subjects: shared.subjects.clone(),
            source,
            decoder: shared.decoder.clone(),
            log: shared.log.clone(),
            answers,
            tasks: TaskTracker::new(),
            attempt: Arc::new(AtomicU32::new(core.attempt())),
        };
        let appender = plane.clone();
        let stopped = stop.clone();
        let tasks = plane.tasks.clone();
        tasks.spawn(async move {
            tokio::select! {
                biased;
                () = stopped.cancelled() => {}
                () = appender.append_all(queue) => {}
            }
        });
        let mut rank = Self {
            engine,
            core,
            checkpoints,
            feed,
            endpoints,
            configured,
            shared,
            plane,
            appends,
            last_append: None,
            term: None,
            leads: false,
        };
        rank.serve(inputs, received, stop).await;
        tasks.close();
        if let Some(checkpoints) = rank.checkpoints {
            checkpoints.finish(&rank.core).await;
        }
    }

    async fn serve(
        &mut self,
        mut inputs: RankInputs,
        mut answers: mpsc::Receiver<PlaneAnswer>,
        stop: CancellationToken,
    ) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut events = Vec::new();
        let mut connection = self.shared.plane.connection();
        inputs.leadership.mark_changed();
        inputs.info.mark_changed();
        inputs.clock.mark_changed();
        if *connection.borrow_and_update() == Connection::Down {
            self.core.plane_lost();
        }
        loop {
            tokio::select! {
                // The rare inputs first, the engine's stream last: no input starves another.
                biased;
                () = stop.cancelled() => return,
                Ok(()) = connection.changed() => {
                    // `Up` may hide a short disconnect.
                    self.core.plane_lost();
                    if *connection.borrow_and_update() == Connection::Up {
                        self.core.plane_back(now());
                    }
                }
                Ok(()) = inputs.leadership.changed() => {
                    let leadership = *inputs.leadership.borrow_and_update();
                    self.apply_leadership(leadership);
                }
                Ok(()) = inputs.health.changed() => {
                    let health = *inputs.health.borrow_and_update();
                    self.core.health(now(), health);
                }
                Ok(()) = inputs.info.changed() => {
                    let info = Arc::clone(&inputs.info.borrow_and_update());
                    self.apply_info(&info);
                }
                Ok(()) = inputs.clock.changed() => {
                    if let Some(reading) = *inputs.clock.borrow_and_update() {
                        self.core.log_clock(reading.asked, reading.answered, reading.unix_ns);
                    }
                }
                Some(request) = inputs.resyncs.recv() => {
                    self.core.resync(now(), request.above, request.reason);
                }
                written = written(&mut self.checkpoints) => {
                    if let Some(checkpoints) = &mut self.checkpoints {
                        checkpoints.record(written);
                    }
                }
                Some(answer) = answers.recv() => self.apply_answer(answer),
                _ = ticks.tick() => self.core.tick(now()),
                () = self.feed.receive(&mut events), if self.leads || !self.feed.is_exclusive() => {
                    let is_behind = events.len() >= BURST_MAX;
                    events.drain(..).for_each(|event| self.apply_event(event));
                    if is_behind {
                        // Other tasks run before the next burst.
                        self.perform_effects();
                        yield_now().await;
                    }
                }
            }
            self.perform_effects();
        }
    }

    fn apply_event(&mut self, event: EngineEvent) {
        let now = now();
        match event {
            EngineEvent::Connected => self.core.connected(now),
            EngineEvent::Disconnected => {
                self.core.disconnected(now);
                // Its sockets may have other addresses after a restart.
                self.shared.refresh.notify_one();
            }
            EngineEvent::Live(mut frames) => match live_frames(&frames).map(|live| live.seq) {
                Some(seq) => {
                    let payload = Bytes::from(frames.pop().unwrap_or_default());
                    let topic = frames.first().map_or(&[][..], Vec::as_slice);
                    self.core.live(now, topic, seq, payload);
                }
                None => self.core.live_lost(now),
            },
            EngineEvent::Replay(id, frames) => match replay_frames(&frames) {
                Some(ReplayFrames::Batch { seq, payload }) => {
                    self.core.replay_batch(now, id, seq, payload);
                }
                Some(ReplayFrames::End) => self.core.replay_end(now, id),
                None => self.core.replay_failed(now, id),
            },
        }
    }

    fn apply_answer(&mut self, answer: PlaneAnswer) {
        let now = now();
        match answer {
            PlaneAnswer::Appended(id, position) => {
                self.last_append = Some(position);
                self.core.acknowledged(now, id);
            }
            PlaneAnswer::NotAppended(id) => self.core.append_failed(now, id),
            PlaneAnswer::TooLarge(id, bytes_max) => self.core.append_too_large(now, id, bytes_max),
            PlaneAnswer::Claimed(Some(generation)) => self.core.generation_claimed(now, generation),
            PlaneAnswer::Claimed(None) => self.core.claim_failed(now),
            PlaneAnswer::Tail(id, tail) => self.core.log_tail(now, id, tail),
            PlaneAnswer::Flushed(id, result) => self.core.flushed(now, id, result),
        }
    }

    fn apply_leadership(&mut self, leadership: Leadership) {
        let led = std::mem::replace(
            &mut self.leads,
            matches!(leadership, Leadership::Leads { .. }),
        );
        if led && !self.leads {
            self.pause();
        }
        match leadership {
            Leadership::Leads { term } => {
                if self.term.replace(term).is_some_and(|before| before != term) {
                    // Another shim may have led in between.
                    self.core.lease_lapsed();
                    self.pause();
                }
                self.core.lease_taken(now());
            }
            Leadership::Lapsed => self.core.lease_lapsed(),
            Leadership::Yields => self.core.lease_lost(),
            Leadership::Unknown => {}
        }
    }

    /// Another process may read the engine's events.
    fn pause(&mut self) {
        if self.feed.is_exclusive() {
            self.feed.paused();
            self.core.disconnected(now());
        }
    }

    fn apply_info(&mut self, info: &EngineInfo) {
        self.core.learn(EngineFacts {
            block_size: info.block_size,
            // The sum bounds every rank, also if ranks differ.
            blocks_max: info.blocks.map(|blocks| blocks.sum),
            speculates: info.speculates,
            connects: info.connects,
        });
        if let Some(calls) = info.reset_calls {
            self.core.reset_calls(now(), calls);
        }
        let reported = info.endpoints.as_ref();
        let reported = reported.and_then(|all| all.get(&self.plane.source.dp_rank));
        let reported = reported.cloned().unwrap_or_default();
        let endpoints = Endpoints {
            live: self.configured.live.clone().or(reported.live),
            replay: self.configured.replay.clone().or(reported.replay),
        };
        // A starting engine reports nothing: the known endpoints stay.
        let is_known = endpoints.live.is_some() && !info.models.is_empty();
        if is_known && endpoints != self.endpoints {
            let support = match endpoints.replay {
                Some(_) => ReplaySupport::Available,
                None => ReplaySupport::Missing,
            };
            self.feed.reconnect(endpoints.clone());
            self.endpoints = endpoints;
            self.core.set_replay_support(now(), support);
        }
    }

    /// Performs the core's effects, and publishes its view.
    fn perform_effects(&mut self) {
        self.plane
            .attempt
            .store(self.core.attempt(), Ordering::Release);
        while let Some(effect) = self.core.poll_effect() {
            match effect {
                Effect::Replay { id, from } => {
                    if self.feed.request_replay(id, from).is_err() {
                        self.core.replay_failed(now(), id);
                    }
                }
                Effect::ClaimGeneration { above } => self.plane.claim(above),
                Effect::Append { id, payload } => {
                    if self.appends.try_send((id, payload)).is_err() {
                        self.core.append_failed(now(), id);
                    }
                }
                Effect::ReadTail { id, is_thorough } => {
                    self.plane.read_tail(id, is_thorough, self.last_append);
                }
                Effect::Heartbeat(heartbeat) => self.plane.heartbeat(&heartbeat),
                Effect::Flush(id) => self.flush(id),
                Effect::Notice(notice) => self.notice(notice),
            }
        }
        if let Some(checkpoints) = &mut self.checkpoints {
            checkpoints.write_if_due(&self.core);
        }
        self.shared.set_view(RankView {
            status: crate::source::SourceStatus {
                checkpoint: self.checkpoints.as_ref().map(CheckpointWriter::status),
                ..self.core.status(now())
            },
            block_cut: self.core.mirror().block_cut(),
            main_attention_only: self.core.mirror().main_attention_only(),
        });
    }

    fn flush(&self, id: FlushId) {
        let (engine, answers) = (Arc::clone(&self.engine), self.plane.answers.clone());
        let rank = self.plane.source.dp_rank;
        let request = self
            .shared
            .info
            .borrow()
            .models
            .first()
            .map(|model| FlushRequest {
                model: model.clone(),
                rank: (self.shared.ranks > 1).then_some(rank),
            });
        self.plane.tasks.spawn(async move {
            let result = match request {
                Some(request) => engine.flush(request).await,
                None => FlushResult::Failed,
            };
            // A closed channel means that the rank ended.
            drop(answers.send(PlaneAnswer::Flushed(id, result)).await);
        });
    }

    fn notice(&self, notice: Notice) {
        let source = &self.plane.source;
        match notice {
            Notice::NewGeneration(reason) => {
                info!(%source, reason = reason.label(), "a new generation begins");
            }
            Notice::Warning(warning) => {
                warn!(%source, engine = %warning, "the engine's events cost this source credit");
            }
            Notice::Tier(tier, limit) => warn!(%source, %tier, "{}", limit.cause()),
            Notice::State(state) => {
                info!(%source, state = state.label(), "the source's state changed");
            }
        }
    }
}

async fn written(checkpoints: &mut Option<CheckpointWriter>) -> WriteResult {
    match checkpoints {
        Some(checkpoints) => checkpoints.written().await,
        None => std::future::pending().await,
    }
}

/// The shell's clock; the core gets the time as an argument.
fn now() -> std::time::Instant {
    Instant::now().into_std()
}
