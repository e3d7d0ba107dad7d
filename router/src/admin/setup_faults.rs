//! What keeps this router from routing, or from routing by cache, in words for operators: a banner of
//! the live page, a part of `/workers`, and a WARN each.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use warmroute_proto::WorkerId;
use warmroute_proto::registry::{WorkerEntry, WorkerRole};

use super::Admin;
use crate::clock::unix_time;
use crate::indexer_pool::IndexFault;
use crate::tokenizers::TokenizerState;

const PERIOD: Duration = Duration::from_secs(1);

/// Looks in a row that find a fault before it is logged.
const LOOKS: u32 = 2;

/// A fault of the whole router.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub(crate) enum SetupFault {
    #[error("no worker is known, each request gets 503: {remedy}")]
    NoWorker { remedy: &'static str },
    #[error(
        "all workers of model {model} have the role prefill, each request gets 503: add a worker \
         with the role decode or both"
    )]
    OnlyPrefill { model: String },
    #[error(
        "model {model} has no tokenizer, so that its prompts are routed by load, without cache \
         knowledge: {why}"
    )]
    NoTokenizer { model: String, why: Arc<str> },
    #[error("the index is out of reach, so that requests are routed by load: {0}")]
    Index(IndexFault),
}

/// A declared worker that is not registered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct WaitingWorker {
    pub worker: WorkerId,
    pub url: String,
    pub state: &'static str,
    pub reason: String,
    pub since_unix_s: u64,
}

/// The faults of this moment, in a stable order.
pub(crate) fn faults(admin: &Admin) -> Vec<SetupFault> {
    let app = &admin.app;
    let mut found: Vec<_> = app
        .index_fault()
        .map(SetupFault::Index)
        .into_iter()
        .collect();
    let workers = app.fleet.snapshot();
    if workers.is_empty() && waiting(admin).is_empty() {
        found.push(SetupFault::NoWorker {
            remedy: match &admin.workers {
                Some(_) => "declare one by --worker, by `workers` in the file, or by POST /workers",
                None => "start a warmroute-shim with this namespace beside each engine",
            },
        });
    }
    let models = only_prefill(workers.iter().map(|worker| &worker.entry));
    found.extend(models.map(|model| SetupFault::OnlyPrefill { model }));
    if app.policy.reads_index() {
        let table = app.tokenizers.current();
        let missing = table.models().filter_map(|(model, entry)| {
            let is_missing = matches!(entry.state, TokenizerState::Missing);
            let none = || "set --tokenizer, `models` or `models_dir`".into();
            is_missing.then(|| SetupFault::NoTokenizer {
                model: model.clone(),
                why: entry.problem.clone().unwrap_or_else(none),
            })
        });
        found.extend(missing);
    }
    found
}

/// The models that no worker answers, adapters included.
fn only_prefill<'a>(
    workers: impl Iterator<Item = &'a WorkerEntry>,
) -> impl Iterator<Item = String> {
    let mut answered: BTreeMap<&str, bool> = BTreeMap::new();
    for entry in workers {
        let adapters = entry.loras.iter().map(|lora| &lora.name);
        for model in entry.models.iter().chain(adapters) {
            *answered.entry(model).or_default() |= entry.role != WorkerRole::Prefill;
        }
    }
    let unanswered = answered.into_iter().filter(|(_, is_answered)| !is_answered);
    let names: Vec<String> = unanswered.map(|(model, _)| model.to_owned()).collect();
    names.into_iter()
}

/// The workers of this process whose engines were not reached, or not accepted.
pub(crate) fn waiting(admin: &Admin) -> Vec<WaitingWorker> {
    let Some(workers) = &admin.workers else {
        return Vec::new();
    };
    let faults = workers.engine_faults().into_iter();
    let absent = faults.filter(|(worker, _)| !admin.app.fleet.contains(worker));
    let shown = absent.map(|(worker, fault)| {
        let since = unix_time().saturating_sub(fault.since.elapsed());
        WaitingWorker {
            worker,
            url: fault.url,
            state: "waiting",
            reason: fault.why,
            since_unix_s: since.as_secs(),
        }
    });
    shown.collect()
}

/// Logs the faults that last, until stopped. Shims log those of their engines, and the connection to
/// NATS its own.
pub(crate) async fn watch(admin: Arc<Admin>, stop: CancellationToken) {
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut log = FaultLog::default();
    while stop.run_until_cancelled(ticks.tick()).await.is_some() {
        let mut faults = faults(&admin);
        faults.retain(|fault| *fault != SetupFault::Index(IndexFault::PlaneAway));
        for change in log.look(faults) {
            match change {
                FaultChange::Began(fault) => tracing::warn!("{fault}"),
                FaultChange::Ended(fault) => tracing::info!(fault = %fault, "no longer so"),
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum FaultChange {
    Began(SetupFault),
    Ended(SetupFault),
}

/// How many looks in a row found each fault.
#[derive(Default)]
struct FaultLog(BTreeMap<SetupFault, u32>);

impl FaultLog {
    fn look(&mut self, found: Vec<SetupFault>) -> Vec<FaultChange> {
        let before = std::mem::take(&mut self.0);
        let mut changes = Vec::new();
        for fault in found {
            let looks = before
                .get(&fault)
                .map_or(1, |looks| looks.saturating_add(1));
            if looks == LOOKS {
                changes.push(FaultChange::Began(fault.clone()));
            }
            self.0.insert(fault, looks);
        }
        let ended = before
            .into_iter()
            .filter(|(fault, looks)| *looks >= LOOKS && !self.0.contains_key(fault));
        changes.extend(ended.map(|(fault, _)| FaultChange::Ended(fault)));
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_only_prefill_workers_serve_is_a_fault() {
        let entry = |name: &str, model: &str, role| WorkerEntry {
            models: vec![model.into()],
            role,
            ..WorkerEntry::new(name, "http://h:1")
        };
        let workers = [
            entry("a", "m", WorkerRole::Prefill),
            entry("b", "m", WorkerRole::Decode),
            entry("c", "n", WorkerRole::Prefill),
        ];
        let found = |workers: &[WorkerEntry]| only_prefill(workers.iter()).collect::<Vec<_>>();
        assert_eq!(found(&workers), ["n"]);
        assert_eq!(found(&workers[..1]), ["m"]);
        assert_eq!(found(&workers[1..2]), [""; 0]);
    }

    #[test]
    fn a_fault_that_lasts_is_logged_once_and_so_is_its_end() {
        let mut log = FaultLog::default();
        let fault = || SetupFault::Index(IndexFault::NoneReady);
        assert_eq!(log.look(vec![fault()]), []);
        assert_eq!(log.look(Vec::new()), [], "a short one");
        assert_eq!(log.look(vec![fault()]), []);
        assert_eq!(log.look(vec![fault()]), [FaultChange::Began(fault())]);
        assert_eq!(log.look(vec![fault()]), []);
        assert_eq!(log.look(Vec::new()), [FaultChange::Ended(fault())]);
        assert_eq!(log.look(Vec::new()), []);
    }
}
