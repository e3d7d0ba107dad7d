//! Does the engine find cached what the index credited?
//!
//! Every answered request is compared; less than credited is counted. One such request proves nothing:
//! the engine may have evicted the blocks in the meantime, and said so. Only an `exact` source whose
//! KV groups are all main attention can be wrong in earnest, and only for a request that may read
//! the cache. Then the index is asked again for the same prompt, once its answer lies past that
//! prefill: in the same generation, at a later engine sequence, and [`SETTLE`] after the request
//! ended. If it still credits the blocks that is a strike; [`STRIKES`] in a row, without a request
//! between that found what was credited, and the source is to be demoted.
//!
//! Pure: it says when to ask again ([`Recheck`]) and leaves the asking to the shell. At most one
//! question a source is open.

use std::time::{Duration, Instant};

use warmroute_proto::query::SourceState;
use warmroute_proto::{EngineSeq, Generation};

use super::cost::{capped, overlap_blocks};
use super::index_view::TrustedSource;
use super::prompt::CacheReads;
use super::source_table::{PerSource, SourceId};

/// By then everything that the engine published up to the request's end is in the index or known to
/// be missing: twice the shim's idle poll and heartbeat of 1 s.
pub const SETTLE: Duration = Duration::from_secs(2);

/// A question that nobody came back with is forgotten.
const ABANDONED: Duration = Duration::from_secs(30);

pub const STRIKES: u32 = 3;

/// What a decision promised, as far as it can be checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreditClaim {
    pub source: SourceId,
    pub state: SourceState,
    /// As of the answer that was used; none without one.
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
    /// All that was credited was found, or more.
    Held,
    /// This many tokens less than credited were found.
    Less {
        tokens: u32,
        recheck: Option<Recheck>,
    },
}

/// A question to ask the index again, not before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recheck {
    pub not_before: Instant,
    pub claim: CreditClaim,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecheckVerdict {
    /// The index lost the blocks too, or nothing can be said: no strike.
    Cleared,
    Strike,
    /// The last strike: this source is not to be believed.
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
    /// A request ended; the engine reported this many cached tokens.
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

    /// The index was asked again; `known`: what is believed of the source now.
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

/// Does the index, past the prefill in question, still credit what the engine did not have?
fn still_claims(claim: &CreditClaim, known: &TrustedSource) -> bool {
    known.state() == SourceState::Exact
        && Some(known.generation) == claim.generation
        && known.engine_seq > claim.engine_seq
        && overlap_blocks(capped(known.run, claim.credit_max)) >= claim.blocks
}

#[cfg(test)]
mod tests;
