//! Shows what `doctor` compares between routers, and what the plane's server refuses this one:
//! entries of the registry that expire with this router. Nothing decides by them.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use warmroute_plane::{Plane, PlaneError, PutIf};
use warmroute_process::nats::Nats;
use warmroute_proto::codec::{self, Message};
use warmroute_proto::registry::{
    CreditDoubt, FACTS_SHOWN_MAX, FailedCheck, LostWorker, ModelProblem, RouterDoubts, RouterFacts,
    RouterMisses, RouterRefusals, UnreachableWorker,
};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{BlockSize, RouterId};
use xxhash_rust::xxh3::xxh3_64;

use crate::clock::unix_time;
use crate::config::Config;
use crate::fleet::health::WorkerHealth;
use crate::fleet::{CheckResult, Fleet, FleetWorker, RENDERED_CHAT};
use crate::route::Knobs;
use crate::settings::{LiveSettings, MultimodalRule, Settings};
use crate::tokenizers::{ModelTokenizer, TokenizerState, Tokenizers};

const PERIOD: Duration = Duration::from_secs(5);

const LEASE: Duration = Duration::from_secs(20);

/// Characters of a name or a reason.
const TEXT_MAX: usize = 200;

/// Writes the entries.
pub(crate) struct FactsWriter {
    pub router: RouterId,
    pub subjects: Subjects,
    /// `None` without NATS, where nothing is refused.
    pub nats: Option<Nats>,
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
        (router, nats): (RouterId, Option<Nats>),
        settings: &Arc<LiveSettings>,
        fleet: &Arc<Fleet>,
        tokenizers: &Arc<Tokenizers>,
        plane: Arc<dyn Plane>,
    ) -> Self {
        Self {
            router,
            subjects: Subjects::new(&config.namespace),
            nats,
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
        let key = self.subjects.facts_key(self.router);
        self.put(key, &self.facts()).await?;
        if let Some(doubts) = self.doubts() {
            let key = self.subjects.doubts_key(self.router);
            self.put(key, &doubts).await?;
        }
        if let Some(misses) = misses(self.router, &self.fleet) {
            let key = self.subjects.misses_key(self.router);
            self.put(key, &misses).await?;
        }
        let refused = self.nats.as_ref().map(Nats::refused_permissions);
        let Some(refused) = refused.filter(|refused| !refused.is_empty()) else {
            return Ok(());
        };
        let router = self.router;
        let key = self.subjects.refusals_key(router);
        self.put(key, &RouterRefusals { router, refused }).await
    }

    async fn put<M: Message>(&self, key: String, entry: &M) -> Result<(), PlaneError> {
        let value = codec::encode(entry).unwrap_or_default().into();
        let put = self.plane.put(key, value, PutIf::Always, Some(LEASE));
        put.await.map(drop)
    }

    fn facts(&self) -> RouterFacts {
        let workers = self.fleet.snapshot();
        let rule = self.settings.current().multimodal;
        let failed = workers
            .iter()
            .flat_map(|worker| failed_checks(worker, rule));
        let unregistered = workers.iter().filter(|worker| worker.is_unregistered());
        let unregistered = unregistered.map(|worker| worker.entry.worker.clone());
        RouterFacts {
            router: self.router,
            settings: settings_digest(&self.knobs, self.block_size, &self.settings.current()),
            unix_ns: u64::try_from(unix_time().as_nanos()).unwrap_or(u64::MAX),
            failed_checks: failed.take(FACTS_SHOWN_MAX).collect(),
            unregistered: unregistered.take(FACTS_SHOWN_MAX).collect(),
            without_tokenizer: self.without_tokenizer(),
        }
    }

    fn doubts(&self) -> Option<RouterDoubts> {
        let doubted = self.fleet.doubted();
        let shown = doubted
            .iter()
            .take(FACTS_SHOWN_MAX)
            .map(|scope| CreditDoubt {
                about: shortened(&scope.about),
                engine_had: scope.engine_had.to_owned(),
                likely_cause: scope.likely_cause.to_owned(),
            });
        (!doubted.is_empty()).then(|| RouterDoubts {
            router: self.router,
            total: u32::try_from(doubted.len()).unwrap_or(u32::MAX),
            doubts: shown.collect(),
        })
    }

    fn without_tokenizer(&self) -> Vec<ModelProblem> {
        if !self.knobs.policy.reads_index() {
            return Vec::new();
        }
        let table = self.tokenizers.current();
        let problems = table.models().filter_map(model_problem);
        problems.take(FACTS_SHOWN_MAX).collect()
    }
}

/// The workers that this router misses, if any.
fn misses(router: RouterId, fleet: &Fleet) -> Option<RouterMisses> {
    let silent =
        |worker: &&FleetWorker| worker.registered && worker.health == WorkerHealth::Unhealthy;
    let workers = fleet.snapshot();
    let unreachable = workers
        .iter()
        .filter(silent)
        .map(|worker| UnreachableWorker {
            worker: worker.entry.worker.clone(),
            url: shortened(&worker.entry.url),
            why: shortened(&worker.why_unhealthy()),
        });
    let lost = fleet.lost().into_iter().map(|(worker, silent)| LostWorker {
        worker,
        silent_secs: u32::try_from(silent.as_secs()).unwrap_or(u32::MAX),
    });
    let misses = RouterMisses {
        router,
        unreachable: unreachable.take(FACTS_SHOWN_MAX).collect(),
        lost: lost.take(FACTS_SHOWN_MAX).collect(),
    };
    (!misses.unreachable.is_empty() || !misses.lost.is_empty()).then_some(misses)
}

/// Digest of what routers of one fleet must have in common. Shared settings count only if they are
/// not the defaults: a setting that another version lacks then makes no difference until it is used.
fn settings_digest(knobs: &Knobs, block_size: Option<BlockSize>, settings: &Settings) -> u64 {
    let deciding = (
        knobs,
        block_size,
        settings.engine_wait_timeout(),
        settings.first_token_timeout(),
        settings.max_prompt_bytes(),
    );
    let mut text = format!("{deciding:?}");
    let shared = settings.shared();
    if shared != Settings::default() {
        text += &format!("{shared:?}");
    }
    xxh3_64(text.as_bytes())
}

/// A worker that renders no images is a fault where images are to be rendered.
fn failed_checks(worker: &FleetWorker, rule: MultimodalRule) -> impl Iterator<Item = FailedCheck> {
    let failed = |check: &str, why: &str| FailedCheck {
        worker: worker.entry.worker.clone(),
        check: check.to_owned(),
        why: shortened(why),
    };
    let named = worker.checks.named();
    named.filter_map(move |(check, result)| match result {
        CheckResult::Failed { why } => Some(failed(check, why)),
        CheckResult::Skipped { why }
            if check == RENDERED_CHAT && rule == MultimodalRule::Render =>
        {
            Some(failed(check, why))
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::health::Observation;
    use crate::shared_core::SharedCore;
    use crate::testing;

    const HASHES: [&str; 2] = [
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    ];

    fn digest(text: &str) -> u64 {
        let settings = Settings::parse(text).unwrap();
        settings_digest(&Knobs::default(), None, &settings)
    }

    fn tenant(hash: &str, rest: &str) -> String {
        let keys = format!("keys = [{{ id = \"k\", sha256 = \"{hash}\" }}]");
        format!("[[tenants]]\nname = \"t\"\n{keys}\n{rest}\n")
    }

    #[test]
    fn settings_of_the_fleet_change_the_digest() {
        let texts = [
            String::new(),
            tenant(HASHES[0], ""),
            tenant(HASHES[0], "tokens_per_minute = 5"),
            tenant(HASHES[0], "tokens_per_minute = 6"),
            tenant(HASHES[0], "models = [\"m\"]"),
            tenant(HASHES[0], "salt = \"tenant\""),
            "[models.m]\naliases = [\"n\"]".to_owned(),
            "[models.m]\nexclude_tools_when_tool_choice_none = true".to_owned(),
            "[engines]\nload = true".to_owned(),
            "[engines]\nmax_queued_requests = 1".to_owned(),
            "resume_streams = \"all\"".to_owned(),
            "completion_prompts = \"token-ids\"".to_owned(),
            "multimodal = \"render\"".to_owned(),
            "engine_wait_timeout_secs = 1".to_owned(),
        ];
        let digests: std::collections::BTreeSet<u64> =
            texts.iter().map(|one| digest(one)).collect();
        assert_eq!(digests.len(), texts.len());
    }

    #[test]
    fn a_worker_without_a_render_route_is_a_fault_where_images_are_to_be_rendered() {
        let core = testing::core(testing::ROUTER, Knobs::default());
        let fleet = Fleet::new(SharedCore::new(core), None);
        fleet.register(testing::worker_entry("w", 16));
        fleet.set_checks(&"w".into(), &CheckResult::skipped("no route"));
        let faults = |rule| {
            let workers = fleet.snapshot();
            let faults = failed_checks(&workers[0], rule).map(|fault| fault.check);
            faults.collect::<Vec<_>>()
        };
        assert_eq!(faults(MultimodalRule::Load), [""; 0]);
        assert_eq!(faults(MultimodalRule::Render), [RENDERED_CHAT]);
    }

    #[test]
    fn a_registered_worker_that_does_not_answer_is_missed() {
        let core = testing::core(testing::ROUTER, Knobs::default());
        let fleet = Fleet::new(SharedCore::new(core), None);
        fleet.register(testing::worker_entry("w", 16));
        assert_eq!(misses(testing::ROUTER, &fleet), None, "not probed yet");
        fleet.observe(&"w".into(), "http://w:1", Observation::ConnectRefused);
        let found = misses(testing::ROUTER, &fleet).unwrap();
        assert_eq!(found.lost, []);
        let [worker] = &found.unreachable[..] else {
            panic!("{found:?}");
        };
        assert_eq!(worker.why, "nothing listens there");
        fleet.observe(&"w".into(), "http://w:1", Observation::ProbePassed);
        assert_eq!(misses(testing::ROUTER, &fleet), None);
    }

    #[test]
    fn settings_of_one_machine_do_not() {
        for text in [
            "access_log = \"/var/log/access.log\"",
            "models_dir = \"/models\"",
            "drain_timeout_secs = 5",
            "[tls]\ncertificate = \"a.pem\"\nkey = \"a.key\"",
            "[admin]\nexplain_headers = \"all\"",
            "[engines]\nkey_file = \"key\"\nca = \"ca.pem\"",
            "[tracing]\notlp_endpoint = \"http://127.0.0.1:4318\"",
        ] {
            assert_eq!(digest(text), digest(""), "{text}");
        }
        let model = |path: &str| digest(&format!("[models.m]\ntokenizer = \"{path}\""));
        assert_eq!(model("/a"), model("/b"));
        // Keys are replaced one router after the other.
        let [old, new] = HASHES.map(|hash| digest(&tenant(hash, "")));
        assert_eq!(old, new);
    }

    #[test]
    fn the_order_of_tenants_makes_no_difference() {
        let tenant = |name: &str| format!("[[tenants]]\nname = \"{name}\"\n");
        let both = [["a", "b"], ["b", "a"]];
        let [one, other] = both.map(|names| digest(&names.map(tenant).concat()));
        assert_eq!(one, other);
    }
}
