//! The indexer's shell as the world has it: `service::follow` and `service::restore` without tasks,
//! around the real [`Fold`], the judge of logs and the snapshots' format.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;
use warmroute_indexer::fold::{Fold, ReaderStall};
use warmroute_indexer::same_log::{self, LogMatch};
use warmroute_indexer::snapshot::policy::{self, SnapshotProgress};
use warmroute_indexer::snapshot::{Name, Restored};
use warmroute_plane::{LogMessage, LogStatus, RegistryEvent, Revision};
use warmroute_proto::snapshot::{RecordMark, SnapshotHead, SnapshotHolding, SnapshotPointer};
use warmroute_proto::{Generation, LogPosition, Source, codec};

use super::World;
use super::host::{Input, Then, Timer};
use super::plane::{At, Op, Reply};
use super::snapshots::SnapThen;

const TICK: Duration = Duration::from_millis(500);
const RETRY: Duration = Duration::from_millis(500);
const SECOND_OPINION: Duration = Duration::from_millis(300);
const COMPARE_EVERY: u32 = 6;
const STATUS_DEADLINE: Duration = Duration::from_secs(1);
const START_TRIES: u32 = 6;
const LOOKUP_TRIES: u32 = 3;
const LOOKUP_PAUSE: Duration = Duration::from_millis(300);
const RECLAIM_MAX: usize = 1024;

/// What a look at the log is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum For {
    Open { second: bool },
    Tail,
    Session { record: bool },
}

#[derive(Clone, Debug)]
pub(super) enum IndexThen {
    Status(For, u64, Instant),
    Record(For, u64, Instant, LogStatus),
    Restore(RestoreStep),
    Snapshot(Box<SnapThen>),
}

#[derive(Clone, Debug)]
pub(super) enum RestoreStep {
    Status,
    Names(LogStatus),
    Pointer(LogStatus, Vec<String>),
    Blob(LogStatus),
    FitStatus,
    FitRecord(LogStatus),
}

pub(super) enum Wanted {
    Any,
    Above(LogPosition),
    Holding(Vec<(Source, Generation)>),
}

enum Cause {
    Start {
        status: LogStatus,
        fit: LogMatch,
        at: Instant,
        attempt: u32,
    },
    FellOff(Vec<LogMessage>),
    Mismatch,
}

/// A snapshot is being looked for; nothing else is done meanwhile.
pub(super) struct Restore {
    wanted: Wanted,
    cause: Cause,
    candidates: VecDeque<String>,
    loaded: Option<Restored>,
    tries: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Waiting,
    Opening,
    Following,
}

/// The plane's end of a session: what was sent of the log.
pub(super) struct Tailing {
    pub(super) is_open: bool,
    pub(super) connection: u64,
    pub(super) sent: LogPosition,
    pub(super) log: warmroute_proto::StreamIdentity,
    pub(super) stored: Option<u64>,
    pub(super) check_at: At,
    pub(super) is_pumping: bool,
}

pub(super) struct Indexer {
    pub(super) host: usize,
    pub(super) run: Option<Box<IndexRun>>,
    pub(super) runs: u64,
}

pub(super) struct IndexRun {
    pub(super) fold: Fold,
    pub(super) started: bool,
    pub(super) session: u64,
    pub(super) phase: Phase,
    stall: ReaderStall,
    /// It listens to heartbeats and the registry.
    pub(super) is_subscribed: bool,
    pub(super) seen: BTreeMap<String, Revision>,
    pub(super) tailing: Tailing,
    restore: Option<Restore>,
    pub(super) waiting: VecDeque<Input>,
    until_compared: u32,
    pub(super) log_first: LogPosition,
    pub(super) progress: SnapshotProgress,
    pub(super) attempts: u64,
    pub(super) is_writing: bool,
    pub(super) writer: String,
    /// Of an earlier moment, for images that are not of one.
    pub(super) former_head: Option<SnapshotHead>,
}

impl World {
    pub(super) fn start_indexer(&mut self, at: usize) {
        let indexer = &mut self.indexers[at];
        indexer.runs += 1;
        let writer = format!("i{at}r{}", indexer.runs);
        let host = indexer.host;
        let bytes_max = self.rates.set.indexer_bytes_max.filter(|_| at == 0);
        let run = IndexRun {
            fold: Fold::new(&self.namespace, bytes_max),
            started: false,
            session: 0,
            phase: Phase::Waiting,
            stall: ReaderStall::new(self.local(host)),
            is_subscribed: false,
            seen: BTreeMap::new(),
            tailing: Tailing {
                is_open: false,
                connection: 0,
                sent: LogPosition(0),
                log: self.plane.log.identity,
                stored: None,
                check_at: Duration::ZERO,
                is_pumping: false,
            },
            restore: None,
            waiting: VecDeque::new(),
            until_compared: 0,
            log_first: LogPosition(0),
            progress: SnapshotProgress::default(),
            attempts: 0,
            is_writing: false,
            writer,
            former_head: None,
        };
        self.indexers[at].run = Some(Box::new(run));
        self.timer(host, Duration::ZERO, Timer::Open(0));
        self.timer(host, TICK, Timer::Tick);
        self.timer(host, Duration::from_secs(1), Timer::Snapshot);
    }

    pub(super) fn indexer_input(&mut self, at: usize, input: Input) {
        let Some(mut run) = self.indexers[at].run.take() else {
            return;
        };
        self.index(at, &mut run, input);
        while run.restore.is_none()
            && let Some(input) = run.waiting.pop_front()
        {
            self.index(at, &mut run, input);
        }
        self.indexers[at].run = Some(run);
    }

    fn index(&mut self, at: usize, run: &mut IndexRun, input: Input) {
        let host = self.indexers[at].host;
        let now = self.local(host);
        let Some(input) = self.index_always(at, run, now, input) else {
            return;
        };
        match input {
            Input::Connection(_) if run.phase != Phase::Following => {}
            other if run.restore.is_some() => run.waiting.push_back(other),
            other => self.index_turn(at, run, now, other),
        }
    }

    /// One turn of the writer: what it reads may have waited, if it stood still.
    fn index_turn(&mut self, at: usize, run: &mut IndexRun, now: Instant, input: Input) {
        let came = run.stall.turn(now);
        match input {
            Input::Timer(Timer::Open(session)) if session == run.session => {
                self.open(at, run, now);
            }
            Input::Timer(Timer::Look(session)) if session == run.session => {
                let record = run.until_compared == 0;
                run.until_compared = if record {
                    COMPARE_EVERY
                } else {
                    run.until_compared - 1
                };
                self.look(at, run, For::Session { record });
            }
            Input::Reply(Then::Index(IndexThen::Status(why, session, asked)), reply) => {
                if session == run.session {
                    self.looked_status(at, run, (why, asked), reply);
                }
            }
            Input::Reply(Then::Index(IndexThen::Record(why, session, asked, status)), reply) => {
                if session == run.session {
                    match reply {
                        Reply::Message(found) => {
                            self.looked(at, run, (why, asked), &status, found.as_ref());
                        }
                        _ => self.look_failed(at, run, why),
                    }
                }
            }
            Input::Connection(is_up) => {
                if is_up {
                    run.fold.reconnected(now);
                } else {
                    run.fold.cut_off(now);
                }
                run.until_compared = 0;
            }
            Input::Tail(of, batch) if of == (run.session, run.tailing.connection) => {
                self.fold_batch(at, run, now, batch);
            }
            Input::TailEnded(session) if session == run.session => {
                self.end_session(at, run, "the tail ended");
            }
            Input::Heartbeat(message) if run.is_subscribed => {
                let message = self.heartbeat_as_read(&run.fold, now, message);
                run.fold.heartbeat_of(now, came, &message);
            }
            Input::Registry(session, event) if session == run.session => {
                Self::registry(run, now, event);
            }
            Input::Timer(Timer::Open(_) | Timer::Look(_))
            | Input::Tail(..)
            | Input::TailEnded(_)
            | Input::Heartbeat(_)
            | Input::Registry(..) => {}
            other => panic!("an indexer is told {other:?}"),
        }
    }

    /// What is not the session's; the rest comes back.
    fn index_always(
        &mut self,
        at: usize,
        run: &mut IndexRun,
        now: Instant,
        input: Input,
    ) -> Option<Input> {
        let host = self.indexers[at].host;
        match input {
            Input::Reply(Then::Index(IndexThen::Restore(step)), reply) => {
                self.restore_step(at, run, step, reply);
            }
            Input::Timer(Timer::Again(_)) => self.restore_again(at, run),
            // Queries wait for nobody.
            Input::Query(from, no, query) => self.answer_query(at, run, (from, no, query)),
            Input::Timer(Timer::Tick) => {
                self.timer(host, TICK, Timer::Tick);
                // The writer's task is the one that waits: its ticks are delayed.
                if run.restore.is_none() {
                    self.index_tick(at, run, now);
                }
            }
            Input::Timer(Timer::Snapshot) => {
                self.timer(host, Duration::from_secs(1), Timer::Snapshot);
                self.snapshot_if_due(at, run, now);
            }
            Input::Reply(Then::Index(IndexThen::Snapshot(then)), reply) => {
                self.snapshot_then(at, run, *then, reply);
            }
            other => return Some(other),
        }
        None
    }

    fn registry(run: &mut IndexRun, now: Instant, event: RegistryEvent) {
        match event {
            RegistryEvent::Put { key, entry } => {
                run.seen.insert(key.clone(), entry.revision);
                // A foreign value is counted by the shell, no more.
                run.fold.worker_put(&key, &entry.value).unwrap_or_default();
            }
            RegistryEvent::Gone { key } => {
                run.seen.remove(&key);
                run.fold.worker_gone(now, &key);
            }
            RegistryEvent::Current => run.fold.watch_is_current(now),
        }
    }

    // --- a session

    pub(super) fn end_session(&mut self, at: usize, run: &mut IndexRun, why: &str) {
        let host = self.indexers[at].host;
        let now = self.local(host);
        self.note(|| format!("indexer {at}: {why}"));
        run.session += 1;
        run.phase = Phase::Waiting;
        run.is_subscribed = false;
        run.tailing.is_open = false;
        run.fold.tick(now);
        self.timer(host, RETRY, Timer::Open(run.session));
    }

    fn open(&mut self, at: usize, run: &mut IndexRun, now: Instant) {
        let host = self.indexers[at].host;
        if !self.hosts[host].seems_up {
            run.fold.cut_off(now);
            run.fold.tick(now);
            self.timer(host, TICK, Timer::Open(run.session));
            return;
        }
        run.fold.reconnected(now);
        run.phase = Phase::Opening;
        self.look(at, run, For::Open { second: false });
    }

    fn look(&mut self, at: usize, run: &IndexRun, why: For) {
        let host = self.indexers[at].host;
        let asked = self.local(host);
        let then = IndexThen::Status(why, run.session, asked);
        self.call(host, Op::Status, Then::Index(then), STATUS_DEADLINE);
    }

    fn looked_status(
        &mut self,
        at: usize,
        run: &mut IndexRun,
        (why, asked): (For, Instant),
        reply: Reply,
    ) {
        let Reply::Status(status) = reply else {
            self.look_failed(at, run, why);
            return;
        };
        let compares = match why {
            For::Open { .. } => true,
            For::Tail => false,
            For::Session { record } => record,
        };
        let mark = run.fold.mark().filter(|mark| {
            let comparable =
                run.fold.log() == Some(status.identity) && same_log::is_there(mark, &status);
            compares && comparable
        });
        if let Some(mark) = mark {
            let then = IndexThen::Record(why, run.session, asked, status);
            let host = self.indexers[at].host;
            let op = Op::At(mark.position);
            self.call(host, op, Then::Index(then), STATUS_DEADLINE);
        } else {
            self.looked(at, run, (why, asked), &status, None);
        }
    }

    fn look_failed(&mut self, at: usize, run: &mut IndexRun, why: For) {
        match why {
            For::Open { .. } | For::Tail => self.end_session(at, run, "the log does not answer"),
            For::Session { .. } => {
                let host = self.indexers[at].host;
                self.timer(host, TICK, Timer::Look(run.session));
            }
        }
    }

    fn fit(run: &IndexRun, status: &LogStatus, found: Option<&LogMessage>) -> LogMatch {
        let log = run.fold.log().unwrap_or(status.identity);
        same_log::judge(log, run.fold.mark().as_ref(), status, found)
    }

    fn looked(
        &mut self,
        at: usize,
        run: &mut IndexRun,
        (why, asked): (For, Instant),
        status: &LogStatus,
        found: Option<&LogMessage>,
    ) {
        let host = self.indexers[at].host;
        let fit = self.fit_as_seen(Self::fit(run, status, found));
        match why {
            For::Open { second: false } if fit.is_broken() => {
                // Nobody else waits: the session is not open yet.
                let span = self.hosts[host].clock.span(SECOND_OPINION);
                let then = IndexThen::Status(For::Open { second: true }, run.session, asked);
                self.call_later(host, span, Op::Status, Then::Index(then));
            }
            For::Open { .. } => {
                if run.started {
                    self.opened(at, run, asked, status, fit);
                } else {
                    run.fold.reload_first();
                    let cause = Cause::Start {
                        status: *status,
                        fit,
                        at: asked,
                        attempt: 1,
                    };
                    self.restore(at, run, cause, Wanted::Any);
                }
            }
            For::Tail | For::Session { .. } if fit.is_broken() => {
                self.end_session(at, run, fit.label());
            }
            For::Tail => {
                let shows = self.clock_as_seen(status);
                run.fold.observe_end(asked, status.last, shows);
                run.log_first = status.first;
                run.phase = Phase::Following;
                self.timer(host, TICK, Timer::Look(run.session));
            }
            For::Session { .. } => {
                let shows = self.clock_as_seen(status);
                run.fold.observe_end(asked, status.last, shows);
                run.log_first = status.first;
                // What came before this answer is read.
                if run.stall.ends_with(asked) {
                    run.stall.ended();
                }
                self.timer(host, TICK, Timer::Look(run.session));
            }
        }
    }

    /// It is decided what log this is: the streams are opened.
    fn opened(
        &mut self,
        at: usize,
        run: &mut IndexRun,
        asked: Instant,
        status: &LogStatus,
        fit: LogMatch,
    ) {
        match fit {
            LogMatch::LostEnd | LogMatch::OtherRecord => run.fold.log_lost_records(),
            LogMatch::AnotherLog | LogMatch::Same | LogMatch::Trimmed | LogMatch::Missing => {}
        }
        run.fold.follow(status.identity);
        let shows = self.clock_as_seen(status);
        run.fold.observe_end(asked, status.last, shows);
        run.is_subscribed = true;
        run.stall = ReaderStall::new(self.local(self.indexers[at].host));
        run.fold.watch_begins();
        run.seen.clear();
        self.begin_watch(at, run);
        run.tailing = Tailing {
            is_open: true,
            connection: 0,
            sent: run.fold.position(),
            log: self.plane.log.identity,
            stored: None,
            check_at: self.now,
            is_pumping: false,
        };
        let host = self.indexers[at].host;
        self.pump_soon(host, run);
        self.look(at, run, For::Tail);
    }

    fn fold_batch(&mut self, at: usize, run: &mut IndexRun, now: Instant, batch: Vec<LogMessage>) {
        let jumps = batch
            .first()
            .filter(|first| run.fold.would_jump(first.position));
        if jumps.is_some() {
            let wanted = Wanted::Above(run.fold.position());
            self.note(|| format!("indexer {at}: fell off"));
            self.restore(at, run, Cause::FellOff(batch), wanted);
            return;
        }
        self.fold_all(at, run, now, &batch);
    }

    pub(super) const fn is_loading(run: &IndexRun) -> bool {
        run.restore.is_some()
    }

    fn fold_all(&mut self, at: usize, run: &mut IndexRun, now: Instant, batch: &[LogMessage]) {
        for message in batch {
            let message = self.record_as_read(&run.fold, now, message.clone());
            let before = run.fold.set_aside_and_returned().0;
            let verdict = run.fold.apply(now, &message);
            self.checks.set_aside += run.fold.set_aside_and_returned().0 - before;
            self.checks.verdicts.count(verdict);
            self.note(|| format!("indexer {at}: {} {}", message.position, verdict.label()));
        }
        run.fold.reclaim(RECLAIM_MAX);
        self.check_position(at, run);
    }

    fn index_tick(&mut self, at: usize, run: &mut IndexRun, now: Instant) {
        run.fold.tick(now);
        run.fold.reclaim(RECLAIM_MAX);
        if run.phase != Phase::Following {
            return;
        }
        let diverged = run.fold.poll_reload(now);
        if diverged.is_empty() {
            self.ask_for_resyncs(at, run, now);
        } else {
            self.note(|| format!("indexer {at}: diverged {diverged:?}"));
            self.restore(at, run, Cause::Mismatch, Wanted::Holding(diverged));
        }
    }

    fn ask_for_resyncs(&mut self, at: usize, run: &mut IndexRun, now: Instant) {
        let host = self.indexers[at].host;
        for request in run.fold.poll_resyncs(now) {
            self.note(|| format!("indexer {at}: asks {request:?}"));
            let payload: Bytes = codec::encode(&request).unwrap().into();
            self.checks.resync(self.now, &request);
            for shim in 0..self.shims.len() {
                let source = &self.engines[self.shims[shim].worker].source;
                if *source == request.source {
                    let to = self.shims[shim].host;
                    self.broadcast(host, to, Input::Resync(payload.clone()));
                }
            }
        }
    }

    // --- `service::restore`

    fn restore(&mut self, at: usize, run: &mut IndexRun, cause: Cause, wanted: Wanted) {
        run.restore = Some(Restore {
            wanted,
            cause,
            candidates: VecDeque::new(),
            loaded: None,
            tries: 0,
        });
        self.restore_call(at, Op::Status, RestoreStep::Status);
    }

    fn restore_call(&mut self, at: usize, op: Op, step: RestoreStep) {
        let host = self.indexers[at].host;
        let then = Then::Index(IndexThen::Restore(step));
        self.call(host, op, then, Duration::from_secs(5));
    }

    fn restore_step(&mut self, at: usize, run: &mut IndexRun, step: RestoreStep, reply: Reply) {
        let Some(mut restore) = run.restore.take() else {
            return;
        };
        match (step, reply) {
            (RestoreStep::Status, Reply::Status(status)) => {
                self.restore_call(at, Op::Blobs, RestoreStep::Names(status));
            }
            (RestoreStep::Names(status), Reply::Names(names)) => {
                let key = self.subjects.snapshot_pointer_key();
                self.restore_call(at, Op::Get(key), RestoreStep::Pointer(status, names));
            }
            (RestoreStep::Pointer(status, names), reply) => {
                restore.candidates = candidates(&restore.wanted, &status, names, reply);
                run.restore = Some(restore);
                self.next_candidate(at, run, &status);
                return;
            }
            (RestoreStep::Blob(status), Reply::Blob(blob)) => {
                let text = restore.candidates.pop_front().unwrap();
                let name = Name::parse(&text).unwrap();
                let read = blob.and_then(|blob| Restored::read(&blob).ok());
                let is_its = |read: &Restored| {
                    read.head.log == name.log && read.head.at.position == name.position
                };
                restore.loaded = read.filter(is_its);
                restore.tries = 0;
                let is_read = restore.loaded.is_some();
                run.restore = Some(restore);
                if is_read {
                    self.restore_call(at, Op::Status, RestoreStep::FitStatus);
                } else {
                    self.checks.skipped += 1;
                    self.next_candidate(at, run, &status);
                }
                return;
            }
            (RestoreStep::FitStatus, Reply::Status(status)) => {
                let mark = restore.loaded.as_ref().map(|loaded| loaded.head.at);
                let mark = mark.filter(|mark| same_log::is_there(mark, &status));
                match mark {
                    Some(mark) => {
                        let op = Op::At(mark.position);
                        self.restore_call(at, op, RestoreStep::FitRecord(status));
                    }
                    None => {
                        run.restore = Some(restore);
                        self.judge_candidate(at, run, &status, None);
                        return;
                    }
                }
            }
            (RestoreStep::FitRecord(status), Reply::Message(found)) => {
                run.restore = Some(restore);
                self.judge_candidate(at, run, &status, found.as_ref());
                return;
            }
            (_, _) => {
                run.restore = Some(restore);
                self.restored(at, run, None);
                return;
            }
        }
        run.restore = Some(restore);
    }

    fn next_candidate(&mut self, at: usize, run: &mut IndexRun, status: &LogStatus) {
        let next = run
            .restore
            .as_ref()
            .and_then(|restore| restore.candidates.front());
        match next.cloned() {
            Some(name) => self.restore_call(at, Op::Blob(name), RestoreStep::Blob(*status)),
            None => self.restored(at, run, Some(false)),
        }
    }

    fn judge_candidate(
        &mut self,
        at: usize,
        run: &mut IndexRun,
        status: &LogStatus,
        found: Option<&LogMessage>,
    ) {
        let restore = run.restore.as_mut().unwrap();
        let head = &restore.loaded.as_ref().unwrap().head;
        let mark: RecordMark = head.at;
        let fit = same_log::judge(head.log, Some(&mark), status, found);
        match self.fit_as_seen(fit) {
            LogMatch::Same | LogMatch::Trimmed => {
                if let Wanted::Holding(sources) = &restore.wanted
                    && !sources.iter().any(|(source, generation)| {
                        head.sources.iter().any(|entry| {
                            entry.source == *source
                                && entry.generation == *generation
                                && entry.holding == SnapshotHolding::Folded
                        })
                    })
                {
                    self.restored(at, run, Some(false));
                    return;
                }
                let loaded = restore.loaded.take().unwrap();
                let now = self.local(self.indexers[at].host);
                drop(run.fold.adopt(now, loaded));
                self.note(|| format!("indexer {at}: restored {}", mark.position));
                self.restored(at, run, Some(true));
            }
            LogMatch::AnotherLog => self.next_candidate(at, run, status),
            LogMatch::Missing | LogMatch::LostEnd | LogMatch::OtherRecord => {
                restore.tries += 1;
                if restore.tries < LOOKUP_TRIES {
                    let host = self.indexers[at].host;
                    self.timer(host, LOOKUP_PAUSE, Timer::Again(run.session));
                } else {
                    self.checks.skipped += 1;
                    self.next_candidate(at, run, status);
                }
            }
        }
    }

    fn restore_again(&mut self, at: usize, run: &IndexRun) {
        if let Some(restore) = &run.restore {
            let step = if restore.loaded.is_some() {
                RestoreStep::FitStatus
            } else {
                RestoreStep::Status
            };
            self.restore_call(at, Op::Status, step);
        }
    }

    /// The search is over: `None` says that the store did not answer.
    fn restored(&mut self, at: usize, run: &mut IndexRun, found: Option<bool>) {
        let host = self.indexers[at].host;
        let now = self.local(host);
        let restore = run.restore.take().unwrap();
        match restore.cause {
            Cause::Start {
                status,
                fit,
                at: asked,
                attempt,
            } => {
                if found.is_none() && attempt < START_TRIES {
                    run.restore = Some(Restore {
                        cause: Cause::Start {
                            status,
                            fit,
                            at: asked,
                            attempt: attempt + 1,
                        },
                        wanted: Wanted::Any,
                        candidates: VecDeque::new(),
                        loaded: None,
                        tries: 0,
                    });
                    self.timer(host, RETRY, Timer::Again(run.session));
                    return;
                }
                run.started = true;
                self.opened(at, run, asked, &status, fit);
            }
            Cause::FellOff(_) | Cause::Mismatch if found == Some(true) => {
                self.end_session(at, run, "a snapshot was loaded");
            }
            Cause::FellOff(batch) => self.fold_all(at, run, now, &batch),
            Cause::Mismatch => self.ask_for_resyncs(at, run, now),
        }
    }
}

/// The names worth trying, the newest first. The pointer is a hint; the list is what is there.
fn candidates(
    wanted: &Wanted,
    status: &LogStatus,
    mut names: Vec<String>,
    pointer: Reply,
) -> VecDeque<String> {
    if let Reply::Entry(Some(entry)) = pointer
        && let Ok(pointer) = codec::decode::<SnapshotPointer>(&entry.value)
    {
        names.push(pointer.newest.name);
        names.extend(pointer.older.map(|older| older.name));
    }
    names.sort_unstable();
    names.dedup();
    policy::candidates(&names, status.identity)
        .into_iter()
        .take_while(|(name, _)| {
            let is_of_use = match wanted {
                Wanted::Above(position) => name.position > *position,
                Wanted::Any | Wanted::Holding(_) => true,
            };
            is_of_use && same_log::goes_on_from(name.position, status)
        })
        .map(|(_, text)| text.to_owned())
        .collect()
}
