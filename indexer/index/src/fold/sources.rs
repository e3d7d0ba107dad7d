//! The sources of a fold, and what a query needs of each, kept ready.
//!
//! Judging every source in every query of a large fleet takes milliseconds. A source's standing
//! changes by messages, by the registry, and by time. So the last judgement is kept with the moment
//! at which time alone may change it. Every mutable access to a source voids what is kept of it. A
//! query judges sources whose standing is void or has expired itself, so a missing renewal costs
//! time and never shows an older state.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::{Duration, Instant};

use warmroute_proto::query::SourceState;
use warmroute_proto::roster::{HolderDetail, RosterNumber, RosterStatus};
use warmroute_proto::{DpRank, Source, Tiers, WorkerId};

use super::ends::LogClockState;
use super::outage::PlaneOutage;
use super::roster::Roster;
use super::source::{self, Registration, SourceContext, SourceFold, Touched};
use crate::tree::{SourceNumber, TierMask};

/// Validity of a standing that time alone does not change. Every tick renews it.
const RENEWED_BY: Duration = Duration::from_secs(60);

/// What a query needs of a source that has a number in the roster and records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    /// Its number in the tree, and the tiers that give credit; `None` without such a tier.
    pub(crate) allowed: Option<(SourceNumber, TierMask)>,
    pub(crate) status: RosterStatus,
    pub(crate) detail: HolderDetail,
    /// The roster's version that brought this status; `None` while the roster has another one.
    listed: Option<u64>,
}

impl Standing {
    /// `None` without a number in the roster, or without records.
    pub(super) fn of(
        fold: &SourceFold,
        roster: &Roster,
        context: SourceContext,
        now: Instant,
    ) -> Option<Self> {
        let detail = fold.detail()?;
        let (states, reason) = fold.states(now, context);
        let tiers = source::credited(&states);
        let number = fold.number().filter(|_| !tiers.is_empty());
        let status = RosterStatus {
            generation: detail.generation,
            states,
            reason,
        };
        Some(Self {
            allowed: number.map(|number| (number, tiers)),
            status,
            detail,
            listed: roster.version_of(detail.source, status),
        })
    }

    /// Whether a reader of the roster up to this version knows another status.
    pub(crate) fn is_news(&self, since: u64) -> bool {
        self.listed.is_none_or(|listed| listed > since)
    }
}

/// When a source is judged, and what is known of the plane and of its shim then.
#[derive(Clone, Copy)]
pub(super) struct Moment {
    pub(super) now: Instant,
    pub(super) shim: Registration,
    pub(super) outage: PlaneOutage,
}

/// The last judgement of one source.
struct KeptStanding {
    /// It holds before this moment; `None`: it is void.
    until: Option<Instant>,
    standing: Option<Standing>,
}

/// What is kept of the sources that have a number in the roster.
#[derive(Default)]
pub(super) struct KeptStandings {
    /// Ascending; `list` is parallel to it.
    numbers: Vec<RosterNumber>,
    list: Vec<KeptStanding>,
    /// The last judgement's moment. Nothing is kept for earlier ones.
    judged: Option<Instant>,
}

impl KeptStandings {
    /// Judges a source and keeps the result. The log's clock counts as known: whether it is depends
    /// on time.
    pub(super) fn renew(&mut self, fold: &SourceFold, roster: &Roster, moment: Moment) {
        let Moment { now, shim, outage } = moment;
        let Some(number) = fold.roster else {
            return;
        };
        let clock = LogClockState::Known;
        let context = SourceContext { shim, clock };
        let changes = [fold.proof_ends(), outage.quiet_ends()];
        let later = changes.into_iter().flatten().filter(|&at| at > now);
        let kept = KeptStanding {
            until: Some(later.min().unwrap_or(now + RENEWED_BY)),
            standing: Standing::of(fold, roster, context, now),
        };
        match self.place(number) {
            Ok(at) => self.list[at] = kept,
            Err(at) => {
                self.numbers.insert(at, number);
                self.list.insert(at, kept);
            }
        }
        self.judged = self.judged.max(Some(now));
    }

    fn place(&self, number: RosterNumber) -> Result<usize, usize> {
        // Numbers are dense until sources are forgotten.
        match self.numbers.get(number.index()) {
            Some(dense) if *dense == number => Ok(number.index()),
            Some(_) | None => self.numbers.binary_search(&number),
        }
    }

    fn void(&mut self, number: Option<RosterNumber>) {
        if let Some(at) = number.and_then(|number| self.place(number).ok()) {
            self.list[at].until = None;
        }
    }

    fn void_all(&mut self) {
        for kept in &mut self.list {
            kept.until = None;
        }
    }

    fn forget(&mut self, number: Option<RosterNumber>) {
        if let Some(at) = number.and_then(|number| self.place(number).ok()) {
            self.numbers.remove(at);
            self.list.remove(at);
        }
    }

    /// The states that the roster has of this source, if they hold and the log's clock is known.
    pub(super) fn listed(&self, number: RosterNumber, now: Instant) -> Option<Tiers<SourceState>> {
        let kept = &self.list[self.place(number).ok()?];
        let standing = kept.standing.filter(|_| kept.until > Some(now))?;
        standing.listed.map(|_| standing.status.states)
    }

    /// Gives every standing of a moment at which the log's clock is known, ascending by number.
    /// `judge` judges one again.
    pub(super) fn each(
        &self,
        now: Instant,
        judge: impl Fn(RosterNumber) -> Option<Standing>,
        mut take: impl FnMut(&Standing),
    ) {
        if self.judged > Some(now) {
            return self.each_judged(judge, take);
        }
        for (&number, kept) in self.numbers.iter().zip(&self.list) {
            if kept.until > Some(now) {
                kept.standing.iter().for_each(&mut take);
            } else {
                judge(number).iter().for_each(&mut take);
            }
        }
    }

    /// Gives every standing, all judged again.
    pub(super) fn each_judged(
        &self,
        judge: impl Fn(RosterNumber) -> Option<Standing>,
        mut take: impl FnMut(&Standing),
    ) {
        let judged = self.numbers.iter().filter_map(|&number| judge(number));
        judged.for_each(|standing| take(&standing));
    }
}

/// The sources by name.
#[derive(Default)]
pub(super) struct SourceTable {
    folds: BTreeMap<Source, SourceFold>,
    kept: KeptStandings,
}

impl SourceTable {
    pub(super) fn len(&self) -> usize {
        self.folds.len()
    }

    pub(super) fn get(&self, source: &Source) -> Option<&SourceFold> {
        self.folds.get(source)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Source, &SourceFold)> {
        self.folds.iter()
    }

    /// Those behind one in their order, or all.
    pub(super) fn after(
        &self,
        after: Option<&Source>,
    ) -> impl Iterator<Item = (&Source, &SourceFold)> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.folds.range::<Source, _>((from, Bound::Unbounded))
    }

    pub(super) const fn kept(&self) -> &KeptStandings {
        &self.kept
    }

    pub(super) fn get_mut(&mut self, source: &Source) -> Option<&mut SourceFold> {
        let fold = self.folds.get_mut(source)?;
        self.kept.void(fold.roster);
        Some(fold)
    }

    /// The source, a new one if it is unknown, and the place to renew its standing.
    pub(super) fn entry(&mut self, source: &Source) -> (&mut SourceFold, &mut KeptStandings) {
        let fold = self.folds.entry(source.clone());
        let fold = fold.or_insert_with(SourceFold::new);
        self.kept.void(fold.roster);
        (fold, &mut self.kept)
    }

    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut SourceFold> {
        self.kept.void_all();
        self.folds.values_mut()
    }

    /// Visits every source, and voids what the visitor touches.
    pub(super) fn visit<'a>(
        &'a mut self,
        mut visitor: impl FnMut(&'a Source, &'a mut SourceFold) -> Touched,
    ) {
        for (source, fold) in &mut self.folds {
            let number = fold.roster;
            if visitor(source, fold) == Touched::Standing {
                self.kept.void(number);
            }
        }
    }

    /// All sources, to change what no standing depends on, and the place to renew standings.
    pub(super) fn beside_standings(
        &mut self,
    ) -> (&mut BTreeMap<Source, SourceFold>, &mut KeptStandings) {
        (&mut self.folds, &mut self.kept)
    }

    pub(super) fn void_all(&mut self) {
        self.kept.void_all();
    }

    /// The registration of a worker changed.
    pub(super) fn void_worker(&mut self, worker: &WorkerId) {
        let first = Source {
            worker: worker.clone(),
            dp_rank: DpRank(0),
        };
        let later = self.folds.range(first..);
        for (_, fold) in later.take_while(|(source, _)| source.worker == *worker) {
            self.kept.void(fold.roster);
        }
    }

    pub(super) fn insert(&mut self, source: Source, fold: SourceFold) {
        self.kept.void(fold.roster);
        let former = self.folds.insert(source, fold);
        self.kept.void(former.and_then(|former| former.roster));
    }

    pub(super) fn remove(&mut self, source: &Source) {
        let removed = self.folds.remove(source);
        self.kept.forget(removed.and_then(|fold| fold.roster));
    }

    /// Removes and returns all sources.
    pub(super) fn take(&mut self) -> BTreeMap<Source, SourceFold> {
        self.kept = KeptStandings::default();
        std::mem::take(&mut self.folds)
    }
}
