//! The models of the fleet, as an immutable catalogue that requests read without a lock.

use std::collections::{BTreeMap, BTreeSet};

use warmroute_proto::registry::{Lora, WorkerEntry, WorkerRole};
use warmroute_proto::{BlockCut, BlockSize, WorkerId};

use super::checks::{CheckResult, ModelChecks, TokenChecks};
use super::endpoints::EndpointTable;
use super::state::FleetWorker;
use crate::metrics::{ModelKind, SeriesTable, ServedModel};
use crate::tokenizers::TokenizerVersion;

#[derive(Clone, Debug, Default)]
pub(crate) struct ModelCatalog {
    pub models: BTreeMap<String, CatalogModel>,
    /// Some worker is healthy and has reported its models.
    pub usable: bool,
    /// Some worker has not reported its models.
    pub incomplete: bool,
    /// The metrics of each model.
    pub series: SeriesTable,
    /// For gateways.
    pub endpoints: EndpointTable,
}

/// Each costs an index query for each prompt.
const CUTS_MAX: usize = 4;

/// One model name, base model or adapter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CatalogModel {
    /// The base model of an adapter, where the engine reports it.
    pub parent: Option<String>,
    /// The model whose tokenizer it has: its own name for a base model.
    pub base: String,
    pub adapter: bool,
    pub max_model_len: Option<u32>,
    /// How its workers cut prompts into blocks; the first has the operator's size, or else the
    /// smallest. At most [`CUTS_MAX`]: workers with others get its prompts by load only.
    pub cuts: Vec<BlockCut>,
    pub parity: Parity,
    /// Some worker has the role prefill, so that requests may be split.
    pub has_prefill: bool,
}

/// For each kind of prompts, whether the router tokenizes as the model's engines do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Parity {
    /// The tokenizer that the checks compared.
    pub tokenizer: Option<TokenizerVersion>,
    pub chat: PromptTrust,
    pub chat_with_tools: PromptTrust,
    pub text: PromptTrust,
    pub responses: PromptTrust,
    pub messages: PromptTrust,
    pub messages_with_tools: PromptTrust,
}

/// The check results of a model's workers for one kind of prompts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PromptTrust {
    /// Some worker passed the check.
    pub proven: bool,
    /// All workers passed it.
    pub all_passed: bool,
    /// The workers that failed it. They get such prompts by load only.
    pub mismatched: Vec<WorkerId>,
}

impl ModelCatalog {
    /// `block_size`: the operator's, for workers whose engine reports none. `before`: the catalogue
    /// that this one replaces.
    pub(super) fn of<'a>(
        workers: impl Iterator<Item = &'a FleetWorker> + Clone,
        block_size: Option<BlockSize>,
        before: &Self,
    ) -> Self {
        let served = workers.clone().flat_map(|worker| served(&worker.entry));
        let mut catalog = Self {
            series: before.series.followed_by(served),
            endpoints: EndpointTable::of(workers.clone()),
            ..Self::default()
        };
        let mut checked: BTreeMap<String, Vec<&FleetWorker>> = BTreeMap::new();
        for worker in workers {
            catalog.usable |= worker.serves();
            catalog.incomplete |= worker.entry.models.is_empty();
            for (name, model) in models(&worker.entry) {
                checked.entry(name.clone()).or_default().push(worker);
                let known = catalog.models.entry(name).or_insert_with(|| model.clone());
                known.max_model_len = known.max_model_len.or(model.max_model_len);
                known.has_prefill |= model.has_prefill;
            }
        }
        for (model, workers) in catalog.models.values_mut().zip(checked.values()) {
            model.cuts = cuts(workers, block_size);
            model.parity = Parity::of(&model.base, workers);
        }
        catalog
    }

    /// The models that have a tokenizer of their own.
    pub(crate) fn base_models(&self) -> BTreeSet<String> {
        self.models
            .values()
            .map(|model| model.base.clone())
            .collect()
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

impl Parity {
    /// Checks of an older tokenizer than the newest that a worker was compared with do not count.
    fn of(base: &str, workers: &[&FleetWorker]) -> Self {
        let checks = |worker: &&FleetWorker| {
            let checks = worker.checks.models.get(base)?.clone();
            Some((worker.entry.worker.clone(), checks))
        };
        let mut checked: Vec<(WorkerId, ModelChecks)> = workers.iter().filter_map(checks).collect();
        let tokenizer = checked
            .iter()
            .filter_map(|(_, checks)| checks.tokenizer)
            .max();
        checked.retain(|(_, checks)| checks.tokenizer == tokenizer);
        let count = workers.len();
        Self {
            tokenizer,
            chat: PromptTrust::of(&checked, count, |checks| &checks.chat),
            chat_with_tools: PromptTrust::of(&checked, count, |checks| &checks.chat_with_tools),
            text: PromptTrust::of(&checked, count, |checks| &checks.text),
            responses: PromptTrust::of(&checked, count, |checks| &checks.responses),
            messages: PromptTrust::of(&checked, count, |checks| &checks.messages),
            messages_with_tools: PromptTrust::of(&checked, count, |checks| {
                &checks.messages_with_tools
            }),
        }
    }
}

impl PromptTrust {
    /// `workers`: how many there are, checked or not.
    fn of(
        checked: &[(WorkerId, ModelChecks)],
        workers: usize,
        check: fn(&TokenChecks) -> &CheckResult,
    ) -> Self {
        let passed = |(_, checks): &(WorkerId, ModelChecks)| check(&checks.tokens).passed();
        let failed = checked
            .iter()
            .filter(|(_, checks)| check(&checks.tokens).is_failure());
        Self {
            proven: checked.iter().any(passed),
            all_passed: checked.len() == workers && checked.iter().all(passed),
            mismatched: failed.map(|(worker, _)| worker.clone()).collect(),
        }
    }
}

fn served(entry: &WorkerEntry) -> impl Iterator<Item = ServedModel<'_>> {
    let bases = entry.models.iter().map(|name| (name, ModelKind::Base));
    let adapters = entry.loras.iter();
    let adapters = adapters.map(|lora| (&lora.name, ModelKind::Adapter));
    bases.chain(adapters).map(|(model, kind)| ServedModel {
        model,
        worker: &entry.worker,
        kind,
    })
}

fn cuts(workers: &[&FleetWorker], given: Option<BlockSize>) -> Vec<BlockCut> {
    let reported = workers.iter().filter_map(|worker| worker.entry.block_cut());
    let reported: BTreeSet<BlockCut> = reported.collect();
    // A size that no worker can have costs no query.
    let of_given = |size: BlockSize| {
        let mut of_size = reported.iter().copied().filter(|cut| cut.size == size);
        let mut workers = workers.iter();
        let is_unknown = workers.any(|worker| worker.entry.block_size.is_none());
        of_size.next().or_else(|| is_unknown.then(|| size.into()))
    };
    let first = given.and_then(of_given);
    let others = reported.iter().copied().filter(|cut| Some(*cut) != first);
    let cuts = first.into_iter().chain(others);
    cuts.take(CUTS_MAX).collect()
}

fn models(entry: &WorkerEntry) -> impl Iterator<Item = (String, CatalogModel)> {
    let base = CatalogModel {
        parent: None,
        base: String::new(),
        adapter: false,
        max_model_len: entry.max_model_len,
        cuts: Vec::new(),
        parity: Parity::default(),
        has_prefill: entry.role == WorkerRole::Prefill,
    };
    let adapter = CatalogModel {
        adapter: true,
        ..base.clone()
    };
    let bases = entry.models.iter();
    let bases = bases.map(move |name| {
        let model = CatalogModel {
            base: name.clone(),
            ..base.clone()
        };
        (name.clone(), model)
    });
    let adapters = entry.loras.iter().map(move |lora| {
        let model = CatalogModel {
            parent: lora.parent.clone(),
            base: base_of(entry, lora).to_owned(),
            ..adapter.clone()
        };
        (lora.name.clone(), model)
    });
    bases.chain(adapters)
}

/// The adapter's parent where the worker serves it, else the worker's first model.
fn base_of<'e>(entry: &'e WorkerEntry, lora: &'e Lora) -> &'e str {
    let parent = lora
        .parent
        .as_ref()
        .filter(|parent| entry.models.contains(parent));
    let base = parent.or_else(|| entry.models.first());
    base.map_or(lora.name.as_str(), String::as_str)
}
