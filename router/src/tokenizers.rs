//! The tokenizers of the fleet's models.
//!
//! `Tokenizers` holds an immutable table, which requests read without waiting. One task, the
//! `TokenizerLoader`, finds, loads, replaces and drops tokenizers as workers come and go and as
//! settings change. A model without a tokenizer is routed by load, and the table says why.
//!
//! A tokenizer has a version. Checks name the version that they compared with an engine's
//! `/tokenize`, and prompts are credited only by a tokenizer of that version: a replaced tokenizer
//! gives no credit before it is checked.

mod loader;
mod locate;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use serde::Serialize;
use tokio::sync::Notify;
use tokio::time::Duration;

use crate::metrics::TokenizerStatus;
use crate::tokenize::{EncoderKind, Tokenizer};

pub(crate) use loader::{DefaultTokenizer, TokenizerLoader, check};
pub(crate) use locate::HubCache;
pub use locate::LocateError;

/// Bytes of all caches of token ids together.
const CACHE_BYTES: usize = 256 << 20;

/// Names one tokenizer with its templates and rules. Never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct TokenizerVersion(u64);

impl TokenizerVersion {
    pub(crate) const fn number(self) -> u64 {
        self.0
    }
}

/// A tokenizer in use.
#[derive(Debug)]
pub(crate) struct LoadedTokenizer {
    pub tokenizer: Tokenizer,
    pub version: TokenizerVersion,
    pub path: PathBuf,
    /// Bytes of its `tokenizer.json`, as it is or converted.
    pub bytes: u64,
    pub load_time: Duration,
    /// [`crate::tokenize::ModelFiles::digest`].
    digest: u64,
}

/// What a model has.
#[derive(Clone, Debug, Default)]
pub(crate) enum TokenizerState {
    #[default]
    Loading,
    Ready(Arc<LoadedTokenizer>),
    /// [`ModelTokenizer::problem`] says why.
    Missing,
}

/// One model's tokenizer.
#[derive(Clone, Debug, Default)]
pub(crate) struct ModelTokenizer {
    pub state: TokenizerState,
    /// Why there is none, or why the old one is kept.
    pub problem: Option<Arc<str>>,
}

/// The tokenizers by the name of the base model.
#[derive(Debug, Default)]
pub(crate) struct TokenizerTable {
    models: BTreeMap<String, ModelTokenizer>,
}

/// The table in force, and what workers report about their models.
#[derive(Debug, Default)]
pub(crate) struct Tokenizers {
    table: RwLock<Arc<TokenizerTable>>,
    /// The root that engines report, by model. At most one entry for each model of the fleet.
    roots: Mutex<BTreeMap<String, String>>,
    roots_changed: Notify,
    versions: AtomicU64,
}

impl TokenizerTable {
    /// `None` before the loader knows the model.
    pub(crate) fn get(&self, model: &str) -> Option<&ModelTokenizer> {
        self.models.get(model)
    }

    /// The tokenizer of a base model.
    pub(crate) fn of(&self, model: &str) -> Option<&Arc<LoadedTokenizer>> {
        match &self.models.get(model)?.state {
            TokenizerState::Ready(loaded) => Some(loaded),
            TokenizerState::Loading | TokenizerState::Missing => None,
        }
    }

    pub(crate) fn models(&self) -> impl Iterator<Item = (&String, &ModelTokenizer)> {
        self.models.iter()
    }

    /// Each loaded tokenizer once.
    pub(crate) fn loaded(&self) -> impl Iterator<Item = &Arc<LoadedTokenizer>> {
        let models = self.models.keys().filter_map(|model| self.of(model));
        let distinct: BTreeMap<_, _> = models.map(|loaded| (loaded.version, loaded)).collect();
        distinct.into_values()
    }

    /// The slowest encoder in use.
    pub(crate) fn encoder(&self) -> EncoderKind {
        let mut loaded = self.models.keys().filter_map(|model| self.of(model));
        if loaded.any(|one| one.tokenizer.encoder() == EncoderKind::Reference) {
            EncoderKind::Reference
        } else {
            EncoderKind::Own
        }
    }

    /// Sums over all tokenizers; `None` without any.
    pub(crate) fn status(&self) -> Option<TokenizerStatus> {
        let mut status = TokenizerStatus {
            encoder: self.encoder(),
            ..self
                .loaded()
                .next()
                .map(|one| TokenizerStatus::of(&one.tokenizer))?
        };
        for loaded in self.loaded().skip(1) {
            status.add(&TokenizerStatus::of(&loaded.tokenizer));
        }
        Some(status)
    }

    #[cfg(test)]
    pub(crate) fn with(models: &[&str], tokenizer: Tokenizer) -> Self {
        let loaded = Arc::new(LoadedTokenizer {
            tokenizer,
            version: TokenizerVersion(1),
            path: PathBuf::new(),
            bytes: 0,
            load_time: Duration::ZERO,
            digest: 0,
        });
        let entry = |name: &&str| {
            let state = TokenizerState::Ready(Arc::clone(&loaded));
            let problem = None;
            ((*name).to_owned(), ModelTokenizer { state, problem })
        };
        Self {
            models: models.iter().map(entry).collect(),
        }
    }
}

impl ModelTokenizer {
    pub(crate) const fn label(&self) -> &'static str {
        match self.state {
            TokenizerState::Loading => "loading",
            TokenizerState::Ready(_) => "loaded",
            TokenizerState::Missing => "missing",
        }
    }
}

impl Tokenizers {
    pub(crate) fn current(&self) -> Arc<TokenizerTable> {
        Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes the root that an engine reports for a model.
    pub(crate) fn note_root(&self, model: &str, root: String) {
        let before = self.roots().insert(model.to_owned(), root.clone());
        if before.as_ref() != Some(&root) {
            self.roots_changed.notify_one();
        }
    }

    fn roots(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.roots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn publish(&self, table: TokenizerTable) {
        let count = table.loaded().count().max(1);
        for loaded in table.loaded() {
            loaded.tokenizer.set_cache_bytes_max(CACHE_BYTES / count);
        }
        *self.table.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(table);
    }

    fn next_version(&self) -> TokenizerVersion {
        TokenizerVersion(self.versions.fetch_add(1, Ordering::Relaxed))
    }
}
