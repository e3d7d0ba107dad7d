//! Answers queries from one consistent view of the fold.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::query::{
    HoldAnswer, HoldQuery, HoldSpan, IndexAnswer, IndexQuery, SourceAnswer, SourceState,
};
use warmroute_proto::roster::{
    CHANGES_MAX, DETAILS_MAX, HolderAnswer, HolderDetail, HolderGroup, HolderPart, NumberSet,
    PART_BYTES_MAX, RosterId, RosterNumber, RosterPageRequest, RosterRow,
};
use warmroute_proto::{LocalHash, LogPosition, PrefixHash, Source, StreamIdentity, Tiers};

use crate::fold::{Fold, SourceStatus};
use crate::tree::{SourceNumber, TierMask};

/// Encoded bytes of a group without its members, and of a detail.
const GROUP_BYTES: usize = 32;
const DETAIL_BYTES: usize = 30;

/// A prompt's prefix chain, computed before the lock is taken: for a long prompt it takes longer
/// than the lookup.
pub struct PreparedQuery {
    blocks: Vec<LocalHash>,
    chain: Vec<PrefixHash>,
    at_least: Option<LogPosition>,
}

/// The sources that hold blocks of a prompt, as of one moment.
pub struct Holders {
    log: StreamIdentity,
    position: LogPosition,
    roster: RosterId,
    holders: Vec<Holder>,
    changes: Vec<RosterRow>,
    /// Differs between prompts.
    salt: u64,
}

#[derive(Clone)]
struct Holder {
    run: Tiers<u32>,
    states: Tiers<SourceState>,
    detail: HolderDetail,
}

/// Answers a query. Sources without any record are left out.
#[must_use]
pub fn answer(fold: &Fold, query: &IndexQuery, now: Instant) -> IndexAnswer {
    PreparedQuery::of(query).answer(fold, now)
}

impl PreparedQuery {
    #[must_use]
    pub fn of(query: &IndexQuery) -> Self {
        Self {
            at_least: query.at_least,
            ..Self::of_blocks(&query.blocks)
        }
    }

    #[must_use]
    pub fn of_blocks(blocks: &[LocalHash]) -> Self {
        Self {
            blocks: blocks.to_vec(),
            chain: prefix_hashes(None, blocks).collect(),
            at_least: None,
        }
    }

    /// Answers the query, like [`answer`].
    #[must_use]
    pub fn answer(&self, fold: &Fold, now: Instant) -> IndexAnswer {
        let position = fold.position();
        let behind = self.at_least.is_some_and(|wanted| position < wanted);
        // Before the log is known, positions are not comparable.
        let Some(log) = fold.log().filter(|_| !behind) else {
            return IndexAnswer::Behind { position };
        };
        let mut sources = Vec::new();
        let mut places: Vec<Option<usize>> = Vec::new();
        let mut allowed: Vec<(SourceNumber, TierMask)> = Vec::new();
        for (source, status) in fold.statuses(now) {
            let Some(answer) = without_run(source, &status) else {
                continue;
            };
            places.push(fold.allowed(source, &status.states).map(|pair| {
                allowed.push(pair);
                allowed.len() - 1
            }));
            sources.push(answer);
        }
        let runs = self.runs(fold, &allowed);
        for (answer, place) in sources.iter_mut().zip(places) {
            answer.run = place
                .and_then(|place| runs.get(place).copied())
                .unwrap_or_default();
        }
        IndexAnswer::Runs {
            log,
            position,
            sources,
        }
    }

    /// Per source of `allowed`, in that order, what it holds of the prompt.
    fn runs(&self, fold: &Fold, allowed: &[(SourceNumber, TierMask)]) -> Vec<Tiers<u32>> {
        let mut runs = fold.tree().lookup_chain(&self.chain, allowed);
        let resume_depths = fold.tree().resume_depths(&self.blocks, allowed);
        for (run, depth) in runs.iter_mut().zip(resume_depths) {
            // A source has either runs or resume points.
            run.gpu = run.gpu.max(depth);
        }
        runs
    }

    /// The holders of the prompt; `None` before the log is known.
    #[must_use]
    pub fn holders(&self, fold: &Fold, known: RosterPageRequest, now: Instant) -> Option<Holders> {
        let log = fold.log()?;
        let roster = fold.roster_id();
        let read = (known.roster == roster).then_some(known.since);
        let (mut credited, mut allowed) = (Vec::new(), Vec::new());
        let (mut changes, mut change_bytes) = (Vec::new(), 0);
        for source in fold.numbered(now) {
            let has_room = changes.len() < CHANGES_MAX && change_bytes < PART_BYTES_MAX;
            if has_room && read.is_some_and(|since| fold.is_news(&source, since)) {
                change_bytes += source.source.worker.as_str().len();
                changes.push(RosterRow {
                    number: source.detail.source,
                    source: source.source.clone(),
                    status: Some(source.status),
                });
            }
            if let Some(pair) = source.allowed {
                allowed.push(pair);
                credited.push((source.status.states, source.detail));
            }
        }
        let runs = self.runs(fold, &allowed);
        let held = credited.into_iter().zip(runs);
        let held = held.filter(|(_, run)| *run != Tiers::default());
        let holders = held.map(|((states, detail), run)| Holder {
            run,
            states,
            detail,
        });
        Some(Holders {
            log,
            position: fold.position(),
            roster,
            holders: holders.collect(),
            changes,
            salt: self.chain.last().map_or(0, |last| last.0),
        })
    }
}

/// Answers a query about one block of one source.
#[must_use]
pub fn hold_answer(fold: &Fold, query: &HoldQuery, now: Instant) -> HoldAnswer {
    let log = fold.log();
    let Some(status) = fold.status(&query.source, now) else {
        return HoldAnswer {
            log,
            generation: None,
            engine_seq: None,
            state: SourceState::Unknown,
            proof_age_ms: u32::MAX,
            span: HoldSpan::Uncovered,
        };
    };
    HoldAnswer {
        log,
        generation: status.generation,
        engine_seq: status.engine_seq,
        state: *status.states.get(query.tier),
        proof_age_ms: milliseconds(status.proof_age),
        span: fold.hold_span(query),
    }
}

impl Holders {
    /// The answer for sources from this number on, as many as fit into [`PART_BYTES_MAX`]. Call it
    /// without the lock.
    #[must_use]
    pub fn into_answer(self, from: RosterNumber) -> HolderAnswer {
        let (mut holders, mut changes) = (self.holders, self.changes);
        holders.retain(|holder| holder.detail.source >= from);
        changes.retain(|row| row.number >= from);
        holders.sort_unstable_by_key(|holder| holder.detail.source);
        let mut covered = holders.len();
        loop {
            let groups = groups(&holders[..covered]);
            let members = groups.iter().map(|group| group.members.bytes());
            let bytes: usize = members.map(|bytes| GROUP_BYTES + bytes).sum();
            if bytes + DETAIL_BYTES * covered.min(DETAILS_MAX) <= PART_BYTES_MAX || covered <= 1 {
                return HolderAnswer::Holders(HolderPart {
                    roster: self.roster,
                    log: self.log,
                    position: self.position,
                    groups,
                    details: details(&holders[..covered], self.salt),
                    changes,
                    next: holders.get(covered).map(|holder| holder.detail.source),
                });
            }
            covered /= 2;
        }
    }
}

/// The longest first.
type GroupKey = (Reverse<[u32; 4]>, [SourceState; 3]);

fn group_key(holder: &Holder) -> GroupKey {
    let Tiers { gpu, cpu, disk } = holder.run;
    let blocks = gpu.saturating_add(cpu).saturating_add(disk);
    let states = holder.states;
    (
        Reverse([blocks, gpu, cpu, disk]),
        [states.gpu, states.cpu, states.disk],
    )
}

fn groups(holders: &[Holder]) -> Vec<HolderGroup> {
    let mut groups: BTreeMap<GroupKey, Vec<&Holder>> = BTreeMap::new();
    for holder in holders {
        groups.entry(group_key(holder)).or_default().push(holder);
    }
    let group = |members: Vec<&Holder>| {
        let first = members.first()?;
        Some(HolderGroup {
            run: first.run,
            states: first.states,
            members: NumberSet::from_ascending(members.iter().map(|holder| holder.detail.source)),
        })
    };
    groups.into_values().filter_map(group).collect()
}

/// Details of the longest runs. Among equal ones every prompt takes others, so that none is left
/// out always.
fn details(holders: &[Holder], salt: u64) -> Vec<HolderDetail> {
    let mut order: Vec<&Holder> = holders.iter().collect();
    let turn = |holder: &Holder| (u64::from(holder.detail.source.0) ^ salt).wrapping_mul(MIX);
    if order.len() > DETAILS_MAX {
        order.sort_unstable_by_key(|holder| (group_key(holder).0, turn(holder)));
        order.truncate(DETAILS_MAX);
    }
    order.into_iter().map(|holder| holder.detail).collect()
}

/// An odd number near 2^64 divided by the golden ratio: a multiplicative hash.
const MIX: u64 = 0x9E37_79B9_7F4A_7C15;

fn without_run(source: &Source, status: &SourceStatus) -> Option<SourceAnswer> {
    Some(SourceAnswer {
        source: source.clone(),
        generation: status.generation?,
        number: status.number,
        engine_seq: status.engine_seq,
        states: status.states,
        reason: status.reason,
        proof_age_ms: milliseconds(status.proof_age),
        run: Tiers::default(),
    })
}

/// Age in milliseconds; `u32::MAX` if never proven.
fn milliseconds(age: Option<Duration>) -> u32 {
    age.and_then(|age| u32::try_from(age.as_millis()).ok())
        .unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
