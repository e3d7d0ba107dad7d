//! Answers queries from one consistent view of the fold.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::query::{
    HoldAnswer, HoldQuery, HoldSpan, IndexAnswer, IndexQuery, SourceAnswer, SourceState,
};
use warmroute_proto::roster::{
    BlocksBefore, CHANGES_MAX, DETAILS_MAX, HolderAnswer, HolderDetail, HolderGroup, HolderPart,
    NumberSet, PART_BYTES_MAX, RosterId, RosterNumber, RosterPageRequest, RosterRow,
};
use warmroute_proto::{LocalHash, LogPosition, PrefixHash, Source, StreamIdentity, Tiers};

use crate::fold::{Fold, SourceStatus};
use crate::tree::{SourceNumber, TierMask};

/// Encoded bytes of a group without its members, and of a detail.
const GROUP_BYTES: usize = 32;
const DETAIL_BYTES: usize = 30;

/// Encoded bytes of a changed row without its name.
const ROW_BYTES: usize = 64;

/// Blocks that are hashed between two pauses.
const STEP_BLOCKS: usize = 1024;

/// A prompt's prefix chain, computed before the lock is taken: for a long prompt it takes longer
/// than the lookup.
pub struct PreparedQuery {
    before: Option<BlocksBefore>,
    blocks: Vec<LocalHash>,
    /// The hashes of `blocks`, after that of the block before them if there is one.
    chain: Vec<PrefixHash>,
    at_least: Option<LogPosition>,
    part_bytes: usize,
}

/// The sources that hold blocks of a prompt, as of one moment.
pub struct Holders {
    log: StreamIdentity,
    position: LogPosition,
    roster: RosterId,
    /// Ascending by number.
    holders: Vec<Holder>,
    changes: Vec<RosterRow>,
    part_bytes: usize,
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
        Self::in_steps(blocks.to_vec(), || ())
    }

    /// A query by blocks that follow others.
    #[must_use]
    pub fn below(before: BlocksBefore, blocks: &[LocalHash]) -> Self {
        let mut chain = vec![before.prefix];
        chain.extend(prefix_hashes(Some(before.prefix), blocks));
        Self {
            before: Some(before),
            blocks: blocks.to_vec(),
            chain,
            at_least: None,
            part_bytes: PART_BYTES_MAX,
        }
    }

    /// Pauses after each step, for work of low priority.
    #[must_use]
    pub fn in_steps(blocks: Vec<LocalHash>, mut pause: impl FnMut()) -> Self {
        let mut chain: Vec<PrefixHash> = Vec::with_capacity(blocks.len());
        for step in blocks.chunks(STEP_BLOCKS) {
            chain.extend(prefix_hashes(chain.last().copied(), step));
            pause();
        }
        Self {
            before: None,
            blocks,
            chain,
            at_least: None,
            part_bytes: PART_BYTES_MAX,
        }
    }

    /// Bounds the bytes of an answer's groups with their details, and those of its changes.
    #[must_use]
    pub fn in_parts_of(self, part_bytes: usize) -> Self {
        Self { part_bytes, ..self }
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
        let mut numbers: Vec<Option<SourceNumber>> = Vec::new();
        let mut allowed = fold.tree().no_tiers();
        for (source, status) in fold.statuses(now) {
            let Some(answer) = without_run(source, &status) else {
                continue;
            };
            let credited = fold.allowed(source, &status.states);
            numbers.push(credited.map(|(number, _)| number));
            sources.push(answer);
            if let Some((number, tiers)) = credited {
                allowed[number.index()] = tiers;
            }
        }
        let runs = self.runs(fold, &allowed);
        for (answer, number) in sources.iter_mut().zip(numbers) {
            answer.run = number.map_or_else(Tiers::default, |number| runs[number.index()]);
        }
        IndexAnswer::Runs {
            log,
            position,
            sources,
        }
    }

    /// What each source holds of the prompt, by its number in the tree.
    fn runs(&self, fold: &Fold, allowed: &[TierMask]) -> Vec<Tiers<u32>> {
        let (tree, blocks, chain) = (fold.tree(), &self.blocks, &self.chain);
        match &self.before {
            Some(before) => tree.lookup_deep_credit(before, blocks, chain, allowed),
            None => tree.lookup_credit(blocks, chain, allowed),
        }
    }

    /// The holders of the prompt from this number on; `None` before the log is known.
    #[must_use]
    pub fn holders(
        &self,
        fold: &Fold,
        known: RosterPageRequest,
        from: RosterNumber,
        now: Instant,
    ) -> Option<Holders> {
        let log = fold.log()?;
        let roster = fold.roster_id();
        let read = (known.roster == roster).then_some(known.since);
        let mut allowed = fold.tree().no_tiers();
        let (mut changes, mut change_bytes) = (Vec::new(), 0);
        fold.each_standing(now, |standing| {
            if let Some((number, tiers)) = standing.allowed {
                allowed[number.index()] = tiers;
            }
            let has_room = changes.len() < CHANGES_MAX && change_bytes < self.part_bytes;
            let is_asked_for = standing.detail.source >= from;
            if !is_asked_for || !has_room || read.is_none_or(|since| !standing.is_news(since)) {
                return;
            }
            if let Some(source) = fold.source_of(standing.detail.source) {
                change_bytes += ROW_BYTES + source.worker.as_str().len();
                changes.push(RosterRow {
                    number: standing.detail.source,
                    source: source.clone(),
                    status: Some(standing.status),
                });
            }
        });
        let runs = self.runs(fold, &allowed);
        let mut holders = Vec::new();
        fold.each_standing(now, |standing| {
            let number = standing.allowed.map(|(number, _)| number);
            let run = number.map_or_else(Tiers::default, |number| runs[number.index()]);
            if run != Tiers::default() && standing.detail.source >= from {
                holders.push(Holder {
                    run,
                    states: standing.status.states,
                    detail: standing.detail,
                });
            }
        });
        Some(Holders {
            log,
            position: fold.position(),
            roster,
            holders,
            changes,
            part_bytes: self.part_bytes,
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
    /// As many as fit into its bytes. Call it without the lock.
    #[must_use]
    pub fn into_answer(self) -> HolderAnswer {
        let holders = self.holders;
        let mut covered = holders.len();
        loop {
            let grouped = grouped(&holders[..covered]);
            let groups: Vec<_> = grouped.values().filter_map(|of| group_of(of)).collect();
            let members = groups.iter().map(|group| group.members.bytes());
            let bytes: usize = members.map(|bytes| GROUP_BYTES + bytes).sum();
            if bytes + DETAIL_BYTES * covered.min(DETAILS_MAX) <= self.part_bytes || covered <= 1 {
                return HolderAnswer::Holders(HolderPart {
                    roster: self.roster,
                    log: self.log,
                    position: self.position,
                    groups,
                    details: details(&grouped, self.salt),
                    changes: self.changes,
                    next: holders.get(covered).map(|holder| holder.detail.source),
                });
            }
            covered /= 2;
        }
    }
}

/// The longest first.
type RunOrder = Reverse<[u32; 4]>;

type GroupKey = (RunOrder, [SourceState; 3]);

fn group_key(holder: &Holder) -> GroupKey {
    let Tiers { gpu, cpu, disk } = holder.run;
    let blocks = gpu.saturating_add(cpu).saturating_add(disk);
    let states = holder.states;
    (
        Reverse([blocks, gpu, cpu, disk]),
        [states.gpu, states.cpu, states.disk],
    )
}

/// The holders of each run with equal states, in the order of holders.
fn grouped(holders: &[Holder]) -> BTreeMap<GroupKey, Vec<&Holder>> {
    let mut groups: BTreeMap<GroupKey, Vec<&Holder>> = BTreeMap::new();
    let alike = |a: &Holder, b: &Holder| a.run == b.run && a.states == b.states;
    // Neighbours are mostly alike.
    for some in holders.chunk_by(alike) {
        if let Some(first) = some.first() {
            groups.entry(group_key(first)).or_default().extend(some);
        }
    }
    groups
}

fn group_of(members: &[&Holder]) -> Option<HolderGroup> {
    let first = members.first()?;
    Some(HolderGroup {
        run: first.run,
        states: first.states,
        members: NumberSet::from_ascending(members.iter().map(|holder| holder.detail.source)),
    })
}

/// Details of the longest runs. Among equal ones every prompt takes others, so that none is left
/// out always.
fn details(groups: &BTreeMap<GroupKey, Vec<&Holder>>, salt: u64) -> Vec<HolderDetail> {
    let turn = |holder: &Holder| (u64::from(holder.detail.source.0) ^ salt).wrapping_mul(MIX);
    let mut details = Vec::new();
    let groups: Vec<_> = groups.iter().collect();
    for of_a_run in groups.chunk_by(|((a, _), _), ((b, _), _)| a == b) {
        let room = DETAILS_MAX - details.len();
        let members = of_a_run.iter().flat_map(|(_, members)| members.iter());
        let mut order: Vec<_> = members.map(|holder| (turn(holder), *holder)).collect();
        if order.len() > room {
            order.select_nth_unstable_by_key(room, |&(turn, _)| turn);
            order.truncate(room);
        }
        details.extend(order.into_iter().map(|(_, holder)| holder.detail));
        if details.len() == DETAILS_MAX {
            break;
        }
    }
    details
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
