//! Loads the tokenizers of the fleet's models, one at a time, off the runtime.
//!
//! Files are read again after each load of the settings (SIGHUP, or a changed file). Equal content
//! keeps the tokenizer. A file that cannot be loaded keeps the old one; it is tried again every
//! [`RETRY`]. A model that no worker serves loses its tokenizer. At `max_tokenizer_bytes` no further
//! one is loaded.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use tokio::task::spawn_blocking;
use tokio::time::{Duration, Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::locate::{HubCache, ModelNames, locate};
use super::{
    LoadedTokenizer, ModelTokenizer, TokenizerState, TokenizerTable, TokenizerVersion, Tokenizers,
};
use crate::config::Config;
use crate::fleet::Fleet;
use crate::metrics::{LoadResult, Metrics};
use crate::settings::{LiveSettings, Settings};
use crate::tokenize::{EncoderKind, ModelSource, Tokenizer, TokenizerLoadError};

/// Time between two looks at the settings.
const PERIOD: Duration = Duration::from_secs(1);

/// Time after which a missing or broken tokenizer is looked for again.
const RETRY: Duration = Duration::from_secs(30);

/// Generated texts on which the two encoders are compared. Debug builds are slow.
const COMPARED_TEXTS: usize = if cfg!(debug_assertions) { 200 } else { 2_000 };

/// The task that keeps [`Tokenizers`] as the fleet and the settings need them.
pub(crate) struct TokenizerLoader {
    tokenizers: Arc<Tokenizers>,
    fleet: Arc<Fleet>,
    settings: Arc<LiveSettings>,
    metrics: Arc<Metrics>,
    hub: HubCache,
    /// `--tokenizer`.
    default: Option<PathBuf>,
    sources: BTreeMap<ModelSource, KnownSource>,
    models: BTreeMap<String, KnownModel>,
    /// The settings that the files were read under.
    read_under: Arc<Settings>,
    retry_at: Instant,
}

/// The tokenizer of `--tokenizer`.
pub(crate) struct DefaultTokenizer {
    path: PathBuf,
    loaded: Arc<LoadedTokenizer>,
}

impl DefaultTokenizer {
    /// Loads it, if there is one. A failure ends the start.
    pub(crate) async fn load(
        config: &Config,
        tokenizers: &Tokenizers,
    ) -> anyhow::Result<Option<Self>> {
        let Some(path) = config.tokenizer.clone() else {
            return Ok(None);
        };
        let (source, version) = (plain_source(&path), tokenizers.next_version());
        let read = spawn_blocking(move || read(&source, None, u64::MAX, version)).await?;
        let shown = path.display();
        match read.with_context(|| format!("loading the tokenizer of {shown}"))? {
            SourceRead::Loaded(loaded) => Ok(Some(Self {
                path,
                loaded: Arc::new(*loaded),
            })),
            SourceRead::Unchanged => anyhow::bail!("the tokenizer of {shown} was loaded before"),
        }
    }
}

/// Reads the tokenizers that `--tokenizer` and the settings name, under the bound in bytes. Returns
/// their number.
pub(crate) fn check(default: Option<&Path>, settings: &Settings) -> anyhow::Result<usize> {
    let hub = HubCache::from_env();
    let mut sources: BTreeMap<ModelSource, String> = BTreeMap::new();
    for served in settings.models.names() {
        let names = ModelNames { served, root: None };
        let found = locate(names, settings, default, &hub);
        let found = found.with_context(|| format!("models.{served:?}.tokenizer"))?;
        if let Some(source) = found {
            sources.insert(source, format!("models.{served:?}"));
        }
    }
    if let Some(path) = default {
        sources.insert(plain_source(path), "--tokenizer".to_owned());
    }
    let mut left = settings.max_tokenizer_bytes();
    for (source, named) in &sources {
        let read = read(source, None, left, TokenizerVersion::default());
        match read.with_context(|| format!("{named}: {}", source.path.display()))? {
            SourceRead::Loaded(loaded) => left = left.saturating_sub(loaded.bytes),
            SourceRead::Unchanged => {}
        }
    }
    Ok(sources.len())
}

/// One source of a tokenizer, shared by the models that use it.
#[derive(Default)]
struct KnownSource {
    loaded: Option<Arc<LoadedTokenizer>>,
    problem: Option<Arc<str>>,
    /// Its files are to be read.
    due: bool,
}

/// Where a model's tokenizer is, or why it has none.
struct KnownModel {
    root: Option<String>,
    source: Result<ModelSource, Arc<str>>,
    /// Logged last.
    logged: Option<Arc<str>>,
}

/// The result of reading a source's files.
enum SourceRead {
    Unchanged,
    Loaded(Box<LoadedTokenizer>),
}

#[derive(Debug, thiserror::Error)]
enum SourceReadError {
    #[error(transparent)]
    Load(#[from] TokenizerLoadError),
    #[error(
        "its tokenizer has {bytes} bytes as a tokenizer.json, and max_tokenizer_bytes leaves {left}"
    )]
    NoRoom { bytes: u64, left: u64 },
}

impl TokenizerLoader {
    pub(crate) fn new(
        tokenizers: Arc<Tokenizers>,
        fleet: Arc<Fleet>,
        settings: Arc<LiveSettings>,
        metrics: Arc<Metrics>,
        default: Option<DefaultTokenizer>,
    ) -> Self {
        let path = default.as_ref().map(|default| default.path.clone());
        let known = default.map(|default| {
            let known = KnownSource {
                loaded: Some(default.loaded),
                ..KnownSource::default()
            };
            (plain_source(&default.path), known)
        });
        Self {
            read_under: settings.current(),
            tokenizers,
            fleet,
            settings,
            metrics,
            hub: HubCache::from_env(),
            default: path,
            sources: known.into_iter().collect(),
            models: BTreeMap::new(),
            retry_at: Instant::now() + RETRY,
        }
    }

    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut changes = self.fleet.changes();
        let tokenizers = Arc::clone(&self.tokenizers);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
                _ = changes.changed() => {}
                () = tokenizers.roots_changed.notified() => {}
            }
            // Cancel-safe: what a cancelled round loaded is lost with the process.
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.round() => {}
            }
        }
    }

    async fn round(&mut self) {
        let served = self.fleet.catalog().base_models();
        let settings = self.settings.current();
        let is_reload = !Arc::ptr_eq(&settings, &self.read_under);
        let is_retry = Instant::now() >= self.retry_at;
        if is_retry {
            self.retry_at = Instant::now() + RETRY;
        }
        let gone = self.models.len();
        self.models.retain(|name, _| served.contains(name));
        let mut is_changed = self.models.len() < gone;
        let roots = {
            let mut roots = self.tokenizers.roots();
            roots.retain(|name, _| served.contains(name));
            roots.clone()
        };
        let is_due = |name: &String| {
            let known = self.models.get(name);
            known.is_none_or(|known| {
                let retries = is_retry && known.source.is_err();
                is_reload || retries || known.root.as_ref() != roots.get(name)
            })
        };
        let due: BTreeSet<String> = served.iter().filter(|name| is_due(name)).cloned().collect();
        if !due.is_empty() {
            is_changed = true;
            self.locate(due, &roots, Arc::clone(&settings)).await;
        }
        for known in self.sources.values_mut() {
            known.due |= is_reload || (is_retry && known.problem.is_some());
        }
        self.read_under = settings;
        if is_changed || self.sources.values().any(|known| known.due) {
            self.load_due().await;
        }
    }

    /// Finds the files of these models.
    async fn locate(
        &mut self,
        due: BTreeSet<String>,
        roots: &BTreeMap<String, String>,
        settings: Arc<Settings>,
    ) {
        let (hub, default) = (self.hub.clone(), self.default.clone());
        let wanted: Vec<_> = due
            .into_iter()
            .map(|name| (roots.get(&name).cloned(), name))
            .collect();
        let find = move || {
            let find = |(root, served): (Option<String>, String)| {
                let names = ModelNames {
                    served: &served,
                    root: root.as_deref(),
                };
                let source = match locate(names, &settings, default.as_deref(), &hub) {
                    Ok(Some(source)) => Ok(source),
                    Ok(None) => Err("no tokenizer is configured for it".into()),
                    Err(error) => Err(error.to_string().into()),
                };
                (served, root, source)
            };
            wanted.into_iter().map(find).collect::<Vec<_>>()
        };
        let Ok(found) = spawn_blocking(find).await else {
            return;
        };
        for (name, root, source) in found {
            let logged = self.models.remove(&name).and_then(|known| known.logged);
            self.models.insert(
                name,
                KnownModel {
                    root,
                    source,
                    logged,
                },
            );
        }
        let used = self
            .models
            .values()
            .filter_map(|known| known.source.as_ref().ok());
        let used: BTreeSet<ModelSource> = used.cloned().collect();
        self.sources.retain(|source, _| used.contains(source));
        for source in used {
            self.sources.entry(source).or_insert_with(|| KnownSource {
                due: true,
                ..KnownSource::default()
            });
        }
    }

    /// Reads the sources that are due, and publishes after each.
    async fn load_due(&mut self) {
        self.publish();
        while let Some((source, known)) = self.sources.iter().find(|(_, known)| known.due) {
            let (source, before) = (source.clone(), known.loaded.clone());
            let taken: u64 = self
                .sources
                .iter()
                .filter(|(other, _)| **other != source)
                .filter_map(|(_, known)| Some(known.loaded.as_ref()?.bytes))
                .sum();
            let left = self.read_under.max_tokenizer_bytes().saturating_sub(taken);
            let version = self.tokenizers.next_version();
            let named = source.clone();
            let read = spawn_blocking(move || read(&named, before.as_deref(), left, version));
            let result = match read.await {
                Ok(Ok(read)) => Ok(read),
                Ok(Err(error)) => Err(error.to_string()),
                Err(_) => Err("the tokenizer library panicked".to_owned()),
            };
            let Some(known) = self.sources.get_mut(&source) else {
                continue;
            };
            known.due = false;
            match result {
                Ok(SourceRead::Unchanged) => known.problem = None,
                Ok(SourceRead::Loaded(loaded)) => {
                    known.problem = None;
                    known.loaded = Some(Arc::new(*loaded));
                    self.metrics.tokenizer_loaded(LoadResult::Loaded);
                }
                Err(problem) => {
                    self.metrics.tokenizer_loaded(LoadResult::Failed);
                    known.problem = Some(format!("{}: {problem}", source.path.display()).into());
                }
            }
            self.publish();
        }
    }

    /// Publishes the table, then has the workers checked whose models have another tokenizer.
    fn publish(&mut self) {
        let entries = self.models.iter().map(|(name, known)| {
            let entry = match &known.source {
                Ok(source) => self
                    .sources
                    .get(source)
                    .map_or_else(Default::default, entry),
                Err(problem) => ModelTokenizer {
                    state: TokenizerState::Missing,
                    problem: Some(Arc::clone(problem)),
                },
            };
            (name.clone(), entry)
        });
        let table = TokenizerTable {
            models: entries.collect(),
        };
        for (name, known) in &mut self.models {
            let problem = table.get(name).and_then(|entry| entry.problem.clone());
            if problem != known.logged {
                log(name, problem.as_deref(), table.of(name));
                known.logged = problem;
            }
        }
        let before = self.tokenizers.current();
        let is_changed = |name: &&String| {
            let (old, new) = (before.get(name), table.get(name));
            let version = |table: &TokenizerTable| table.of(name).map(|loaded| loaded.version);
            let is_known = new.is_some_and(|new| !matches!(new.state, TokenizerState::Loading));
            let labels = [old, new].map(|entry| entry.map(ModelTokenizer::label));
            is_known && (labels[0] != labels[1] || version(&before) != version(&table))
        };
        let changed: BTreeSet<String> = self.models.keys().filter(is_changed).cloned().collect();
        self.tokenizers.publish(table);
        self.fleet.recheck(&changed);
    }
}

fn entry(known: &KnownSource) -> ModelTokenizer {
    ModelTokenizer {
        state: match (&known.loaded, &known.problem) {
            (Some(loaded), _) => TokenizerState::Ready(Arc::clone(loaded)),
            (None, None) => TokenizerState::Loading,
            (None, Some(_)) => TokenizerState::Missing,
        },
        problem: known.problem.clone(),
    }
}

fn log(model: &str, problem: Option<&str>, kept: Option<&Arc<LoadedTokenizer>>) {
    match (problem, kept) {
        (None, _) => tracing::info!(model, "the model's tokenizer is in order again"),
        (Some(problem), Some(_)) => {
            tracing::error!(model, problem, "tokenizer not reloaded, old one kept");
        }
        (Some(problem), None) => tracing::warn!(
            model,
            problem,
            "the model has no tokenizer: its prompts in text are routed by load only"
        ),
    }
}

fn plain_source(path: &Path) -> ModelSource {
    ModelSource {
        path: path.to_owned(),
        ..ModelSource::default()
    }
}

/// Reads a source's files. `left`: bytes that its tokenizer may have.
fn read(
    source: &ModelSource,
    before: Option<&LoadedTokenizer>,
    left: u64,
    version: TokenizerVersion,
) -> Result<SourceRead, SourceReadError> {
    let started = Instant::now();
    let files = source.read().map_err(TokenizerLoadError::from)?;
    let (digest, bytes) = (files.digest(), files.tokenizer_bytes() as u64);
    if before.is_some_and(|before| before.digest == digest) {
        return Ok(SourceRead::Unchanged);
    }
    if bytes > left {
        return Err(SourceReadError::NoRoom { bytes, left });
    }
    let tokenizer = Tokenizer::of_files(files)?;
    let differs = tokenizer.compare_generated(COMPARED_TEXTS, Uuid::new_v4().as_u64_pair().0);
    let path = source.path.display();
    match (differs, tokenizer.encoder()) {
        (Some(text), _) => tracing::error!(
            %path, text,
            "token ids of a generated text differ from the reference's: the reference is used"
        ),
        (None, EncoderKind::Own) => {
            tracing::info!(%path, "tokenizer loaded, texts are encoded by the own encoder");
        }
        (None, EncoderKind::Reference) => tracing::warn!(
            %path,
            "the own encoder does not know this kind of tokenizer: the slower reference is used"
        ),
    }
    if let Err(reason) = tokenizer.templates() {
        tracing::warn!(%path, %reason, "chats are routed by load only");
    }
    Ok(SourceRead::Loaded(Box::new(LoadedTokenizer {
        tokenizer,
        version,
        path: source.path.clone(),
        bytes,
        load_time: started.elapsed(),
        digest,
    })))
}

#[cfg(test)]
mod tests;
