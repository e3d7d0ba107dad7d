//! Compares the credit of a decision with the cached tokens that the engine reports.
//!
//! A single shortfall proves nothing: the engine may have evicted the blocks since, and stored them
//! again for the very request that missed them. The index is proven wrong only if it credited a
//! block that the engine missed *and* held it from the decision's answer until after the request,
//! without interruption. So [`SETTLE`] after the report the index is queried about the first missing
//! block ([`Recheck`]). It is a strike if an `exact` answer of the same log and generation, proven
//! [`UNSEEN_MAX`] after the report, says `held`, and one [`REPEAT_AFTER`] later does so again: the
//! first may come from a machine that was suspended, whose clock stood still and which has not read
//! the log's clock since. An indexer that does not know, because its list of removals does not reach
//! back, gives no strike. Different logs are never compared: after a loss
//! of log and registry, generations repeat. Within one, the record number says since when: a log
//! that lost its end gives positions again.
//!
//! After [`STRIKES`] strikes, without a request between that found its credit, the source is demoted:
//! its index credit is void until its next generation or another log, or until [`AGREEMENTS`]
//! requests in a row found all that the index would have credited. A strike begins that count again;
//! a shortfall without a strike does not change it.
//!
//! A block of a lower tier is checked if only that tier has the blocks beyond the GPU's. Its strikes
//! concern the tier alone ([`super::evidence`]).
//!
//! Only `exact` blocks of a source with main attention alone are checked, and only for requests
//! that may read the cache. Pure: the shell sends the queries. At most one recheck a source is open.

use std::time::{Duration, Instant};

use warmroute_proto::query::{HoldAnswer, HoldQuery, HoldSpan, SourceState};
use warmroute_proto::{
    BlockCut, EngineSeq, Generation, PrefixHash, RecordNumber, Source, StreamIdentity, Tier,
};

use super::index_view::LogGeneration;
use super::prompt::CacheReads;
use super::replica_roster::AnswerPosition;
use super::source_table::{PerSource, SourceId};

/// Longest time for which a change is neither in the log nor visible as missing: an unacknowledged
/// record of a credited source (3 s), and the shim's poll of an idle engine (1 s).
pub const UNSEEN_MAX: Duration = Duration::from_secs(4);

/// Delay of a recheck: a heartbeat and its way after [`UNSEEN_MAX`].
pub const SETTLE: Duration = Duration::from_secs(6);

/// Time from an answer that says `held` to the query that confirms it: an indexer reads the log's
/// clock more often.
pub const REPEAT_AFTER: Duration = Duration::from_millis(1_500);

/// Latest confirmation, as of the first answer. All of that time may be one in which the indexer
/// was suspended again.
const REPEAT_WITHIN: Duration = Duration::from_secs(3);

/// A recheck without result expires.
const ABANDONED: Duration = Duration::from_secs(30);

pub const STRIKES: u32 = 3;

pub const AGREEMENTS: u32 = 8;

/// The credit that an index gave a decision, as far as it can be checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreditClaim {
    pub source: SourceId,
    /// The index's own state, before a demotion or doubt.
    pub state: SourceState,
    /// All tiers are exact: the source holds no more than the index shows.
    pub shows_all_tiers: bool,
    pub standing: ClaimStanding,
    pub decided: Instant,
    /// As of the answer that was used; `None` without one.
    pub generation: Option<Generation>,
    pub number: Option<RecordNumber>,
    pub position: Option<AnswerPosition>,
    pub engine_seq: Option<EngineSeq>,
    /// Capped credit of all tiers.
    pub blocks: u32,
    /// The part of it on the GPU, from depth 0.
    pub gpu_blocks: u32,
    /// The one lower tier, an exact one, that holds the rest.
    pub lower_tier: Option<Tier>,
    pub credit_max: u32,
    /// The cut of the claimed blocks.
    pub cut: BlockCut,
    pub main_attention_only: bool,
    pub reads: CacheReads,
}

impl CreditClaim {
    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        u32::try_from(self.cut.size.tokens()).unwrap_or(u32::MAX)
    }
}

/// Whether a claim lowered the cost of its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimStanding {
    Credited,
    /// The source is demoted or the credit doubted: the claim is compared, and reports add to it.
    Demoted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuditVerdict {
    /// Nothing was credited.
    NoClaim,
    /// The engine found all credited blocks, or more.
    Held,
    /// Like `Held`: the last agreement that ends a demotion.
    Reinstate,
    /// The engine found this many tokens less than credited.
    Less {
        tokens: u32,
        recheck: Option<Recheck>,
    },
}

/// A query about the first missing block, not before `not_before`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recheck {
    pub source: SourceId,
    pub not_before: Instant,
    /// When an answer first proved that the block was held.
    held_at: Option<Instant>,
    reported: Instant,
    position: AnswerPosition,
    generation: Generation,
    number: RecordNumber,
    engine_seq: EngineSeq,
    block: PrefixHash,
    tier: Tier,
}

impl Recheck {
    #[must_use]
    pub const fn query(&self, source: Source) -> HoldQuery {
        HoldQuery {
            source,
            log: self.position.log,
            since: self.position.position,
            block: self.block,
            tier: self.tier,
            generation: self.generation,
            number: self.number,
        }
    }

    #[must_use]
    pub const fn tier(&self) -> Tier {
        self.tier
    }

    #[must_use]
    pub const fn generation(&self) -> LogGeneration {
        LogGeneration {
            log: self.position.log,
            generation: self.generation,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecheckVerdict {
    /// The engine gave the block away after the decision, or restarted.
    Cleared,
    /// The answer proves nothing.
    Unproven,
    /// The block was held, unless the indexer's clock stood still: query again.
    Repeat(Recheck),
    Strike,
    /// The last strike: distrust the source.
    Demote,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AuditCounts {
    pub held: u64,
    pub less: u64,
    pub strikes: u64,
    pub cleared: u64,
    pub unproven: u64,
    pub reinstated: u64,
}

#[derive(Clone, Debug, Default)]
pub struct CreditAudit {
    sources: PerSource<SourceAudit>,
    counts: AuditCounts,
}

#[derive(Clone, Copy, Debug, Default)]
struct SourceAudit {
    /// The log of the last strike, to which the counts belong.
    log: Option<StreamIdentity>,
    strikes: u32,
    /// While demoted: requests in a row that found all that the index credits.
    agreements: u32,
    open_since: Option<Instant>,
}

impl CreditAudit {
    /// Compares a claim with the cached tokens that the engine reported. `block_at` gives the
    /// prompt's prefix hash at a depth.
    pub fn compare(
        &mut self,
        claim: &CreditClaim,
        cached_tokens: u32,
        block_at: impl FnOnce(usize) -> Option<PrefixHash>,
        now: Instant,
    ) -> AuditVerdict {
        if claim.blocks == 0 {
            return AuditVerdict::NoClaim;
        }
        let credited = claim.blocks.saturating_mul(claim.block_tokens());
        let missing = credited.saturating_sub(cached_tokens);
        if missing == 0 {
            return self.agree(claim);
        }
        self.counts.less += 1;
        AuditVerdict::Less {
            tokens: missing,
            recheck: self.suspect(claim, cached_tokens, block_at, now),
        }
    }

    /// Judges an index's answer about the block of a recheck.
    pub fn recheck(
        &mut self,
        recheck: &Recheck,
        answer: &HoldAnswer,
        now: Instant,
    ) -> RecheckVerdict {
        let verdict = judge(recheck, answer, now);
        let audit = self.sources.get_mut(recheck.source);
        let is_final = !matches!(verdict, RecheckVerdict::Repeat(_));
        audit.open_since = audit.open_since.filter(|_| !is_final);
        match verdict {
            RecheckVerdict::Repeat(_) => {}
            RecheckVerdict::Cleared => self.counts.cleared += 1,
            RecheckVerdict::Unproven => self.counts.unproven += 1,
            // A fault of a lower tier's connector says nothing about GPU memory.
            RecheckVerdict::Strike if recheck.tier != Tier::Gpu => self.counts.strikes += 1,
            RecheckVerdict::Strike | RecheckVerdict::Demote => {
                self.counts.strikes += 1;
                if audit.log != Some(recheck.position.log) {
                    audit.log = Some(recheck.position.log);
                    audit.strikes = 0;
                }
                audit.strikes += 1;
                audit.agreements = 0;
                if audit.strikes >= STRIKES {
                    audit.strikes = 0;
                    return RecheckVerdict::Demote;
                }
            }
        }
        verdict
    }

    /// Agreements since a source was demoted, or since its last strike.
    #[must_use]
    pub fn agreements(&self, source: SourceId) -> u32 {
        self.sources.get(source).map_or(0, |audit| audit.agreements)
    }

    #[must_use]
    pub const fn counts(&self) -> AuditCounts {
        self.counts
    }

    /// A demoted source is trusted again.
    pub fn reinstated(&mut self, source: SourceId) {
        self.counts.reinstated += 1;
        let audit = self.sources.get_mut(source);
        (audit.strikes, audit.agreements) = (0, 0);
    }

    fn agree(&mut self, claim: &CreditClaim) -> AuditVerdict {
        self.counts.held += 1;
        let audit = self.sources.get_mut(claim.source);
        let log = claim.position.map(|at| at.log);
        if log.is_none() || log != audit.log {
            return AuditVerdict::Held;
        }
        if claim.state == SourceState::Exact {
            audit.strikes = 0;
        }
        if claim.standing == ClaimStanding::Demoted && is_checkable(claim) {
            audit.agreements += 1;
            if audit.agreements >= AGREEMENTS {
                return AuditVerdict::Reinstate;
            }
        }
        AuditVerdict::Held
    }

    fn suspect(
        &mut self,
        claim: &CreditClaim,
        cached_tokens: u32,
        block_at: impl FnOnce(usize) -> Option<PrefixHash>,
        now: Instant,
    ) -> Option<Recheck> {
        let first_missing = cached_tokens.checked_div(claim.block_tokens())?;
        let audit = self.sources.get_mut(claim.source);
        let is_open = audit
            .open_since
            .is_some_and(|since| now.saturating_duration_since(since) < ABANDONED);
        if is_open || !is_checkable(claim) {
            return None;
        }
        let tier = match first_missing < claim.gpu_blocks {
            true => Tier::Gpu,
            false => claim.lower_tier?,
        };
        let recheck = Recheck {
            source: claim.source,
            not_before: now + SETTLE,
            held_at: None,
            reported: now,
            position: claim.position?,
            generation: claim.generation?,
            number: claim.number?,
            engine_seq: claim.engine_seq?,
            block: block_at(first_missing as usize)?,
            tier,
        };
        audit.open_since = Some(now);
        Some(recheck)
    }
}

fn is_checkable(claim: &CreditClaim) -> bool {
    claim.state == SourceState::Exact
        && claim.main_attention_only
        && claim.reads == CacheReads::Allowed
}

fn judge(recheck: &Recheck, answer: &HoldAnswer, now: Instant) -> RecheckVerdict {
    if answer.log != Some(recheck.position.log) {
        return RecheckVerdict::Unproven;
    }
    if answer.generation > Some(recheck.generation) {
        return RecheckVerdict::Cleared;
    }
    let proof_age = Duration::from_millis(answer.proof_age_ms.into());
    let since_report = now.saturating_duration_since(recheck.reported);
    let repeated = recheck.held_at.map_or(Duration::ZERO, |held_at| {
        now.saturating_duration_since(held_at)
    });
    let is_proven = answer.state == SourceState::Exact
        && answer.generation == Some(recheck.generation)
        && answer.engine_seq > Some(recheck.engine_seq)
        && since_report
            >= UNSEEN_MAX
                .saturating_add(proof_age)
                .saturating_add(repeated);
    match answer.span {
        HoldSpan::Absent | HoldSpan::Interrupted => RecheckVerdict::Cleared,
        HoldSpan::Held if is_proven => confirmed(recheck, now),
        HoldSpan::Held | HoldSpan::Uncovered => RecheckVerdict::Unproven,
    }
}

fn confirmed(recheck: &Recheck, now: Instant) -> RecheckVerdict {
    match recheck.held_at {
        None => RecheckVerdict::Repeat(Recheck {
            not_before: now + REPEAT_AFTER,
            held_at: Some(now),
            ..*recheck
        }),
        Some(held_at) if now.saturating_duration_since(held_at) <= REPEAT_WITHIN => {
            RecheckVerdict::Strike
        }
        Some(_) => RecheckVerdict::Unproven,
    }
}

#[cfg(test)]
mod tests;
