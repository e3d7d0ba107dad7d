//! What a request needs to know of the models, without a lock.

use std::collections::BTreeMap;

use warmroute_proto::BlockSize;
use warmroute_proto::registry::WorkerEntry;

use super::{Check, Member};

/// The models of the fleet.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    pub models: BTreeMap<String, ModelView>,
    /// Some worker is healthy and says what it serves.
    pub usable: bool,
}

/// One model name, base model or adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ModelView {
    /// The base model of an adapter, where the engine tells it.
    pub parent: Option<String>,
    pub adapter: bool,
    pub max_model_len: Option<u32>,
    pub block_size: Option<BlockSize>,
    /// Its chats are tokenized here as there: some worker showed it, none contradicted.
    pub chat: bool,
    /// So are its chats with tools.
    pub chat_with_tools: bool,
    /// So are its texts.
    pub text: bool,
}

/// How often workers showed that something is equal, and how often that it is not.
#[derive(Clone, Copy, Debug, Default)]
struct Votes {
    passed: bool,
    failed: bool,
}

#[derive(Clone, Debug, Default)]
struct Tally {
    chat: Votes,
    chat_with_tools: Votes,
    text: Votes,
}

impl View {
    pub(super) fn of<'a>(
        members: impl Iterator<Item = &'a Member>,
        block_size: Option<BlockSize>,
    ) -> Self {
        let mut view = Self::default();
        let mut tallies: BTreeMap<String, Tally> = BTreeMap::new();
        for member in members {
            view.usable |= member.serves();
            for (name, model) in models(&member.entry, block_size) {
                let tally = tallies.entry(name.clone()).or_default();
                tally.chat.count(&member.checks.chat);
                tally.chat_with_tools.count(&member.checks.chat_with_tools);
                tally.text.count(&member.checks.text);
                let known = view.models.entry(name).or_insert_with(|| model.clone());
                known.block_size = known.block_size.or(model.block_size);
                known.max_model_len = known.max_model_len.or(model.max_model_len);
            }
        }
        for (name, model) in &mut view.models {
            if let Some(tally) = tallies.get(name) {
                model.chat = tally.chat.trusted();
                model.chat_with_tools = tally.chat_with_tools.trusted();
                model.text = tally.text.trusted();
            }
        }
        view
    }

    /// The one base model, where the fleet serves only one.
    pub(crate) fn only_model(&self) -> Option<&str> {
        let mut bases = self.models.iter().filter(|(_, model)| !model.adapter);
        match (bases.next(), bases.next()) {
            (Some((name, _)), None) => Some(name),
            (Some(_), Some(_)) | (None, _) => None,
        }
    }
}

impl Votes {
    const fn count(&mut self, check: &Check) {
        self.passed |= check.passed();
        self.failed |= check.is_failure();
    }

    const fn trusted(self) -> bool {
        self.passed && !self.failed
    }
}

fn models(
    entry: &WorkerEntry,
    block_size: Option<BlockSize>,
) -> impl Iterator<Item = (String, ModelView)> {
    let base = ModelView {
        parent: None,
        adapter: false,
        max_model_len: entry.max_model_len,
        block_size: block_size.or(entry.block_size),
        chat: false,
        chat_with_tools: false,
        text: false,
    };
    let adapter = base.clone();
    let bases = entry
        .models
        .iter()
        .map(move |name| (name.clone(), base.clone()));
    let adapters = entry.loras.iter().map(move |lora| {
        let view = ModelView {
            parent: lora.parent.clone(),
            adapter: true,
            ..adapter.clone()
        };
        (lora.name.clone(), view)
    });
    bases.chain(adapters)
}
