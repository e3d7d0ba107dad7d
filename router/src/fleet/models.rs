//! The models of the fleet, as an immutable catalogue that requests read without a lock.

use std::collections::BTreeMap;

use warmroute_proto::BlockSize;
use warmroute_proto::registry::WorkerEntry;

use super::checks::{CheckResult, RegistrationChecks};
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

/// The kinds of prompts that the router tokenizes as the model's engines do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Parity {
    pub chat: bool,
    pub chat_with_tools: bool,
    pub text: bool,
}

impl ModelCatalog {
    /// `block_size`: the operator's, which takes precedence over the engines'.
    pub(super) fn of<'a>(
        workers: impl Iterator<Item = &'a FleetWorker>,
        block_size: Option<BlockSize>,
    ) -> Self {
        let mut catalog = Self::default();
        let mut checks: BTreeMap<String, Vec<&RegistrationChecks>> = BTreeMap::new();
        for worker in workers {
            catalog.usable |= worker.serves();
            for (name, model) in models(&worker.entry, block_size) {
                checks.entry(name.clone()).or_default().push(&worker.checks);
                let known = catalog.models.entry(name).or_insert_with(|| model.clone());
                known.block_size = known.block_size.or(model.block_size);
                known.max_model_len = known.max_model_len.or(model.max_model_len);
            }
        }
        for (model, checks) in catalog.models.values_mut().zip(checks.values()) {
            model.parity = Parity {
                chat: is_trusted(checks, |checks| &checks.chat),
                chat_with_tools: is_trusted(checks, |checks| &checks.chat_with_tools),
                text: is_trusted(checks, |checks| &checks.text),
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

/// Some worker passed the check, and none failed it.
fn is_trusted(
    checks: &[&RegistrationChecks],
    check: fn(&RegistrationChecks) -> &CheckResult,
) -> bool {
    let mut results = checks.iter().map(|checks| check(checks));
    results.clone().any(CheckResult::passed) && !results.any(CheckResult::is_failure)
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
