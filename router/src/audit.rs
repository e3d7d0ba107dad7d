//! The shell of the audit: passes reported usage to the core, and queries the index again where the
//! core requires it.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;

use prometheus::IntCounter;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::index_client::IndexClient;
use crate::journal::{EntryNumber, Journal};
use crate::metrics::Metrics;
use crate::openai::TokenUsage;
use crate::route::{AuditVerdict, Decision, DoubtEvent, Prompt, Recheck, RecheckVerdict};
use crate::shared_core::SharedCore;

/// Rechecks that wait for their time, at most one for each source. Further ones are dropped.
const RECHECKS_MAX: usize = 1024;

/// An answered request whose usage is to be audited.
pub(crate) struct AuditCase {
    pub prompt: Arc<Prompt>,
    pub decision: Decision,
    pub entry: EntryNumber,
}

/// Compares credited with reported cached tokens, for journal and metrics too.
#[derive(Clone)]
pub(crate) struct Auditor {
    audit: UsageAudit,
    journal: Arc<Journal>,
    metrics: Arc<Metrics>,
}

/// Compares credited with reported cached tokens.
#[derive(Clone)]
pub struct UsageAudit {
    core: Arc<SharedCore>,
    pending: mpsc::Sender<Recheck>,
}

/// Queries the index again.
pub struct Rechecks {
    pending: mpsc::Receiver<Recheck>,
    /// To be confirmed, in the order of their times. At most one for each source.
    repeats: VecDeque<Confirmation>,
    core: Arc<SharedCore>,
    demotions: IntCounter,
    index: IndexClient,
}

/// A recheck that the replica which answered it confirms.
struct Confirmation {
    recheck: Recheck,
    replica: Option<Arc<str>>,
}

impl Auditor {
    pub(crate) fn new(
        core: Arc<SharedCore>,
        journal: Arc<Journal>,
        metrics: Arc<Metrics>,
        index: IndexClient,
    ) -> (Self, Rechecks) {
        let (audit, rechecks) = UsageAudit::new(core, index, metrics.demotions().clone());
        let auditor = Self {
            audit,
            journal,
            metrics,
        };
        (auditor, rechecks)
    }

    /// Takes in the usage that an engine reports.
    pub(crate) fn reported(&self, case: AuditCase, usage: TokenUsage) {
        let Some(cached) = usage.cached_tokens else {
            return;
        };
        self.journal.reported(case.entry, cached);
        let block_tokens = case.decision.claim.block_tokens();
        let credited = u64::from(case.decision.overlap_blocks) * u64::from(block_tokens);
        self.metrics.overlap(credited, cached);
        self.audit.reported(&case.decision, &case.prompt, usage);
    }
}

impl UsageAudit {
    /// `demotions` counts demoted sources.
    #[must_use]
    pub fn new(
        core: Arc<SharedCore>,
        index: IndexClient,
        demotions: IntCounter,
    ) -> (Self, Rechecks) {
        let (sender, pending) = mpsc::channel(RECHECKS_MAX);
        let rechecks = Rechecks {
            pending,
            repeats: VecDeque::new(),
            core: Arc::clone(&core),
            demotions,
            index,
        };
        let audit = Self {
            core,
            pending: sender,
        };
        (audit, rechecks)
    }

    /// Takes in the cached tokens that an engine reports of a request, if it reports any.
    pub fn reported(&self, decision: &Decision, prompt: &Prompt, usage: TokenUsage) {
        let Some(cached_tokens) = usage.cached_tokens else {
            return;
        };
        let cached = u32::try_from(cached_tokens).unwrap_or(u32::MAX);
        let now = Instant::now().into_std();
        let (verdict, doubts) = {
            let mut core = self.core.core();
            core.count_reported(usage.prompt_tokens, cached_tokens);
            let verdict = core.audit(decision, prompt, cached, now);
            (verdict, core.take_doubt_events())
        };
        log_doubts(doubts);
        let source = &decision.source;
        if verdict == AuditVerdict::Reinstate {
            tracing::info!(%source, "engine agrees with the index again, credit restored");
        }
        let AuditVerdict::Less { tokens, recheck } = verdict else {
            return;
        };
        tracing::debug!(%source, tokens, "fewer tokens were cached than credited");
        if let Some(recheck) = recheck {
            // The core forgets a recheck that is dropped.
            if self.pending.try_send(recheck).is_err() {
                tracing::debug!(%source, "recheck dropped, too many wait");
            }
        }
    }
}

impl Rechecks {
    /// Runs each recheck at its time, until stopped. All wait equally long, and so do all repeats:
    /// each kind comes due in order.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut next: Option<Recheck> = None;
        loop {
            let repeat = self.repeats.front().map(|repeat| &repeat.recheck);
            let times = next.iter().chain(repeat);
            let due = times.map(|recheck| recheck.not_before).min();
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                pending = self.pending.recv(), if next.is_none() => {
                    if pending.is_none() {
                        // The proxy has ended. A task that ends before the stop counts as failed.
                        stop.cancelled().await;
                        return;
                    }
                    next = pending;
                }
                () = until(due) => {
                    let is_due = |recheck: &mut Recheck| Some(recheck.not_before) == due;
                    if let Some(recheck) = next.take_if(is_due) {
                        let replica = self.index.pick();
                        self.recheck(&recheck, replica).await;
                    } else if let Some(Confirmation { recheck, replica }) = self.repeats.pop_front() {
                        self.recheck(&recheck, replica).await;
                    }
                }
            }
        }
    }

    async fn recheck(&mut self, recheck: &Recheck, replica: Option<Arc<str>>) {
        let Some(query) = self.core.core().hold_query(recheck) else {
            return;
        };
        let answer = match self.index.hold(&query, replica.as_deref()).await {
            Ok(answer) => answer,
            Err(error) => {
                // Also an indexer of an earlier version.
                tracing::debug!(%error, "recheck not answered");
                return;
            }
        };
        let now = Instant::now().into_std();
        let (verdict, doubts) = {
            let mut core = self.core.core();
            let verdict = core.recheck(recheck, &answer, now);
            (verdict, core.take_doubt_events())
        };
        log_doubts(doubts);
        let source = query.source;
        match verdict {
            RecheckVerdict::Cleared | RecheckVerdict::Unproven => {}
            RecheckVerdict::Repeat(recheck) => {
                self.repeats.push_back(Confirmation { recheck, replica });
            }
            RecheckVerdict::Strike => {
                tracing::warn!(%source, "index credits blocks that the engine did not have");
            }
            RecheckVerdict::Demote => {
                self.demotions.inc();
                tracing::error!(
                    %source,
                    "index credited absent blocks repeatedly, no credit until the engine agrees"
                );
            }
        }
    }
}

fn log_doubts(events: Vec<DoubtEvent>) {
    for event in events {
        match event {
            DoubtEvent::Began(scope) => tracing::warn!(
                about = scope.about,
                engine_had = scope.engine_had,
                likely_cause = scope.likely_cause,
                "cached tokens that engines report contradict exact credit: not exact until they agree"
            ),
            DoubtEvent::Ended { about } => {
                tracing::info!(about, "reported cached tokens agree with the index again");
            }
        }
    }
}

/// Waits until a time, without one for ever.
async fn until(due: Option<std::time::Instant>) {
    match due {
        Some(due) => sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}
