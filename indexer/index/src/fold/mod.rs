//! Applies log messages, heartbeats, registry changes and time to one tree: one verdict a message.
//!
//! [`Fold`] holds the tree together with the status of each source, so that a reader under one lock
//! sees both as of one moment. It is deterministic, idempotent and total: bad input is a counted
//! verdict, never an error that stops the reader.
//!
//! What lowers a source: a gap in the log, a different digest or a contradiction (`stale`); a
//! heartbeat of a generation that the log has not delivered (`catching_up`); no proof for 5 s, an
//! expired registration, or the memory bound (`unknown`). A heartbeat ahead of the log lowers
//! nothing: answers remain correct as of the engine sequence that they name, and the log is usually
//! milliseconds behind. If the announced record does not arrive, the last proof expires at 5 s and
//! makes the source `unknown`; at 6 s a new generation is requested.
//!
//! No IO, no clock, nothing on disk.

mod cut;
mod ends;
mod gone;
mod history;
mod memory;
mod message;
mod outage;
mod reload;
mod removals;
mod resync;
mod roster;
mod set_aside;
mod source;
mod sources;
mod stall;
mod verdict;

use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::{Duration, Instant};

use warmroute_proto::message::{Broadcast, LogMessage};
use warmroute_proto::query::{HoldQuery, HoldSpan, SourceState};
use warmroute_proto::registry::{ResyncRequest, WorkerEntry};
use warmroute_proto::roster::{
    RosterId, RosterNumber, RosterPage, RosterPageRequest, RosterStatus,
};
use warmroute_proto::snapshot::RecordMark;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{
    Change, LogPosition, Namespace, PrefixHash, Source, StreamIdentity, Tier, Tiers, WorkerId,
    codec,
};

use crate::tree::{Growth, SourceNodes, SourceNumber, TierMask, Tree, is_long};
use ends::{LogClockState, LogEnds};
use memory::MemoryCounters;
use message::MessageContent;
use outage::PlaneOutage;
use reload::ReloadLimiter;
use removals::RecordPlace;
use roster::Roster;
use source::{RecordArrival, Registration, SourceContext, SourceFold, Touched};
use sources::{Moment, SourceTable};

pub use cut::{NoSnapshot, ReplacedState, SnapshotCut};
pub use ends::ClockAnswer;
pub use message::{ParsedMessage, heartbeat};
pub use source::{PROOF_AGE_MAX, SourceStatus};
pub(crate) use sources::Standing;
pub use stall::ReaderStall;
pub use verdict::{HeartbeatVerdict, RecordVerdict};

/// A registry value that is not an entry of its key's worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the registry value is not an entry of its key's worker")]
pub struct BadWorkerEntry;

/// The last registry entry of a worker.
#[derive(Clone, Debug)]
pub(crate) struct WorkerRegistration {
    pub(crate) entry: WorkerEntry,
    pub(crate) gone_since: Option<Instant>,
    /// The present registry watch has listed it.
    is_listed: bool,
}

/// The index: one tree, and the status of every source.
pub struct Fold {
    subjects: Subjects,
    bytes_max: Option<usize>,
    log: Option<StreamIdentity>,
    position: LogPosition,
    /// The record at the position; `None` before the first.
    mark: Option<RecordMark>,
    /// Bytes of the log read so far.
    bytes_read: u64,
    ends: LogEnds,
    outage: PlaneOutage,
    reloads: Option<ReloadLimiter>,
    /// Times the log skipped positions.
    jumps: u64,
    memory: MemoryCounters,
    /// The registry was listed completely at least once.
    registry_read: bool,
    forgotten: u64,
    tree: Tree,
    roster: Roster,
    sources: SourceTable,
    workers: BTreeMap<WorkerId, WorkerRegistration>,
}

impl Fold {
    /// An empty fold. Above `bytes_max` bytes of memory, sources are set aside.
    #[must_use]
    pub fn new(namespace: &Namespace, bytes_max: Option<usize>) -> Self {
        Self {
            subjects: Subjects::new(namespace),
            bytes_max,
            log: None,
            position: LogPosition(0),
            mark: None,
            bytes_read: 0,
            ends: LogEnds::default(),
            outage: PlaneOutage::default(),
            reloads: None,
            jumps: 0,
            memory: MemoryCounters::default(),
            registry_read: false,
            forgotten: 0,
            tree: Tree::new(),
            roster: Roster::default(),
            sources: SourceTable::default(),
            workers: BTreeMap::new(),
        }
    }

    // --- log

    /// Sets the log that is read from now on. After a change of logs, reading starts at the
    /// beginning, and every source is suspect until it is proven.
    pub fn follow(&mut self, log: StreamIdentity) {
        if self.log == Some(log) {
            return;
        }
        let first = self.log.is_none();
        self.log = Some(log);
        if first {
            self.position = LogPosition(0);
        } else {
            self.log_lost_records();
        }
    }

    /// The log lost records that were applied. Reading restarts at the beginning, and every source
    /// is suspect until it is proven.
    pub fn log_lost_records(&mut self) {
        self.position = LogPosition(0);
        self.mark = None;
        self.ends.clear();
        for source in self.sources.values_mut() {
            source.log_lost();
        }
    }

    /// Observes that the log ended at `last` at the moment `at` or later. `unix_ns` is the log's
    /// clock then, or 0 if unknown.
    pub fn observe_end(&mut self, at: Instant, last: LogPosition, unix_ns: u64) {
        self.ends.observe(at, last, unix_ns);
    }

    /// Returns the time by which this process's clock fell behind the log's since the last answer; all
    /// proofs are older by as much.
    pub fn observe_clock(&mut self, answer: ClockAnswer) -> Duration {
        let stood = self.ends.observe_clock(answer);
        if !stood.is_zero() {
            for source in self.sources.values_mut() {
                source.clock_stood(stood);
            }
        }
        stood
    }

    /// Applies the next log message.
    pub fn apply(&mut self, now: Instant, message: &LogMessage) -> RecordVerdict {
        let parsed = ParsedMessage::of(&self.subjects, message);
        self.apply_parsed(now, &parsed)
    }

    /// Applies a parsed log message. Blocks that were added ahead for it and not used are removed.
    pub fn apply_parsed(&mut self, now: Instant, message: &ParsedMessage) -> RecordVerdict {
        let verdict = self.judge(now, message);
        self.tree.drop_grown();
        verdict
    }

    fn judge(&mut self, now: Instant, message: &ParsedMessage) -> RecordVerdict {
        let position = message.mark.position;
        if position <= self.position {
            return RecordVerdict::Replayed;
        }
        if self.would_jump(position) {
            self.jumps += 1;
            self.sources.values_mut().for_each(SourceFold::suspect);
        }
        self.position = position;
        self.mark = Some(message.mark);
        self.bytes_read += message.bytes;
        let record = match &message.content {
            MessageContent::Record(record) => record,
            MessageContent::WrongSubject => return RecordVerdict::WrongSubject,
            MessageContent::WrongSource(source) => {
                return self.unread(source, RecordVerdict::WrongSource);
            }
            MessageContent::Undecodable(source) => {
                return self.unread(source, RecordVerdict::Undecodable);
            }
        };
        let stored = self
            .ends
            .stored_after(position, message.mark.stored_unix_ns);
        let sent = stored.and_then(|stored| self.ends.sent_at(now, stored, record.sent_at));
        let arrival = RecordArrival {
            position,
            now,
            stored,
            sent,
        };
        let moment = self.moment(&record.source.worker, now);
        let (fold, kept) = self.sources.entry(&record.source);
        if fold.roster.is_none() {
            fold.roster = Some(self.roster.add(&record.source));
        }
        let verdict = fold.record(arrival, record, message.mark.checksum, &mut self.tree);
        kept.renew(fold, &self.roster, moment);
        self.bound_memory(now);
        verdict
    }

    /// Changes of a message about to be applied, if they are long enough for [`Tree::warm`] and
    /// [`Self::grow`] to pay off.
    #[must_use]
    pub fn to_come<'a>(&self, message: &'a ParsedMessage) -> Option<(SourceNumber, &'a [Change])> {
        let MessageContent::Record(record) = &message.content else {
            return None;
        };
        let fold = self.sources.get(&record.source)?;
        let is_next = is_long(&record.changes) && fold.awaits(record);
        let number = fold.number().filter(|_| is_next)?;
        Some((number, &record.changes))
    }

    /// Calls [`Tree::grow`].
    pub fn grow(&mut self, change: &Change, growth: &mut Growth) {
        self.tree.grow(change, growth);
    }

    /// Marks a source with an unreadable message as suspect.
    fn unread(&mut self, source: &Source, verdict: RecordVerdict) -> RecordVerdict {
        if let Some(fold) = self.sources.get_mut(source) {
            fold.suspect();
        }
        verdict
    }

    // --- broadcast and registry

    /// Applies a heartbeat that was received just now.
    pub fn heartbeat(&mut self, now: Instant, message: &Broadcast) -> HeartbeatVerdict {
        self.heartbeat_of(now, now, message)
    }

    /// Applies a heartbeat that may have waited in a queue: it was received at `came` or later.
    pub fn heartbeat_of(
        &mut self,
        now: Instant,
        came: Instant,
        message: &Broadcast,
    ) -> HeartbeatVerdict {
        let heartbeat = match heartbeat(&self.subjects, message) {
            Ok(heartbeat) => heartbeat,
            Err(verdict) => return verdict,
        };
        let sent = self.ends.sent_at(now, came, heartbeat.sent_at);
        let moment = self.moment(&heartbeat.source.worker, now);
        let (fold, kept) = self.sources.entry(&heartbeat.source);
        let verdict = fold.heartbeat(now, sent, &heartbeat, &mut self.tree);
        kept.renew(fold, &self.roster, moment);
        verdict
    }

    /// A new registry watch begins, which lists every entry first.
    pub fn watch_begins(&mut self) {
        for worker in self.workers.values_mut() {
            worker.is_listed = false;
        }
    }

    /// The watch has listed every entry: workers that were not listed are gone.
    pub fn watch_is_current(&mut self, now: Instant) {
        self.registry_read = true;
        for worker in self.workers.values_mut() {
            if !worker.is_listed {
                worker.gone_since.get_or_insert(now);
            }
        }
        self.sources.void_all();
    }

    pub fn worker_put(&mut self, key: &str, value: &[u8]) -> Result<(), BadWorkerEntry> {
        let entry = codec::decode::<WorkerEntry>(value).map_err(|_| BadWorkerEntry)?;
        if self.subjects.key_worker(key).as_ref() != Some(&entry.worker) {
            return Err(BadWorkerEntry);
        }
        let worker = WorkerRegistration {
            gone_since: None,
            is_listed: true,
            entry,
        };
        let id = worker.entry.worker.clone();
        let former = self.workers.insert(id.clone(), worker);
        // Every renewal of a lease comes here.
        if former.is_some_and(|former| former.gone_since.is_some()) {
            self.sources.void_worker(&id);
        }
        Ok(())
    }

    pub fn worker_gone(&mut self, now: Instant, key: &str) {
        let Some(id) = self.subjects.key_worker(key) else {
            return;
        };
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.gone_since.get_or_insert(now);
            self.sources.void_worker(&id);
        }
    }

    /// The connection to the plane is lost: expired registrations do not count for now.
    pub fn cut_off(&mut self, now: Instant) {
        self.outage.down(now);
        self.sources.void_all();
    }

    /// The connection to the plane is back.
    pub fn reconnected(&mut self, now: Instant) {
        self.outage.up(now);
        self.sources.void_all();
    }

    // --- time

    /// Advances time: missing records become overdue, long-gone sources are freed. Deadlines run
    /// only up to the moment whose log is read: what a lagging reader has not read is not missing.
    pub fn tick(&mut self, now: Instant) {
        let reached = self.ends.reached(self.position);
        self.sources.visit(|_, fold| match reached {
            Some(reached) => fold.expire(reached),
            None => Touched::Nothing,
        });
        self.let_go(now);
        self.ask_back(now);
        self.note_states(now);
    }

    /// Brings the roster, the states' ages and the kept standings up to date.
    fn note_states(&mut self, now: Instant) {
        let (clock, outage) = (self.ends.clock_state(now), self.outage);
        let mut last: Option<(&WorkerId, Registration)> = None;
        let mut removal_bytes = 0;
        let (sources, kept) = self.sources.beside_standings();
        for (source, fold) in sources {
            removal_bytes += fold.removals.bytes();
            let number = *fold.roster.get_or_insert_with(|| self.roster.add(source));
            let listed = kept.listed(number, now);
            if let Some(states) = listed.filter(|_| clock == LogClockState::Known) {
                fold.history.note_state(now, states.gpu);
                continue;
            }
            // The ranks of a worker follow each other.
            let shim = match last {
                Some((worker, shim)) if *worker == source.worker => shim,
                Some(_) | None => registration(&self.workers, outage, &source.worker, now),
            };
            last = Some((&source.worker, shim));
            let (states, reason) = fold.states(now, SourceContext { shim, clock });
            fold.history.note_state(now, states.gpu);
            let status = fold.generation().map(|generation| RosterStatus {
                generation,
                states,
                reason,
            });
            self.roster.set(number, status);
            kept.renew(fold, &self.roster, Moment { now, shim, outage });
        }
        self.memory.removal_bytes = removal_bytes;
    }

    /// Resync requests that are due.
    pub fn poll_resyncs(&mut self, now: Instant) -> Vec<ResyncRequest> {
        if self.outage.is_down() {
            return Vec::new();
        }
        let (workers, outage) = (&self.workers, self.outage);
        let reload_first = self.reloads.is_some();
        let reachable = self
            .sources
            .beside_standings()
            .0
            .iter_mut()
            .filter(|(source, _)| {
                registration(workers, outage, &source.worker, now) == Registration::Present
            })
            .filter(|(_, fold)| !(reload_first && fold.wants_reload()));
        let states = reachable.map(|(source, fold)| (source, fold.fence(), &mut fold.resync));
        resync::poll(now, states)
    }

    /// Frees at most `nodes_max` blocks of dead generations. Returns true while work remains.
    pub fn reclaim(&mut self, nodes_max: usize) -> bool {
        self.tree.reclaim(nodes_max)
    }

    // --- views

    #[must_use]
    pub const fn log(&self) -> Option<StreamIdentity> {
        self.log
    }

    /// Position of the last applied message.
    #[must_use]
    pub const fn position(&self) -> LogPosition {
        self.position
    }

    /// The record at the position; `None` before the first.
    #[must_use]
    pub const fn mark(&self) -> Option<RecordMark> {
        self.mark
    }

    /// Bytes of the log read so far.
    #[must_use]
    pub const fn bytes_read(&self) -> u64 {
        self.bytes_read
    }

    /// Messages between the position and the last observed end of the log.
    #[must_use]
    pub fn lag(&self) -> u64 {
        let last = self.ends.last().unwrap_or_default();
        last.0.saturating_sub(self.position.0)
    }

    /// Time since the fold was at the log's end; `None` if longer than the observations reach back.
    #[must_use]
    pub fn lag_age(&self, now: Instant) -> Option<Duration> {
        let reached = self.ends.reached(self.position)?;
        Some(now.saturating_duration_since(reached))
    }

    #[must_use]
    pub const fn jumps(&self) -> u64 {
        self.jumps
    }

    #[must_use]
    pub const fn bytes_max(&self) -> Option<usize> {
        self.bytes_max
    }

    #[must_use]
    pub const fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Status of every known source, in order.
    pub fn statuses(&self, now: Instant) -> impl Iterator<Item = (&Source, SourceStatus)> {
        self.statuses_after(None, now)
    }

    /// The sources behind one in their order, or all.
    pub fn statuses_after(
        &self,
        after: Option<&Source>,
        now: Instant,
    ) -> impl Iterator<Item = (&Source, SourceStatus)> {
        self.sources
            .after(after)
            .map(move |(source, fold)| (source, self.status_of(source, fold, now)))
    }

    fn status_of(&self, source: &Source, fold: &SourceFold, now: Instant) -> SourceStatus {
        SourceStatus {
            gone_for: self.gone_for(source, fold, now),
            ..fold.status(now, self.context(source, now), &self.tree)
        }
    }

    /// Status of one source; `None` for an unknown one.
    #[must_use]
    pub fn status(&self, source: &Source, now: Instant) -> Option<SourceStatus> {
        let fold = self.sources.get(source)?;
        Some(self.status_of(source, fold, now))
    }

    fn context(&self, source: &Source, now: Instant) -> SourceContext {
        SourceContext {
            shim: registration(&self.workers, self.outage, &source.worker, now),
            clock: self.ends.clock_state(now),
        }
    }

    fn moment(&self, worker: &WorkerId, now: Instant) -> Moment {
        Moment {
            now,
            shim: registration(&self.workers, self.outage, worker, now),
            outage: self.outage,
        }
    }

    /// Whether the source has held a pair since a record.
    #[must_use]
    pub fn hold_span(&self, query: &HoldQuery) -> HoldSpan {
        let Some(fold) = self.sources.get(&query.source) else {
            return HoldSpan::Uncovered;
        };
        let is_reached = self.log == Some(query.log)
            && self.position >= query.since
            && fold.has_applied(query.generation, query.number);
        let since = RecordPlace {
            number: query.number,
            position: query.since,
        };
        match fold.number() {
            _ if !is_reached => HoldSpan::Uncovered,
            Some(number) if self.tree.holds(number, query.block, query.tier) => {
                fold.removals.span(query.block, since)
            }
            Some(_) | None => HoldSpan::Absent,
        }
    }

    /// Names the roster: one life of one replica.
    pub const fn set_roster_id(&mut self, id: RosterId) {
        self.roster.set_id(id);
    }

    #[must_use]
    pub const fn roster_id(&self) -> RosterId {
        self.roster.id()
    }

    /// Changes of the roster, as of the last tick, in about so many bytes.
    #[must_use]
    pub fn roster_page(&self, ask: &RosterPageRequest, bytes_max: usize) -> RosterPage {
        self.roster.page(ask, bytes_max)
    }

    /// Gives the standing of every source that has a number and records, ascending by number.
    pub(crate) fn each_standing(&self, now: Instant, take: impl FnMut(&Standing)) {
        let clock = self.ends.clock_state(now);
        let judge = |number| {
            let source = self.roster.source(number)?;
            let fold = self.sources.get(source)?;
            let shim = registration(&self.workers, self.outage, &source.worker, now);
            Standing::of(fold, &self.roster, SourceContext { shim, clock }, now)
        };
        let kept = self.sources.kept();
        match clock {
            LogClockState::Known => kept.each(now, judge, take),
            LogClockState::Silent => kept.each_judged(judge, take),
        }
    }

    /// The name behind a number of the roster.
    pub(crate) fn source_of(&self, number: RosterNumber) -> Option<&Source> {
        self.roster.source(number)
    }

    /// All pairs that the source holds, in no order.
    pub fn held(&self, source: &Source) -> impl Iterator<Item = (PrefixHash, Tier)> {
        self.number(source)
            .into_iter()
            .flat_map(|number| self.tree.held(number))
    }

    /// The nodes of a source; `None` if it is not folded.
    #[must_use]
    pub fn nodes_of(&self, source: &Source) -> Option<SourceNodes> {
        Some(self.tree.nodes_of(self.number(source)?))
    }

    /// The workers behind one in their order, or all.
    pub(crate) fn workers_after(
        &self,
        after: Option<&WorkerId>,
    ) -> impl Iterator<Item = &WorkerRegistration> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.workers
            .range::<WorkerId, _>((from, Bound::Unbounded))
            .map(|(_, worker)| worker)
    }

    /// The source's number, and the tiers that give credit in these states.
    pub(crate) fn allowed(
        &self,
        source: &Source,
        states: &Tiers<SourceState>,
    ) -> Option<(SourceNumber, TierMask)> {
        Some((self.number(source)?, source::credited(states)))
    }

    fn number(&self, source: &Source) -> Option<SourceNumber> {
        self.sources.get(source)?.number()
    }
}

fn registration(
    workers: &BTreeMap<WorkerId, WorkerRegistration>,
    outage: PlaneOutage,
    worker: &WorkerId,
    now: Instant,
) -> Registration {
    let gone = workers.get(worker).and_then(|worker| worker.gone_since);
    match gone {
        Some(gone) if outage.counts(gone, now) => Registration::Gone,
        Some(_) | None => Registration::Present,
    }
}

#[cfg(test)]
use gone::FREE_AFTER;

#[cfg(test)]
mod tests;
