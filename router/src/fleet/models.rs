//! The models of the fleet, as an immutable catalogue that requests read without a lock.

use std::collections::BTreeMap;

use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::{BlockSize, WorkerId};

use super::checks::{CheckResult, RegistrationChecks};
use super::state::FleetWorker;

#[derive(Clone, Debug, Default)]
pub(crate) struct ModelCatalog {
    pub models: BTreeMap<String, CatalogModel>,
    /// Some worker is healthy and has reported its models.
    pub usable: bool,
    /// Some worker has not reported its models.
    pub incomplete: bool,
}

/// One model name, base model or adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CatalogModel {
    /// The base model of an adapter, where the engine reports it.
    pub parent: Option<String>,
    pub adapter: bool,
    pub max_model_len: Option<u32>,
    pub block_size: Option<BlockSize>,
    pub parity: Parity,
}

/// For each kind of prompts, whether the router tokenizes as the model's engines do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Parity {
    pub chat: PromptTrust,
    pub chat_with_tools: PromptTrust,
    pub text: PromptTrust,
}

/// The check results of a model's workers for one kind of prompts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PromptTrust {
    /// Some worker passed the check.
    pub proven: bool,
    /// The workers that failed it. They get such prompts by load only.
    pub mismatched: Vec<WorkerId>,
}

impl ModelCatalog {
    /// `block_size`: the operator's, which takes precedence over the engines'.
    pub(super) fn of<'a>(
        workers: impl Iterator<Item = &'a FleetWorker>,
        block_size: Option<BlockSize>,
    ) -> Self {
        let mut catalog = Self::default();
        let mut checked: BTreeMap<String, Vec<&FleetWorker>> = BTreeMap::new();
        for worker in workers {
            catalog.usable |= worker.serves();
            catalog.incomplete |= worker.entry.models.is_empty();
            for (name, model) in models(&worker.entry, block_size) {
                checked.entry(name.clone()).or_default().push(worker);
                let known = catalog.models.entry(name).or_insert_with(|| model.clone());
                known.block_size = known.block_size.or(model.block_size);
                known.max_model_len = known.max_model_len.or(model.max_model_len);
            }
        }
        for (model, workers) in catalog.models.values_mut().zip(checked.values()) {
            model.parity = Parity {
                chat: PromptTrust::of(workers, |checks| &checks.chat),
                chat_with_tools: PromptTrust::of(workers, |checks| &checks.chat_with_tools),
                text: PromptTrust::of(workers, |checks| &checks.text),
            };
        }
        catalog
    }

    /// The base model, if the fleet serves exactly one.
    pub(crate) fn only_model(&self) -> Option<&str> {
        let mut bases = self.models.iter().filter(|(_, model)| !model.adapter);
        match (bases.next(), bases.next()) {
            (Some((name, _)), None) => Some(name),
            (Some(_), Some(_)) | (None, _) => None,
        }
    }
}

impl PromptTrust {
    fn of(workers: &[&FleetWorker], check: fn(&RegistrationChecks) -> &CheckResult) -> Self {
        let failed = workers
            .iter()
            .filter(|worker| check(&worker.checks).is_failure());
        Self {
            proven: workers.iter().any(|worker| check(&worker.checks).passed()),
            mismatched: failed.map(|worker| worker.entry.worker.clone()).collect(),
        }
    }
}

fn models(
    entry: &WorkerEntry,
    block_size: Option<BlockSize>,
) -> impl Iterator<Item = (String, CatalogModel)> {
    let base = CatalogModel {
        parent: None,
        adapter: false,
        max_model_len: entry.max_model_len,
        block_size: block_size.or(entry.block_size),
        parity: Parity::default(),
    };
    let adapter = CatalogModel {
        adapter: true,
        ..base.clone()
    };
    let bases = entry.models.iter();
    let bases = bases.map(move |name| (name.clone(), base.clone()));
    let adapters = entry.loras.iter().map(move |lora| {
        let model = CatalogModel {
            parent: lora.parent.clone(),
            ..adapter.clone()
        };
        (lora.name.clone(), model)
    });
    bases.chain(adapters)
}
