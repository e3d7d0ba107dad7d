//! What goes wrong: drawn by the seed, or scripted.

use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use warmroute_indexer::snapshot::policy::Schedule;
use warmroute_proto::{BlockSize, LogPosition, StreamIdentity};
use warmroute_router::sim::EngineConfig;

use super::World;
use super::host::{Event, Kind};
use super::plane::Impairment;
use super::shim;
use super::trouble::Trouble;

/// Often enough that a short world sees several snapshots.
const SCHEDULE: Schedule = Schedule {
    bytes: 8 << 10,
    every: Duration::from_secs(5),
};

/// One thing that goes wrong. Numbers are engines, shims and indexers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    EngineRestart(usize),
    EngineRestartPlausible(usize),
    EngineReset(usize),
    EngineEvict(usize),
    ZmqLost(usize),
    ZmqDisconnect(usize),
    ShimCrash(usize),
    /// SIGTERM: the process ends by itself.
    ShimStop(usize),
    IndexerStop(usize),
    /// A second shim for the same worker.
    SecondShim(usize),
    CorruptState(usize),
    IndexerCrash(usize),
    CutShim(usize),
    CutIndexer(usize),
    CutAll,
    PauseShim(usize),
    PauseIndexer(usize),
    LoseTail,
    /// An older copy of log and registry is made, for a later roll-back.
    Copy,
    RollBack,
    Recreate,
    Trim,
    LoseRegistry,
    LoseLeases,
    LoseSnapshots,
    CorruptSnapshot,
    CorruptRecord,
    ForeignRecord,
    DuplicateRecord,
    NewerRecord,
    RouterCrash(usize),
    CutRouter(usize),
    PauseRouter(usize),
    /// What a shim kept on its disk is gone.
    LoseState(usize),
    /// Everything that the log has is trimmed.
    TrimAll,
    /// No answers for a moment, then reads come from a copy that lags.
    LeaderChange,
    /// Another server leads, whose clock is ahead or behind.
    ClockJump,
    /// What goes to and from it waits in its connection for seconds, and comes after all.
    StallShim(usize),
    StallIndexer(usize),
    /// An engine and its shim die together. The engine is back long before the shim.
    MachineDown(usize),
    /// A shim of another worker sends messages for this one.
    ForeignHeartbeat(usize),
    /// A shim of the worker names the highest generation there is.
    LastGeneration(usize),
    /// The server refuses a worker's records and takes its heartbeats.
    RefuseRecords(usize),
    /// The server stores a worker's records and its acknowledgements are lost.
    LoseAcks(usize),
    /// The log has no leader: it takes and answers nothing. Registry and broadcasts go on.
    LogLeaderless,
    /// Each transfer from or to the snapshot store takes many seconds.
    SlowStore,
    /// A virtual machine is suspended: its process and its clocks stand still.
    SuspendShim(usize),
    SuspendIndexer(usize),
    /// The server removes a process's subscriptions.
    DeafShim(usize),
    DeafIndexer(usize),
    /// An engine of a later version: events of a type that is not known here.
    UnknownEvents(usize),
    UnknownRemovals(usize),
    /// An engine whose block hashes have no position: one hash for two prefixes.
    PositionFreeHashes(usize),
    /// An engine runs and swallows requests.
    EngineTrouble(usize, Trouble),
}

impl Fault {
    /// One of them, somewhere.
    fn draw(rng: &mut Rng, rates: &Rates) -> Self {
        let worker = rng.usize(0..rates.workers);
        let indexer = rng.usize(0..rates.indexers);
        let mut all = vec![
            Self::EngineRestart(worker),
            Self::EngineRestartPlausible(worker),
            Self::EngineReset(worker),
            Self::EngineEvict(worker),
            Self::ZmqLost(worker),
            Self::ZmqDisconnect(worker),
            Self::ShimCrash(2 * worker),
            Self::ShimStop(2 * worker),
            Self::IndexerStop(indexer),
            Self::SecondShim(worker),
            Self::CorruptState(2 * worker),
            Self::IndexerCrash(indexer),
            Self::CutShim(2 * worker),
            Self::CutIndexer(indexer),
            Self::CutAll,
            Self::PauseShim(2 * worker),
            Self::PauseIndexer(indexer),
            Self::LoseTail,
            Self::Copy,
            Self::RollBack,
            Self::Recreate,
            Self::Trim,
            Self::LoseRegistry,
            Self::LoseLeases,
            Self::LoseSnapshots,
            Self::CorruptSnapshot,
            Self::CorruptRecord,
            Self::ForeignRecord,
            Self::DuplicateRecord,
            Self::NewerRecord,
            Self::RefuseRecords(worker),
            Self::LoseAcks(worker),
            Self::LogLeaderless,
            Self::SuspendShim(2 * worker),
            Self::SuspendIndexer(indexer),
        ];
        if rates.routers > 0 {
            let router = rng.usize(0..rates.routers);
            all.extend([
                Self::RouterCrash(router),
                Self::CutRouter(router),
                Self::PauseRouter(router),
                Self::LoseState(2 * worker),
                Self::TrimAll,
                Self::LeaderChange,
            ]);
        }
        all[rng.usize(0..all.len())]
    }
}

/// A fault at a moment since the beginning.
#[derive(Clone, Copy, Debug)]
pub struct Scripted {
    pub after: Duration,
    pub fault: Fault,
}

/// What the seed draws. Rates are per mille.
#[derive(Clone, Debug)]
pub struct Rates {
    pub workers: usize,
    pub indexers: usize,
    pub routers: usize,
    pub storm: Duration,
    /// Between two faults, on average.
    pub(super) strike_every: Duration,
    pub(super) delay_max: Duration,
    pub(super) late: u16,
    pub(super) call_lost: u16,
    pub(super) broadcast_lost: u16,
    pub(super) twice: u16,
    pub(super) zmq_lost: u16,
    pub(super) replay_hole: u16,
    pub(super) replay_broken: u16,
    pub(super) log_messages_max: usize,
    pub(super) outbox_bytes_max: usize,
    pub(super) held_bytes_max: usize,
    pub(super) set: Set,
    /// Upper limit of clock drift, in parts per million.
    pub(super) drift: i64,
    pub(super) schedule: Schedule,
    pub(super) flags: Flags,
}

/// A world of one kind, for a fault that needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// Replays with holes.
    ReplayHoles,
    /// A gap is soon older than what a replay reaches.
    ShortReplay,
    /// The first indexer has room for a part only.
    LittleMemory,
    ShortLog,
    /// The plane's limit of a message is one kibibyte.
    SmallMessages,
    Routers,
    /// Routers, and engines with blocks of different sizes.
    MixedBlocks,
    /// Routers, and every third broadcast is lost.
    LossyBroadcasts,
    /// Routers, and three engines that have room for all requests of the other two.
    Roomy,
}

/// Room for one source of a few, about.
const LITTLE_MEMORY: usize = 40 << 10;

/// What is the same everywhere, where it is set.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Set {
    /// Block size of all engines.
    pub(super) block_size: Option<BlockSize>,
    /// Batches that every engine's replay reaches back.
    pub(super) replay_buffer: Option<usize>,
    /// The first indexer's bound.
    pub(super) indexer_bytes_max: Option<usize>,
    /// The plane's limit of a message.
    pub(super) record_bytes_max: Option<usize>,
    /// Engines have room for all requests at a time.
    pub(super) has_room: bool,
    /// Connections stall so often, on average.
    stall_every: Option<Duration>,
}

/// What the seed tosses a coin for.
#[derive(Clone, Copy, Debug)]
pub struct Flags {
    pub(super) is_calm: bool,
    pub(super) has_one_group: bool,
}

impl std::ops::Deref for Rates {
    type Target = Flags;

    fn deref(&self) -> &Flags {
        &self.flags
    }
}

impl Rates {
    pub(super) fn draw(rng: &mut Rng, is_calm: bool) -> Self {
        let mut rate = |max: u16| {
            if is_calm || rng.bool() {
                0
            } else {
                rng.u16(0..=max)
            }
        };
        let rates = [
            rate(30),
            rate(60),
            rate(200),
            rate(100),
            rate(150),
            rate(150),
            rate(200),
        ];
        let [
            late,
            call_lost,
            broadcast_lost,
            twice,
            zmq_lost,
            replay_hole,
            replay_broken,
        ] = rates;
        let small = |rng: &mut Rng, small: usize, large: usize| {
            if is_calm || rng.u8(0..4) > 0 {
                large
            } else {
                small
            }
        };
        Self {
            workers: rng.usize(1..4),
            indexers: rng.usize(1..3),
            routers: 0,
            storm: Duration::from_secs(rng.u64(12..25)),
            strike_every: Duration::from_millis(rng.u64(300..4000)),
            delay_max: Duration::from_millis([1, 5, 40][rng.usize(0..3)]),
            late,
            call_lost,
            broadcast_lost,
            twice,
            zmq_lost,
            replay_hole,
            replay_broken,
            log_messages_max: small(rng, 60, 100_000),
            outbox_bytes_max: small(rng, 4 << 10, 64 << 20),
            held_bytes_max: small(rng, 4 << 10, 64 << 20),
            set: Set::default(),
            drift: [0, 200, 10_000][rng.usize(0..3)],
            schedule: SCHEDULE,
            flags: Flags {
                is_calm,
                has_one_group: rng.bool(),
            },
        }
    }

    pub(super) fn draw_routers(&mut self, seed: u64) {
        let mut rng = Rng::with_seed(seed ^ 0x0520_7E25);
        if rng.bool() {
            self.routers = rng.usize(2..4);
            let size = [2, 4, 16][rng.usize(0..3)];
            self.set.block_size = BlockSize::new(size).filter(|_| rng.u8(0..8) > 0);
        }
    }

    pub(super) fn draw_stalls(&mut self, dice: &mut Rng) {
        let millis = dice.u64(1_000..8_000);
        if dice.u8(0..4) == 0 && !self.is_calm {
            self.set.stall_every = Some(Duration::from_millis(millis));
        }
    }

    /// Makes the world one of this kind.
    pub(super) fn settle(&mut self, setting: Setting, seed: u64) {
        match setting {
            Setting::ReplayHoles => self.replay_hole = 150,
            Setting::ShortReplay => {
                self.set.replay_buffer = Some(3);
                self.zmq_lost = 80;
            }
            Setting::LittleMemory => self.set.indexer_bytes_max = Some(LITTLE_MEMORY),
            Setting::ShortLog => self.log_messages_max = 60,
            Setting::SmallMessages => self.set.record_bytes_max = Some(1024),
            Setting::Routers | Setting::MixedBlocks | Setting::LossyBroadcasts | Setting::Roomy => {
                let mut rng = Rng::with_seed(seed ^ 0x5E77_1265);
                self.routers = rng.usize(2..4);
                self.set.block_size = BlockSize::new([2, 4, 16][rng.usize(0..3)]);
                self.indexers = 2;
                if setting == Setting::LossyBroadcasts {
                    self.broadcast_lost = 300;
                }
                if setting == Setting::Roomy {
                    self.workers = 3;
                    self.storm = Duration::from_secs(40);
                    self.set.has_room = true;
                }
                if setting == Setting::MixedBlocks {
                    self.workers = self.workers.max(2);
                    self.set.block_size = None;
                }
            }
        }
    }

    pub(super) fn suits(&self, config: &EngineConfig) -> bool {
        self.set
            .block_size
            .is_none_or(|size| size == config.block_size)
    }

    /// Something goes wrong all the time.
    const fn is_lossy(&self) -> bool {
        self.zmq_lost > 0 || self.replay_hole > 0
    }

    fn calm_down(&mut self) {
        self.delay_max = self.delay_max.min(Duration::from_millis(5));
        for rate in [
            &mut self.late,
            &mut self.call_lost,
            &mut self.broadcast_lost,
            &mut self.twice,
            &mut self.zmq_lost,
            &mut self.replay_hole,
            &mut self.replay_broken,
        ] {
            *rate = 0;
        }
    }
}

impl World {
    /// The next fault, and when the one after it comes.
    pub(super) fn strike(&mut self) {
        if self.calm_since.is_some() || self.rates.is_calm {
            return;
        }
        let fault = Fault::draw(&mut self.rng, &self.rates);
        self.fault(fault);
        let mean = u64::try_from(self.rates.strike_every.as_millis()).unwrap();
        let after = self.millis(1..2 * mean);
        self.plan(after, Event::Strike);
    }

    pub(super) fn fault(&mut self, fault: Fault) {
        if self.calm_since.is_some() {
            return;
        }
        self.note(|| format!("FAULT {fault:?}"));
        self.fault_lasts(Duration::ZERO);
        if self.goes_wrong(fault) {
            self.checks.faults.push(fault);
        }
    }

    /// Was there anything that could? A process that does not run cannot be killed.
    fn goes_wrong(&mut self, fault: Fault) -> bool {
        match fault {
            Fault::EngineRestart(at) => {
                let did_run = self.kill_engine(at);
                let after = self.millis(10..6_000);
                self.fault_lasts(after);
                self.plan(after, Event::EngineStart(at));
                did_run
            }
            Fault::EngineRestartPlausible(at) => self.restart_plausibly(at),
            Fault::EngineReset(at) => self.engines[at].life.reset() && self.engines[at].is_up,
            Fault::EngineEvict(at) => {
                self.engines[at].life.evict(&mut self.rng) && self.engines[at].is_up
            }
            Fault::ZmqLost(at) => {
                self.send_engine_event(2 * at, shim::unreadable_message());
                self.shims[2 * at].handle.is_some()
            }
            Fault::ZmqDisconnect(at) => {
                let was_joined = self.disconnect_zmq(2 * at);
                if self.engines[at].is_up && self.hosts[self.shims[2 * at].host].is_up {
                    self.plan_connect(2 * at);
                }
                was_joined
            }
            Fault::ShimCrash(at) => self.crash(self.shims[at].host),
            Fault::ShimStop(at) => self.stop_process(self.shims[at].host),
            Fault::IndexerStop(at) => self.stop_process(self.indexers[at].host),
            Fault::SecondShim(at) => {
                let host = self.shims[2 * at + 1].host;
                if self.hosts[host].is_up {
                    self.crash_for_good(host);
                } else {
                    self.start_soon(host);
                }
                true
            }
            Fault::CorruptState(at) => self.corrupt_state(at),
            Fault::LoseState(at) => self.shims[at].disk.take().is_some(),
            Fault::IndexerCrash(at) => self.crash(self.indexers[at].host),
            Fault::CutShim(at) => self.cut(self.shims[at].host),
            Fault::CutIndexer(at) => self.cut(self.indexers[at].host),
            Fault::CutAll => self.cut_all(),
            Fault::PauseShim(at) => self.pause(self.shims[at].host),
            Fault::PauseIndexer(at) => self.pause(self.indexers[at].host),
            Fault::RouterCrash(at) => self.crash(self.routers[at].host),
            Fault::CutRouter(at) => self.cut(self.routers[at].host),
            Fault::PauseRouter(at) => self.pause(self.routers[at].host),
            Fault::StallShim(at) => self.stall(self.shims[at].host),
            Fault::StallIndexer(at) => self.stall(self.indexers[at].host),
            Fault::MachineDown(at) => self.machine_down(at),
            Fault::ForeignHeartbeat(at) => self.speak_for_another(at),
            Fault::LastGeneration(at) => self.claim_the_last_generation(at),
            Fault::SuspendShim(at) => self.suspend(self.shims[at].host),
            Fault::SuspendIndexer(at) => self.suspend(self.indexers[at].host),
            Fault::DeafShim(at) => self.deafen(self.shims[at].host),
            Fault::DeafIndexer(at) => self.deafen(self.indexers[at].host),
            Fault::UnknownEvents(at) => self.publish_unknown_events(at),
            Fault::UnknownRemovals(at) => self.publish_unknown_removals(at),
            Fault::PositionFreeHashes(at) => self.repeat_block_hashes(at),
            Fault::RefuseRecords(at) => self.impair_log(Some(at), Impairment::Refuses),
            Fault::LoseAcks(at) => self.impair_log(Some(at), Impairment::LosesAnswers),
            Fault::LogLeaderless => self.impair_log(None, Impairment::Refuses),
            Fault::SlowStore => self.slow_store(),
            Fault::EngineTrouble(at, trouble) => self.trouble(at, trouble),
            other => self.plane_fault(other),
        }
    }

    /// The next connection that stalls, and when the one after it does.
    pub(super) fn stall_some(&mut self) {
        let Some(every) = self
            .rates
            .set
            .stall_every
            .filter(|_| self.calm_since.is_none())
        else {
            return;
        };
        if self.dice.later.u8(0..3) > 0 {
            let worker = self.dice.later.usize(0..self.rates.workers);
            self.fault(Fault::StallShim(2 * worker));
        } else {
            let indexer = self.dice.later.usize(0..self.rates.indexers);
            self.fault(Fault::StallIndexer(indexer));
            if self.dice.later.bool() {
                let worker = self.dice.later.usize(0..self.rates.workers);
                let after = Duration::from_millis(self.dice.later.u64(100..2_000));
                self.plan(after, Event::Fault(Fault::MachineDown(worker)));
            }
        }
        let mean = u64::try_from(every.as_millis()).unwrap();
        let after = Duration::from_millis(self.dice.later.u64(1..2 * mean));
        self.plan(after, Event::StallSome);
    }

    /// The log is impaired for one worker's records, or for all that use it.
    fn impair_log(&mut self, worker: Option<usize>, how: Impairment) -> bool {
        let after = self.millis(10..12_000);
        self.fault_lasts(after);
        let subject = worker.map(|worker| self.subjects.records(&self.engines[worker].source));
        self.plane.impair(subject, how, self.now + after);
        true
    }

    fn slow_store(&mut self) -> bool {
        let lasts = Duration::from_millis(self.dice.later.u64(1_000..15_000));
        self.fault_lasts(lasts);
        self.plane.slow_store(self.now + lasts);
        true
    }

    fn machine_down(&mut self, worker: usize) -> bool {
        let host = self.shims[2 * worker].host;
        let shim_ran = self.crash_for_good(host);
        let engine_ran = self.kill_engine(worker);
        let engine_away = Duration::from_millis(self.dice.later.u64(10..6_000));
        let shim_away = Duration::from_millis(self.dice.later.u64(9_000..15_000));
        self.fault_lasts(shim_away);
        self.plan(engine_away, Event::EngineStart(worker));
        self.plan(shim_away, Event::Start(host));
        shim_ran || engine_ran
    }

    fn stall(&mut self, host: usize) -> bool {
        let after = Duration::from_millis(self.dice.later.u64(10..9_000));
        self.fault_lasts(after);
        let node = &mut self.hosts[host];
        node.stalled_until = node.stalled_until.max(self.now + after);
        node.disturbed_at = node.disturbed_at.max(node.stalled_until);
        node.is_up
    }

    pub(super) fn fault_lasts(&mut self, time: Duration) {
        let end = &mut self.checks.faults_end;
        *end = (*end).max(self.now + time);
    }

    fn plane_fault(&mut self, fault: Fault) -> bool {
        let is_done = match fault {
            Fault::Copy => {
                self.plane.save_copy();
                true
            }
            Fault::LoseTail => {
                let messages = self.rng.usize(1..12);
                self.server_restarts();
                self.plane.lose_tail(messages)
            }
            Fault::RollBack => {
                self.server_restarts();
                self.plane.roll_back()
            }
            Fault::Recreate => {
                let identity = StreamIdentity {
                    created_unix_ns: u64::try_from(self.now.as_nanos()).unwrap(),
                    nonce: self.rng.u64(..),
                };
                self.server_restarts();
                self.plane.recreate(identity);
                true
            }
            Fault::Trim => {
                let keep = self.rng.usize(0..10);
                self.plane.log.trim(keep)
            }
            Fault::TrimAll => self.plane.log.trim(0),
            Fault::LeaderChange => {
                self.cut_all_for(10..2_000, 300);
                let until = self.now + self.millis(0..2_500);
                self.plane.begin_lag(until);
                true
            }
            Fault::ClockJump => {
                self.cut_all_for(10..2_000, 300);
                let ahead = Duration::from_millis(self.dice.later.u64(0..60_000));
                self.plane.another_clock(ahead);
                self.vouched.clock_jumped = Some(self.now);
                true
            }
            Fault::LoseRegistry => {
                self.checks.history_lost = true;
                self.plane.lose_registry()
            }
            Fault::LoseLeases => {
                let leased = |(_, entry): &(&String, &super::plane::Entry)| entry.expires.is_some();
                let keys: Vec<String> = self
                    .plane
                    .keys
                    .iter()
                    .filter(leased)
                    .map(|(key, _)| key.clone())
                    .collect();
                for key in &keys {
                    self.plane.remove(key);
                }
                !keys.is_empty()
            }
            Fault::LoseSnapshots => !std::mem::take(&mut self.plane.blobs).is_empty(),
            Fault::CorruptSnapshot => self.corrupt_snapshot(),
            _ => self.record_fault(fault),
        };
        self.tell_watchers();
        self.pump_all();
        is_done
    }

    /// All connections are cut for a moment, noticed or not.
    fn server_restarts(&mut self) {
        self.checks.history_lost = true;
        if self.rng.bool() {
            self.cut_all();
        }
        for at in 0..self.indexers.len() {
            let after = self.millis(0..5_000);
            let host = &mut self.hosts[self.indexers[at].host];
            for tail in host.running.iter_mut().flat_map(|it| &mut it.streams.tails) {
                tail.check_at = self.now + after;
            }
        }
    }

    fn record_fault(&mut self, fault: Fault) -> bool {
        let status = self.plane.log.status();
        if status.first > status.last {
            return false;
        }
        let position = LogPosition(self.rng.u64(status.first.0..=status.last.0));
        let Some(message) = self.plane.log.at(position).cloned() else {
            return false;
        };
        let mut payload = message.payload.to_vec();
        if payload.is_empty() {
            return false;
        }
        let mut subject = message.subject;
        match fault {
            Fault::CorruptRecord => {
                let at = self.rng.usize(0..payload.len());
                if self.rng.bool() {
                    payload[at] ^= 1 << self.rng.u8(0..8);
                } else {
                    payload.truncate(at);
                }
            }
            Fault::ForeignRecord => {
                subject = match self.rng.u8(0..3) {
                    0 => "wr.t.kv.w9.0".to_owned(),
                    1 => "wr.t.kv.w0".to_owned(),
                    _ => format!("wr.t.kv.w{}.0", self.rng.usize(0..self.rates.workers)),
                };
            }
            Fault::NewerRecord => payload[0] = payload[0].wrapping_add(1),
            _ => {}
        }
        self.plane.append(self.now, subject, payload.into());
        // What lies there changes, unread: bits rot.
        if fault == Fault::CorruptRecord
            && self.rng.bool()
            && let Some(message) = self.plane.log.at_mut(status.last)
        {
            let mut bytes = message.payload.to_vec();
            let at = self.rng.usize(0..bytes.len().max(1));
            if bytes.is_empty() {
                return true;
            }
            bytes[at] ^= 1 << self.rng.u8(0..8);
            message.payload = Bytes::from(bytes);
        }
        true
    }

    fn corrupt_snapshot(&mut self) -> bool {
        let count = self.plane.blobs.len();
        if count == 0 {
            return false;
        }
        let at = self.rng.usize(0..count);
        let (_, blob) = self.plane.blobs.iter_mut().nth(at).unwrap();
        let mut bytes = blob.to_vec();
        // Cut down to nothing before.
        if bytes.is_empty() {
            return false;
        }
        if self.rng.bool() {
            let at = self.rng.usize(0..bytes.len());
            bytes[at] ^= 1 << self.rng.u8(0..8);
        } else {
            bytes.truncate(self.rng.usize(0..bytes.len()));
        }
        *blob = Bytes::from(bytes);
        true
    }

    fn corrupt_state(&mut self, at: usize) -> bool {
        if let Some(disk) = &mut self.shims[at].disk {
            let mut bytes = disk.to_vec();
            let at = self.rng.usize(0..bytes.len());
            bytes[at] ^= 1 << self.rng.u8(0..8);
            *disk = Bytes::from(bytes);
            true
        } else {
            false
        }
    }

    /// The storm is over: everything that can be up is up.
    pub(super) fn calm_down(&mut self) {
        self.note(|| "CALM".to_owned());
        self.calm_since = Some(self.now);
        self.was_late = self.rates.late > 0;
        if self.rates.is_lossy() {
            self.fault_lasts(Duration::ZERO);
        }
        self.rates.calm_down();
        self.plane.repair();
        for host in 0..self.hosts.len() {
            self.hosts[host].stalled_until = self.now;
            self.hosts[host].subscriptions.permit(self.now);
            self.plan(Duration::ZERO, Event::Resume(host));
            self.plan(Duration::ZERO, Event::Link(host, true));
            let is_second = matches!(self.hosts[host].kind, Kind::Shim(at) if at % 2 == 1);
            if !self.hosts[host].is_up && !is_second {
                self.plan(Duration::ZERO, Event::Start(host));
            }
        }
        for engine in 0..self.engines.len() {
            self.plan(Duration::ZERO, Event::EngineStart(engine));
            self.plan(Duration::ZERO, Event::TroubleOver(engine));
        }
    }
}
