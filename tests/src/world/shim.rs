//! The shim's shell as the world has it: `service::rank`, `service::outside` and `service::keeper`
//! without sockets and tasks, around the real [`SourceCore`] and its checkpoints.

use std::time::{Duration, Instant};

use bytes::Bytes;
use warmroute_plane::{LogMessage, PutIf, Revision};
use warmroute_proto::registry::{GenerationEntry, ResyncRequest, ShimEntry, WorkerEntry};
use warmroute_proto::{EngineHealth, EngineSeq, Generation, LogPosition, Record, Source, codec};
use warmroute_shim::checkpoint::{self, CheckpointSchedule};
use warmroute_shim::source::{
    AppendId, Effect, LogTail, RegistryReading, ReplayId, SourceConfig, SourceCore, Tail,
    next_generation,
};

use super::host::{Event, Input, ReplayEnd, Then, Timer, Zmq};
use super::plane::{Op, Reply};
use super::{Breakage, World};

const TICK: Duration = Duration::from_millis(100);
const LEASE_TTL: Duration = Duration::from_secs(6);
const LEASE_RENEW: Duration = Duration::from_secs(2);
const HEALTH_EVERY: Duration = Duration::from_secs(1);
const CLOCK_EVERY: Duration = Duration::from_secs(3);
const PLANE_DEADLINE: Duration = Duration::from_secs(5);
const ACK_DEADLINE: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
pub(super) enum ShimThen {
    Appended(AppendId),
    ClaimGot(Generation),
    ClaimLast(Generation, Option<Generation>, PutIf),
    ClaimPut(Generation),
    TailLast(u64, bool),
    TailStatus(u64, bool, Option<LogMessage>),
    TailGet(u64, LogTail),
    Renewed(Instant, u32),
    RenewFound(Instant),
    Acquired(Instant),
    AcquireFound(Instant),
    Registered,
    Clock(Instant),
}

impl ShimThen {
    const fn label(&self) -> &'static str {
        match self {
            Self::Appended(_) => "an append",
            Self::ClaimGot(_) => "a claim's key",
            Self::ClaimLast(..) => "a claim's last record",
            Self::ClaimPut(_) => "a claim",
            Self::TailLast(..) => "a look at the last record",
            Self::TailStatus(..) => "a look at the log",
            Self::TailGet(..) => "a look at the key",
            Self::Renewed(..) => "a renewal",
            Self::RenewFound(_) => "a look at the own lease",
            Self::Acquired(_) => "a lease",
            Self::AcquireFound(_) => "a look at the lease",
            Self::Registered => "a registration",
            Self::Clock(_) => "a look at the log's clock",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    Unknown,
    Leads(u64),
    Lapsed,
    Yields,
}

pub(super) struct Shim {
    pub(super) host: usize,
    pub(super) worker: usize,
    pub(super) keeps_state: bool,
    pub(super) disk: Option<Bytes>,
    pub(super) run: Option<Box<Run>>,
    pub(super) is_joined: bool,
}

pub(super) struct Run {
    pub(super) core: SourceCore,
    schedule: CheckpointSchedule,
    is_saving: bool,
    lease: Option<Revision>,
    own: Bytes,
    renewed: Instant,
    is_keeping: bool,
    pub(super) standing: Standing,
    term: Option<u64>,
    terms: u64,
    last_append: Option<LogPosition>,
    /// The last live batch heard, for a shim that believes any replay.
    heard: Vec<(EngineSeq, Bytes)>,
}

impl World {
    pub(super) fn shim_config(&mut self, at: usize) -> SourceConfig {
        let source = self.engines[self.shims[at].worker].source.clone();
        let mut config = SourceConfig::new(source, true);
        config.outbox_bytes_max = self.rates.outbox_bytes_max;
        config.buffer_bytes_max = self.rates.held_bytes_max;
        config.seed = self.rng.u64(..);
        config
    }

    pub(super) fn start_shim(&mut self, at: usize) {
        let config = self.shim_config(at);
        let (source, mirror) = (config.source.clone(), config.mirror);
        let restored = self.shims[at].disk.as_ref().and_then(|bytes| {
            let decoded = checkpoint::decode(bytes, &source, mirror);
            decoded.ok()
        });
        let core = match restored {
            Some(restored) => SourceCore::resume(config, restored),
            None => SourceCore::new(config),
        };
        let host = self.shims[at].host;
        let now = self.local(host);
        let mut instance = [0; 16];
        instance.fill_with(|| self.rng.u8(..));
        let own = codec::encode(&ShimEntry {
            instance,
            version: "0".to_owned(),
        });
        let mut run = Run {
            core,
            schedule: CheckpointSchedule::new(now),
            is_saving: false,
            lease: None,
            own: own.unwrap().into(),
            renewed: now,
            is_keeping: false,
            standing: Standing::Unknown,
            term: None,
            terms: 0,
            last_append: None,
            heard: Vec::new(),
        };
        let engine = &self.engines[self.shims[at].worker].life.config;
        run.core
            .learn(Some(engine.block_size), Some(engine.num_blocks.into()));
        if !self.hosts[host].seems_up {
            run.core.plane_lost();
        }
        self.shims[at].run = Some(Box::new(run));
        self.shims[at].is_joined = false;
        self.timer(host, Duration::ZERO, Timer::Keep);
        self.timer(host, TICK, Timer::Tick);
        self.timer(host, Duration::ZERO, Timer::Health);
        self.timer(host, Duration::ZERO, Timer::Clock);
        self.plan_connect(at);
    }

    /// The engine's socket is tried until it is there.
    pub(super) fn plan_connect(&mut self, at: usize) {
        let after = self.millis(20..400);
        let (host, worker) = (self.shims[at].host, self.shims[at].worker);
        let event = Event::Connect {
            shim: at,
            life: self.hosts[host].life,
            engine_life: self.engines[worker].number,
        };
        self.plan(after, event);
    }

    pub(super) fn connect_zmq(&mut self, at: usize, life: u64, engine_life: u64) {
        let host = self.shims[at].host;
        let engine = &self.engines[self.shims[at].worker];
        let is_current = self.hosts[host].life == life && engine.number == engine_life;
        if is_current && engine.is_up && self.hosts[host].is_up && !self.shims[at].is_joined {
            // What is published between here and there is missed by a slow joiner.
            self.send_zmq(at, Zmq::Connected);
            self.shims[at].is_joined = true;
        }
    }

    /// Was it connected?
    pub(super) fn disconnect_zmq(&mut self, at: usize) -> bool {
        let was_joined = std::mem::replace(&mut self.shims[at].is_joined, false);
        if was_joined {
            self.send_zmq(at, Zmq::Disconnected);
        }
        was_joined
    }

    pub(super) fn shim_input(&mut self, at: usize, input: Input) {
        let host = self.shims[at].host;
        let now = self.local(host);
        let Some(mut run) = self.shims[at].run.take() else {
            return;
        };
        match input {
            Input::Timer(Timer::Tick) => {
                self.timer(host, TICK, Timer::Tick);
                run.core.tick(now);
            }
            Input::Timer(Timer::Keep) => {
                self.timer(host, LEASE_RENEW, Timer::Keep);
                self.keep(at, &mut run, now);
            }
            Input::Timer(Timer::Clock) => {
                self.timer(host, CLOCK_EVERY, Timer::Clock);
                self.ask_clock(host);
            }
            Input::Timer(Timer::Health) => {
                self.timer(host, HEALTH_EVERY, Timer::Health);
                let is_up = self.engines[self.shims[at].worker].is_up;
                let health = if is_up {
                    EngineHealth::Healthy
                } else {
                    EngineHealth::Unhealthy
                };
                let after = self.millis(0..50);
                self.send_host(host, after, Input::Health(health));
            }
            Input::Health(health) => run.core.health(now, health),
            Input::Connection(is_up) => {
                run.core.plane_lost();
                if is_up {
                    run.core.plane_back(now);
                    self.ask_clock(host);
                }
                self.keep(at, &mut run, now);
            }
            Input::Resync(payload) => {
                let request: ResyncRequest = codec::decode(&payload).unwrap();
                run.core.resync(now, request.above, request.reason);
            }
            Input::Saved(bytes) => {
                run.is_saving = false;
                self.shims[at].disk = Some(bytes);
            }
            Input::Zmq(zmq) => self.hear(&mut run, now, zmq),
            Input::Reply(Then::Shim(then), reply) => self.shim_then(at, &mut run, then, reply),
            other => panic!("a shim is told {other:?}"),
        }
        self.act(at, &mut run);
        self.shims[at].run = Some(run);
    }

    fn hear(&self, run: &mut Run, now: Instant, zmq: Zmq) {
        match zmq {
            Zmq::Connected => run.core.connected(now),
            Zmq::Disconnected => run.core.disconnected(now),
            Zmq::Live(seq, payload) => {
                if self.broken == Some(Breakage::PlausibleRestart) {
                    run.heard.push((seq, payload.clone()));
                }
                run.core.live(now, b"", Some(seq), payload);
            }
            Zmq::Lost => run.core.live_lost(now),
            Zmq::Replayed(id, batches, end) => {
                for (at, (seq, payload)) in batches.into_iter().enumerate() {
                    let known = (at == 0)
                        .then(|| run.heard.iter().rev().find(|(heard, _)| *heard == seq))
                        .flatten();
                    let payload = known.map_or(payload, |(_, payload)| payload.clone());
                    run.core.replay_batch(now, id, seq, &payload);
                }
                match end {
                    ReplayEnd::Open => {}
                    ReplayEnd::End => run.core.replay_end(now, id),
                    ReplayEnd::Failed => run.core.replay_failed(now, id),
                }
            }
        }
    }

    fn act(&mut self, at: usize, run: &mut Run) {
        let host = self.shims[at].host;
        let source = self.engines[self.shims[at].worker].source.clone();
        while let Some(effect) = run.core.poll_effect() {
            match effect {
                Effect::Replay { id, from } => self.ask_replay(at, id, from),
                Effect::ClaimGeneration { above } => {
                    let key = self.subjects.generation_key(&source);
                    self.shim_call(host, Op::Get(key), ShimThen::ClaimGot(above));
                }
                Effect::Append { id, payload } => {
                    if let Some(bytes_max) = self.rates.set.record_bytes_max
                        && payload.len() > bytes_max
                    {
                        let now = self.local(host);
                        run.core.append_too_large(now, id, bytes_max);
                    } else if id.attempt == run.core.attempt() {
                        if let Ok(record) = codec::decode::<Record>(&payload) {
                            let (now, sent_at) = (self.now, record.sent_at);
                            self.vouched.said(now, &source, &record.states, sent_at);
                        }
                        let subject = self.subjects.records(&source);
                        let op = Op::Append { subject, payload };
                        let then = Then::Shim(ShimThen::Appended(id));
                        self.call(host, op, then, ACK_DEADLINE);
                        if self.broken == Some(Breakage::AckBeforeApply) {
                            let now = self.local(host);
                            run.core.acknowledged(now, id);
                        }
                    }
                }
                Effect::ReadTail { id, is_thorough } => {
                    let op = Op::LastOn(self.subjects.records(&source));
                    self.shim_call(host, op, ShimThen::TailLast(id, is_thorough));
                }
                Effect::Heartbeat(heartbeat) => {
                    self.vouched.heartbeat(self.now, &heartbeat);
                    self.broadcast_heartbeat(host, &heartbeat);
                }
                Effect::Notice(notice) => {
                    self.note(|| format!("shim {at}: {notice:?}"));
                }
            }
        }
        let now = self.local(host);
        let (batches, generation) = (run.core.batches(), run.core.generation());
        let keeps = self.shims[at].keeps_state;
        if keeps && !run.is_saving && run.schedule.is_due(now, batches, generation) {
            run.schedule.taken(now, batches, generation);
            if let Some(checkpoint) = run.core.checkpoint() {
                run.is_saving = true;
                let bytes = checkpoint::encode(&checkpoint);
                let after = self.millis(1..300);
                self.send_host(host, after, Input::Saved(bytes.into()));
            }
        }
    }

    fn shim_call(&mut self, host: usize, op: Op, then: ShimThen) {
        self.call(host, op, Then::Shim(then), PLANE_DEADLINE);
    }

    fn ask_replay(&mut self, at: usize, id: ReplayId, from: EngineSeq) {
        let after = self.delay();
        let life = self.hosts[self.shims[at].host].life;
        let event = Event::Replay {
            shim: at,
            life,
            id,
            from,
        };
        self.plan(after, event);
    }

    fn shim_then(&mut self, at: usize, run: &mut Run, then: ShimThen, reply: Reply) {
        let host = self.shims[at].host;
        let now = self.local(host);
        self.note(|| format!("shim {at}: {} is answered {}", then.label(), reply.label()));
        match then {
            ShimThen::Appended(id) => match reply {
                Reply::Position(position) => {
                    run.last_append = Some(position);
                    run.core.acknowledged(now, id);
                }
                _ => run.core.append_failed(now, id),
            },
            ShimThen::Clock(asked) => {
                if let Reply::Status(status) = reply {
                    run.core.log_clock(asked, now, status.now_unix_ns);
                }
            }
            ShimThen::ClaimGot(_) | ShimThen::ClaimLast(..) | ShimThen::ClaimPut(_) => {
                self.shim_claim(at, run, then, reply);
            }
            ShimThen::TailLast(..) | ShimThen::TailStatus(..) | ShimThen::TailGet(..) => {
                self.shim_tail(at, run, then, reply);
            }
            ShimThen::Renewed(..)
            | ShimThen::RenewFound(_)
            | ShimThen::Acquired(_)
            | ShimThen::AcquireFound(_)
            | ShimThen::Registered => self.shim_lease(at, run, then, reply),
        }
    }

    /// `service::outside`: the next one, by compare-and-set.
    fn shim_claim(&mut self, at: usize, run: &mut Run, then: ShimThen, reply: Reply) {
        let host = self.shims[at].host;
        let now = self.local(host);
        let source = self.engines[self.shims[at].worker].source.clone();
        match (then, reply) {
            (ShimThen::ClaimGot(above), Reply::Entry(entry)) => {
                let registered = entry.as_ref().and_then(|entry| generation(&entry.value));
                let condition =
                    entry.map_or(PutIf::Absent, |entry| PutIf::Revision(entry.revision));
                let op = Op::LastOn(self.subjects.records(&source));
                self.shim_call(host, op, ShimThen::ClaimLast(above, registered, condition));
            }
            (ShimThen::ClaimLast(above, registered, condition), Reply::Message(message)) => {
                let last = message
                    .and_then(|message| point(&message))
                    .map(|(of, _)| of);
                let next = if self.broken == Some(Breakage::GenerationRolledBack) {
                    match condition {
                        PutIf::Revision(_) => next_generation(above, registered, None),
                        PutIf::Always | PutIf::Absent => Some(Generation(1)),
                    }
                } else {
                    next_generation(above, registered, last)
                };
                let next = next.unwrap();
                let honest = last.filter(|last| *last < Generation(u64::MAX));
                if honest.is_some_and(|last| next <= last) {
                    self.fail(format!("{source} takes {next:?}, and the log has {last:?}"));
                }
                let value = codec::encode(&GenerationEntry { generation: next }).unwrap();
                let op = Op::Put {
                    key: self.subjects.generation_key(&source),
                    value: value.into(),
                    condition,
                    lease: None,
                };
                self.shim_call(host, op, ShimThen::ClaimPut(next));
            }
            (ShimThen::ClaimPut(next), Reply::Revision(_)) => {
                run.core.generation_claimed(now, next);
            }
            (_, _) => run.core.claim_failed(now),
        }
    }

    /// `service::outside`: a look at the log's end.
    fn shim_tail(&mut self, at: usize, run: &mut Run, then: ShimThen, reply: Reply) {
        let host = self.shims[at].host;
        let now = self.local(host);
        let source = self.engines[self.shims[at].worker].source.clone();
        match (then, reply) {
            (ShimThen::TailLast(id, is_thorough), Reply::Message(last)) => {
                if is_thorough || last.is_none() {
                    let then = ShimThen::TailStatus(id, is_thorough, last);
                    self.shim_call(host, Op::Status, then);
                } else {
                    let last = last.and_then(|last| point(&last));
                    let seen = LogTail {
                        last,
                        ..LogTail::default()
                    };
                    run.core.log_tail(now, id, Tail::Seen(seen));
                }
            }
            (ShimThen::TailStatus(id, is_thorough, last), Reply::Status(status)) => {
                let was_dropped = run.last_append.is_none_or(|at| at < status.first);
                let seen = LogTail {
                    log: Some(status.identity),
                    is_trimmed: last.is_none() && was_dropped,
                    last: last.and_then(|last| point(&last)),
                    registered: RegistryReading::NotRequested,
                };
                if is_thorough {
                    let key = self.subjects.generation_key(&source);
                    self.shim_call(host, Op::Get(key), ShimThen::TailGet(id, seen));
                } else {
                    run.core.log_tail(now, id, Tail::Seen(seen));
                }
            }
            (ShimThen::TailGet(id, mut seen), Reply::Entry(entry)) => {
                seen.registered =
                    RegistryReading::Read(entry.and_then(|entry| generation(&entry.value)));
                run.core.log_tail(now, id, Tail::Seen(seen));
            }
            (ShimThen::TailLast(id, _) | ShimThen::TailStatus(id, ..), _)
            | (ShimThen::TailGet(id, _), _) => run.core.log_tail(now, id, Tail::Unanswered),
            (other, reply) => panic!("{other:?}: {reply:?}"),
        }
    }

    // --- `service::keeper`

    fn keep(&mut self, at: usize, run: &mut Run, now: Instant) {
        if std::mem::replace(&mut run.is_keeping, true) {
            return;
        }
        match run.lease {
            Some(revision) => self.renew(at, run, revision, ShimThen::Renewed(now, 0)),
            None => self.acquire(at, run, now),
        }
    }

    fn renew(&mut self, at: usize, run: &Run, revision: Revision, then: ShimThen) {
        self.put_lease(at, run, PutIf::Revision(revision), then);
    }

    fn acquire(&mut self, at: usize, run: &Run, asked: Instant) {
        self.put_lease(at, run, PutIf::Absent, ShimThen::Acquired(asked));
    }

    fn put_lease(&mut self, at: usize, run: &Run, condition: PutIf, then: ShimThen) {
        let op = Op::Put {
            key: self.shim_key(at),
            value: run.own.clone(),
            condition,
            lease: Some(LEASE_TTL),
        };
        let host = self.shims[at].host;
        self.call(host, op, Then::Shim(then), LEASE_RENEW);
    }

    fn shim_key(&self, at: usize) -> String {
        let source = &self.engines[self.shims[at].worker].source;
        self.subjects.shim_key(&source.worker)
    }

    fn shim_lease(&mut self, at: usize, run: &mut Run, then: ShimThen, reply: Reply) {
        let host = self.shims[at].host;
        let now = self.local(host);
        match (then, reply) {
            (ShimThen::Registered, _) => {}
            (ShimThen::Renewed(asked, _), Reply::Revision(revision)) => {
                run.lease = Some(revision);
                run.renewed = asked;
                self.kept(at, run, None);
            }
            (ShimThen::Renewed(asked, 0), Reply::Conflict) => {
                let op = Op::Get(self.shim_key(at));
                let then = Then::Shim(ShimThen::RenewFound(asked));
                self.call(host, op, then, LEASE_RENEW);
            }
            (ShimThen::RenewFound(asked), Reply::Entry(Some(entry))) if entry.value == run.own => {
                run.lease = Some(entry.revision);
                self.renew(at, run, entry.revision, ShimThen::Renewed(asked, 1));
            }
            (ShimThen::Renewed(..) | ShimThen::RenewFound(_), Reply::Unavailable)
                if now.saturating_duration_since(run.renewed) < LEASE_TTL =>
            {
                self.kept(at, run, None);
            }
            (ShimThen::Renewed(asked, _) | ShimThen::RenewFound(asked), _) => {
                run.lease = None;
                run.standing = Standing::Lapsed;
                self.stand(run, now);
                self.acquire(at, run, asked);
            }
            (ShimThen::Acquired(asked), Reply::Revision(revision)) => {
                run.lease = Some(revision);
                run.renewed = asked;
                run.terms += 1;
                self.kept(at, run, Some(Standing::Leads(run.terms)));
            }
            (ShimThen::Acquired(asked), Reply::Conflict) => {
                let op = Op::Get(self.shim_key(at));
                let then = Then::Shim(ShimThen::AcquireFound(asked));
                self.call(host, op, then, LEASE_RENEW);
            }
            (ShimThen::AcquireFound(asked), Reply::Entry(Some(entry)))
                if entry.value == run.own =>
            {
                self.renew(at, run, entry.revision, ShimThen::Acquired(asked));
            }
            (ShimThen::AcquireFound(_), Reply::Entry(_)) => {
                self.kept(at, run, Some(Standing::Yields));
            }
            (ShimThen::Acquired(_) | ShimThen::AcquireFound(_), _) => self.kept(at, run, None),
            (other, reply) => panic!("{other:?}: {reply:?}"),
        }
    }

    fn kept(&mut self, at: usize, run: &mut Run, standing: Option<Standing>) {
        run.is_keeping = false;
        let host = self.shims[at].host;
        let now = self.local(host);
        if let Some(standing) = standing
            && standing != run.standing
        {
            run.standing = standing;
            self.note(|| format!("shim {at}: {standing:?}"));
            self.stand(run, now);
        }
        if let Standing::Leads(_) = run.standing {
            let entry = self.worker_entry(self.shims[at].worker);
            let op = Op::Put {
                key: self.subjects.worker_key(&entry.worker),
                value: codec::encode(&entry).unwrap().into(),
                condition: PutIf::Always,
                lease: Some(LEASE_TTL),
            };
            self.call(host, op, Then::Shim(ShimThen::Registered), LEASE_RENEW);
        }
    }

    fn stand(&mut self, run: &mut Run, now: Instant) {
        match run.standing {
            Standing::Leads(term) => {
                if run.term.replace(term).is_some_and(|before| before != term) {
                    run.core.lease_lapsed();
                }
                run.core.lease_taken(now);
            }
            Standing::Lapsed => run.core.lease_lapsed(),
            Standing::Yields => run.core.lease_lost(),
            Standing::Unknown => {}
        }
    }

    pub(super) fn worker_entry(&self, worker: usize) -> WorkerEntry {
        let engine = &self.engines[worker];
        let config = &engine.life.config;
        WorkerEntry {
            worker: engine.source.worker.clone(),
            url: format!("http://{}:8000", engine.source.worker),
            models: vec!["m".to_owned()],
            loras: Vec::new(),
            ranks: 1,
            block_size: Some(config.block_size),
            blocks_per_rank: Some(config.num_blocks.into()),
            max_model_len: None,
            main_attention_only: config.groups.len() == 1,
            version: "0".to_owned(),
        }
    }
}

fn generation(value: &[u8]) -> Option<Generation> {
    let entry = codec::decode::<GenerationEntry>(value).ok()?;
    Some(entry.generation)
}

fn point(message: &LogMessage) -> Option<(Generation, warmroute_proto::RecordNumber)> {
    let record: Record = codec::decode(&message.payload).ok()?;
    Some((record.generation, record.number))
}

/// Which source a subject's worker is.
pub(super) fn source(worker: usize) -> Source {
    Source {
        worker: format!("w{worker}").into(),
        dp_rank: warmroute_proto::DpRank(0),
    }
}
