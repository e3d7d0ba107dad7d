//! Is a worker what the router takes it for? Asked when it comes, comes back or changes: whether its
//! `/tokenize` gives the router's token ids, and whether its blocks are as long.
//!
//! A router that hashes other tokens or other blocks than the engine would see nothing cached, for
//! ever and in silence. So a difference is loud (log, metric, `/workers`), and what differs is routed
//! by load only. The comparison itself is `tokenize::parity`'s.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{StatusCode, header};
use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::clock::civil_now;
use crate::fleet::{Check, Checks, Fleet, Member};
use crate::metrics::Metrics;
use crate::ready::Ready;
use crate::tokenize::Tokenizer;
use crate::tokenize::parity::{self, Kind, Verdict};

/// Workers asked at the same time.
const CONCURRENT_MAX: usize = 8;

/// A worker that did not answer is asked again after this.
const RETRY: Duration = Duration::from_secs(5);

/// An engine that is busy answers late; one that is dead, never.
const ASK_DEADLINE: Duration = Duration::from_secs(10);

/// See the module's documentation.
pub(crate) struct Registrar {
    pub fleet: Arc<Fleet>,
    pub client: reqwest::Client,
    pub tokenizer: Option<Arc<Tokenizer>>,
    pub metrics: Arc<Metrics>,
    pub ready: Arc<Ready>,
}

impl Registrar {
    /// Checks whoever is to be checked, until stopped.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut retries = interval(RETRY);
        retries.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.fleet.changed_for_register() => {}
                _ = retries.tick() => {}
            }
            let round = stream::iter(self.fleet.unchecked())
                .for_each_concurrent(CONCURRENT_MAX, |member| self.check(member));
            tokio::select! {
                () = stop.cancelled() => return,
                () = round => {}
            }
        }
    }

    async fn check(&self, member: Member) {
        let worker = &member.entry.worker;
        let Tokens {
            text,
            chat,
            chat_with_tools,
        } = self.tokens(&member).await;
        let checks = Checks {
            text,
            chat,
            chat_with_tools,
            block_size: self.blocks(&member),
        };
        for (name, check) in checks.named() {
            match check {
                Check::Failed { why } => {
                    self.metrics.check_failed(name);
                    tracing::error!(
                        %worker, check = name, why,
                        "the worker is not what the router takes it for: routed by load only"
                    );
                }
                Check::Skipped { why } => tracing::warn!(%worker, check = name, why, "not checked"),
                Check::Passed => tracing::info!(%worker, check = name, "check passed"),
                Check::Pending => {}
            }
        }
        self.fleet.checked(worker, member.life, checks);
        if self.fleet.is_settled() {
            self.ready.workers_settled();
        }
    }

    fn blocks(&self, member: &Member) -> Check {
        let view = self.fleet.view();
        let model = member.entry.models.first();
        // The operator's word, if there is one.
        let expected = model.and_then(|model| view.models.get(model)?.block_size);
        match (expected, member.entry.block_size) {
            (_, None) => Check::skipped("the engine has not told its block size yet"),
            (Some(expected), Some(found)) if expected != found => Check::failed(format!(
                "its blocks have {found} tokens, {expected} were expected"
            )),
            (Some(_) | None, Some(_)) => Check::Passed,
        }
    }

    /// The checks of texts and of chats. What differs is asked twice before it is believed: a
    /// template with a date may have been rendered on two sides of midnight.
    async fn tokens(&self, member: &Member) -> Tokens {
        let Some(tokenizer) = &self.tokenizer else {
            return Tokens::all(&Check::skipped("no --tokenizer"));
        };
        let Some(model) = member.entry.models.first() else {
            return Tokens::all(&Check::skipped("it serves no base model"));
        };
        let first = self.probe(tokenizer, model, member).await;
        if first.any_failure() {
            return self.probe(tokenizer, model, member).await;
        }
        first
    }

    async fn probe(&self, tokenizer: &Arc<Tokenizer>, model: &str, member: &Member) -> Tokens {
        let (tokenizer, model) = (Arc::clone(tokenizer), model.to_owned());
        let ask = move || parity::probes(&tokenizer, &model, civil_now());
        let Ok(probes) = tokio::task::spawn_blocking(ask).await else {
            return Tokens::all(&Check::failed("our own tokenizer failed"));
        };
        let mut verdicts = Vec::with_capacity(probes.len());
        for probe in probes {
            match self.ask(member, probe.body).await {
                Asked::Answer(answer) => {
                    let verdict = parity::compare(&probe.ours, &answer);
                    verdicts.push((probe.name, probe.kind, verdict));
                }
                Asked::Absent => return Tokens::all(&Check::skipped("it has no /tokenize")),
                Asked::Away => return Tokens::all(&Check::Pending),
            }
        }
        Tokens::of(&verdicts)
    }

    async fn ask(&self, member: &Member, body: Vec<u8>) -> Asked {
        let url = format!("{}/tokenize", member.entry.url);
        let request = self
            .client
            .post(url)
            .timeout(ASK_DEADLINE)
            .header(header::CONTENT_TYPE, "application/json")
            .body(body);
        let answer = async {
            let response = request.send().await?;
            Ok::<_, reqwest::Error>((response.status(), response.bytes().await?))
        };
        match answer.await {
            Ok((StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED, _)) => Asked::Absent,
            Ok((status, _)) if status.is_server_error() => Asked::Away,
            Ok((status, body)) => Asked::Answer(parity::read_answer(status.as_u16(), &body)),
            Err(_) => Asked::Away,
        }
    }
}

/// What became of one question.
enum Asked {
    Answer(parity::Answer),
    /// The engine was started without the route, or with another one in its place.
    Absent,
    /// It does not answer now: to be asked again.
    Away,
}

/// The checks that compare token ids.
struct Tokens {
    text: Check,
    chat: Check,
    chat_with_tools: Check,
}

impl Tokens {
    fn all(check: &Check) -> Self {
        Self {
            text: check.clone(),
            chat: check.clone(),
            chat_with_tools: check.clone(),
        }
    }

    fn of(verdicts: &[(&'static str, Kind, Verdict)]) -> Self {
        let trust = parity::trust(verdicts.iter().map(|(_, kind, verdict)| (*kind, verdict)));
        let check = |trusted: bool, kinds: &[Kind]| {
            if trusted {
                return Check::Passed;
            }
            let against = verdicts.iter().find(|(_, kind, verdict)| {
                kinds.contains(kind)
                    && !matches!(verdict, Verdict::Equal { .. } | Verdict::BothRefuse)
            });
            match against {
                Some((name, _, verdict)) => Check::failed(format!("{name}: {verdict}")),
                None => Check::skipped("neither side renders any of the probes"),
            }
        };
        Self {
            text: check(trust.completions, &[Kind::Completion]),
            chat: check(trust.chat, &[Kind::Chat]),
            chat_with_tools: check(trust.chat_with_tools, &[Kind::Chat, Kind::ChatWithTools]),
        }
    }

    const fn any_failure(&self) -> bool {
        self.text.is_failure() || self.chat.is_failure() || self.chat_with_tools.is_failure()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;
    use warmroute_proto::registry::WorkerEntry;
    use warmroute_proto::{BlockSize, Generation, RouterId};

    use super::*;
    use crate::route::{Core, CoreConfig, Knobs};
    use crate::shared_core::SharedCore;

    fn entry(worker: &str, tokens: Option<u32>) -> WorkerEntry {
        WorkerEntry {
            worker: worker.into(),
            url: format!("http://{worker}:1"),
            models: vec!["m".to_owned()],
            loras: Vec::new(),
            ranks: 1,
            block_size: tokens.and_then(BlockSize::new),
            blocks_per_rank: None,
            max_model_len: None,
            main_attention_only: true,
            version: "0".to_owned(),
        }
    }

    /// What is found of workers in the order of their names. `told`: by the operator.
    fn check_blocks(told: Option<u32>, workers: &[Option<u32>], expected: &[&str]) {
        let core = Core::new(CoreConfig {
            knobs: Knobs::default(),
            router: RouterId([0; 16]),
            incarnation: Generation(1),
            seed: 1,
        });
        let fleet = Fleet::new(SharedCore::new(core), told.and_then(BlockSize::new));
        for (name, tokens) in ["a", "b"].into_iter().zip(workers) {
            fleet.put(entry(name, *tokens), Instant::now());
        }
        let registrar = Registrar {
            fleet: Arc::clone(&fleet),
            client: reqwest::Client::new(),
            tokenizer: None,
            metrics: Arc::new(Metrics::new().unwrap()),
            ready: Arc::default(),
        };
        let members = fleet.snapshot();
        let found = members.iter().map(|member| registrar.blocks(member));
        let found: Vec<&str> = found.map(|check| label(&check)).collect();
        assert_eq!(found, expected, "{told:?} {workers:?}");
    }

    /// The operator's word, then that of the first worker, is what the others are held against.
    #[test]
    fn a_worker_whose_blocks_are_of_another_size_fails() {
        check_blocks(None, &[Some(16)], &["passed"]);
        check_blocks(None, &[None], &["skipped"]);
        check_blocks(Some(16), &[None], &["skipped"]);
        check_blocks(Some(16), &[Some(16)], &["passed"]);
        check_blocks(Some(16), &[Some(32)], &["failed"]);
        check_blocks(Some(16), &[Some(32), Some(16)], &["failed", "passed"]);
        check_blocks(None, &[Some(16), Some(16)], &["passed", "passed"]);
        check_blocks(None, &[Some(16), Some(32)], &["passed", "failed"]);
        check_blocks(None, &[None, Some(32)], &["skipped", "passed"]);
    }

    const fn label(check: &Check) -> &'static str {
        match check {
            Check::Pending => "pending",
            Check::Passed => "passed",
            Check::Failed { .. } => "failed",
            Check::Skipped { .. } => "skipped",
        }
    }

    fn check(verdicts: &[(Kind, Verdict)], expected: [&str; 3]) {
        let named: Vec<_> = verdicts
            .iter()
            .map(|(kind, verdict)| ("probe", *kind, verdict.clone()))
            .collect();
        let tokens = Tokens::of(&named);
        let words = [&tokens.text, &tokens.chat, &tokens.chat_with_tools].map(label);
        assert_eq!(words, expected, "{verdicts:?}");
    }

    #[test]
    fn a_difference_fails_its_kind_and_what_rests_on_it() {
        let equal = || Verdict::Equal { tokens: 3 };
        let differ = || Verdict::Differ {
            at: 1,
            ours: Some(1),
            theirs: None,
        };
        check(
            &[
                (Kind::Completion, equal()),
                (Kind::Chat, equal()),
                (Kind::ChatWithTools, equal()),
            ],
            ["passed", "passed", "passed"],
        );
        check(
            &[
                (Kind::Completion, equal()),
                (Kind::Chat, differ()),
                (Kind::ChatWithTools, equal()),
            ],
            ["passed", "failed", "failed"],
        );
        check(
            &[
                (Kind::Completion, differ()),
                (Kind::Chat, equal()),
                (Kind::ChatWithTools, Verdict::BothRefuse),
            ],
            ["failed", "passed", "skipped"],
        );
        check(&[], ["skipped", "skipped", "skipped"]);
    }
}
