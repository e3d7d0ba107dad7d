//! The shell of the audit: hands what engines report to the core, and asks the index again where the
//! core wants to know better.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::accounts::Desk;
use crate::index_client::IndexClient;
use crate::journal::{EntryNumber, Journal};
use crate::metrics::Metrics;
use crate::openai::Usage;
use crate::route::{AuditVerdict, Decision, Prompt, Recheck, RecheckVerdict};

/// Questions that wait for their time. One a source is open at most; beyond, it is not asked.
const RECHECKS_MAX: usize = 1024;

/// One answered request whose usage will tell.
pub(crate) struct Case {
    pub prompt: Arc<Prompt>,
    pub decision: Decision,
    pub entry: EntryNumber,
}

struct Question {
    recheck: Recheck,
    prompt: Arc<Prompt>,
}

/// Compares credit with what engines report.
pub(crate) struct Auditor {
    desk: Arc<Desk>,
    journal: Arc<Journal>,
    metrics: Arc<Metrics>,
    questions: mpsc::Sender<Question>,
}

/// The part that asks again.
pub(crate) struct Rechecks {
    questions: mpsc::Receiver<Question>,
    desk: Arc<Desk>,
    metrics: Arc<Metrics>,
    index: IndexClient,
}

impl Auditor {
    pub(crate) fn new(
        desk: Arc<Desk>,
        journal: Arc<Journal>,
        metrics: Arc<Metrics>,
        index: IndexClient,
    ) -> (Self, Rechecks) {
        let (sender, questions) = mpsc::channel(RECHECKS_MAX);
        let rechecks = Rechecks {
            questions,
            desk: Arc::clone(&desk),
            metrics: Arc::clone(&metrics),
            index,
        };
        let auditor = Self {
            desk,
            journal,
            metrics,
            questions: sender,
        };
        (auditor, rechecks)
    }

    /// The engine's usage of an answered request.
    pub(crate) fn reported(&self, case: Case, usage: Usage) {
        let Some(cached) = usage.cached_tokens else {
            return;
        };
        self.journal.reported(case.entry, cached);
        let claim = &case.decision.claim;
        let credited = u64::from(claim.blocks) * u64::from(claim.block_tokens);
        self.metrics.overlap(credited, cached);
        let now = Instant::now().into_std();
        let cached = u32::try_from(cached).unwrap_or(u32::MAX);
        let verdict = self.desk.core().audit(&case.decision, cached, now);
        let AuditVerdict::Less { tokens, recheck } = verdict else {
            return;
        };
        let source = &case.decision.source;
        tracing::debug!(%source, tokens, "fewer tokens were cached than credited");
        if let Some(recheck) = recheck {
            let prompt = case.prompt;
            // Full: the core forgets a question that nobody comes back with.
            if self
                .questions
                .try_send(Question { recheck, prompt })
                .is_err()
            {
                tracing::debug!(%source, "too many rechecks wait");
            }
        }
    }
}

impl Rechecks {
    /// Asks each question at its time, until stopped. All wait equally long, so that they come due
    /// in the order of their coming.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        loop {
            let question = tokio::select! {
                () = stop.cancelled() => return,
                question = self.questions.recv() => question,
            };
            let Some(question) = question else {
                // The proxy has ended before us: shutdown's first phase. Nobody asks any more, but
                // to end untold would count as a failure.
                stop.cancelled().await;
                return;
            };
            let due = Instant::from_std(question.recheck.not_before);
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep_until(due) => {}
            }
            self.ask(&question).await;
        }
    }

    async fn ask(&self, question: &Question) {
        let Question { recheck, prompt } = question;
        let answer = match self.index.ask(prompt.blocks()).await {
            Ok(answer) => answer,
            Err(error) => {
                tracing::debug!(%error, "a recheck was not answered");
                return;
            }
        };
        let now = Instant::now().into_std();
        let mut core = self.desk.core();
        let verdict = core.recheck(recheck, prompt, &answer, now);
        let source = core.source(recheck.claim.source).cloned();
        drop(core);
        let source = source.map(|source| source.to_string());
        match verdict {
            RecheckVerdict::Cleared => {}
            RecheckVerdict::Strike => {
                tracing::warn!(
                    source,
                    "the index credits blocks that the engine did not have"
                );
            }
            RecheckVerdict::Demote => {
                self.metrics.demoted();
                tracing::error!(
                    source,
                    "the index was wrong repeatedly: no credit until the next generation"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use warmroute_proto::bus::{MemoryPlane, MemoryPlaneConfig};
    use warmroute_proto::subject::Subjects;
    use warmroute_proto::{Generation, Namespace, RouterId, StreamIdentity};

    use super::*;
    use crate::route::{Core, Knobs, Settings};

    #[tokio::test]
    async fn rechecks_outlive_the_proxy_until_told_to_end() {
        let metrics = Arc::new(Metrics::new().unwrap());
        let core = Core::new(Settings {
            knobs: Knobs::default(),
            router: RouterId([1; 16]),
            incarnation: Generation(1),
            seed: 1,
        });
        let desk = Desk::new(core);
        let plane = MemoryPlane::new(MemoryPlaneConfig {
            identity: StreamIdentity {
                created_unix_ns: 1,
                nonce: 1,
            },
            log_bytes_max: 1 << 20,
            queue_max: 16,
        });
        let index = IndexClient::new(Arc::new(plane), Subjects::new(&Namespace::from("nobody")));
        let (auditor, rechecks) = Auditor::new(desk, Arc::default(), metrics, index);
        let stop = CancellationToken::new();
        let mut running = Box::pin(rechecks.run(stop.clone()));
        drop(auditor);
        assert!(running.as_mut().now_or_never().is_none(), "ended untold");
        stop.cancel();
        running.await;
    }
}
