//! Shows what `doctor` compares between routers: an entry of the registry that expires with this
//! router. Nothing decides by it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use warmroute_plane::{Plane, PlaneError, PutIf};
use warmroute_proto::registry::{FACTS_SHOWN_MAX, FailedCheck, ModelProblem, RouterFacts};
use warmroute_proto::{BlockSize, RouterId, codec};
use xxhash_rust::xxh3::xxh3_64;

use crate::clock::unix_time;
use crate::config::Config;
use crate::fleet::{CheckResult, Fleet, FleetWorker};
use crate::route::Knobs;
use crate::settings::LiveSettings;
use crate::tokenizers::{ModelTokenizer, TokenizerState, Tokenizers};

const PERIOD: Duration = Duration::from_secs(5);

const LEASE: Duration = Duration::from_secs(20);

/// Characters of a name or a reason.
const TEXT_MAX: usize = 200;

/// Writes the entry.
pub(crate) struct FactsWriter {
    pub router: RouterId,
    pub key: String,
    pub knobs: Knobs,
    pub block_size: Option<BlockSize>,
    pub settings: Arc<LiveSettings>,
    pub fleet: Arc<Fleet>,
    pub tokenizers: Arc<Tokenizers>,
    pub plane: Arc<dyn Plane>,
}

impl FactsWriter {
    pub(crate) fn new(
        config: &Config,
        (router, key): (RouterId, String),
        settings: &Arc<LiveSettings>,
        fleet: &Arc<Fleet>,
        tokenizers: &Arc<Tokenizers>,
        plane: Arc<dyn Plane>,
    ) -> Self {
        Self {
            router,
            key,
            knobs: config.knobs.clone(),
            block_size: config.block_size,
            settings: Arc::clone(settings),
            fleet: Arc::clone(fleet),
            tokenizers: Arc::clone(tokenizers),
            plane,
        }
    }

    /// Writes each [`PERIOD`], until stopped.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            let write = stop.run_until_cancelled(self.write()).await;
            if let Some(Err(error)) = write {
                tracing::debug!(%error, "this router cannot be compared by other tools");
            }
        }
        // The entry expires.
    }

    async fn write(&self) -> Result<(), PlaneError> {
        let value = codec::encode(&self.facts()).unwrap_or_default().into();
        let put = self
            .plane
            .put(self.key.clone(), value, PutIf::Always, Some(LEASE));
        put.await.map(drop)
    }

    fn facts(&self) -> RouterFacts {
        let workers = self.fleet.snapshot();
        let failed = workers.iter().flat_map(failed_checks);
        let unregistered = workers.iter().filter(|worker| worker.is_unregistered());
        let unregistered = unregistered.map(|worker| worker.entry.worker.clone());
        RouterFacts {
            router: self.router,
            settings: self.settings_digest(),
            unix_ns: u64::try_from(unix_time().as_nanos()).unwrap_or(u64::MAX),
            failed_checks: failed.take(FACTS_SHOWN_MAX).collect(),
            unregistered: unregistered.take(FACTS_SHOWN_MAX).collect(),
            without_tokenizer: self.without_tokenizer(),
        }
    }

    fn without_tokenizer(&self) -> Vec<ModelProblem> {
        if !self.knobs.policy.reads_index() {
            return Vec::new();
        }
        let table = self.tokenizers.current();
        let problems = table.models().filter_map(model_problem);
        problems.take(FACTS_SHOWN_MAX).collect()
    }

    /// Digest of what decides where a request goes; routers of one version with equal settings have
    /// equal ones.
    fn settings_digest(&self) -> u64 {
        let settings = self.settings.current();
        let deciding = (
            &self.knobs,
            self.block_size,
            settings.engine_wait_timeout(),
            settings.first_token_timeout(),
            settings.max_prompt_bytes(),
        );
        xxh3_64(format!("{deciding:?}").as_bytes())
    }
}

fn failed_checks(worker: &FleetWorker) -> impl Iterator<Item = FailedCheck> {
    let named = worker.checks.named();
    named.filter_map(|(check, result)| match result {
        CheckResult::Failed { why } => Some(FailedCheck {
            worker: worker.entry.worker.clone(),
            check: check.to_owned(),
            why: shortened(why),
        }),
        CheckResult::Pending | CheckResult::Passed | CheckResult::Skipped { .. } => None,
    })
}

fn model_problem((model, entry): (&String, &ModelTokenizer)) -> Option<ModelProblem> {
    match (&entry.state, &entry.problem) {
        (TokenizerState::Missing, Some(why)) => Some(ModelProblem {
            model: shortened(model),
            why: shortened(why),
        }),
        (TokenizerState::Loading | TokenizerState::Ready(_) | TokenizerState::Missing, _) => None,
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(TEXT_MAX).collect()
}
