//! Answers queries from one consistent view of the fold.

use std::time::{Duration, Instant};

use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::query::{
    HoldAnswer, HoldQuery, HoldSpan, IndexAnswer, IndexQuery, SourceAnswer, SourceState,
};
use warmroute_proto::{LocalHash, LogPosition, PrefixHash, Source, Tiers};

use crate::fold::{Fold, SourceStatus};
use crate::tree::{SourceNumber, TierMask};

/// A query with its prefix chain, computed before the lock is taken.
pub struct PreparedQuery {
    blocks: Vec<LocalHash>,
    chain: Vec<PrefixHash>,
    at_least: Option<LogPosition>,
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
            blocks: query.blocks.clone(),
            chain: prefix_hashes(None, &query.blocks).collect(),
            at_least: query.at_least,
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
        let mut runs = fold.tree().lookup_chain(&self.chain, &allowed);
        let resume_depths = fold.tree().resume_depths(&self.blocks, &allowed);
        for (run, depth) in runs.iter_mut().zip(resume_depths) {
            // A source has either runs or resume points.
            run.gpu = run.gpu.max(depth);
        }
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
}

/// Answers a query about one block of one source.
#[must_use]
pub fn hold_answer(fold: &Fold, query: &HoldQuery, now: Instant) -> HoldAnswer {
    let Some(status) = fold.status(&query.source, now) else {
        return HoldAnswer {
            generation: None,
            engine_seq: None,
            state: SourceState::Unknown,
            proof_age_ms: u32::MAX,
            span: HoldSpan::Uncovered,
        };
    };
    let is_comparable = status.generation == Some(query.generation);
    HoldAnswer {
        generation: status.generation,
        engine_seq: status.engine_seq,
        state: *status.states.get(query.tier),
        proof_age_ms: milliseconds(status.proof_age),
        span: match is_comparable && status.number >= Some(query.since) {
            true => fold.hold_span(&query.source, query.block, query.tier, query.since),
            false => HoldSpan::Uncovered,
        },
    }
}

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
