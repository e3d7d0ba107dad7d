//! One rank's task: sockets and plane on the outside, [`SourceCore`] inside. No decision is here.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{mpsc, watch};
use tokio::task::yield_now;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::info;
use warmroute_plane::Connection;
use warmroute_proto::registry::ResyncRequest;
use warmroute_proto::{EngineHealth, LogPosition};

use super::clock::Told;
use super::keeper::Standing;
use super::outside::{Done, Outside};
use super::saver::Saver;
use super::{Shared, View};
use crate::config::Endpoints;
use crate::engine::EngineInfo;
use crate::feed::{BURST_MAX, Feed, Heard};
use crate::source::{AppendId, Config, Effect, Notice, SourceCore};
use crate::state_dir::StateDir;
use crate::wire::{ReplayFrames, live_frames, replay_frames};

const TICK: Duration = Duration::from_millis(100);
/// Two rounds of the publisher's window.
const APPENDS_MAX: usize = 256;
const DONE_MAX: usize = 256;

/// What a rank's task listens to beside its sockets.
pub(super) struct Signals {
    pub(super) standing: watch::Receiver<Standing>,
    pub(super) health: watch::Receiver<EngineHealth>,
    pub(super) info: watch::Receiver<Arc<EngineInfo>>,
    pub(super) clock: watch::Receiver<Option<Told>>,
    pub(super) resyncs: mpsc::Receiver<ResyncRequest>,
}

pub(super) struct Rank {
    core: SourceCore,
    saver: Option<Saver>,
    feed: Feed,
    /// As the flags say; what they leave open is the engine's to tell.
    fixed: Endpoints,
    endpoints: Endpoints,
    shared: Arc<Shared>,
    outside: Outside,
    appends: mpsc::Sender<(AppendId, Bytes)>,
    last_append: Option<LogPosition>,
    /// The term in which this shim led last.
    term: Option<u64>,
}

impl Rank {
    /// Runs one rank until it is told to stop.
    pub(super) async fn run(
        config: Config,
        (fixed, state): (Endpoints, Option<Arc<StateDir>>),
        shared: Arc<Shared>,
        signals: Signals,
        stop: CancellationToken,
    ) {
        let source = config.source.clone();
        let (core, saver) = match state {
            Some(state) => {
                let (core, saver) = Saver::open(state, config).await;
                (core, Some(saver))
            }
            None => (SourceCore::new(config), None),
        };
        // Without a replay endpoint a checkpoint proves nothing: better to hear first whether the
        // engine tells of one.
        let endpoints = if saver.is_some() && fixed.replay.is_none() {
            Endpoints::default()
        } else {
            fixed.clone()
        };
        let name = source.dp_rank.to_string();
        let feed = Feed::new(shared.zmq.clone(), name, endpoints.clone());
        let (done, answers) = mpsc::channel(DONE_MAX);
        let (appends, queue) = mpsc::channel(APPENDS_MAX);
        let outside = Outside {
            plane: Arc::clone(&shared.plane),
            subjects: shared.subjects.clone(),
            source,
            reader: shared.reader.clone(),
            done,
            tasks: TaskTracker::new(),
            attempt: Arc::new(AtomicU32::new(core.attempt())),
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
        let mut rank = Self {
            core,
            saver,
            feed,
            endpoints,
            fixed,
            shared,
            outside,
            appends,
            last_append: None,
            term: None,
        };
        rank.serve(signals, answers, stop).await;
        tasks.close();
        if let Some(saver) = rank.saver {
            saver.finish(&rank.core).await;
        }
    }

    async fn serve(
        &mut self,
        mut signals: Signals,
        mut answers: mpsc::Receiver<Done>,
        stop: CancellationToken,
    ) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut heard = Vec::new();
        let mut connection = self.shared.plane.connection();
        signals.standing.mark_changed();
        signals.info.mark_changed();
        signals.clock.mark_changed();
        if *connection.borrow_and_update() == Connection::Down {
            self.core.plane_lost();
        }
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.feed.hear(&mut heard) => {
                    let is_behind = heard.len() >= BURST_MAX;
                    heard.drain(..).for_each(|heard| self.hear(heard));
                    if is_behind {
                        // Else nobody else would get a turn until all that waits is taken.
                        self.act();
                        yield_now().await;
                    }
                }
                Some(done) = answers.recv() => self.done(done),
                Ok(()) = signals.standing.changed() => {
                    let standing = *signals.standing.borrow_and_update();
                    self.stand(standing);
                }
                Ok(()) = connection.changed() => {
                    // Up again may mean that it was down between two looks.
                    self.core.plane_lost();
                    if *connection.borrow_and_update() == Connection::Up {
                        self.core.plane_back(now());
                    }
                }
                Ok(()) = signals.health.changed() => {
                    let health = *signals.health.borrow_and_update();
                    self.core.health(now(), health);
                }
                Ok(()) = signals.info.changed() => {
                    let info = Arc::clone(&signals.info.borrow_and_update());
                    self.learn(&info);
                }
                Ok(()) = signals.clock.changed() => {
                    if let Some(told) = *signals.clock.borrow_and_update() {
                        self.core.log_clock(told.asked, told.answered, told.unix_ns);
                    }
                }
                Some(request) = signals.resyncs.recv() => {
                    self.core.resync(now(), request.above, request.reason);
                }
                saved = saved(&mut self.saver) => {
                    if let Some(saver) = &mut self.saver {
                        saver.note(saved);
                    }
                }
                _ = ticks.tick() => self.core.tick(now()),
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
            Heard::Live(mut frames) => match live_frames(&frames).map(|live| live.seq) {
                Some(seq) => {
                    let payload = Bytes::from(frames.pop().unwrap_or_default());
                    let topic = frames.first().map_or(&[][..], Vec::as_slice);
                    self.core.live(now, topic, seq, payload);
                }
                None => self.core.live_lost(now),
            },
            Heard::Replay(id, frames) => match replay_frames(&frames) {
                Some(ReplayFrames::Batch { seq, payload }) => {
                    self.core.replay_batch(now, id, seq, payload);
                }
                Some(ReplayFrames::End) => self.core.replay_end(now, id),
                None => self.core.replay_failed(now, id),
            },
        }
    }

    fn done(&mut self, done: Done) {
        let now = now();
        match done {
            Done::Appended(id, position) => {
                self.last_append = Some(position);
                self.core.acknowledged(now, id);
            }
            Done::NotAppended(id) => self.core.append_failed(now, id),
            Done::TooLarge(id, bytes_max) => self.core.append_too_large(now, id, bytes_max),
            Done::Claimed(Some(generation)) => self.core.generation_claimed(now, generation),
            Done::Claimed(None) => self.core.claim_failed(now),
            Done::Tail(id, tail) => self.core.log_tail(now, id, tail),
        }
    }

    fn stand(&mut self, standing: Standing) {
        match standing {
            Standing::Leads { term } => {
                if self.term.replace(term).is_some_and(|before| before != term) {
                    // Whatever happened in between was not seen.
                    self.core.lease_lapsed();
                }
                self.core.lease_taken(now());
            }
            Standing::Lapsed => self.core.lease_lapsed(),
            Standing::Yields => self.core.lease_lost(),
            Standing::Unknown => {}
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
            self.feed.turn_to(endpoints.clone());
            self.endpoints = endpoints;
            self.core.replay_available(now(), has_replay);
        }
    }

    /// Does what the core wants done.
    fn act(&mut self) {
        self.outside
            .attempt
            .store(self.core.attempt(), Ordering::Release);
        while let Some(effect) = self.core.poll_effect() {
            match effect {
                Effect::Replay { id, from } => {
                    if !self.feed.ask_replay(id, from) {
                        self.core.replay_failed(now(), id);
                    }
                }
                Effect::ClaimGeneration { above } => self.outside.claim(above),
                Effect::Append { id, payload } => {
                    if self.appends.try_send((id, payload)).is_err() {
                        self.core.append_failed(now(), id);
                    }
                }
                Effect::ReadTail { id, is_thorough } => {
                    self.outside.look_at_tail(id, is_thorough, self.last_append);
                }
                Effect::Heartbeat(heartbeat) => self.outside.heartbeat(&heartbeat),
                Effect::Notice(notice) => self.notice(notice),
            }
        }
        if let Some(saver) = &mut self.saver {
            saver.consider(&self.core);
        }
        self.shared.set_view(View {
            status: crate::source::Status {
                checkpoint: self.saver.as_ref().map(Saver::status),
                ..self.core.status(now())
            },
            block_size: self.core.mirror().block_size(),
            main_attention_only: self.core.mirror().main_attention_only(),
        });
    }

    fn notice(&self, notice: Notice) {
        let source = &self.outside.source;
        match notice {
            Notice::NewGeneration(reason) => {
                info!(%source, reason = reason.label(), "a new generation begins");
            }
            Notice::State(state) => info!(%source, ?state, "the source's state changed"),
        }
    }
}

async fn saved(saver: &mut Option<Saver>) -> super::saver::Saved {
    match saver {
        Some(saver) => saver.saved().await,
        None => std::future::pending().await,
    }
}

/// The one clock of the shell; the core gets it as an argument.
fn now() -> std::time::Instant {
    Instant::now().into_std()
}
