//! Compares the credit of a decision with the cached tokens that the engine reports.
//!
//! A single shortfall proves nothing: the engine may have evicted the blocks since and reported
//! that. Only an `exact` source with main attention alone can be proven wrong, and only for a
//! request that may read the cache. Then the index is queried again for the same prompt, once its
//! answer covers that prefill: in the same generation, at a later engine sequence, [`SETTLE`] after
//! the request ended. If it still credits the blocks, the source gets a strike. After [`STRIKES`]
//! in a row, without a request between that found its credit, the source is demoted.
//!
//! Pure: [`Recheck`] states when to query again; the shell does it. At most one recheck a source is
//! open.

use std::time::{Duration, Instant};

use warmroute_proto::query::SourceState;
use warmroute_proto::{EngineSeq, Generation};

use super::cost::{capped, overlap_blocks};
use super::index_view::TrustedSource;
use super::prompt::CacheReads;
use super::source_table::{PerSource, SourceId};

/// After this time the index has, or knows to lack, all that the engine published until the
/// request's end: twice the shim's idle poll and heartbeat of 1 s.
pub const SETTLE: Duration = Duration::from_secs(2);

/// A recheck without result expires.
const ABANDONED: Duration = Duration::from_secs(30);

pub const STRIKES: u32 = 3;

/// The credit of a decision, as far as it can be checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreditClaim {
    pub source: SourceId,
    pub state: SourceState,
    /// As of the answer that was used; `None` without one.
    pub generation: Option<Generation>,
    pub engine_seq: Option<EngineSeq>,
    /// Capped credit of all tiers.
    pub blocks: u32,
    pub credit_max: u32,
    pub block_tokens: u32,
    pub main_attention_only: bool,
    pub reads: CacheReads,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuditVerdict {
    /// Nothing was credited.
    NoClaim,
    /// The engine found all credited blocks, or more.
    Held,
    /// The engine found this many tokens less than credited.
    Less {
        tokens: u32,
        recheck: Option<Recheck>,
    },
}

/// A repeated query to the index, not before `not_before`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recheck {
    pub not_before: Instant,
    pub claim: CreditClaim,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecheckVerdict {
    /// The index no longer credits the blocks, or nothing is proven.
    Cleared,
    Strike,
    /// The last strike: distrust the source.
    Demote,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AuditCounts {
    pub held: u64,
    pub less: u64,
    pub strikes: u64,
}

#[derive(Clone, Debug, Default)]
pub struct CreditAudit {
    sources: PerSource<SourceStrikes>,
    counts: AuditCounts,
}

#[derive(Clone, Copy, Debug, Default)]
struct SourceStrikes {
    strikes: u32,
    open_since: Option<Instant>,
}

impl CreditAudit {
    /// Compares a claim with the cached tokens that the engine reported.
    pub fn compare(
        &mut self,
        claim: &CreditClaim,
        cached_tokens: u32,
        now: Instant,
    ) -> AuditVerdict {
        if claim.blocks == 0 {
            return AuditVerdict::NoClaim;
        }
        let credited = claim.blocks.saturating_mul(claim.block_tokens);
        let missing = credited.saturating_sub(cached_tokens);
        if missing == 0 {
            self.counts.held += 1;
            if claim.state == SourceState::Exact {
                self.sources.get_mut(claim.source).strikes = 0;
            }
            return AuditVerdict::Held;
        }
        self.counts.less += 1;
        AuditVerdict::Less {
            tokens: missing,
            recheck: self.suspect(claim, now),
        }
    }

    /// Judges a repeated answer of the index about a claim.
    pub fn recheck(
        &mut self,
        recheck: &Recheck,
        known: Option<&TrustedSource>,
        now: Instant,
    ) -> RecheckVerdict {
        let claim = &recheck.claim;
        let strikes_of = self.sources.get_mut(claim.source);
        strikes_of.open_since = None;
        if now < recheck.not_before || !known.is_some_and(|known| still_claims(claim, known)) {
            return RecheckVerdict::Cleared;
        }
        self.counts.strikes += 1;
        strikes_of.strikes += 1;
        if strikes_of.strikes < STRIKES {
            return RecheckVerdict::Strike;
        }
        strikes_of.strikes = 0;
        RecheckVerdict::Demote
    }

    #[must_use]
    pub const fn counts(&self) -> AuditCounts {
        self.counts
    }

    fn suspect(&mut self, claim: &CreditClaim, now: Instant) -> Option<Recheck> {
        let in_earnest = claim.state == SourceState::Exact
            && claim.main_attention_only
            && claim.reads == CacheReads::Allowed;
        let strikes_of = self.sources.get_mut(claim.source);
        let busy = strikes_of
            .open_since
            .is_some_and(|since| now.saturating_duration_since(since) < ABANDONED);
        if !in_earnest || busy {
            return None;
        }
        strikes_of.open_since = Some(now);
        Some(Recheck {
            not_before: now + SETTLE,
            claim: *claim,
        })
    }
}

/// Whether the index, after the prefill in question, still credits the missing blocks.
fn still_claims(claim: &CreditClaim, known: &TrustedSource) -> bool {
    let overlap = capped(known.run, claim.credit_max);
    known.credit_state(&overlap) == SourceState::Exact
        && Some(known.generation) == claim.generation
        && known.engine_seq > claim.engine_seq
        && overlap_blocks(overlap) >= claim.blocks
}

#[cfg(test)]
mod tests;
