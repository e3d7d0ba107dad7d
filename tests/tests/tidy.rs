//! House rules that no compiler checks: sizes, purity, honest docs.
//!
//! Production lines are those outside `#[cfg(test)]` modules, `tests/`, `benches/` and `fuzz/`.
#![expect(
    clippy::unwrap_used,
    reason = "a test fails by panicking, its helpers too"
)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const FILE_LINES_MAX: usize = 800;
const FILE_LINES_MEDIAN_MAX: usize = 250;
const LINE_CHARS_MAX: usize = 110;
const STRUCT_FIELDS_MAX: usize = 20;
const CRATES: [&str; 5] = ["proto", "publisher-shim", "indexer", "router", "tests"];

/// Modules without IO, clock, runtime or chance of their own, as path prefixes.
const PURE: [&str; 25] = [
    "proto/src/codec.rs",
    "proto/src/digest.rs",
    "proto/src/hash.rs",
    "proto/src/ids.rs",
    "proto/src/load.rs",
    "proto/src/message.rs",
    "proto/src/query.rs",
    "proto/src/record.rs",
    "proto/src/registry.rs",
    "proto/src/sequence.rs",
    "proto/src/snapshot.rs",
    "proto/src/subject.rs",
    "proto/src/view.rs",
    "publisher-shim/mirror/src",
    "indexer/index/src",
    "router/src/fleet/breaker.rs",
    "router/src/fleet/checks.rs",
    "router/src/fleet/drain_table.rs",
    "router/src/fleet/health.rs",
    "router/src/fleet/models.rs",
    "router/src/fleet/state.rs",
    "router/chat/src/openai",
    "router/chat/src/tokenize",
    "router/route/src",
    "router/sim/src",
];

/// What a pure module must not name, besides `fastrand`'s own generator ([`by_chance`]).
const IMPURE: [&str; 10] = [
    "tokio::",
    "reqwest::",
    "axum::",
    "zmq::",
    "Instant::now",
    "SystemTime::now",
    "std::env",
    "std::fs",
    "std::net",
    "Rng::new()",
];

/// Names one of `fastrand`'s functions: types have capitals, and their seeds are arguments.
fn by_chance(code: &str) -> bool {
    let mut uses = code.split("fastrand::").skip(1);
    uses.any(|rest| rest.starts_with(|c: char| c.is_lowercase()))
}

struct Source {
    path: String,
    text: String,
}

impl Source {
    /// Lines up to the test module, which stands last in a file, where it is not a file of its own.
    fn production(&self) -> impl Iterator<Item = &str> {
        let end = self
            .text
            .find("\n#[cfg(test)]\nmod tests {")
            .unwrap_or(self.text.len());
        self.text[..end].lines()
    }

    fn is_test(&self) -> bool {
        let parts: Vec<&str> = self.path.split('/').collect();
        let Some(src) = parts.iter().position(|part| *part == "src") else {
            return true;
        };
        parts.last() == Some(&"tests.rs")
            || parts[src..].contains(&"tests")
            || parts.contains(&"tests_support")
            || parts.last() == Some(&"testing.rs")
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_path_buf()
}

fn files(dir: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(dir) else {
        return;
    };
    let mut entries: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && !name.starts_with('.') && name != "target" {
            files(&path, ending, found);
        } else if name.ends_with(ending) {
            found.push(path);
        }
    }
}

fn sources() -> Vec<Source> {
    let root = root();
    let mut paths = Vec::new();
    for name in CRATES {
        files(&root.join(name), ".rs", &mut paths);
    }
    paths
        .into_iter()
        .map(|path| Source {
            text: fs::read_to_string(&path).unwrap(),
            path: path
                .strip_prefix(&root)
                .unwrap()
                .to_string_lossy()
                .into_owned(),
        })
        .collect()
}

fn none(faults: &[String]) {
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn files_are_small() {
    let sources = sources();
    let production: Vec<&Source> = sources.iter().filter(|source| !source.is_test()).collect();
    let mut lengths: Vec<usize> = production
        .iter()
        .map(|source| source.production().count())
        .collect();
    let faults: Vec<String> = production
        .iter()
        .zip(&lengths)
        .filter(|(_, lines)| **lines > FILE_LINES_MAX)
        .map(|(source, lines)| format!("{}: {lines} production lines", source.path))
        .collect();
    none(&faults);
    lengths.sort_unstable();
    let median = lengths[lengths.len() / 2];
    assert!(
        median <= FILE_LINES_MEDIAN_MAX,
        "the median file has {median} lines"
    );
}

#[test]
fn lines_are_short() {
    let mut faults = Vec::new();
    for source in sources() {
        for (number, line) in (1..).zip(source.text.lines()) {
            if line.chars().count() > LINE_CHARS_MAX && !line.contains("https://") {
                faults.push(format!("{}:{number}", source.path));
            }
        }
    }
    none(&faults);
}

#[test]
fn structs_have_few_fields() {
    let mut faults = Vec::new();
    for source in sources() {
        let mut open: Option<(&str, usize)> = None;
        for line in source.production() {
            if line.contains("struct ") && line.ends_with('{') {
                open = Some((line.trim(), 0));
            } else if line.trim_start() == "}" {
                open = None;
            } else if let Some((name, fields)) = &mut open
                && line.contains(": ")
                && !line.trim_start().starts_with("//")
                && !line.trim_start().starts_with('#')
            {
                *fields += 1;
                if *fields == STRUCT_FIELDS_MAX + 1 {
                    faults.push(format!("{}: {name}", source.path));
                }
            }
        }
    }
    none(&faults);
}

#[test]
fn pure_modules_are_pure() {
    let mut faults = Vec::new();
    let sources = sources();
    for pure in PURE {
        let mut seen = false;
        for source in sources
            .iter()
            .filter(|source| source.path.starts_with(pure))
        {
            seen = true;
            if source.is_test() {
                continue;
            }
            for (number, line) in (1..).zip(source.production()) {
                let code = line.split("//").next().unwrap_or("");
                let named = IMPURE.iter().find(|name| code.contains(*name));
                let chance = by_chance(code).then_some(&"fastrand's own generator");
                if let Some(name) = named.or(chance) {
                    faults.push(format!("{}:{number}: {name}", source.path));
                }
            }
        }
        assert!(seen, "{pure} is listed as pure and does not exist");
    }
    none(&faults);
}

#[test]
fn production_is_all_but_the_test_module() {
    let of = |text: &str| {
        let (path, text) = (String::new(), text.to_owned());
        Source { path, text }
            .production()
            .collect::<Vec<_>>()
            .join("|")
    };
    let beside = "a\n#[cfg(test)]\nmod tests;\nb\n";
    assert_eq!(of(beside), "a|#[cfg(test)]|mod tests;|b");
    assert_eq!(of("a\n#[cfg(test)]\nmod tests {\nb\n}\n"), "a");
    assert!(by_chance("fastrand::u64(..)") && !by_chance("use fastrand::Rng;"));
}

#[test]
fn nothing_is_left_unfinished() {
    let marks = [
        ["FIX", "ME"].concat(),
        ["TO", "DO"].concat(),
        ["unimpl", "emented!"].concat(),
    ];
    let mut faults = Vec::new();
    for source in sources() {
        for (number, line) in (1..).zip(source.text.lines()) {
            if marks.iter().any(|mark| line.contains(mark.as_str())) {
                faults.push(format!("{}:{number}: {line}", source.path));
            }
        }
    }
    none(&faults);
}

#[test]
fn every_crate_forbids_unsafe_code() {
    for name in CRATES {
        let lib = fs::read_to_string(root().join(name).join("src/lib.rs")).unwrap();
        assert!(lib.contains("#![forbid(unsafe_code)]"), "{name}");
        assert!(lib.starts_with("//!"), "{name}: lib.rs says what it is");
    }
}

fn documents() -> Vec<PathBuf> {
    let root = root();
    let mut found = Vec::new();
    files(&root.join("docs"), ".md", &mut found);
    files(&root.join("deploy"), ".md", &mut found);
    found.push(root.join("README.md"));
    found.push(root.join("CHANGELOG.md"));
    found
}

#[test]
fn links_of_documents_resolve() {
    let mut faults = Vec::new();
    for path in documents() {
        let text = fs::read_to_string(&path).unwrap();
        for link in text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next())
        {
            let target = link.split('#').next().unwrap_or("");
            let local = !target.is_empty() && !target.contains("://");
            if local && !path.parent().unwrap().join(target).exists() {
                faults.push(format!("{}: {link}", path.display()));
            }
        }
    }
    none(&faults);
}

/// The code map names every module of every crate and nothing else.
#[test]
fn code_map_is_complete() {
    let root = root();
    let map = fs::read_to_string(root.join("docs/ARCHITECTURE.md")).unwrap();
    assert!(
        map.lines().count() <= 300,
        "the architecture is read in one sitting"
    );
    let named: BTreeSet<String> = map
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|name| name.contains("/src/") || name.contains("/tests/"))
        .map(|name| name.trim_end_matches('/').to_owned())
        .collect();
    let mut faults: Vec<String> = named
        .iter()
        .filter(|name| !root.join(name).exists())
        .map(|name| format!("the code map names {name}, which does not exist"))
        .collect();
    for source in sources().iter().filter(|source| !source.is_test()) {
        let known = named
            .iter()
            .any(|name| source.path == *name || source.path.starts_with(&format!("{name}/")));
        let wiring = ["lib.rs", "main.rs"]
            .iter()
            .any(|name| source.path.ends_with(name));
        if !known && !wiring {
            faults.push(format!("{} is missing in the code map", source.path));
        }
    }
    none(&faults);
}

/// Where a binary names its metrics, without the prefix that is theirs.
const METRICS: [(&str, &[&str]); 4] = [
    (
        "warmroute_router_",
        &["router/src/metrics.rs", "router/src/metrics/"],
    ),
    (
        "warmroute_indexer_",
        &["indexer/src/metrics.rs", "indexer/src/metrics/"],
    ),
    ("warmroute_shim_", &["publisher-shim/src/metrics.rs"]),
    ("warmroute_nats_", &["proto/process/src/nats.rs"]),
];

/// The words of a text that may be metrics: those that begin like them and go on behind the prefix.
fn metrics_in<'a>(text: &'a str, prefix: &'a str) -> impl Iterator<Item = &'a str> {
    text.match_indices(prefix).filter_map(|(at, _)| {
        let rest = &text[at + prefix.len()..];
        let end = rest.find(|c: char| !c.is_ascii_lowercase() && c != '_' && !c.is_ascii_digit());
        let name = &rest[..end.unwrap_or(rest.len())];
        // `warmroute_router_sync_*` is a family.
        (!name.is_empty() && !name.ends_with('_')).then_some(name)
    })
}

/// An alert on a name that nobody has is silent for ever.
#[test]
fn metrics_in_documents_and_alerts_exist() {
    let sources = sources();
    let root = root();
    let mut paths = documents();
    // It tells of names that are gone.
    paths.retain(|path| !path.ends_with("CHANGELOG.md"));
    files(&root.join("deploy"), ".yml", &mut paths);
    let (mut faults, mut alerts) = (Vec::new(), 0);
    for path in paths {
        let text = fs::read_to_string(&path).unwrap();
        for (prefix, places) in METRICS {
            let named_in = |source: &&Source| places.iter().any(|at| source.path.starts_with(at));
            let code: Vec<&Source> = sources.iter().filter(named_in).collect();
            assert!(!code.is_empty(), "nobody has {prefix}");
            let exists = |name: &str| {
                let literal = format!("\"{name}\"");
                code.iter().any(|source| source.text.contains(&literal))
            };
            for name in metrics_in(&text, prefix) {
                alerts += usize::from(path.ends_with("rules.yml"));
                let of_histogram = ["_bucket", "_sum", "_count"].map(|end| name.strip_suffix(end));
                if !exists(name) && !of_histogram.into_iter().flatten().any(exists) {
                    faults.push(format!("{}: {prefix}{name}", path.display()));
                }
            }
        }
    }
    none(&faults);
    assert!(alerts > 15, "the alerts were not read");
}

/// Text that speaks of the machine it was written on helps no reader.
#[test]
fn nothing_names_a_machine() {
    let private = [
        ["/wo", "rk/"].concat(),
        ["/ro", "ot/"].concat(),
        ["/ho", "me/"].concat(),
    ];
    let root = root();
    let mut paths = documents();
    for name in CRATES {
        files(&root.join(name), ".rs", &mut paths);
        files(&root.join(name), ".sh", &mut paths);
        files(&root.join(name), ".py", &mut paths);
        files(&root.join(name), ".md", &mut paths);
    }
    let mut faults = Vec::new();
    for path in paths {
        let text = fs::read_to_string(&path).unwrap();
        if let Some(name) = private.iter().find(|name| text.contains(name.as_str())) {
            faults.push(format!("{}: {name}", path.display()));
        }
    }
    none(&faults);
}
