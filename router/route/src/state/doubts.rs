//! What reports contradict: which requests have weaker states, for the shell and for operators.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;

use warmroute_proto::Tier;

use super::*;
use crate::evidence::{CreditReport, DOUBTS_MAX, DoubtChange, ReportOutcome, Scope};
use crate::index_view::Contradiction;
use crate::prompt_form::PromptForm;
use crate::source_table::SourceLife;

/// What the core remembers for rechecks and for the shell.
#[derive(Clone, Debug, Default)]
pub(super) struct DoubtLog {
    pub(super) evidence: CreditEvidence,
    /// The requests whose missing blocks are rechecked, at most one a source.
    suspects: BTreeMap<SourceId, Suspect>,
    /// Changes that the shell has not taken, at most [`DOUBTS_MAX`].
    changes: Vec<DoubtChange>,
}

#[derive(Clone, Debug)]
struct Suspect {
    form: Arc<PromptForm>,
    at: SourceLife,
    prompt: u64,
}

/// A scope of requests whose credit is not exact, because engines' reports contradict it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DoubtedScope {
    pub about: String,
    /// The engine had `more` or `less` than was credited.
    pub engine_had: &'static str,
    pub likely_cause: &'static str,
    /// Agreements in a row since the last contradiction.
    pub agreements: u32,
    /// `None`: it concerns all sources.
    #[serde(skip)]
    pub source: Option<Source>,
}

/// A doubt that began or ended, for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DoubtEvent {
    Began(DoubtedScope),
    Ended { about: String },
}

impl Core {
    /// Changes since the last call.
    pub fn take_doubt_events(&mut self) -> Vec<DoubtEvent> {
        let changes = std::mem::take(&mut self.doubts.changes);
        let event = |change| match change {
            DoubtChange::Began(scope, kind) => DoubtEvent::Began(self.shown(&scope, kind, 0)),
            DoubtChange::Ended(scope) => DoubtEvent::Ended {
                about: scope.describe(self.source_of(&scope)),
            },
        };
        changes.into_iter().map(event).collect()
    }

    /// What is doubted now.
    #[must_use]
    pub fn doubted(&self) -> Vec<DoubtedScope> {
        let is_current = |scope: &Scope| {
            let at = scope.at();
            at.is_none_or(|at| self.view.generation(at.source) == Some(at.generation))
        };
        let doubts = self.doubts.evidence.doubts();
        let current = doubts.filter(|(scope, _)| is_current(scope));
        let shown = current.map(|(scope, doubt)| self.shown(scope, doubt.kind, doubt.agreements));
        shown.collect()
    }

    fn source_of(&self, scope: &Scope) -> Option<&Source> {
        self.table.source(scope.at()?.source)
    }

    fn shown(&self, scope: &Scope, kind: Contradiction, agreements: u32) -> DoubtedScope {
        let source = self.source_of(scope);
        DoubtedScope {
            about: scope.describe(source),
            engine_had: kind.label(),
            likely_cause: scope.likely_cause(kind),
            agreements,
            source: source.cloned(),
        }
    }

    /// Takes a report as evidence for or against the index's credit.
    pub(super) fn weigh(
        &mut self,
        decision: &Decision,
        prompt: &Prompt,
        cached_tokens: u32,
        verdict: &AuditVerdict,
        now: Instant,
    ) {
        let claim = &decision.claim;
        let is_comparable = prompt.basis() == PromptBasis::Tokens
            && prompt.is_tokenized_by(&decision.source.worker)
            && claim.generation == self.view.generation(claim.source);
        let (Some(form), Some(generation), true) = (prompt.form(), claim.generation, is_comparable)
        else {
            return;
        };
        let at = SourceLife {
            source: claim.source,
            generation,
        };
        let cut = prompt.cut(Some(claim.cut));
        let last = cut.sampled().hashes.last().map_or(0, |last| last.0);
        let prompt = last.wrapping_add(prompt.tokens().into());
        if let AuditVerdict::Less {
            recheck: Some(_), ..
        } = verdict
        {
            let form = Arc::clone(form);
            let suspect = Suspect { form, at, prompt };
            self.doubts.suspects.insert(claim.source, suspect);
        }
        let explained = decision.chosen.expected_blocks;
        let Some(outcome) = ReportOutcome::of(claim, explained, cached_tokens) else {
            return;
        };
        let report = CreditReport {
            form,
            at,
            prompt,
            outcome,
        };
        let change = self.doubts.evidence.report(&report, now);
        self.note_doubt(change);
        if let (ReportOutcome::Agreed, Some(tier)) = (outcome, claim.lower_tier) {
            let change = self.doubts.evidence.tier_report(at, tier, outcome, now);
            self.note_doubt(change);
        }
    }

    /// A recheck proved that the index held a block which the engine missed.
    pub(super) fn struck(&mut self, recheck: &Recheck, now: Instant) {
        let suspect = self.doubts.suspects.remove(&recheck.source);
        let Some(suspect) =
            suspect.filter(|suspect| suspect.at.generation == recheck.generation().generation)
        else {
            return;
        };
        let outcome = ReportOutcome::Contradicted(Contradiction::Missed);
        let change = match recheck.tier() {
            Tier::Gpu => {
                let report = CreditReport {
                    form: &suspect.form,
                    at: suspect.at,
                    prompt: suspect.prompt,
                    outcome,
                };
                self.doubts.evidence.report(&report, now)
            }
            tier @ (Tier::Cpu | Tier::Disk) => self
                .doubts
                .evidence
                .tier_report(suspect.at, tier, outcome, now),
        };
        self.note_doubt(change);
    }

    fn note_doubt(&mut self, change: Option<DoubtChange>) {
        if self.doubts.changes.len() < DOUBTS_MAX {
            self.doubts.changes.extend(change);
        }
    }
}
