//! The models of the fleet, as an immutable catalogue that requests read without a lock.

use std::collections::BTreeMap;

use warmroute_proto::BlockSize;
use warmroute_proto::registry::WorkerEntry;

use super::checks::CheckResult;
use super::state::FleetWorker;

#[derive(Clone, Debug, Default)]
pub(crate) struct ModelCatalog {
    pub models: BTreeMap<String, CatalogModel>,
    /// Some worker is healthy and has reported its models.
    pub usable: bool,
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

/// The prompts that the router tokenizes as the model's engines do: some worker passed the check and
/// none failed it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Parity {
    pub chat: bool,
    pub chat_with_tools: bool,
    pub text: bool,
}

/// Results of one check over the workers of a model.
#[derive(Clone, Copy, Debug, Default)]
struct Votes {
    passed: bool,
    failed: bool,
}

impl ModelCatalog {
    /// `block_size`: the operator's, which takes precedence over the engines'.
    pub(super) fn of<'a>(
        workers: impl Iterator<Item = &'a FleetWorker>,
        block_size: Option<BlockSize>,
    ) -> Self {
        let mut catalog = Self::default();
        let mut votes: BTreeMap<String, [Votes; 3]> = BTreeMap::new();
        for worker in workers {
            catalog.usable |= worker.serves();
            let checks = &worker.checks;
            for (name, model) in models(&worker.entry, block_size) {
                let votes = votes.entry(name.clone()).or_default();
                let results = [&checks.chat, &checks.chat_with_tools, &checks.text];
                for (votes, result) in votes.iter_mut().zip(results) {
                    votes.count(result);
                }
                let [chat, chat_with_tools, text] = votes.map(Votes::trusted);
                let known = catalog.models.entry(name).or_insert_with(|| model.clone());
                known.block_size = known.block_size.or(model.block_size);
                known.max_model_len = known.max_model_len.or(model.max_model_len);
                known.parity = Parity {
                    chat,
                    chat_with_tools,
                    text,
                };
            }
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

impl Votes {
    const fn count(&mut self, result: &CheckResult) {
        self.passed |= result.passed();
        self.failed |= result.is_failure();
    }

    const fn trusted(self) -> bool {
        self.passed && !self.failed
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
