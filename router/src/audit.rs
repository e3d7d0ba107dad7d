//! The shell of the audit: passes reported usage to the core, and queries the index again where the
//! core requires it.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::index_client::IndexClient;
use crate::journal::{EntryNumber, Journal};
use crate::metrics::Metrics;
use crate::openai::TokenUsage;
use crate::route::{AuditVerdict, Decision, Prompt, Recheck, RecheckVerdict};
use crate::shared_core::SharedCore;

/// Rechecks that wait for their time, at most one for each source. Further ones are dropped.
const RECHECKS_MAX: usize = 1024;

/// An answered request whose usage is to be audited.
pub(crate) struct AuditCase {
    pub prompt: Arc<Prompt>,
    pub decision: Decision,
    pub entry: EntryNumber,
}

struct PendingRecheck {
    recheck: Recheck,
    prompt: Arc<Prompt>,
}

/// Compares credited with reported cached tokens.
#[derive(Clone)]
pub(crate) struct Auditor {
    core: Arc<SharedCore>,
    journal: Arc<Journal>,
    metrics: Arc<Metrics>,
    pending: mpsc::Sender<PendingRecheck>,
}

/// Queries the index again.
pub(crate) struct Rechecks {
    pending: mpsc::Receiver<PendingRecheck>,
    core: Arc<SharedCore>,
    metrics: Arc<Metrics>,
    index: IndexClient,
}

impl Auditor {
    pub(crate) fn new(
        core: Arc<SharedCore>,
        journal: Arc<Journal>,
        metrics: Arc<Metrics>,
        index: IndexClient,
    ) -> (Self, Rechecks) {
        let (sender, pending) = mpsc::channel(RECHECKS_MAX);
        let rechecks = Rechecks {
            pending,
            core: Arc::clone(&core),
            metrics: Arc::clone(&metrics),
            index,
        };
        let auditor = Self {
            core,
            journal,
            metrics,
            pending: sender,
        };
        (auditor, rechecks)
    }

    /// Takes in the usage that an engine reports.
    pub(crate) fn reported(&self, case: AuditCase, usage: TokenUsage) {
        let Some(cached) = usage.cached_tokens else {
            return;
        };
        self.journal.reported(case.entry, cached);
        let claim = &case.decision.claim;
        let credited = u64::from(claim.blocks) * u64::from(claim.block_tokens);
        self.metrics.overlap(credited, cached);
        let now = Instant::now().into_std();
        let cached = u32::try_from(cached).unwrap_or(u32::MAX);
        let verdict = self.core.core().audit(&case.decision, cached, now);
        let AuditVerdict::Less { tokens, recheck } = verdict else {
            return;
        };
        let source = &case.decision.source;
        tracing::debug!(%source, tokens, "fewer tokens were cached than credited");
        if let Some(recheck) = recheck {
            let prompt = case.prompt;
            let pending = PendingRecheck { recheck, prompt };
            // The core forgets a recheck that is dropped.
            if self.pending.try_send(pending).is_err() {
                tracing::debug!(%source, "recheck dropped, too many wait");
            }
        }
    }
}

impl Rechecks {
    /// Runs each recheck at its time, until stopped. All wait equally long, so they come due in order.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        loop {
            let pending = tokio::select! {
                () = stop.cancelled() => return,
                pending = self.pending.recv() => pending,
            };
            let Some(pending) = pending else {
                // The proxy has ended. A task that ends before the stop counts as failed.
                stop.cancelled().await;
                return;
            };
            let due = Instant::from_std(pending.recheck.not_before);
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep_until(due) => {}
            }
            self.recheck(&pending).await;
        }
    }

    async fn recheck(&self, pending: &PendingRecheck) {
        let PendingRecheck { recheck, prompt } = pending;
        let answer = match self.index.ask(prompt.blocks()).await {
            Ok(answer) => answer,
            Err(error) => {
                tracing::debug!(%error, "recheck not answered");
                return;
            }
        };
        let now = Instant::now().into_std();
        let mut core = self.core.core();
        let verdict = core.recheck(recheck, prompt, &answer, now);
        let source = core.source(recheck.claim.source).cloned();
        drop(core);
        let source = source.map(|source| source.to_string());
        match verdict {
            RecheckVerdict::Cleared => {}
            RecheckVerdict::Strike => {
                tracing::warn!(source, "index credits blocks that the engine did not have");
            }
            RecheckVerdict::Demote => {
                self.metrics.demoted();
                tracing::error!(
                    source,
                    "index credited absent blocks repeatedly, no credit until the next generation"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::{FutureExt as _, StreamExt as _};
    use tokio_util::task::TaskTracker;
    use warmroute_plane::{MemoryPlane, MemoryPlaneConfig, Plane};
    use warmroute_proto::query::{IndexAnswer, SourceAnswer, SourceState};
    use warmroute_proto::registry::WorkerEntry;
    use warmroute_proto::subject::Subjects;
    use warmroute_proto::{
        BlockSize, DpRank, EngineSeq, Generation, LogPosition, Namespace, RecordNumber, RouterId,
        Seed, Source, StreamIdentity, Tiers, codec,
    };

    use super::*;
    use crate::route::audit::{SETTLE, STRIKES};
    use crate::route::{Core, CoreConfig, Health, Knobs, RouteRequest};

    const IDENTITY: StreamIdentity = StreamIdentity {
        created_unix_ns: 1,
        nonce: 1,
    };

    struct World {
        plane: Arc<dyn Plane>,
        index: IndexClient,
        core: Arc<SharedCore>,
        journal: Arc<Journal>,
        metrics: Arc<Metrics>,
    }

    impl World {
        fn new() -> Self {
            let core = Core::new(CoreConfig {
                knobs: Knobs::default(),
                router: RouterId([1; 16]),
                incarnation: Generation(1),
                seed: 1,
            });
            let plane: Arc<dyn Plane> = Arc::new(MemoryPlane::new(MemoryPlaneConfig {
                identity: IDENTITY,
                log_bytes_max: 1 << 20,
                queue_max: 16,
            }));
            Self {
                index: IndexClient::new(Arc::clone(&plane), subjects()),
                plane,
                core: SharedCore::new(core),
                journal: Arc::default(),
                metrics: Arc::new(Metrics::new().unwrap()),
            }
        }

        fn auditor(&self) -> (Auditor, Rechecks) {
            let (core, journal) = (Arc::clone(&self.core), Arc::clone(&self.journal));
            Auditor::new(core, journal, Arc::clone(&self.metrics), self.index.clone())
        }

        /// One worker, and an index that credits it two blocks of any prompt, at growing positions.
        async fn with_a_wrong_index() -> Self {
            let world = Self::new();
            let entry = WorkerEntry {
                worker: "w".into(),
                url: "http://w:1".to_owned(),
                models: vec!["m".to_owned()],
                loras: Vec::new(),
                ranks: 1,
                block_size: BlockSize::new(16),
                blocks_per_rank: None,
                max_model_len: None,
                main_attention_only: true,
                version: "0".to_owned(),
            };
            world.core.core().set_workers(&[entry]);
            let worker = "w".into();
            world.core.core().set_health(&worker, Health::Healthy);
            let mut questions = world.plane.serve(subjects().query()).await.unwrap();
            let answers = async move {
                let mut later = 0..;
                while let Some(question) = questions.next().await {
                    let answer = codec::encode(&wrong_answer(later.next().unwrap())).unwrap();
                    question.reply.send(answer.into());
                }
            };
            drop(TaskTracker::new().spawn(answers));
            world
        }

        /// Routes a request by the index. Returns its credited blocks.
        async fn route(&self, prompt: &Arc<Prompt>) -> (AuditCase, u32) {
            let answer = self.index.ask(prompt.blocks()).await.unwrap();
            let ask = RouteRequest {
                model: "m",
                prompt,
                exclude: &[],
            };
            let (mut admitted, _) = self.core.admit(&ask, Some(&answer)).unwrap();
            let entry = self.journal.record("r", "m", &mut admitted.decision, None);
            let credited = admitted.decision.claim.blocks;
            let case = AuditCase {
                prompt: Arc::clone(prompt),
                decision: admitted.decision,
                entry,
            };
            (case, credited)
        }

        fn demotions(&self) -> u64 {
            self.metrics.value("source_demotions_total")
        }
    }

    fn subjects() -> Subjects {
        Subjects::new(&Namespace::from("t"))
    }

    fn wrong_answer(later: u64) -> IndexAnswer {
        let source = Source {
            worker: "w".into(),
            dp_rank: DpRank(0),
        };
        IndexAnswer::Runs {
            log: IDENTITY,
            position: LogPosition(later),
            sources: vec![SourceAnswer {
                source,
                generation: Generation(1),
                number: Some(RecordNumber(later)),
                engine_seq: Some(EngineSeq(later)),
                states: Tiers {
                    gpu: SourceState::Exact,
                    cpu: SourceState::Exact,
                    disk: SourceState::Exact,
                },
                reason: None,
                proof_age_ms: 0,
                run: Tiers {
                    gpu: 2,
                    cpu: 0,
                    disk: 0,
                },
            }],
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_index_that_credits_absent_blocks_loses_its_credit() {
        let world = World::with_a_wrong_index().await;
        let (auditor, rechecks) = world.auditor();
        let stop = CancellationToken::new();
        let running = TaskTracker::new().spawn(rechecks.run(stop.clone()));
        let tokens: Vec<u32> = (0..40).collect();
        let size = BlockSize::new(16).unwrap();
        let prompt = Arc::new(Prompt::new(&tokens, size, Seed::PLAIN));
        for strike in 0..STRIKES {
            assert_eq!(world.demotions(), 0, "after {strike} strikes");
            let (case, credited) = world.route(&prompt).await;
            assert_eq!(credited, 2);
            let usage = TokenUsage {
                prompt_tokens: 40,
                completion_tokens: 1,
                cached_tokens: Some(0),
            };
            auditor.reported(case, usage);
            tokio::time::sleep(SETTLE + Duration::from_millis(100)).await;
        }
        assert_eq!(world.demotions(), 1);
        let (_, credited) = world.route(&prompt).await;
        assert_eq!(credited, 0);
        stop.cancel();
        running.await.unwrap();
    }

    #[tokio::test]
    async fn rechecks_outlive_the_proxy_until_stopped() {
        let (auditor, rechecks) = World::new().auditor();
        let stop = CancellationToken::new();
        let mut running = Box::pin(rechecks.run(stop.clone()));
        drop(auditor);
        assert!(
            running.as_mut().now_or_never().is_none(),
            "ended before the stop"
        );
        stop.cancel();
        running.await;
    }
}
