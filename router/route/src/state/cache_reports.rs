//! What engines report as cached, against what a decision expected.

use super::*;
use crate::evidence::is_exceeded;

impl Core {
    /// Counts the usage that an engine reports with cached tokens.
    pub fn count_reported(&mut self, prompt_tokens: u64, cached_tokens: u64) {
        self.traffic.reported(prompt_tokens, cached_tokens);
    }

    /// Compares the credit of a decision with the cached tokens that the engine reported, and keeps
    /// what the report adds to an incomplete index.
    pub fn audit(
        &mut self,
        decision: &Decision,
        prompt: &Prompt,
        cached_tokens: u32,
        now: Instant,
    ) -> AuditVerdict {
        self.learn(decision, prompt, cached_tokens, now);
        let claim = &decision.claim;
        let whole = prompt;
        let prompt = prompt.cut(Some(claim.cut));
        let block_at = |depth| prefix_hashes(None, prompt.blocks()).nth(depth);
        let verdict = self.audit.compare(claim, cached_tokens, block_at, now);
        self.weigh(decision, whole, cached_tokens, &verdict, now);
        if verdict != AuditVerdict::Reinstate {
            return verdict;
        }
        if self.view.reinstate(claim.source) {
            self.audit.reinstated(claim.source);
            return AuditVerdict::Reinstate;
        }
        AuditVerdict::Held
    }

    /// The query of a recheck.
    #[must_use]
    pub fn hold_query(&self, recheck: &Recheck) -> Option<HoldQuery> {
        Some(recheck.query(self.table.source(recheck.source)?.clone()))
    }

    /// Judges the answer to a recheck's query, not before the recheck's time.
    pub fn recheck(
        &mut self,
        recheck: &Recheck,
        answer: &HoldAnswer,
        now: Instant,
    ) -> RecheckVerdict {
        let verdict = self.audit.recheck(recheck, answer, now);
        match verdict {
            RecheckVerdict::Demote => {
                self.view.demote(recheck.source, recheck.generation());
            }
            RecheckVerdict::Strike => self.struck(recheck, now),
            RecheckVerdict::Cleared | RecheckVerdict::Unproven | RecheckVerdict::Repeat(_) => {}
        }
        verdict
    }

    /// The sources whose index credit is ignored, in the order of their numbers.
    #[must_use]
    pub fn demoted(&self) -> Vec<DemotedSource> {
        let demoted = self.view.demoted().filter_map(|(id, generation)| {
            let source = self.table.source(id)?;
            // What was found of a worker that left concerns no request any more.
            let is_present = self.fleet.contains(&source.worker);
            is_present.then(|| DemotedSource {
                source: source.clone(),
                generation,
                agreements: self.audit.agreements(id),
            })
        });
        demoted.collect()
    }

    /// Keeps a report about a source whose index is not complete, if nothing is known to have voided
    /// it since the decision.
    fn learn(&mut self, decision: &Decision, prompt: &Prompt, cached_tokens: u32, now: Instant) {
        let claim = &decision.claim;
        self.refute_sent(decision, prompt, cached_tokens);
        let shows_gpu =
            claim.state == SourceState::Exact && claim.standing == ClaimStanding::Credited;
        // Where the index lacks a lower tier only, what exceeds the index is of that tier.
        let is_of_tier =
            decision.chosen.reported_blocks > 0 || is_exceeded(claim, 0, cached_tokens);
        let is_complete = shows_gpu && (claim.shows_all_tiers || !is_of_tier);
        let is_comparable = claim.main_attention_only
            && claim.reads == CacheReads::Allowed
            && prompt.basis() == PromptBasis::Tokens
            && prompt.is_tokenized_by(&decision.source.worker);
        if is_complete || !is_comparable || claim.generation != self.view.generation(claim.source) {
            return;
        }
        let report = CacheReport {
            source: claim.source,
            prompt: prompt.cut(Some(claim.cut)).sampled(),
            cached_blocks: cached_tokens.checked_div(claim.block_tokens()).unwrap_or(0),
            decided: claim.decided,
        };
        self.expected.report(&report, shows_gpu, now);
    }

    /// Ends what the engine's report refutes of what was sent there. Where the tokens are not
    /// known, the blocks are not known either.
    fn refute_sent(&mut self, decision: &Decision, prompt: &Prompt, cached_tokens: u32) {
        let claim = &decision.claim;
        if decision.chosen.approximate_blocks.is_none() || claim.reads != CacheReads::Allowed {
            return;
        }
        let cached_blocks = match prompt.basis() {
            PromptBasis::Tokens => cached_tokens.checked_div(claim.block_tokens()).unwrap_or(0),
            PromptBasis::Text if cached_tokens == 0 => 0,
            PromptBasis::Text => return,
        };
        self.expected.sent.refute(&CacheReport {
            source: claim.source,
            prompt: prompt.cut(Some(claim.cut)).sampled(),
            cached_blocks,
            decided: claim.decided,
        });
    }
}
