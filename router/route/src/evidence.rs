//! What engines' reports say of the index's credit, and what contradictory reports have in common.
//!
//! A report *contradicts* `exact` credit if the engine had at least [`EXCESS_MIN`] more tokens cached
//! than are credited, or than requests in flight or just ended explain; or if a recheck proves that
//! the index held a block that the engine missed ([`super::audit`]). A single report of the first
//! kind proves nothing: a block may have been stored between the index's answer and the prefill. So
//! each [`Scope`] of a report keeps its last [`SAMPLES`] reports, at most one each [`SPACING`]:
//! a stalled log or index is exact for at most 5 s, which is three samples. [`EXCEEDED_MAX`] of them
//! that exceed, from different prompts, or [`MISSED_MAX`] proven misses, end `exact` for the
//! narrowest scope that explains them. A scope of several parts (forms, sources) must have
//! contradictions of two of its parts, and no part that agrees twice and never contradicts.
//!
//! While a scope is doubted, its requests have a weaker state: `partial` where the engine had more,
//! `stale` where it had less; what engines report is credited in its place. The credit that the
//! index would give is compared on, and [`RESTORED_AFTER`] agreements in a row end the doubt. So do
//! another generation of the source, another tokenizer, and [`FORGOTTEN_AFTER`] without a report.
//!
//! Memory is bounded by [`SCOPES_MAX`] and [`DOUBTS_MAX`]. Pure.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use warmroute_proto::query::SourceState;
use warmroute_proto::{Source, Tier};

use super::audit::CreditClaim;
use super::index_view::{Contradiction, TrustedAnswer};
use super::prompt::CacheReads;
use super::prompt_form::PromptForm;
use super::source_table::SourceLife;

/// Least difference in tokens that contradicts. The answer of the turn before, whose last blocks may
/// not be in the index yet, has fewer tokens in the time that an answer of the index lags.
pub const EXCESS_MIN: u32 = 256;

/// Reports of a scope that count, the newest ones.
pub const SAMPLES: usize = 16;

/// Between two reports that count for a scope.
pub const SPACING: Duration = Duration::from_secs(2);

/// Reports of these that end `exact` because the engine had more.
pub const EXCEEDED_MAX: usize = 5;

/// Proven misses of these that end `exact`.
pub const MISSED_MAX: usize = 3;

/// Agreements in a row that end a doubt.
pub const RESTORED_AFTER: u32 = 16;

/// A doubt ends after this time without a report, and a report counts for so long.
pub const FORGOTTEN_AFTER: Duration = Duration::from_secs(3600);

/// Scopes with reports; of further ones the oldest is dropped. 4 MiB.
pub const SCOPES_MAX: usize = 4096;

/// Doubted scopes; at the bound the one without reports for longest is forgotten.
pub const DOUBTS_MAX: usize = 256;

/// What reports have in common.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Prompts of one form at one source.
    FormAt(Arc<PromptForm>, SourceLife),
    /// All prompts at one source.
    Source(SourceLife),
    /// Blocks of one lower tier of a source.
    Tier(SourceLife, Tier),
    /// Prompts of one form at all sources.
    Form(Arc<PromptForm>),
    /// All prompts of a model, or of an adapter, by one tokenizer.
    Model(Arc<str>, u64),
}

impl Scope {
    /// The scopes of a report, the narrowest first.
    fn of(form: &Arc<PromptForm>, at: SourceLife) -> [Self; 4] {
        [
            Self::FormAt(Arc::clone(form), at),
            Self::Source(at),
            Self::Form(Arc::clone(form)),
            Self::Model(Arc::clone(&form.model), form.tokenizer),
        ]
    }

    fn has_form(&self, form: &PromptForm) -> bool {
        match self {
            Self::FormAt(own, _) | Self::Form(own) => **own == *form,
            Self::Model(model, tokenizer) => *model == form.model && *tokenizer == form.tokenizer,
            Self::Source(_) | Self::Tier(..) => true,
        }
    }

    /// `None`: all sources.
    pub(crate) const fn at(&self) -> Option<SourceLife> {
        match self {
            Self::FormAt(_, at) | Self::Source(at) | Self::Tier(at, _) => Some(*at),
            Self::Form(_) | Self::Model(..) => None,
        }
    }

    fn covers(&self, form: &PromptForm, at: SourceLife) -> bool {
        self.has_form(form) && self.at().is_none_or(|own| own == at)
    }

    /// For operators. `source` is that of [`Self::at`].
    #[must_use]
    pub fn describe(&self, source: Option<&Source>) -> String {
        let at = source.map_or_else(String::new, ToString::to_string);
        match self {
            Self::FormAt(form, _) => format!("{form} at {at}"),
            Self::Source(_) => format!("all prompts at {at}"),
            Self::Tier(_, tier) => format!("tier {} at {at}", tier.label()),
            Self::Form(form) => format!("{form} at all workers"),
            Self::Model(model, _) => format!("model {model} at all workers"),
        }
    }

    /// What usually is the cause, for operators.
    #[must_use]
    pub const fn likely_cause(&self, kind: Contradiction) -> &'static str {
        match (self, kind) {
            (Self::Tier(..), _) => {
                "the KV connector dropped blocks without an event, or its hits are whole chunks"
            }
            (_, Contradiction::Missed) => {
                "an adapter loaded from another path under its name, or a reset that no event showed"
            }
            (Self::Form(_) | Self::Model(..), _) => {
                "the router's chat template or tokenizer differs from the engine's for these prompts"
            }
            (Self::Source(_), _) => {
                "a KV connector whose events do not arrive, or block hashes of another form \
                 (speculative decoding)"
            }
            (Self::FormAt(..), _) => {
                "this engine's chat template, tokenizer or adapter differs from the router's, or a KV \
                 connector's events do not arrive"
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportOutcome {
    Agreed,
    Contradicted(Contradiction),
}

impl ReportOutcome {
    /// Compares a report with exact credit of the index. `explained_blocks`: what requests that run
    /// or have just ended store. `None`: the report says nothing.
    #[must_use]
    pub fn of(claim: &CreditClaim, explained_blocks: u32, cached_tokens: u32) -> Option<Self> {
        let is_exact = claim.state == SourceState::Exact && claim.shows_all_tiers;
        if !is_exact || claim.reads != CacheReads::Allowed {
            return None;
        }
        let credited = claim.blocks.saturating_mul(claim.block_tokens());
        if is_exceeded(claim, explained_blocks, cached_tokens) {
            Some(Self::Contradicted(Contradiction::Exceeded))
        } else if credited >= excess_min(claim) && cached_tokens >= credited {
            Some(Self::Agreed)
        } else {
            None
        }
    }
}

/// Whether the engine had more than is credited or explained by requests.
pub(crate) fn is_exceeded(claim: &CreditClaim, explained_blocks: u32, cached_tokens: u32) -> bool {
    let explained = claim.blocks.max(explained_blocks);
    let explained = explained.saturating_mul(claim.block_tokens());
    cached_tokens.saturating_sub(explained) >= excess_min(claim)
}

/// In tokens; two blocks at least.
fn excess_min(claim: &CreditClaim) -> u32 {
    EXCESS_MIN.max(claim.block_tokens().saturating_mul(2))
}

/// A report that says something of the credit.
#[derive(Clone, Copy, Debug)]
pub struct CreditReport<'a> {
    pub form: &'a Arc<PromptForm>,
    pub at: SourceLife,
    /// Distinguishes prompts.
    pub prompt: u64,
    pub outcome: ReportOutcome,
}

/// A change of what is trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DoubtChange {
    Began(Scope, Contradiction),
    Ended(Scope),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EvidenceCounts {
    pub agreed: u64,
    pub exceeded: u64,
    pub missed: u64,
    pub doubts_begun: u64,
    pub doubts_ended: u64,
    /// Doubted scopes now.
    pub doubts: usize,
}

#[derive(Clone, Debug, Default)]
pub struct CreditEvidence {
    scopes: BTreeMap<Scope, VecDeque<Sample>>,
    /// The scopes in the order of their first reports.
    order: VecDeque<Scope>,
    doubts: BTreeMap<Scope, Doubt>,
    counts: EvidenceCounts,
}

#[derive(Clone, Debug)]
struct Sample {
    taken: Instant,
    form: Arc<PromptForm>,
    at: SourceLife,
    prompt: u64,
    outcome: ReportOutcome,
}

impl Sample {
    fn is(&self, kind: Contradiction) -> bool {
        self.outcome == ReportOutcome::Contradicted(kind)
    }
}

/// A scope whose credit is not exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doubt {
    pub kind: Contradiction,
    /// Since the last contradiction.
    pub agreements: u32,
    counted: Instant,
    reported: Instant,
}

impl CreditEvidence {
    /// Takes in a report.
    pub fn report(&mut self, report: &CreditReport<'_>, now: Instant) -> Option<DoubtChange> {
        match report.outcome {
            ReportOutcome::Agreed => self.counts.agreed += 1,
            ReportOutcome::Contradicted(Contradiction::Exceeded) => self.counts.exceeded += 1,
            ReportOutcome::Contradicted(Contradiction::Missed) => self.counts.missed += 1,
        }
        let mut known = self.doubts.iter_mut();
        if let Some((scope, doubt)) =
            known.find(|(scope, _)| is_whole(scope) && scope.covers(report.form, report.at))
        {
            let is_over = doubt.report(report.outcome, now);
            let scope = scope.clone();
            return is_over.then(|| self.end(scope));
        }
        let scopes = Scope::of(report.form, report.at);
        for scope in &scopes {
            self.sample(scope, report, now);
        }
        let kind = match report.outcome {
            ReportOutcome::Agreed => return None,
            ReportOutcome::Contradicted(kind) => kind,
        };
        let explains = |scope: &Scope| self.is_contradicted(scope, kind);
        let scope = scopes.into_iter().find(explains)?;
        Some(self.begin(scope, kind, now))
    }

    /// A block of a lower tier was proven to be missing, or, with an agreement, all were there.
    pub fn tier_report(
        &mut self,
        at: SourceLife,
        tier: Tier,
        outcome: ReportOutcome,
        now: Instant,
    ) -> Option<DoubtChange> {
        let scope = Scope::Tier(at, tier);
        if let Some(doubt) = self.doubts.get_mut(&scope) {
            return doubt.report(outcome, now).then(|| self.end(scope));
        }
        let report = CreditReport {
            form: &PromptForm::any(),
            at,
            prompt: 0,
            outcome,
        };
        self.sample(&scope, &report, now);
        let kind = Contradiction::Missed;
        let is_over = self.is_contradicted(&scope, kind);
        is_over.then(|| self.begin(scope, kind, now))
    }

    /// Whether something is doubted.
    #[must_use]
    pub fn has_doubts(&self) -> bool {
        !self.doubts.is_empty()
    }

    /// The doubted scopes.
    pub fn doubts(&self) -> impl Iterator<Item = (&Scope, &Doubt)> {
        self.doubts.iter()
    }

    /// Weakens what is doubted for prompts of this form.
    pub fn weaken(&self, form: Option<&PromptForm>, trusted: &mut TrustedAnswer) {
        for (scope, doubt) in &self.doubts {
            if !form.is_none_or(|form| scope.has_form(form)) {
                continue;
            }
            let tier = match scope {
                Scope::Tier(_, tier) => *tier,
                Scope::FormAt(..) | Scope::Source(_) | Scope::Form(_) | Scope::Model(..) => {
                    Tier::Gpu
                }
            };
            match scope.at() {
                Some(at) => trusted.weaken(at, doubt.kind, tier),
                None if form.is_some() => trusted.weaken_all(doubt.kind),
                None => {}
            }
        }
    }

    /// Forgets what was not reported for long.
    pub fn expire(&mut self, now: Instant) {
        let is_recent = |doubt: &Doubt| is_recent(doubt.reported, now);
        self.doubts.retain(|_, doubt| is_recent(doubt));
    }

    #[must_use]
    pub fn counts(&self) -> EvidenceCounts {
        EvidenceCounts {
            doubts: self.doubts.len(),
            ..self.counts
        }
    }

    fn sample(&mut self, scope: &Scope, report: &CreditReport<'_>, now: Instant) {
        if !self.scopes.contains_key(scope) {
            while self.order.len() >= SCOPES_MAX
                && let Some(oldest) = self.order.pop_front()
            {
                self.scopes.remove(&oldest);
            }
            self.order.push_back(scope.clone());
        }
        let samples = self.scopes.entry(scope.clone()).or_default();
        samples.retain(|sample| is_recent(sample.taken, now));
        let is_proven = report.outcome == ReportOutcome::Contradicted(Contradiction::Missed);
        let last = samples.back().map(|last| last.taken);
        let is_due = last.is_none_or(|last| now.saturating_duration_since(last) >= SPACING);
        if is_due || is_proven {
            samples.push_back(Sample {
                taken: now,
                form: Arc::clone(report.form),
                at: report.at,
                prompt: report.prompt,
                outcome: report.outcome,
            });
            if samples.len() > SAMPLES {
                samples.pop_front();
            }
        }
    }

    /// Whether the scope's reports contradict its credit.
    fn is_contradicted(&self, scope: &Scope, kind: Contradiction) -> bool {
        let Some(samples) = self.scopes.get(scope) else {
            return false;
        };
        let against = || samples.iter().filter(|sample| sample.is(kind));
        let prompts: BTreeSet<u64> = against().map(|sample| sample.prompt).collect();
        match (scope, kind) {
            (Scope::FormAt(..) | Scope::Tier(..), Contradiction::Missed) => {
                against().count() >= MISSED_MAX
            }
            // Those of a whole source are the audit's.
            (_, Contradiction::Missed) => false,
            (Scope::FormAt(..) | Scope::Tier(..), Contradiction::Exceeded) => {
                prompts.len() >= EXCEEDED_MAX
            }
            (Scope::Source(_), Contradiction::Exceeded) => {
                prompts.len() >= EXCEEDED_MAX && is_common(samples, |sample| &sample.form)
            }
            (Scope::Form(_), Contradiction::Exceeded) => {
                prompts.len() >= EXCEEDED_MAX && is_common(samples, |sample| &sample.at)
            }
            (Scope::Model(..), Contradiction::Exceeded) => {
                prompts.len() >= EXCEEDED_MAX
                    && is_common(samples, |sample| &sample.form)
                    && !has_dissent(&by_part(samples, |sample| &sample.at))
            }
        }
    }

    fn begin(&mut self, scope: Scope, kind: Contradiction, now: Instant) -> DoubtChange {
        self.counts.doubts_begun += 1;
        if self.doubts.len() >= DOUBTS_MAX {
            let oldest = self.doubts.iter().min_by_key(|(_, doubt)| doubt.reported);
            if let Some(oldest) = oldest.map(|(scope, _)| scope.clone()) {
                self.doubts.remove(&oldest);
            }
        }
        self.forget_samples(&scope);
        let doubt = Doubt {
            kind,
            agreements: 0,
            counted: now,
            reported: now,
        };
        self.doubts.insert(scope.clone(), doubt);
        DoubtChange::Began(scope, kind)
    }

    fn end(&mut self, scope: Scope) -> DoubtChange {
        self.counts.doubts_ended += 1;
        self.doubts.remove(&scope);
        DoubtChange::Ended(scope)
    }

    /// What explains a doubt is no evidence of another one.
    fn forget_samples(&mut self, scope: &Scope) {
        if !is_whole(scope) {
            self.scopes.remove(scope);
            self.order.retain(|known| known != scope);
            return;
        }
        for samples in self.scopes.values_mut() {
            samples.retain(|sample| !scope.covers(&sample.form, sample.at));
        }
    }
}

impl Doubt {
    /// Returns whether it is over.
    fn report(&mut self, outcome: ReportOutcome, now: Instant) -> bool {
        self.reported = now;
        match outcome {
            ReportOutcome::Contradicted(_) => self.agreements = 0,
            ReportOutcome::Agreed => {
                if now.saturating_duration_since(self.counted) >= SPACING {
                    self.counted = now;
                    self.agreements += 1;
                }
            }
        }
        self.agreements >= RESTORED_AFTER
    }
}

/// Whether it concerns all blocks of its prompts.
const fn is_whole(scope: &Scope) -> bool {
    !matches!(scope, Scope::Tier(..))
}

fn is_recent(at: Instant, now: Instant) -> bool {
    now.saturating_duration_since(at) < FORGOTTEN_AFTER
}

/// Contradictions and agreements of one part of a scope.
#[derive(Clone, Copy, Default)]
struct PartReports {
    against: usize,
    agreed: usize,
}

/// Whether contradictions come from two parts or more, and no part dissents.
fn is_common<P: Ord>(samples: &VecDeque<Sample>, part: impl Fn(&Sample) -> &P) -> bool {
    let parts = by_part(samples, part);
    let contradicting = parts.iter().filter(|part| part.against > 0).count();
    contradicting > 1 && !has_dissent(&parts)
}

/// Whether a part agrees twice and never contradicts.
fn has_dissent(parts: &[PartReports]) -> bool {
    parts
        .iter()
        .any(|part| part.against == 0 && part.agreed > 1)
}

fn by_part<P: Ord>(samples: &VecDeque<Sample>, part: impl Fn(&Sample) -> &P) -> Vec<PartReports> {
    let mut parts: BTreeMap<&P, PartReports> = BTreeMap::new();
    for sample in samples {
        let reports = parts.entry(part(sample)).or_default();
        match sample.outcome {
            ReportOutcome::Agreed => reports.agreed += 1,
            ReportOutcome::Contradicted(_) => reports.against += 1,
        }
    }
    parts.into_values().collect()
}

#[cfg(test)]
mod tests;
