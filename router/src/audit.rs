//! The shell of the audit: hands what engines report to the core, and asks the index again where the
//! core wants to know better.

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
    desk: Arc<SharedCore>,
    journal: Arc<Journal>,
    metrics: Arc<Metrics>,
    questions: mpsc::Sender<Question>,
}

/// The part that asks again.
pub(crate) struct Rechecks {
    questions: mpsc::Receiver<Question>,
    desk: Arc<SharedCore>,
    metrics: Arc<Metrics>,
    index: IndexClient,
}

impl Auditor {
    pub(crate) fn new(
        desk: Arc<SharedCore>,
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
    pub(crate) fn reported(&self, case: Case, usage: TokenUsage) {
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

    /// An audit over a plane of its own.
    struct World {
        plane: Arc<dyn Plane>,
        index: IndexClient,
        desk: Arc<SharedCore>,
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
                desk: SharedCore::new(core),
                journal: Arc::default(),
                metrics: Arc::new(Metrics::new().unwrap()),
            }
        }

        fn auditor(&self) -> (Auditor, Rechecks) {
            let (desk, journal) = (Arc::clone(&self.desk), Arc::clone(&self.journal));
            Auditor::new(desk, journal, Arc::clone(&self.metrics), self.index.clone())
        }

        /// One worker, and an index that credits it two blocks of whatever is asked, later each time.
        async fn with_a_liar() -> Self {
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
            world.desk.core().set_workers(&[entry]);
            let worker = "w".into();
            world.desk.core().set_health(&worker, Health::Healthy);
            let mut questions = world.plane.serve(subjects().query()).await.unwrap();
            let lie = async move {
                let mut later = 0..;
                while let Some(question) = questions.next().await {
                    let answer = codec::encode(&lie(later.next().unwrap())).unwrap();
                    question.reply.send(answer.into());
                }
            };
            drop(TaskTracker::new().spawn(lie));
            world
        }

        /// A request that was routed by what the index said. The blocks that it was credited.
        async fn route(&self, prompt: &Arc<Prompt>) -> (Case, u32) {
            let answer = self.index.ask(prompt.blocks()).await.unwrap();
            let ask = RouteRequest {
                model: "m",
                prompt,
                exclude: &[],
            };
            let (mut admitted, _) = self.desk.admit(&ask, Some(&answer)).unwrap();
            let entry = self
                .journal
                .record(("r", "m"), &mut admitted.decision, None);
            let credited = admitted.decision.claim.blocks;
            let case = Case {
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

    fn lie(later: u64) -> IndexAnswer {
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

    /// From the engine's word over the index's second one to a source that is not believed any more.
    #[tokio::test(start_paused = true)]
    async fn an_index_that_credits_what_engines_do_not_find_is_not_believed_for_long() {
        let world = World::with_a_liar().await;
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
    async fn rechecks_outlive_the_proxy_until_told_to_end() {
        let (auditor, rechecks) = World::new().auditor();
        let stop = CancellationToken::new();
        let mut running = Box::pin(rechecks.run(stop.clone()));
        drop(auditor);
        assert!(running.as_mut().now_or_never().is_none(), "ended untold");
        stop.cancel();
        running.await;
    }
}
