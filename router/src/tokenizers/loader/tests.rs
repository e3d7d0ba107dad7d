use std::fs;

use tempfile::TempDir;
use warmroute_proto::registry::WorkerEntry;

use super::*;
use crate::route::Knobs;
use crate::shared_core::SharedCore;
use crate::testing::{ROUTER, core, worker_entry};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures");

/// A directory of models, and a loader for a fleet that serves them.
struct Setup {
    dir: TempDir,
    loader: TokenizerLoader,
}

impl Setup {
    fn new(models: &[(&str, &str)], settings: &str) -> Self {
        let dir = TempDir::new().unwrap();
        for (model, fixture) in models {
            let to = dir.path().join(model);
            fs::create_dir_all(&to).unwrap();
            for file in fs::read_dir(format!("{FIXTURES}/{fixture}")).unwrap() {
                let file = file.unwrap().path();
                fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
            }
        }
        let fleet = Fleet::new(SharedCore::new(core(ROUTER, Knobs::default())), None);
        let metrics = Arc::new(Metrics::new().unwrap());
        let live = Arc::<LiveSettings>::default();
        let tokenizers = Arc::default();
        let setup = Self {
            loader: TokenizerLoader::new(tokenizers, fleet, live, metrics, None),
            dir,
        };
        setup.set(settings);
        setup
    }

    /// Applies settings, as a reload does.
    fn set(&self, settings: &str) {
        let text = format!("models_dir = {:?}\n{settings}", self.dir.path());
        self.loader
            .settings
            .replace(Settings::parse(&text).unwrap());
    }

    fn register(&self, worker: &str, model: &str) {
        self.loader.fleet.register(WorkerEntry {
            models: vec![model.into()],
            loras: Vec::new(),
            ..worker_entry(worker, 16)
        });
    }

    fn entry(&self, model: &str) -> (&'static str, String) {
        let table = self.loader.tokenizers.current();
        let entry = table.get(model).unwrap();
        let problem = entry.problem.as_deref().unwrap_or_default();
        (entry.label(), problem.to_owned())
    }

    fn version(&self, model: &str) -> TokenizerVersion {
        let table = self.loader.tokenizers.current();
        table.of(model).unwrap().version
    }

    fn epoch(&self, worker: usize) -> u64 {
        self.loader.fleet.snapshot()[worker].epoch
    }
}

#[tokio::test]
async fn models_are_loaded_as_workers_serve_them_and_dropped_with_the_last_one() {
    let mut setup = Setup::new(
        &[("one", "tiny"), ("two", "tiny_sp"), ("unused", "tiny")],
        "",
    );
    setup.loader.round().await;
    assert!(setup.loader.tokenizers.current().loaded().next().is_none());
    setup.register("a", "one");
    setup.register("b", "two");
    setup.register("c", "none");
    setup.loader.round().await;
    assert_eq!(setup.entry("one").0, "loaded");
    assert_eq!(setup.entry("two").0, "loaded");
    assert_ne!(setup.version("one"), setup.version("two"));
    let none = ("missing", "no tokenizer is configured for it".to_owned());
    assert_eq!(setup.entry("none"), none);
    assert_eq!(setup.loader.tokenizers.current().loaded().count(), 2);
    // Its checks are void, so that they are done with the tokenizer.
    let epoch = setup.epoch(0);
    setup.loader.round().await;
    assert_eq!(setup.epoch(0), epoch, "nothing has changed");
    setup.register("a", "two");
    setup.loader.round().await;
    let table = setup.loader.tokenizers.current();
    assert!(table.get("one").is_none() && table.loaded().count() == 1);
}

#[tokio::test]
async fn a_reload_keeps_equal_files_and_replaces_changed_ones() {
    let mut setup = Setup::new(&[("one", "tiny"), ("two", "tiny")], "");
    setup.register("a", "one");
    setup.register("b", "two");
    setup.loader.round().await;
    let before = [setup.version("one"), setup.version("two")];
    let (first, second) = (setup.epoch(0), setup.epoch(1));
    fs::write(
        setup.dir.path().join("two/chat_template.jinja"),
        "{{ messages }}",
    )
    .unwrap();
    setup.loader.round().await;
    assert_eq!(setup.version("two"), before[1], "not read before a reload");
    setup.set("");
    setup.loader.round().await;
    assert_eq!(setup.version("one"), before[0]);
    assert_eq!(setup.epoch(0), first, "credit does not pause");
    assert!(setup.version("two") > before[1]);
    assert!(setup.epoch(1) > second, "compared again");
}

#[tokio::test]
async fn a_broken_file_keeps_the_old_tokenizer_and_says_why() {
    let mut setup = Setup::new(&[("one", "tiny")], "");
    setup.register("a", "one");
    setup.loader.round().await;
    let version = setup.version("one");
    let file = setup.dir.path().join("one/tokenizer.json");
    let good = fs::read(&file).unwrap();
    fs::write(&file, "{").unwrap();
    setup.set("");
    setup.loader.round().await;
    let (state, problem) = setup.entry("one");
    assert_eq!(state, "loaded");
    assert!(problem.contains("tokenizer.json"), "{problem}");
    assert_eq!(setup.version("one"), version);
    let failed = "tokenizer_loads_total{outcome=\"failed\"}";
    assert_eq!(setup.loader.metrics.value(failed), 1);
    fs::write(&file, good).unwrap();
    setup.loader.retry_at = Instant::now();
    setup.loader.round().await;
    assert_eq!(setup.entry("one"), ("loaded", String::new()));
    assert_eq!(setup.version("one"), version, "the content is the old one");
}

#[tokio::test]
async fn the_bound_in_bytes_leaves_later_models_without_a_tokenizer() {
    let bytes = fs::metadata(format!("{FIXTURES}/tiny/tokenizer.json"))
        .unwrap()
        .len();
    let bound = |models: u64| format!("max_tokenizer_bytes = {}", bytes * models);
    let mut setup = Setup::new(&[("one", "tiny"), ("two", "tiny")], &bound(1));
    setup.register("a", "one");
    setup.register("b", "two");
    setup.loader.round().await;
    assert_eq!(setup.entry("one").0, "loaded");
    let (state, problem) = setup.entry("two");
    assert_eq!(state, "missing");
    assert!(problem.contains("max_tokenizer_bytes"), "{problem}");
    setup.set(&bound(2));
    setup.loader.round().await;
    assert_eq!(setup.entry("two").0, "loaded");
}

/// Names of one engine, and models with one tokenizer, share it.
#[tokio::test]
async fn one_source_is_loaded_once() {
    let mut setup = Setup::new(&[("one", "tiny")], "");
    let one = setup.dir.path().join("one");
    setup.set(&format!(
        "[models.x]\ntokenizer = {one:?}\naliases = [\"y\"]\n"
    ));
    for (worker, model) in [("a", "one"), ("b", "x"), ("c", "y")] {
        setup.register(worker, model);
    }
    setup
        .loader
        .tokenizers
        .note_root("one", "/any/one".to_owned());
    setup.loader.round().await;
    assert_eq!(setup.version("one"), setup.version("x"));
    assert_eq!(setup.version("y"), setup.version("x"));
    let loaded = "tokenizer_loads_total{outcome=\"loaded\"}";
    assert_eq!(setup.loader.metrics.value(loaded), 1);
    // Another rule is another tokenizer.
    let kwargs = "default_chat_template_kwargs = { a = 1 }";
    setup.set(&format!("[models.x]\ntokenizer = {one:?}\n{kwargs}\n"));
    setup.loader.round().await;
    assert_ne!(setup.version("one"), setup.version("x"));
}
