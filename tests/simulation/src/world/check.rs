//! What has to hold always, and what in the end.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use warmroute_indexer::Handle;
use warmroute_indexer::fold::RecordVerdict;
use warmroute_indexer::snapshot::Restored;
use warmroute_plane::{LogMessage, Revision};
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::query::{IndexAnswer, IndexQuery, SourceState, UnknownReason};
use warmroute_proto::view::SourceView;
use warmroute_proto::{
    Digest, EngineSeq, Generation, Heartbeat, LogPosition, LogTime, PrefixHash, Record,
    RecordNumber, Source, Tier, TierStates, WorkerId, codec,
};
use xxhash_rust::xxh3::xxh3_64;

use super::World;
use super::core_bus::WorldPlane;
use super::engine::EngineNode;
use super::faults::Fault;
use super::host::{Event, ProcessId};
use super::model::Pair;
use super::plane::At;
use super::requests::RouterChecks;

/// A state that ended longer ago must not be credited, whether the engine's life ended or its next
/// batch came: 3 s of the shim's proof or backlog, the heartbeats' period, and 5 s of the indexer's
/// proof. The time that messages are on their way between the two adds nothing: they carry their
/// time of sending.
const GHOST_MAX: Duration = Duration::from_secs(9);
/// Credit rests on what a shim sent within the last 5 s; clocks add a little.
const VOUCHED_MAX: Duration = Duration::from_millis(5_500);
/// A shim without the log's clock, or with another one's, sends a less exact time.
const CLOCK_UNSURE: Duration = Duration::from_secs(20);
/// An engine's messages carry no time: longest time to its shim, where single messages wait.
const EVENT_LATE: Duration = Duration::from_secs(2);
/// Until a shim has queried another server's clock: a known limit (docs/RELIABILITY.md).
const CLOCK_LATE: Duration = Duration::from_secs(3);
/// So long after the storm all must be right.
const HEALED_WITHIN: Duration = Duration::from_secs(90);
/// And stay so.
const STAYS: Duration = Duration::from_secs(4);
/// A registration that came or went is seen by an undisturbed indexer within this time: a call from
/// before may take its 5 s to fail, and the session after it as long to begin.
pub(super) const SEEN_WITHIN: Duration = Duration::from_secs(10);
/// So long after the storm no renewal of the storm is on its way.
const LEASES_SETTLE: Duration = Duration::from_secs(9);
/// An engine whose history cannot be known any more is emptied after this time.
const RESET_AFTER: Duration = Duration::from_secs(15);

/// One number of one generation of one source.
type Key = (Source, Generation, RecordNumber);

/// What was seen of the log's records by one verdict each.
#[derive(Clone, Debug, Default)]
pub(super) struct Verdicts([u64; RecordVerdict::ALL.len()]);

impl Verdicts {
    pub(super) fn count(&mut self, verdict: RecordVerdict, times: u64) {
        let at = RecordVerdict::ALL
            .iter()
            .position(|&known| known == verdict);
        self.0[at.unwrap()] += times;
    }
}

/// Recovery after the faults.
#[derive(Default)]
struct Healed {
    since: Option<At>,
    after: Option<Duration>,
}

/// What the registry's keys were written with.
#[derive(Default)]
pub(super) struct RegistryChecks {
    /// The last writer of each leased key.
    pub(super) lease_writers: BTreeMap<String, ProcessId>,
    /// When each key was last created or removed, and which of both.
    pub(super) registered: BTreeMap<String, (At, bool)>,
    /// The revision that created each key.
    pub(super) created: BTreeMap<String, Revision>,
}

#[derive(Default)]
pub(super) struct Checks {
    pub(super) broken: Option<String>,
    pub(super) events: u64,
    pub(super) faults: Vec<Fault>,
    pub(super) compared: u64,
    pub(super) exact: u64,
    pub(super) snapshots: u64,
    pub(super) skipped: u64,
    pub(super) resyncs: u64,
    pub(super) resets: u64,
    pub(super) routers: RouterChecks,
    /// Sources that were set aside for want of memory.
    pub(super) set_aside: u64,
    /// When what went wrong so far is over by itself: processes started, links mended.
    pub(super) faults_end: At,
    /// When an indexer last gave some source no credit.
    dark_until: At,
    /// Log or registry were set back: numbers may be given twice.
    pub(super) history_lost: bool,
    pub(super) verdicts: Verdicts,
    last_resync: At,
    /// Hash of the payload of each record ever appended; `None` if there were two.
    records: BTreeMap<Key, Option<u64>>,
    digests: BTreeMap<Key, Digest>,
    pub(super) registry: RegistryChecks,
    healed: Healed,
}

/// What shims vouched for.
#[derive(Default)]
pub(super) struct Vouched {
    /// When a shim last gave credit to its source, and when it last did without saying when.
    said: BTreeMap<Source, (At, Option<At>)>,
    pub(super) clock_jumped: Option<At>,
    /// The last heartbeat of each source.
    pub(super) last: BTreeMap<Source, Heartbeat>,
}

impl Vouched {
    /// A shim publishes the state that it vouches for.
    pub(super) fn said(
        &mut self,
        now: At,
        source: &Source,
        states: &TierStates,
        sent_at: Option<LogTime>,
    ) {
        let gives_credit = |&tier: &Tier| SourceState::from(*states.get(tier)).gives_credit();
        if Tier::ALL.iter().any(gives_credit) {
            let vouched = self.said.entry(source.clone()).or_default();
            vouched.0 = now;
            if sent_at.is_none() {
                vouched.1 = Some(now);
            }
        }
    }

    pub(super) fn heartbeat(&mut self, now: At, heartbeat: &Heartbeat) {
        let source = &heartbeat.source;
        self.said(now, source, &heartbeat.states, heartbeat.sent_at);
        self.last.insert(source.clone(), heartbeat.clone());
    }

    /// Whether the source's shim gave credit recently, as far as that can be known.
    fn is_vouched(&self, now: At, source: &Source) -> bool {
        let (vouched, unstamped) = self.said.get(source).copied().unwrap_or_default();
        let is_unstamped = unstamped.is_some_and(|at| now < at + CLOCK_UNSURE);
        now < vouched + VOUCHED_MAX || is_unstamped || self.is_clock_unsure(now)
    }

    /// Whether another server's clock took over recently.
    fn is_clock_unsure(&self, now: At) -> bool {
        let jumped = self.clock_jumped;
        jumped.is_some_and(|at| now < at + CLOCK_UNSURE)
    }
}

/// What a run came to.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub events: u64,
    /// Those that found something that could go wrong.
    pub faults: Vec<Fault>,
    /// Credited tiers that were compared with the engine's truth; of these, exact ones.
    pub compared: u64,
    pub exact: u64,
    pub snapshots: u64,
    /// Snapshots that were found unusable.
    pub skipped: u64,
    pub resyncs: u64,
    /// Engines that had to be emptied, because their content could not be known.
    pub resets: u64,
    /// Decisions of routers, and requests that no worker could take.
    pub decisions: u64,
    pub moves: u64,
    pub rechecks: u64,
    pub refused: u64,
    /// Answers to later parts of a prompt that name sources.
    pub later_parts: u64,
    /// Credited sources in answers to routers, and routers' views of each other, all compared.
    pub answers: u64,
    pub views: u64,
    /// Sources that were set aside for want of memory.
    pub set_aside: u64,
    /// From the end of the last fault until every source was credited by every indexer, for good.
    pub dark_for: Duration,
    /// From the end of the faults until all was right.
    pub healed_after: Option<Duration>,
    /// How often each verdict on a record of the log came, in the order of [`RecordVerdict::ALL`].
    pub verdicts: Vec<u64>,
}

impl Checks {
    pub(super) fn report(&self) -> Report {
        Report {
            events: self.events,
            faults: self.faults.clone(),
            compared: self.compared,
            exact: self.exact,
            snapshots: self.snapshots,
            skipped: self.skipped,
            resyncs: self.resyncs,
            resets: self.resets,
            decisions: self.routers.decisions,
            moves: self.routers.moves,
            rechecks: self.routers.rechecks,
            refused: self.routers.refused,
            later_parts: self.routers.later_parts,
            answers: self.routers.answers,
            views: self.routers.views,
            set_aside: self.set_aside,
            dark_for: self.dark_until.saturating_sub(self.faults_end),
            healed_after: self.healed.after,
            verdicts: self.verdicts.0.to_vec(),
        }
    }

    /// A record is only ever sent again byte for byte.
    pub(super) fn appended(&mut self, payload: &Bytes) {
        let Ok(record) = codec::decode::<Record>(payload) else {
            return;
        };
        let key = (record.source, record.generation, record.number);
        let hash = xxh3_64(payload);
        let known = self.records.entry(key.clone()).or_insert(Some(hash));
        if known.is_some_and(|known| known != hash) {
            *known = None;
            if !self.history_lost {
                let why = format!("{key:?} was appended with two contents");
                self.broken.get_or_insert(why);
            }
        }
    }

    pub(super) fn resync(&mut self, now: At) {
        self.resyncs += 1;
        self.last_resync = now;
    }
}

/// What the log has behind the last record of a source that is in a snapshot.
#[derive(Clone, Copy, PartialEq, Eq)]
enum After {
    Nothing,
    TheNext,
}

impl World {
    pub(super) fn fail(&mut self, why: String) {
        let now = self.now;
        self.note(|| format!("BROKEN {why}"));
        let why = format!("at {:.6}: {why}", now.as_secs_f64());
        self.checks.broken.get_or_insert(why);
    }

    /// What a heartbeat calls acknowledged, the log took.
    pub(super) fn check_heartbeat(&mut self, heartbeat: &Heartbeat) {
        if let Some(number) = heartbeat.number {
            let key = (heartbeat.source.clone(), heartbeat.generation, number);
            if !self.checks.records.contains_key(&key) {
                self.fail(format!("{key:?} is called acknowledged, and nobody has it"));
            }
        }
    }

    /// A snapshot can be read, and holds all that the log has up to its position.
    pub(super) fn check_snapshot(&mut self, blob: &[u8]) {
        let head = match Restored::read(blob) {
            Ok(restored) => restored.head,
            Err(why) => {
                self.fail(format!("a snapshot is written that cannot be read: {why}"));
                return;
            }
        };
        if self.checks.history_lost {
            return;
        }
        let first = self.plane.log.status().first;
        let mut written: BTreeMap<&Source, After> = BTreeMap::new();
        let heads: BTreeMap<_, _> = head.sources.iter().map(|of| (&of.source, of)).collect();
        for position in first.0..=head.at.position.0 {
            let message = self.plane.log.at(LogPosition(position));
            let Some(record) = message.and_then(|message| self.record_of(message)) else {
                continue;
            };
            let Some((source, head)) = heads.get_key_value(&record.source) else {
                continue;
            };
            if record.generation != head.generation {
                continue;
            }
            if Some(record.number) == head.number {
                written.insert(source, After::Nothing);
            } else if Some(record.number) == head.number.map(RecordNumber::next)
                && let Some(after) = written.get_mut(source)
            {
                *after = After::TheNext;
            }
        }
        // A record may be written again and again, until those before it are there too: the last
        // that is in was applied when it was written for the last time, or before.
        let lacking = written.iter().find(|(_, after)| **after == After::TheNext);
        if let Some((source, _)) = lacking {
            let position = head.at.position;
            self.fail(format!(
                "a snapshot at {position} lacks what follows the last record of {source}"
            ));
        }
    }

    /// The record of a message, if it is on its source's subject.
    fn record_of(&self, message: &LogMessage) -> Option<Record> {
        let record: Record = codec::decode(&message.payload).ok()?;
        let source = self.subjects.record_source(&message.subject)?;
        (record.source == source).then_some(record)
    }

    pub(super) fn report_append(&mut self, payload: &Bytes) {
        self.note(|| match codec::decode::<Record>(payload) {
            Ok(record) => format!(
                "log: {} generation {} number {} engine {:?} {:?} after {}",
                record.source,
                record.generation,
                record.number,
                record.engine_seq.map(|seq| seq.0),
                record.states.gpu,
                record.after.count,
            ),
            Err(error) => format!("log: {error}"),
        });
    }

    // --- always

    /// Two replicas at one number of a generation have one digest.
    pub(super) fn check_position(&mut self, at: usize) {
        let mut differing = None;
        for standing in self.standings(at) {
            let SourceView {
                source,
                generation: Some(generation),
                number: Some(number),
                digest: Some(digest),
                ..
            } = standing
            else {
                continue;
            };
            let key = (source, generation, number);
            if self.checks.records.get(&key) == Some(&None) {
                continue;
            }
            let known = self.checks.digests.entry(key.clone()).or_insert(digest);
            if *known != digest {
                differing = Some(key);
            }
        }
        if let Some(key) = differing {
            self.fail(format!("indexer {at} has another digest at {key:?}"));
        }
        if self.rng.u8(0..4) == 0 {
            self.check_index(at);
        }
    }

    pub(super) fn look_around(&mut self) {
        let after = self.millis(50..400);
        self.plan(after, Event::Look);
        for at in 0..self.indexers.len() {
            let host = self.indexers[at].host;
            if !self.hosts[host].is_paused {
                self.step(host);
                self.check_index(at);
                self.check_registrations(at);
            }
        }
        for at in 0..self.shims.len() {
            self.check_reasons(at);
        }
        for host in 0..self.hosts.len() {
            self.check_subscriptions(host);
        }
        if self.rates.is_calm && self.is_dark() {
            self.checks.dark_until = self.now;
        }
        for at in 0..self.routers.len() {
            let is_awake = !self.hosts[self.routers[at].host].is_paused;
            if is_awake && let Err(why) = self.check_replica(at) {
                self.fail(format!("router {at} {why}"));
            }
            if is_awake {
                self.check_fleet(at);
            }
        }
        if let Some(since) = self.calm_since {
            self.look_for_health(since);
        }
    }

    /// An indexer shows a worker as registered if and only if it is.
    fn check_registrations(&mut self, at: usize) {
        // At its start an indexer waits for the snapshot store.
        let is_slow = self.now < self.plane.slow_transfers_end;
        if is_slow && self.read_index(at, Handle::has_started) == Some(false) {
            self.indexers[at].started_after = self.now;
        }
        let is_replicated = self.plane.kind == WorldPlane::Core;
        // An indexer follows the registry from when it follows the log.
        let is_late = self.plane.log_led_from() + SEEN_WITHIN > self.now;
        if is_replicated || is_late || !self.sees_registry(self.indexers[at].host) {
            return;
        }
        let Some(shown) = self.read_index(at, Handle::workers) else {
            return;
        };
        if self.indexers[at].started_after + SEEN_WITHIN > self.now {
            return;
        }
        let is_shown = |worker: &WorkerId| {
            let mut shown = shown.iter();
            shown.any(|view| view.instance_id == *worker && view.registered)
        };
        if let Some(why) = self.differing_registration(is_shown) {
            self.fail(format!("indexer {at} {why}"));
        }
    }

    /// Nothing disturbs this process and its calls for long enough to know the registry.
    pub(super) fn sees_registry(&self, host: usize) -> bool {
        let host = &self.hosts[host];
        let is_lossy = self.rates.call_lost > 0 || self.rates.late > 0 || self.was_late;
        let undisturbed = host.disturbed_at.max(host.stalled_until);
        let is_cut = host.is_cut || host.subscriptions.lacks_inbox();
        !is_cut && !is_lossy && undisturbed + SEEN_WITHIN <= self.now
    }

    /// A worker that is shown as registered and is not, or the reverse.
    pub(super) fn differing_registration(
        &self,
        is_shown: impl Fn(&WorkerId) -> bool,
    ) -> Option<String> {
        self.engines.iter().find_map(|engine| {
            let worker = &engine.source.worker;
            let key = self.subjects.worker_key(worker);
            let changed = self.checks.registry.registered.get(&key).map(|(at, _)| *at);
            let is_settled = changed.unwrap_or_default() + SEEN_WITHIN <= self.now;
            let (is_there, is_shown) = (self.plane.keys.contains_key(&key), is_shown(worker));
            (is_settled && is_there != is_shown).then(|| {
                format!("shows the registration of {worker} as {is_shown}, it is {is_there}")
            })
        })
    }

    /// A lease ran out. After the storm every process that has one renews it.
    pub(super) fn check_expiry(&mut self, key: &str) {
        let is_settled = self
            .calm_since
            .is_some_and(|since| since + LEASES_SETTLE < self.now);
        let Some(&(host, life)) = self.checks.registry.lease_writers.get(key) else {
            return;
        };
        let node = &self.hosts[host];
        let runs = node.is_up && node.life == life;
        let is_settled = is_settled && node.subscriptions.has_answers_for(LEASES_SETTLE, self.now);
        if is_settled && runs && key != self.subjects.snapshot_lease_key() {
            self.fail(format!("host {host} let its lease of {key} run out"));
        }
    }

    /// Some indexer gives some source no credit.
    fn is_dark(&self) -> bool {
        (0..self.indexers.len()).any(|at| {
            let standings = self.standings(at);
            let is_lit = |engine: &EngineNode| {
                standings.iter().any(|standing| {
                    let is_aside = standing.reason == Some(UnknownReason::Memory);
                    let is_credited = is_aside || standing.states.gpu.gives_credit();
                    standing.source == engine.source && is_credited
                })
            };
            !self.engines.iter().all(is_lit)
        })
    }

    /// Every credited tier is the truth, and a prompt's run ends where it does.
    pub(super) fn check_index(&mut self, at: usize) {
        if self.is_clock_unseen(self.indexers[at].host) {
            return;
        }
        let age_max = self.age_max();
        for standing in self.standings(at) {
            let Some(worker) = self.worker(&standing.source) else {
                continue;
            };
            let is_credited = Tier::ALL
                .iter()
                .any(|&tier| standing.states.get(tier).gives_credit());
            if is_credited && let Err(why) = self.check_source(at, worker, &standing, age_max) {
                self.fail(format!(
                    "indexer {at}: {} {why}; {standing:?}",
                    standing.source
                ));
            }
        }
    }

    /// How old a truth may be that is credited.
    pub(super) fn age_max(&self) -> Duration {
        let mut most = GHOST_MAX;
        if self.rates.late > 0 || self.was_late {
            most += EVENT_LATE;
        }
        if self.vouched.is_clock_unsure(self.now) {
            most += CLOCK_LATE;
        }
        most
    }

    pub(super) fn worker(&self, source: &Source) -> Option<usize> {
        self.engines.iter().position(|node| node.source == *source)
    }

    /// What may be the truth as of a batch: the present life's, or that of one that only just
    /// ended; and only if the batch after it only just came.
    pub(super) fn truths(
        &self,
        worker: usize,
        seq: Option<EngineSeq>,
        age_max: Duration,
    ) -> Result<Vec<Rc<BTreeSet<Pair>>>, String> {
        let engine = &self.engines[worker];
        let is_recent = |at: At| at + age_max > self.now;
        let recent = engine.past.iter().filter(|past| is_recent(past.ended));
        let lives = std::iter::once((&engine.life.truth, &engine.published))
            .chain(recent.map(|past| (&past.truth, &past.published)));
        let applied = seq.map_or(0, |seq| usize::try_from(seq.0 + 1).unwrap_or(usize::MAX));
        let truths: Vec<_> = lives
            .filter(|(_, published)| published.get(applied).is_none_or(|next| is_recent(*next)))
            .filter_map(|(truth, _)| match applied {
                0 => Some(Rc::default()),
                applied => truth.get(applied - 1).cloned(),
            })
            .collect();
        if truths.is_empty() {
            let ended = format!("{seq:?} was replaced longer than {age_max:?} ago, or never was");
            return Err(ended);
        }
        Ok(truths)
    }

    fn check_source(
        &mut self,
        at: usize,
        worker: usize,
        standing: &SourceView,
        age_max: Duration,
    ) -> Result<(), String> {
        let source = &standing.source;
        let held = self.read_index(at, |handle| handle.held(source));
        let held: BTreeSet<Pair> = held
            .into_iter()
            .flatten()
            .map(|(prefix, tier)| (prefix.0, tier.number()))
            .collect();
        if !self.vouched.is_vouched(self.now, source) {
            return Err("is credited, and its shim has not vouched for it for long".to_owned());
        }
        let truths = self.truths(worker, standing.engine_seq, age_max)?;
        let mut why = String::new();
        for truth in &truths {
            match compare(standing, &held, truth) {
                Ok((compared, exact)) => {
                    self.checks.compared += compared;
                    self.checks.exact += exact;
                    let truth = Rc::clone(truth);
                    return self.check_run(at, worker, standing, &truth);
                }
                Err(differs) => why = differs,
            }
        }
        Err(why)
    }

    /// A prompt's credit is the run from its first block, and ends at the first hole.
    fn check_run(
        &mut self,
        at: usize,
        worker: usize,
        standing: &SourceView,
        truth: &BTreeSet<Pair>,
    ) -> Result<(), String> {
        if standing.states.gpu != SourceState::Exact {
            return Ok(());
        }
        let life = &self.engines[worker].life;
        let Some(blocks) = life.some_prompt(&mut self.rng) else {
            return Ok(());
        };
        let is_held = |prefix: &PrefixHash| truth.contains(&(prefix.0, Tier::Gpu.number()));
        let expected = prefix_hashes(None, &blocks).take_while(is_held).count();
        let query = IndexQuery {
            blocks,
            at_least: None,
        };
        let answer = self.read_index(at, |handle| handle.query(&query));
        let Some(IndexAnswer::Runs { sources, .. }) = answer else {
            return Ok(());
        };
        let source = &standing.source;
        let Some(own) = sources.iter().find(|own| own.source == *source) else {
            return Err("is not in the answer".to_owned());
        };
        let run = self.run_as_read(at, source, &query, own.run.gpu as usize);
        if run != expected {
            return Err(format!(
                "credits {run} blocks, {expected} are held in a row"
            ));
        }
        Ok(())
    }

    // --- in the end

    pub(super) const fn is_over(&self) -> bool {
        self.checks.healed.after.is_some()
    }

    fn look_for_health(&mut self, since: At) {
        if self.now > since + RESET_AFTER {
            self.reset_unknowable();
        }
        match self.is_ill() {
            None => {
                let healed = *self.checks.healed.since.get_or_insert(self.now);
                if self.now > healed + STAYS {
                    self.checks.healed.after = Some(healed.saturating_sub(since));
                }
            }
            Some(why) => {
                self.checks.healed.since = None;
                if self.now > since + HEALED_WITHIN {
                    self.fail(format!("not healed: {why}"));
                }
            }
        }
    }

    /// What a replay no longer reaches stays unknown until the engine clears its cache, and so does
    /// what an event of an unknown type did.
    fn reset_unknowable(&mut self) {
        for worker in 0..self.engines.len() {
            if self.engines[worker].is_reset || self.engines[worker].life.has_requests() {
                continue;
            }
            let source = self.engines[worker].source.clone();
            let is_unknowable = |standing: &SourceView| {
                let state = standing.states.gpu;
                let is_weak = state == SourceState::Partial || state == SourceState::Unverified;
                standing.source == source && is_weak
            };
            let indexers = 0..self.indexers.len();
            let mut standings = indexers.flat_map(|at| self.standings(at));
            if standings.any(|standing| is_unknowable(&standing)) {
                self.checks.resets += 1;
                self.note(|| format!("engine {worker}: emptied"));
                self.reset_in_the_calm(worker);
            }
        }
    }

    /// What is not right yet.
    fn is_ill(&mut self) -> Option<String> {
        let ill = self.is_plane_ill();
        if ill.is_some() {
            self.checks.routers.index_well_since = None;
            return ill;
        }
        let well = &mut self.checks.routers.index_well_since;
        let since = *well.get_or_insert(self.now);
        self.are_routers_ill(since)
    }

    fn is_plane_ill(&self) -> Option<String> {
        if self.checks.last_resync + Duration::from_secs(3) > self.now {
            return Some("a resync was asked for".to_owned());
        }
        for (worker, engine) in self.engines.iter().enumerate() {
            if engine.life.has_requests() {
                return Some(format!("engine {worker} works"));
            }
            let leads = |shim: &&super::shim::Shim| {
                let handle = shim.handle.as_ref();
                shim.worker == worker && handle.is_some_and(warmroute_shim::Handle::leads)
            };
            let leading = self.shims.iter().filter(leads).count();
            if leading != 1 {
                return Some(format!("{leading} shims lead worker {worker}"));
            }
        }
        (0..self.indexers.len()).find_map(|at| self.is_index_ill(at))
    }

    fn is_index_ill(&self, at: usize) -> Option<String> {
        let read = |handle: &Handle| (handle.is_ready(), handle.position());
        let Some((is_ready, position)) = self.read_index(at, read) else {
            return Some(format!("indexer {at} is down"));
        };
        let last = match self.plane.kind {
            WorldPlane::Log => self.plane.log.status().last,
            // Each indexer has a log of its own.
            WorldPlane::Core => position,
        };
        if !is_ready || position != last {
            return Some(format!(
                "indexer {at} ready {is_ready} at {position} of {last}"
            ));
        }
        let standings = self.standings(at);
        for (worker, engine) in self.engines.iter().enumerate() {
            let source = &engine.source;
            let Some(standing) = standings.iter().find(|of| of.source == *source) else {
                return Some(format!("indexer {at} does not know worker {worker}"));
            };
            if standing.reason == Some(UnknownReason::Memory) {
                continue;
            }
            let last = (engine.life.truth.len() as u64).checked_sub(1);
            let is_exact = standing.states.gpu == SourceState::Exact;
            if !is_exact || standing.engine_seq.map(|seq| seq.0) != last {
                let shim = self.shims[2 * worker].handle.as_ref();
                let status = shim.map(warmroute_shim::Handle::sources);
                return Some(format!(
                    "indexer {at}: {source} of {last:?}: {standing:?}; {status:?}"
                ));
            }
        }
        None
    }
}

/// How many tiers were compared, and how many of them were exact; or what is wrong.
fn compare(
    standing: &SourceView,
    held: &BTreeSet<Pair>,
    truth: &BTreeSet<Pair>,
) -> Result<(u64, u64), String> {
    let (mut compared, mut exact) = (0, 0);
    for tier in Tier::ALL {
        let state = *standing.states.get(tier);
        if !state.gives_credit() {
            continue;
        }
        let of_tier = |pairs: &BTreeSet<Pair>| -> BTreeSet<Pair> {
            let of_it = pairs.iter().filter(|(_, of)| *of == tier.number());
            of_it.copied().collect()
        };
        let (held, truth) = (of_tier(held), of_tier(truth));
        let ghosts = held.difference(&truth).count();
        let missing = truth.difference(&held).count();
        compared += 1;
        exact += u64::from(state == SourceState::Exact);
        if ghosts > 0 || (state == SourceState::Exact && missing > 0) {
            return Err(format!(
                "{tier} is {state:?}: {ghosts} ghosts, {missing} missing of {}",
                truth.len()
            ));
        }
    }
    Ok((compared, exact))
}
