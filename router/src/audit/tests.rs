use std::time::Duration;

use futures_util::{FutureExt as _, StreamExt as _};
use tokio_util::task::TaskTracker;
use warmroute_plane::Plane;
use warmroute_proto::query::{
    HoldAnswer, HoldQuery, HoldSpan, IndexAnswer, SourceAnswer, SourceState,
};
use warmroute_proto::{
    BlockSize, DpRank, EngineSeq, Generation, LogPosition, RecordNumber, Seed, Source, Tiers, codec,
};

use super::*;
use crate::route::audit::{REPEAT_AFTER, SETTLE, STRIKES};
use crate::route::{Health, Knobs, RouteRequest};
use crate::testing::{LOG, ROUTER, core, plane, subjects, worker_entry};

struct World {
    plane: Arc<dyn Plane>,
    index: IndexClient,
    core: Arc<SharedCore>,
    journal: Arc<Journal>,
    metrics: Arc<Metrics>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum IndexVersion {
    Present,
    Earlier,
}

impl World {
    fn new() -> Self {
        let plane = plane();
        Self {
            index: IndexClient::new(Arc::clone(&plane), subjects()),
            plane,
            core: SharedCore::new(core(ROUTER, Knobs::default())),
            journal: Arc::default(),
            metrics: Arc::new(Metrics::new().unwrap()),
        }
    }

    fn auditor(&self) -> (Auditor, Rechecks) {
        let (core, journal) = (Arc::clone(&self.core), Arc::clone(&self.journal));
        Auditor::new(core, journal, Arc::clone(&self.metrics), self.index.clone())
    }

    /// One worker, and an index that credits it two blocks of any prompt, at growing positions. It
    /// answers rechecks, unless it is of an earlier version.
    async fn with_a_wrong_index(version: IndexVersion) -> Self {
        let world = Self::new();
        world.core.core().set_workers(&[worker_entry("w", 16)]);
        let worker = "w".into();
        world.core.core().set_health(&worker, Health::Healthy);
        let mut questions = world.plane.serve(subjects().query()).await.unwrap();
        let answers = async move {
            let mut later = 0..;
            while let Some(question) = questions.next().await {
                let later = later.next().unwrap();
                let answer = match codec::decode::<HoldQuery>(&question.payload) {
                    Ok(_) if version == IndexVersion::Earlier => continue,
                    Ok(_) => codec::encode(&wrong_hold(later)),
                    Err(_) => codec::encode(&wrong_answer(later)),
                };
                question.reply.send(answer.unwrap().into());
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
            leg: crate::route::Leg::Whole,
        };
        let (mut admitted, _) = self.core.admit(&ask, Some(&answer)).unwrap();
        let entry = self
            .journal
            .record(("r", None), "m", &mut admitted.decision, None);
        let credited = admitted.decision.overlap_blocks;
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

fn wrong_hold(later: u64) -> HoldAnswer {
    HoldAnswer {
        log: Some(LOG),
        generation: Some(Generation(1)),
        engine_seq: Some(EngineSeq(later)),
        state: SourceState::Exact,
        proof_age_ms: 0,
        span: HoldSpan::Held,
    }
}

fn wrong_answer(later: u64) -> IndexAnswer {
    let source = Source {
        worker: "w".into(),
        dp_rank: DpRank(0),
    };
    IndexAnswer::Runs {
        log: LOG,
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
    let world = World::with_a_wrong_index(IndexVersion::Present).await;
    strike_out(&world).await;
    assert_eq!(world.demotions(), 1);
    assert_eq!(world.route(&prompt()).await.1, 0);
}

/// It drops the query, which proves nothing.
#[tokio::test(start_paused = true)]
async fn an_index_of_an_earlier_version_gets_no_strike() {
    let world = World::with_a_wrong_index(IndexVersion::Earlier).await;
    strike_out(&world).await;
    assert_eq!(world.demotions(), 0);
    assert_eq!(world.route(&prompt()).await.1, 2);
}

fn prompt() -> Arc<Prompt> {
    let tokens: Vec<u32> = (0..40).collect();
    let size = BlockSize::new(16).unwrap();
    Arc::new(Prompt::new(&tokens, size, Seed::PLAIN))
}

/// The share that engines report needs no estimate of the router, which knows 40 tokens here.
#[tokio::test]
async fn reported_tokens_are_those_of_the_engine() {
    let world = World::with_a_wrong_index(IndexVersion::Present).await;
    let (auditor, _rechecks) = world.auditor();
    let (case, _) = world.route(&prompt()).await;
    let usage = TokenUsage {
        prompt_tokens: 1_000,
        completion_tokens: 1,
        cached_tokens: Some(800),
    };
    auditor.reported(case, usage);
    let totals = world.core.core().traffic().clone();
    let reported = (totals.reported_prompt_tokens, totals.reported_cached_tokens);
    assert_eq!(reported, (1_000, 800));
}

/// As many requests whose engine has nothing as strikes demote a source.
async fn strike_out(world: &World) {
    let (auditor, rechecks) = world.auditor();
    let stop = CancellationToken::new();
    let running = TaskTracker::new().spawn(rechecks.run(stop.clone()));
    for strike in 0..STRIKES {
        assert_eq!(world.demotions(), 0, "after {strike} strikes");
        let (case, credited) = world.route(&prompt()).await;
        assert_eq!(credited, 2);
        let usage = TokenUsage {
            prompt_tokens: 40,
            completion_tokens: 1,
            cached_tokens: Some(0),
        };
        auditor.reported(case, usage);
        tokio::time::sleep(SETTLE + REPEAT_AFTER + Duration::from_millis(100)).await;
    }
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
